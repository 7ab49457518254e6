"""The decode scheduler: first come first served for blocks, slots given once, nothing held while waiting."""

import pytest

from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.decode_worker.scheduler import MAX_ENDED, DecodeScheduler, DecodeSequence, DecodeState
from baton.engine.preemption import MAX_PREEMPTIONS
from baton.engine.prefill import SequenceStart
from baton.kvcache.allocator import BlockAllocator
from baton.kvtransfer.landing import ReserveWanted

pytestmark = pytest.mark.fast


class Sink:
    ended = False

    def emit(self, event):
        pass

    def end(self, error=None):
        self.ended = True


def sequence(name, prompt_len=16, capacity_len=32):
    request = GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=tuple(range(prompt_len)),
        sampling=SamplingParams(max_tokens=capacity_len - prompt_len),
        deadline_s=1e9,
    )
    return DecodeSequence(request, Sink(), checker=None)


def want(name, capacity_len=32, deadline_s=100.0):
    return ReserveWanted(AttemptKey(name, 1), prompt_len=16, capacity_len=capacity_len, deadline_s=deadline_s)


START = SequenceStart(first_token=1, draft_token=None, hidden_D=None, prompt_len=16)


def scheduler(num_blocks=8, max_num_seqs=2):
    allocator = BlockAllocator(num_blocks, 16)
    return DecodeScheduler(allocator, max_num_seqs), allocator


def test_a_reserve_without_a_stream_waits_and_lets_others_pass():
    plan, allocator = scheduler()
    plan.want(want("early"))
    plan.want(want("b"))
    plan.add(sequence("b"))
    assert plan.next_grant().key.request_id == "b"
    assert plan.next_grant() is None
    plan.add(sequence("early"))
    assert plan.next_grant().key.request_id == "early"
    assert allocator.num_reserved == 4


def test_a_reserve_that_waits_for_blocks_is_not_overtaken():
    plan, allocator = scheduler(num_blocks=4)
    held = allocator.reserve(48)
    for name, capacity_len in (("long", 64), ("short", 16)):
        plan.add(sequence(name, 8, capacity_len))
        plan.want(want(name, capacity_len))
    assert plan.next_grant() is None
    allocator.release(held)
    assert plan.next_grant().key.request_id == "long"
    assert plan.next_grant() is None


def test_late_and_ended_reserves_leave_the_queue():
    plan, _ = scheduler()
    plan.want(want("late", deadline_s=1.0))
    assert [reserve.attempt.request_id for reserve in plan.expired_reserves(2.0)] == ["late"]
    assert list(plan.expired_reserves(2.0)) == []
    ended = sequence("gone")
    plan.add(ended)
    plan.remove(ended)
    assert plan.want(want("gone")) is False


def test_the_memory_of_ended_attempts_is_bounded():
    plan, _ = scheduler()
    for number in range(MAX_ENDED + 1):
        item = sequence(str(number))
        plan.add(item)
        plan.remove(item)
    assert plan.want(want("0")) is True
    assert plan.want(want(str(MAX_ENDED))) is False


def test_slots_are_given_in_order_and_come_back():
    plan, allocator = scheduler()
    items = [sequence(name, 8, 16) for name in "abc"]
    for item in items:
        plan.add(item)
        plan.want(want(item.key.request_id, 16))
        assert plan.next_grant() is item
        plan.seal(item, sealed=None, start=START)
    assert plan.next_admission() is items[0]
    assert plan.next_admission() is items[1]
    assert plan.next_admission() is None, "two slots"
    assert [item.slot for item in plan.running()] == [0, 1]
    plan.remove(items[0])
    assert plan.next_admission() is items[2]
    assert items[2].slot == 0
    assert plan.count(DecodeState.RUNNING) == 2
    for item in items[1:]:
        plan.remove(item)
    assert allocator.num_free == 8


