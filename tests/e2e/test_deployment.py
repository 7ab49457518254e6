"""All of Baton on real Ray: actors, router process, gRPC; one cell of the flagship test, and every kind of end.

Faults here are real ones: signals to real processes, clients that vanish. What a fault may leave behind is nothing.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest
import torch

from baton.client import BatonClient
from baton.cluster.deployment import Deployment
from baton.cluster.ray import worker_watch
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, RequestCancelled
from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import MAX_TOKENS, local_tokens

pytestmark = pytest.mark.ray

RELEASE_S = 4.0  # after a cancel: two leases
RELEASE_AFTER_DEATH_S = 5.0
NEXT_INCARNATION_S = 60.0  # of a worker, and of a stream that waits for it
CONFIG = {
    "num_speculative_tokens": 2,
    "dtype": "float64",
    "grpc_port": 0,
    "max_num_batched_tokens": 48,
    "kv_memory_mib": 64,
    "http_port": 0,
}
CONFIG |= {"migration_wait_s": NEXT_INCARNATION_S, "local_prefill": "never"}  # pushes are to be hit
CONFIG |= {"max_wait_s": 120.0}  # on a machine that is busy with other things nobody is to be refused


@pytest.fixture(scope="module")
def deployment():
    with Deployment(ServeConfig.from_mapping(CONFIG)) as running:
        yield running


@pytest.fixture
def client(deployment):
    with BatonClient(deployment.address) as client:
        yield client


@pytest.fixture(scope="module")
def long_request(tokenizer):
    """1500 prompt tokens in 32 chunks: more than a second of pushing."""
    prompt = token_prompts(tokenizer, 8, max_len=1500)[7]
    return requests_for([prompt], sampled=False, num_drafts=2, max_tokens=200)[0]


def held(client):
    """What live workers hold of any request."""
    return [
        (worker.state.worker_id, worker.state.inventory)
        for worker in client.inventory().workers
        if worker.alive
        and (
            worker.state.inventory.num_blocks_free != worker.state.inventory.num_blocks
            or worker.state.inventory.num_requests_held
            or worker.state.inventory.num_kv_receives
            or worker.state.inventory.num_slots_in_use
            or worker.state.inventory.num_blocks_quarantined
        )
    ]


def wait_idle(client, timeout_s):
    start_s = time.monotonic()
    while left := held(client):
        assert time.monotonic() - start_s < timeout_s, left
        time.sleep(0.02)
    return time.monotonic() - start_s


def generate(client, request):
    chunks = list(client.generate(token_ids=request.prompt_token_ids, sampling=request.sampling))
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish


class Reader(threading.Thread):
    """Reads one stream in a thread; keeps the tokens, and the error it ended with."""

    def __init__(self, client, request):
        super().__init__(daemon=True)
        self.token_ids, self.error, self.first_s, self.ended_s = [], None, None, None
        # A tenant of its own: a fault in the middle of a prompt needs one that is computed anew.
        tenant = secrets.token_hex(8)
        self._chunks = client.generate(token_ids=request.prompt_token_ids, sampling=request.sampling, tenant=tenant)
        self.start()

    def run(self):
        try:
            for chunk in self._chunks:
                self.first_s = self.first_s or time.monotonic()
                self.token_ids.extend(chunk.token_ids)
        except BatonError as error:
            self.error = error
        self.ended_s = time.monotonic()


def test_http_is_served_beside_grpc(deployment, client):
    with openai.OpenAI(base_url=f"{deployment.http_url}/v1", api_key="none") as over_http:
        answer = over_http.completions.create(model="tiny", prompt="import", max_tokens=8, temperature=0.0)
        want = client.generate_text("import", sampling=SamplingParams(max_tokens=8, temperature=0.0))
        assert answer.choices[0].text == want


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
def test_tokens_through_ray_equal_one_process(client, tokenizer, load_tiny, sampled):
    prompts = token_prompts(tokenizer, 10)
    requests = requests_for(prompts, sampled=sampled, num_drafts=0, max_tokens=MAX_TOKENS)
    want = local_tokens(load_tiny(torch.float64, with_mtp=False), tokenizer, requests)
    for request, expected in zip(requests, want, strict=True):
        token_ids, finish = generate(client, request)
        assert token_ids == expected
        assert finish.stats.output_len == len(token_ids)
        if finish.stats.decode_worker:
            assert finish.stats.num_decode_tokens + 1 == len(token_ids)
    wait_idle(client, RELEASE_S)


def test_cancel_at_ten_points_leaves_nothing(deployment, client, tokenizer):
    prompt = token_prompts(tokenizer, 8, max_len=600)[7]
    request = requests_for([prompt], sampled=False, num_drafts=2, max_tokens=60)[0]
    start_s = time.monotonic()
    want, _ = generate(client, request)
    duration_s = time.monotonic() - start_s
    for tenth in range(10):
        with BatonClient(deployment.address) as other:
            reader = Reader(other, request)
            time.sleep(duration_s * tenth / 10)
        # Leaving the block closed the client's channel: every leg of the request must hear of it.
        reader.join(5.0)
        assert not reader.is_alive()
        # All of the answer, or the beginning of it and the one error that closing is.
        assert (reader.token_ids == want) if reader.error is None else (type(reader.error) is RequestCancelled)
        assert reader.token_ids == want[: len(reader.token_ids)]
        wait_idle(client, RELEASE_S)
    assert generate(client, request)[0] == want


CLIENT = """
import sys
from baton.client import BatonClient
from baton.core.requests.sampling import SamplingParams
with BatonClient(sys.argv[1]) as client:
    for chunk in client.generate(token_ids=[300] * 600, sampling=SamplingParams(max_tokens=1200, ignore_eos=True)):
        print(len(chunk.token_ids), flush=True)
