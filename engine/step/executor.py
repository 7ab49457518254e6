"""Runs steps one after the other, in the order in which they were submitted, without blocking the host.

On CUDA the executor is the current stream, and results are copied to the host on a separate stream. On a CPU it is one
thread, so that a step overlaps the planning of the next one there, too. Work is submitted as a function, which reads
device data only when its turn comes. After an error nothing runs any more, because later work would build on a step
that did not happen.
"""

import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from baton.engine.step.host_future import HostFuture
from baton.kernels.copies import copy_to_host


def without_frames(error: BaseException) -> BaseException:
    """Replace the error's traceback by a note, because frames keep alive what the failed work had captured."""
    text = "".join(traceback.format_exception(error))
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        following.__traceback__ = None
        seen.append(following)
        following = following.__cause__ or following.__context__
    error.add_note(f"Where it happened:\n{text}")
    return error


CLOSE_TIMEOUT_S = 30.0


class Pending(Protocol):
    """Work that is under way."""

    @property
    def is_done(self) -> bool:
        """Whether the work is over."""
        ...


class StepExecutor(Protocol):
    """Runs submitted work in order."""

    def submit(self, work: Callable[[], torch.Tensor], target: torch.Tensor) -> HostFuture:
        """Run `work` after everything submitted before; its result is copied to `target`, on the host."""
        ...

    def run(self, work: Callable[[], None]) -> "Pending":
        """Run work that has no result. If it fails, the future of the next `submit` raises the error."""
        ...

    def drain(self) -> None:
        """Wait until no work is running; does not report errors."""
        ...

    def close(self) -> None:
        """Finish the submitted work and end; nothing may be submitted afterwards."""
        ...


def executor_for(device: torch.device) -> StepExecutor:
    """The executor for a device."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()


class _Done:
    """A one-shot event: a lock that is held until the event is set, which costs less than a `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_done(self) -> bool:
        return self._is_set

    def query(self) -> bool:
        return self._is_set

    def synchronize(self) -> None:
        self.wait(-1)
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> bool:
        if not self._is_set and self._lock.acquire(timeout=timeout_s):
            self._lock.release()  # for the next waiter
        return self._is_set

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._is_set = True
        self._lock.release()


_Task = tuple[Callable[[], torch.Tensor | None], torch.Tensor | None, _Done]
_Tasks = queue.SimpleQueue[_Task | None]


class ThreadExecutor:
    """Runs work on one thread, which ends with `close` or when the executor is garbage-collected."""

    def __init__(self) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._thread: threading.Thread | None = None  # started by the first work
        # If the interpreter exits while this thread is inside torch, the process crashes.
        weakref.finalize(self, _end, self._tasks, self._threads)

    def submit(self, work: Callable[[], torch.Tensor], target: torch.Tensor) -> HostFuture:
        """See `StepExecutor`."""
        return HostFuture(target, self._give(work, target))

    def run(self, work: Callable[[], None]) -> Pending:
        """See `StepExecutor`."""
        return self._give(work, None)

    def drain(self) -> None:
        """See `StepExecutor`."""
        if self._thread is not None and self._thread.is_alive():
            is_done = self._give(_nothing, None).wait(CLOSE_TIMEOUT_S)
            assert is_done, f"a step did not end within {CLOSE_TIMEOUT_S} s"

    def close(self) -> None:
        """See `StepExecutor`."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            assert not self._thread.is_alive(), f"a step did not end within {CLOSE_TIMEOUT_S} s"

    def _give(self, work: Callable[[], torch.Tensor | None], target: torch.Tensor | None) -> _Done:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name="decode-steps", daemon=True)
            self._thread.start()
            self._threads.append(self._thread)
        assert self._thread.is_alive(), "the executor is closed"
        done = _Done()
        self._tasks.put((work, target, done))
        return done


def _nothing() -> None:
    """Do nothing; `drain` waits for it."""


def _end(tasks: _Tasks, threads: list[threading.Thread]) -> None:
    """Stop the thread, when nothing refers to the executor any more or the interpreter exits."""
    tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)


def _serve(tasks: _Tasks) -> None:
    """Run the executor's thread. It holds the queue but not the executor, so that dropping the executor ends it."""
    failure: BaseException | None = None
    with torch.inference_mode():
        while (task := tasks.get()) is not None:
            work, target, done = task
            if failure is None:
                failure = _do(work, target)
            # Drop what the work captured before any thread sees that it is done.
            del task, work, target
            done.set(failure)
            del done


def _do(work: Callable[[], torch.Tensor | None], target: torch.Tensor | None) -> BaseException | None:
    try:
        result = work()
        if target is not None:
            assert result is not None
            copy_to_host(target, result)
    # Not swallowed: it is raised where the result is read.
    except BaseException as error:  # noqa: BLE001
        return without_frames(error)
    return None


class _Reached:
    """Done when the stream has reached an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())


class StreamExecutor:
    """Runs work on the CUDA stream that is current when it is submitted; a failed launch raises immediately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    @torch.inference_mode()
    def submit(self, work: Callable[[], torch.Tensor], target: torch.Tensor) -> HostFuture:
        """See `StepExecutor`."""
        source = work()
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            copy_to_host(target, source)
            copied.record(self._copies)
        source.record_stream(self._copies)  # else its memory could be reused before it was read
        return HostFuture(target, copied)

    @torch.inference_mode()
    def run(self, work: Callable[[], None]) -> Pending:
        """See `StepExecutor`."""
        work()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _Reached(event)

    def drain(self) -> None:
        """See `StepExecutor`."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See `StepExecutor`."""
        self.drain()