def test_what_a_step_in_flight_has_stays_its_own_until_it_is_over():
    plan, allocator = scheduler(num_blocks=4)
    items = [sequence(name, 8, 32) for name in "abc"]
    for item in items:
        plan.add(item)
        plan.want(want(item.key.request_id))
    for item in items[:2]:
        assert plan.next_grant() is item
        plan.seal(item, sealed=None, start=START)
        assert plan.next_admission() is item
    before = plan.running()
    plan.retire(items[0])
    assert before == items[:2], "a step in flight keeps its own list"
    assert plan.running() == items[1:2]
    assert items[0].state is DecodeState.ENDED
    assert plan.get(items[0].key) is None
    assert plan.num_slots_in_use == 2
    assert plan.next_grant() is None, "its blocks are not free yet"
    plan.free(items[0])
    assert plan.num_slots_in_use == 1
    assert plan.next_grant() is items[2]
    assert allocator.num_free == 0


# Preemption.


def running(plan, *names, prompt_len=16, capacity_len=64):
    items = [sequence(name, prompt_len, capacity_len) for name in names]
    for item in items:
        plan.add(item)
        plan.want(want(item.key.request_id, capacity_len))
        assert plan.next_grant() is item
        plan.seal(item, sealed=None, start=START)
        if plan.next_admission() is not None:
            item.start = None
    return items


def overcommitted(num_blocks=8, max_num_seqs=2):
    allocator = BlockAllocator(num_blocks, 16)
    return DecodeScheduler(allocator, max_num_seqs, overcommit=True), allocator


def test_a_grant_is_of_blocks_for_the_prompt_and_a_step_and_leaves_some_for_those_that_run():
    plan, allocator = overcommitted(num_blocks=8, max_num_seqs=3)
    items = running(plan, "a", "b")
    assert [len(item.table.blocks) for item in items] == [2, 2]
    assert allocator.num_free == 4
    running(plan, "c")
    plan.add(sequence("d"))
    plan.want(want("d"))
    assert plan.next_grant() is None, "two are free, and three may each need one soon"
    growth = plan.add_blocks(items[0], 9)
    assert (growth.slot, growth.first, len(growth.blocks)) == (0, 2, 2), "never more than it may ever need"


def test_a_preempted_sequence_is_served_before_any_reserve():
    plan, _ = overcommitted(num_blocks=8)
    a, b = running(plan, "a", "b")
    b.token_ids += [5] * 20
    plan.add_blocks(b, 1)
    plan.add(sequence("new", 8, 16))
    plan.want(want("new", 16))
    plan.give_way(b)
    assert plan.running() == [a]
    assert plan.num_coming == 3
    free = plan.preempt(b)
    assert (b.state, b.slot, b.table) == (DecodeState.PREEMPTED, -1, None)
    assert plan.candidates() == [a]
    assert plan.next_grant() is None, "first the preempted one"
    assert plan.next_return() is None, "its old slot is not free yet"
    assert plan.num_slots_in_use == 2
    free()
    assert plan.num_coming == 0
    assert plan.next_return() is b
    assert (b.state, b.slot, len(b.table.blocks)) == (DecodeState.COMPUTING, 1, 3)
    assert plan.computing() == (b,)
    plan.run(b)
    assert plan.running() == [a, b]
    assert plan.computing() == ()
    assert plan.next_grant().key.request_id == "new"


def test_blocks_that_others_wait_for_start_nobody():
    plan, _ = overcommitted(num_blocks=7, max_num_seqs=3)
    running(plan, "a")
    plan.add(sequence("b"))
    plan.want(want("b"))
    plan.claim(3)
    assert plan.next_grant() is None
    plan.claim(0)
    assert plan.next_grant() is not None


def test_the_ready_give_way_too_and_the_protected_do_not():
    plan, allocator = overcommitted(num_blocks=8, max_num_seqs=1)
    a, b = running(plan, "a", "b")
    assert (a.state, b.state) == (DecodeState.RUNNING, DecodeState.READY)
    assert plan.candidates() == [a, b]
    a.num_preemptions = MAX_PREEMPTIONS
    assert plan.candidates() == [b]
    b.num_preemptions = 1
    plan.preempt(b)()
    assert plan.dropped() == [b.key]
    assert plan.dropped() == []
    assert b.start is None, "it was not saved"
    assert plan.next_admission() is None
    b.num_preemptions = MAX_PREEMPTIONS
    plan.remove(a)
    assert plan.next_return() is b
    assert len(b.table.blocks) == 4, "with every block that it may need"
    plan.remove(b)
    assert allocator.num_free == 8
    assert plan.num_slots_in_use == 0


