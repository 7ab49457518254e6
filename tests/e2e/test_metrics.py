"""The metrics of a deployment without Ray: a router process, whole workers, and what Prometheus would read.

Every metric that is defined moves under ordinary traffic, or is named here with the fault that moves it; and what the
workers count, the router streams and clients receive is the same.
"""

import json
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.client import BatonClient
from baton.cluster.commands.status import status
from baton.cluster.doctor import doctor
from baton.cluster.doctor.decode_report import decode_data, format_decode
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import BatonError
from baton.core.requests.sampling import SamplingParams
from baton.decode_worker.node import DecodeNode
from baton.prefill_worker.node import PrefillNode
from baton.tests.e2e.conftest import TINY
from baton.tests.worker.test_nodes import worker_config

BY_FAULTS = {
    "cuda_graphs": "a GPU: tests/core/test_worker_metrics.py",
    "decode_graph_steps": "likewise",
    "kernel_form": "how a worker was started, which does not change: tests/core/test_worker_metrics.py",
    "expert_balance": "ranks whose experts move: tests/e2e/test_moving_experts.py",
    "expert_moves": "likewise",
    "kernel_library_refused": "a GPU, and float8 weights: likewise",
    "kernel_compiles": "a GPU: tests/core/test_worker_metrics.py",
    "kernel_untuned_shapes": "a GPU, and a model that no table knows: likewise",
    "outputs_not_finite": "damaged KV: tests/engine/test_not_finite.py, tests/router/test_worker_metrics.py",
    "gc_seconds": "a worker with a process of its own: tests/runbook/test_runbooks.py",
    "grammar_seconds": "an answer with a slow grammar: tests/core/test_worker_metrics.py",
    "state_checkpoints": "a model whose layers keep state: tests/router/test_fleet_metrics.py",
    "state_checkpoints_evicted": "likewise",
    "preemptions": "too few KV blocks: tests/e2e/test_preemption.py",
    "recomputed_tokens": "likewise",
    "offloaded_blocks": "likewise, with host memory",
    "restored_blocks": "likewise",
    "host_kv_full": "likewise, with too little of it",
    "worker_up": "a worker that is lost: tests/router/test_fleet_metrics.py",
    "worker_incarnations": "a worker that is started again: likewise",
    "worker_unfit": "a worker that hangs: tests/router/test_canaries.py",
    "canaries": "a worker that is idle for long: likewise",
    "handoff_retries": "a failed hand-off: tests/router/test_attempts.py",
    "retries_refused": "more of them than the retry budget allows: likewise",
    "migrations": "a lost worker: tests/router/test_migration.py",
    "router_requests_waiting": "more requests than workers take: tests/router/test_gate.py",
    "router_requests_refused": "likewise, and more than fit their deadlines",
    "prefix_index_gaps": "a change that was missed: tests/router/test_prefix_feed.py",
    "prefix_index_ignored": "more names than the index holds: tests/router/test_prefix_index.py",
    "requests_refused": "a call without its credential: tests/router/test_security.py, test_inside_calls.py",
    "security_reloads": "certificates or keys that change: tests/router/test_security.py",
    "tls_connections_refused": "a connection that comes to no call: likewise",
    "kv_transfer_resent": "a lost frame: tests/kvtransfer/test_services.py",
    "kv_transfer_late_dropped": "a cancel while frames are on their way: tests/kvtransfer/test_services.py",
    "kv_transfer_refused": "a stranger at the KV port: tests/kvtransfer/test_proof.py, test_strangers.py",
    "kv_transfer_corrupt": "a damaged frame: tests/kvtransfer/test_services.py",
    "kv_transfer_quarantined_blocks": "a cancel while an incoming transfer is open: tests/e2e/test_faults.py",
    "kv_transfer_fallbacks": "a data path that does not work: tests/kvtransfer/test_data_paths.py",
    "kv_transfer_credit_stall_seconds": "a decode worker slower than the network: tests/worker/test_transfer_counts.py",
}
FATES = ("kept", "cut", "late", "failed")
SETTLE_S = 5.0
MAX_NUM_SEQS = 4


