"""Capturing over ranks: all or none, whatever fails where, and nobody is left waiting."""

import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.errors import WorkerLost, WorkerStartFailed
from baton.engine.graphs.backend import CaptureRefused, wait_for
from baton.engine.graphs.graphed_step import agree, capture_together
from baton.model.parallel import Alone
from baton.tests.model.ranks import on_ranks

pytestmark = pytest.mark.fast
DEADLINE_S = 20.0
OK, REFUSE, WARM_UP, CAPTURE, DIE = "ok", "refuse", "warm up", "capture", "die"


class Exchange:
    """What the ranks of a test share. Like a real group, it mixes up operations that do not belong together."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self.parts = [None] * size

    def swap(self, rank, part):
        self.parts[rank] = part
        self._wait()
        parts = list(self.parts)
        self._wait()
        return parts

    def leave(self):
        self._barrier.abort()

    def _wait(self):
        try:
            self._barrier.wait(DEADLINE_S)
        except threading.BrokenBarrierError as error:
            raise WorkerLost("a rank is gone", lost_touch=True) from error


class ThreadGroup(Alone):
    """One rank's end."""

    def __init__(self, rank, size, exchange):
        super().__init__()
        self.rank, self.size, self._exchange = rank, size, exchange

    def gather_bytes(self, data):
        return self._exchange.swap(self.rank, data)

    def all_sum(self, x):
        parts = self._exchange.swap(self.rank, x)
        assert all(isinstance(part, int) for part in parts), "a vote met a sum"
        return sum(parts)


class Fake:
    """A graph whose fate is written."""

    def __init__(self, name, fate, group, log):
        self.name, self._fate, self._group, self._log = name, fate, group, log

    def require(self):
        self._log.append(("require", self.name))
        if self._fate == REFUSE:
            raise CaptureRefused("no memory")

    def warm_up(self):
        self._log.append(("warm up", self.name))
        if self._fate == WARM_UP:
            raise RuntimeError("no kernel")
        if self._fate == DIE:
            raise KeyboardInterrupt
        assert self._group.all_sum(1) == self._group.size

    def capture(self):
        self._log.append(("capture", self.name))
        if self._fate == CAPTURE:
            raise RuntimeError("an operation that cannot be captured")


def run_ranks(size, work):
    """`work(group)` at every rank: what it returned or raised. None may hang."""
    exchange, outcomes = Exchange(size), [None] * size

    def run(rank):
        try:
            outcomes[rank] = work(ThreadGroup(rank, size, exchange))
        except BaseException as error:  # noqa: BLE001
            outcomes[rank] = error
            exchange.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return outcomes


fates = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([OK] * 5 + [REFUSE, WARM_UP, CAPTURE, DIE]), min_size=size, max_size=size),
        min_size=1,
        max_size=5,
    )
)


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(fates)
@example([[OK, CAPTURE], [OK, OK]])
@example([[OK, OK], [REFUSE, CAPTURE], [OK, OK]])
@example([[OK, WARM_UP], [OK, OK]])
def test_all_ranks_have_the_same_graphs_or_all_raise(fates):
    size, logs = len(fates[0]), [[] for _ in fates[0]]

    def work(group):
        log = logs[group.rank]
        candidates = [Fake(f"g{at}", row[group.rank], group, log) for at, row in enumerate(fates)]
        captured = capture_together(group, candidates)
        return [item.name for item in captured.graphs], captured.failed

    outcomes = run_ranks(size, work)
    # Whoever refuses keeps all from the warm-up; a failure there ends it for all, but for a rank that is alone.
    fatal = [DIE] if size == 1 else [DIE, WARM_UP]
    is_fatal = any(REFUSE not in row and any(fate in fatal for fate in row) for row in fates)
    if is_fatal:
        assert all(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
        kinds = {WorkerLost, WorkerStartFailed, KeyboardInterrupt}
        assert {type(outcome) for outcome in outcomes} <= kinds
        return
    wanted = [f"g{at}" for at, row in enumerate(fates) if set(row) == {OK}]
    for graphs, failed in outcomes:
        assert graphs == wanted
        assert sorted([*graphs, *failed]) == sorted(f"g{at}" for at in range(len(fates)))
    assert all(failed == outcomes[0][1] for _, failed in outcomes)
    assert all(log == logs[0] for log in logs)
    for at, row in enumerate(fates):
        if REFUSE in row:
            assert ("warm up", f"g{at}") not in logs[0]


def test_the_reason_names_the_lowest_rank_that_has_one():
    outcomes = run_ranks(3, lambda group: agree(group, "may it", f"why {group.rank}" if group.rank else None))
    assert outcomes == ["rank 1: why 1"] * 3
    assert run_ranks(1, lambda group: agree(group, "may it", "why")) == ["why"]
    assert run_ranks(2, lambda group: agree(group, "may it", None)) == [None, None]


@pytest.mark.parametrize("other", ["other subject", "no vote", "another version"])
def test_ranks_that_are_at_different_graphs_raise(other):
    def work(group):
        if group.rank == 1 and other != "other subject":
            group.gather_bytes(b"\xff" if other == "no vote" else b'[2, "g1", null]')
            return None
        return agree(group, "g2" if group.rank == 1 else "g1", None)

    first, second = run_ranks(2, work)
    assert isinstance(first, WorkerLost)
    assert second is None or isinstance(second, WorkerLost)


def test_over_gloo():
    def work(group):
        fates = [[OK, OK], [OK, CAPTURE], [REFUSE, OK], [OK, OK]]
        log = []
        graphs = [_Summing(f"g{at}", row[group.rank], group, log) for at, row in enumerate(fates)]
        captured = capture_together(group, graphs)
        return [item.name for item in captured.graphs], captured.failed

    first, second = on_ranks(2, work)
    assert first == second
    assert first[0] == ["g0", "g3"]
    assert first[1] == {
        "g1": "rank 1: RuntimeError: an operation that cannot be captured",
        "g2": "rank 0: CaptureRefused: no memory",
    }


class _Summing(Fake):
    def warm_up(self):
        assert self._group.all_sum(torch.ones(3)).tolist() == [2.0] * 3


class _Never:
    """Work that another rank never joins."""

    def query(self):
        return False


def test_a_warm_up_that_others_do_not_join_ends():
    group = ThreadGroup(0, 2, Exchange(2))
    group.limit_s = 0.05
    with pytest.raises(WorkerLost, match=r"rank 0 of 2 lost touch .*: a warm-up did not end"):
        wait_for(_Never(), group)
    group.limit_s, group.blame = 60.0, lambda: WorkerLost("rank 1 has died", rank=1)
    with pytest.raises(WorkerLost, match="rank 1 has died"):
        wait_for(_Never(), group)


def test_a_programmers_error_is_nobodys_vote():
    graph = Fake("g", OK, Alone(), [])
    graph.capture = lambda: {}["missing"]
    with pytest.raises(KeyError):
        capture_together(Alone(), [graph])
