"""The engine over a device in miniature: any order of requests, steps, preemptions, cancels, transfers and copies.

The device here knows what each position of each block was computed from. It says when a step reads KV that is not its
sequence's, writes blocks that are not its own, or beyond them. Steps are over only when the machine says so; until then
what they write must not be given away.
"""

import functools
import itertools
import random
import zlib
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.core.block_hash import block_hashes
from baton.core.clock import VirtualClock
from baton.core.errors import RequestCancelled, TransferFailed
from baton.engine.chunk_budget import MIN_LEN
from baton.engine.engine import Engine
from baton.engine.finish import FinishChecker
from baton.engine.preemption import plan_room
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import MAX_PREEMPTIONS, Phase, Sequence
from baton.engine.step.plan import Grow, Load, Place, Release, Resume, Save
from baton.engine.step.result import ChunkOutput, Emitted, StepOutput
from baton.kvcache.allocator import BlockAllocator
from baton.tests.engine.toy_engine import letters_tokenizer, request_of

NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 10, 4, 4
MOST_DRAFTS = 2
TOKENIZER = letters_tokenizer()


def next_token(token_ids):
    """Depends on every token before."""
    return zlib.crc32(bytes(token_ids)) % 23


@functools.cache
def answer(prompt, max_tokens):
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def pool_of(blocks):
    """The rank in whose pool they all are."""
    (pool,) = {block // NUM_BLOCKS for block in blocks}
    return pool


class Ending:
    """A step or a copy."""

    def __init__(self, device, blocks):
        self.device, self.number, self.blocks = device, next(device.numbers), frozenset(blocks)
        device.endings.append(self)

    @property
    def is_done(self):
        return self.number < self.device.num_over


class Ticket(Ending):
    times = None

    def __init__(self, device, blocks, output):
        super().__init__(device, blocks)
        self.output = output

    def result(self):
        self.device.num_over = max(self.device.num_over, self.number)  # all before it; its draft extend still runs
        return self.output


class Meter:
    def copy_if_wanted(self):
        pass

    def durations_s(self, times):
        return 0.001, 0.002


@dataclass
class Resident:
    token_ids: list
    blocks: list
    cap: int
    knows_next: bool
    end: int  # length at which its answer is complete
    decodes: bool


class Device:
    """Has the interface of `Runner`. What is given to it happens at once; that it is over comes later."""

    num_draft_tokens, max_num_seqs, max_model_len = MOST_DRAFTS, NUM_SLOTS, 1000
    num_state_images = 0

    def __init__(self, num_host_blocks, most_tokens, seed):
        self.num_host_blocks, self.most_tokens = num_host_blocks, most_tokens
        self.meter = Meter()
        self.rng = random.Random(seed)
        self.numbers, self.num_over, self.endings = itertools.count(), 0, []
        self.slots, self.memory, self.host = {}, {}, {}
        self.saved_at = {}  # by host block, the rank that copied
        self.num_mixed = 0

    def under_way(self):
        self.endings = [ending for ending in self.endings if not ending.is_done]
        return self.endings

    def drain(self):
        self.num_over = max((ending.number + 1 for ending in self.endings), default=self.num_over)

    def execute(self, operation):
        match operation:
            case Place():
                assert operation.slot not in self.slots
                pool_of(operation.blocks)
                prompt_len = len(operation.token_ids) - operation.num_output
                self.slots[operation.slot] = Resident(
                    list(operation.token_ids),
                    list(operation.blocks),
                    operation.draft_cap,
                    operation.knows_next,
                    prompt_len + operation.sampling.max_tokens,
                    operation.resume is not None,
                )
            case Release():
                del self.slots[operation.slot]
            case Grow():
                for growth in operation.growths:
                    blocks = self.slots[growth.slot].blocks
                    assert len(blocks) == growth.first
                    blocks += growth.blocks
                    pool_of(blocks)
            case Save():
                assert operation.slot is None or operation.slot in self.slots
                for at, block in enumerate(operation.blocks):
                    self.host[operation.first + at] = [self.memory.get((block, place)) for place in range(BLOCK_SIZE)]
                    self.saved_at[operation.first + at] = pool_of(operation.blocks)
                return Ending(self, operation.blocks)
            case Load():
                assert operation.slot in self.slots
                for at, block in enumerate(operation.blocks):
                    assert self.saved_at[operation.first + at] == pool_of(operation.blocks), "its rank has the copy"
                    for place, content in enumerate(self.host.pop(operation.first + at)):
                        self.memory[block, place] = content
                return Ending(self, operation.blocks)
        return None

    def launch(self, step):
        chunked = [chunk.slot for chunk in step.chunks]
        assert len({*chunked, *step.slots}) == len(chunked) + len(step.slots) > 0, "a sequence is in a step twice"
        num_rows = len(step.slots) * (step.num_drafts + 1)
        num_tokens = sum(chunk.length for chunk in step.chunks)
        if num_tokens:
            least = min(MIN_LEN, self.most_tokens)  # of prompts, however many decode
            assert num_tokens <= max(least, self.most_tokens - num_rows)
        self.num_mixed += bool(chunked and step.slots)
        written = set()
        chunks = tuple(self._chunk(chunk, is_last=chunk is step.chunks[-1], written=written) for chunk in step.chunks)
        decode = tuple(self._decode(slot, step, written) for slot in step.slots)
        blocks = [block for slot in (*chunked, *step.slots) for block in self.slots[slot].blocks]
        return Ticket(self, blocks, StepOutput(decode, chunks))

    def _chunk(self, chunk, *, is_last, written):
        row = self.slots[chunk.slot]
        assert not row.decodes
        known_len = len(row.token_ids) - row.knows_next
        assert 0 <= chunk.start < chunk.end <= known_len <= len(row.blocks) * BLOCK_SIZE
        assert is_last or chunk.end == known_len, "a younger one computes before an older one is done"
        self._check_reads(row, chunk.start)
        for position in range(chunk.start, chunk.end):
            self._write(row, position, tuple(row.token_ids[: position + 1]), written)
        if chunk.end < known_len:
            return ChunkOutput(None, None, (), None)
        row.decodes = True
        token = next_token(row.token_ids[:known_len])
        if row.knows_next:
            assert row.token_ids[-1] == token
        else:
            row.token_ids.append(token)
        return ChunkOutput(token, None, (), None)

    def _decode(self, slot, step, written):
        row = self.slots[slot]
        assert row.decodes
        length, num_drafts = len(row.token_ids), min(row.cap, step.num_drafts)
        room_len = len(row.blocks) * BLOCK_SIZE
        assert min(length + num_drafts, row.end) <= room_len, "a step writes beyond its blocks"
        assert min(length + num_drafts, room_len) <= step.max_context_len
        self._check_reads(row, min(length - 1, room_len))
        num_emitted = self.rng.randint(1, num_drafts + 1)
        for _ in range(num_emitted):
            row.token_ids.append(next_token(row.token_ids))
        for position in range(length - 1, min(length + num_drafts, room_len)):
            is_right = position < length - 1 + num_emitted
            self._write(row, position, tuple(row.token_ids[: position + 1]) if is_right else "rejected", written)
        token_ids = tuple(row.token_ids[length:])
        return Emitted(token_ids, num_emitted - 1, num_drafts, None, None)

    def _check_reads(self, row, length):
        for position in range(length):
            content = self.memory.get((row.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE))
            assert content == tuple(row.token_ids[: position + 1]), f"position {position} holds {content}"

    def _write(self, row, position, content, written):
        block = row.blocks[position // BLOCK_SIZE]
        place = block, position % BLOCK_SIZE
        assert place not in written, "two write it"
        assert all(other is row or block not in other.blocks for other in self.slots.values()), "others read it"
        written.add(place)
        self.memory[place] = content


class EngineMachine(RuleBasedStateMachine):
    """The role, too (`engine.engine.Role`)."""

    @initialize(
        scheduling=st.sampled_from(["async", "async", "sync"]),
        num_host_blocks=st.sampled_from([0, 3, 30]),
        overcommit=st.sampled_from([True, True, False]),
        most_tokens=st.sampled_from([3, 8, 24, 60]),
        is_cached=st.booleans(),
        seed=st.integers(0, 3),
        num_pools=st.sampled_from([1, 1, 2]),
    )
    def begin(
        self,
        scheduling="sync",
        num_host_blocks=30,
        overcommit=True,
        most_tokens=60,
        is_cached=False,
        seed=0,
        num_pools=1,
    ):
        self.allocators = [BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, first=at * NUM_BLOCKS) for at in range(num_pools)]
        self.allocator, *others = self.allocators
        self.scheduler = Scheduler(self.allocator, num_slots=NUM_SLOTS, overcommit=overcommit, others=others)
        self.device = Device(num_host_blocks, most_tokens, seed)
        self.engine = Engine(
            runner=self.device,
            scheduler=self.scheduler,
            role=self,
            clock=VirtualClock(),
            max_num_batched_tokens=most_tokens,
            scheduling=scheduling,
        )
        self.preemption = self.engine._preemption
        self.is_cached = is_cached
        self.all, self.draining = [], []
        self.scripted, self.num_ends, self.num_left = Counter(), Counter(), Counter()
        self.published = {}

    # The role

    def receive(self):
        return False

    def granted(self, sequence):
        assert sequence.is_received
        assert sequence.phase is Phase.RECEIVING

    def plan(self):
        pass

    def publish(self, published):
        for made in published:
            said = self.published[made.sequence]
            assert made.is_first is (not said)
            said += made.token_ids

    def preempted(self, sequence):
        assert sequence.phase is Phase.WAITING
        self.num_left[sequence] += 1

    def ended(self, sequence, error):
        self.num_ends[sequence] += 1
        assert self.num_ends[sequence] == 1
        if sequence.phase is Phase.RECEIVING:
            self.draining.append(sequence)

    # What happens

    def here(self, *phases):
        return [item for item in self.scheduler.sequences() if not phases or item.phase in phases]

    @rule(
        prompt_len=st.integers(1, 20),
        max_tokens=st.integers(1, 18),
        draft_cap=st.integers(0, MOST_DRAFTS),
        kind=st.integers(0, 1),
        is_received=st.sampled_from([False, False, True]),
    )
    def submit(self, **options):
        self.add(**options)

    def add(self, prompt_len, max_tokens=18, draft_cap=0, kind=0, is_received=False):
        prompt = [kind] * prompt_len
        if is_received:  # an answer that ends at its first token is not handed over
            max_tokens = max(2, max_tokens)
        request = request_of(prompt, k=draft_cap, max_tokens=max_tokens, ignore_eos=True)
        hashes = block_hashes(prompt, model="m", tenant="", block_size=BLOCK_SIZE, with_mtp=False)
        sequence = Sequence(
            request=request,
            checker=FinishChecker(request.sampling, (), TOKENIZER),
            draft_cap=draft_cap,
            submitted_s=0.0,
            phase=Phase.EXPECTED if is_received else Phase.WAITING,
            is_received=is_received,
            block_hashes=hashes if self.is_cached else (),
        )
        self.engine.add(sequence)
        self.all.append(sequence)
        self.published[sequence] = []
        return sequence

    @rule(data=st.data())
    @precondition(lambda self: self.here(Phase.EXPECTED))
    def ask(self, data):
        self.scheduler.expect_now(data.draw(st.sampled_from(self.here(Phase.EXPECTED))))

    @rule(data=st.data())
    @precondition(lambda self: self.withdrawable())
    def withdraw(self, data):
        self.scheduler.step_back(data.draw(st.sampled_from(self.withdrawable())))

    def withdrawable(self):
        return [item for item in self.here(Phase.WAITING) if item.is_received and not item.num_preemptions]

    @rule(data=st.data())
    @precondition(lambda self: self.here(Phase.RECEIVING))
    def land(self, data):
        self.land_one(data.draw(st.sampled_from(self.here(Phase.RECEIVING))))

    def land_one(self, sequence):
        prompt = sequence.request.prompt_token_ids
        for position in range(len(prompt)):
            self.device.memory[divmod(sequence.table.slot(position), BLOCK_SIZE)] = prompt[: position + 1]
        first = next_token(prompt)
        sequence.checker.accept([first])
        sequence.token_ids.append(first)
        self.published[sequence].append(first)
        sequence.resume = Resume()
        self.scheduler.make_ready(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.sequences())
    def cancel(self, data):
        self.engine.end(data.draw(st.sampled_from(self.scheduler.sequences())), RequestCancelled("cancelled"))

    @rule(data=st.data())
    @precondition(lambda self: self.here(Phase.RECEIVING))
    def fail(self, data):
        self.engine.end(data.draw(st.sampled_from(self.here(Phase.RECEIVING))), TransferFailed("failed"))

    @rule()
    @precondition(lambda self: self.draining)
    def drain(self):
        sequence = self.draining.pop()
        self.scheduler.drained(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.running())
    def preempt(self, data):
        sequence = data.draw(st.sampled_from(self.scheduler.running()))
        has_kv = sequence.num_computed > 0 or sequence.is_decoding
        if has_kv and not sequence.is_leaving and self.scripted[sequence] < 3:
            self.scripted[sequence] += 1
            self.preemption.request(sequence)

    @rule(num=st.sampled_from([1, 1, 2, 5]))
    def over(self, num):
        """So many steps and copies are over, whether somebody has waited for them or not."""
        given = [ending.number for ending in self.device.endings]
        self.device.num_over = max(self.device.num_over, min(self.device.num_over + num, max(given, default=-1) + 1))

    @rule(num=st.sampled_from([1, 1, 3]))
    def step(self, num=1):
        for _ in range(num):
            self.engine.step()

    # What always holds

    @invariant()
    def blocks_are_ones_own_or_shared_by_name(self):
        if not hasattr(self, "engine"):
            return
        counts = Counter(block for item in self.here() if item.table is not None for block in item.table.blocks)
        for at, allocator in enumerate(self.allocators):
            mine = Counter({block: count for block, count in counts.items() if pool_of([block]) == at})
            assert mine <= Counter(allocator._num_tables)
            num_departing = sum(allocator._num_tables.values()) - sum(mine.values())
            assert num_departing == self.scheduler._num_departing_blocks[at]
            assert all(block in allocator.index for block, count in mine.items() if count > 1)
        assert all(pool_of(item.table.blocks) == item.owner for item in self.here() if item.table is not None)
        for item in self.here(Phase.RUNNING):
            assert self.device.slots[item.slot].blocks == list(item.table.blocks)
        assert len(self.device.slots) == len(self.here(Phase.RUNNING))

    @invariant()
    def what_is_under_way_keeps_its_blocks(self):
        if not hasattr(self, "engine"):
            return
        blocks = range(len(self.allocators) * NUM_BLOCKS)
        resting = {block for block in blocks if self.allocators[pool_of([block])].index.is_resting(block)}
        free = resting.union(*(allocator._free for allocator in self.allocators))
        received = {block for item in self.here(Phase.RECEIVING) for block in item.table.blocks}
        for ending in self.device.under_way():
            assert not ending.blocks & free, "they could be given to whoever writes them at once"
            assert not ending.blocks & received, "they were"

    @invariant()
    def queues_are_in_order_of_arrival(self):
        if not hasattr(self, "engine"):
            return
        for queue in (self.scheduler._line, self.scheduler._ready, self.scheduler._running):
            assert [item.order for item in queue] == sorted(item.order for item in queue)
        assert all(item.num_preemptions == 0 for item in self.here(Phase.RECEIVING))

    @invariant()
    def preemptions_are_bounded_and_counted(self):
        if not hasattr(self, "engine"):
            return
        for item in self.all:
            assert item.num_preemptions == self.num_left[item] <= MAX_PREEMPTIONS + self.scripted[item]
            assert item.saved is None or item.phase is Phase.WAITING
        assert self.engine.preemptions.num_preemptions == sum(self.num_left.values())
        num_saved = sum(item.saved.length for item in self.all if item.saved is not None)
        assert self.engine.num_host_blocks_used == num_saved

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for num_steps in itertools.count():
            if not self.scheduler.sequences():
                break
            assert num_steps < 1_000, "these starve"
            for sequence in self.here(Phase.EXPECTED):
                self.scheduler.expect_now(sequence)
            for sequence in self.here(Phase.RECEIVING):
                self.land_one(sequence)
            while self.draining:
                self.drain()
            self.over(1)
            self.step()
        while self.draining:
            self.drain()
        self.engine.drain()
        self.preemptions_are_bounded_and_counted()
        self.scheduler.check_empty()
        assert all(allocator.num_free == NUM_BLOCKS for allocator in self.allocators)
        assert not any(self.scheduler.num_coming(at) for at in range(len(self.allocators)))
        assert self.scheduler.num_slots_used == 0
        assert self.engine.is_idle
        assert self.engine.num_host_blocks_used == 0
        assert not self.device.slots
        for item in self.all:
            whole = answer(item.request.prompt_token_ids, item.request.sampling.max_tokens)
            assert self.published[item] == item.token_ids == whole[: len(item.token_ids)]
            assert self.num_ends[item] == 1
            assert item.finish_reason is None or item.token_ids == whole
        counts = self.engine.preemptions
        assert counts.num_restored_blocks <= counts.num_offloaded_blocks


@pytest.mark.fast
@pytest.mark.long
def test_any_order_of_events():
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=80, stateful_step_count=50, deadline=None))


