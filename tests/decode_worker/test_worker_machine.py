"""A decode worker under requests, hand-overs, failures, cancels, preemptions and steps in any order.

Whatever happens, blocks are one's own or shared by name, every request ends exactly once, its tokens are those of a
plain loop, and with prefill workers that do their part everything ends.
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

from baton.core.errors import RequestCancelled, RequestDeadlineExceeded, TransferFailed
from baton.core.requests.sampling import SamplingParams
from baton.engine.sequence import MAX_PREEMPTIONS, Phase
from baton.tests.decode_worker.incoming_transfers import PREFILLERS, Decode, expected_tokens
from baton.tests.engine.toy_engine import EOS
from baton.tests.worker.manual_executor import ManualExecutor

PROMPTS = ([5], [3, 1, 4, 1], [3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7] * 16)
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.0, "ignore_eos": False}, {"temperature": 1.0, "seed": 2})
INCARNATION_S = 100.0


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        scheduling=st.sampled_from(["async", "async", "sync"]),
        overcommit=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([0, 3, 30]),
        max_num_seqs=st.integers(1, 4),
        num_blocks=st.sampled_from([9, 12, 20]),
        chunk_len=st.sampled_from([3, 8, 40]),
        prefix_cache=st.booleans(),
        with_mtp=st.sampled_from([True, True, False]),
    )
    def begin(self, with_mtp, **options):
        model = PREFILLERS[with_mtp].model
        self.most_drafts = 2 if with_mtp else 0
        self.executor = ManualExecutor()
        self.decode = Decode(model=model, k=self.most_drafts, executor=self.executor, **options)
        self.scripted = Counter()
        self.given_up = set()  # by prefill workers
        self.num_ends = Counter()

    @property
    def incoming_transfers(self):
        return self.decode.incoming_transfers

    def here(self, *phases):
        """Requests that the worker has, by phase."""
        requests = [self.decode.requests[key] for key in self.decode.worker._requests]
        return [item for item in requests if not phases or self.decode.phase(item) in phases]

    def count_end(self, key, sink):
        end = sink.end

        def counted(error=None):
            self.num_ends[key] += not sink.ended
            assert not sink.ended or error is not None
            end(error)

        sink.end = counted

    # The router

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 14),
        k=st.integers(0, 2),
        local=st.booleans(),
        sampling=st.sampled_from(SAMPLINGS),
        num_forced=st.sampled_from([0, 0, 0, 2]),
        is_short_lived=st.sampled_from([False, False, False, True]),
    )
    def attend(self, prompt, max_tokens, k, local, sampling, num_forced, is_short_lived):
        params = {"ignore_eos": True, "max_tokens": max_tokens} | sampling
        forced = ()
        if num_forced:
            whole = self.answer(prompt, params)
            forced = whole[: min(num_forced, len(whole) - 1)]
        deadline_s = self.decode.clock.now_s() + INCARNATION_S if is_short_lived else 1e9
        request = self.decode.attend(
            [*prompt, *forced],
            f"{len(self.decode.requests):04}",
            local=local,
            k=min(k, self.most_drafts),
            num_forced=len(forced),
            deadline_s=deadline_s,
            **params,
        )
        self.count_end(request.key, self.decode.sinks[request.key])

    @staticmethod
    def answer(prompt, params):
        return expected_tokens(tuple(prompt), SamplingParams(**params))

    @rule(data=st.data())
    @precondition(lambda self: self.decode.requests)
    def cancel(self, data):
        self.decode.worker.cancel(data.draw(st.sampled_from(sorted(self.decode.requests))))

    # Prefill workers

    @rule(data=st.data())
    @precondition(lambda self: self.askable())
    def ask(self, data):
        self.incoming_transfers.ask(data.draw(st.sampled_from(self.askable())))

    def askable(self):
        """Expected, and not asked for: that, or its stream is not known here yet."""
        found = self.here(Phase.EXPECTED)
        return [
            item for item in found if item.key not in self.incoming_transfers.open and item.key not in self.given_up
        ]

    def granted(self):
        events = {event.attempt for event in self.incoming_transfers.events}
        keys = [
            key for key in self.incoming_transfers.open if self.incoming_transfers.is_granted(key) and key not in events
        ]
        return [self.decode.requests[key] for key in keys if not self.incoming_transfers.open[key].has_failed]

    @rule(data=st.data())
    @precondition(lambda self: self.granted())
    def land(self, data):
        self.hand_over(data.draw(st.sampled_from(self.granted())))

    def hand_over(self, request):
        """As a prefill worker does: an answer that ends at its first token is not handed over."""
        first = self.incoming_transfers.prefilled(request)[1].first_token
        is_last = request.num_forced + 1 == request.sampling.max_tokens
        if is_last or (first == EOS and not request.sampling.ignore_eos):
            self.fail_one(request.key)
        else:
            self.incoming_transfers.land(request)

    @rule(data=st.data())
    @precondition(lambda self: self.incoming_transfers.open)
    def fail(self, data):
        key = data.draw(st.sampled_from(sorted(self.incoming_transfers.open)))
        known = self.incoming_transfers.open[key]
        if (
            not known.is_complete
            and not known.has_failed
            and all(event.attempt != key for event in self.incoming_transfers.events)
        ):
            self.fail_one(key)

    def fail_one(self, key):
        self.given_up.add(key)
        self.incoming_transfers.fail(key, by_peer=True)

    @rule()
    def drain(self):
        for key, known in self.incoming_transfers.open.items():
            if known.has_failed and all(event.attempt != key for event in self.incoming_transfers.events):
                self.incoming_transfers.drain(key)

    # The worker

    @rule(data=st.data())
    @precondition(lambda self: self.decode.scheduler.running())
    def preempt(self, data):
        """As `preempt_at` does."""
        sequence = data.draw(st.sampled_from(self.decode.scheduler.running()))
        has_kv = sequence.num_computed > 0 or sequence.is_decoding
        if has_kv and not sequence.is_leaving and self.scripted[sequence] < 3:
            self.scripted[sequence] += 1
            self.decode.engine._preemption.request(sequence)

    @rule(num=st.sampled_from([1, 1, 2, 4]))
    def turn(self, num):
        for _ in range(num):
            self.decode.turn()

    @rule(num=st.sampled_from([1, 2, 5, 100]))
    def work_off(self, num):
        """The device gets on; else it does only what is waited for."""
        self.executor.work_off(num)

    @rule()
    def time_passes(self):
        self.decode.clock.advance(INCARNATION_S / 3)

    # What always holds

    @invariant()
    def blocks_are_ones_own_or_shared_by_name(self):
        if not hasattr(self, "decode"):
            return
        scheduler, allocator = self.decode.scheduler, self.decode.allocator
        tables = [item.table for item in scheduler.sequences() if item.table is not None]
        counts = Counter(block for table in tables for block in table.blocks)
        assert counts <= Counter(allocator._num_tables)
        num_departing = sum(allocator._num_tables.values()) - sum(counts.values())
        assert num_departing == sum(scheduler._num_departing_blocks), "every block is a sequence's, or about to be free"
        assert all(block in allocator.index for block, count in counts.items() if count > 1)
        quarantined = {block for table in scheduler._quarantined.values() for block in table.blocks}
        assert quarantined == allocator._quarantined
        free = set(allocator._free)
        assert len(free) == len(allocator._free)
        for known in self.incoming_transfers.open.values():
            if known.table is None or known.is_complete:
                continue
            written = set(known.table.blocks)  # a prefill worker may write them at any time
            assert written <= quarantined | set(counts)
            assert not written & free
            assert all(counts[block] <= 1 and block not in allocator.index for block in written)

    @invariant()
    def slots_are_ones_own(self):
        if not hasattr(self, "decode"):
            return
        scheduler = self.decode.scheduler
        slots = [item.slot for item in scheduler.sequences() if item.slot is not None]
        assert len(set(slots)) == len(slots) == len(scheduler.running())
        assert not set(slots) & set(scheduler._free_slots)
        assert len(slots) + len(scheduler._free_slots) + scheduler._num_departing == scheduler.num_slots

    @invariant()
    def preemptions_are_bounded(self):
        if not hasattr(self, "decode"):
            return
        for item in self.decode.scheduler.sequences():
            assert item.num_preemptions <= MAX_PREEMPTIONS + self.scripted[item]
            assert item.saved is None or item.phase is Phase.WAITING

    @invariant()
    def requests_that_are_not_here_have_ended(self):
        if not hasattr(self, "decode") or self.decode.worker._loop._commands:
            return
        for key, sink in self.decode.sinks.items():
            assert sink.ended is (key not in self.decode.worker._requests)
            assert self.num_ends[key] == sink.ended
        assert self.decode.worker._request_limit.num_inside == len(self.decode.worker._requests)

    def teardown(self):
        if not hasattr(self, "decode"):
            return
        decode = self.decode
        num_turns = 0
        while decode.worker._requests or decode.worker._loop._commands or self.incoming_transfers.open:
            for request in self.askable():
                self.incoming_transfers.ask(request)
            for request in self.granted():
                self.hand_over(request)
            for request in self.here(Phase.EXPECTED):
                if request.key in self.given_up and request.key not in self.incoming_transfers.open:
                    decode.worker.cancel(request.key)
            self.drain()
            decode.turn()
            num_turns += 1
            assert num_turns < 1500, f"these starve: {self.here()}"
        self.blocks_are_ones_own_or_shared_by_name()
        self.requests_that_are_not_here_have_ended()
        assert set(self.num_ends.values()) <= {1}
        for request in decode.requests.values():
            sink, tokens, expected = decode.sinks[request.key], decode.tokens(request), decode.expected(request)
            if sink.error is None:
                assert tokens == expected
            else:
                assert isinstance(sink.error, (RequestCancelled, RequestDeadlineExceeded, TransferFailed))
                assert tokens == expected[: len(tokens)]
                is_late = request.deadline_s <= decode.clock.now_s()
                assert not isinstance(sink.error, RequestDeadlineExceeded) or is_late
                assert not isinstance(sink.error, TransferFailed) or request.key in self.given_up
        decode.check_nothing_left()
        held = decode.worker.inventory()
        assert held.num_requests_finished == sum(sink.error is None for sink in decode.sinks.values())
        assert held.num_restored_blocks <= held.num_offloaded_blocks
        decode.close()


@pytest.mark.fast
@pytest.mark.long
def test_any_order_of_events():
    run_state_machine_as_test(DecodeMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_any_order_of_many_events():
    run_state_machine_as_test(
        DecodeMachine, settings=settings(max_examples=2000, stateful_step_count=60, deadline=None)
    )
