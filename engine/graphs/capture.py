"""Capturing together: every rank of a group has a graph, or none has.

Ranks of which one replayed a step and another launched it would choose different kernels for the same sum; and a rank
that gave up in the middle would leave the others waiting. So every graph is agreed on twice. Before anything is
computed for it, each rank says whether it may be captured there. Then all compute the pass once as it comes, which
connects what the group's operations need; then all capture, which waits for nobody; and each says how that went. One
rank's no is everybody's no, and the size is computed as it comes from then on, at all ranks.

Only the warm-up adds over ranks, so a rank that fails in it cannot vote: it raises, and so do the others, whom it has
left. A rank that dies, or speaks of another graph, has the rest raise as well. Nothing here can hang longer than the
group's own operations may.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from baton.core.errors import BatonError, WorkerLost, WorkerStartFailed
from baton.engine.graphs.backend import CaptureRefused
from baton.model.parallel import Communicator

VERSION = 1
_MAX_PROBLEM_LEN = 300


class Candidate(Protocol):
    """One graph that may be captured."""

    @property
    def name(self) -> str:
        """The same at every rank, and no other graph's."""
        ...

    def require(self) -> None:
        """Check that it may be captured at this rank.

        Raises:
            CaptureRefused: it may not.
        """
        ...

    def warm_up(self) -> None:
        """Compute it once; the only call that adds over ranks.

        Raises:
            RuntimeError: whatever torch raises.
        """
        ...

    def capture(self) -> None:
        """Capture it.

        Raises:
            RuntimeError: whatever torch raises.
        """
        ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Captured(Generic[C]):
    """What came of it, the same at every rank.

    Attributes:
        graphs: those that every rank has captured.
        failed: why not, by the name of each other.
    """

    graphs: list[C] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def capture_together(group: Communicator, candidates: Iterable[C]) -> Captured[C]:
    """Capture what every rank can, in this order, which is the same at all of them.

    Raises:
        WorkerStartFailed: this rank could not warm one up, and others wait for it.
        WorkerLost: another rank is gone, or captures other graphs.
    """
    captured: Captured[C] = Captured()
    for candidate in candidates:
        problem = agree(group, f"may {candidate.name}", _problem_of(candidate.require))
        if problem is None:
            problem = _warm_up(group, candidate)
        if problem is None:
            problem = agree(group, f"has {candidate.name}", _problem_of(candidate.capture))
        if problem is None:
            captured.graphs.append(candidate)
        else:
            captured.failed[candidate.name] = problem
    return captured


def agree(group: Communicator, subject: str, problem: str | None) -> str | None:
    """One rank's problem with the subject, the lowest rank's that has one; None if no rank has any.

    Raises:
        WorkerLost: a rank is gone, or speaks of another subject.
    """
    problem = None if problem is None else problem[:_MAX_PROBLEM_LEN]
    votes = group.gather_bytes(json.dumps([VERSION, subject, problem]).encode())
    found = None
    for rank, vote in enumerate(votes):
        version, other_subject, other_problem = _read(vote, rank, group.size)
        if (version, other_subject) != (VERSION, subject):
            message = f"rank {rank} of {group.size} is at {other_subject!r} where rank {group.rank} is at {subject!r}"
            raise WorkerLost(message, rank=rank, size=group.size, how="diverged")
        if found is None and other_problem is not None:
            found = other_problem if group.size == 1 else f"rank {rank}: {other_problem}"
    return found


def _read(vote: bytes, rank: int, size: int) -> tuple[int, str, str | None]:
    try:
        version, subject, problem = json.loads(vote)
    except (ValueError, TypeError) as error:
        raise WorkerLost(f"rank {rank} of {size} votes in no known form", rank=rank, size=size) from error
    return version, subject, problem


def _warm_up(group: Communicator, candidate: Candidate) -> str | None:
    problem = _problem_of(candidate.warm_up)
    if problem is None or group.size == 1:
        return problem
    message = f"rank {group.rank} of {group.size} could not compute {candidate.name}: {problem}"
    raise WorkerStartFailed(message, rank=group.rank, size=group.size)


def _problem_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except (CaptureRefused, RuntimeError) as error:  # all that torch raises; a programmer's error is nobody's vote
        assert not isinstance(error, BatonError)
        return f"{type(error).__name__}: {error}"
    return None
