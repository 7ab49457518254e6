"""Steps that run ahead of the host: what the runner promises, and races that the tests would see."""

import functools
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.core.errors import RequestDeadlineExceeded
from baton.core.requests.request import SpeculationCounts
from baton.core.requests.sampling import SamplingParams
from baton.engine.engine import IDLE_S, SETTLE_S
from baton.engine.sequence import Phase
from baton.engine.step.length_bounds import LengthBounds
from baton.engine.step.runner import Runner
from baton.kvcache.pool import KVPool
from baton.tests.engine import races, reference
from baton.tests.engine.driver import Driver
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine

fast = pytest.mark.fast
PROMPTS = ([5, 6], [7, 1, 4], [2, 9, 9, 3, 8])
NUM_TOKENS = 12


class Held:
    """Steps that wait to be let through."""

    def __init__(self, runner):
        self.open = threading.Event()
        self.open.set()
        self._sample = runner._sample
        runner._sample = self

    def __call__(self, work):
        assert self.open.wait(10.0)
        return self._sample(work)


class Side(Driver):
    """A runner over the toy model, three sequences in its slots, and the bounds of their lengths as an engine has."""

    def __init__(self, k=2, max_tokens=NUM_TOKENS):
        self.model, self.k = ToyModel(), k
        pool = KVPool(self.model.kv_layout(4), 40, torch.device("cpu"))
        super().__init__(Runner(self.model, pool, max_num_seqs=4, num_draft_tokens=k), pool)
        self.gate, self.bounds = Held(self.runner), LengthBounds(4)
        self.sampling = [
            SamplingParams(seed=at, max_tokens=max_tokens, temperature=at % 2, ignore_eos=True) for at in range(3)
        ]
        self.first_tokens = [self.admit(slot) for slot in range(3)]
        self.slots = (0, 1, 2)

    def admit(self, slot):
        prompt, sampling = PROMPTS[slot], self.sampling[slot]
        token = self.start(slot, prompt, sampling)
        end = len(prompt) + sampling.max_tokens
        self.bounds.admit(slot, len(prompt) + 1, limit=self.limit(slot), end=end)
        return token

    def launch(self, slots=(), *, chunks=(), num_drafts=None):
        ticket = super().launch(slots, chunks=chunks, num_drafts=num_drafts)
        if slots:
            slots_B, most = np.array(slots), 1 + (self.k if num_drafts is None else num_drafts)
            launched, result = self.bounds.launch(slots_B, np.full(len(slots), most)), ticket.result

            def result_and_collect():
                if not ticket.is_read:
                    self.bounds.collect(launched, np.array([len(row.token_ids) for row in result().decode]))
                return result()

            ticket.result = result_and_collect
        return ticket

    def lengths(self):
        """What the device holds, by slot."""
        self.runner.drain()
        return self.runner._table._numbers_NC[:3, 1].tolist()


@functools.cache
def wanted(slot, num_tokens=NUM_TOKENS + 8):
    sampling = SamplingParams(seed=slot, max_tokens=num_tokens, temperature=slot % 2, ignore_eos=True)
    return reference.generate(ToyModel(), list(PROMPTS[slot]), sampling)


def starts_as_wanted(tokens, first_tokens):
    pairs = zip(first_tokens, tokens, strict=True)
    return all([first, *ids] == wanted(at)[: len(ids) + 1] for at, (first, ids) in enumerate(pairs))


@fast
@pytest.mark.parametrize("k", [0, 1, 3, 6])
@pytest.mark.long
def test_many_steps_in_flight_give_what_single_steps_do(k):
    step_by_step, ahead = Side(k), Side(k)
    single = [step_by_step.step(step_by_step.slots) for _ in range(5)]
    ahead.gate.open.clear()
    tickets = [ahead.launch(ahead.slots) for _ in range(5)]
    assert not any(ticket.is_sampled or ticket.is_done for ticket in tickets)
    ahead.gate.open.set()
    assert [ticket.result() for ticket in tickets] == single
    assert tickets[0].result() is tickets[0].result()
    tokens = [[token for output in single for token in output.decode[at].token_ids] for at in range(3)]
    assert starts_as_wanted(tokens, ahead.first_tokens)
    assert [[row.proposed_len for row in output.decode] for output in single] == [[k, k, k]] * 5


