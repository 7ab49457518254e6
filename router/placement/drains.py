"""Workers that an operator empties: they get nothing new, and after a grace their streams move on.

A drain belongs to one incarnation of a worker: the process that replaces it serves. The clock is given; `tick` is
called several times a second.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest
from baton.router.placement.members import Incarnation, Members


@dataclass(frozen=True, slots=True)
class Drain:
    """One worker's."""

    incarnation: Incarnation
    due_s: float  # when its streams move on


class Drains:
    """The drains under way."""

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        self._drains: dict[str, Drain] = {}
        self._watches: dict[Incarnation, dict[object, Callable[[], None]]] = {}

    def begin(self, worker_id: str, grace_s: float) -> Drain:
        """Empty a worker from now on; again with another grace, that counts from now.

        Raises:
            InvalidRequest: no such worker lives.
        """
        drain = Drain(self._live(worker_id), self._clock.now_s() + grace_s)
        self._drains[worker_id] = drain
        return drain

    def resume(self, incarnation: Incarnation, grace_s: float) -> bool:
        """Go on with what another router began; False if that incarnation is not known to live (yet)."""
        alive = any(member.incarnation == incarnation and member.alive for member in self._members.all())
        if alive:
            self._drains[incarnation.worker_id] = Drain(incarnation, self._clock.now_s() + grace_s)
        return alive

    def end(self, worker_id: str) -> bool:
        """It serves again; False if it was not being emptied.

        Raises:
            InvalidRequest: no such worker lives.
        """
        self._live(worker_id)
        return self._drains.pop(worker_id, None) is not None

    def incarnations(self) -> Set[Incarnation]:
        """Who gets nothing new."""
        return {drain.incarnation for drain in self._drains.values()}

    def ended(self, wanted: Mapping[str, int]) -> Set[Incarnation]:
        """Who was emptied and is gone, while as many others of its role live as are wanted, by role."""
        incarnations = self.incarnations()
        return {
            member.incarnation
            for member in (self._members.all() if incarnations else ())
            if not member.alive
            and member.incarnation in incarnations
            and member.state.role in wanted
            and len(self._members.live(member.state.role)) >= wanted[member.state.role]
        }

    def watch(self, incarnation: Incarnation, on_due: Callable[[], None]) -> Callable[[], None]:
        """Have `on_due` called at every tick while this incarnation's streams should move; returns what ends that."""
        key = object()
        self._watches.setdefault(incarnation, {})[key] = on_due

        def unwatch() -> None:
            watches = self._watches.get(incarnation, {})
            watches.pop(key, None)
            if not watches:
                self._watches.pop(incarnation, None)

        return unwatch

    def tick(self) -> None:
        """Move on who should, and forget drains of incarnations that are over."""
        now_s = self._clock.now_s()
        known = {member.incarnation for member in self._members.all()} if self._drains else set()
        for worker_id, drain in list(self._drains.items()):
            if drain.incarnation not in known:
                del self._drains[worker_id]
            elif drain.due_s <= now_s:
                for on_due in tuple(self._watches.get(drain.incarnation, {}).values()):
                    on_due()

    def _live(self, worker_id: str) -> Incarnation:
        for member in self._members.all():
            if member.state.worker_id == worker_id and member.alive:
                return member.incarnation
        raise InvalidRequest(f"no worker {worker_id[:200]!r} is alive", field="worker_id", worker_id=worker_id[:200])
