"""Which requests are at which worker, so that it is known who was there when one died.

It feeds `poison_detector`, and answers for the operators how many streams a worker has. A stream that breaks is no
death yet: its request counts as present until the worker is heard of again, or is lost. Nor is silence: a worker that
was not heard for a while, and under which no stream broke, has died only if its name comes back in another incarnation,
or never. One that comes back in the same incarnation has not died, whatever broke.
"""

import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol

from baton.core.clock import Clock
from baton.core.errors import WorkerLost
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.router.attempt.continuation import Cause
from baton.router.attempt.poison_detector import Blamed, PoisonDetector, Stay
from baton.router.placement.canary import CanaryWatch
from baton.router.placement.drains import Drains
from baton.router.placement.local_prefill import LocalPrefill
from baton.router.placement.members import FENCE, Incarnation, Members

DIGEST_BYTES = 12
log = logging.getLogger(__name__)


def fingerprint(request: GenerationRequest) -> str:
    """Hex digits that name a client's request; the same for each of its answers, and another one for each tenant.

    Or a tenant could have another's requests refused, and learn of them.
    """
    values = request.sampling.as_data()
    for name in ("seed", "prompt_logprobs"):  # the second differs between the answers of one request
        del values[name]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(json.dumps([request.tenant, values, request.num_draft_tokens], sort_keys=True).encode())
    digest.update(array("Q", request.prompt_token_ids).tobytes())
    return digest.hexdigest()


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


@dataclass(frozen=True, slots=True)
class _Silence:
    """A worker that was given up because it was not heard of.

    Attributes:
        present: whose streams were whole until then.
        counted: requests whose streams had broken there, and of which it counts as a death until it comes back.
    """

    present: tuple[Stay, ...]
    counted: frozenset[str]


class InFlightRequests:
    """Visits by incarnation and attempt. Call `tick` several times a second."""

    def __init__(
        self, members: Members, poison_detector: PoisonDetector, clock: Clock, on_blamed: Callable[[Blamed], None]
    ) -> None:
        self._members = members
        self._poison_detector = poison_detector
        self._clock = clock
        self._on_blamed = on_blamed
        self._visits: dict[Incarnation, dict[AttemptKey, _Visit]] = {}
        self._left: dict[Incarnation, list[Stay]] = {}  # not in order; a request itself is not kept for that
        self._broken: dict[Incarnation, float] = {}  # when a stream broke there last
        self._silences: dict[Incarnation, _Silence] = {}

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
        visit, now_s = visits.pop(key), self._clock.now_s()
        if how in (Leaving.BROKEN, Leaving.TURNED_AWAY):
            self._broken[incarnation] = now_s
        if how in (Leaving.BROKEN, Leaving.DOUBTED):
            stay = Stay(fingerprint(visit.request), visit.start_s, now_s)
            self._left.setdefault(incarnation, []).append(stay)

    def tick(self) -> None:
        """See what became of workers that were silent, or under which attempts broke off."""
        for incarnation in list(self._left):
            self._settle(incarnation)
        members = {member.state.worker_id: member for member in self._members.all()} if self._silences else {}
        for incarnation, silence in list(self._silences.items()):
            member = members.get(incarnation.worker_id)
            if member is not None and member.incarnation == incarnation and not member.alive:
                continue
            del self._silences[incarnation]
            if member is not None and member.incarnation == incarnation:
                for name in self._poison_detector.survived(incarnation.worker_id, silence.counted):
                    log.warning("request %s is not refused any more: %s has not died", name, incarnation.worker_id)
            else:
                self._died(incarnation, silence.present)

    @property
    def has_silences(self) -> bool:
        """Whether it is not known of some worker whether it has died."""
        return bool(self._silences)

    def finished(self, fingerprint: str) -> None:
        """A request ended well: it has killed no worker, nor one of which that will be known later."""
        for incarnation, silence in self._silences.items():
            if any(stay.fingerprint == fingerprint for stay in silence.present):
                present = tuple(stay for stay in silence.present if stay.fingerprint != fingerprint)
                self._silences[incarnation] = _Silence(present, silence.counted)

    def num_at(self, incarnation: Incarnation) -> int:
        """Attempts at a worker now."""
        return len(self._visits.get(incarnation, {}))

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
        heard_since, now_s = self._members.heard_since, self._clock.now_s()
        stays = [
            stay
            for stay in self._left.pop(incarnation, ())
            if not heard_since(incarnation, stay.end_s + HEARD_S) and now_s <= stay.end_s + BROKEN_S
        ]
        if stays:
            self._left[incarnation] = stays

    def _lost(self, incarnation: Incarnation) -> None:
        self._settle(incarnation)
        visits, now_s = self._visits.pop(incarnation, {}), self._clock.now_s()
        left = self._left.pop(incarnation, [])
        self._broken.pop(incarnation, None)
        present = [Stay(fingerprint(visit.request), visit.start_s, now_s) for visit in visits.values()]
        if self._members.why_lost(incarnation) == FENCE:
            counted = frozenset(stay.fingerprint for stay in left)
            self._silences[incarnation] = _Silence(tuple(present), counted)
        else:
            left += present
        self._died(incarnation, left)

    def _died(self, incarnation: Incarnation, stays: Sequence[Stay]) -> None:
        for blamed in self._poison_detector.died(incarnation.worker_id, stays, self._clock.now_s()):
            self._on_blamed(blamed)


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
    """A request of the router's own: it is told when an incarnation is lost, and stands in no list.

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
