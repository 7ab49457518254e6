"""Who gets blocks, slots and the tokens of a step: order, budgets, and that nothing is lost or given twice."""

import itertools
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
from baton.engine.sequence import MAX_PREEMPTIONS, Phase, Sequence
from baton.engine.step.plan import Resume
from baton.kvcache.allocator import BlockAllocator, OutOfBlocks
from baton.kvcache.host_ranges import HostRange
from baton.kvcache.prefix_index import PrefixIndex

pytestmark = pytest.mark.fast
BLOCK_SIZE = 4
NOTHING = Resume()


def sequence_of(name, prompt, max_tokens=4, *, cap=0, kind="own", is_cached=True, **sampling):
    """`kind`: its prompt is computed here (own), its KV is received, or pushed."""
    request = GenerationRequest(
        key=AttemptKey(name, 1),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        deadline_s=1e9,
        num_draft_tokens=cap,
    )
    hashes = block_hashes(prompt, model="m", tenant="", block_size=BLOCK_SIZE, with_mtp=False)
    return Sequence(
        request=request,
        checker=None,
        draft_cap=cap,
        submitted_s=0.0,
        phase=Phase.EXPECTED if kind == "received" else Phase.WAITING,
        is_received=kind == "received",
        is_pushed=kind == "pushed",
        block_hashes=hashes if is_cached else (),
    )


class Bench:
    def __init__(self, num_blocks=20, num_slots=2, **options):
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, PrefixIndex())
        self.scheduler = Scheduler(self.allocator, num_slots=num_slots, **options)

    def add(self, name, prompt_len=8, max_tokens=4, **options):
        sequence = sequence_of(name, [ord(name)] * prompt_len, max_tokens, **options)
        self.scheduler.add(sequence)
        return sequence

    def start(self, *names, **options):
        """Sequences that run."""
        sequences = [self.add(name, **options) for name in names]
        for sequence in sequences:
            if sequence.is_received:
                self.scheduler.expect_now(sequence)
        for sequence in self.scheduler.give_blocks():
            self.land(sequence)
        self.scheduler.give_slots()
        return sequences

    def land(self, sequence):
        sequence.resume = NOTHING
        sequence.token_ids.append(0)
        self.scheduler.make_ready(sequence)

    def compute(self, budget_len=1000):
        """A step, over when this returns: chunks, and one token of each that decodes."""
        decoding = self.scheduler.decoding()
        chosen = self.scheduler.chunks(budget_len)
        for sequence in decoding:
            sequence.token_ids.append(0)
        for sequence, chunk in chosen:
            sequence.num_computed = chunk.end
            self.scheduler.name_blocks(sequence, sequence.table, chunk.start, chunk.end)
            if not sequence.num_left and not sequence.is_pushed:
                if not sequence.token_ids:
                    sequence.token_ids.append(0)
                self.scheduler.begin_decoding(sequence)
        return [(sequence.key.request_id, chunk.start, chunk.length) for sequence, chunk in chosen]

    def end(self, *sequences):
        for sequence in sequences:
            self.scheduler.remove(sequence)()
        self.scheduler.check_empty()


def names(sequences):
    return "".join(item.key.request_id for item in sequences)


# Blocks


def test_a_sequence_starts_with_every_block_that_it_may_need():
    bench = Bench()
    (a,) = bench.start("a", prompt_len=9, max_tokens=7, cap=2)
    assert len(a.table.blocks) == 5  # of 18 positions
    assert bench.allocator.num_reserved == 5
    bench.end(a)


def test_with_overcommit_it_starts_with_those_of_its_tokens_and_a_step():
    bench = Bench(overcommit=True)
    (a,) = bench.start("a", prompt_len=9, max_tokens=20, cap=2)
    assert len(a.table.blocks) == 3  # of 12 positions
    growth = bench.scheduler.add_blocks(a, 1)
    assert (growth.slot, growth.first, growth.blocks) == (a.slot, 3, a.table.blocks[3:])
    growth = bench.scheduler.add_blocks(a, 99)
    assert len(a.table.blocks) == 8, "never more than it may ever need"
    bench.end(a)


def test_with_overcommit_one_that_was_preempted_often_starts_with_every_block_that_it_may_need():
    bench = Bench(overcommit=True)
    protected = bench.add("a", max_tokens=40)
    protected.num_preemptions = MAX_PREEMPTIONS
    bench.scheduler.give_blocks()
    assert len(protected.table.blocks) == bench.allocator.num_blocks_for(protected.capacity_len) == 12


