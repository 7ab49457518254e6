"""How the start of a deployment is shown: its steps, and what each starting worker does, as the router reports it.

On a terminal each starting worker has a line with a bar. Elsewhere, and as log entries, a worker gets one line for each
of its phases, however often its numbers change.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from baton.core.errors import BatonError
from baton.core.start_phase import StartPhase
from baton.proto import worker_pb2

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

POLL_S: Final = 1.0
RETRY_S: Final = 10.0  # after a router that did not answer in time: the start must not wait for it again and again
FETCH_S: Final = 0.5

log = logging.getLogger(__name__)


class StartProgress:
    """Shows nothing; the other kinds do."""

    def __call__(self, num_done: int, num_total: int, text: str) -> None:
        """Show a step."""

    def worker(self, worker_id: str, phase: StartPhase | None) -> None:
        """Show what a worker does now; None: its start is over, or it is silent."""


class LineProgress(StartProgress):
    """Writes lines.

    Args:
        write: writes one.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._place = ""
        self._phases: dict[str, str] = {}  # the last one shown, by worker

    def __call__(self, num_done: int, num_total: int, text: str) -> None:
        """Write a line."""
        self._place = f"[{num_done}/{num_total}]"
        self._write(f"{self._place} {text}")

    def worker(self, worker_id: str, phase: StartPhase | None) -> None:
        """Write a line if this phase is another one."""
        if phase is not None and self._phases.get(worker_id) != phase.text:
            self._phases[worker_id] = phase.text
            self._write(f"{self._place} {worker_id}: {phase}")


class BarProgress(StartProgress):
    """Updates bars on a terminal: one of the steps, and one of each starting worker."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._steps = progress.add_task("starting", total=None)
        self._workers: dict[str, tuple[str, TaskID]] = {}  # phase and bar of each

    def __call__(self, num_done: int, num_total: int, text: str) -> None:
        """Update the bar of the steps; after the last step all bars disappear."""
        self._progress.update(self._steps, description=text, completed=num_done, total=num_total)
        if num_done >= num_total:  # later output needs the terminal
            self._progress.stop()

    def worker(self, worker_id: str, phase: StartPhase | None) -> None:
        """Update the worker's bar, begin that of its next phase, or remove it."""
        text, task = self._workers.get(worker_id, ("", None))
        if task is not None and (phase is None or phase.text != text):  # a bar with a total cannot lose it
            self._progress.remove_task(task)
            del self._workers[worker_id]
            task = None
        if phase is None:
            return
        if task is None:
            task = self._progress.add_task("", total=None)
            self._workers[worker_id] = phase.text, task
        total = phase.num_total if phase.num_done else None  # else it moves, as one that is not counted
        self._progress.update(task, description=f"{worker_id}: {phase}", completed=phase.num_done, total=total)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _log_line(line: str) -> None:
    log.info("%s", line)


@contextmanager
def show_progress(*, as_log: bool = False) -> Iterator[StartProgress]:
    """Yield what shows or logs the progress of starting.

    After the last step bars disappear, even while the body continues.
    """
    if as_log or not sys.stderr.isatty():
        yield LineProgress(_log_line if as_log else _print_line)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield BarProgress(progress)


class StartWatch:
    """Follows what starting workers do, by asking the router.

    Args:
        worker_ids: which workers are shown.
        fetch: asks the router; raises BatonError if it does not answer.
        show: called with a worker's id whenever its phase or the phase's numbers have changed.
        now_s: monotonic clock.
    """

    def __init__(
        self,
        worker_ids: Collection[str],
        fetch: Callable[[], Iterable[worker_pb2.StartingWorker]],
        show: Callable[[str, StartPhase | None], None],
        now_s: Callable[[], float],
    ) -> None:
        self._fetch = fetch
        self._show = show
        self._now_s = now_s
        self._phases: dict[str, StartPhase | None] = dict.fromkeys(sorted(worker_ids))
        self._due_s = 0.0

    def poll(self) -> None:
        """Ask the router if it is time, and show what has changed. A router that does not answer is no error here."""
        if self._now_s() < self._due_s:
            return
        try:
            found = {worker.worker_id: phase_of(worker) for worker in self._fetch()}
        except BatonError:
            self._due_s = self._now_s() + RETRY_S
            return
        self._due_s = self._now_s() + POLL_S
        for worker_id, before in self._phases.items():
            phase = found.get(worker_id)
            if phase != before:
                self._phases[worker_id] = phase
                self._show(worker_id, phase)


def phase_of(worker: worker_pb2.StartingWorker) -> StartPhase:
    """What a starting worker does."""
    return StartPhase(worker.phase, worker.num_done, worker.num_total)
