"""Pushes a layer's new KV while the forward computes the next layer: `open -> submit* -> close` (or `wait`), per step.

The writer owns the life of steps, of which several may be open. It refuses to know what a push is (`push_fn`), and to
promise any order between tasks. The first error of a step is raised at `wait`, as it was raised, so that callers can
tell its type; the others are attached to it as notes. Without parts, or without a `push_fn`, a step is a clean no-op.

Beside steps there is work *aside*: tasks that belong to no step and run while no task of a step waits.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.sender.writer_threads import (
    Job,
    OnQuiet,
    TaskGroup,
    WriterCancelled,
    WriterDied,
    WriterStalled,
    WriterThreads,
)

__all__ = [
    "AsyncWriter",
    "PushFn",
    "PushPart",
    "WriterCancelled",
    "WriterDied",
    "WriterStalled",
    "WriterStateError",
    "WriterStep",
]

STALL_LIMIT_S = 10.0
WAIT_LIMIT_S = 60.0
MAX_NOTES = 8  # errors attached to the one that is raised


@dataclass(frozen=True, slots=True)
class PushPart:
    """`count` positions from `first` of one attempt: what one step computes for it in every layer."""

    attempt: AttemptKey
    first: int
    count: int


PushFn = Callable[[PushPart, int], None]
OnParts = Callable[[Sequence[PushPart]], None]
OnPartsEnd = Callable[[Sequence[PushPart], BaseException | None], None]


class WriterStateError(RuntimeError):
    """A call that the writer's state does not allow: a bug in the caller."""


class WriterStep:
    """One step; `AsyncWriter.open` makes it. Its caller alone calls it, but for `cancel`."""

    def __init__(self, writer: "AsyncWriter", parts: tuple[PushPart, ...], group: TaskGroup) -> None:
        self._writer = writer
        self._parts = parts
        self._group = group
        self._is_over = False

    def submit(self, layer: int) -> None:
        """The layer's K and V of every part are in the pool, or will be when the current stream gets here."""
        if self._is_over:
            raise WriterStateError("submit to a step that is over")
        self._writer._submit(self._group, self._parts, layer)

    def close(self) -> None:
        """Nothing is submitted any more; returns at once. `on_end` is told when the last task is over."""
        self._end()
        self._writer._close_step(self._group)

    def wait(self) -> None:
        """Nothing is submitted any more: wait for every task.

        Raises:
            BaseException: what the first task that failed raised; notes tell of the others.
            WriterStalled: the threads did not keep up. Tasks that still run end before `on_end` is called.
            WriterDied: threads ended.
            WriterCancelled: another thread cancelled the step.
        """
        self._end()
        self._writer._finish(self._group)
        if self._group.errors:
            raise _first_of(self._group.errors)
        if self._group.is_cancelled:
            raise WriterCancelled("the step was cancelled while it was waited for")

    def cancel(self) -> None:
        """Throw tasks that wait away, and wait for those that run. After the end, nothing to do."""
        self._is_over = True
        self._writer._cancel(self._group)

    def _end(self) -> None:
        if self._is_over:
            raise WriterStateError("the step is over")
        self._is_over = True