@fast
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_a_prompt_may_end_and_decode_with_every_step_in_flight(k):
    """First tokens, drafts and lengths are on the device before the host knows any of them."""
    side, whole = Side(k), [prompt for prompt in PROMPTS if len(prompt) > 2]
    for slot in side.slots:
        side.release(slot)
    for slot, prompt in enumerate(whole):
        side.place(slot, prompt, side.sampling[PROMPTS.index(prompt)])
    side.gate.open.clear()
    tickets = [side.launch(chunks=[side.chunk(0, 2), side.chunk(1, 1)]), side.launch(chunks=[side.chunk(0)])]
    tickets.append(Driver.launch(side, (0,), chunks=[side.chunk(1)]))
    tickets += [Driver.launch(side, (0, 1)) for _ in range(3)]
    assert not any(ticket.is_sampled for ticket in tickets)
    side.gate.open.set()
    outputs = [ticket.result() for ticket in tickets]
    assert [[made.token is None for made in output.chunks] for output in outputs[:3]] == [[True] * 2, [False], [False]]
    made = [[outputs[1].chunks[0].token, *outputs[2].decode[0].token_ids], [outputs[2].chunks[0].token]]
    for output in outputs[3:]:
        for tokens, row in zip(made, output.decode, strict=True):
            tokens += row.token_ids
    for tokens, prompt in zip(made, whole, strict=True):
        assert tokens == wanted(PROMPTS.index(prompt))[: len(tokens)]


@fast
def test_results_may_be_read_in_any_order_and_the_bounds_become_exact():
    side = Side(3)
    tickets = [side.launch(side.slots) for _ in range(4)]
    spread = side.bounds._most_N - side.bounds._least_N
    assert spread[:3].tolist() == [4 * 3] * 3
    outputs = [tickets[at].result() for at in (2, 0, 3, 1)]
    made = [
        len(prompt) + 1 + sum(len(output.decode[at].token_ids) for output in outputs)
        for at, prompt in enumerate(PROMPTS)
    ]
    assert side.bounds._most_N[:3].tolist() == side.bounds._least_N[:3].tolist() == made
    assert side.lengths() == made


@fast
def test_with_nothing_to_compute_no_step_is_launched(monkeypatch):
    engine = toy_engine()
    engine.generate([request_of([3, 1], max_tokens=3)])
    monkeypatch.setattr(engine.runner, "launch", lambda step: pytest.fail("nothing to compute"))
    assert engine.engine.step() == IDLE_S
    side = Side()
    with pytest.raises(AssertionError):
        side.launch()


@fast
def test_an_unchanged_batch_is_not_built_again():
    side = Side()
    side.step(side.slots)
    before = side.runner._batch
    side.step(list(side.slots))
    assert side.runner._batch is before
    side.step(side.slots, num_drafts=1)
    assert side.runner._batch is not before
    before = side.runner._batch
    side.release(1)
    side.admit(1)
    side.step(side.slots, num_drafts=1)
    assert side.runner._batch is not before, "the same slots, and another sequence"


