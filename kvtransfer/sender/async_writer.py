"""Pushes a layer's new KV while the forward computes the next layer: `open -> submit* -> close` (or `wait`), per step.

The writer owns the life of steps, of which several may be open. It refuses to know what a push is (`push_fn`), and to
promise any order between tasks. The first error of a step is raised at `wait`, as it was raised, so that callers can
tell its type; the others are attached to it as notes. Without parts, or without a `push_fn`, a step is a clean no-op.

Beside steps there is work *aside*: tasks that belong to no step and run while no task of a step waits.
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

# While tasks may come at any moment, one idle thread looks for them so often, and `put` wakes no thread: a wake
# costs the step of the model more than all the rest of `put`.
LOOK_S = 0.0002

log = logging.getLogger(__name__)


class WriterStalled(RuntimeError):
    """The threads did not keep up within the limits; the step failed."""


class WriterDied(RuntimeError):
    """A thread ended outside of any push, and its task with it; the step failed. The next step replaces the thread."""


class WriterCancelled(RuntimeError):
    """What was asked for will not be done: it was cancelled, or the writer closed, meanwhile."""


Job = Callable[[], None]
OnQuiet = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class TaskGroup:
    """Tasks that end together. Changed with the lock of `WriterThreads` held.

    Attributes:
        on_quiet: told the first error, or None, at the end.
        errors: of the tasks, in the order in which they happened.
    """

    on_quiet: OnQuiet
    num_submitted: int = 0
    num_done: int = 0
    is_closed: bool = False  # nothing is submitted any more
    is_cancelled: bool = False  # what has not begun never will
    is_expected: bool = False  # tasks of it may come at any moment
    is_left_alone: bool = False  # no thread waits for it: its last task reports
    is_told: bool = False
    errors: list[BaseException] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        """Whether no task is left."""
        return self.num_done == self.num_submitted

    def take_telling(self) -> bool:
        """Whether the caller must call `tell`, now that the group is quiet; it answers yes once."""
        tell = self.is_quiet and not self.is_told
        self.is_told |= tell
        return tell

    def tell(self) -> None:
        """Say that it has ended. Without the lock."""
        self.on_quiet(self.errors[0] if self.errors else None)


@dataclass(slots=True)
class _Task:
    group: TaskGroup
    job: Job
    event: torch.cuda.Event | None


class WriterThreads:
    """Runs tasks in no promised order; those aside only while no other waits.

    On CUDA the thread's own stream is current, and waits for the event of the task.

    Args:
        num_threads: how many.
        device: every thread makes it its own.
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
        # A token for each task, but for those that come while a thread looks; so idle threads wait without touching the
        # interpreter's lock. A token without a task does no harm.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._num_expected = 0  # groups
        self._has_looker = False
        self._is_looking = False  # it waits now
        self._look = threading.Event()
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        # Callers at `_changed`. They are woken only for what they wait for: a wake takes the interpreter from a writer.
        self._num_for_end = 0
        self._num_for_room = 0
        self._num_alive = 0
        self._num_started = 0
        self._dead = WriterDied("no writer thread is left")  # what ended the last one
        self._threads: list[threading.Thread] = []
        self.start()

    @property
    def num_waiting(self) -> int:
        """Tasks that wait, but for those aside."""
        return len(self._tasks)

    def start(self) -> None:
        """Have all threads there should be."""
        with self._changed:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while self._num_alive < self._num_threads and not self._is_closed:
                self._num_alive += 1
                self._num_started += 1
                name = f"kv-writer-{self._num_started}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def expect(self, group: TaskGroup) -> None:
        """Tasks of a group may come at any moment, until `finish`."""
        with self._changed:
            group.is_expected = True
            self._num_expected += 1
        self._tokens.put(None)  # a thread begins to look

    def record(self) -> torch.cuda.Event | None:
        """An event at the current place of the current stream; None on a CPU, where everything before has happened."""
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
        """Queue a task; waits for room, counted, if `queue_len` of them wait. False: the group takes no more."""
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
        """Begin no task of a group any more."""
        with self._changed:
            group.is_cancelled = True
            self._throw_away(group)
            self._changed.notify_all()

    def finish(self, group: TaskGroup, limit_s: float) -> None:
        """Take nothing more for a group, and wait until no task of it is left: then, or when one is at last, tell."""
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
                self._throw_away(group)  # with that it is quiet, if there is no thread
            tell = group.take_telling()
        if tell:
            group.tell()

    def leave_alone(self, group: TaskGroup) -> None:
        """Take nothing more for a group, which tells when no task of it is left."""
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
        """Throw away what waits, and end the threads."""
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
        """They came without a token."""
        for _ in range(num_tasks):
            self._tokens.put(None)

    def _throw_away(self, group: TaskGroup) -> None:
        """Drop what waits. Threads take tasks without the lock, so one at a time."""
        for tasks in (self._tasks, self._aside):
            for _ in range(len(tasks)):
                with contextlib.suppress(IndexError):
                    task = tasks.popleft()
                    if task.group is group:
                        group.num_done += 1
                    else:
                        tasks.append(task)

    def _fail_aside(self, error: BaseException) -> list[TaskGroup]:
        """Drop all that waits aside; the groups to tell."""
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
        # The boundary of the thread: its task must count as done, or a step would wait for it for ever.
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
                continue  # the token of a task that was thrown away
            hand.append(task)
            group = task.group
            error = None if group.is_cancelled else self._execute(task, stream)
            # Before the task counts as done, nothing of it may be referenced any more: no event, no frame of a failed
            # push with tensors in its locals.
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
        """Until there may be a task, or the end."""
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
                while not self._tokens.empty():  # there is no task that a thread would be woken for
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
    """Clear the locals of every frame that the error, or what led to it, passed through."""
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
    """`count` positions from `first` of one attempt: what one step computes for it in every layer."""

    attempt: AttemptKey
    first: int
    count: int


PushFn = Callable[[PushRange, int], None]
OnParts = Callable[[Sequence[PushRange]], None]
OnPartsEnd = Callable[[Sequence[PushRange], BaseException | None], None]


class WriterStateError(RuntimeError):
    """A call that the writer's state does not allow: a bug in the caller."""


class WriterStep:
    """One step; `AsyncWriter.open` makes it. Its caller alone calls it, but for `cancel`."""

    def __init__(self, writer: "AsyncWriter", parts: tuple[PushRange, ...], group: TaskGroup) -> None:
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
    def step(self, parts: Sequence[PushRange]) -> Iterator[WriterStep]:
        """`open`, then `wait`, or `cancel` if the block raises."""
        step = self.open(parts)
        try:
            yield step
        except BaseException:
            step.cancel()
            raise
        step.wait()

    def open(self, parts: Sequence[PushRange]) -> WriterStep:
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

    def _submit(self, group: TaskGroup, parts: Sequence[PushRange], layer: int) -> None:
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
