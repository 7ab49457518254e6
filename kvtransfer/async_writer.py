"""Pushes a layer's new KV while the forward computes the next layer: `begin -> submit* -> wait_all`, once per step.

The writer owns threads, a bounded queue and the life of a step. It refuses to know what a push is (`push_fn`), and to
promise any order between tasks. An error in one task is kept, the first of them is raised at `wait_all`; a step that
fails is cancelled and leaves the writer idle. Without parts, a step is a clean no-op.
"""

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.core.request import AttemptKey

STALL_LIMIT_S = 10.0  # a submit that finds no room for so long fails the step
WAIT_LIMIT_S = 60.0


class WriterStateError(RuntimeError):
    """A call that the writer's state does not allow: a bug in the caller."""


class WriterStalled(RuntimeError):
    """The threads did not keep up within the limits; the step failed."""


@dataclass(frozen=True, slots=True)
class PushPart:
    """`count` positions from `first` of one attempt: what one step computes for it in every layer."""

    attempt: AttemptKey
    first: int
    count: int


@dataclass(slots=True)
class _Task:
    part: PushPart
    layer: int
    event: torch.cuda.Event | None
    step: int


PushFn = Callable[[PushPart, int], None]
OnParts = Callable[[Sequence[PushPart]], None]


class AsyncWriter:
    """The one writer of a prefill loop. Only that loop calls it.

    Args:
        push_fn: reads and hands over one part of one layer; runs on the threads.
        num_threads: how many.
        queue_len: tasks that may wait; a submit beyond that waits itself, and is counted in `num_stalls`.
        device: where the pool is; on CUDA every thread has a stream of its own.
        on_begin: told the parts before the first task.
        on_end: told them once no task reads their blocks any more.
    """

    def __init__(
        self,
        push_fn: PushFn,
        num_threads: int,
        queue_len: int,
        device: torch.device,
        *,
        on_begin: OnParts | None = None,
        on_end: OnParts | None = None,
    ) -> None:
        assert num_threads > 0
        assert queue_len > 0
        self.num_stalls = 0
        self.stalled_s = 0.0
        self._push_fn = push_fn
        self._queue_len = queue_len
        self._device = device
        self._on_begin = on_begin
        self._on_end = on_end
        self._parts: tuple[PushPart, ...] | None = None  # None: idle
        self._step = 0
        self._num_running = 0
        self._error: BaseException | None = None
        self._tasks: deque[_Task] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-writer-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

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
        with self._changed:
            if self._is_closed:
                raise WriterStateError("begin on a closed writer")
            if self._parts is not None:
                raise WriterStateError("begin while a step is open; wait_all or cancel ends it")
            self._parts = tuple(parts)
            self._step += 1
        if self._on_begin is not None and parts:
            self._on_begin(self._parts)

    def submit(self, layer: int) -> None:
        """The layer's K and V of every part are in the pool, or will be when the current stream gets here."""
        if self._parts is None:
            raise WriterStateError("submit without begin")
        if not self._parts:
            return
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        with self._changed:
            for part in self._parts:
                if len(self._tasks) >= self._queue_len and not self._wait_for_room():
                    return
                self._tasks.append(_Task(part, layer, event, self._step))
                self._changed.notify_all()

    def wait_all(self) -> None:
        """Wait for every task and end the step.

        Raises:
            BaseException: what the first task that failed raised.
            WriterStalled: the threads did not keep up.
        """
        if self._parts is None:
            raise WriterStateError("wait_all without begin")
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, WAIT_LIMIT_S) and self._error is None:
                self._error = WriterStalled(f"tasks did not end within {WAIT_LIMIT_S} s")
            error = self._error
        self._end()
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Throw tasks that wait away, wait for those that run, and be idle. Without a step, nothing to do."""
        if self._parts is None:
            return
        with self._changed:
            self._tasks.clear()
            self._changed.wait_for(self._is_quiet, WAIT_LIMIT_S)
        self._end()

    def close(self) -> None:
        """Cancel what is open and end the threads."""
        self.cancel()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(WAIT_LIMIT_S)

    def _end(self) -> None:
        parts = self._parts
        with self._changed:
            self._tasks.clear()
            self._parts = None
            self._error = None
        if self._on_end is not None and parts:
            self._on_end(parts)

    def _is_quiet(self) -> bool:
        return not self._tasks and self._num_running == 0

    def _wait_for_room(self) -> bool:
        """Wait, counted, with the lock held; False, and the step has failed, if no room comes."""
        start_s = time.monotonic()
        self.num_stalls += 1
        found = self._changed.wait_for(lambda: len(self._tasks) < self._queue_len, STALL_LIMIT_S)
        self.stalled_s += time.monotonic() - start_s
        if not found and self._error is None:
            self._error = WriterStalled(f"the queue of {self._queue_len} tasks stayed full for {STALL_LIMIT_S} s")
        return found

    def _run(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._tasks) or self._is_closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._num_running += 1
                self._changed.notify_all()
            error = self._execute(task, stream)
            step = task.step
            # Before the task counts as done, nothing of it may be referenced any more: no event, no frame of a failed
            # push with tensors in its locals.
            del task
            with self._changed:
                self._num_running -= 1
                if error is not None and self._error is None and step == self._step:
                    self._error = error
                self._changed.notify_all()
            del error

    def _execute(self, task: _Task, stream: torch.cuda.Stream | None) -> BaseException | None:
        try:
            with torch.inference_mode():
                if stream is None:
                    self._push_fn(task.part, task.layer)
                    return None
                assert task.event is not None
                with torch.cuda.stream(stream):
                    stream.wait_event(task.event)
                    self._push_fn(task.part, task.layer)
                    stream.synchronize()
        # The boundary of the thread: whatever a push raises belongs to the step, which raises it at wait_all.
        except BaseException as error:  # noqa: BLE001
            traceback.clear_frames(error.__traceback__)
            return error
        return None
