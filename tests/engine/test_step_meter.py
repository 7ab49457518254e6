"""Counters on the device and times of steps: against counts in Python, and under a clock that is told to move."""

import random
import threading

import pytest
import torch

from baton.core.clock import VirtualClock
from baton.core.requests.sampling import SamplingParams
from baton.core.telemetry.step_report import RowCounts
from baton.engine.step.counters import StepCounters
from baton.engine.step.executor import ThreadExecutor
from baton.engine.step.meter import StepMeter
from baton.engine.step.plan import Load, Save
from baton.engine.step.result import Emitted
from baton.engine.step.runner import Runner
from baton.engine.step.tally import Dropped, Fate, StepTally
from baton.kvcache.pool import KVPool
from baton.tests.engine.driver import Driver
from baton.tests.engine.toy import ToyModel

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")


def counted(pairs, k):
    """RowCounts of (proposed, accepted) pairs, one place after the other."""
    return RowCounts(
        num_rows=len(pairs),
        num_tokens=sum(accepted + 1 for _, accepted in pairs),
        proposed_at=tuple(sum(proposed > place for proposed, _ in pairs) for place in range(k)),
        accepted_at=tuple(sum(accepted > place for _, accepted in pairs) for place in range(k)),
    )


@pytest.mark.parametrize("k", [0, 1, 3, 4, 6])
def test_counters_are_those_of_python(k):
    rng = random.Random(k)
    counters, pairs = StepCounters(k, CPU), []
    for _ in range(20):
        num_sequences = rng.randrange(1, 9)
        slots_B = torch.arange(num_sequences)
        caps = [rng.randrange(k + 1) for _ in range(num_sequences)]
        for num_drafts in rng.sample(range(k + 1), rng.randrange(1, k + 2)):  # changed live: the batch stays
            for _ in range(rng.choice([1, 2, 40])):
                proposed = [min(cap, num_drafts) for cap in caps]
                accepted = [rng.randrange(most + 1) for most in proposed]
                counters.add(
                    slots_B, torch.tensor(caps), num_drafts, torch.tensor([[length, 99] for length in accepted])
                )
                pairs += zip(proposed, accepted, strict=True)
    assert counters.read(counters.copy()) == counted(pairs, k)


def test_a_copy_stays_as_it_is():
    counters = StepCounters(2, CPU)
    counters.add(torch.arange(1), torch.tensor([2]), 2, torch.tensor([[1]]))
    copy = counters.copy()
    counters.add(torch.arange(1), torch.tensor([2]), 2, torch.tensor([[2]]))
    assert counters.read(copy) == counted([(2, 1)], 2)


def emitted(proposed_len, accepted_len):
    return Emitted((7,) * (accepted_len + 1), accepted_len, proposed_len, None, None)


def test_what_is_tallied_adds_up_to_what_was_computed():
    rng = random.Random(1)
    for k in (0, 1, 4):
        tally, executor = StepTally(k), ThreadExecutor()
        meter, computed, kept_tokens = StepMeter(k, executor, CPU), [], 0
        for _ in range(50):
            proposed_lens, accepted_lens, dropped, num_emitted = [], [], [], 0
            for _ in range(rng.randrange(1, 6)):
                proposed = rng.randrange(k + 1)
                row = emitted(proposed, rng.randrange(proposed + 1))
                computed.append((proposed, row.accepted_len))
                fate = rng.choice([None, None, Fate.LATE, Fate.FAILED])
                if fate is not None:
                    dropped.append(Dropped(fate, row))
                    continue
                num_kept = rng.randrange(1, len(row.token_ids) + 1)
                proposed_lens.append(proposed)
                accepted_lens.append(min(row.accepted_len, num_kept))
                num_emitted += num_kept
                if num_kept < len(row.token_ids):
                    dropped.append(Dropped(Fate.CUT, row, num_kept))
            tally.add_step(proposed_lens, accepted_lens, num_emitted, dropped)
            kept_tokens += num_emitted
        report = tally.report(meter, counted(computed, k))
        assert report.read == report.computed
        assert report.kept.num_tokens == kept_tokens == tally.kept().num_tokens
        assert report.num_steps == report.step_tokens.num == report.step_sequences.num == 50
        assert report.step_tokens.total == kept_tokens
        assert report.step_sequences.total == len(computed)
        assert (report.cut.num_rows, report.cut.num_draft_tokens) == (0, 0)
        executor.close()


class Side(Driver):
    """A runner over the toy model under a virtual clock; steps take as long as they are told, a quarter to sample."""

    def __init__(self, k=2, num_slots=3, **options):
        self.clock, self.step_s = VirtualClock(), 0.0
        model = ToyModel()
        pool = KVPool(model.kv_layout(4), 60, CPU)
        runner = Runner(model, pool, max_num_seqs=num_slots, num_draft_tokens=k, clock=self.clock, **options)
        super().__init__(runner, pool)
        for name, share in (("_passes", 0.25), ("_finish", 0.75)):
            setattr(runner, name, self._slow(getattr(runner, name), share))

    def _slow(self, part, share):
        def slow(work):
            self.clock.advance(self.step_s * share)
            return part(work)

        return slow

    def admit(self, slot):
        """Its prompt was computed elsewhere."""
        sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        self.resume(slot, (5, slot, 1), sampling, num_output=1, draft_token=2)

    def run(self, slots=(), step_s=0.0, **options):
        self.runner.drain()  # so that the clock belongs to this thread
        self.step_s = step_s
        ticket = self.launch(slots, **options)
        ticket.result()
        self.runner.drain()
        return ticket

    def totals(self):
        return tuple((found.num, round(found.total, 6)) for found in self.runner.meter.times())


