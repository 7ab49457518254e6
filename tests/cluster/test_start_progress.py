"""How the start of a deployment is shown: as lines, as log entries, on a terminal; and how the router is asked."""

import io
import logging
import sys

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from baton.cluster.start_progress import (
    POLL_S,
    RETRY_S,
    BarProgress,
    LineProgress,
    StartProgress,
    StartWatch,
    show_progress,
)
from baton.core.errors import StartupError
from baton.core.start_phase import StartPhase
from baton.proto import worker_pb2

pytestmark = pytest.mark.fast


def report(worker_id, phase, num_done=0, num_total=0):
    return worker_pb2.StartingWorker(worker_id=worker_id, phase=phase, num_done=num_done, num_total=num_total)


def show_a_start(progress):
    progress(2, 4, "starting workers")
    for done in (3, 45, 99):
        progress.worker("decode-0", StartPhase("weights", done, 100))
        progress.worker("prefill-0", StartPhase("weights", done // 2, 100))
    progress.worker("decode-0", StartPhase("compiling kernels", 0, 136))
    progress.worker("prefill-0", None)
    progress(3, 4, "prefill-0 is ready")
    progress.worker("decode-0", StartPhase("warming up"))


LINES = [
    "[2/4] starting workers",
    "[2/4] decode-0: weights 3 %",
    "[2/4] prefill-0: weights 1 %",
    "[2/4] decode-0: compiling kernels (136)",
    "[3/4] prefill-0 is ready",
    "[3/4] decode-0: warming up",
]


def test_a_worker_gets_one_line_for_each_phase():
    lines = []
    show_a_start(LineProgress(lines.append))
    assert lines == LINES


def test_without_a_terminal_lines_are_printed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with show_progress() as progress:
        show_a_start(progress)
    assert sys.stderr.getvalue().splitlines() == LINES


def test_as_log_each_line_is_an_entry(caplog):
    caplog.set_level(logging.INFO)
    with show_progress(as_log=True) as progress:
        show_a_start(progress)
    assert caplog.messages == LINES


def test_a_terminal_shows_what_each_worker_does_now():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False)
    bars = BarProgress(progress)
    show_a_start(bars)
    shown = {task.description: (task.completed, task.total) for task in progress.tasks}
    assert shown == {"prefill-0 is ready": (3, 4), "decode-0: warming up": (0, None)}
    bars.worker("decode-0", StartPhase("CUDA graphs", 300, 901))
    assert (progress.tasks[-1].description, progress.tasks[-1].completed) == ("decode-0: CUDA graphs 300 of 901", 300)
    bars.worker("decode-0", None)
    bars.worker("decode-0", None)
    assert [task.description for task in progress.tasks] == ["prefill-0 is ready"]


def test_what_shows_nothing_takes_all():
    show_a_start(StartProgress())


class Polls:
    """A router, its clock, and what was shown."""

    def __init__(self):
        self.now_s, self.num_fetches, self.shown = 100.0, 0, []
        self.answer = []
        self.watch = StartWatch(["prefill-0", "decode-0"], self.fetch, self.show, lambda: self.now_s)

    def fetch(self):
        self.num_fetches += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def show(self, worker_id, phase):
        self.shown.append((worker_id, phase and str(phase)))

    def poll(self, answer, after_s=POLL_S):
        self.now_s += after_s
        self.answer = answer
        self.watch.poll()
        shown, self.shown = self.shown, []
        return shown


def test_only_changes_of_own_workers_are_shown():
    polls = Polls()
    assert polls.poll([]) == []
    weights = report("decode-0", "weights", 45, 100)
    foreign = report("decode-9", "weights", 45, 100)
    assert polls.poll([weights, foreign]) == [("decode-0", "weights 45 %")]
    assert polls.poll([weights, foreign]) == []
    both = [report("decode-0", "weights", 46, 100), report("prefill-0", "warming up")]
    assert polls.poll(both) == [("decode-0", "weights 46 %"), ("prefill-0", "warming up")]
    assert polls.poll([both[1]]) == [("decode-0", None)]


def test_the_router_is_asked_once_a_second_and_rarely_while_it_does_not_answer():
    polls = Polls()
    polls.poll([])
    polls.poll([], after_s=POLL_S / 2)
    assert polls.num_fetches == 1
    assert polls.poll(StartupError("it did not answer in time")) == []
    polls.poll([], after_s=RETRY_S / 2)
    assert polls.num_fetches == 2
    assert polls.poll([report("decode-0", "warming up")], after_s=RETRY_S) == [("decode-0", "warming up")]
