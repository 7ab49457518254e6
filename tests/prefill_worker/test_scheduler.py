"""The prefill scheduler: order, budget, and that queued requests hold nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.kvcache.allocator import BlockAllocator
from baton.prefill_worker.scheduler import PrefillScheduler, PrefillSequence, PrefillState

pytestmark = pytest.mark.fast


def sequence(name, prompt_len, peer="d0"):
    request = GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=tuple(range(prompt_len)),
        sampling=SamplingParams(max_tokens=4),
        deadline_s=1e9,
    )
    return PrefillSequence(request, peer)


def scheduler(num_blocks=64, chunk_len=32, max_num_seqs=8):
    allocator = BlockAllocator(num_blocks, 16)
    return PrefillScheduler(allocator, chunk_len, max_num_seqs), allocator


def ready(plan):
    taken = plan.next_to_reserve(0.0)
    if taken is not None:
        taken.state = PrefillState.READY
    return taken


def test_a_queued_request_holds_no_blocks():
    plan, allocator = scheduler(chunk_len=16)
    for name in "abcd":
        plan.add(sequence(name, 64))
    assert ready(plan).key.request_id == "a"
    assert plan.next_to_reserve(0.0) is None, "64 tokens are ahead, two chunks are 32"
    assert allocator.num_reserved == 4
    assert plan.count(PrefillState.WAITING) == 3


def test_the_lookahead_reserves_the_next_one_before_the_last_chunk():
    plan, _ = scheduler(chunk_len=32)
    first, second = sequence("a", 80), sequence("b", 16)
    plan.add(first)
    plan.add(second)
    assert ready(plan) is first
    assert plan.next_to_reserve(0.0) is None
    first.num_computed = 32
    assert ready(plan) is second


def test_a_step_is_filled_from_several_sequences_up_to_its_budget():
    plan, _ = scheduler(chunk_len=32)
    for name, prompt_len in (("a", 20), ("b", 20)):
        plan.add(sequence(name, prompt_len))
        ready(plan)
    assert [(c.sequence.key.request_id, c.start, c.length) for c in plan.plan()] == [("a", 0, 20), ("b", 0, 12)]


def test_a_prompt_that_does_not_fit_now_waits_and_keeps_its_place():
    plan, allocator = scheduler(num_blocks=4, chunk_len=64)
    held = allocator.reserve(48)
    plan.add(sequence("long", 32))
    plan.add(sequence("short", 16))
    assert plan.next_to_reserve(0.0) is None, "the short one must not overtake for ever"
    allocator.release(held)
    assert plan.next_to_reserve(0.0).key.request_id == "long"


def test_removing_frees_the_blocks():
    plan, allocator = scheduler()
    plan.add(sequence("a", 33))
    taken = ready(plan)
    assert allocator.num_reserved == 3
    plan.remove(taken)
    assert allocator.num_reserved == 0
    assert plan.get(taken.key) is None


def test_a_busy_decode_worker_holds_up_nobody_else():
    plan, allocator = scheduler(chunk_len=16)
    for number in range(5):
        plan.add(sequence(f"busy{number}", 64, "d0"))
    plan.add(sequence("free", 64, "d1"))
    askers = [plan.next_to_reserve(0.0) for _ in range(3)]
    assert [asker.key.request_id for asker in askers] == ["busy0", "busy1", "free"]
    assert plan.next_to_reserve(0.0) is None
    assert allocator.num_reserved == 12, "the others hold nothing"


def test_those_who_wait_for_one_decode_worker_hold_its_share_of_the_blocks():
    plan, _ = scheduler(num_blocks=9, chunk_len=16)
    for name, prompt_len, peer in (("big", 64, "d0"), ("next", 16, "d0"), ("other", 48, "d1")):
        plan.add(sequence(name, prompt_len, peer))
    assert plan.next_to_reserve(0.0).key.request_id == "big", "alone it may take more than a third"
    assert plan.next_to_reserve(0.0).key.request_id == "other"
    assert plan.next_to_reserve(0.0) is None


@pytest.mark.parametrize("state", [PrefillState.RESERVING, PrefillState.COMMITTING, PrefillState.ABORTING])
def test_a_stalled_decode_worker_stops_its_own_requests_only(state):
    plan, allocator = scheduler(num_blocks=30, chunk_len=16)
    for number in range(8):
        plan.add(sequence(f"stalled{number}", 80, "d0"))
        plan.add(sequence(f"good{number}", 80, "d1"))
    num_good = 0
    for step in range(40):
        while (taken := plan.next_to_reserve(step * 0.1)) is not None:
            taken.state = state if taken.peer == "d0" else PrefillState.READY
        for done in [s for s in plan.sequences() if s.peer == "d1" and s.table is not None]:
            plan.remove(done)
            num_good += 1
        held = sum(s.num_blocks for s in plan.sequences() if s.peer == "d0")
        assert 0 < held <= (10 if num_good < 8 else 15), "its share; half of all where it is alone"
    assert num_good == 8
    assert allocator.num_reserved == held


def test_nobody_waits_for_blocks_that_only_a_stalled_decode_worker_could_give_back():
    plan, allocator = scheduler(num_blocks=12, chunk_len=16)
    plan.add(sequence("stalled", 64, "d0"))
    assert ready(plan).peer == "d0"
    plan.get(AttemptKey("stalled", 1)).state = PrefillState.COMMITTING
    plan.add(sequence("big", 160, "d1"))
    plan.add(sequence("small", 16, "d2"))
    assert plan.next_to_reserve(10.0) is None, "it may end any moment, and the big one is first"
    assert plan.next_to_reserve(10.4) is None
    assert plan.next_to_reserve(10.6).key.request_id == "small"
    plan.remove(plan.get(AttemptKey("stalled", 1)))
    plan.remove(plan.get(AttemptKey("small", 1)))
    assert plan.next_to_reserve(10.7).key.request_id == "big"
    assert allocator.num_reserved == 10


@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["d0", "d1", "d2"])), min_size=1, max_size=25),
    stalled=st.sets(st.sampled_from(["d0", "d1"])),
    num_blocks=st.integers(16, 40),
)
def test_whoever_stalls_everyone_else_is_served_in_order(prompts, stalled, num_blocks):
    plan, _ = scheduler(num_blocks, 32)
    for index, (prompt_len, peer) in enumerate(prompts):
        plan.add(sequence(f"{index:02}", prompt_len, peer))
    served = []
    for step in range(200):
        while (taken := plan.next_to_reserve(step * 0.1)) is not None:
            taken.state = PrefillState.RESERVING if taken.peer in stalled else PrefillState.READY
        for chunk in plan.plan():
            chunk.sequence.num_computed += chunk.length
            if chunk.sequence.num_left == 0:
                served.append(chunk.sequence)
                plan.remove(chunk.sequence)
    for peer in {"d0", "d1", "d2"} - stalled:
        names = [f"{index:02}" for index, (_, to) in enumerate(prompts) if to == peer]
        assert [s.key.request_id for s in served if s.peer == peer] == names
    assert not [s for s in served if s.peer in stalled]
    assert plan.count(PrefillState.RESERVING) <= 2 * len(stalled)


@given(
    prompt_lens=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    chunk_len=st.sampled_from([16, 24, 48, 1000]),
    num_blocks=st.integers(6, 40),
)
def test_every_prompt_is_computed_once_in_order(prompt_lens, chunk_len, num_blocks):
    plan, allocator = scheduler(num_blocks, chunk_len)
    for index, prompt_len in enumerate(prompt_lens):
        plan.add(sequence(f"{index:02}", prompt_len))
    started = []
    for _ in range(10_000):
        while ready(plan) is not None:
            pass
        chunks = plan.plan()
        if not chunks:
            break
        assert sum(chunk.length for chunk in chunks) <= chunk_len
        for chunk in chunks:
            if chunk.start == 0:
                started.append(chunk.sequence.key)
            assert chunk.start == chunk.sequence.num_computed
            chunk.sequence.num_computed += chunk.length
            if chunk.sequence.num_left == 0:
                plan.remove(chunk.sequence)
    assert started == sorted(started)
    assert len(started) == len(prompt_lens)
    assert allocator.num_free == num_blocks