def test_a_steps_time_and_the_gap_before_it_are_those_of_the_executor():
    side = Side()
    for slot in range(3):
        side.admit(slot)
    side.clock.advance(100.0)
    side.run((0, 1, 2), step_s=0.25)
    assert side.totals() == ((1, 0.25), (0, 0.0)), "nothing ran before"
    side.clock.advance(3.0)
    side.run((0, 1, 2), step_s=0.5)
    assert side.totals() == ((2, 0.75), (1, 3.0))
    side.clock.advance(0.125)
    side.run((0, 2), step_s=0.5)
    assert side.totals() == ((3, 1.25), (2, 3.125)), "two sequences went on"


def test_idle_time_without_work_is_no_gap():
    side = Side()
    side.admit(0)
    side.run((0,))
    side.release(0)
    side.clock.advance(60.0)
    side.admit(1)
    side.run((1,))
    assert side.totals()[1] == (0, 0.0)
    side.clock.advance(60.0)
    side.release(1)
    side.admit(1)  # the same slot, another sequence
    side.run((1,))
    assert side.totals()[1] == (0, 0.0)
    side.clock.advance(2.0)
    side.admit(2)
    side.run((1, 2))
    assert side.totals()[1] == (1, 2.0), "one went on"
    side.clock.advance(9.0)
    side.runner.meter.interrupt()
    side.run((1, 2))
    assert side.totals()[1] == (1, 2.0), "the device had other work"
    side.clock.advance(1.0)
    side.run((1, 2))
    assert side.totals()[1] == (2, 3.0)


def test_prompts_are_no_decode_steps_and_their_sequences_go_on_from_them():
    side = Side()
    side.place(0, (5, 6, 7), SamplingParams(max_tokens=40, ignore_eos=True))
    side.admit(1)
    side.run(chunks=[side.chunk(0, 2)], step_s=8.0)
    side.clock.advance(60.0)
    side.run(chunks=[side.chunk(0)], step_s=8.0)
    assert side.totals() == ((0, 0.0), (0, 0.0)), "nobody decodes"
    side.clock.advance(3.0)
    side.run((0, 1), step_s=0.5)
    assert side.totals() == ((1, 0.5), (1, 3.0)), "the host was late for the sequence whose prompt had ended"
    side.place(2, (5, 6), SamplingParams(max_tokens=40, ignore_eos=True))
    side.clock.advance(1.0)
    side.run((0, 1), chunks=[side.chunk(2)], step_s=2.0)
    assert side.totals() == ((2, 2.5), (2, 4.0)), "who decodes beside a prompt waits for it, too"


def test_a_steps_durations_are_there_when_it_is_over():
    side = Side()
    side.admit(0)
    for step_s in (1.0, 4.0):
        ticket = side.run((0,), step_s=step_s)
        assert side.runner.meter.durations_s(ticket.times) == (step_s / 4, step_s)
    over, finish = threading.Event(), side.runner._finish
    side.runner._finish = lambda work: (over.wait(10.0), finish(work))
    ticket = side.launch((0,))
    ticket.result()
    assert side.runner.meter.durations_s(ticket.times) is None
    over.set()
    side.runner.drain()
    assert side.runner.meter.durations_s(ticket.times) == (1.0, 4.0)


def test_steps_launched_ahead_have_no_gap_and_are_read_in_any_order():
    side = Side()
    side.admit(0)
    side.step_s = 0.5
    tickets = [side.launch((0,)) for _ in range(4)]
    for at in (2, 0, 3, 1):
        tickets[at].result()
    side.runner.drain()
    (num_steps, steps_s), (num_gaps, gaps_s) = side.totals()
    assert (num_steps, steps_s) == (4, 2.0)
    assert (num_gaps, gaps_s) == (3, 0.0)
    assert all(ticket.is_read for ticket in tickets)


def test_counters_are_copied_when_somebody_asks_and_never_waited_for():
    side = Side()
    side.admit(0)
    meter, open_gate = side.runner.meter, threading.Event()
    submits = []
    submit = meter._executor.submit
    meter._executor.submit = lambda *arguments: submits.append(1) or submit(*arguments)
    side.run((0,))
    meter.copy_if_wanted()
    assert len(submits) == 1, "nobody has asked"
    assert meter.computed().num_rows == 0
    meter._executor.run(lambda: open_gate.wait(10.0))
    meter.copy_if_wanted()
    meter.copy_if_wanted()
    assert len(submits) == 2, "one copy at a time"
    assert meter.computed().num_rows == 0, "it is not there yet, and nobody waits"
    open_gate.set()
    side.runner.drain()
    assert meter.computed().num_rows == 1
    assert meter.computed_now().num_rows == 1


def test_a_copy_holds_the_steps_launched_before_it():
    side = Side()
    side.admit(0)
    for at in range(1, 6):
        side.launch((0,))
        assert side.runner.meter.computed_now().num_rows == at


def test_copies_of_kv_between_steps_are_no_gap():
    side = Side(host_kv_bytes=1 << 16)
    for slot in range(2):
        side.admit(slot)
    side.run((0, 1))
    table = side.allocator.reserve(8)
    side.runner.execute(Save(table.blocks, 0, None)).get()
    side.clock.advance(4.0)
    side.run((0, 1))
    assert side.totals()[1] == (0, 0.0)
    side.runner.execute(Load(table.blocks, 0, 0))
    side.run((0, 1))
    assert side.totals()[1] == (0, 0.0)
    side.clock.advance(4.0)
    side.run((0, 1))
    assert side.totals()[1] == (1, 4.0)
