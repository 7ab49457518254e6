"""Nothing that a step computed is lost or counted twice: proposed, accepted, emitted and streamed, whatever ends when.

Three counts that know nothing of each other are compared: the counters on the device, the fates that readers of results
tell, and what this file takes from the steps themselves (how far they moved the lengths) and from the streams.
"""

import itertools
import random

import pytest
import torch

from baton.core.clock import VirtualClock
from baton.core.requests.request import FinishReason
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.telemetry.step_report import RowCounts
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine.local import LocalEngine
from baton.engine.step.counters import StepCounters
from baton.engine.step.runner import Runner
from baton.engine.step.tally import Fate, StepTally
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kvcache.pool import KVPool
from baton.tests.engine.driver import Driver
from baton.tests.engine.test_grammar_engine import engine_of, requests_for
from baton.tests.engine.test_step_meter import counted
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine
from baton.tests.model.ranks import channel_of, on_ranks
from baton.tests.worker.manual_executor import ManualExecutor

fast = pytest.mark.fast


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Steps:
    """What steps computed, as (proposed, accepted) of every row, by how far they moved the lengths."""

    def __init__(self):
        self.rows = []
        self.num_steps = 0

    def watch(self, runner):
        """From now on; where no sequence of a step decodes, nothing is counted."""
        write = runner._write_sample

        def write_watched(work):
            of_decode, _ = work.sampled
            if of_decode is not None:
                accepted = (of_decode.state.length_B - work.decode.state.length_B - 1).tolist()
                proposed = work.decode.rows.draft_cap_B.clamp(max=work.decode.num_drafts).tolist()
                # A sequence whose grammar is late emits nothing: that is no row.
                self.rows += [row for row in zip(proposed, accepted, strict=True) if row[1] >= 0]
                self.num_steps += 1
            return write(work)

        runner._write_sample = write_watched


@pytest.fixture
def steps(monkeypatch):
    found, make = Steps(), Runner.__init__

    def make_watched(self, *arguments, **options):
        make(self, *arguments, **options)
        found.watch(self)

    monkeypatch.setattr(Runner, "__init__", make_watched)
    return found


@pytest.fixture
def in_turn(monkeypatch):
    """Steps run when they are waited for, so that what a workload holds is the same from run to run."""
    monkeypatch.setattr("baton.engine.step.runner.executor_for", lambda device: ManualExecutor())


class Streams:
    """What streams were given after their first tokens, which prefill makes, and the counts of their results."""

    def __init__(self):
        self.num_first = self.num_tokens = self.num_events = 0
        self.results = []

    def take(self, events):
        begun = set()
        for event in events:
            if event.token_ids and event.choice in begun:
                self.num_tokens += len(event.token_ids)
                self.num_events += 1
            elif event.token_ids:
                begun.add(event.choice)
                self.num_first += 1
            if event.result is not None:
                self.results.append(event.result)


def check(engine, steps, streams, k):
    """Every identity; the engine has read all its steps."""
    report = engine.step_report()
    assert engine.engine.is_idle
    assert report.computed == counted(steps.rows, k)
    assert report.read == report.computed
    assert report.num_steps == report.step_s.num == steps.num_steps
    assert report.kept.num_tokens == streams.num_tokens
    assert report.kept.num_rows == streams.num_events
    counts = [result.counts for result in streams.results]
    assert report.kept.num_rows == sum(one.num_verify_steps for one in counts)
    assert report.kept.num_draft_tokens == sum(one.num_draft_tokens for one in counts)
    assert report.kept.num_accepted_tokens == sum(one.num_accepted_tokens for one in counts)
    assert report.kept.num_tokens + streams.num_first == sum(one.num_emitted_tokens for one in counts)
    assert report.kept.num_tokens + streams.num_first == sum(len(result.token_ids) for result in streams.results)
    by_place = itertools.zip_longest(*(one.num_accepted_at for one in counts), fillvalue=0)
    assert report.kept.accepted_at == (*map(sum, by_place), *(0,) * k)[:k]
    assert report.step_tokens.total == report.kept.num_tokens
    assert report.step_sequences.total == report.computed.num_rows
    assert report.host_gap_s.num <= report.num_steps
    assert report.late.num_rows == 0 or engine.engine._num_ahead
    return report


def some_request(rng, k, now_s, is_long):
    end = rng.choice(["length"] if is_long else ["length", "stop", "text", "eos"])
    sampling = {"temperature": rng.choice([0.0, 0.0, 1.0]), "seed": rng.randrange(99), "ignore_eos": end != "eos"}
    if end == "stop":
        sampling["stop_token_ids"] = tuple(rng.sample(range(22), 3))
    if end == "text":
        sampling["stop"] = (chr(ord("a") + rng.randrange(22)), "bc")
    prompt = [rng.randrange(22) for _ in range(rng.randrange(8 if is_long else 1, 12))]
    sampling |= {"max_tokens": rng.randrange(10 if is_long else 1, 16), "n": rng.choice([1, 1, 2])}
    deadline_s = now_s + rng.choice([0.006, 1e6, 1e6, 1e6, 1e6, 1e6])
    return request_of(prompt, k=rng.randrange(k + 1), deadline_s=deadline_s, **sampling)


