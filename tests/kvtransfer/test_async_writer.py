"""The async writer: one life per step, first error kept, nothing captured, nothing stuck."""

import gc
import random
import threading
import time
import weakref

import pytest
import torch

from baton.core.request import AttemptKey
from baton.kvtransfer import async_writer
from baton.kvtransfer.async_writer import AsyncWriter, PushPart, WriterStalled, WriterStateError

CPU = torch.device("cpu")
PARTS = [PushPart(AttemptKey("a", 0), 0, 4), PushPart(AttemptKey("b", 0), 8, 2)]
pytestmark = pytest.mark.fast


@pytest.fixture
def make_writer():
    writers = []

    def make(push_fn, num_threads=2, queue_len=8, **options):
        writers.append(AsyncWriter(push_fn, num_threads, queue_len, CPU, **options))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


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


def test_no_parts_is_a_clean_no_op(make_writer):
    told = []
    writer = make_writer(lambda part, layer: told.append(layer), on_begin=told.append, on_end=told.append)
    with writer.step([]) as step:
        step.submit(0)
    assert told == []


def test_calls_out_of_order_are_refused_and_change_nothing(make_writer):
    writer = make_writer(lambda part, layer: None)
    for call in (lambda: writer.submit(0), writer.wait_all):
        with pytest.raises(WriterStateError):
            call()
    writer.cancel()
    writer.begin(PARTS)
    with pytest.raises(WriterStateError):
        writer.begin(PARTS)
    writer.wait_all()
    writer.close()
    with pytest.raises(WriterStateError):
        writer.begin(PARTS)


def test_the_first_error_is_raised_at_the_end_and_the_writer_is_idle_again(make_writer):
    def push(part, layer):
        if layer in (1, 2):
            raise ValueError(f"layer {layer}")

    writer = make_writer(push, num_threads=1)
    for _ in range(20):
        writer.begin(PARTS)
        for layer in range(4):
            writer.submit(layer)
        with pytest.raises(ValueError, match="layer 1"):
            writer.wait_all()
    with writer.step(PARTS) as step:
        step.submit(0)


def test_a_failed_forward_cancels_and_its_error_is_the_one_seen(make_writer):
    ended = []
    writer = make_writer(lambda part, layer: time.sleep(0.001), on_end=ended.append)
    for _ in range(100):
        with pytest.raises(KeyError), writer.step(PARTS) as step:
            step.submit(0)
            step.submit(1)
            raise KeyError("forward")
    assert len(ended) == 100
    with writer.step(PARTS) as step:
        step.submit(0)


def test_an_error_of_a_cancelled_step_does_not_reach_the_next(make_writer):
    gate = threading.Event()

    def push(part, layer):
        gate.wait(1)
        if layer == 9:
            raise ValueError("old step")

    writer = make_writer(push, num_threads=1)
    writer.begin(PARTS)
    writer.submit(9)
    threading.Timer(0.02, gate.set).start()
    writer.cancel()
    with writer.step(PARTS) as step:
        step.submit(0)


@pytest.mark.parametrize("fails", [False, True])
def test_tensors_of_a_task_are_gone_when_it_counts_as_done(make_writer, fails):
    alive = []

    def push(part, layer):
        tensor = torch.zeros(4)
        alive.append(weakref.ref(tensor))
        if fails:
            raise ValueError("with the tensor in a frame of its traceback")

    writer = make_writer(push)
    writer.begin(PARTS)
    for layer in range(3):
        writer.submit(layer)
    gc.disable()
    try:
        error = None
        try:
            writer.wait_all()
        except ValueError as raised:
            error = raised
        assert (error is not None) == fails
        assert len(alive) == 6
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


def test_a_full_queue_makes_submit_wait_and_is_counted(make_writer):
    writer = make_writer(lambda part, layer: time.sleep(0.005), num_threads=1, queue_len=1)
    with writer.step(PARTS) as step:
        for layer in range(4):
            step.submit(layer)
    assert writer.num_stalls > 0
    assert writer.stalled_s > 0


def test_threads_that_hang_fail_the_step(make_writer, monkeypatch):
    monkeypatch.setattr(async_writer, "STALL_LIMIT_S", 0.05)
    gate = threading.Event()
    writer = make_writer(lambda part, layer: gate.wait(5), num_threads=1, queue_len=1)
    writer.begin(PARTS)
    writer.submit(0)
    writer.submit(1)
    gate.set()
    with pytest.raises(WriterStalled):
        writer.wait_all()


def test_random_steps_with_errors_and_cancels(make_writer):
    rng = random.Random(5)
    held = []

    def push(part, layer):
        if rng.random() < 0.05:
            raise OSError("sometimes")

    writer = make_writer(push, 3, 4, on_begin=held.append, on_end=lambda parts: held.remove(parts))
    for _ in range(100):
        writer.begin(PARTS)
        for layer in range(rng.randrange(6)):
            writer.submit(layer)
        if rng.random() < 0.3:
            writer.cancel()
        else:
            try:
                writer.wait_all()
            except OSError:
                pass
        assert held == []