def test_with_overcommit_one_block_is_left_to_each_that_runs():
    bench = Bench(num_blocks=8, num_slots=4, overcommit=True)
    bench.start("a", "b", prompt_len=7, max_tokens=20)
    assert bench.allocator.num_free == 4
    c = bench.add("c", prompt_len=11, max_tokens=20)
    bench.scheduler.give_blocks()
    assert c.phase is Phase.WAITING, "three of four blocks, and two run"
    d = bench.add("d", prompt_len=3, max_tokens=20)
    bench.scheduler.give_blocks()
    assert d.phase is Phase.WAITING, "it fits, but came later"
    bench.end(c)
    bench.scheduler.give_blocks()
    assert d.phase is Phase.READY


def test_those_that_wait_for_a_slot_may_need_a_block_soon_too():
    bench = Bench(num_blocks=8, num_slots=1, overcommit=True)
    _, ready = bench.start("a", "b", prompt_len=7, max_tokens=20, kind="received")
    assert ready.phase is Phase.READY
    assert bench.allocator.num_free == 4
    c = bench.add("c", prompt_len=11, max_tokens=20, kind="received")
    bench.scheduler.expect_now(c)
    assert bench.scheduler.give_blocks() == []
    bench.end(c)


def test_the_line_is_not_overtaken():
    bench = Bench(num_blocks=6, num_slots=4)
    (a,) = bench.start("a", prompt_len=8, max_tokens=8)
    big, small = bench.add("b", prompt_len=8, max_tokens=8), bench.add("c", prompt_len=1, max_tokens=3)
    assert bench.scheduler.give_blocks() == []
    assert names(bench.scheduler.waiting()) == "bc"
    bench.scheduler.remove(a)()
    bench.scheduler.give_blocks()
    assert (big.phase, small.phase) == (Phase.READY, Phase.READY)


def test_what_is_received_asks_first_and_may_step_back():
    bench = Bench(num_blocks=3, num_slots=1)
    a, b = bench.add("a", kind="received"), bench.add("b", kind="received")
    assert bench.scheduler.give_blocks() == []
    assert a.phase is b.phase is Phase.EXPECTED
    for sequence in (b, a):
        bench.scheduler.expect_now(sequence)
    bench.scheduler.step_back(b)
    assert (names(bench.scheduler.waiting()), b.phase) == ("a", Phase.EXPECTED)
    bench.scheduler.expect_now(b)
    assert bench.scheduler.give_blocks() == [a], "the other asked again later"
    assert a.phase is Phase.RECEIVING
    bench.end(b)
    bench.scheduler.quarantine(a)
    assert bench.allocator.num_quarantined == 3
    bench.scheduler.drained(a)
    bench.scheduler.check_empty()


def test_blocks_of_a_received_sequence_do_not_wait_for_a_slot_but_those_of_an_own_prompt_do():
    bench = Bench(num_blocks=12, num_slots=1)
    (a,) = bench.start("a")
    own, received = bench.add("b"), bench.add("c", kind="received")
    bench.scheduler.expect_now(received)
    assert bench.scheduler.give_blocks() == [received]
    assert own.phase is Phase.WAITING
    bench.end(a, own, received)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_transfers_that_never_cease_leave_an_own_prompt_its_turn(is_preempted):
    """They take their blocks without a slot, so they are READY before what is computed here may take its own."""
    bench = Bench(num_blocks=100, num_slots=2, overcommit=True)
    arrived = bench.start("a", "b", "d", "e", kind="received")
    running = [item for item in arrived if item.phase is Phase.RUNNING]
    assert len(running) == 2
    if is_preempted:
        own = running.pop(0)
        own.num_preemptions = 1
        bench.scheduler.preempt(own)()
    else:
        own = bench.add("c")
    for turn in range(8):
        bench.scheduler.expect_now(bench.add(str(turn), kind="received"))
        for sequence in bench.scheduler.give_blocks():
            bench.land(sequence)
        running += bench.scheduler.give_slots()
        if own in running:
            break
        bench.scheduler.remove(running.pop(0))()
    assert own.phase is Phase.RUNNING, f"{turn + 1} that came later went before it"
    assert turn <= (0 if is_preempted else 3)
    bench.end(*bench.scheduler.sequences())


def test_those_behind_leave_the_blocks_to_one_that_waits_for_a_slot_alone():
    bench = Bench(num_blocks=8, num_slots=1)
    (a,) = bench.start("a")
    own, received = bench.add("b"), bench.add("c", kind="received", prompt_len=4)
    bench.scheduler.expect_now(received)
    assert bench.scheduler.give_blocks() == [received], "5 are free: 3 for b, 2 for c"
    bench.end(received)
    (other,) = [bench.add("d", kind="received", prompt_len=8)]
    bench.scheduler.expect_now(other)
    assert bench.scheduler.give_blocks() == []
    bench.end(a)
    assert bench.scheduler.give_blocks() == [other]
    assert own.phase is Phase.READY