def run_workload(seed, k, scheduling, *, is_long=False, **options):
    """Random requests side by side, some given up midway, some overdue; the engine, and what the streams were given."""
    rng = random.Random(seed)
    clock = VirtualClock()
    engine = toy_engine(
        ToyModel(sharpness=rng.choice([2.0, 6.0])), k=k, scheduling=scheduling, clock=clock, chunk_len=7, **options
    )
    streams = Streams()
    num_waiting = 36
    open_requests = []
    while num_waiting or open_requests:
        while num_waiting and rng.random() < 0.7:
            num_waiting -= 1
            request = some_request(rng, k, clock.now_s(), is_long)
            engine.submit(request)
            open_requests.append(request)
        engine.step()
        clock.advance(0.001)
        for request in tuple(open_requests):
            is_over = not engine._caller.num_open[request.key]
            if is_over or rng.random() < (0.01 if is_long else 0.04):
                events = engine._caller.unread[
                    request.key
                ]  # a list of its own, to which the ends of a cancel are added
                engine._forget([request])
                streams.take(events)
                open_requests.remove(request)
    engine._forget([])
    return engine, streams


@pytest.mark.long
@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [*range(5), 6])
def test_nothing_is_lost_between_the_steps_and_the_streams(k, scheduling, steps, in_turn):
    engine, streams = run_workload(k, k, scheduling)
    report = check(engine, steps, streams, k)
    assert (report.late.num_rows > 0) == (scheduling == "async")
    assert k < 2 or report.cut.num_tokens > 0
    assert report.host_gap_s.num > 0


PREEMPTIONS = {
    "scripted": {"preempt_at": (2, 5)},
    "few blocks": {"num_blocks": 14, "max_num_sequences": 8, "overcommit": True},
    "host memory": {"num_blocks": 14, "max_num_sequences": 8, "overcommit": True, "host_kv_bytes": 1 << 20},
}


@pytest.mark.long
@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("how", PREEMPTIONS)
def test_nothing_is_lost_when_sequences_are_preempted(how, scheduling, steps):
    engine, streams = run_workload(10, 3, scheduling, is_long=True, **PREEMPTIONS[how])
    check(engine, steps, streams, 3)
    assert engine.preemptions.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_in_many_workloads(seed, scheduling, steps):
    options = (*PREEMPTIONS.values(), {})[seed % 4]
    engine, streams = run_workload(100 + seed, seed % 5, scheduling, **options)
    check(engine, steps, streams, seed % 5)


@pytest.mark.long
@fast
@pytest.mark.parametrize("forgotten", Fate)
def test_a_reader_that_forgets_a_fate_is_noticed(forgotten, steps, in_turn, monkeypatch):
    add_step = StepTally.add_step

    def forgetful(self, proposed_lens, accepted_lens, num_emitted, dropped=()):
        told = [item for item in dropped if item.fate is not forgotten]
        add_step(self, proposed_lens, accepted_lens, num_emitted, told)

    monkeypatch.setattr(StepTally, "add_step", forgetful)
    engine, streams = run_workload(3, 3, "async")
    if forgotten is Fate.FAILED:  # no request of this workload fails
        check(engine, steps, streams, 3)
    else:
        with pytest.raises(AssertionError):
            check(engine, steps, streams, 3)


@fast
@pytest.mark.long
def test_counters_that_miss_a_step_are_noticed(steps, in_turn, monkeypatch):
    add, turn = StepCounters.add, itertools.count()
    monkeypatch.setattr(StepCounters, "add", lambda *given, **named: next(turn) % 10 and add(*given, **named))
    engine, streams = run_workload(2, 2, "async")
    with pytest.raises(AssertionError):
        check(engine, steps, streams, 2)


@fast
@pytest.mark.parametrize("k", [1, 3])
def test_acceptance_per_position_of_drafts_that_are_always_right(k):
    engine = toy_engine(PerfectToyModel(), k=k, scheduling="sync")
    engine.generate(
        [request_of([5, at], k=k, max_tokens=1 + 4 * (k + 1), temperature=0.0, ignore_eos=True) for at in range(3)]
    )
    report = engine.step_report()
    assert report.acceptance_per_position == (1.0,) * k
    assert report.mean_acceptance_len == k + 1
    assert report.tokens_per_step == report.step_tokens.mean == 3 * (k + 1)
    assert report.read == report.kept, "every step fits"


@fast
def test_acceptance_per_position_of_forced_lengths_and_different_caps():
    """Two of three drafts stand, where a request has so many: counts by hand."""
    verification = VerificationConfig(mode=VerificationMode.FORCE, forced_len=2)
    engine = toy_engine(k=3, scheduling="sync", verification=verification)
    requests = [request_of([5, cap], k=cap, max_tokens=1 + 3, temperature=0.0, ignore_eos=True) for cap in (3, 1, 0)]
    engine.generate(requests)
    report = engine.step_report()
    # In one step the first is done; the second takes 2 of them, the third 3.
    assert report.kept.proposed_at == (1 + 2, 1, 1)
    assert report.verified.accepted_at == (1 + 2, 1, 0)
    assert report.acceptance_per_position == (1.0, 1.0, 0.0)
    assert report.mean_acceptance_len == 1 + 4 / 3
    assert report.num_steps == 3