@pytest.mark.slow
def test_any_order_of_many_events():
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=5000, stateful_step_count=80, deadline=None)
    )


def machine_with(num_host_blocks=30, scheduling="sync", **options):
    machine = EngineMachine()
    machine.begin(scheduling=scheduling, num_host_blocks=num_host_blocks, **options)
    return machine


@pytest.mark.fast
@pytest.mark.parametrize("leaves", ["is cancelled", "is preempted again"])
def test_blocks_that_a_copy_back_is_writing_are_not_given_away(leaves):
    machine = machine_with(num_host_blocks=3)
    sequence = machine.add(prompt_len=4)
    machine.step()
    machine.step()
    machine.preemption.request(sequence)
    machine.device.drain()
    machine.engine.settle()
    machine.engine._start()
    assert machine.engine.preemptions.num_restored_blocks > 0
    assert sequence.phase is Phase.RUNNING
    if leaves == "is cancelled":
        machine.engine.end(sequence, RequestCancelled("cancelled"))
    else:
        machine.preemption._ranges.take(3)  # nothing is saved this time
        machine.preemption.request(sequence)
    machine.what_is_under_way_keeps_its_blocks()
    num_free = machine.allocator.num_free
    machine.device.drain()
    machine.engine.settle()
    assert num_free < machine.allocator.num_free == NUM_BLOCKS