def test_blocks_that_others_wait_for_start_none():
    bench = Bench(num_blocks=7, num_slots=3, overcommit=True)
    (a,) = bench.start("a")
    b = bench.add("b")
    bench.scheduler.claim(3)
    bench.scheduler.give_blocks()
    assert b.phase is Phase.WAITING
    bench.scheduler.claim(0)
    bench.scheduler.give_blocks()
    assert b.phase is Phase.READY
    bench.end(a, b)


def test_a_pushed_sequence_holds_blocks_for_its_prompt_alone_and_keeps_them_while_it_is_sent():
    bench = Bench(num_blocks=3, num_slots=1)
    a, b = bench.add("a", kind="pushed", max_tokens=50, prompt_len=9), bench.add("b", kind="pushed")
    assert bench.scheduler.give_blocks() == []
    bench.scheduler.hold(a, ())
    assert (a.phase, len(a.table.blocks)) == (Phase.RESERVING, 3)
    with pytest.raises(OutOfBlocks):
        bench.scheduler.hold(b, ())
    bench.scheduler.make_ready(a)
    assert bench.scheduler.give_slots() == [a]
    bench.compute()
    free = bench.scheduler.send(a)
    assert (a.phase, a.slot, bench.scheduler.num_slots_used) == (Phase.SENDING, None, 1)
    free()
    assert bench.scheduler.num_slots_used == 0
    assert bench.allocator.num_free == 0
    bench.scheduler.abort(a)()
    assert (a.phase, bench.allocator.num_free) == (Phase.ABORTING, 0), "a push may still read them"
    bench.end(a, b)


@pytest.mark.parametrize("when", ["reserving", "ready", "running"])
def test_a_pushed_sequence_that_is_given_up_keeps_its_blocks_until_it_is_removed(when):
    bench = Bench(num_slots=1)
    a = bench.add("a", kind="pushed")
    bench.scheduler.hold(a, ())
    if when != "reserving":
        bench.scheduler.make_ready(a)
    if when == "running":
        bench.scheduler.give_slots()
    free = bench.scheduler.abort(a)
    assert bench.scheduler.num_slots_used == (when == "running")
    free()
    assert bench.scheduler.num_slots_used == 0
    assert bench.allocator.num_reserved == 2
    assert bench.scheduler.give_slots() == []
    assert bench.scheduler.chunks(10) == []
    bench.end(a)


# Slots


def test_slots_are_given_in_order_of_arrival_and_come_back():
    bench = Bench(num_slots=2)
    a, b, c, d = (bench.add(name, kind="received") for name in "abcd")
    for sequence in (a, b, c, d):
        bench.scheduler.expect_now(sequence)
    bench.scheduler.give_blocks()
    for sequence in (d, c, b):
        bench.land(sequence)
    assert names(bench.scheduler.give_slots()) == "bc", "they are older than d, though it landed first"
    bench.land(a)
    assert bench.scheduler.give_slots() == []
    free = bench.scheduler.remove(b)
    assert bench.scheduler.give_slots() == [], "a step may still use its slot"
    assert bench.scheduler.num_slots_used == 2
    free()
    assert names(bench.scheduler.give_slots()) == "a"
    assert names(bench.scheduler.running()) == "ac"
    assert {a.slot, c.slot} == {0, 1}
    bench.end(a, c, d)


def test_what_a_step_in_flight_has_stays_its_own_until_it_is_over():
    bench = Bench(num_blocks=3, num_slots=2)
    (a,) = bench.start("a")
    bench.compute()
    before = bench.scheduler.decoding()
    b = bench.add("b")
    free = bench.scheduler.remove(a)
    assert before == [a], "a step in flight keeps its own list"
    assert bench.scheduler.decoding() == []
    assert (a.phase, a.slot, a.table) == (Phase.ENDED, None, None)
    assert bench.scheduler.num_coming() == 3
    bench.scheduler.give_blocks()
    assert b.phase is Phase.WAITING
    free()
    bench.scheduler.give_blocks()
    assert b.phase is Phase.READY
    bench.end(b)


# Steps


def test_chunks_take_the_oldest_first_within_the_budget():
    bench = Bench(num_slots=3)
    a, b, c = bench.start("a", "b", "c", prompt_len=5)
    assert bench.compute(8) == [("a", 0, 5), ("b", 0, 3)]
    assert bench.scheduler.num_tokens_to_compute() == 7
    assert bench.scheduler.decoding() == [a]
    assert bench.compute(4) == [("b", 3, 2), ("c", 0, 2)]
    assert bench.scheduler.decoding() == [a, b], "decode rows and chunks of others share a step"
    assert bench.compute(0) == []
    assert bench.compute(9) == [("c", 2, 3)]
    assert bench.compute(9) == []
    assert bench.scheduler.num_tokens_to_compute() == 0
    bench.end(a, b, c)


