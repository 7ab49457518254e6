"""Drains: a draining worker gets no new requests, and after a grace period its streams migrate.

A drain belongs to one incarnation of a worker, so a replacement process serves. The clock is injected; `tick` must be
called several times a second.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest
from baton.router.placement.members import Incarnation, Member, Members


@dataclass(frozen=True, slots=True)
class Drain:
    """One worker's drain."""

    incarnation: Incarnation
    due_s: float  # when its streams start to migrate


class Drains:
    """The drains in progress."""

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        self._drains: dict[str, Drain] = {}
        self._watches: dict[Incarnation, dict[object, Callable[[], None]]] = {}

    def begin(self, worker_id: str, grace_s: float) -> Drain:
        """Drain a worker from now on; called again, the new grace period counts from now.

        Raises:
            InvalidRequest: no such worker is alive.
        """
        drain = Drain(self._live(worker_id), self._clock.now_s() + grace_s)
        self._drains[worker_id] = drain
        return drain

    def resume(self, incarnation: Incarnation, grace_s: float) -> bool:
        """Continue another router's drain; return False if that incarnation is not (yet) known to be alive."""
        alive = any(member.incarnation == incarnation and member.alive for member in self._members.all())
        if alive:
            self._drains[incarnation.worker_id] = Drain(incarnation, self._clock.now_s() + grace_s)
        return alive

    def end(self, worker_id: str) -> bool:
        """End a worker's drain; return False if there was none.

        Raises:
            InvalidRequest: no such worker is alive.
        """
        self._live(worker_id)
        return self._drains.pop(worker_id, None) is not None

    def incarnations(self) -> Set[Incarnation]:
        """Incarnations that get no new requests."""
        return {drain.incarnation for drain in self._drains.values()}

    def live(self, role: str) -> list[Member]:
        """Live workers of a role that take new requests, by name."""
        draining = self.incarnations()
        return [member for member in self._members.live(role) if member.incarnation not in draining]

    def ended(self, wanted: Mapping[str, int]) -> Set[Incarnation]:
        """Drained incarnations that are gone, in roles where at least as many others live as wanted."""
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
        """Have `on_due` called at every tick while this incarnation's streams should migrate.

        The returned function stops that.
        """
        key = object()
        self._watches.setdefault(incarnation, {})[key] = on_due

        def unwatch() -> None:
            watches = self._watches.get(incarnation, {})
            watches.pop(key, None)
            if not watches:
                self._watches.pop(incarnation, None)

        return unwatch

    def tick(self) -> None:
        """Notify the streams that should migrate, and forget drains of incarnations that are gone."""
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
