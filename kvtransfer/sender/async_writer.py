"""Pushes a layer's new KV while the forward pass computes the next: `open -> submit* -> close` (or `wait`) per step.

The writer manages the lifetime of steps, several of which may be open. It does not know what a push is (`push_fn`) and
guarantees no order between tasks. `wait` raises the first error of a step unchanged, so that callers can tell its type;
the others are attached to it as notes. A step without parts, or a writer without a `push_fn`, does nothing.

Besides steps there is work *aside*: tasks that belong to no step and run while no task of a step waits.
"""

import contextlib
import functools
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.requests.request import AttemptKey

# While tasks may come at any moment, one idle thread polls for them at this interval, and `put` wakes no thread: a wake
# costs the model's step more than all the rest of `put`.
LOOK_S = 0.0002

log = logging.getLogger(__name__)


class WriterStalled(RuntimeError):
    """The threads did not keep up within the limits, so the step failed."""


class WriterDied(RuntimeError):
    """A thread ended outside of any push and lost its task, so the step failed. The next step replaces the thread."""


class WriterCancelled(RuntimeError):
    """The work will not be done: it was cancelled, or the writer was closed, in the meantime."""


Job = Callable[[], None]
OnQuiet = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class TaskGroup:
    """Tasks that end together. Changed only while the lock of `WriterThreads` is held.

    Attributes:
        on_quiet: called at the end with the first error, or None.
        errors: errors of the tasks, in the order in which they happened.
    """

    on_quiet: OnQuiet
    num_submitted: int = 0
    num_done: int = 0
    is_closed: bool = False  # no more submits
    is_cancelled: bool = False  # tasks that have not begun never will
    is_expected: bool = False  # its tasks may come at any moment
    is_left_alone: bool = False  # no thread waits for it: its last task reports the end
    is_told: bool = False
    errors: list[BaseException] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        """Whether no task is left."""
        return self.num_done == self.num_submitted

    def take_telling(self) -> bool:
        """Return whether the caller must call `tell` because the group is quiet; returns True only once."""
        tell = self.is_quiet and not self.is_told
        self.is_told |= tell
        return tell

    def tell(self) -> None:
        """Report the end of the group. Call it without the lock."""
        self.on_quiet(self.errors[0] if self.errors else None)


@dataclass(slots=True)
class _Task:
    group: TaskGroup
    job: Job
    event: torch.cuda.Event | None