class Running:
    """A router process, a prefill and a decode worker."""

    def __init__(self, *flags, stderr=None, **more):
        command = [sys.executable, "-P", "-m", "baton.router", "--model-name", "tiny", "--model-path", str(TINY)]
        command += ["--port", "0", "--metrics-port", "0", "--exit-with-parent"]
        command += ["--local-prefill", "never"]  # the hand-over is counted, too
        command += ["--canary-idle-s", "0", *flags]  # what is counted is the clients'
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        ports = json.loads(self.process.stdout.readline())
        self.address = f"127.0.0.1:{ports['grpc_port']}"
        self._url = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
        self.fatal = []
        config = {"router_address": self.address, "max_num_seqs": MAX_NUM_SEQS, "max_queue_len": 64} | more
        self.prefill = PrefillNode(worker_config("prefill-0", **config), self.fatal.append)
        self.decode = DecodeNode(worker_config("decode-0", **config), self.fatal.append)
        self.wait(lambda found: len([key for key in found if key[0] == "baton_kv_cache_usage"]) == 2)

    def close(self):
        self.prefill.close()
        self.decode.close()
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(10) == 0
        assert self.fatal == []

    def scrape(self):
        """Samples by name and labels; the moment at which a series began is none of ours."""
        with urllib.request.urlopen(self._url, timeout=5) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
        return {(item.name, frozenset(item.labels.items())): item.value for item in samples}

    def families(self):
        with urllib.request.urlopen(self._url, timeout=5) as reply:
            names = [family.name for family in text_string_to_metric_families(reply.read().decode())]
        return [name for name in names if not name.endswith("_created")]

    def wait(self, holds, timeout_s=SETTLE_S):
        """The first scrape of which `holds` is true."""
        deadline_s = time.monotonic() + timeout_s
        while not holds(found := self.scrape()):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def running():
    deployment = Running()
    yield deployment
    deployment.close()


def total(found, name, **labels):
    """Sum over all series with these labels."""
    wanted = set(labels.items())
    return sum(value for (key, have), value in found.items() if key == f"baton_{name}" and wanted <= have)


def is_settled(found):
    """Whether nothing runs, and the copy of the counters has caught up with what was read."""
    rows, tokens = total(found, "decode_computed_rows_total"), total(found, "decode_computed_tokens_total")
    return (
        total(found, "num_streams_open") == total(found, "num_requests_running") == 0
        and rows == total(found, "decode_rows_total")
        and tokens == total(found, "decode_tokens_total")
    )


class Reader(threading.Thread):
    """Reads an answer, or the first `num_chunks` of its chunks."""

    def __init__(self, client, prompt, num_chunks=None, **sampling):
        super().__init__(daemon=True)
        self.num_tokens = self.num_first = 0
        self.errors = []
        self._num_chunks = num_chunks
        self._chunks = client.generate(token_ids=prompt, sampling=SamplingParams(temperature=0.0, **sampling))
        self.start()

    def run(self):
        try:
            for at, chunk in enumerate(self._chunks):
                self.num_first += at == 0
                self.num_tokens += len(chunk.token_ids)
                if self._num_chunks is not None and at + 1 == self._num_chunks:
                    self._chunks.close()
                    return
        except BatonError as error:
            self.errors.append(error)


def prompt_of(at):
    return tuple(300 + (at * 37 + n * n) % 900 for n in range(30 + at))


def read_all(client, num, **more):
    readers = [Reader(client, prompt_of(at), max_tokens=40 + at, ignore_eos=True, **more) for at in range(num)]
    for reader in readers:
        reader.join(60.0)
    assert [reader.errors for reader in readers] == [[]] * num
    return readers


def test_clients_receive_what_workers_kept_and_devices_computed(running):
    before = running.wait(is_settled)
    with BatonClient(running.address) as client:
        readers = read_all(client, 8)
    found = running.wait(lambda found: is_settled(found) and total(found, "decode_steps_total") > 0)

    def moved(name, **labels):
        return total(found, name, **labels) - total(before, name, **labels)

    num_tokens = sum(reader.num_tokens for reader in readers)
    assert num_tokens == sum(40 + at for at in range(8))
    assert moved("generation_tokens_total") == num_tokens
    assert moved("decode_tokens_total", fate="kept") == num_tokens - len(readers)
    assert moved("decode_computed_tokens_total") == sum(moved("decode_tokens_total", fate=fate) for fate in FATES)
    assert moved("decode_computed_rows_total") == sum(moved("decode_rows_total", fate=fate) for fate in FATES)
    accepted = [moved("accepted_tokens_per_position_total", position=str(place)) for place in range(2)]
    proposed = [moved("draft_tokens_per_position_total", position=str(place)) for place in range(2)]
    assert sum(accepted) == moved("spec_decode_num_accepted_tokens_total")
    assert sum(proposed) == moved("spec_decode_num_draft_tokens_total")
    assert proposed[0] == moved("spec_decode_num_drafts_total") == moved("decode_rows_total", fate="kept")
    assert 0 < accepted[1] <= accepted[0] <= proposed[0] == proposed[1]
    kept_and_cut = moved("decode_tokens_total", fate="kept") + moved("decode_tokens_total", fate="cut")
    assert kept_and_cut == proposed[0] + sum(accepted)
    assert moved("decode_method_steps_total", method="head") == moved("decode_steps_total")
    assert moved("decode_method_draft_tokens_total", method="head") == sum(proposed)
    assert moved("decode_method_accepted_tokens_total", method="head") > 0
    assert moved("decode_step_seconds_count") == moved("decode_steps_total") == moved("decode_step_tokens_count")
    assert moved("decode_step_tokens_sum") == moved("decode_tokens_total", fate="kept")
    assert 0 < moved("decode_host_gap_seconds_count") < moved("decode_steps_total")


