"""Who runs, waits, grows and gives way, without a model: any order of events, any number of accepted drafts.

The runner here knows what a device would do at once: it moves lengths when a step is launched, and says when a step
would write a block that its sequence does not have, or that somebody else has.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.clock import VirtualClock
from baton.engine.length_bounds import LengthBounds
from baton.engine.local_scheduler import LocalScheduler, LocalSequence
from baton.engine.preemption import MAX_PREEMPTIONS, Preemption, plan_room
from baton.engine.speculation import Speculation
from baton.engine.step_pipeline import StepPipeline
from baton.engine.step_ticket import DecodeOutput
from baton.kvcache.allocator import BlockAllocator
from baton.tests.engine.toy_engine import request_of

NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 10, 4, 4
MOST_DRAFTS = 2


class Future:
    def __init__(self, machine):
        self.machine, self.number = machine, machine.num_copies
        machine.num_copies += 1

    @property
    def is_done(self):
        return self.number < self.machine.num_copied


class Offload:
    def __init__(self, machine, num_blocks):
        self.machine, self.num_blocks = machine, num_blocks
        self.held = {}
        self.loads = []

    def save(self, blocks, first, slot):
        self.held[first] = len(blocks)
        return Future(self.machine)

    def load(self, blocks, first, slot):
        assert self.held[first] == len(blocks)
        self.loads.append((Future(self.machine), set(blocks)))
        return self.loads[-1][0]


class Ticket:
    def __init__(self, runner, slots, emitted):
        self.runner, self.slots, self.emitted = runner, slots, emitted
        self.is_done = False

    def result(self):
        self.is_done = True
        self.machine.num_copied = max(self.machine.num_copied, self.num_copies_before)
        self.runner.bounds.collect(self.launched, self.np.array(self.emitted))
        accepted = tuple(count - 1 for count in self.emitted)
        return DecodeOutput(
            token_ids=tuple((0,) * count for count in self.emitted), accepted_lens=accepted, proposed_lens=accepted
        )


class Runner:
    import numpy as np

    def __init__(self, machine, num_host_blocks):
        self.rng = random.Random(0)
        self.kv_offload = Offload(machine, num_host_blocks)
        self.bounds = LengthBounds(NUM_SLOTS)
        self.length, self.end, self.cap, self.blocks, self.last = {}, {}, {}, {}, {}

    def admit(self, slot, sequence):
        assert slot not in self.length
        length = sequence.request.prompt_len + len(sequence.token_ids)
        limit = sequence.table.capacity_len
        end = sequence.request.prompt_len + sequence.request.sampling.max_tokens
        self.bounds.admit(slot, length, limit=limit, end=end, max_len=1000)
        self.length[slot], self.end[slot], self.cap[slot] = length, end, sequence.draft_cap
        self.blocks[slot] = list(sequence.table.blocks)

    def _most(self, slots):
        return self.np.array([self.cap[slot] + 1 for slot in slots])

    def unfinished(self, slots):
        going = self.bounds.unfinished(self.np.array(slots))
        return tuple(slot for slot, goes in zip(slots, going, strict=True) if goes)

    def short_of_room(self, slots):
        short = self.bounds.short_of_room(self.np.array(slots), self._most(slots))
        return [(slots[place], wanted_len) for place, wanted_len in short]

    def draft_caps(self, slots):
        return tuple(self.cap[slot] for slot in slots)

    def set_num_drafts(self, num_drafts):
        assert num_drafts <= MOST_DRAFTS

    def grow(self, growths):
        for growth in growths:
            assert len(self.blocks[growth.slot]) == growth.first
            self.blocks[growth.slot] += growth.blocks
            self.bounds.grow(growth.slot, len(self.blocks[growth.slot]) * BLOCK_SIZE)

    def launch(self, slots):
        for slot in slots:
            written_len = min(self.length[slot] + self.cap[slot], self.end[slot])
            assert written_len <= len(self.blocks[slot]) * BLOCK_SIZE, "a step writes beyond its blocks"
        emitted = [self.rng.randint(1, self.cap[slot] + 1) for slot in slots]
        ticket = Ticket(self, slots, emitted)
        ticket.np, ticket.machine = self.np, self.kv_offload.machine
        ticket.num_copies_before = ticket.machine.num_copies
        ticket.launched = self.bounds.launch(self.np.array(slots), self._most(slots))
        for slot, count in zip(slots, emitted, strict=True):
            self.length[slot] += count
            self.last[slot] = ticket
        return ticket

    def release(self, slot):
        for known in (self.length, self.end, self.cap):
            del known[slot]
        ticket = self.last.pop(slot, None)
        if ticket is None or ticket.is_done:
            del self.blocks[slot]
            return None
        return ticket

    def drain(self):
        pass


class Bookkeeping(RuleBasedStateMachine):
    @initialize(scheduling=st.sampled_from(["async", "sync"]), num_host_blocks=st.sampled_from([0, 3, 30]))
    def begin(self, scheduling, num_host_blocks):
        self.num_copies = self.num_copied = 0
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = LocalScheduler(self.allocator, num_slots=NUM_SLOTS, chunk_len=8, overcommit=True)
        self.runner = Runner(self, num_host_blocks)
        self.steps = StepPipeline(self.runner, scheduling, Speculation(MOST_DRAFTS, MOST_DRAFTS, VirtualClock()))
        self.preemption = Preemption(self.allocator, self.scheduler, self.runner, self.steps)
        self.sequences = []
        self.scripted = {}

    @rule(prompt_len=st.integers(1, 20), max_tokens=st.integers(1, 18), draft_cap=st.integers(0, 2))
    def submit(self, prompt_len, max_tokens, draft_cap):
        request = request_of([0] * prompt_len, k=draft_cap, max_tokens=max_tokens)
        sequence = LocalSequence(request=request, draft_cap=draft_cap, finish=None, submitted_s=0.0)
        self.scheduler.submit(sequence)
        self.sequences.append(sequence)

    @rule(data=st.data())
    @precondition(lambda self: any(not item.is_giving_way for item in self.scheduler.running()))
    def preempt(self, data):
        sequence = data.draw(st.sampled_from([item for item in self.scheduler.running() if not item.is_giving_way]))
        self.scripted[sequence] = self.scripted.get(sequence, 0) + 1
        self.preemption.request(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.sequences)
    def cancel(self, data):
        self.end(data.draw(st.sampled_from(self.sequences)))

    @rule(num_copies=st.integers(0, 3))
    def copy(self, num_copies):
        self.num_copied = min(self.num_copies, self.num_copied + num_copies)

    @rule(launches=st.sampled_from([True, True, False]))
    def step(self, launches=True):
        """One turn; a worker that computes something again launches nothing in it."""
        self.steps.settle()
        self.preemption.preempt_due()
        for sequence in self.scheduler.start_waiting():
            if sequence.saved is None:
                self.preemption.started_again(sequence)
            else:
                self.admit(sequence)
                self.preemption.load(sequence, sequence.slot)
        for sequence, chunk in self.scheduler.next_chunks():
            sequence.num_prefilled = chunk.end
            if chunk.is_last:
                if chunk.next_token is None:
                    self.take(sequence, (0,))
                if sequence in self.sequences:
                    self.admit(sequence)
        decoding = self.scheduler.decoding()
        has_launched = launches and self.preemption.launch([item.slot for item in decoding], decoding)
        for sequence, emitted in self.steps.collect(has_launched=has_launched):
            if sequence in self.sequences:
                assert sequence.is_decoding, "preempted while a step had it"
                self.take(sequence, emitted.token_ids)

    def admit(self, sequence):
        self.runner.blocks.pop(sequence.slot, None)
        self.runner.admit(sequence.slot, sequence)
        sequence.is_decoding = True

    def take(self, sequence, token_ids):
        max_tokens = sequence.request.sampling.max_tokens
        sequence.token_ids += token_ids[: max_tokens - len(sequence.token_ids)]
        if len(sequence.token_ids) == max_tokens:
            self.end(sequence)

    def end(self, sequence):
        self.sequences.remove(sequence)
        if sequence.is_decoding:
            slot = sequence.slot
            sequence.is_decoding = False
            self.steps.retire(slot, self.scheduler.retire(sequence))
        else:
            self.scheduler.remove(sequence)
            self.preemption.forget(sequence)

    @invariant()
    def blocks_are_one_sequences_each(self):
        held = [block for slot in self.runner.length for block in self.runner.blocks[slot]]
        assert len(held) == len(set(held))
        running = [block for item in self.scheduler.running() for block in item.table.blocks]
        assert set(held) <= set(running)
        assert len(running) == len(set(running)) <= self.allocator.num_reserved

    @invariant()
    def nobody_gets_blocks_that_a_copy_back_is_writing(self):
        for future, blocks in self.runner.kv_offload.loads:
            assert future.is_done or not blocks & set(self.allocator._free)

    @invariant()
    def preemptions_are_bounded(self):
        for item in self.sequences:
            assert item.num_preemptions <= MAX_PREEMPTIONS + self.scripted.get(item, 0)

    @invariant()
    def queues_are_in_order_of_arrival(self):
        for queue in (self.scheduler._waiting, self.scheduler._running):
            assert [item.order for item in queue] == sorted(item.order for item in queue)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2_000):
            if not self.sequences:
                break
            self.copy(3)
            self.step()
        assert not self.sequences, "everybody ends"
        self.num_copied = self.num_copies
        assert list(self.steps.drain()) is not None
        self.scheduler.check_empty()
        assert self.scheduler.is_idle
        assert self.preemption.num_host_blocks_used == 0


TestBookkeeping = pytest.mark.fast(Bookkeeping.TestCase)
TestBookkeeping.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.fast
@pytest.mark.parametrize("leaves", ["is cancelled", "gives way again"])
def test_blocks_that_a_copy_back_is_writing_are_not_given_away(leaves):
    machine = Bookkeeping()
    machine.begin(scheduling="sync", num_host_blocks=3)
    machine.submit(prompt_len=4, max_tokens=18, draft_cap=0)
    (sequence,) = machine.sequences
    machine.step()
    machine.step()
    machine.preemption.request(sequence)
    machine.copy(1)
    machine.step(launches=False)
    assert machine.preemption.counts.num_restored_blocks > 0
    if leaves == "is cancelled":
        machine.end(sequence)
    else:
        machine.preemption._ranges.take(3)  # nothing is saved this time
        machine.preemption.request(sequence)
    machine.nobody_gets_blocks_that_a_copy_back_is_writing()
    num_free = machine.allocator.num_free
    machine.copy(3)
    machine.steps.settle()
    assert num_free < machine.allocator.num_free == NUM_BLOCKS


class Holder:
    def __init__(self, name, num_blocks):
        self.name = name
        self.table = BlockAllocator(num_blocks, 1).reserve(num_blocks)

    def __repr__(self):
        return self.name


@pytest.mark.fast
def test_the_oldest_comes_first_and_the_youngest_gives_way():
    a, b, c, d = (Holder(name, 2) for name in "abcd")
    plan = plan_room([(a, 1), (b, 1), (c, 1)], [a, b, c, d], num_free=1, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([(a, 1)], [(b, 1), (c, 1)], [d])
    plan = plan_room([(a, 3), (b, 1), (c, 1)], [a, b, c], num_free=2, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [(a, 3), (b, 1)], [c]), "c gives way, and no longer asks"
    plan = plan_room([(a, 3)], [a], num_free=0, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [(a, 3)], []), "nobody to give way"
    plan = plan_room([(b, 1)], [a, b], num_free=0, num_coming=0)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [], [b]), "the youngest itself"
    plan = plan_room([(a, 1), (b, 1)], [a, b], num_free=0, num_coming=2)
    assert (plan.growing, plan.waiting, plan.victims) == ([], [(a, 1), (b, 1)], []), "enough is coming"
    plan = plan_room([(a, 2), (b, 1)], [a, b], num_free=1, num_coming=2)
    assert plan.growing == [], "nobody younger gets what an older one waits for"