def test_what_is_about_to_be_preempted_takes_part_in_no_further_step():
    bench = Bench(overcommit=True)
    a, b = bench.start("a", "b", prompt_len=5)
    assert bench.compute(7) == [("a", 0, 5), ("b", 0, 2)]
    for sequence in (a, b):
        bench.scheduler.leave(sequence)
    assert bench.scheduler.decoding() == []
    assert bench.scheduler.chunks(9) == []
    bench.scheduler.preempt(b)()
    assert not b.is_leaving
    bench.end(a, b)


def test_what_is_reported_of_a_prompt_goes_on_where_it_was():
    bench = Bench()
    (a,) = bench.start("a", prompt_logprobs=0)
    ((_, chunk),) = bench.scheduler.chunks(5)
    assert chunk.report_from == 1
    a.num_reported = 4
    ((_, chunk),) = bench.scheduler.chunks(5)
    assert chunk.report_from == 5
    a.token_ids.append(3)
    ((_, chunk),) = bench.scheduler.chunks(5)
    assert chunk.report_from is None, "all of it was"
    bench.end(a)


def test_pushed_chunks_name_the_attempt():
    bench = Bench()
    a = bench.add("a", kind="pushed")
    bench.scheduler.hold(a, ())
    bench.scheduler.make_ready(a)
    (b,) = bench.start("b")
    pushes = {chunk.push for _, chunk in bench.scheduler.chunks(100)}
    assert pushes == {a.key, None}
    bench.end(a, b)


# The prefix cache


def test_a_block_is_named_when_its_last_position_is_written():
    bench = Bench()
    (item,) = bench.start("a", prompt_len=8)
    bench.compute(budget_len=7)
    assert bench.allocator.index.match(item.block_hashes) == item.table.blocks[:1]
    bench.compute()
    assert bench.allocator.index.match(item.block_hashes) == item.table.blocks[:2]


def test_named_blocks_are_shared_and_their_tokens_counted():
    bench = Bench(num_slots=4)
    (a,) = bench.start("a", prompt_len=9)
    assert (bench.scheduler.num_prefix_tokens, bench.scheduler.num_prefix_hits) == (9, 0)
    bench.compute()
    (again,) = bench.start("a", prompt_len=9)
    assert (again.num_cached, again.num_computed) == (8, 8)
    assert again.table.blocks[:2] == a.table.blocks[:2]
    counts = bench.scheduler
    assert (counts.num_prefix_tokens, counts.num_prefix_hit_tokens, counts.num_prefix_hits) == (18, 8, 1)
    assert bench.compute() == [("a", 8, 1)]
    bench.end(a, again)


