"""One thread, one slot: tickets, errors, lifetimes, closing; and prepared values that only their step may open."""

import dataclasses
import gc
import random
import threading
import time
import weakref

import pytest
import torch

from baton.engine import async_runner
from baton.engine.async_runner import AsyncRunner
from baton.engine.batch import DecodeRows, decode_batch
from baton.engine.prepare import NotPrepared, Prepared, StepPreparer
from baton.kvcache.pool import KVPool
from baton.tests.engine.toy import ToyModel

pytestmark = pytest.mark.fast


class Payload:
    """Something a weak reference can point at."""


@pytest.fixture
def runner():
    made = AsyncRunner(timeout_s=10.0)
    yield made
    made.close()


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_task_runs_on_another_thread_and_its_value_comes_by_its_ticket(runner):
    ticket = runner.launch(threading.get_ident)
    assert ticket.result() != threading.get_ident()
    assert ticket.result() == ticket.result()
    assert ticket.is_done


def test_nothing_is_ready_before_the_task_is_over(runner):
    gate = threading.Event()
    ticket = runner.launch(lambda: gate.wait(5.0) and 7)
    assert not ticket.is_done
    gate.set()
    assert ticket.result() == 7


def test_one_slot_a_launch_waits_for_the_task_before(runner):
    seen = []
    first = runner.launch(lambda: (time.sleep(0.05), seen.append(1)))
    second = runner.launch(lambda: seen.append(2))
    assert first.is_done
    second.result()
    assert seen == [1, 2]


def fail():
    raise ValueError("no")


