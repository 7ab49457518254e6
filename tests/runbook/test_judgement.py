"""What runbooks make of what they see: no deployment, only its messages."""

import pytest

from baton.core.clock import MonotonicClock
from baton.core.errors import PreconditionUnmet, StepFailed
from baton.proto import admin_pb2, worker_pb2
from baton.runbook import corruption_response, hung_tp_group, kv_leak_audit, partition_triage
from baton.runbook.common import processes
from baton.runbook.common.site import Site

pytestmark = pytest.mark.fast


def worker(name="decode-0", *, role="decode", streams=0, alive=True, epoch=7, **inventory):
    inventory = {"num_blocks": 10, "num_blocks_free": 10} | inventory
    state = worker_pb2.WorkerState(
        worker_id=name, role=role, epoch=epoch, inventory=worker_pb2.Inventory(**inventory), address="127.0.0.1:1"
    )
    return admin_pb2.WorkerStatus(state=state, alive=alive, num_streams=streams)


class Play(Site):
    """A site whose workers follow a script: each look is a list of workers, or (streams seen, held, streams seen)."""

    def __init__(self, looks):
        super().__init__("nowhere", MonotonicClock(), 60.0)
        self._looks, self._at = looks, 0

    def status(self):
        return admin_pb2.StatusReply(workers=self._looks[min(self._at, len(self._looks) - 1)])

    def inventory(self):
        return {item.state.worker_id: item for item in self.status().workers}

    def pause(self, seconds):
        self._at += 1


def audit(*looks):
    site = Play(looks)
    *_, watch, judge, complete = kv_leak_audit.Audit(site, (len(looks) - 1) * kv_leak_audit.SAMPLE_S).steps()
    watch.look()
    return site, judge.look, complete.look


@pytest.mark.parametrize(
    "held",
    [
        {"num_blocks_free": 9},
        {"num_blocks_quarantined": 1},
        {"num_kv_receives": 1},
        {"num_slots_in_use": 1},
        {"num_requests_waiting": 1},
    ],
)
def test_what_an_idle_worker_holds_all_the_time_is_a_leak(held):
    site, judge, _ = audit(*[[worker(**held)]] * 5)
    with pytest.raises(StepFailed, match="decode-0 holds 1 "):
        judge()
    assert sum(site.found["workers"]["decode-0"]["leaked"].values()) == 1


def test_what_it_held_for_a_while_is_none():
    _, judge, complete = audit(*[[worker(num_blocks_free=5)]] * 3, *[[worker()]] * 2)
    judge()
    complete()


def test_what_a_stream_holds_is_none_and_a_worker_that_was_never_idle_is_named():
    _, judge, complete = audit(*[[worker(streams=2, num_requests_held=2, num_blocks_free=1)]] * 5)
    judge()
    with pytest.raises(StepFailed, match="decode-0 never idle") as caught:
        complete()
    assert caught.value.fields["partial"]


def test_attends_beyond_streams_are_leaks_also_of_a_busy_worker():
    _, judge, _ = audit(*[[worker(streams=2, num_requests_held=3)]] * 5)
    with pytest.raises(StepFailed, match="attends to 1 "):
        judge()


def test_a_new_life_begins_anew():
    _, judge, complete = audit(*[[worker(num_blocks_free=5)]] * 3, *[[worker(epoch=8)]] * 3)
    judge()
    complete()


def test_a_silent_worker_is_named():
    _, judge, complete = audit(*[[worker(), worker("decode-1", alive=False, num_blocks_free=1)]] * 5)
    judge()
    with pytest.raises(StepFailed, match="decode-1 silent"):
        complete()


def counts(frames=100, corrupt=0, resent=0):
    return worker_pb2.TransferCounts(frames=frames, corrupt=corrupt, resent=resent)