@fast
def test_a_report_of_an_interval_holds_what_happened_in_it():
    engine = toy_engine(k=2)
    engine.generate([request_of([5, 6], max_tokens=9, temperature=0.0, ignore_eos=True)])
    before = engine.step_report()
    results = engine.generate([request_of([7, at], max_tokens=9, temperature=0.0, ignore_eos=True) for at in range(3)])
    between = engine.step_report().since(before)
    assert between.kept.num_tokens == sum(len(result.token_ids) - 1 for result in results)
    assert between.computed == between.read
    assert between.num_steps == between.step_s.num


def test_grammars_cap_acceptance_and_rows_that_fail_are_told_apart(steps, tiny_model, tiny_tokenizer, tiny_prompts):
    heavy = GrammarSpec("regex", "(((((a{1,30}){1,30}){1,30}){1,30}){1,30})x")
    short = GrammarSpec("regex", r"(def|class) [a-z_]{1,6}\(")
    num_failed = 0
    for k in (0, 2):
        engine, streams = engine_of(tiny_model, tiny_tokenizer, k), Streams()
        steps.rows.clear()
        steps.num_steps = 0
        requests = requests_for(tiny_prompts, k, "sampled", (None, heavy, short, short), max_tokens=16)
        for request in requests:
            engine.submit(request)
        while any(engine._caller.num_open.values()):
            engine.step()
        unread = dict(engine._caller.unread)
        engine._forget(requests)
        for events in unread.values():
            streams.take(events)
        report = check(engine, steps, streams, k)
        num_failed += report.failed.num_rows  # a row that fails where its grammar is late, too, is none
        assert {result.finish_reason for result in streams.results} >= {None, FinishReason.STOP}
    assert num_failed > 0


def as_tp_group(group, num_steps, k):
    """(own counters, lengths moved) of one rank of a TP group that runs three sequences of the toy model."""
    model, steps = ToyModel(), Steps()
    pool = KVPool(model.kv_layout(4), 60, torch.device("cpu"))  # whole at every rank: the toy's KV is not shared out
    runner = Runner(model, pool, max_num_seqs=3, num_draft_tokens=k, communicator=group)
    steps.watch(runner)
    channel = channel_of(group)
    try:
        if group.rank == 0:
            driver = Driver(Rank0Runner(runner, channel), pool)
            for slot in range(3):
                sampling = SamplingParams(max_tokens=50, temperature=slot % 2, seed=slot, ignore_eos=True)
                driver.place(slot, (5, slot), sampling, draft_cap=min(slot + 1, k), capacity_len=2 + 50 + k)
            tickets = [driver.launch(chunks=[driver.chunk(slot) for slot in range(3)])]
            tickets += [driver.launch((0, 1, 2) if at % 3 else (0, 2)) for at in range(num_steps)]
            for ticket in tickets:
                ticket.result()
            counters = runner.meter.computed_now()
            driver.runner.close()
            return counters, counted(steps.rows, k)
        meter, found = runner.meter, []
        close = runner.close
        runner.close = lambda: (found.append(meter.computed_now()), close())
        RankRunner(runner, channel).run()
        return found[0], counted(steps.rows, k)
    finally:
        channel.close()


@pytest.mark.parametrize("k", [0, 3])
def test_all_ranks_of_a_tp_group_count_the_same(k):
    found = on_ranks(2, lambda group: as_tp_group(group, 12, k))
    assert found[0] == found[1]
    assert all(counters == moved for counters, moved in found)
    assert found[0][0].num_rows == 4 * 2 + 8 * 3
    assert isinstance(found[0][0], RowCounts)


def test_the_bundled_model_over_workers_scheduled_both_ways(steps, tiny_model, tiny_tokenizer, tiny_prompts):
    reports = []
    for scheduling in ("sync", "async"):
        steps.rows.clear()
        steps.num_steps = 0
        engine = LocalEngine(
            tiny_model,
            tiny_tokenizer,
            num_blocks=64,
            block_size=16,
            num_draft_tokens=3,
            chunk_len=64,
            max_num_sequences=4,
            scheduling=scheduling,
        )
        engine.generate(
            [request_of(prompt, k=3, max_tokens=12, temperature=0.0, ignore_eos=True) for prompt in tiny_prompts[:4]]
        )
        reports.append(engine.step_report())
        assert reports[-1].computed == counted(steps.rows, 3) == reports[-1].read
    sync, ahead = reports
    assert (sync.kept, sync.cut) == (ahead.kept, ahead.cut), "what requests are given does not depend on scheduling"
    assert ahead.acceptance_per_position == sync.acceptance_per_position
    assert 0 < sync.acceptance_per_position[2] < sync.acceptance_per_position[0] < 1
