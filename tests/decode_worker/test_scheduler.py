"""The decode scheduler: first come first served for blocks, slots given once, nothing held while waiting."""

import pytest

from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.decode_worker.scheduler import MAX_ENDED, DecodeScheduler, DecodeSequence, DecodeState
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
