"""What an attempt has to do with a worker while it depends on it: the one thing a leg enters and leaves.

It joins who is alive, who is being emptied and who is where.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.errors import WorkerLost
from baton.core.request import AttemptKey, GenerationRequest
from baton.router.canary import CanaryWatch
from baton.router.continuation import Cause
from baton.router.drains import Drains
from baton.router.local_prefill import LocalPrefill
from baton.router.members import Life, Members
from baton.router.presence import Leaving, Presence

OnLost = Callable[[WorkerLost], None]


@dataclass(frozen=True, slots=True)
class Attendance:
    """Of all requests.

    Attributes:
        members: who is alive.
        drains: who is being emptied.
        presence: who is where.
        local: whether decode workers can do without a prefill worker.
        canary: who can be trusted to serve.
    """

    members: Members
    drains: Drains
    presence: Presence
    local: LocalPrefill = field(default_factory=LocalPrefill)
    canary: CanaryWatch = field(default_factory=CanaryWatch)


class Guest(Protocol):
    """What a leg enters a worker as."""

    def enter(self, life: Life, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """See `Visitor`."""
        ...


class Inspector:
    """A request of the router's own: it is told when a life is lost, and stands in nobody's list.

    Args:
        members: who is alive.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def enter(self, life: Life, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """See `Visitor`."""
        unwatch = self._members.watch(life, lambda: on_lost(_lost(self._members, life, role)))
        return lambda how: unwatch()


class Visitor:
    """One client's request, on its way through attempts.

    Args:
        attendance: where it is entered.
        request: the client's.
        may_move: whether a worker that is being emptied can be left now, for another.
    """

    def __init__(self, attendance: Attendance, request: GenerationRequest, may_move: Callable[[], bool]) -> None:
        self._attendance = attendance
        self._request = request
        self._may_move = may_move

    def enter(self, life: Life, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """An attempt depends on a worker from now on.

        Args:
            life: the worker's.
            role: its part in the attempt.
            key: of the attempt.
            on_lost: called when the attempt must leave, with the reason; at once if the life is lost already.

        Returns:
            what ends that.
        """
        members, drains, presence = self._attendance.members, self._attendance.drains, self._attendance.presence
        worker_id, where = life.worker_id, f"{role} worker {life.worker_id}"

        def lost() -> None:
            on_lost(_lost(members, life, role))

        def due() -> None:
            if self._may_move():
                message, cause = f"{where} is being emptied", Cause.DRAIN.value
                on_lost(WorkerLost(message, worker_id=worker_id, role=role, cause=cause))

        presence.enter(life, key, self._request)
        unwatch_drain = drains.watch(life, due)
        unwatch = members.watch(life, lost)

        def leave(how: Leaving) -> None:
            unwatch()
            unwatch_drain()
            presence.leave(life, key, how)

        return leave


def _lost(members: Members, life: Life, role: str) -> WorkerLost:
    message, cause = f"{role} worker {life.worker_id} was lost", members.why_lost(life)
    return WorkerLost(message, worker_id=life.worker_id, role=role, cause=cause)