@pytest.mark.parametrize(
    ("decode", "prefill", "suspects"),
    [
        ({"d0": counts(), "d1": counts()}, {"p0": counts(resent=9)}, []),
        ({"d0": counts(corrupt=1), "d1": counts()}, {"p0": counts(resent=1)}, ["d0"]),
        ({"d0": counts(corrupt=1), "d1": counts(corrupt=2)}, {"p0": counts(resent=3), "p1": counts()}, ["p0"]),
        ({"d0": counts(corrupt=1), "d1": counts(corrupt=2)}, {"p0": counts(resent=3)}, []),
        ({"d0": counts(corrupt=1), "d1": counts(frames=2)}, {"p0": counts(resent=1)}, []),  # d1 has not been tried
        ({"d0": counts(corrupt=1)}, {"p0": counts(resent=1), "p1": counts(frames=2)}, []),
    ],
)
def test_suspects_are_of_the_side_that_the_counts_tell(decode, prefill, suspects):
    corrupt = {name: item.corrupt for name, item in decode.items() if item.corrupt}
    assert corruption_response._suspects(corrupt, decode, prefill) == suspects


def path(address, data_path="", why=""):
    return worker_pb2.KvPath(kv_address=address, data_path=data_path, why=why)


def cluster(data_paths):
    """Workers of which p0 and p1 reach d0 and d1 as `data_paths` says."""
    found = []
    for name in ("d0", "d1"):
        decode = worker(name)
        decode.state.kv_address = name
        found.append(decode)
    for name in ("p0", "p1"):
        prefill = worker(name, role="prefill")
        paths = [
            path(to, data_path, "" if data_path else "no data path")
            for (of, to), data_path in data_paths.items()
            if of == name
        ]
        prefill.state.inventory.transfer.paths.extend(paths)
        found.append(prefill)
    return found


@pytest.mark.parametrize(
    ("broken", "cut_off"),
    [
        ([], []),
        ([("p0", "d0")], []),  # an edge, not a node
        ([("p0", "d0"), ("p1", "d0")], ["d0"]),
        ([("p1", "d0"), ("p1", "d1")], ["p1"]),
        ([("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")], []),  # nobody can be told from the others
    ],
)
def test_a_worker_without_an_edge_that_works_is_cut_off(broken, cut_off):
    data_paths = {(of, to): "" if (of, to) in broken else "shm" for of in ("p0", "p1") for to in ("d0", "d1")}
    site = Play([cluster(data_paths)])
    triage = partition_triage.Triage(site, partition_triage.argparse.Namespace(rounds=1))
    triage._look()
    assert site.found["cut_off"] == cut_off
    assert sum(bool(edge["why"]) for edge in site.found["edges"]) == len(broken)


def test_a_silent_workers_port_tells_a_dead_process():
    assert "the process is gone" in partition_triage._port_state("127.0.0.1:1")


def test_a_process_id_alone_is_no_proof():
    import os

    state = worker_pb2.WorkerState(worker_id="w", address="127.0.0.1:1", rank_pids=[os.getpid()])
    assert processes.processes_of(state) == [], "this process is none of Ray's"
    state.address = "192.0.2.1:1"  # nobody's
    with pytest.raises(PreconditionUnmet, match=r"runs on 192\.0\.2\.1"):
        processes.processes_of(state)


@pytest.mark.parametrize(
    "text", ["api_key=SECRET", "Authorization: Bearer SECRET", "TOKEN: SECRET", '"password": "SECRET"', "secret=SECRET"]
)
def test_secrets_are_cut_out_of_logs(text):
    from baton.runbook import collect_diagnostics as diagnostics

    cut = diagnostics.SECRET.sub(diagnostics.REDACTED, f"before {text}, after".encode()).decode()
    assert "SECRET" not in cut
    assert cut.startswith("before ")
    assert cut.endswith(" after")


def test_an_idle_worker_hangs_if_it_answers_no_canary_and_makes_no_progress():
    def look(*workers):
        return hung_tp_group._check_hangs(Play([[one] for one in workers]), "decode-0", 5.0).look()

    idle, unfit, moving = worker(), worker(), worker(num_requests_finished=3)
    for one in (unfit, moving):
        one.unfit, one.unfit_reason = True, "RequestDeadlineExceeded: late"
    assert look(unfit, unfit) == "it answers no canary of the router: RequestDeadlineExceeded: late"
    with pytest.raises(PreconditionUnmet, match="nothing to do"):
        look(idle, idle)
    with pytest.raises(PreconditionUnmet, match="makes progress"):
        look(unfit, moving)
