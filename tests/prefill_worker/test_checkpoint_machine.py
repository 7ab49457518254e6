"""The machine of `test_prefix_machine` where sequences keep state: what each state slot holds, and who begins with it.

The state of a sequence depends on its tenant and on its tokens so far, exactly. A step copies checkpoints in, computes,
and copies checkpoints out; steps run in the order in which they are launched, and the scheduler hears of a step's end
when the next one is planned, as with asynchronous scheduling.
"""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from baton.core import block_hash
from baton.core.block_hash import checkpoint_name
from baton.engine.sequence import Phase
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.state_checkpoints import StateCheckpoints
from baton.router.placement.members import Incarnation
from baton.router.placement.prefix_index import FleetPrefixIndex
from baton.tests.prefill_worker.test_prefix_machine import BLOCK_SIZE, TOKENS, PrefixMachine

NUM_SEQUENCES = 5
WORKER = Incarnation("w", 1)


class CheckpointMachine(PrefixMachine):
    @initialize(
        num_blocks=st.integers(4, 12), with_mtp=st.booleans(), chunk_len=st.sampled_from([1, 3, 9, 40]),
        num_checkpoints=st.integers(0, 4), interval=st.sampled_from([0, BLOCK_SIZE, 3 * BLOCK_SIZE]),
    )  # fmt: skip
    def begin(self, num_blocks, with_mtp, chunk_len, num_checkpoints, interval):
        self.log = BlockLog()
        slots = range(NUM_SEQUENCES, NUM_SEQUENCES + num_checkpoints)
        self.checkpoints = StateCheckpoints(slots, self.log, interval=interval)
        index = PrefixIndex(self.log, self.checkpoints)
        allocator = BlockAllocator(num_blocks, BLOCK_SIZE, index, num_state_slots=NUM_SEQUENCES)
        self.set_up(allocator, with_mtp, chunk_len)
        self.router = FleetPrefixIndex()
        self.router.join(WORKER)
        self.states = {}  # by state slot
        self.prefixes = {}  # by the name of their last blocks
        self.later = deque()

    def state_of(self, sequence, length):
        return sequence.request.tenant, sequence.request.prompt_token_ids[:length]

    def reserve(self):
        request = super().reserve()
        if request is not None:
            for at, name in enumerate(request.sequence.block_hashes, start=1):
                self.prefixes[name] = self.state_of(request.sequence, at * BLOCK_SIZE)
        return request

    def step(self, data):
        self.scheduler.give_slots()
        chosen = self.scheduler.chunks(self.chunk_len)
        for sequence, chunk in chosen:
            own = sequence.table.state_slot
            if chunk.begin_with is not None:
                self.states[own] = self.states[chunk.begin_with]
            elif not chunk.start:
                self.states[own] = self.state_of(sequence, 0)
        for sequence, chunk in chosen:
            own = sequence.table.state_slot
            assert self.states[own] == self.state_of(sequence, chunk.start), "a step begins with the state before it"
            self.states[own] = self.state_of(sequence, chunk.end)
            if chunk.end == sequence.request.prompt_len:
                self.first_tokens[sequence.key] = data.draw(TOKENS)
            for position in range(chunk.start, chunk.end):
                self.slots[sequence.table.slot(position)] = self.holds(sequence, position)
            sequence.num_computed = chunk.end
        for sequence, chunk in chosen:
            for position, slot in chunk.keep_in:
                assert chunk.start < position <= chunk.end
                self.states[slot] = self.state_of(sequence, position)
        self.settle()
        self.later.extend((sequence, sequence.table, chunk) for sequence, chunk in chosen)

    @rule(
        prompts=st.lists(
            st.tuples(st.integers(0, 50), st.integers(2, 8), st.lists(TOKENS, min_size=1, max_size=4)),
            min_size=1, max_size=4,
        ),
        num_steps=st.integers(1, 8), data=st.data(),
    )  # fmt: skip
    def serve(self, prompts, num_steps, data):
        """Prompts that begin like others, as far as so many steps bring them."""
        for base, cut, more in prompts:
            self.add_one(base, cut, more)
        for _ in range(num_steps):
            while self.reserve() is not None:
                self.grant_all()
            self.step(data)
            for sequence in self.live(Phase.SENDING):
                self.forget(sequence)

    @rule()
    def settle_now(self):
        self.settle()

    def settle(self):
        """The steps launched so far are over."""
        while self.later:
            sequence, table, chunk = self.later.popleft()
            self.scheduler.name_blocks(sequence, table, chunk.start, chunk.end, chunk.keep_in)
            if sequence.phase is Phase.RUNNING and chunk.end == sequence.request.prompt_len:
                self.scheduler.send(sequence)()

    def forget(self, sequence):
        self.settle()  # blocks are given back when the last step is over
        super().forget(sequence)

    @invariant()
    def a_checkpoint_has_the_state_of_its_prefix(self):
        for name, slot in self.checkpoints._kept.items():
            assert self.states[slot] == self.prefixes[name]
            assert self.allocator.index.has(name), "it went with its block"

    @invariant()
    def a_state_slot_is_a_sequences_or_a_checkpoints(self):
        held = [sequence.table.state_slot for sequence in self.live() if sequence.table is not None]
        assert len(set(held)) == len(held) == self.allocator.state_slots.num_held
        assert not set(held) & set(self.checkpoints._kept.values())
        filling = [slot for _, _, chunk in self.later for _, slot in chunk.keep_in]
        assert sorted(filling) == sorted(self.checkpoints._filling)
        about_to_begin = [sequence.checkpoint for sequence in self.live() if sequence.checkpoint is not None]
        assert +self.checkpoints._num_users == {name: about_to_begin.count(name) for name in about_to_begin}

    @invariant()
    def readers_hear_of_rows_and_of_checkpoints(self):
        assert set(self.log._names) == {*self.allocator.index._blocks, *map(checkpoint_name, self.checkpoints._kept)}

    @invariant()
    def a_hit_that_the_router_predicts_is_the_hit_that_is_found(self):
        for change in self.log.since(self.router.version(WORKER)):
            assert self.router.apply(WORKER, change)
        for sequence in self.live(Phase.WAITING):
            names = sequence.block_hashes[: (sequence.request.prompt_len - 1) // BLOCK_SIZE]
            assert self.router.match_checkpoints(names, 0.0)[WORKER] == len(self.scheduler.match(sequence))

    @invariant()
    def a_full_prompt_that_ran_can_be_found_while_nothing_was_evicted(self):
        if self.allocator.index.num_evicted:
            return
        for sequence in self.live(Phase.SENDING):
            assert len(self.allocator.index.run(sequence.block_hashes)) == len(sequence.block_hashes)

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.settle()
            super().teardown()
            assert self.checkpoints.num_in_use == self.checkpoints.num_filling == 0


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(block_hash, "TURN_LEN", 0)  # prompts have twelve tokens at most
    monkeypatch.setattr(block_hash, "MIN_CHECKPOINT_LEN", 0)


def test_any_order_of_events():
    run_state_machine_as_test(
        CheckpointMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
def test_any_order_of_many_events():
    run_state_machine_as_test(
        CheckpointMachine, settings=settings(max_examples=2000, stateful_step_count=80, deadline=None)
    )
