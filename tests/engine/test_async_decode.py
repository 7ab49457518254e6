"""Decode steps that run ahead of the host: what the runner promises, and races that the tests would see."""

import functools
import gc
import threading
import time

import numpy as np
import pytest
import torch

from baton.core.errors import RequestDeadlineExceeded
from baton.core.request import SpeculationCounts
from baton.core.sampling import SamplingParams
from baton.engine import decode
from baton.engine.decode import DecodeRunner
from baton.engine.length_bounds import LengthBounds
from baton.engine.prefill import PrefillChunk, PrefillRunner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.tests.engine import races, reference
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine

fast = pytest.mark.fast
PROMPTS = ([5, 6], [7, 1, 4], [2, 9, 9, 3, 8])
NUM_TOKENS = 12


class Gate:
    """A step that waits to be let through."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.num_begun = 0

    def __call__(self, *arguments):
        self.num_begun += 1
        assert self.open.wait(10.0)
        return decode.decode_step(*arguments)


class Side:
    """A prefilled runner over the toy model, three sequences in its slots."""

    def __init__(self, k=2, max_tokens=NUM_TOKENS, **options):
        self.model, self.gate = ToyModel(), Gate()
        self.pool = KVPool(self.model.kv_layout(4), 40, torch.device("cpu"))
        self.prefill = PrefillRunner(self.model, self.pool)
        self.runner = DecodeRunner(self.model, self.pool, 4, k, step=self.gate, **options)
        self.allocator = BlockAllocator(40, 4)
        self.sampling = [
            SamplingParams(seed=at, max_tokens=max_tokens, temperature=at % 2, ignore_eos=True) for at in range(3)
        ]
        self.first_tokens = [self.admit(slot, k) for slot in range(3)]
        self.slots = (0, 1, 2)

    def admit(self, slot, k, of=None):
        prompt, sampling = tuple(PROMPTS[of or slot]), self.sampling[of or slot]
        table = self.allocator.reserve(len(prompt) + sampling.max_tokens + k)
        chunk = PrefillChunk(
            prompt_token_ids=prompt, start=0, length=len(prompt), table=table, sampling=sampling, draft_cap=k
        )
        [start] = self.prefill.draft(self.prefill.forward([chunk], lambda layer: None), lambda layer: None)
        self.runner.admit(slot, start, len(prompt), sampling, table, k)
        return start.first_token


@functools.cache
def wanted(slot, num_tokens=NUM_TOKENS + 8):
    sampling = SamplingParams(seed=slot, max_tokens=num_tokens, temperature=slot % 2, ignore_eos=True)
    return reference.generate(ToyModel(), list(PROMPTS[slot]), sampling)


def starts_as_wanted(tokens, first_tokens):
    pairs = zip(first_tokens, tokens, strict=True)
    return all([first, *ids] == wanted(at)[: len(ids) + 1] for at, (first, ids) in enumerate(pairs))


@fast
@pytest.mark.parametrize("prepare_ahead", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_many_steps_in_flight_give_what_single_steps_do(k, prepare_ahead):
    step_by_step, ahead = Side(k), Side(k, prepare_ahead=prepare_ahead)
    single = [step_by_step.runner.step(step_by_step.slots) for _ in range(5)]
    ahead.gate.open.clear()
    tickets = [ahead.runner.launch(ahead.slots) for _ in range(5)]
    assert not any(ticket.is_done for ticket in tickets)
    ahead.gate.open.set()
    assert [ticket.result() for ticket in tickets] == single
    assert tickets[0].result() is tickets[0].result()
    tokens = [[token for output in single for token in output.token_ids[at]] for at in range(3)]
    assert starts_as_wanted(tokens, ahead.first_tokens)
    assert [output.proposed_lens for output in single] == [(k, k, k)] * 5


@fast
def test_results_may_be_read_in_any_order_and_the_bounds_become_exact():
    side = Side(3)
    tickets = [side.runner.launch(side.slots) for _ in range(4)]
    lengths = side.runner._lengths
    spread = lengths._most_N - lengths._least_N
    assert spread[:3].tolist() == [4 * 3] * 3
    outputs = [tickets[at].result() for at in (2, 0, 3, 1)]
    made = [len(prompt) + 1 + sum(len(output.token_ids[at]) for output in outputs) for at, prompt in enumerate(PROMPTS)]
    assert lengths._most_N[:3].tolist() == lengths._least_N[:3].tolist() == made
    side.runner.drain()
    assert side.runner._table._length_N[:3].tolist() == made


@fast
def test_launching_nothing():
    ticket = Side().runner.launch(())
    assert ticket.is_done
    assert ticket.result() == decode.DecodeOutput(token_ids=(), accepted_lens=(), proposed_lens=())


@fast
def test_an_unchanged_batch_is_not_built_again():
    side = Side()
    side.runner.step(side.slots)
    before = side.runner._batch
    side.runner.step(list(side.slots))
    assert side.runner._batch is before
    side.runner.release(1)
    side.runner.step((0, 2))
    assert side.runner._batch is not before


@fast
def test_a_slot_is_kept_until_the_last_step_that_has_it_is_over():
    side = Side()
    side.gate.open.clear()
    side.runner.launch(side.slots)
    second = side.runner.launch(side.slots)
    third = side.runner.launch((0, 2))
    assert side.runner.release(1) is second
    with pytest.raises(AssertionError, match="not over"):
        side.admit(1, 2)
    side.gate.open.set()
    second.result()
    assert second.is_done
    side.admit(1, 2)
    third.result()
    side.runner.drain()
    assert side.runner.release(1) is None
    assert side.runner.release(0) is None


def admit_into_a_used_slot():
    side = Side()
    for _ in range(3):
        side.runner.launch(side.slots)
    side.runner.drain()
    assert side.runner.release(1) is None
    tickets = list(side.runner._unread.values())
    first = side.admit(1, 2)
    tickets.append(side.runner.launch(side.slots))
    outputs = [ticket.result() for ticket in tickets]
    assert [first, *outputs[-1].token_ids[1]] == wanted(1)[: 1 + len(outputs[-1].token_ids[1])]
    length = side.runner._lengths._least_N[1]
    assert length == side.runner._lengths._most_N[1] == len(PROMPTS[1]) + 1 + len(outputs[-1].token_ids[1])


@fast
def test_a_sequence_admitted_into_a_used_slot_starts_afresh(monkeypatch):
    admit_into_a_used_slot()
    races.bound_of_the_next(monkeypatch)
    with pytest.raises(AssertionError):
        admit_into_a_used_slot()


@fast
def test_who_may_need_another_step_is_known_without_results():
    side = Side(k=2, max_tokens=4)
    assert side.runner.unfinished(side.slots) == (0, 1, 2)
    for _ in range(3):  # one token is there, each step adds at least one
        assert side.runner.unfinished(side.slots) == (0, 1, 2)
        side.runner.launch(side.slots)
    assert side.runner.unfinished(side.slots) == ()
    assert side.runner.unfinished((2, 0)) == ()


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


@fast
def test_a_step_that_fails_says_so_at_its_ticket_and_at_all_later_ones():
    side = Side()
    good = side.runner.launch(side.slots)
    good.result()
    side.model.trunk = lambda *arguments: 1 / 0
    bad = [side.runner.launch(side.slots) for _ in range(2)]
    for ticket in (*bad, *bad):
        with pytest.raises(ZeroDivisionError):
            ticket.result()
    del side.model.trunk
    with pytest.raises(ZeroDivisionError):
        side.runner.step(side.slots)
    assert bad[0].is_done
    side.runner.drain()
    side.runner.close()


@fast
def test_a_runner_that_is_dropped_ends_its_thread_and_close_waits():
    before = set(threading.enumerate())
    side = Side()
    side.runner.step(side.slots)
    [thread] = [item for item in threading.enumerate() if item not in before and item.name == "decode-lane"]
    del side
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()
    side = Side()
    ticket = side.runner.launch(side.slots)
    side.runner.close()
    assert ticket.is_done
    with pytest.raises(AssertionError, match="closed"):
        side.runner.launch(side.slots)


# Scheduling.


def traced(monkeypatch, scheduling, requests, **options):
    """Results, and of each request (proposed, accepted, emitted) of every step that counted; steps launched."""
    engine = toy_engine(scheduling=scheduling, **options)
    trace = {}
    original = SpeculationCounts.add_step

    def add_step(self, **numbers):
        trace.setdefault(id(self), []).append(tuple(numbers.values()))
        original(self, **numbers)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculationCounts, "add_step", add_step)
        results = engine.generate(requests)
    assert engine._steps.is_empty
    return results, [trace.get(id(result.counts), []) for result in results], engine._decode._num_launched


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
    runner, launch = engine._decode, engine._decode.launch

    def watched_launch(slots):
        ticket = launch(slots)
        order.append(("launch", runner._num_launched))
        number, result = runner._num_launched, ticket.result
        ticket.result = lambda: (order.append(("read", number)), result())[1]
        return ticket

    monkeypatch.setattr(runner, "launch", watched_launch)
    for _ in range(4):
        engine.step()
    assert order == [
        ("launch", 1),
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
    scheduler, allocator = engine._scheduler, engine._scheduler._allocator
    whole = reference.generate(ToyModel(), [4, 9], request_of([4, 9], max_tokens=30, ignore_eos=True).sampling)
    engine.submit(request_of([4, 9], max_tokens=30, ignore_eos=True, stop_token_ids=(whole[8],)))
    held = set()
    runner, step = engine._decode, engine._decode._step
    runner._step = lambda *arguments: (time.sleep(0.02), step(*arguments))[1]  # the extra one is still running
    while scheduler.unfinished():
        engine.step()
        held.add((len(scheduler.unfinished()), allocator.num_reserved > 0, scheduler.is_idle))
    assert (0, True, False) in held, "ended while a step was in flight, and kept its blocks"
    engine.step()
    assert scheduler.is_idle
    assert allocator.num_reserved == 0


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
    assert engine._scheduler.is_idle
    assert engine._scheduler._allocator.num_reserved == 0


@pytest.mark.long
@fast
@pytest.mark.parametrize("prepare_ahead", [False, True])
def test_a_short_hunt_finds_no_race(prepare_ahead, monkeypatch):
    with monkeypatch.context() as patch:
        assert races.hunt(patch, seed=3, prepare_ahead=prepare_ahead) > 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prepare_ahead", [False, True])
def test_a_long_hunt_finds_no_race(prepare_ahead, monkeypatch):
    num_steps = 0
    for seed in range(1000):
        with monkeypatch.context() as patch:
            num_steps += races.hunt(patch, seed=seed, prepare_ahead=prepare_ahead, num_requests=40)
        if num_steps >= 10_000:
            return
    pytest.fail(f"only {num_steps} steps")


@pytest.mark.parametrize("plant", races.PLANTED, ids=lambda plant: plant.__name__)
def test_planted_races_are_caught(plant, monkeypatch):
    assert races.is_caught(monkeypatch.context, plant)


@pytest.mark.parametrize("plant", races.PLANTED_IN_PREPARE, ids=lambda plant: plant.__name__)
def test_planted_races_of_preparing_ahead_are_caught(plant, monkeypatch):
    assert races.is_caught(monkeypatch.context, plant, prepare_ahead=True)
