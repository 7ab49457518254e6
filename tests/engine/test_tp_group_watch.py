"""Who is to blame, by what is heard and when; and how long a step may take."""

import os
import subprocess
import sys
import time
from typing import ClassVar

import pytest

from baton.core.errors import ModelTensorMissing, WorkerLost
from baton.engine.tp import watch
from baton.engine.tp.step_limit import FIRST_S, MIN_LIMIT_S, StepLimit
from baton.engine.tp.watch import GRACE_S, SILENCE_S, STARVED_S, CpuWatch, TPGroupWatch, is_runnable

pytestmark = pytest.mark.fast
SIZE = 4


class TPGroup:
    """Rank 0's watch under a clock of its own; ranks beat unless they are told otherwise."""

    def __init__(self, rank=0, peers=(1, 2, 3), pids=None):
        self.now_s = 100.0
        self.silent = set()
        self.peers = peers
        self.operations = 0
        self.watch = TPGroupWatch(rank, SIZE, peers, self.now_s, pids=pids)

    def run(self, seconds):
        """The first verdict within so many seconds, and when it came."""
        start_s = self.now_s
        while self.now_s < start_s + seconds:
            self.now_s += 0.1
            for rank in set(self.peers) - self.silent:
                self.watch.heard(rank, self.now_s)
            if verdict := self.watch.verdict(self.operations, self.now_s):
                return verdict, self.now_s - start_s
        return None, None


def lost_touch(rank):
    return WorkerLost(f"rank {rank} lost touch", rank=rank, lost_touch=True).to_wire()


def test_nobody_is_blamed_while_all_beat():
    assert TPGroup().run(60.0) == (None, None)


def test_a_silent_rank_hangs():
    tp_group = TPGroup()
    tp_group.silent = {2}
    verdict, after_s = tp_group.run(10.0)
    assert verdict.fields == {"rank": 2, "size": SIZE, "how": "hangs"}
    assert SILENCE_S <= after_s <= 2.0


def test_one_that_only_waits_for_a_processor_gets_more_time_but_not_for_ever():
    tp_group = TPGroup(pids={2: os.getpid()})  # which runs
    tp_group.silent = {2}
    _, after_s = tp_group.run(60.0)
    assert after_s == pytest.approx(STARVED_S, abs=0.2)


def test_who_was_away_itself_blames_nobody_for_it():
    tp_group = TPGroup()
    tp_group.silent = {1, 2, 3}
    tp_group.run(0.5)
    tp_group.now_s += 30.0
    tp_group.silent = set()
    assert tp_group.run(5.0) == (None, None)


def test_a_death_is_named_at_once_and_its_victims_are_not():
    tp_group = TPGroup()
    tp_group.watch.farewell(1, lost_touch(1), True, tp_group.now_s)
    tp_group.watch.closed(1, tp_group.now_s)
    tp_group.watch.closed(3, tp_group.now_s + 0.05)
    verdict, after_s = tp_group.run(1.0)
    assert verdict.fields == {"rank": 3, "size": SIZE, "how": "died"}
    assert after_s <= 0.2


def test_a_victim_is_named_when_nobody_else_is_to_blame():
    tp_group = TPGroup()
    tp_group.watch.farewell(1, lost_touch(1), True, tp_group.now_s)
    tp_group.watch.closed(1, tp_group.now_s)
    verdict, after_s = tp_group.run(2.0)
    assert verdict.message == "rank 1 lost touch"
    assert after_s >= GRACE_S


def test_a_rank_that_says_why_is_quoted():
    tp_group = TPGroup()
    error = ModelTensorMissing("no lm_head", tensors=["lm_head.weight"])
    tp_group.watch.farewell(2, error.to_wire(), False, tp_group.now_s)
    verdict, _ = tp_group.run(1.0)
    assert verdict.message == "rank 2 of 4 failed: ModelTensorMissing: no lm_head"
    assert verdict.fields["cause"] == error.to_wire()


def test_what_is_no_error_of_ours_is_a_failure_all_the_same():
    tp_group = TPGroup()
    tp_group.watch.farewell(2, "{", False, tp_group.now_s)
    assert tp_group.run(1.0)[0].fields["rank"] == 2


def test_a_step_that_does_not_end_is_the_fault_of_the_rank_the_others_wait_for():
    tp_group = TPGroup()
    tp_group.operations = 17
    for rank, count in ((1, 17), (2, 12), (3, 17)):
        tp_group.watch.beat(rank, count)
    tp_group.watch.end(tp_group.watch.begin(1.0, tp_group.now_s))  # one that ended in time
    tp_group.watch.begin(3.0, tp_group.now_s)
    verdict, after_s = tp_group.run(10.0)
    assert verdict.fields == {"rank": 2, "size": SIZE, "how": "hangs"}
    assert after_s == pytest.approx(3.0, abs=0.2)