@pytest.mark.fast
def test_chunks_of_prompts_and_decode_rows_share_steps():
    machine = machine_with(scheduling="async", most_tokens=24)
    first = machine.add(prompt_len=3)
    machine.step(2)
    machine.add(prompt_len=9, max_tokens=4)
    machine.step(2)
    assert machine.device.num_mixed > 0
    assert first.is_decoding
    machine.teardown()


@pytest.mark.fast
def test_the_oldest_grows_and_the_youngest_gives_its_blocks():
    machine = machine_with(num_host_blocks=0)
    sequences = [machine.add(prompt_len=7) for _ in range(4)]
    while machine.engine.preemptions.num_preemptions == 0:
        machine.step()
    assert [item.num_preemptions for item in sequences] == [0, 0, 0, 1] or sequences[-1].phase is Phase.WAITING
    while sequences[0].phase is not Phase.ENDED:
        machine.step()
        machine.over(1)
    assert sequences[0].num_preemptions == 0
    machine.teardown()


@pytest.mark.fast
def test_none_starts_with_blocks_that_a_sequence_waits_for():
    machine = machine_with(num_host_blocks=0)
    first, second = machine.add(prompt_len=7), machine.add(prompt_len=7)
    machine.engine._start()
    assert first.phase is second.phase is Phase.RUNNING
    held = machine.allocator.reserve(machine.allocator.num_free * BLOCK_SIZE)
    machine.engine.runs = lambda sequence: True
    assert set(machine.preemption.make_room([(first, 12)], 2)) == {first, second}
    assert machine.scheduler.leaving() == (second,)
    machine.allocator.release(held)
    third = machine.add(prompt_len=14)  # four of six blocks, and two run
    machine.scheduler.give_blocks()
    assert third.phase is Phase.WAITING
    machine.scheduler.claim(0)
    machine.scheduler.give_blocks()
    assert third.phase is Phase.READY


class Holder:
    def __init__(self, name, num_blocks):
        self.name = name
        self.table = BlockAllocator(num_blocks, 1).reserve(num_blocks)

    def __repr__(self):
        return self.name


@pytest.mark.fast
def test_the_oldest_comes_first_and_the_youngest_is_preempted():
    a, b, c, d = (Holder(name, 2) for name in "abcd")
    plan = plan_room([(a, 1), (b, 1), (c, 1)], [a, b, c, d], num_free=1, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([(a, 1)], [(b, 1), (c, 1)], [d])
    plan = plan_room([(a, 3), (b, 1), (c, 1)], [a, b, c], num_free=2, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [(a, 3), (b, 1)], [c]), "c leaves, and no longer asks"
    plan = plan_room([(a, 3)], [a], num_free=0, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [(a, 3)], []), "none is left to be preempted"
    plan = plan_room([(b, 1)], [a, b], num_free=0, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [], [b]), "the youngest itself"
    plan = plan_room([(a, 1), (b, 1)], [a, b], num_free=0, num_coming=2)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [(a, 1), (b, 1)], []), "enough is coming"
    plan = plan_room([(a, 2), (b, 1)], [a, b], num_free=1, num_coming=2)
    assert plan.growing == [], "none gets what an older one waits for"
