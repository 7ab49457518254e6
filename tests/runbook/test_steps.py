"""How a list of steps is carried out: order, dry runs, undoing, exit codes. No deployment."""

import json
import os
import signal
import subprocess
import sys

import pytest

from baton.cluster.outcome import ExitCode
from baton.core.clock import MonotonicClock
from baton.core.errors import PreconditionUnmet, StepFailed
from baton.runbook.common.command import Runbook, main, report_data
from baton.runbook.common.steps import Action, Check, Run, Verification, partial, timed_out

pytestmark = pytest.mark.fast


class Log(list):
    """What was called, in order; a name in `failing` raises instead of answering."""

    def __init__(self, **failing):
        self.failing = failing

    def does(self, name):
        def do():
            self.append(name)
            if name in self.failing:
                raise self.failing[name]
            return f"did {name}"

        return do

    def steps(self, *, final=False):
        return [
            Check(name="c", look=self.does("c"), next="mend c"),
            Action(name="a", do=self.does("a"), undo=self.does("undo a")),
            Action(name="b", do=self.does("b"), undo=None if final else self.does("undo b")),
            Verification(name="v", look=self.does("v"), next="mend v"),
        ]


def carry_out(log, *, dry=False, **options):
    return Run(MonotonicClock(), dry=dry).carry_out(log.steps(**options))


def test_all_steps_are_taken_in_order():
    log = Log()
    report = carry_out(log)
    assert log == ["c", "a", "b", "v"]
    assert report.exit_code is ExitCode.OK
    assert report.is_changed
    assert [taken.state for taken in report.taken] == ["ok"] * 4


def test_a_dry_run_checks_and_names_the_rest():
    log = Log()
    report = carry_out(log, dry=True)
    assert log == ["c"]
    assert not report.is_changed
    assert [taken.state for taken in report.taken] == ["ok", "planned", "planned", "planned"]


@pytest.mark.parametrize("kind", [PreconditionUnmet, StepFailed])
@pytest.mark.parametrize("dry", [False, True])
def test_an_unmet_precondition_changes_nothing(dry, kind):
    log = Log(c=kind("no"))
    report = carry_out(log, dry=dry)
    assert log == ["c"]
    assert report.exit_code is ExitCode.PRECONDITION
    assert not report.is_changed
    assert report.next == "mend c"


@pytest.mark.parametrize(
    ("failing", "called"),
    [
        ({"v": StepFailed("no")}, ["c", "a", "b", "v", "undo b", "undo a"]),
        ({"b": StepFailed("no")}, ["c", "a", "b", "undo b", "undo a"]),  # it may have been done for half
        ({"a": PreconditionUnmet("no")}, ["c", "a", "undo a"]),
        ({"v": PreconditionUnmet("no")}, ["c", "a", "b", "v", "undo b", "undo a"]),
        ({"v": KeyboardInterrupt()}, ["c", "a", "b", "v", "undo b", "undo a"]),
    ],
)
def test_what_was_done_is_undone_the_last_thing_first(failing, called):
    log = Log(**failing)
    report = carry_out(log)
    assert log == called
    assert report.exit_code is ExitCode.FAILED
    assert not report.is_changed
    assert report.next


@pytest.mark.parametrize(
    ("failing", "advice"),
    [
        ({"v": KeyboardInterrupt()}, "it was put back; run it again"),
        ({"c": KeyboardInterrupt()}, "run it again"),
        (
            {"v": KeyboardInterrupt(), "undo b": StepFailed("neither")},
            "see above for what stays changed; run it again",
        ),
    ],
)
def test_who_interrupts_is_not_told_what_helps_a_step_that_failed(failing, advice):
    report = carry_out(Log(**failing))
    assert report.next == advice
    (interrupted, *_) = [taken for taken in report.taken if taken.state == "failed"]
    assert (interrupted.name, interrupted.detail) == (next(iter(failing)), "interrupted")


def test_running_out_of_time_is_undone_too_and_has_its_code():
    log = Log(v=timed_out("late"))
    report = carry_out(log)
    assert report.exit_code is ExitCode.TIMEOUT
    assert log[-2:] == ["undo b", "undo a"]
    assert not report.is_changed


