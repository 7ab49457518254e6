"""A child process that does one task after the other for a supervisor that survives whatever the child does.

A kernel with an invalid access makes its process's device unusable, and one that hangs never returns. So kernels run in
a child, which is killed at a task's time limit, and replaced. This module does not know what a task is.

A child's stdout is redirected to stderr; results go through a pipe.
"""

import contextlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Step = Callable[[str], None]
Work = Callable[[Any, Step], Any]  # a module-level function, so that a child can import it by name

_END_S = 10.0
_START_LIMIT_S = 120.0  # time for a child's imports


class Broken(Exception):
    """Raised by a work function whose process is of no further use, with its result."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True, slots=True)
class Lost:
    """A task that ended with its process.

    Attributes:
        reason: "timeout" or "died".
        step: the last step that the task announced.
        exit_code: exit code of a process that died.
    """

    reason: str
    step: str
    exit_code: int | None = None


def _serve(pipe: Connection, work: Work) -> None:
    """Run the child until the supervisor is gone."""
    os.dup2(2, 1)
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                pipe.send(("done", work(task, lambda step: pipe.send(("step", step)))))
            except Broken as broken:
                pipe.send(("broken", broken.result))
                return


class Child:
    """One child process at a time, started when there is a task.

    Args:
        work: function that does a task.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._process: Any = None
        self._pipe: Connection | None = None
        self.num_started = 0

    def do(self, task: Any, limit_s: float) -> Any:
        """Return the result of a task, or how it was lost; the next task then gets a new process."""
        pipe = self._started()
        if isinstance(pipe, Lost):
            return pipe
        end_s, step = time.monotonic() + limit_s, ""
        try:
            pipe.send(task)
            while pipe.poll(max(0.0, end_s - time.monotonic())):
                kind, value = pipe.recv()
                if kind == "step":
                    step = value
                    continue
                if kind == "broken":
                    self.close()
                return value
        except (EOFError, OSError):
            return self._lost("died", step)
        return self._lost("timeout", step)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is None:
            return
        if self._pipe is not None:
            self._pipe.close()
        self._process.kill()
        self._process.join(_END_S)
        self._process = self._pipe = None

    def _started(self) -> "Connection | Lost":
        if self._pipe is not None:
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        self._process.start()
        theirs.close()
        self.num_started += 1
        try:
            if self._pipe.poll(_START_LIMIT_S):
                self._pipe.recv()
                return self._pipe
        except (EOFError, OSError):
            return self._lost("died", "start")
        return self._lost("timeout", "start")

    def _lost(self, reason: str, step: str) -> Lost:
        process = self._process
        if reason == "died":
            process.join(_END_S)
        exit_code = process.exitcode
        self.close()
        return Lost(reason, step, exit_code)


class Here:
    """Like a `Child`, but in this process and without a limit, to test the supervisor.

    Args:
        work: function that does a task.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def do(self, task: Any, limit_s: float) -> Any:
        """Return the result of a task."""
        try:
            return self._work(task, lambda step: None)
        except Broken as broken:
            return broken.result

    def close(self) -> None:
        """Do nothing."""


def do_all(
    work: Work, tasks: Sequence[Any], num_children: int, *, limit_s: float, end_s: float
) -> list[Any | Lost | None]:
    """Do all tasks with several children at a time; return the outcome of each.

    Args:
        work: function that does a task.
        tasks: any number of tasks.
        num_children: maximum number of children.
        limit_s: time limit of each task.
        end_s: deadline of `time.monotonic`; tasks that are not done by then are None.
    """
    outcomes: list[Any] = [None] * len(tasks)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tasks)):
        waiting.put(index)

    def supervise() -> None:
        child = Child(work)
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                index = waiting.get_nowait()
                outcome = child.do(tasks[index], min(limit_s, left_s))
                is_cut_off = isinstance(outcome, Lost) and outcome.reason == "timeout" and left_s < limit_s
                outcomes[index] = None if is_cut_off else outcome
        except queue.Empty:
            pass
        finally:
            child.close()

    threads = [threading.Thread(target=supervise, daemon=True) for _ in range(min(num_children, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
