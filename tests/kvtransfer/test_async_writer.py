"""The async writer: one incarnation per step, first error kept, nothing captured, nothing stuck."""

import functools
import gc
import random
import threading
import time
import weakref

import pytest
import torch

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.sender.async_writer import (
    MAX_NOTES,
    AsyncWriter,
    PushRange,
    WriterCancelled,
    WriterDied,
    WriterStalled,
    WriterStateError,
)

CPU = torch.device("cpu")
PARTS = [PushRange(AttemptKey("a", 0), 0, 4), PushRange(AttemptKey("b", 0), 8, 2)]


def wait_until(condition, timeout_s=5.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def make_writer():
    writers = []

    def make(push_fn, num_threads=2, queue_len=8, **options):
        writers.append(AsyncWriter(push_fn, num_threads, queue_len, CPU, **options))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.mark.fast
def test_every_part_of_every_layer_is_pushed_once(make_writer):
    for num_threads in (1, 3):
        done = []
        writer = make_writer(lambda part, layer, done=done: done.append((part, layer)), num_threads)
        for _ in range(100):
            done.clear()
            with writer.step(PARTS) as step:
                for layer in range(5):
                    step.submit(layer)
            assert sorted(done, key=repr) == sorted(((p, la) for p in PARTS for la in range(5)), key=repr)


@pytest.mark.fast
def test_no_parts_is_a_clean_no_op(make_writer):
    told = []
    writer = make_writer(
        lambda part, layer: told.append(layer), on_begin=told.append, on_end=lambda parts, error: told.append(parts)
    )
    with writer.step([]) as step:
        step.submit(0)
    assert told == []


@pytest.mark.fast
def test_calls_out_of_order_are_refused_and_change_nothing(make_writer):
    done = []
    writer = make_writer(lambda part, layer: done.append(layer))
    step = writer.open(PARTS)
    step.submit(0)
    step.wait()
    for call in (lambda: step.submit(1), step.wait, step.close):
        with pytest.raises(WriterStateError):
            call()
    step.cancel()
    assert done == [0, 0]
    writer.close()
    with pytest.raises(WriterStateError):
        writer.open(PARTS)


@pytest.mark.fast
def test_a_step_that_is_closed_ends_by_itself(make_writer):
    """Its caller goes on; `on_end` is told when its last task is over, and what the first error was."""
    gate, ended = threading.Event(), []

    def push(part, layer):
        gate.wait(5)
        if layer == 7:
            raise OSError("a task")

    writer = make_writer(push, on_end=lambda parts, error: ended.append((parts, type(error))))
    for layer, error in ((0, type(None)), (7, OSError)):
        gate.clear()
        step = writer.open(PARTS)
        step.submit(layer)
        step.close()
        assert not ended
        gate.set()
        wait_until(lambda: bool(ended))
        assert ended == [(tuple(PARTS), error)]
        ended.clear()
    writer.open(PARTS).close()  # without a task
    wait_until(lambda: ended == [(tuple(PARTS), type(None))])


@pytest.mark.fast
def test_steps_are_open_beside_each_other(make_writer):
    gates, done, ended = [threading.Event(), threading.Event()], [], []

    def push(part, layer):
        gates[layer].wait(5)
        done.append(layer)
        if layer == 0:
            raise OSError("the first step's")

    writer = make_writer(push, num_threads=2, on_end=lambda parts, error: ended.append((parts[0].first, error)))
    first, second = writer.open(PARTS[:1]), writer.open(PARTS[1:])
    first.submit(0)
    second.submit(1)
    first.close()
    gates[1].set()
    second.wait()  # an error of the first, later, is none of its
    assert ended == [(8, None)]
    gates[0].set()
    wait_until(lambda: len(ended) == 2)
    assert ended[1][0] == 0
    assert isinstance(ended[1][1], OSError)
    assert writer._open == []


@pytest.mark.fast
def test_closing_the_writer_ends_steps_that_were_left_alone(make_writer):
    gate, ended = threading.Event(), []
    writer = make_writer(lambda part, layer: gate.wait(5), 1, on_end=lambda parts, error: ended.append(parts))
    for _ in range(3):
        step = writer.open(PARTS)
        step.submit(0)
        step.close()
    threading.Timer(0.02, gate.set).start()
    writer.close()
    assert ended == [tuple(PARTS)] * 3


@pytest.mark.fast
def test_the_first_error_is_raised_at_the_end_and_the_writer_is_idle_again(make_writer):
    def push(part, layer):
        if layer in (1, 2):
            raise ValueError(f"layer {layer}")

    writer = make_writer(push, num_threads=1)
    for _ in range(20):
        step = writer.open(PARTS)
        for layer in range(4):
            step.submit(layer)
        with pytest.raises(ValueError, match="layer 1"):
            step.wait()
    with writer.step(PARTS) as step:
        step.submit(0)


@pytest.mark.fast
def test_a_failed_forward_cancels_and_its_error_is_the_one_seen(make_writer):
    ended = []
    writer = make_writer(lambda part, layer: time.sleep(0.001), on_end=lambda parts, error: ended.append(parts))
    for _ in range(100):
        with pytest.raises(KeyError), writer.step(PARTS) as step:
            step.submit(0)
            step.submit(1)
            raise KeyError("forward")
    assert len(ended) == 100
    with writer.step(PARTS) as step:
        step.submit(0)


@pytest.mark.fast
def test_an_error_of_a_cancelled_step_does_not_reach_the_next(make_writer):
    gate = threading.Event()

    def push(part, layer):
        gate.wait(1)
        if layer == 9:
            raise ValueError("old step")

    writer = make_writer(push, num_threads=1)
    step = writer.open(PARTS)
    step.submit(9)
    threading.Timer(0.02, gate.set).start()
    step.cancel()
    with writer.step(PARTS) as step:
        step.submit(0)


@pytest.mark.fast
@pytest.mark.parametrize("fails", [False, True])
def test_tensors_of_a_task_are_gone_when_it_counts_as_done(make_writer, fails):
    alive = []

    def push(part, layer):
        tensor = torch.zeros(4)
        alive.append(weakref.ref(tensor))
        if fails:
            raise ValueError("with the tensor in a frame of its traceback")

    writer = make_writer(push)
    step = writer.open(PARTS)
    for layer in range(3):
        step.submit(layer)
    gc.disable()
    try:
        error = None
        try:
            step.wait()
        except ValueError as raised:
            error = raised
        assert (error is not None) == fails
        assert len(alive) == 6
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


@pytest.mark.fast
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_job_captured_is_gone_when_it_counts_as_done(make_writer, fails):
    def job(tensor):
        if fails:
            raise ValueError("with the tensor in a frame of its traceback")

    writer, seen = make_writer(lambda part, layer: None), []
    gc.disable()
    try:
        tensor = torch.zeros(4)
        reference = weakref.ref(tensor)
        jobs = [functools.partial(job, tensor)]
        gate = threading.Event()
        writer.aside([functools.partial(gate.wait, 5)] * 2, lambda error: None)  # until nobody else refers to it
        writer.aside(jobs, lambda error: seen.append(reference()))
        del tensor, jobs
        gate.set()
        wait_until(lambda: bool(seen))
        assert seen == [None]
    finally:
        gc.enable()


@pytest.mark.fast
def test_a_full_queue_makes_submit_wait_and_is_counted(make_writer):
    writer = make_writer(lambda part, layer: time.sleep(0.005), num_threads=1, queue_len=1)
    with writer.step(PARTS) as step:
        for layer in range(4):
            step.submit(layer)
    assert writer.num_stalls > 0
    assert writer.stalled_s > 0


@pytest.mark.fast
def test_a_queue_that_stays_full_fails_the_step_and_not_the_next(make_writer):
    gate = threading.Event()
    writer = make_writer(lambda part, layer: gate.wait(5), num_threads=1, queue_len=1, stall_limit_s=0.05)
    step = writer.open(PARTS[:1])
    step.submit(0)
    wait_until(lambda: not writer._threads._tasks)
    for layer in range(1, 9):
        step.submit(layer)  # one fits, one waits for room; then the step has failed and nothing waits any more
    assert writer.num_stalls == 1
    gate.set()
    with pytest.raises(WriterStalled, match="full"):
        step.wait()
    with writer.step(PARTS[:1]) as step:
        step.submit(0)


@pytest.mark.fast
def test_tasks_that_hang_fail_the_step_and_its_blocks_are_given_back_only_when_they_end(make_writer):
    gate, ended = threading.Event(), []
    writer = make_writer(
        lambda part, layer: gate.wait(5),
        num_threads=1,
        wait_limit_s=0.05,
        on_end=lambda parts, error: ended.append(parts),
    )
    step = writer.open(PARTS)
    step.submit(0)
    with pytest.raises(WriterStalled, match="did not end"):
        step.wait()
    writer.open([]).wait()  # others need not wait for them
    assert ended == []
    gate.set()
    wait_until(lambda: ended == [tuple(PARTS)])


@pytest.mark.fast
def test_other_errors_of_a_step_are_attached_to_the_first(make_writer):
    gate = threading.Event()

    def push(part, layer):
        if layer:
            gate.wait(5)
        else:
            gate.set()
            raise ValueError("the first")
        time.sleep(0.01)  # so that the first is kept before these
        raise OSError(f"layer {layer}")

    writer = make_writer(push, num_threads=3, queue_len=100)
    step = writer.open(PARTS[:1])
    for layer in range(MAX_NOTES + 3):
        step.submit(layer)
    with pytest.raises(ValueError, match="the first") as raised:
        step.wait()
    notes = raised.value.__notes__
    assert len(notes) == MAX_NOTES + 1
    assert all("OSError" in note for note in notes[:-1])
    assert notes[-1] == "and 2 more errors"


@pytest.mark.fast
def test_an_error_in_the_body_wins_over_those_of_tasks(make_writer):
    def push(part, layer):
        raise OSError("task")

    writer = make_writer(push)
    for _ in range(100):
        with pytest.raises(KeyError, match="body"), writer.step(PARTS) as step:
            step.submit(0)
            raise KeyError("body")
    with pytest.raises(OSError, match="task"), writer.step(PARTS) as step:
        step.submit(0)


@pytest.mark.fast
def test_without_a_peer_to_push_to_a_step_is_a_clean_no_op(make_writer):
    told = []
    num_before = threading.active_count()
    writer = make_writer(None, on_begin=told.append, on_end=lambda parts, error: told.append(parts))
    assert threading.active_count() == num_before
    for _ in range(3):
        with writer.step(PARTS) as step:
            step.submit(0)
    writer.open(PARTS).cancel()
    writer.open(PARTS).close()
    writer.aside([lambda: None], told.append)
    assert told == [None]
    assert (writer.num_stalls, writer.stalled_s, writer.num_deaths) == (0, 0.0, 0)


class Dying:
    """Lets a thread of the writer end outside of any push, as an error in its own code would."""

    def __init__(self, writer):
        self._threads = writer._threads
        self._real = self._threads._execute
        self._threads._execute = self._execute
        self.num_left = 0

    def _execute(self, task, stream):
        if self.num_left:
            self.num_left -= 1
            raise MemoryError("no room for the result")
        return self._real(task, stream)


@pytest.mark.fast
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.long
def test_a_thread_that_dies_fails_its_step_at_once_and_is_replaced(make_writer, num_threads):
    done, ended = [], []
    writer = make_writer(
        lambda part, layer: done.append(layer), num_threads, on_end=lambda parts, error: ended.append(parts)
    )
    dying = Dying(writer)
    for num_steps in range(1, 101):
        dying.num_left = 1
        start_s = time.monotonic()
        with pytest.raises(WriterDied, match="MemoryError"), writer.step(PARTS) as step:
            for layer in range(3):
                step.submit(layer)
        assert time.monotonic() - start_s < 5
        assert len(ended) == num_steps
    assert writer.num_deaths == 100
    done.clear()
    with writer.step(PARTS) as step:
        step.submit(0)
    assert done == [0, 0]


@pytest.mark.fast
def test_when_every_thread_dies_nothing_waits_for_them(make_writer):
    results = []
    writer = make_writer(lambda part, layer: None, num_threads=2, queue_len=2)
    dying = Dying(writer)
    dying.num_left = 2
    writer.aside([lambda: None] * 9, results.append)
    wait_until(lambda: bool(results))
    assert isinstance(results[0], WriterDied)
    dying.num_left = 2
    with pytest.raises(WriterDied), writer.step(PARTS) as step:
        for layer in range(5):
            step.submit(layer)


@pytest.mark.fast
def test_a_device_that_cannot_be_set_fails_the_step(monkeypatch):
    def set_device(_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr("baton.kvtransfer.sender.async_writer.WriterThreads.record", lambda self: None)
    writer = AsyncWriter(lambda part, layer: None, 2, 8, torch.device("cuda", 0))
    try:
        with pytest.raises(WriterDied, match="no such device"), writer.step(PARTS) as step:
            step.submit(0)
    finally:
        writer.close()


@pytest.mark.fast
def test_threads_make_the_device_their_own_before_the_first_task(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    device = torch.device("cuda", 1)
    writer = AsyncWriter(lambda part, layer: None, 3, 8, device)
    wait_until(lambda: len(seen) == 3)
    writer.close()
    assert len({name for name, _ in seen}) == 3
    assert all(found == device for _, found in seen)


@pytest.mark.fast
def test_what_is_aside_runs_without_a_step_and_says_when_it_is_over(make_writer):
    done, results = [], []

    def push(layer):
        done.append(layer)
        if layer == 7:
            raise OSError("one of them")

    writer = make_writer(lambda part, layer: None)
    writer.aside([functools.partial(push, layer) for layer in range(5)], results.append)
    wait_until(lambda: results == [None])
    assert sorted(done) == [0, 1, 2, 3, 4]
    writer.aside([functools.partial(push, layer) for layer in range(5, 10)], results.append)
    wait_until(lambda: len(results) == 2)
    assert isinstance(results[1], OSError)
    writer.aside([], results.append)
    assert results[2] is None
    assert len(done) == 10


@pytest.mark.fast
def test_a_step_does_not_wait_for_what_is_aside(make_writer):
    gate, results, order = threading.Event(), [], []

    def push(part, layer):
        order.append(layer)
        if layer == 0:
            gate.wait(5)

    writer = make_writer(push, num_threads=1, queue_len=100)
    step = writer.open(PARTS[:1])
    step.submit(0)
    writer.aside([functools.partial(order.append, 100 + layer) for layer in range(3)], results.append)
    for layer in range(1, 4):
        step.submit(layer)
    gate.set()
    step.wait()
    assert order[:4] == [0, 1, 2, 3]
    wait_until(lambda: results == [None])
    assert sorted(order[4:]) == [100, 101, 102]


@pytest.mark.fast
def test_closing_ends_what_is_aside(make_writer):
    gate, results = threading.Event(), []
    writer = make_writer(lambda part, layer: None, num_threads=1)
    writer.aside([functools.partial(gate.wait, 5)] * 3, results.append)
    threading.Timer(0.02, gate.set).start()
    writer.close()
    assert len(results) == 1
    assert isinstance(results[0], WriterCancelled)
    with pytest.raises(WriterCancelled):
        writer.aside([lambda: None], results.append)


def test_waiting_failing_and_cancelling_race_a_hundred_times(make_writer):
    """Whoever wins, the step ends once, in bounded time, with an error that one of them made; the next one works."""
    rng = random.Random(11)
    held, outcomes = [], {}

    def push(part, layer):
        time.sleep(0.0002)
        if layer == 2:
            raise OSError("a task")

    writer = make_writer(push, 3, 4, on_begin=held.append, on_end=lambda parts, error: held.remove(parts))
    for round_ in range(100):
        go = threading.Event()
        delay_s = 10 ** rng.uniform(-5, -1)  # on a machine of any speed each of them wins at times
        step = writer.open(PARTS)

        def cancel(go=go, delay_s=delay_s, step=step):
            go.wait(5)
            time.sleep(delay_s)
            step.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with_failure = round_ % 2
        go.set()
        try:
            for layer in range(4):
                step.submit(layer + 2 if with_failure else 8)
            step.wait()
            outcome = None
        except (OSError, WriterCancelled, WriterStateError) as error:
            outcome = type(error)
        thread.join(5)
        assert not thread.is_alive()
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert outcome is not OSError or with_failure
        assert held == []
        with writer.step(PARTS) as step:
            step.submit(0)
        assert held == []
    assert all(outcomes.get(kind) for kind in (None, OSError, WriterCancelled)), outcomes


@pytest.mark.fast
def test_closing_from_another_thread_ends_a_step_that_waits(make_writer):
    gate = threading.Event()
    writer = make_writer(lambda part, layer: gate.wait(5), num_threads=1)
    step = writer.open(PARTS)
    step.submit(0)
    closer = threading.Thread(target=writer.close)
    threading.Timer(0.05, gate.set).start()
    closer.start()
    with pytest.raises((WriterCancelled, WriterStateError)):
        step.wait()
    closer.join(5)
    assert not closer.is_alive()


@pytest.mark.fast
def test_random_steps_with_errors_and_cancels(make_writer):
    rng = random.Random(5)
    held = []

    def push(part, layer):
        if rng.random() < 0.05:
            raise OSError("sometimes")

    writer = make_writer(push, 3, 4, on_begin=held.append, on_end=lambda parts, error: held.remove(parts))
    for _ in range(100):
        step = writer.open(PARTS)
        for layer in range(rng.randrange(6)):
            step.submit(layer)
        if rng.random() < 0.3:
            step.cancel()
        else:
            try:
                step.wait()
            except OSError:
                pass
        assert held == []


@pytest.mark.fast
def test_a_step_ends_at_once_though_its_tasks_woke_nobody(make_writer, monkeypatch):
    monkeypatch.setattr("baton.kvtransfer.sender.async_writer.LOOK_S", 60.0)
    for num_threads in (1, 2):
        done = []
        writer = make_writer(lambda part, layer, done=done: done.append((part, layer)), num_threads, queue_len=64)
        for _ in range(20):
            done.clear()
            step = writer.open(PARTS)
            wait_until(lambda writer=writer: writer._threads._is_looking)
            for layer in range(6):
                step.submit(layer)
            assert not done  # they wait for somebody to look, and cost their step no wake
            step.wait()
            assert len(done) == 12


@pytest.mark.fast
def test_a_full_queue_is_looked_at_soon(make_writer):
    done = []
    writer = make_writer(lambda part, layer: done.append(layer), num_threads=1, queue_len=2)
    for _ in range(50):
        done.clear()
        with writer.step(PARTS) as step:
            for layer in range(4):
                step.submit(layer)
        assert sorted(done) == [0, 0, 1, 1, 2, 2, 3, 3]