def test_cancels_lose_no_count(running):
    before = running.wait(is_settled)
    with BatonClient(running.address) as client:
        readers = [
            Reader(client, prompt_of(at), num_chunks=1 + at % 5, max_tokens=300, ignore_eos=True) for at in range(10)
        ]
        for reader in readers:
            reader.join(60.0)
    found = running.wait(is_settled)
    kept = total(found, "decode_tokens_total", fate="kept") - total(before, "decode_tokens_total", fate="kept")
    streamed = total(found, "generation_tokens_total") - total(before, "generation_tokens_total")
    received = sum(reader.num_tokens for reader in readers)
    assert received <= streamed <= kept + len(readers)


def test_every_metric_moves_or_says_what_moves_it(running):
    """With more requests than slots, an answer that a stop token ends, one that is refused, one that is dropped."""
    scrapes = [running.scrape()]
    with BatonClient(running.address) as client:
        long = [Reader(client, prompt_of(at), max_tokens=120, ignore_eos=True) for at in range(2 * MAX_NUM_SEQS)]
        dropped = Reader(client, prompt_of(50), num_chunks=2, max_tokens=300, ignore_eos=True)
        stopped = Reader(client, prompt_of(51), max_tokens=300, stop_token_ids=tuple(range(0, 4096, 7)))
        refused = Reader(client, (1,) * 5000, max_tokens=5)
        while any(reader.is_alive() for reader in (*long, dropped, stopped, refused)):
            scrapes.append(running.scrape())
            time.sleep(0.1)
    assert len(refused.errors) == 1
    scrapes.append(running.wait(is_settled))
    moved = {
        name
        for found in scrapes
        for (name, labels), value in found.items()
        if value != scrapes[0].get((name, labels), 0)
    }
    names = running.families()
    assert all(name.startswith("baton_") for name in names)
    still = {
        name.removeprefix("baton_")
        for name in names
        if not moved & {name, f"{name}_total", f"{name}_sum", f"{name}_count", f"{name}_bucket"}
    }
    assert still <= set(BY_FAULTS), still - set(BY_FAULTS)
    assert {f"baton_{name}" for name in BY_FAULTS} <= set(names), "a name that is defined no more"
    reasons = {dict(labels).get("reason") for (name, labels) in scrapes[-1] if name == "baton_num_requests_waiting"}
    assert reasons == {"turn", "prefill", "blocks", "transfer", "slot", "preempted"}


def test_status_says_what_decode_steps_did(running, capsys):
    assert status(running.address, Output(True)) is ExitCode.OK
    data = json.loads(capsys.readouterr().out)
    [decode] = data["decode"]
    [state] = [worker["state"] for worker in data["workers"] if worker["state"]["role"] == "decode"]
    assert decode["worker"] == "decode-0"
    assert decode["num_steps"] == state["inventory"]["steps"]["num_steps"] > 0
    assert decode["rows"]["kept"]["num_tokens"] == state["inventory"]["num_emitted_tokens"]
    assert 0 < decode["acceptance_per_position"][1] <= decode["acceptance_per_position"][0] <= 1
    assert 1 < decode["mean_acceptance_len"] <= 3
    assert decode["tokens_per_step"] > 1
    assert 0 <= decode["host_gap_ms"]["p50"] <= decode["host_gap_ms"]["p99"]
    assert 0 < decode["step_ms"]["p50"] <= decode["step_ms"]["p99"]
    with BatonClient(running.address) as client:
        reply = client.status()
    assert decode_data(reply)[0]["worker"] == "decode-0"
    text = format_decode(decode_data(reply))
    assert text.splitlines()[0].split()[:2] == ["decode", "steps"]
    assert format_decode([]) == "no live decode worker"
    assert status(running.address, Output(False)) is ExitCode.OK
    assert "acceptance length" in capsys.readouterr().out


def test_doctor_says_the_same(running, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "check_all", lambda port: iter([]))
    doctor.doctor(Output(True), grpc_port=0, selftest=False, address=running.address)
    told = json.loads(capsys.readouterr().out)
    [decode] = told["decode"]
    assert sorted(item["worker"] for item in told["compute"]) == ["decode-0", "prefill-0"]
    for item in told["compute"]:
        found = {name: item[name] for name in ("form", "why", "device", "quantization", "num_library_refused")}
        why = "device cpu, dtype float64"
        wanted = {"form": "reference", "why": why, "device": "cpu", "quantization": "none", "num_library_refused": 0}
        assert found == wanted
    assert not [finding for finding in told["findings"] if "kernels of" in finding["name"]]
    with BatonClient(running.address) as client:
        assert decode == json.loads(json.dumps(decode_data(client.status())[0]))
    doctor.doctor(Output(False), grpc_port=0, selftest=False, address=running.address)
    text = capsys.readouterr().out
    assert "accepted by position" in text
    assert "torch reference" in text