def test_an_undo_that_fails_is_partial_and_the_others_are_tried():
    failing = {"v": StepFailed("no"), "undo b": StepFailed("neither")}
    log = Log(**failing)
    report = carry_out(log)
    assert log[-2:] == ["undo b", "undo a"]
    assert report.exit_code is ExitCode.PARTIAL
    assert report.is_changed


def test_behind_what_cannot_be_undone_nothing_is():
    log = Log(v=StepFailed("no"))
    report = carry_out(log, final=True)
    assert log == ["c", "a", "b", "v"]
    assert report.exit_code is ExitCode.PARTIAL
    assert report.is_changed
    assert carry_out(Log(v=timed_out("late")), final=True).exit_code is ExitCode.TIMEOUT


def test_before_what_cannot_be_undone_everything_is():
    log = Log(a=StepFailed("no"))
    assert carry_out(log, final=True).exit_code is ExitCode.FAILED
    assert log == ["c", "a", "undo a"]


def test_what_helped_for_a_part_stays():
    log = Log(v=partial("more to do"))
    report = carry_out(log)
    assert log == ["c", "a", "b", "v"]
    assert report.exit_code is ExitCode.PARTIAL
    assert report.is_changed


def test_what_is_so_already_is_neither_done_nor_undone():
    log = Log(v=StepFailed("no"))
    steps = log.steps()
    steps[1] = Action(name="a", do=log.does("a"), undo=log.does("undo a"), is_done=lambda: True)
    report = Run(MonotonicClock(), dry=False).carry_out(steps)
    assert log == ["c", "b", "v", "undo b"]
    assert report.taken[1].state == "not needed"


def test_a_bug_is_not_hidden_and_what_was_done_is_undone():
    log = Log(v=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        carry_out(log)
    assert log[-2:] == ["undo b", "undo a"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--bogus"], 2),
        (["--timeout", "0"], 2),
        (["--timeout", "nan"], 2),
        (["--add"], 2),  # flags are not abbreviated
        ([], 3),
    ],
)
def test_a_command_ends_with_one_object_and_its_code(capsys, arguments, code):
    log = Log(c=PreconditionUnmet("no", what=1))
    book = Runbook(name="x", about="X.", steps=lambda site, options: log.steps())
    assert main(book, ["--json", *arguments]) == code
    data = json.loads(capsys.readouterr().out)
    assert data["exit_code"] == code
    assert data["next"]


def test_a_command_tells_a_person_each_step(capsys):
    log = Log(v=StepFailed("no"))
    assert main(Runbook(name="x", about="X.", steps=lambda site, options: log.steps()), []) == 1
    shown = capsys.readouterr()
    assert [line.split()[:2] for line in shown.out.splitlines()[:4]] == [
        ["ok", "check"],
        ["ok", "action"],
        ["ok", "action"],
        ["FAILED", "verification"],
    ]
    assert "exit code 1; nothing stays changed" in shown.out
    assert "next: mend v" in shown.err


def test_a_report_is_json():
    log = Log(v=partial("more", left=["x"]))
    data = json.loads(json.dumps(report_data(carry_out(log))))
    assert data["fields"] == {"partial": True, "left": ["x"]}
    assert [step["kind"] for step in data["steps"]] == ["check", "action", "action", "verification"]


def test_what_cannot_be_reported_is_undone_nevertheless():
    log = Log(v=StepFailed("no"))

    def show(taken):
        if taken.kind == "undo":
            raise OSError("nobody reads")

    with pytest.raises(OSError, match="nobody reads"):
        Run(MonotonicClock(), dry=False, on_taken=show).carry_out(log.steps())
    assert log[-2:] == ["undo b", "undo a"]