@pytest.mark.parametrize("when", ["giving way", "preempted", "computing"])
def test_one_that_ends_while_it_is_away_leaves_nothing(when):
    plan, allocator = overcommitted()
    a, b = running(plan, "a", "b")
    plan.give_way(b)
    if when != "giving way":
        plan.preempt(b)()
    if when == "computing":
        assert plan.next_return() is b
    plan.remove(b)
    plan.remove(a)
    assert allocator.num_free == 8
    assert plan.num_slots_in_use == plan.num_coming == 0
    assert plan.sequences() == ()
    assert plan.next_return() is None


def local(name, prompt_len=16, capacity_len=32):
    item = sequence(name, prompt_len, capacity_len)
    item.is_local = True
    return item


def test_a_prompt_that_is_computed_here_waits_for_blocks_in_line():
    plan, _ = scheduler(num_blocks=5, max_num_seqs=4)
    for name in "abc":
        if name == "b":
            plan.add(local(name))
            continue
        plan.want(want(name))
        plan.add(sequence(name))
    assert plan.num_waiting()["blocks"] == 3
    assert plan.next_grant().key.request_id == "a"
    assert plan.next_grant() is None, "c does not fit"
    b = plan.get(AttemptKey("b", 1))
    assert (b.state, b.is_whole, b.num_kv, b.num_queued) == (DecodeState.READY, False, 0, 16)
    assert plan.next_admission() is None
    assert (b.state, plan.computing()) == (DecodeState.COMPUTING, (b,))
    assert plan.num_slots_in_use == 1
    plan.add(local("d"))
    plan.remove(b)
    assert plan.next_grant().key.request_id == "c", "who came before"
    assert plan.next_grant() is None
    assert plan.get(AttemptKey("d", 1)).state is DecodeState.ATTENDING


def test_a_prompt_that_is_computed_here_waits_for_a_slot_behind_what_has_landed():
    plan, _ = scheduler(num_blocks=20, max_num_seqs=1)
    plan.want(want("a"))
    plan.add(sequence("a"))
    a = plan.next_grant()
    plan.add(local("b"))
    assert plan.next_grant() is None
    b = plan.get(AttemptKey("b", 1))
    assert plan.next_admission() is None
    assert b.state is DecodeState.COMPUTING, "the slot was free"
    plan.seal(a, None, START)
    assert plan.next_admission() is None
    plan.remove(b)
    assert plan.next_admission() is a


def test_a_reserve_for_a_prompt_that_is_computed_here_is_refused_or_never_granted():
    plan, allocator = scheduler()
    plan.add(local("a"))
    assert not plan.want(want("a"))
    assert plan.want(want("b")), "its stream may come yet"
    plan.add(local("b"))
    assert plan.next_grant() is None
    assert list(plan.open_reserves()) == []
    assert allocator.num_reserved == 4, "of a and b themselves"
    assert [late.attempt.request_id for late in plan.expired_reserves(1e9)] == ["b"]


@pytest.mark.parametrize("num_steps", range(4))
def test_a_prompt_that_ends_anywhere_on_its_way_leaves_nothing(num_steps):
    plan, allocator = scheduler()
    item = local("a")
    plan.add(item)
    steps = [plan.next_grant, plan.next_admission, lambda: plan.preempt(item)()]
    for step in steps[:num_steps]:
        step()
    assert item.state is list(DecodeState)[[0, 2, 5, 4][num_steps]]
    plan.remove(item)
    assert allocator.num_free == 8
    assert plan.num_slots_in_use == plan.num_coming == 0
    assert plan.num_waiting() == dict.fromkeys(("prefill", "blocks", "transfer", "slot", "preempted"), 0)
    assert plan.next_grant() is None
    assert not plan.dropped(), "there was no landing to leave"