"""


def test_a_client_that_is_killed_leaves_nothing(deployment, client):
    process = subprocess.Popen([sys.executable, "-c", CLIENT, deployment.address], stdout=subprocess.PIPE, text=True)
    with process:
        for _ in range(3):
            assert process.stdout.readline()
        assert held(client)
        process.kill()
        killed_s = time.monotonic()
    wait_idle(client, RELEASE_S)
    assert time.monotonic() - killed_s < RELEASE_S + 1.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stream_whose_only_worker_is_killed_goes_on_with_its_next_life(
    deployment, client, long_request, role, capsys
):
    # Nobody has seen this prompt: what is cached would be pushed at once, and decoding begin before the kill.
    first, *others = long_request.prompt_token_ids
    request = dataclasses.replace(long_request, prompt_token_ids=(first + len(role), *others))
    before = {worker.state.worker_id: worker.state for worker in client.inventory().workers}
    worker_id = next(name for name in before if role in name)
    landed = before["decode-0"].inventory.kv_bytes
    reader = Reader(client, request)
    while client.inventory().workers and kv_bytes(client, "decode-0") <= landed + 100_000:
        assert reader.is_alive(), "the prompt was through before a push was seen"
    assert not reader.token_ids, "the kill must hit the pushes, not the decoding"
    deployment.kill_actor(worker_id)
    killed_s = time.monotonic()
    reader.join(NEXT_INCARNATION_S)
    assert not reader.is_alive(), "the stream hangs"
    assert reader.error is None, reader.error
    went_on_after_s = reader.first_s - killed_s
    wait_idle(client, RELEASE_AFTER_DEATH_S)
    wait_new_epoch(client, worker_id, before[worker_id].epoch)
    assert generate(client, request)[0] == reader.token_ids
    with capsys.disabled():
        print(f"\n{role} killed mid-push: the stream went on after {went_on_after_s:.2f} s, in the next incarnation")


def kv_bytes(client, worker_id):
    return next(w.state.inventory.kv_bytes for w in client.inventory().workers if w.state.worker_id == worker_id)


def wait_new_epoch(client, worker_id, old_epoch, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while True:
        for worker in client.status().workers:
            if worker.state.worker_id == worker_id and worker.alive and worker.state.epoch != old_epoch:
                return
        assert time.monotonic() < deadline_s, "the worker did not come back under a new epoch"
        time.sleep(0.05)


def test_a_stopped_worker_is_fenced_by_its_silence(deployment, client, long_request):
    """SIGSTOP: the process lives, its connections stay open, and it says nothing. Ray would never notice.

    There is no other worker, so the stream waits, and goes on where it was once that is heard of again.
    """
    want, _ = generate(client, long_request)
    pid = deployment.worker_pids()["decode-0"]
    reader = Reader(client, long_request)
    while reader.first_s is None:
        assert reader.is_alive()
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped_s = time.monotonic()
        while all(worker.alive for worker in client.status().workers):
            assert time.monotonic() - stopped_s < 15.0
            time.sleep(0.02)
    finally:
        os.kill(pid, signal.SIGCONT)
    reader.join(NEXT_INCARNATION_S)
    assert not reader.is_alive(), "the stream hangs"
    assert (reader.error, reader.token_ids) == (None, want)
    wait_idle(client, RELEASE_AFTER_DEATH_S)
    deadline_s = time.monotonic() + 10.0
    while not all(worker.alive for worker in client.status().workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert len(generate(client, long_request)[0]) > 1


def test_a_worker_that_stays_silent_is_killed_and_started_again(deployment, client, long_request, monkeypatch):
    """On a private Ray the process that serves does what a supervisor does in a cluster."""
    monkeypatch.setattr(worker_watch, "SILENT_S", 3.0)  # after its streams have moved, as ever, and not 20
    want, _ = generate(client, long_request)
    pid = deployment.worker_pids()["decode-0"]
    epoch = next(one.state.epoch for one in client.status().workers if one.state.worker_id == "decode-0")
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + NEXT_INCARNATION_S
    try:
        while not any(
            one.state.worker_id == "decode-0" and one.alive and one.state.epoch != epoch
            for one in client.status().workers
        ):
            assert time.monotonic() < deadline_s, "it stands still for good"
            deployment.check()
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert deployment.worker_pids()["decode-0"] != pid
    assert generate(client, long_request)[0] == want
