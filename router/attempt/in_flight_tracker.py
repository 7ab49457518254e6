"""What an attempt has to do with a worker while it depends on it: the one thing a leg enters and leaves.

It joins who is alive, who is being emptied and who is where.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.errors import WorkerLost
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.router.attempt.continuation import Cause
from baton.router.attempt.in_flight_requests import InFlightRequests, Leaving
from baton.router.placement.canary import CanaryWatch
from baton.router.placement.drains import Drains
from baton.router.placement.local_prefill import LocalPrefill
from baton.router.placement.members import Incarnation, Members

OnLost = Callable[[WorkerLost], None]


@dataclass(frozen=True, slots=True)
class InFlightTracker:
    """Of all requests.

    Attributes:
        members: who is alive.
        drains: who is being emptied.
        in_flight_requests: who is where.
        local: whether decode workers can do without a prefill worker.
        canary: who can be trusted to serve.
    """

    members: Members
    drains: Drains
    in_flight_requests: InFlightRequests
    local: LocalPrefill = field(default_factory=LocalPrefill)
    canary: CanaryWatch = field(default_factory=CanaryWatch)


class Guest(Protocol):
    """What a leg enters a worker as."""

    def enter(self, incarnation: Incarnation, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """See `Visitor`."""
        ...


class Inspector:
    """A request of the router's own: it is told when an incarnation is lost, and stands in nobody's list.

    Args:
        members: who is alive.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def enter(self, incarnation: Incarnation, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """See `Visitor`."""
        unwatch = self._members.watch(incarnation, lambda: on_lost(_lost(self._members, incarnation, role)))
        return lambda how: unwatch()


class Visitor:
    """One client's request, on its way through attempts.

    Args:
        in_flight_tracker: where it is entered.
        request: the client's.
        may_move: whether a worker that is being emptied can be left now, for another.
    """

    def __init__(
        self, in_flight_tracker: InFlightTracker, request: GenerationRequest, may_move: Callable[[], bool]
    ) -> None:
        self._in_flight_tracker = in_flight_tracker
        self._request = request
        self._may_move = may_move

    def enter(self, incarnation: Incarnation, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """An attempt depends on a worker from now on.

        Args:
            incarnation: the worker's.
            role: its part in the attempt.
            key: of the attempt.
            on_lost: called when the attempt must leave, with the reason; at once if the incarnation is lost already.

        Returns:
            what ends that.
        """
        members, drains, in_flight_requests = (
            self._in_flight_tracker.members,
            self._in_flight_tracker.drains,
            self._in_flight_tracker.in_flight_requests,
        )
        worker_id, where = incarnation.worker_id, f"{role} worker {incarnation.worker_id}"

        def lost() -> None:
            on_lost(_lost(members, incarnation, role))

        def due() -> None:
            if self._may_move():
                message, cause = f"{where} is being emptied", Cause.DRAIN.value
                on_lost(WorkerLost(message, worker_id=worker_id, role=role, cause=cause))

        in_flight_requests.enter(incarnation, key, self._request)
        unwatch_drain = drains.watch(incarnation, due)
        unwatch = members.watch(incarnation, lost)

        def leave(how: Leaving) -> None:
            unwatch()
            unwatch_drain()
            in_flight_requests.leave(incarnation, key, how)

        return leave


def _lost(members: Members, incarnation: Incarnation, role: str) -> WorkerLost:
    message, cause = f"{role} worker {incarnation.worker_id} was lost", members.why_lost(incarnation)
    return WorkerLost(message, worker_id=incarnation.worker_id, role=role, cause=cause)