class WriterThreads:
    """Runs tasks in no guaranteed order; tasks aside run only while no other task waits.

    On CUDA the thread's own stream is current, and waits for the task's event.

    Args:
        num_threads: number of threads.
        device: device that every thread makes current.
    """

    def __init__(self, num_threads: int, device: torch.device) -> None:
        assert num_threads > 0
        self.num_stalls = 0
        self.stalled_s = 0.0
        self.num_deaths = 0
        self._num_threads = num_threads
        self._device = device
        self._tasks: deque[_Task] = deque()
        self._aside: deque[_Task] = deque()
        # One token per task, except for tasks that come while a thread polls, so that idle threads wait without
        # touching the interpreter's lock. A token without a task is harmless.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._num_expected = 0  # number of groups
        self._has_looker = False
        self._is_looking = False  # the polling thread waits now
        self._look = threading.Event()
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        # Numbers of callers that wait on `_changed`. They are woken only for what they wait for: a wake takes the
        # interpreter from a writer.
        self._num_for_end = 0
        self._num_for_room = 0
        self._num_alive = 0
        self._num_started = 0
        self._dead = WriterDied("no writer thread is left")  # the error that ended the last thread
        self._threads: list[threading.Thread] = []
        self.start()

    @property
    def num_waiting(self) -> int:
        """Number of waiting tasks, not counting those aside."""
        return len(self._tasks)

    def start(self) -> None:
        """Start threads until all that should exist do."""
        with self._changed:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while self._num_alive < self._num_threads and not self._is_closed:
                self._num_alive += 1
                self._num_started += 1
                name = f"kv-writer-{self._num_started}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def expect(self, group: TaskGroup) -> None:
        """Announce that tasks of a group may come at any moment, until `finish`."""
        with self._changed:
            group.is_expected = True
            self._num_expected += 1
        self._tokens.put(None)  # makes a thread begin to poll

    def record(self) -> torch.cuda.Event | None:
        """Record an event on the current stream; None on a CPU, where all earlier work has already happened."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def put(
        self,
        group: TaskGroup,
        job: Job,
        event: torch.cuda.Event | None,
        queue_len: int,
        limit_s: float,
    ) -> bool:
        """Queue a task, waiting for room (counted as a stall) if `queue_len` tasks wait. False: the group is closed."""
        with self._changed:
            if len(self._tasks) >= queue_len and not (group.is_closed or group.is_cancelled):
                self._wait_for_room(group, queue_len, limit_s)
            if group.is_closed or group.is_cancelled:
                return False
            group.num_submitted += 1
            self._tasks.append(_Task(group, job, event))
            is_seen = self._is_looking
        if not is_seen:
            self._tokens.put(None)
        return True

    def put_aside(self, group: TaskGroup, jobs: Sequence[Job], event: torch.cuda.Event | None) -> None:
        """Queue a whole group, however long the queue is; no thread will wait for it."""
        with self._changed:
            if self._is_closed:
                raise WriterCancelled("the writer is closed")
            group.is_closed = group.is_left_alone = True
            group.num_submitted = len(jobs)
            self._aside.extend(_Task(group, job, event) for job in jobs)
        for _ in jobs:
            self._tokens.put(None)

    def cancel(self, group: TaskGroup) -> None:
        """Cancel the tasks of a group that have not begun."""
        with self._changed:
            group.is_cancelled = True
            self._throw_away(group)
            self._changed.notify_all()

    def finish(self, group: TaskGroup, limit_s: float) -> None:
        """Close a group and wait until its tasks have ended; `tell` follows then, or later with its last task."""
        with self._changed:
            group.is_closed = True
            self._expect_no_more(group)
            self._changed.notify_all()
            self._num_for_end += 1
            self._changed.wait_for(lambda: group.is_quiet or not self._num_alive, limit_s)
            self._num_for_end -= 1
            if not group.is_quiet:
                stalled = WriterStalled(f"tasks did not end within {limit_s} s")
                group.errors.append(stalled if self._num_alive else self._dead)
                group.is_cancelled = group.is_left_alone = True
                self._throw_away(group)  # leaves the group quiet if no thread is alive
            tell = group.take_telling()
        if tell:
            group.tell()

    def leave_alone(self, group: TaskGroup) -> None:
        """Close a group without waiting; `tell` follows when none of its tasks is left."""
        with self._changed:
            group.is_closed = group.is_left_alone = True
            self._expect_no_more(group)
            self._changed.notify_all()
            if not self._num_alive and not group.is_quiet:
                group.errors.append(self._dead)
                self._throw_away(group)
            tell = group.take_telling()
        if tell:
            group.tell()

    def close(self, limit_s: float) -> None:
        """Drop waiting tasks and end the threads."""
        with self._changed:
            self._is_closed = True
            ended = self._fail_aside(WriterCancelled("the writer was closed"))
            threads = tuple(self._threads)
        for group in ended:
            group.tell()
        for _ in threads:
            self._tokens.put(None)
        self._look.set()
        for thread in threads:
            thread.join(limit_s)

    # With the lock held

    def _expect_no_more(self, group: TaskGroup) -> None:
        if group.is_expected:
            group.is_expected = False
            self._num_expected -= 1
            self._wake_for_tasks(len(self._tasks))
            self._look.set()

    def _wake_for_tasks(self, num_tasks: int) -> None:
        """Wake a thread for each task that came without a token."""
        for _ in range(num_tasks):
            self._tokens.put(None)

    def _throw_away(self, group: TaskGroup) -> None:
        """Drop a group's waiting tasks, one at a time because threads take tasks without the lock."""
        for tasks in (self._tasks, self._aside):
            for _ in range(len(tasks)):
                with contextlib.suppress(IndexError):
                    task = tasks.popleft()
                    if task.group is group:
                        group.num_done += 1
                    else:
                        tasks.append(task)

    def _fail_aside(self, error: BaseException) -> list[TaskGroup]:
        """Drop all tasks that wait aside; return the groups to tell."""
        groups = {id(task.group): task.group for task in tuple(self._aside)}
        for group in groups.values():
            group.is_cancelled = True
            group.errors.append(error)
            self._throw_away(group)
        return [group for group in groups.values() if group.take_telling()]

    def _wait_for_room(self, group: TaskGroup, queue_len: int, limit_s: float) -> None:
        start_s = time.monotonic()
        self.num_stalls += 1
        self._num_for_room += 1
        found = self._changed.wait_for(
            lambda: len(self._tasks) < queue_len or group.is_closed or group.is_cancelled or not self._num_alive,
            limit_s,
        )
        self._num_for_room -= 1
        self.stalled_s += time.monotonic() - start_s
        if not found:
            group.errors.append(WriterStalled(f"the queue of {queue_len} tasks was full for {limit_s} s"))
        group.is_cancelled |= not found or not self._num_alive

    # The threads

    def _run(self) -> None:
        hand: list[_Task] = []
        try:
            self._serve(hand)
            with self._changed:
                self._num_alive -= 1
        # The boundary of the thread: its task must count as done, or a step would wait for it forever.
        except BaseException as error:  # noqa: BLE001
            self._died(hand, error)

    def _died(self, hand: list[_Task], error: BaseException) -> None:
        log.error("a writer thread died: %r", error)
        _forget_frames(error)
        died = WriterDied(f"a writer thread died: {error!r}")
        groups = [task.group for task in hand]
        hand.clear()
        with self._changed:
            self._num_alive -= 1
            self.num_deaths += 1
            self._dead = died
            self._wake_for_tasks(len(self._tasks))
            for group in groups:
                group.num_done += 1
                group.errors.append(died)
            ended = [group for group in groups if group.is_left_alone and group.take_telling()]
            if not self._num_alive:
                ended += self._fail_aside(died)
            self._changed.notify_all()
        for group in ended:
            group.tell()

    def _serve(self, hand: list[_Task]) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
        while True:
            self._wait()
            task = self._take()
            if task is None:
                if self._is_closed:
                    return
                continue  # the token of a dropped task
            hand.append(task)
            group = task.group
            error = None if group.is_cancelled else self._execute(task, stream)
            # Nothing may reference the task any more before it counts as done: no event, and no frame of a failed push
            # with tensors in its locals.
            hand.clear()
            del task
            with self._changed:
                group.num_done += 1
                if error is not None:
                    group.errors.append(error)
                tell = group.is_left_alone and group.take_telling()
                if self._num_for_end and group.is_quiet:
                    self._changed.notify_all()
            if tell:
                group.tell()
            del error, group

    def _wait(self) -> None:
        """Wait until there may be a task, or until the end."""
        with self._changed:
            looks = self._num_expected > 0 and not self._has_looker
            self._has_looker |= looks
        if not looks:
            self._tokens.get()
            return
        while True:
            with self._changed:
                num_tasks = len(self._tasks) + len(self._aside)
                self._is_looking = not num_tasks and self._num_expected > 0 and not self._is_closed
                if not self._is_looking:
                    self._has_looker = False
                    self._wake_for_tasks(num_tasks - 1)
                    return
                while not self._tokens.empty():  # no task is left that needs a thread woken
                    with contextlib.suppress(queue.Empty):
                        self._tokens.get_nowait()
            self._look.wait(LOOK_S)
            self._look.clear()

    def _take(self) -> _Task | None:
        for tasks in (self._tasks, self._aside):
            with contextlib.suppress(IndexError):
                task = tasks.popleft()
                if self._num_for_room:
                    with self._changed:
                        self._changed.notify_all()
                return task
        return None

    def _execute(self, task: _Task, stream: torch.cuda.Stream | None) -> BaseException | None:
        try:
            with torch.inference_mode():
                if stream is None:
                    task.job()
                    return None
                assert task.event is not None
                with torch.cuda.stream(stream):
                    stream.wait_event(task.event)
                    task.job()
        # The boundary of the task: whatever a push raises belongs to its group.
        except BaseException as error:  # noqa: BLE001
            del task  # this frame lives as long as the error
            _forget_frames(error)
            return error
        return None


