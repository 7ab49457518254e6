"""Which requests are at which worker, so that it is known who was there when one died.

It feeds `poison_detector`, and answers for the operators how many streams a worker has. A stream that breaks is no
death yet: its request counts as present until the worker is heard of again, or is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from baton.core.clock import Clock
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.router.attempt.fingerprint import fingerprint
from baton.router.attempt.poison_detector import Blamed, PoisonDetector, Stay
from baton.router.placement.members import Incarnation, Members

HEARD_S: Final = 0.5  # who reports so long after a stream broke was not killed with it
BROKEN_S: Final = 10.0  # by then it is known


class Leaving(Enum):
    """How an attempt came to depend on a worker no more."""

    IN_ORDER = auto()
    BROKEN = auto()  # the connection broke under it
    TURNED_AWAY = auto()  # there was no connection: it was never there
    DOUBTED = auto()  # its hand-off failed, perhaps because the worker died


@dataclass(slots=True)
class _Visit:
    request: GenerationRequest
    start_s: float
    end_s: float | None = None  # of one that did not leave in order


class InFlightRequests:
    """Visits by incarnation and attempt."""

    def __init__(
        self, members: Members, poison_detector: PoisonDetector, clock: Clock, on_blamed: Callable[[Blamed], None]
    ) -> None:
        self._members = members
        self._poison_detector = poison_detector
        self._clock = clock
        self._on_blamed = on_blamed
        self._visits: dict[Incarnation, dict[AttemptKey, _Visit]] = {}
        self._broken: dict[Incarnation, float] = {}  # when a stream broke there last

    def enter(self, incarnation: Incarnation, key: AttemptKey, request: GenerationRequest) -> None:
        """An attempt of a client's request goes to a worker."""
        visits = self._visits.get(incarnation)
        if visits is None:
            visits = self._visits[incarnation] = {}
            self._members.watch(incarnation, lambda: self._lost(incarnation))
        visits[key] = _Visit(request, self._clock.now_s())

    def leave(self, incarnation: Incarnation, key: AttemptKey, how: Leaving) -> None:
        """It does not depend on the worker any more."""
        visits = self._visits.get(incarnation)
        if visits is None or key not in visits:
            return
        now_s = self._clock.now_s()
        if how in (Leaving.BROKEN, Leaving.TURNED_AWAY):
            self._broken[incarnation] = now_s
        if how in (Leaving.BROKEN, Leaving.DOUBTED):
            self._settle(incarnation)
            visits[key].end_s = now_s
        else:
            del visits[key]

    def num_at(self, incarnation: Incarnation) -> int:
        """Attempts at a worker now."""
        return sum(visit.end_s is None for visit in self._visits.get(incarnation, {}).values())

    def is_unsettled(self, incarnation: Incarnation) -> bool:
        """Whether a connection broke there and it is not known yet whether the worker died."""
        broken_s = self._broken.get(incarnation)
        if broken_s is None:
            return False
        if self._members.heard_since(incarnation, broken_s + HEARD_S) or broken_s + BROKEN_S < self._clock.now_s():
            self._settle(incarnation)
            del self._broken[incarnation]
            return False
        return True

    def _settle(self, incarnation: Incarnation) -> None:
        """Forget who did not leave in order, where the worker lives on."""
        visits, now_s = self._visits.get(incarnation, {}), self._clock.now_s()
        for key, visit in list(visits.items()):
            if visit.end_s is None:
                continue
            if self._members.heard_since(incarnation, visit.end_s + HEARD_S) or visit.end_s + BROKEN_S < now_s:
                del visits[key]

    def _lost(self, incarnation: Incarnation) -> None:
        self._settle(incarnation)
        visits, now_s = self._visits.pop(incarnation, {}), self._clock.now_s()
        self._broken.pop(incarnation, None)
        stays = [
            Stay(fingerprint(visit.request), visit.start_s, now_s if visit.end_s is None else visit.end_s)
            for visit in visits.values()
        ]
        for blamed in self._poison_detector.died(incarnation.worker_id, stays, now_s):
            self._on_blamed(blamed)
