"""The threads of an async writer, and the groups of tasks they run.

Owns threads, queues and the count of what is left of a group. A group has one end: it is told once, when nothing more
is submitted and no task of it is left, whatever happened to tasks and threads. Refuses to know what a step is.
"""

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# While tasks may come at any moment, one idle thread looks for them so often, and whoever puts one wakes nobody: a wake
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
    is_left_alone: bool = False  # nobody waits for it: the last task tells
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
        self._tokens.put(None)  # somebody begins to look

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
        """Queue a whole group, however long the queue is; nobody will wait for it."""
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
                while not self._tokens.empty():  # there is no task that anybody would be woken for
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
