"""Workers that an operator empties: they get nothing new, and after a grace their streams move on.

A drain belongs to one life of a worker: the process that replaces it serves. The clock is given; `tick` is called
several times a second.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest
from baton.router.members import Life, Members


@dataclass(frozen=True, slots=True)
class Drain:
    """One worker's."""

    life: Life
    due_s: float  # when its streams move on


class Drains:
    """The drains under way."""

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        self._drains: dict[str, Drain] = {}
        self._watches: dict[Life, dict[object, Callable[[], None]]] = {}

    def begin(self, worker_id: str, grace_s: float) -> Drain:
        """Empty a worker from now on; again with another grace, that counts from now.

        Raises:
            InvalidRequest: no such worker lives.
        """
        drain = Drain(self._live(worker_id), self._clock.now_s() + grace_s)
        self._drains[worker_id] = drain
        return drain

    def resume(self, life: Life, grace_s: float) -> bool:
        """Go on with what another router began; False if that life is not known to live (yet)."""
        alive = any(member.life == life and member.alive for member in self._members.all())
        if alive:
            self._drains[life.worker_id] = Drain(life, self._clock.now_s() + grace_s)
        return alive

    def end(self, worker_id: str) -> bool:
        """It serves again; False if it was not being emptied.

        Raises:
            InvalidRequest: no such worker lives.
        """
        self._live(worker_id)
        return self._drains.pop(worker_id, None) is not None

    def lives(self) -> Set[Life]:
        """Who gets nothing new."""
        return {drain.life for drain in self._drains.values()}

    def watch(self, life: Life, on_due: Callable[[], None]) -> Callable[[], None]:
        """Have `on_due` called at every tick while this life's streams should move; returns what ends that."""
        key = object()
        self._watches.setdefault(life, {})[key] = on_due

        def unwatch() -> None:
            watches = self._watches.get(life, {})
            watches.pop(key, None)
            if not watches:
                self._watches.pop(life, None)

        return unwatch

    def tick(self) -> None:
        """Move on who should, and forget drains of lives that are over."""
        now_s = self._clock.now_s()
        known = {member.life for member in self._members.all()} if self._drains else set()
        for worker_id, drain in list(self._drains.items()):
            if drain.life not in known:
                del self._drains[worker_id]
            elif drain.due_s <= now_s:
                for on_due in tuple(self._watches.get(drain.life, {}).values()):
                    on_due()

    def _live(self, worker_id: str) -> Life:
        for member in self._members.all():
            if member.state.worker_id == worker_id and member.alive:
                return member.life
        raise InvalidRequest(f"no worker {worker_id[:200]!r} is alive", field="worker_id", worker_id=worker_id[:200])