def test_an_error_is_raised_by_result_and_then_forgotten(runner):
    ticket = runner.launch(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            ticket.result()
    assert runner.launch(lambda: 3).result() == 3
    runner.drain()


@pytest.mark.parametrize("ask", [lambda runner: runner.launch(lambda: 1), lambda runner: runner.drain()])
def test_an_error_that_nobody_asked_for_is_raised_next(ask, runner):
    runner.launch(fail)
    with pytest.raises(ValueError, match="no"):
        ask(runner)
    assert runner.launch(lambda: 2).result() == 2


def test_closing_finishes_the_task_and_ends_the_thread():
    runner, seen = AsyncRunner("closing"), []
    runner.launch(lambda: (time.sleep(0.05), seen.append(1)))
    runner.close()
    assert seen == [1]
    assert not threads_named("closing")
    runner.close()
    with pytest.raises(AssertionError, match="closed"):
        runner.launch(fail)


def test_closing_with_an_error_pending_raises_it_once_and_the_thread_is_gone():
    runner = AsyncRunner("pending")
    runner.launch(fail)
    with pytest.raises(ValueError, match="no"):
        runner.close()
    assert not threads_named("pending")
    runner.close()


def test_a_block_that_fails_keeps_its_own_error():
    with pytest.raises(KeyError), AsyncRunner("block") as runner:
        runner.launch(fail)
        raise KeyError
    assert not threads_named("block")


def test_a_runner_that_is_dropped_ends_its_thread():
    runner = AsyncRunner("dropped")
    runner.launch(lambda: 1).result()
    [thread] = threads_named("dropped")
    del runner
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_wait_has_an_end():
    gate = threading.Event()
    runner = AsyncRunner(timeout_s=0.05)
    ticket = runner.launch(gate.wait)
    with pytest.raises(TimeoutError):
        ticket.result()
    gate.set()
    runner.close()  # else its thread would end its task during the next test


def launch_holding(runner, task_of):
    """Launch a task that captured a payload; returns its ticket and a weak reference."""
    payload = Payload()
    return runner.launch(task_of(payload)), weakref.ref(payload)


def fails_silently_with(payload):
    def task():
        kept = [payload]
        assert not kept

    return task


@pytest.mark.parametrize("task_of", [lambda payload: lambda: id(payload), fails_silently_with])
def test_captures_are_dropped_before_the_task_counts_as_done(task_of, runner, monkeypatch):
    alive_at_done = []
    finish = async_runner.Ticket._finish
    watched = []

    def watch(ticket, value, error):
        if threading.current_thread() is runner._thread:  # and not what another test left behind
            alive_at_done.append(watched[0]() is not None)
        finish(ticket, value, error)

    monkeypatch.setattr(async_runner.Ticket, "_finish", watch)
    gate = threading.Event()
    payload = Payload()
    task = task_of(payload)
    watched.append(weakref.ref(payload))
    ticket = runner.launch(lambda task=task: gate.wait(5.0) and task())
    del payload, task
    gate.set()
    ticket._wait()
    assert alive_at_done == [False]
    if ticket._error is not None:
        with pytest.raises(AssertionError):
            ticket.result()


def test_the_value_does_not_outlive_its_ticket(runner):
    ticket = runner.launch(Payload)
    seen = weakref.ref(ticket.result())
    runner.drain()
    del ticket
    for _ in range(100):  # the thread drops its own reference right after it said that it is done
        if seen() is None:
            break
        time.sleep(0.01)
    assert seen() is None


def test_a_task_runs_in_its_callers_inference_mode(runner):
    for mode in (True, False):
        with torch.inference_mode(mode):
            ticket = runner.launch(lambda: torch.ones(1).is_inference())
        assert ticket.result() is mode


def test_a_hundred_turns_of_everything():
    rng = random.Random(5)
    with AsyncRunner("stress", timeout_s=10.0) as runner:
        for turn in range(100):
            pause_s = rng.choice([0, 0, 0, 1e-3])
            if rng.random() < 0.3:
                ticket = runner.launch(lambda s=pause_s: (time.sleep(s), fail()))
                with pytest.raises(ValueError, match="no"):
                    ticket.result() if rng.random() < 0.5 else runner.drain()
            else:
                ticket = runner.launch(lambda s=pause_s, turn=turn: (time.sleep(s), turn)[1])
                if rng.random() < 0.7:
                    assert ticket.result() == turn


# What verification needs, prepared ahead.

POOL = KVPool(ToyModel().kv_layout(4), 12, torch.device("cpu"))
ROWS = DecodeRows(
    block_tables_BM=torch.tensor([[3, 1, 4], [5, 9, 2]]),
    limit_B=torch.tensor([12, 9]),
    draft_cap_B=torch.tensor([2, 2]),
)
FIRST = torch.tensor([5, 7])


@pytest.fixture
def preparer():
    made = StepPreparer(POOL)
    yield made
    made.close()


def test_what_is_prepared_is_what_the_step_would_compute(preparer):
    wanted = decode_batch(FIRST, 3, ROWS, 10, POOL)
    got = preparer.open(preparer.launch(FIRST, 3, ROWS, 10).result())
    for field in dataclasses.fields(wanted):
        left, right = getattr(got, field.name), getattr(wanted, field.name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_a_prepared_value_cannot_be_changed(preparer):
    prepared = preparer.launch(FIRST, 3, ROWS, 10).result()
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.generation = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.batch.max_context_len = 2


def test_stale_foreign_and_used_values_are_refused(preparer):
    stale = preparer.launch(FIRST, 3, ROWS, 10).result()
    fresh = preparer.launch(FIRST + 1, 3, ROWS, 10).result()
    with pytest.raises(NotPrepared, match="step 1, this is step 2"):
        preparer.open(stale)
    assert preparer.open(fresh) is fresh.batch
    with pytest.raises(NotPrepared, match="begun before"):
        preparer.open(fresh)
    other = StepPreparer(POOL)
    foreign = other.launch(FIRST, 3, ROWS, 10).result()
    other.close()
    preparer.launch(FIRST, 3, ROWS, 10)
    with pytest.raises(NotPrepared, match="another preparer"):
        preparer.open(foreign)
    with pytest.raises(NotPrepared, match="another preparer"):
        preparer.open(Prepared(object(), 3, fresh.batch))


def test_inputs_that_are_rebound_after_launch_do_not_matter(preparer):
    first = FIRST.clone()
    ticket = preparer.launch(first, 3, ROWS, 10)
    first = first + 4
    assert preparer.open(ticket.result()).positions_BQ.tolist() == [[5, 6, 7], [7, 8, 8]]
