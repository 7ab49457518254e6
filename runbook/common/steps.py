"""A runbook as a list of steps, and the execution of that list.

Checks look and change nothing. Actions change something, and define how that is undone. Verifications check the result.
The first step that fails ends the run: changes are undone, the last one first. A dry run executes the checks and lists
the rest.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.cluster.outcome import ExitCode, exit_code_of, next_step
from baton.core.clock import Clock
from baton.core.errors import BatonError, OperationError, PreconditionUnmet, StepFailed

Doing = Callable[[], str]  # returns a sentence for the report
Kind = Literal["check", "action", "verification", "undo"]
State = Literal["ok", "failed", "planned", "not needed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A condition that must hold before anything is changed or, later, before something that cannot be undone.

    Attributes:
        name: condition that must hold.
        look: returns what it found; raises PreconditionUnmet.
        next: what the operator should do if it does not hold.
    """

    name: str
    look: Doing
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A change.

    Attributes:
        name: what is done, in the imperative.
        do: makes the change, and returns what it did.
        undo: restores the previous state; None if that is impossible, and then nothing before it is undone either.
        is_done: returns whether the change exists already, so that it is neither made nor undone.
        next: what the operator should do if it fails.
    """

    name: str
    do: Doing
    undo: Doing | None = None
    is_done: Callable[[], bool] = lambda: False
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A condition that must hold in the end.

    Attributes:
        name: condition that must hold.
        look: returns what it found; raises StepFailed.
        next: what the operator should do if it does not hold.
    """

    name: str
    look: Doing
    next: str = ""


Step = Check | Action | Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One line of a report."""

    kind: Kind
    name: str
    state: State
    detail: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class RunbookReport:
    """Result of a run.

    Attributes:
        taken: steps in order, followed by those that were undone.
        found: facts for readers of the JSON.
        error: error that ended the run early.
        next: what the operator should do now; empty if nothing.
        is_changed: whether something was changed and not undone.
    """

    taken: list[Taken] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    exit_code: ExitCode = ExitCode.OK
    error: BatonError | None = None
    next: str = ""
    is_changed: bool = False


class Run:
    """One run of a list of steps.

    Args:
        clock: clock that times the steps.
        dry: execute only the checks.
        found: facts, which the steps add to.
        on_taken: called for each step when it is over.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        dry: bool,
        found: dict[str, Any] | None = None,
        on_taken: Callable[[Taken], None] = lambda taken: None,
    ) -> None:
        self.report = RunbookReport(found={} if found is None else found)
        self._clock = clock
        self._dry = dry
        self._on_taken = on_taken
        self._undos: list[Action] = []
        self._stays = False  # whether something was done that cannot be undone

    def carry_out(self, steps: Sequence[Step]) -> RunbookReport:
        """Execute the steps until one fails, and then undo the changes.

        An error with the field `partial` says that the changes helped and more must be done: then nothing is undone.
        """
        for step in steps:
            unreported = []
            try:
                error = self._take(step)
            except KeyboardInterrupt:
                error = OperationError("interrupted", interrupted=True)
                unreported = [Taken(kind=_kind(step), name=step.name, state="failed", detail=error.message)]
            except BaseException:  # a bug; it must not leave a deployment half changed
                self._undo_all()
                raise
            if error is not None:
                self._fail(step, error, unreported)
                break
        return self.report

    def _take(self, step: Step) -> BatonError | None:
        kind = _kind(step)
        if self._dry and not isinstance(step, Check):
            self._note(Taken(kind=kind, name=step.name, state="planned"))
            return None
        start_s = self._clock.now_s()
        try:
            if isinstance(step, Action):
                if step.is_done():
                    self._note(Taken(kind=kind, name=step.name, state="not needed", detail="it is so already"))
                    return None
                self._begin(step)
                detail = step.do()
            else:
                detail = step.look()
        except BatonError as error:
            self._note(self._taken(kind, step.name, "failed", error.message, start_s))
            return error
        self._note(self._taken(kind, step.name, "ok", detail, start_s))
        return None

    def _begin(self, action: Action) -> None:
        """Record that the change may have been made from here on, even if the action fails."""
        if action.undo is None:
            self._undos.clear()
            self._stays = True
        else:
            self._undos.append(action)
        self.report.is_changed = True

    def _fail(self, step: Step, error: BatonError, unreported: Sequence[Taken]) -> None:
        report = self.report
        report.error, report.exit_code = error, exit_code_of(error)
        report.next = step.next or next_step(error)
        if isinstance(error, OperationError) and report.exit_code is not ExitCode.TIMEOUT:
            report.exit_code = ExitCode.PRECONDITION if isinstance(step, Check) else ExitCode.FAILED
        if error.fields.get("partial"):
            report.exit_code = ExitCode.PARTIAL
            return
        was_changed = report.is_changed
        is_undone = self._undo_all(unreported)
        report.is_changed = self._stays or not is_undone
        if error.fields.get("interrupted"):  # the step's own advice is not meant for interrupts
            what = "see above for what stays changed; " if report.is_changed else "it was put back; " * was_changed
            report.next = f"{what}run it again"
        if not is_undone or (self._stays and report.exit_code is not ExitCode.TIMEOUT):
            report.exit_code = ExitCode.PARTIAL

    def _undo_all(self, unreported: Sequence[Taken] = ()) -> bool:
        """Undo the last change first, trying all even if one raises; report when all are done."""
        undos, self._undos = self._undos, []
        undone: list[Taken] = []

        def report() -> None:
            for taken in (*unreported, *undone):
                self._note(taken)

        with ExitStack() as stack:  # it also runs the last callback first
            stack.callback(report)
            for action in undos:
                stack.callback(self._undo, action, undone)
        return all(taken.state == "ok" for taken in undone)

    def _undo(self, action: Action, undone: list[Taken]) -> None:
        assert action.undo is not None
        start_s = self._clock.now_s()
        try:
            detail = _twice_if_interrupted(action.undo)
        except BatonError as error:
            undone.append(self._taken("undo", action.name, "failed", error.message, start_s))
        else:
            undone.append(self._taken("undo", action.name, "ok", detail, start_s))

    def _taken(self, kind: Kind, name: str, state: State, detail: str, start_s: float) -> Taken:
        return Taken(kind=kind, name=name, state=state, detail=detail, seconds=self._clock.now_s() - start_s)

    def _note(self, taken: Taken) -> None:
        self.report.taken.append(taken)
        self._on_taken(taken)


def _twice_if_interrupted(undo: Doing) -> str:
    """Undo, and repeat once if interrupted, because undos are idempotent. A second Ctrl-C skips it.

    Raises:
        OperationError: interrupted again.
    """
    try:
        return undo()
    except KeyboardInterrupt:
        try:
            return undo()
        except KeyboardInterrupt:
            raise OperationError("interrupted") from None


def _kind(step: Step) -> Kind:
    match step:
        case Check():
            return "check"
        case Action():
            return "action"
        case Verification():
            return "verification"


def require(holds: bool, message: str, **fields: Any) -> None:
    """Check a precondition.

    Raises:
        PreconditionUnmet: it does not hold.
    """
    if not holds:
        raise PreconditionUnmet(message, **fields)


def timed_out(message: str, **fields: Any) -> OperationError:
    """Make the error for a timeout; its exit code is 124."""
    return OperationError(message, timed_out=True, **fields)


def partial(message: str, **fields: Any) -> StepFailed:
    """Make the error for a partial success; its exit code is 4, and nothing is undone."""
    return StepFailed(message, partial=True, **fields)