def test_a_bug_in_one_undo_leaves_out_no_other():
    log = Log(**{"v": StepFailed("no"), "undo b": ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        carry_out(log)
    assert log[-2:] == ["undo b", "undo a"]


PROGRAM = """
import sys, threading
from baton.core.errors import StepFailed
from baton.runbook.common.command import Runbook, main
from baton.runbook.common.steps import Action, Verification, timed_out

class Mark:
    def __init__(self, name): self.path = f"{sys.argv[1]}/{name}"
    def __call__(self):
        with open(self.path, "a") as file: file.write("x")
        return "did it"

def fail():
    raise StepFailed("no")

def wait():
    print("waits", file=sys.stderr, flush=True)
    if not threading.Event().wait(60): raise timed_out("late")

steps = [Action(name=name, do=Mark(name), undo=Mark(f"undo-{name}")) for name in ("a", "b")]
steps.append(Verification(name="v", look={"fail": fail, "wait": wait}[sys.argv[2]]))
sys.exit(main(Runbook(name="x", about="X.", steps=lambda site, options: steps, sends_canaries=False), sys.argv[3:]))
"""
UNDONE = ["a", "b", "undo-a", "undo-b"]


def program(*arguments):
    return [sys.executable, "-P", "-c", PROGRAM, *map(str, arguments)]


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "wb")


@pytest.mark.long
@pytest.mark.parametrize("arguments", [[], ["--json"]])
@pytest.mark.parametrize("output", [closed_pipe, lambda: open("/dev/full", "wb")])
def test_whose_output_no_one_takes_is_undone_with_its_own_exit_code(tmp_path, output, arguments):
    with output() as stdout:
        command = program(tmp_path, "fail", *arguments)
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == UNDONE
    assert done.returncode == 1
    assert done.stderr == "baton: StepFailed: no\nnext: see `baton status`, then try again\n"


@pytest.mark.long
def test_without_any_output_it_is_undone_with_its_own_exit_code(tmp_path):
    with closed_pipe() as gone:
        done = subprocess.run(program(tmp_path, "fail"), stdout=gone, stderr=gone, timeout=60)
    assert done.returncode == 1
    done = subprocess.run([*"sh -c".split(), 'exec "$@" >&- 2>&-', "sh", *program(tmp_path, "fail")], timeout=60)
    assert done.returncode == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(UNDONE, "xx")


class Waiting:
    """A runbook in its last step, which waits for the end."""

    def __init__(self, folder):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(program(folder, "wait", "--json"), text=True, **pipes)
        assert self.process.stderr.readline() == "waits\n"

    def end(self, number):
        """Exit code and report after this signal."""
        self.process.send_signal(number)
        try:
            out, _ = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, json.loads(out)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_ends_it_has_it_undone(tmp_path, number):
    code, data = Waiting(tmp_path).end(number)
    assert (code, data["message"], data["changed"]) == (1, "interrupted", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == UNDONE


def test_under_nohup_it_goes_on_when_its_terminal_closes():
    steps = [Verification(name="v", look=lambda: os.kill(os.getpid(), signal.SIGHUP))]
    book = Runbook(name="x", about="X.", steps=lambda site, options: steps, sends_canaries=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(book, []) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_does_not_end_the_undoing():
    log = Log()
    steps = log.steps()
    steps[-1] = Verification(name="v", look=lambda: os.kill(os.getpid(), signal.SIGTERM))
    undo = log.does("undo b")
    steps[2] = Action(name="b", do=log.does("b"), undo=lambda: os.kill(os.getpid(), signal.SIGHUP) or undo())
    book = Runbook(name="x", about="X.", steps=lambda site, options: steps, sends_canaries=False)
    assert main(book, []) == 1
    assert log == ["c", "a", "b", "undo b", "undo a"], "each once"


def test_an_undo_that_is_interrupted_is_done_again_once():
    log = Log(v=StepFailed("no"))
    undo = interrupted_in(log, "undo b", num_times=1)
    steps = log.steps()
    steps[2] = Action(name="b", do=log.does("b"), undo=undo)
    report = Run(MonotonicClock(), dry=False).carry_out(steps)
    assert (log[-3:], report.exit_code) == (["undo b", "undo b", "undo a"], ExitCode.FAILED)
    steps[2] = Action(name="b", do=log.does("b"), undo=interrupted_in(log, "undo b", num_times=2))
    report = Run(MonotonicClock(), dry=False).carry_out(steps)
    assert (log[-3:], report.exit_code) == (["undo b", "undo b", "undo a"], ExitCode.PARTIAL)
    assert report.is_changed


def interrupted_in(log, name, *, num_times):
    left = [KeyboardInterrupt()] * num_times

    def undo():
        log.append(name)
        if left:
            raise left.pop()
        return "did it"

    return undo