@pytest.mark.parametrize("prompt_len", [7, 8, 9])
@pytest.mark.parametrize("num_output", [0, 1, 3])
def test_a_token_is_always_left_to_compute(prompt_len, num_output):
    bench = Bench(overcommit=True)
    (a,) = bench.start("a", prompt_len=prompt_len)
    bench.compute()
    a.token_ids = [0] * num_output
    a.is_decoding = num_output > 0
    bench.scheduler.preempt(a)()
    bench.scheduler.give_blocks()
    bench.scheduler.give_slots()
    num_to_compute = prompt_len + max(0, num_output - 1)
    assert a.num_cached == min(prompt_len // 4, (num_to_compute - 1) // 4) * 4
    assert a.num_left >= 1
    assert a.num_cached + a.num_left == a.num_tokens - (num_output > 0)
    bench.end(a)


def test_received_and_saved_sequences_share_no_blocks():
    bench = Bench(num_slots=4, overcommit=True)
    (a,) = bench.start("a")
    bench.compute()
    (received,) = bench.start("a", kind="received")
    assert received.num_cached == 0
    assert not set(received.table.blocks) & set(a.table.blocks)
    a.saved = HostRange(0, 2)
    bench.scheduler.preempt(a)()
    bench.scheduler.give_blocks()
    assert (a.phase, a.num_cached) == (Phase.READY, 0), "its KV is copied back, into blocks that nothing else reads"
    assert bench.scheduler.num_prefix_hits == 0
    bench.end(a, received)


# Preemption


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_preempted_sequence_waits_in_its_old_place_with_its_tokens(is_saved):
    bench = Bench(num_blocks=8, num_slots=2, overcommit=True)
    a, b = bench.start("a", "b", max_tokens=8, kind="received", prompt_len=7)
    for sequence in (a, b):
        bench.scheduler.begin_decoding(sequence)
    b.token_ids += [5] * 6
    bench.scheduler.add_blocks(b, 1)
    new = bench.add("c", prompt_len=3)
    bench.scheduler.leave(b)
    assert bench.scheduler.decoding() == [a]
    assert bench.scheduler.leaving() == (b,)
    assert bench.scheduler.num_coming() == 3
    assert bench.scheduler.candidates() == [a]
    b.saved = HostRange(0, 3) if is_saved else None
    b.resume = Resume(1, b"")
    free = bench.scheduler.preempt(b)
    b.num_preemptions += 1
    assert (b.phase, b.slot, b.table, b.is_leaving, b.is_decoding) == (Phase.WAITING, None, None, False, False)
    assert (b.resume is None) is not is_saved, "a hidden state goes with its KV"
    assert b.num_tokens == 14
    assert names(bench.scheduler.waiting()) == "bc"
    bench.scheduler.give_blocks()
    assert (b.phase, new.phase) == (Phase.WAITING, Phase.WAITING), "its old slot is not free yet"
    free()
    assert bench.scheduler.num_coming() == 0
    assert bench.scheduler.give_blocks() == [], "nothing is received twice"
    assert (b.phase, new.phase) == (Phase.READY, Phase.WAITING)
    assert len(b.table.blocks) == 4
    assert bench.scheduler.give_slots() == [b]
    assert bench.scheduler.running() == (a, b)
    bench.end(a, b, new)


def test_the_ready_are_preempted_too_and_the_protected_and_pushed_are_not():
    bench = Bench(num_blocks=12, num_slots=2, overcommit=True)
    a, b, c = bench.start("a", "b", "c", kind="received")
    pushed = bench.add("p", kind="pushed")
    bench.scheduler.hold(pushed, ())
    bench.scheduler.make_ready(pushed)
    assert c.phase is Phase.READY
    assert bench.scheduler.candidates() == [a, b, c]
    a.num_preemptions = MAX_PREEMPTIONS
    assert bench.scheduler.candidates() == [b, c]
    bench.scheduler.preempt(c)()
    c.num_preemptions = MAX_PREEMPTIONS
    bench.end(b)
    bench.scheduler.give_slots()
    bench.end(a)
    bench.scheduler.give_blocks()
    assert len(c.table.blocks) == 3 == bench.allocator.num_blocks_for(c.capacity_len)
    bench.end(c, pushed)


@pytest.mark.parametrize("when", ["leaving", "preempted", "ready again", "running again"])
def test_one_that_ends_while_it_is_away_leaves_nothing(when):
    bench = Bench(overcommit=True)
    a, b = bench.start("a", "b")
    bench.compute()
    bench.scheduler.leave(b)
    if when != "leaving":
        bench.scheduler.preempt(b)()
    if when in ("ready again", "running again"):
        bench.scheduler.give_blocks()
        assert b.phase is Phase.READY
    if when == "running again":
        assert bench.scheduler.give_slots() == [b]
    bench.end(b, a)
    assert bench.allocator.num_free == 20
    assert bench.scheduler.num_slots_used == bench.scheduler.num_coming() == 0
    assert bench.scheduler.sequences() == bench.scheduler.waiting() == ()
    assert bench.scheduler.give_blocks() == bench.scheduler.give_slots() == []


# Everything together


class SchedulerMachine(RuleBasedStateMachine):
    """An engine that does no arithmetic: every step is planned here, and over when the machine says so."""

    @initialize(
        num_blocks=st.integers(8, 14), num_slots=st.integers(1, 4), overcommit=st.booleans(), is_cached=st.booleans()
    )
    def begin(self, num_blocks, num_slots, overcommit, is_cached):
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, PrefixIndex())
        self.scheduler = Scheduler(self.allocator, num_slots=num_slots, overcommit=overcommit)
        self.overcommit, self.is_cached = overcommit, is_cached
        self.names = itertools.count()
        self.later = []  # what is to be done when steps are over
        self.draining = []
        self.hits = Counter()
        self.away = set()  # preempted, and not back

    def here(self, *phases, pushed=None):
        found = self.scheduler.sequences()
        return [s for s in found if (not phases or s.phase in phases) and pushed in (None, s.is_pushed)]

    @rule(
        prompt_len=st.integers(1, 12),
        max_tokens=st.integers(2, 12),
        cap=st.integers(0, 2),
        kind=st.sampled_from(["own", "own", "received", "pushed"]),
        token=st.integers(0, 1),
    )
    def add(self, prompt_len, max_tokens, cap, kind, token):
        name = f"{next(self.names):04}"
        sequence = sequence_of(name, [token] * prompt_len, max_tokens, cap=cap, kind=kind, is_cached=self.is_cached)
        self.scheduler.add(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.here(Phase.EXPECTED))
    def expect(self, data):
        self.scheduler.expect_now(data.draw(st.sampled_from(self.here(Phase.EXPECTED))))

    def start_len(self, sequence):
        request = sequence.request
        capacity_len = request.prompt_len + request.sampling.max_tokens + sequence.draft_cap
        if not self.overcommit or sequence.num_preemptions >= MAX_PREEMPTIONS:
            return capacity_len
        return min(request.prompt_len + max(1, len(sequence.token_ids)) + sequence.draft_cap, capacity_len)

    def missing(self, sequence, num_kept):
        """Blocks that are too few for a sequence that waits, with so many kept for others."""
        is_computed = sequence.saved is None and (not sequence.is_received or sequence.num_preemptions > 0)
        shared = self.scheduler.match(sequence) if is_computed else ()
        return self.allocator.num_missing(self.start_len(sequence) + num_kept * BLOCK_SIZE, shared)

    @rule(num_claimed=st.sampled_from([0, 0, 2]))
    def give_blocks(self, num_claimed):
        self.scheduler.claim(num_claimed)
        line = self.scheduler.waiting()
        num_active = len(self.here(Phase.RUNNING, Phase.READY))
        ready, num_free_slots = self.here(Phase.READY), len(self.scheduler._free_slots)
        granted = self.scheduler.give_blocks()
        got = [item for item in line if item.table is not None]
        left = [item for item in line if item.table is None]
        assert granted == [item for item in got if item.phase is Phase.RECEIVING]
        own = [item for item in got if item.phase is Phase.READY]

        def has_slot(item):
            return sum(other.order < item.order for other in (*ready, *own)) < num_free_slots

        assert all(map(has_slot, own))
        assert list(self.scheduler.waiting()) == left
        for item in got:
            is_by_transfer = item.is_received and not item.num_preemptions
            assert is_by_transfer is (item.phase is Phase.RECEIVING)
            assert len(item.table.blocks) == self.allocator.num_blocks_for(self.start_len(item))
            older = [other for other in left if other.order < item.order]
            assert is_by_transfer or not older, "it was overtaken"
            assert not any(other.is_received and not other.num_preemptions for other in older), "it was overtaken"
            self.note_hits(item)
            self.away.discard(item)
        if got:
            # Who was preempted as often as may be takes all that it will ever need, and leaves the others no margin.
            has_margin = self.overcommit and all(item.num_preemptions < MAX_PREEMPTIONS for item in got)
            assert self.allocator.num_free >= num_claimed + (num_active if has_margin else 0)
        num_kept = num_claimed
        num_active = len(self.here(Phase.RUNNING, Phase.READY))
        for item in left:  # the first that does not wait for a slot alone waits for blocks
            if not (item.is_received and not item.num_preemptions) and not has_slot(item):
                num_kept += self.allocator.num_blocks_for(self.start_len(item))
                continue
            is_modest = self.overcommit and item.num_preemptions < MAX_PREEMPTIONS
            assert self.missing(item, num_kept + num_active * is_modest), "it could have started"
            break
        self.scheduler.claim(0)

    def note_hits(self, item):
        if item.is_received and not item.num_preemptions:
            assert item.num_cached == 0
        elif item.block_hashes and item.saved is None:
            self.hits["tokens"] += item.num_tokens
            self.hits["hit_tokens"] += item.num_cached
            self.hits["hits"] += item.num_cached > 0
            named = [name in self.allocator.index._blocks for name in item.block_hashes]
            assert all(named[: item.num_cached // BLOCK_SIZE])
        assert item.num_cached == item.num_computed
        assert item.num_cached % BLOCK_SIZE == 0
        assert item.resume is not None or item.saved is not None or item.is_received or item.num_left >= 1

    @rule(data=st.data())
    @precondition(lambda self: self.here(Phase.WAITING, pushed=True))
    def hold(self, data):
        sequence = data.draw(st.sampled_from(self.here(Phase.WAITING, pushed=True)))
        shared = self.scheduler.match(sequence)
        if not self.allocator.num_missing(sequence.capacity_len, shared):
            self.scheduler.hold(sequence, shared)
            assert len(sequence.table.blocks) == self.allocator.num_blocks_for(sequence.request.prompt_len)
            self.note_hits(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.here(Phase.RECEIVING, Phase.RESERVING))
    def make_ready(self, data):
        sequence = data.draw(st.sampled_from(self.here(Phase.RECEIVING, Phase.RESERVING)))
        if sequence.is_received:
            sequence.token_ids.append(0)
            sequence.resume = NOTHING
        self.scheduler.make_ready(sequence)

    @rule()
    def give_slots(self):
        ready, free = list(self.scheduler._ready), list(self.scheduler._free_slots)
        started = self.scheduler.give_slots()
        assert started == ready[: len(free)]
        assert ready == sorted(ready, key=lambda item: item.order)
        assert {item.slot for item in started} <= set(free)
        for sequence in started:
            if sequence.resume is not None or sequence.saved is not None:
                sequence.resume = sequence.saved = None
                self.scheduler.begin_decoding(sequence)

    @rule(budget_len=st.sampled_from([1, 3, 7, 30]))
    def step(self, budget_len):
        decoding = self.scheduler.decoding()
        running = self.scheduler.running()
        assert decoding == [item for item in running if item.is_decoding and not item.is_leaving]
        decoding = self.grow(decoding)
        chosen = self.scheduler.chunks(budget_len)
        assert not {item for item, _ in chosen} & set(decoding), "both chunked and decoded"
        assert sum(chunk.length for _, chunk in chosen) <= budget_len
        wanting = [item for item in running if item.phase is Phase.RUNNING and item.num_left and not item.is_leaving]
        assert [item for item, _ in chosen] == wanting[: len(chosen)], "the oldest first, and each that has tokens"
        if len(chosen) < len(wanting):
            assert sum(chunk.length for _, chunk in chosen) == budget_len
        assert all(chunk.end == chunk.start + item.num_left for item, chunk in chosen[:-1])
        for item, chunk in chosen:
            assert (chunk.slot, chunk.start) == (item.slot, item.num_computed)
            assert chunk.length > 0
            assert (chunk.push is None) is not item.is_pushed
            item.num_computed = chunk.end
            table = item.table
            self.later.append(lambda i=item, t=table, c=chunk: self.scheduler.name_blocks(i, t, c.start, c.end))
            if item.num_left:
                continue
            if item.is_pushed:
                self.later.append(self.scheduler.send(item))
                continue
            if not item.token_ids:
                item.token_ids.append(0)
            self.scheduler.begin_decoding(item)
        for item in decoding:
            assert item.num_tokens <= len(item.table.blocks) * BLOCK_SIZE
            item.token_ids.append(0)
            if len(item.token_ids) >= item.request.sampling.max_tokens:
                self.later.append(self.scheduler.remove(item))

    def grow(self, decoding):
        """Blocks for a step, the oldest first; the youngest that may be is preempted when there is none."""
        going = []
        for item in decoding:
            if item.is_leaving or item.phase is not Phase.RUNNING:
                continue
            wanted = self.allocator.num_blocks_for(min(item.num_tokens + item.draft_cap, item.capacity_len))
            num_missing = wanted - len(item.table.blocks)
            if num_missing > 0 and num_missing > self.allocator.num_free:
                assert self.overcommit
                victim = self.scheduler.candidates()[-1]
                assert victim.order == max(s.order for s in self.scheduler.candidates())
                if victim.phase is Phase.RUNNING:
                    self.scheduler.leave(victim)
                else:
                    self.preempt_one(victim)
                continue
            if num_missing > 0:
                growth = self.scheduler.add_blocks(item, num_missing)
                assert growth.first + num_missing <= len(item.table.blocks)
            going.append(item)
        return [item for item in going if not item.is_leaving]

    @rule(data=st.data())
    @precondition(lambda self: any(item.phase is Phase.RUNNING for item in self.scheduler.candidates()))
    def leave(self, data):
        candidates = [item for item in self.scheduler.candidates() if item.phase is Phase.RUNNING]
        sequence = data.draw(st.sampled_from(candidates))
        self.scheduler.leave(sequence)
        assert sequence in self.scheduler.leaving()
        assert sequence not in self.scheduler.candidates()

    @rule(data=st.data(), is_saved=st.booleans())
    @precondition(lambda self: self.scheduler.candidates() or self.scheduler.leaving())
    def preempt(self, data, is_saved):
        candidates = self.scheduler.leaving() or self.scheduler.candidates()
        sequence = data.draw(st.sampled_from(candidates))
        self.preempt_one(sequence, is_saved=is_saved)

    def preempt_one(self, sequence, *, is_saved=False):
        sequence.saved = HostRange(0, 1) if is_saved and sequence.is_whole else None
        num_tokens = sequence.num_tokens
        sequence.num_preemptions += 1
        self.later.append(self.scheduler.preempt(sequence))
        assert (sequence.phase, sequence.num_tokens, sequence.num_computed) == (Phase.WAITING, num_tokens, 0)
        assert sequence in self.scheduler.waiting()
        self.away.add(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.sequences())
    def end(self, data):
        self.end_one(data.draw(st.sampled_from(self.scheduler.sequences())))

    def end_one(self, sequence):
        self.away.discard(sequence)
        if sequence.phase is Phase.RECEIVING:
            self.scheduler.quarantine(sequence)
            self.draining.append(sequence)
        elif sequence.is_pushed and sequence.phase not in (Phase.WAITING, Phase.ABORTING):
            num_held = len(sequence.table.blocks)
            self.later.append(self.scheduler.abort(sequence))
            assert len(sequence.table.blocks) == num_held
        else:
            self.later.append(self.scheduler.remove(sequence))

    @rule()
    def over(self):
        later, self.later = self.later, []
        for act in later:
            act()

    @rule()
    @precondition(lambda self: self.draining)
    def drain(self):
        self.scheduler.drained(self.draining.pop())

    @invariant()
    def blocks_and_slots_add_up(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler, allocator = self.scheduler, self.allocator
        counts = Counter(block for item in self.here() if item.table is not None for block in item.table.blocks)
        assert counts <= Counter(allocator._num_tables)
        num_departing = sum(allocator._num_tables.values()) - sum(counts.values())
        leaving = sum(len(item.table.blocks) for item in self.here() if item.is_leaving)
        assert scheduler.num_coming() == num_departing + leaving
        assert all(block in allocator.index for block, count in counts.items() if count > 1)
        slots = [item.slot for item in self.here() if item.slot is not None]
        assert len(set(slots)) == len(slots)
        assert not set(slots) & set(scheduler._free_slots)
        assert scheduler.num_slots_used == scheduler.num_slots - len(scheduler._free_slots)
        assert set(scheduler.running()) == set(self.here(Phase.RUNNING))
        assert all((item.slot is not None) is (item.phase is Phase.RUNNING) for item in self.here())
        holds = (Phase.RESERVING, Phase.RECEIVING, Phase.READY, Phase.RUNNING, Phase.SENDING, Phase.ABORTING)
        assert all((item.table is not None) is (item.phase in holds) for item in self.here())

    @invariant()
    def the_queues_hold_who_is_in_them(self):
        if not hasattr(self, "scheduler"):
            return
        line = list(self.scheduler.waiting())
        assert set(line) == set(self.here(Phase.WAITING, pushed=False))
        assert [item.order for item in line] == sorted({item.order for item in line})
        assert self.away <= set(line), "who is preempted waits until it comes back"
        assert set(self.scheduler._ready) == set(self.here(Phase.READY))
        assert self.scheduler.num_tokens_to_compute() == sum(item.num_left for item in self.here(Phase.RUNNING))

    @invariant()
    def hits_are_counted(self):
        if hasattr(self, "scheduler"):
            scheduler = self.scheduler
            counted = (scheduler.num_prefix_tokens, scheduler.num_prefix_hit_tokens, scheduler.num_prefix_hits)
            assert counted == (self.hits["tokens"], self.hits["hit_tokens"], self.hits["hits"])

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for turn in itertools.count():
            while self.draining:  # blocks that a writer keeps for ever are nobody's
                self.drain()
            if not self.scheduler.sequences():
                break
            assert turn < 1000, "these starve"
            self.go_on()
        self.over()
        while self.draining:
            self.drain()
        self.scheduler.check_empty()
        assert self.allocator.num_free == self.allocator.num_blocks
        assert not self.scheduler.waiting()

    def go_on(self):
        """One turn in which everybody does their part."""
        for item in self.here(Phase.EXPECTED):
            self.scheduler.expect_now(item)
        for item in self.here(Phase.SENDING, Phase.ABORTING):
            self.end_one(item)
        for item in self.here(Phase.WAITING, pushed=True):
            if not self.allocator.num_missing(item.capacity_len):
                self.scheduler.hold(item, ())
                self.note_hits(item)
                self.scheduler.make_ready(item)
        self.give_blocks(0)
        for item in self.here(Phase.RECEIVING, Phase.RESERVING):
            if item.is_received:
                item.token_ids.append(0)
                item.resume = NOTHING
            self.scheduler.make_ready(item)
        self.give_slots()
        self.step(16)
        self.over()
        for item in self.scheduler.leaving():
            item.num_preemptions += 1
            self.scheduler.preempt(item)()


@pytest.mark.long
def test_any_order_of_events():
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
def test_any_order_of_many_events():
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=5000, stateful_step_count=80, deadline=None)
    )