class AsyncWriter:
    """The one writer of an engine. Only its loop calls it, but for `aside` and `close`.

    Args:
        push_fn: reads and hands over one part of one layer; runs on the threads. On CUDA the thread's own stream is
            current and waits for the layer; what `push_fn` posts there, it synchronizes itself if it must. None: every
            step is a no-op.
        num_threads: how many.
        queue_len: tasks of a step that may wait; a submit beyond that waits itself, and is counted in `num_stalls`.
        device: where the pool is; every thread makes it its own.
        on_begin: told the parts before the first task.
        on_end: told them once no task reads their blocks any more, and what the first task that failed raised.
        stall_limit_s: a submit that finds no room for so long fails the step.
        wait_limit_s: for the tasks of a step to end, once all are submitted.
    """

    def __init__(
        self,
        push_fn: PushFn | None,
        num_threads: int,
        queue_len: int,
        device: torch.device,
        *,
        on_begin: OnParts | None = None,
        on_end: OnPartsEnd | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        assert queue_len > 0
        self._queue_len = queue_len
        self._on_begin = on_begin
        self._on_end = on_end
        self._stall_limit_s = stall_limit_s
        self._wait_limit_s = wait_limit_s
        self._push_fn = push_fn
        self._threads = None if push_fn is None else WriterThreads(num_threads, device)
        self._open: list[TaskGroup] = []  # steps that may not be over
        self._is_closed = False
        self._lock = threading.Lock()  # of these two

    @property
    def num_waiting(self) -> int:
        """Tasks of steps that no thread has begun. Any thread."""
        return self._threads.num_waiting if self._threads else 0

    @property
    def num_stalls(self) -> int:
        """Submits that had to wait for room."""
        return self._threads.num_stalls if self._threads else 0

    @property
    def stalled_s(self) -> float:
        """How long they waited."""
        return self._threads.stalled_s if self._threads else 0.0

    @property
    def num_deaths(self) -> int:
        """Threads that died, and were or will be replaced."""
        return self._threads.num_deaths if self._threads else 0

    @contextlib.contextmanager
    def step(self, parts: Sequence[PushPart]) -> Iterator[WriterStep]:
        """`open`, then `wait`, or `cancel` if the block raises."""
        step = self.open(parts)
        try:
            yield step
        except BaseException:
            step.cancel()
            raise
        step.wait()

    def open(self, parts: Sequence[PushPart]) -> WriterStep:
        """Begin a step. Earlier ones need not be over."""
        own = tuple(parts) if self._threads else ()
        on_end = self._on_end

        def on_quiet(error: BaseException | None) -> None:
            with self._lock:
                self._open = [item for item in self._open if item is not group]
            if on_end is not None and own:
                on_end(own, error)

        group = TaskGroup(on_quiet)
        with self._lock:
            if self._is_closed:
                raise WriterStateError("open on a closed writer")
            self._open.append(group)
        if own:
            assert self._threads is not None
            self._threads.start()
            self._threads.expect(group)
            if self._on_begin is not None:
                self._on_begin(own)
        return WriterStep(self, own, group)

    def aside(self, jobs: Sequence[Job], on_done: OnQuiet) -> None:
        """Do something that belongs to no step, on the threads; returns at once. Any thread may call this.

        Args:
            jobs: run in no promised order.
            on_done: told the first error, or None, on any thread, once no task reads the blocks any more.

        Raises:
            WriterCancelled: the writer is closed.
        """
        if self._threads is None or not jobs:
            on_done(None)
            return
        self._threads.start()
        self._threads.put_aside(TaskGroup(on_done), jobs, self._threads.record())

    def close(self) -> None:
        """Cancel what is open and end the threads."""
        with self._lock:
            self._is_closed, groups = True, tuple(self._open)
        for group in groups:
            self._cancel(group)
        if self._threads is not None:
            self._threads.close(self._wait_limit_s)

    # What steps ask for

    def _submit(self, group: TaskGroup, parts: Sequence[PushPart], layer: int) -> None:
        if not parts:
            return
        assert self._threads is not None and self._push_fn is not None
        event = self._threads.record()
        for part in parts:
            job = functools.partial(self._push_fn, part, layer)
            if not self._threads.put(group, job, event, self._queue_len, self._stall_limit_s):
                return  # `wait` raises what happened, and `on_end` is told

    def _close_step(self, group: TaskGroup) -> None:
        if self._threads is not None:
            self._threads.leave_alone(group)

    def _finish(self, group: TaskGroup) -> None:
        if self._threads is not None:
            self._threads.finish(group, self._wait_limit_s)

    def _cancel(self, group: TaskGroup) -> None:
        if self._threads is not None:
            self._threads.cancel(group)
            self._threads.finish(group, self._wait_limit_s)


def _first_of(errors: list[BaseException]) -> BaseException:
    """The first error, with the others attached as notes."""
    first, *others = errors
    for other in others[:MAX_NOTES]:
        first.add_note(f"also, in the same step: {other!r}")
    if len(others) > MAX_NOTES:
        first.add_note(f"and {len(others) - MAX_NOTES} more errors")
    return first