def _forget_frames(error: BaseException) -> None:
    """Clear the locals of every frame that the error, or a cause of it, passed through."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


__all__ = [
    "AsyncWriter",
    "PushFn",
    "PushRange",
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
class PushRange:
    """`count` positions of one attempt from `first` on: what one step computes for it in every layer."""

    attempt: AttemptKey
    first: int
    count: int


PushFn = Callable[[PushRange, int], None]
OnParts = Callable[[Sequence[PushRange]], None]
OnPartsEnd = Callable[[Sequence[PushRange], BaseException | None], None]


class WriterStateError(RuntimeError):
    """The writer's state does not allow this call: a bug in the caller."""


class WriterStep:
    """One step, made by `AsyncWriter.open`. Only its caller uses it, except that any thread may call `cancel`."""

    def __init__(self, writer: "AsyncWriter", parts: tuple[PushRange, ...], group: TaskGroup) -> None:
        self._writer = writer
        self._parts = parts
        self._group = group
        self._is_over = False

    def submit(self, layer: int) -> None:
        """Push a layer: its K and V of every part are in the pool, or will be when the current stream gets here."""
        if self._is_over:
            raise WriterStateError("submit to a step that is over")
        self._writer._submit(self._group, self._parts, layer)

    def close(self) -> None:
        """End the step without waiting: no more submits. `on_end` is called when the last task has ended."""
        self._end()
        self._writer._close_step(self._group)

    def wait(self) -> None:
        """End the step and wait for every task: no more submits.

        Raises:
            BaseException: the error of the first task that failed; notes list the others.
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
        """Drop waiting tasks and wait for those that run. Does nothing after the end."""
        self._is_over = True
        self._writer._cancel(self._group)

    def _end(self) -> None:
        if self._is_over:
            raise WriterStateError("the step is over")
        self._is_over = True


class AsyncWriter:
    """The one writer of an engine. Only the engine's loop calls it, except for `aside` and `close`.

    Args:
        push_fn: reads and hands over one part of one layer; runs on the threads. On CUDA the thread's own stream is
            current and waits for the layer; `push_fn` synchronizes what it launches there itself if it must. None:
            every step does nothing.
        num_threads: number of threads.
        queue_len: how many tasks of a step may wait; a further submit blocks, and is counted in `num_stalls`.
        device: device of the pool; every thread makes it current.
        on_begin: called with the parts before the first task.
        on_end: called once no task reads the parts' blocks any more, with the parts and the first task's error, if any.
        stall_limit_s: how long a submit may wait for room before the step fails.
        wait_limit_s: how long the tasks of a step may take to end once all are submitted.
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
        self._open: list[TaskGroup] = []  # steps that may still be running
        self._is_closed = False
        self._lock = threading.Lock()  # guards the two above

    @property
    def num_waiting(self) -> int:
        """Number of steps' tasks that no thread has begun. Any thread may read it."""
        return self._threads.num_waiting if self._threads else 0

    @property
    def num_stalls(self) -> int:
        """Number of submits that had to wait for room."""
        return self._threads.num_stalls if self._threads else 0

    @property
    def stalled_s(self) -> float:
        """Total time that submits waited."""
        return self._threads.stalled_s if self._threads else 0.0

    @property
    def num_deaths(self) -> int:
        """Number of threads that died, and were or will be replaced."""
        return self._threads.num_deaths if self._threads else 0

    @contextlib.contextmanager
    def step(self, parts: Sequence[PushRange]) -> Iterator[WriterStep]:
        """Run a step: `open`, then `wait`, or `cancel` if the block raises."""
        step = self.open(parts)
        try:
            yield step
        except BaseException:
            step.cancel()
            raise
        step.wait()

    def open(self, parts: Sequence[PushRange]) -> WriterStep:
        """Begin a step. Earlier steps may still be open."""
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
        """Run jobs that belong to no step on the threads; returns at once. Any thread may call this.

        Args:
            jobs: run in no guaranteed order.
            on_done: called on any thread with the first error, or None, once no task reads the blocks any more.

        Raises:
            WriterCancelled: the writer is closed.
        """
        if self._threads is None or not jobs:
            on_done(None)
            return
        self._threads.start()
        self._threads.put_aside(TaskGroup(on_done), jobs, self._threads.record())

    def close(self) -> None:
        """Cancel open steps and end the threads."""
        with self._lock:
            self._is_closed, groups = True, tuple(self._open)
        for group in groups:
            self._cancel(group)
        if self._threads is not None:
            self._threads.close(self._wait_limit_s)

    # Called by steps

    def _submit(self, group: TaskGroup, parts: Sequence[PushRange], layer: int) -> None:
        if not parts:
            return
        assert self._threads is not None and self._push_fn is not None
        event = self._threads.record()
        for part in parts:
            job = functools.partial(self._push_fn, part, layer)
            if not self._threads.put(group, job, event, self._queue_len, self._stall_limit_s):
                return  # `wait` raises the error, and `on_end` is called

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
    """Return the first error, with the others attached as notes."""
    first, *others = errors
    for other in others[:MAX_NOTES]:
        first.add_note(f"also, in the same step: {other!r}")
    if len(others) > MAX_NOTES:
        first.add_note(f"and {len(others) - MAX_NOTES} more errors")
    return first
