"""Scheduler, push line, allocator and prefix index against a model of what every slot holds, in any order of events.

The model remembers, slot by slot, what the KV written there depends on: the tenant, the tokens up to its position,
and with an MTP head the token after it. The first answer token, on which the last MTP entry of a prompt depends, is
drawn anew each time: if a block that depends on it were ever shared, the model would notice.
"""

from collections import Counter

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
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence
from baton.kvcache.allocator import BlockAllocator
from baton.kvtransfer.sender.service import DecodePeer
from baton.prefill_worker.push_line import PushLine
from baton.prefill_worker.request import PrefillRequest

BLOCK_SIZE = 2
TOKENS = st.integers(0, 1)


class PrefixMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 12), with_mtp=st.booleans(), chunk_len=st.sampled_from([1, 3, 9, 40]))
    def begin(self, num_blocks, with_mtp, chunk_len):
        self.set_up(BlockAllocator(num_blocks, BLOCK_SIZE), with_mtp, chunk_len)

    def set_up(self, allocator, with_mtp, chunk_len):
        self.allocator = allocator
        self.scheduler = Scheduler(self.allocator, num_slots=4)
        self.push_line = PushLine(self.scheduler, chunk_len)
        self.chunk_len = chunk_len
        self.with_mtp = with_mtp
        self.slots = {}
        self.first_tokens = {}
        self.requests = {}
        self.prompts = [[0, 1, 0, 1, 1, 0, 1, 1]]
        self.num_added = 0

    def live(self, *phases):
        return [s for s in self.scheduler.sequences() if not phases or s.phase in phases]

    def holds(self, sequence, position):
        """What the KV of a position depends on."""
        after = [*sequence.request.prompt_token_ids, self.first_tokens.get(sequence.key)]
        end = position + 1 + self.with_mtp
        return sequence.request.tenant, tuple(after[:end])

    @rule(
        base=st.integers(0, 50),
        cut=st.integers(0, 8),
        more=st.lists(TOKENS, min_size=1, max_size=4),
        tenant=st.sampled_from(["", "", "", "t"]),
        peer=TOKENS,
    )
    def add(self, base, cut, more, tenant, peer):
        self.add_one(base, cut, more, tenant, peer)

    def add_one(self, base, cut, more, tenant="", peer=0):
        self.num_added += 1
        prompt = [*self.prompts[base % len(self.prompts)][:cut], *more][:8]
        self.prompts.append(prompt)
        request = GenerationRequest(
            key=AttemptKey(f"{self.num_added:04}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=4),
            deadline_s=1e9,
            tenant=tenant,
        )
        names = block_hashes(prompt, model="m", tenant=tenant, block_size=BLOCK_SIZE, with_mtp=self.with_mtp)
        sequence = Sequence(
            request=request, checker=None, draft_cap=0, submitted_s=0.0, is_pushed=True, block_hashes=names
        )
        self.scheduler.add(sequence)
        self.requests[sequence] = PrefillRequest(sequence, DecodePeer(f"d{peer}", "", 1), None)
        self.push_line.add(self.requests[sequence])

    @rule()
    def reserve_one(self):
        self.reserve()

    def reserve(self):
        request = self.push_line.next_to_reserve(0.0)
        if request is not None:
            sequence = request.sequence
            assert sequence.num_cached < sequence.request.prompt_len, "the last token is always computed"
            assert sequence.num_cached % BLOCK_SIZE == 0
        return request

    @rule()
    def grant(self):
        self.grant_all()

    def grant_all(self):
        for sequence in self.live(Phase.RESERVING):
            self.scheduler.make_ready(sequence)
        self.scheduler.give_slots()

    @rule(data=st.data())
    def run(self, data):
        """What a loop does when all goes well."""
        while self.reserve() is not None:
            self.grant_all()
        self.step(data)

    @rule(data=st.data())
    def step_once(self, data):
        self.step(data)

    def step(self, data):
        self.scheduler.give_slots()
        chosen = self.scheduler.chunks(self.chunk_len)
        for sequence, chunk in chosen:
            assert chunk.start == sequence.num_computed >= sequence.num_cached
            if chunk.end == sequence.request.prompt_len:
                self.first_tokens[sequence.key] = data.draw(TOKENS)
            for position in range(chunk.start, chunk.end):
                self.slots[sequence.table.slot(position)] = self.holds(sequence, position)
            sequence.num_computed = chunk.end
        for sequence, chunk in chosen:
            self.scheduler.name_blocks(sequence, sequence.table, chunk.start, chunk.end)
            if sequence.num_left == 0:
                self.scheduler.send(sequence)()

    def forget(self, sequence):
        self.push_line.remove(self.requests.pop(sequence))
        self.scheduler.remove(sequence)()

    @rule()
    def acknowledge(self):
        for sequence in self.live(Phase.SENDING):
            self.forget(sequence)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fail_or_cancel(self, data):
        """At any point; blocks that a push may read stay its own."""
        sequence = data.draw(st.sampled_from(self.live()))
        if sequence.phase is Phase.WAITING:
            self.forget(sequence)
        elif sequence.phase is not Phase.ABORTING:
            self.scheduler.abort(sequence)()

    @rule()
    def drain(self):
        for sequence in self.live(Phase.ABORTING):
            self.forget(sequence)

    @invariant()
    def what_is_read_is_what_would_have_been_computed(self):
        for sequence in self.live():
            for position in range(sequence.num_computed):
                assert self.slots[sequence.table.slot(position)] == self.holds(sequence, position)

    @invariant()
    def blocks_are_held_by_their_tables_only(self):
        counts = Counter(block for s in self.live() if s.table is not None for block in s.table.blocks)
        assert self.allocator._num_tables == counts
        index = self.allocator.index
        assert {block for block in range(self.allocator.num_blocks) if index.is_resting(block)} == {
            block for block in range(self.allocator.num_blocks) if block in index and block not in counts
        }
        assert self.allocator.num_free == self.allocator.num_blocks - len(counts)
        shared = {block for block, count in counts.items() if count > 1}
        assert all(block in index for block in shared)

    @invariant()
    def a_full_prompt_that_ran_can_be_found_while_nothing_was_evicted(self):
        if self.allocator.index.num_evicted:
            return
        for sequence in self.live(Phase.SENDING):
            assert len(self.allocator.index.match(sequence.block_hashes)) == len(sequence.block_hashes)

    def teardown(self):
        if hasattr(self, "scheduler"):
            for sequence in self.live():
                self.forget(sequence)
            self.scheduler.check_empty()
            assert self.scheduler.num_slots_used == self.push_line.num_tokens_queued() == 0
            assert self.allocator.num_free == self.allocator.num_blocks
            assert self.allocator.num_reserved == 0


def test_any_order_of_events():
    run_state_machine_as_test(PrefixMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_any_order_of_many_events():
    run_state_machine_as_test(
        PrefixMachine, settings=settings(max_examples=2000, stateful_step_count=80, deadline=None)
    )