@fast
def test_a_slot_is_kept_until_the_last_step_that_has_it_is_over():
    engine = toy_engine(k=0, max_num_sequences=1)
    whole = reference.generate(ToyModel(), [4, 9], request_of([4, 9], max_tokens=6, ignore_eos=True).sampling)
    stop = whole[2]
    assert stop not in whole[:2]
    first = request_of([4, 9], k=0, max_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    second = request_of([5, 9], k=0, max_tokens=6, ignore_eos=True)
    for request in (first, second):
        engine.submit(request)
    events = [engine._caller.unread[request.key] for request in (first, second)]
    sequence, over, sample = engine.scheduler.sequences()[0], threading.Event(), engine.runner._sample
    steps = itertools.count(1)

    def sample_late(work):
        if next(steps) == 4:  # the step after the one that ends it
            over.wait(10.0)
        return sample(work)

    engine.runner._sample = sample_late
    while sequence.phase is not Phase.ENDED:
        engine.step()
    assert events[0][-1].result is not None
    assert engine.scheduler.num_slots_used == 1, "a step in flight still has it"
    assert engine.scheduler.allocator.num_reserved > 0
    assert engine.scheduler.count(Phase.RUNNING) == 0
    over.set()
    engine.runner.drain()
    engine.step()
    assert engine.scheduler.count(Phase.RUNNING) == 1
    while not events[1] or events[1][-1].result is None:
        engine.step()
    assert list(events[1][-1].result.token_ids) == reference.generate(ToyModel(), [5, 9], second.sampling)


def admit_into_a_used_slot():
    side = Side()
    tickets = [side.launch(side.slots) for _ in range(3)]
    side.runner.drain()
    side.release(1)
    first = side.admit(1)
    tickets.append(side.launch(side.slots))
    outputs = [ticket.result() for ticket in tickets]
    emitted = outputs[-1].decode[1].token_ids
    assert [first, *emitted] == wanted(1)[: 1 + len(emitted)]
    length = side.bounds._least_N[1]
    assert length == side.bounds._most_N[1] == len(PROMPTS[1]) + 1 + len(emitted)


@fast
def test_a_sequence_admitted_into_a_used_slot_starts_afresh(monkeypatch):
    admit_into_a_used_slot()
    races.bound_of_the_next(monkeypatch)
    with pytest.raises(AssertionError):
        admit_into_a_used_slot()


@fast
def test_who_may_need_another_step_is_known_without_results():
    side, slots_B = Side(k=2, max_tokens=4), np.arange(3)
    for _ in range(3):  # one token is there, each step adds at least one
        assert side.bounds.unfinished(slots_B).all()
        side.launch(side.slots)
    assert not side.bounds.unfinished(slots_B).any()
    assert not side.bounds.unfinished(slots_B[:2]).any()


@fast
def test_bounds_refuse_what_cannot_be():
    bounds = LengthBounds(2)
    bounds.admit(0, 5, limit=8, end=20)
    slots, most = np.array([0]), np.array([3])
    launched = bounds.launch(slots, most)
    with pytest.raises(AssertionError, match="more than it could"):
        bounds.collect(launched, most + 1)
    assert bounds.max_context_len(slots, 0) == 8
    for _ in range(2):
        assert bounds.unfinished(slots).all()
        bounds.launch(slots, most)
    assert bounds.max_context_len(slots, 2) == 8
    bounds.launch(slots, most)
    assert not bounds.unfinished(slots).any()
    with pytest.raises(AssertionError):
        bounds.max_context_len(slots, 2)


# Scheduling.


def traced(monkeypatch, scheduling, requests, **options):
    """Results, and of each request (proposed, accepted, emitted) of every step that counted; steps launched."""
    engine = toy_engine(scheduling=scheduling, **options)
    trace, num_launched, launch = {}, [0], engine.runner.launch

    def counted_launch(step):
        num_launched[0] += 1
        return launch(step)

    engine.runner.launch = counted_launch
    original = SpeculationCounts.add_step

    def add_step(self, **numbers):
        trace.setdefault(id(self), []).append(tuple(numbers.values()))
        original(self, **numbers)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculationCounts, "add_step", add_step)
        results = engine.generate(requests)
    assert engine.engine.is_idle
    return results, [trace.get(id(result.counts), []) for result in results], num_launched[0]


@fast
def test_no_step_is_wasted_on_what_is_certain(monkeypatch):
    for k in (0, 2):
        requests = [request_of([3, 1], k=k, max_tokens=9, ignore_eos=True)]
        _, sync, num_sync = traced(monkeypatch, "sync", requests, k=k)
        _, ahead, num_async = traced(monkeypatch, "async", requests, k=k)
        assert sync == ahead
        # Without drafts a step adds one token, so the end by length is known beforehand.
        assert num_async - num_sync == 0 if k == 0 else num_async - num_sync <= 1