def test_rank_0_names_itself_if_everybody_waits_for_it_and_all_if_it_cannot_tell():
    tp_group = TPGroup()
    tp_group.operations = 3
    for rank in tp_group.peers:
        tp_group.watch.beat(rank, 5)
    tp_group.watch.begin(2.0, tp_group.now_s)
    assert tp_group.run(10.0)[0].fields["rank"] == 0
    tp_group.operations = 5
    assert "all 4 ranks hang in collective 5" in tp_group.run(1.0)[0].message


def test_a_step_may_take_four_times_what_is_predicted_and_never_less_than_two_seconds():
    limit = StepLimit()
    assert limit.limit_s(8) == 4 * FIRST_S
    limit.note(8, 0.01)
    assert limit.limit_s(8) == MIN_LIMIT_S
    limit.note(100, 3.0)
    assert limit.limit_s(100) == 12.0
    assert limit.limit_s(8) == MIN_LIMIT_S
    assert limit.limit_s(400) == pytest.approx(48.0)  # two sizes up: four times
    for _ in range(300):
        limit.note(100, 0.1)
    assert limit.limit_s(100) == MIN_LIMIT_S


class Cpu:
    """Of a process that waited for a processor, or did not."""

    waiting: ClassVar[set[int]] = set()

    def __init__(self, pid):
        self._pid = pid

    def has_waited(self):
        return self._pid in self.waiting

    def is_starved(self):
        return False


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_a_rank_that_waits_for_one_without_a_processor_gets_more_time(waiting, monkeypatch):
    """Rank 2 sleeps until rank 0 sends it the plan, whose thread that sends gets no processor."""
    monkeypatch.setattr(watch, "CpuWatch", Cpu)
    monkeypatch.setattr(Cpu, "waiting", {1000 + waiting})
    tp_group = TPGroup(pids={rank: 1000 + rank for rank in range(SIZE)})
    tp_group.operations = 17
    for rank, count in ((1, 17), (2, 12), (3, 17)):
        tp_group.watch.beat(rank, count)
    tp_group.watch.begin(2.0, tp_group.now_s)
    assert tp_group.run(10.0)[0] is None
    Cpu.waiting.clear()
    assert tp_group.run(1.0)[0].fields == {"rank": 2, "size": SIZE, "how": "hangs"}


def test_nobody_gets_more_time_than_a_machine_may_take(monkeypatch):
    monkeypatch.setattr(watch, "CpuWatch", Cpu)
    monkeypatch.setattr(Cpu, "waiting", {1000})
    tp_group = TPGroup(pids={rank: 1000 + rank for rank in range(SIZE)})
    tp_group.operations = 17
    for rank, count in ((1, 17), (2, 12), (3, 17)):
        tp_group.watch.beat(rank, count)
    tp_group.watch.begin(2.0, tp_group.now_s)
    verdict, after_s = tp_group.run(30.0)
    assert verdict.fields["rank"] == 2
    assert after_s == pytest.approx(2.0 + STARVED_S, abs=0.2)


SPIN = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True)\nwhile True: pass"


@pytest.mark.long
def test_one_of_several_on_one_processor_has_waited_and_one_that_sleeps_has_not():
    command = [sys.executable, "-c", SPIN]
    spinning = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    sleeping = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=-1)
    try:
        for process in (*spinning, sleeping):
            process.stdout.readline()
        watches = [CpuWatch(process.pid) for process in (*spinning, sleeping)]
        end_s = time.monotonic() + 20.0
        while not all(watch.has_waited() for watch in watches[:4]):
            assert time.monotonic() < end_s, "three quarters of the time each"
            time.sleep(0.1)
        assert not watches[4].has_waited()
    finally:
        for process in (*spinning, sleeping):
            process.kill()
            process.communicate()


@pytest.mark.long
def test_a_process_that_sleeps_or_is_stopped_is_not_starved_nor_is_one_that_spins():
    assert is_runnable(os.getpid())
    assert not is_runnable(0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sleeping:
        asleep = CpuWatch(sleeping.pid)
        end_s = time.monotonic() + 10.0
        while is_runnable(sleeping.pid):
            assert time.monotonic() < end_s
        assert not asleep.is_starved()
        sleeping.kill()
    own = CpuWatch(os.getpid())
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        pass
    own._used_s -= 0.3  # as if it had got a processor to itself
    assert not own.is_starved()
    own._used_s += 10.0
    assert own.is_starved()
