"""A decode worker's sequences without a model: landings, prompts of its own, growth, preemption, in any order."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.clock import VirtualClock
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.decode_worker.recompute import Recompute
from baton.decode_worker.returns import Returns, admit
from baton.decode_worker.scheduler import DecodeScheduler, DecodeSequence, DecodeState
from baton.engine.preemption import MAX_PREEMPTIONS, Preemption
from baton.engine.prefill import SequenceStart
from baton.engine.speculation import Speculation
from baton.engine.step_pipeline import StepPipeline
from baton.kvcache.allocator import BlockAllocator
from baton.kvtransfer.landing import ReserveWanted
from baton.tests.engine.test_preemption_machine import BLOCK_SIZE, MOST_DRAFTS, NUM_BLOCKS, NUM_SLOTS, Runner

PROMPT_LENS, MAX_TOKENS = st.integers(1, 20), st.integers(2, 18)


class Meter:
    def interrupt(self):
        pass


class WorkerRunner(Runner):
    meter = Meter()

    def admit(self, slot, start, *, prompt_len, sampling, table, draft_cap, prompt_token_ids, output_len, choice):
        assert slot not in self.length
        assert start.prompt_len == prompt_len == len(prompt_token_ids)
        end = prompt_len - output_len + sampling.max_tokens
        self.bounds.admit(slot, prompt_len + 1, limit=table.capacity_len, end=end, max_len=1000)
        self.length[slot], self.end[slot], self.cap[slot] = prompt_len + 1, end, draft_cap
        self.blocks[slot] = list(table.blocks)


class Prefill:
    """Knows only that positions come one after the other, and fit."""

    def forward(self, chunks, on_layer):
        for chunk in chunks:
            assert 0 <= chunk.start < chunk.end <= min(len(chunk.prompt_token_ids), chunk.table.capacity_len)
        nothing = [None] * len(chunks)
        tokens = [0 if chunk.is_last else None for chunk in chunks]
        return SimpleNamespace(chunks=chunks, first_tokens=tokens, first_logprobs=nothing, prompt_logprobs=nothing)

    def draft(self, forward, on_layer):
        return [start_after(len(chunk.prompt_token_ids)) if chunk.is_last else None for chunk in forward.chunks]


def start_after(prompt_len):
    return SequenceStart(first_token=0, draft_token=0, hidden_D=None, prompt_len=prompt_len)


class Bookkeeping(RuleBasedStateMachine):
    @initialize(scheduling=st.sampled_from(["async", "sync"]), num_host_blocks=st.sampled_from([0, 3, 30]))
    def begin(self, scheduling, num_host_blocks):
        self.num_copies = self.num_copied = 0
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(self.allocator, NUM_SLOTS, overcommit=True)
        self.runner = WorkerRunner(self, num_host_blocks)
        self.steps = StepPipeline(self.runner, scheduling, Speculation(MOST_DRAFTS, MOST_DRAFTS, VirtualClock()))
        self.preemption = Preemption(self.allocator, self.scheduler, self.runner, self.steps)
        recompute = Recompute(Prefill(), 8, on_computed=self.hear)
        self.returns = Returns(self.scheduler, self.preemption, self.steps, self.runner, recompute, ())
        self.names = itertools.count()
        self.quarantined, self.scripted, self.num_first = {}, {}, {}

    def hear(self, sequence, computed):
        """Every prompt of its own has one first token, also if it gave way in between."""
        assert sequence.is_local
        assert not sequence.token_ids
        self.num_first[sequence.key] = self.num_first.get(sequence.key, 0) + (computed.first_token is not None)
        assert self.num_first[sequence.key] <= 1

    def of(self, *states):
        return [sequence for sequence in self.scheduler.sequences() if sequence.state in states]

    @rule(prompt_len=PROMPT_LENS, max_tokens=MAX_TOKENS, draft_cap=st.integers(0, 2), is_local=st.booleans())
    def submit(self, prompt_len, max_tokens, draft_cap, is_local):
        key = AttemptKey(str(next(self.names)), 1)
        request = GenerationRequest(
            key=key,
            prompt_token_ids=(0,) * prompt_len,
            sampling=SamplingParams(max_tokens=max_tokens),
            deadline_s=1e9,
            num_draft_tokens=draft_cap,
        )
        self.scheduler.add(DecodeSequence(request, None, checker=None, is_local=is_local))
        reserve = ReserveWanted(key, prompt_len, request.capacity_len, deadline_s=1e9)
        assert self.scheduler.want(reserve) is not is_local, "nobody lands in a sequence that needs no landing"

    @rule(data=st.data())
    @precondition(lambda self: self.of(DecodeState.LANDING))
    def seal(self, data):
        sequence = data.draw(st.sampled_from(self.of(DecodeState.LANDING)))
        self.scheduler.seal(sequence, None, start_after(sequence.request.prompt_len))

    @rule(data=st.data())
    @precondition(lambda self: self.of(DecodeState.LANDING))
    def fail(self, data):
        sequence = data.draw(st.sampled_from(self.of(DecodeState.LANDING)))
        self.quarantined[sequence.key] = sequence.table
        self.scheduler.quarantine(sequence)

    @rule()
    @precondition(lambda self: self.quarantined)
    def drain(self):
        key = next(iter(self.quarantined))
        self.scheduler.drained(key)
        del self.quarantined[key]

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.running())
    def preempt(self, data):
        sequence = data.draw(st.sampled_from(self.scheduler.running()))
        self.scripted[sequence] = self.scripted.get(sequence, 0) + 1
        self.preemption.request(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.sequences())
    def cancel(self, data):
        sequence = data.draw(st.sampled_from(self.scheduler.sequences()))
        if sequence.state is not DecodeState.LANDING:
            self.end(sequence)

    @rule(num_copies=st.integers(0, 3))
    def copy(self, num_copies):
        self.num_copied = min(self.num_copies, self.num_copied + num_copies)

    @rule()
    def turn(self):
        self.returns.preempt()
        self.returns.start()
        while self.scheduler.next_grant() is not None:
            pass
        while (sequence := self.scheduler.next_admission()) is not None:
            admit(self.runner, sequence, sequence.start)
        has_launched = self.returns.compute() and self.launch()
        for sequence, emitted in self.steps.collect(has_launched=has_launched):
            if sequence.state is DecodeState.RUNNING:
                most = sequence.request.sampling.max_tokens - sequence.num_output
                sequence.token_ids += emitted.token_ids[:most]
                if len(emitted.token_ids) >= most:
                    self.end(sequence)
            else:
                assert sequence.state is DecodeState.ENDED, "preempted while a step had it"

    def launch(self):
        running = self.scheduler.running()
        return self.preemption.launch([sequence.slot for sequence in running], running)

    def end(self, sequence):
        if sequence.state is DecodeState.RUNNING:
            slot = sequence.slot
            self.scheduler.retire(sequence)
            self.steps.retire(slot, lambda: self.scheduler.free(sequence))
            return
        self.preemption.forget(sequence)
        self.scheduler.drop_reserves(sequence.key)
        self.scheduler.remove(sequence)

    @invariant()
    def blocks_are_one_sequences_each(self):
        tables = [item.table for item in self.scheduler.sequences() if item.table is not None]
        held = [block for table in (*tables, *self.quarantined.values()) for block in table.blocks]
        assert len(held) == len(set(held)) <= self.allocator.num_reserved + self.allocator.num_quarantined
        quarantined = {block for table in self.quarantined.values() for block in table.blocks}
        for slot in self.runner.length:
            assert quarantined.isdisjoint(self.runner.blocks[slot])
        for sequence in self.of(DecodeState.RUNNING):
            assert self.runner.blocks[sequence.slot] == list(sequence.table.blocks)

    @invariant()
    def preemptions_are_bounded(self):
        for item in self.scheduler.sequences():
            assert item.num_preemptions <= MAX_PREEMPTIONS + self.scripted.get(item, 0)
            assert (item.saved is None) or item.state is DecodeState.PREEMPTED

    @invariant()
    def nothing_lands_in_a_sequence_that_is_computed_here(self):
        assert not any(item.is_local for item in self.of(DecodeState.LANDING))
        assert not any(item.is_local for _, item in self.scheduler.open_reserves())

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2_000):
            for sequence in self.of(DecodeState.LANDING):
                self.scheduler.seal(sequence, None, start_after(sequence.request.prompt_len))
            while self.quarantined:
                self.drain()
            if not self.scheduler.sequences():
                break
            self.copy(3)
            self.turn()
        assert not self.scheduler.sequences(), "everybody ends"
        self.num_copied = self.num_copies
        assert list(self.steps.drain()) is not None
        self.steps.settle()
        assert self.allocator.num_free == NUM_BLOCKS
        assert self.scheduler.num_slots_in_use == self.scheduler.num_coming == 0
        assert self.preemption.num_host_blocks_used == 0


TestBookkeeping = pytest.mark.fast(Bookkeeping.TestCase)
TestBookkeeping.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