@fast
def test_a_step_is_launched_before_the_last_is_read(monkeypatch):
    engine = toy_engine()
    engine.submit(request_of([3, 1], max_tokens=30, ignore_eos=True))
    order = []
    runner, launch = engine.runner, engine.runner.launch

    def watched_launch(step):
        ticket = launch(step)
        number = sum(what == "launch" for what, _ in order) + 1
        order.append(("launch", number))
        result = ticket.result
        ticket.result = lambda: (order.append(("read", number)), result())[1]
        return ticket

    monkeypatch.setattr(runner, "launch", watched_launch)
    for _ in range(4):
        engine.step()
    assert order == [
        ("launch", 1),  # of the prompt
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("launch", 4),
        ("read", 3),
    ]


@fast
def test_blocks_stay_until_the_extra_step_is_over():
    engine = toy_engine(k=2, max_num_sequences=2)
    scheduler, allocator = engine.scheduler, engine.scheduler.allocator
    whole = reference.generate(ToyModel(), [4, 9], request_of([4, 9], max_tokens=30, ignore_eos=True).sampling)
    engine.submit(request_of([4, 9], max_tokens=30, ignore_eos=True, stop_token_ids=(whole[8],)))
    held = set()
    runner, sample = engine.runner, engine.runner._sample
    runner._sample = lambda work: (time.sleep(0.02), sample(work))[1]  # the extra one is still running
    while scheduler.sequences():
        engine.step()
        held.add((len(scheduler.sequences()), allocator.num_reserved > 0, engine.engine.is_idle))
    assert (0, True, False) in held, "ended while a step was in flight, and kept its blocks"
    while not engine.engine.is_idle:
        engine.step()
    assert allocator.num_reserved == 0


@fast
def test_the_thread_that_computes_is_left_alone_while_the_last_step_ends():
    """All tokens are read, its drafts are not made yet: who asks without a pause takes the processor."""
    engine = toy_engine(k=2)
    engine.submit(request_of([4, 9], max_tokens=6, ignore_eos=True))
    end, given = SimpleNamespace(is_done=False), engine.runner.launch

    def launch(step):
        ticket = given(step)
        ticket._end = end
        return ticket

    engine.runner.launch = launch
    rests = []
    while engine.scheduler.sequences():
        rests.append(engine.engine.step())
    assert set(rests) == {0.0}
    assert [engine.engine.step() for _ in range(20)][1:] == [SETTLE_S] * 19
    assert engine.scheduler.allocator.num_reserved
    end.is_done = True
    assert engine.engine.step() == IDLE_S
    assert not engine.scheduler.allocator.num_reserved


@pytest.mark.long
@fast
def test_cancelled_and_overdue_requests_give_back_what_they_held_and_hurt_nobody():
    engine = toy_engine(k=3, num_blocks=24, max_num_sequences=3)
    others = [request_of([8, at], k=at, max_tokens=20, ignore_eos=True) for at in range(8)]
    for turn, other in enumerate(others):
        stream = engine.run(other)
        late = request_of([1, turn], k=3, max_tokens=25, ignore_eos=True, deadline_s=time.monotonic() + 0.02)
        gone = engine.run(request_of([2, turn], k=3, max_tokens=25, ignore_eos=True))
        tokens = list(next(stream).token_ids)
        next(gone)
        try:
            for event in engine.run(late):
                if event.result is None and turn % 2:
                    continue
        except RequestDeadlineExceeded:
            pass
        gone.close()
        tokens += [token for event in stream for token in event.token_ids]
        assert tokens == reference.generate(ToyModel(), other.prompt_token_ids, other.sampling)
    assert engine.engine.is_idle
    assert engine.scheduler.allocator.num_reserved == 0


@pytest.mark.long
@fast
def test_a_short_hunt_finds_no_race(monkeypatch):
    with monkeypatch.context() as patch:
        assert races.hunt(patch, seed=3) > 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_hunt_finds_no_race(monkeypatch):
    num_steps = 0
    for seed in range(1000):
        with monkeypatch.context() as patch:
            num_steps += races.hunt(patch, seed=seed, num_requests=40)
        if num_steps >= 10_000:
            return
    pytest.fail(f"only {num_steps} steps")


@pytest.mark.parametrize("plant", races.PLANTED, ids=lambda plant: plant.__name__)
def test_planted_races_are_caught(plant, monkeypatch):
    assert races.is_caught(monkeypatch.context, plant)
