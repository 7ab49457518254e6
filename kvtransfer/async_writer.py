"""Pushes a layer's new KV while the forward computes the next layer: `begin -> submit* -> wait_all`, once per step.

The writer owns the life of a step. It refuses to know what a push is (`push_fn`), and to promise any order between
tasks. The first error of a step is raised at `wait_all`, as it was raised, so that callers can tell its type; the
others are attached to it as notes. A step that fails or is cancelled leaves the writer idle. Without parts, or without
a `push_fn`, a step is a clean no-op.

Beside the step there is work *aside*: tasks that belong to no step and run while no task of a step waits.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.core.request import AttemptKey
from baton.kvtransfer.writer_threads import (
    Job,
    OnQuiet,
    TaskGroup,
    WriterCancelled,
    WriterDied,
    WriterStalled,
    WriterThreads,
)

__all__ = ["AsyncWriter", "PushFn", "PushPart", "WriterCancelled", "WriterDied", "WriterStalled", "WriterStateError"]

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


class WriterStateError(RuntimeError):
    """A call that the writer's state does not allow: a bug in the caller."""


class AsyncWriter:
    """The one writer of a prefill loop. Only that loop calls it, but for `aside`, `cancel` and `close`.

    Args:
        push_fn: reads and hands over one part of one layer; runs on the threads. On CUDA the thread's own stream is
            current and waits for the layer; what `push_fn` posts there, it synchronizes itself if it must. None: every
            step is a no-op.
        num_threads: how many.
        queue_len: tasks of a step that may wait; a submit beyond that waits itself, and is counted in `num_stalls`.
        device: where the pool is; every thread makes it its own.
        on_begin: told the parts before the first task.
        on_end: told them once no task reads their blocks any more.
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
        on_end: OnParts | None = None,
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
        self._parts: tuple[PushPart, ...] = ()
        self._step: TaskGroup | None = None  # None: idle
        self._is_closed = False
        self._lock = threading.Lock()  # of `_step`; what is in it has the lock of the threads

    @property
    def num_waiting(self) -> int:
        """Tasks of the step that no thread has begun. Any thread."""
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
    def step(self, parts: Sequence[PushPart]) -> Iterator["AsyncWriter"]:
        """`begin`, then `wait_all`, or `cancel` if the block raises."""
        self.begin(parts)
        try:
            yield self
        except BaseException:
            self.cancel()
            raise
        self.wait_all()

    def begin(self, parts: Sequence[PushPart]) -> None:
        """Start a step."""
        own = tuple(parts) if self._threads else ()
        on_end = self._on_end

        def on_quiet(_: BaseException | None) -> None:
            if on_end is not None and own:
                on_end(own)

        with self._lock:
            if self._is_closed:
                raise WriterStateError("begin on a closed writer")
            if self._step is not None:
                raise WriterStateError("begin while a step is open; wait_all or cancel ends it")
            step = TaskGroup(on_quiet)
            self._parts, self._step = own, step
        if own:
            assert self._threads is not None
            self._threads.start()
            self._threads.expect(step)
            if self._on_begin is not None:
                self._on_begin(own)

    def submit(self, layer: int) -> None:
        """The layer's K and V of every part are in the pool, or will be when the current stream gets here."""
        step = self._step
        if step is None:
            raise WriterStateError("submit without begin")
        if not self._parts:
            return
        assert self._threads is not None and self._push_fn is not None
        event = self._threads.record()
        for part in self._parts:
            job = functools.partial(self._push_fn, part, layer)
            if not self._threads.put(step, job, event, self._queue_len, self._stall_limit_s):
                return  # wait_all raises what happened

    def wait_all(self) -> None:
        """Wait for every task and end the step.

        Raises:
            BaseException: what the first task that failed raised; notes tell of the others.
            WriterStalled: the threads did not keep up. Tasks that still run end before `on_end` is called.
            WriterDied: threads ended.
            WriterCancelled: another thread cancelled the step.
        """
        step = self._step
        if step is None:
            raise WriterStateError("wait_all without begin")
        self._end(step)
        if step.errors:
            raise _first_of(step.errors)
        if step.is_cancelled:
            raise WriterCancelled("the step was cancelled while it was waited for")

    def cancel(self) -> None:
        """Throw tasks that wait away, wait for those that run, and be idle. Without a step, nothing to do."""
        step = self._step
        if step is None:
            return
        if self._threads is not None:
            self._threads.cancel(step)
        self._end(step)

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
        self.cancel()
        with self._lock:
            self._is_closed = True
        if self._threads is not None:
            self._threads.close(self._wait_limit_s)

    def _end(self, step: TaskGroup) -> None:
        """Wait until no task is left, and be idle."""
        if self._threads is not None:
            self._threads.finish(step, self._wait_limit_s)
        with self._lock:
            if self._step is step:
                self._step = None


def _first_of(errors: list[BaseException]) -> BaseException:
    """The first error, with the others attached as notes."""
    first, *others = errors
    for other in others[:MAX_NOTES]:
        first.add_note(f"also, in the same step: {other!r}")
    if len(others) > MAX_NOTES:
        first.add_note(f"and {len(others) - MAX_NOTES} more errors")
    return first
