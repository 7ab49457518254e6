"""Tracks which requests are at which worker, so that it is known which were there when a worker died.

It feeds `poison_detector`, and tells operators how many streams a worker has. A broken stream is not yet a death: its
request counts as present until the worker is heard of again, or is lost. Nor is silence a death: a worker that fell
silent without a broken stream has died only if its name returns as another incarnation, or never returns. A worker that
returns in the same incarnation has not died, even if streams broke.
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
    """Return hex digits that identify a client's request: equal for all its answers, different for each tenant.

    Otherwise a tenant could cause another's requests to be refused, and learn about them.
    """
    values = request.sampling.as_data()
    for name in ("seed", "prompt_logprobs"):  # `prompt_logprobs` differs between the answers of one request
        del values[name]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(json.dumps([request.tenant, values, request.num_draft_tokens], sort_keys=True).encode())
    digest.update(array("Q", request.prompt_token_ids).tobytes())
    return digest.hexdigest()


HEARD_S: Final = 0.5  # a worker that reports this long after a stream broke was not killed along with it
BROKEN_S: Final = 10.0  # by then it is known whether the worker died


class Leaving(Enum):
    """How an attempt stopped depending on a worker."""

    IN_ORDER = auto()
    BROKEN = auto()  # the connection broke during the attempt
    TURNED_AWAY = auto()  # there was no connection: the attempt never reached the worker
    DOUBTED = auto()  # the hand-off failed, perhaps because the worker died


@dataclass(slots=True)
class _Visit:
    request: GenerationRequest
    start_s: float


@dataclass(frozen=True, slots=True)
class _Silence:
    """A worker that was declared lost because it was silent.

    Attributes:
        present: requests whose streams were intact until then.
        counted: requests whose streams had broken there, for which it counts as a death until it returns.
    """

    present: tuple[Stay, ...]
    counted: frozenset[str]


class InFlightRequests:
    """Visits by incarnation and attempt. `tick` must be called several times a second."""

    def __init__(
        self, members: Members, poison_detector: PoisonDetector, clock: Clock, on_blamed: Callable[[Blamed], None]
    ) -> None:
        self._members = members
        self._poison_detector = poison_detector
        self._clock = clock
        self._on_blamed = on_blamed
        self._visits: dict[Incarnation, dict[AttemptKey, _Visit]] = {}
        self._left: dict[Incarnation, list[Stay]] = {}  # in no order; requests themselves are not kept
        self._broken: dict[Incarnation, float] = {}  # when a stream last broke at each worker
        self._silences: dict[Incarnation, _Silence] = {}

    def enter(self, incarnation: Incarnation, key: AttemptKey, request: GenerationRequest) -> None:
        """Record that an attempt of a client's request is sent to a worker."""
        visits = self._visits.get(incarnation)
        if visits is None:
            visits = self._visits[incarnation] = {}
            self._members.watch(incarnation, lambda: self._lost(incarnation))
        visits[key] = _Visit(request, self._clock.now_s())

    def leave(self, incarnation: Incarnation, key: AttemptKey, how: Leaving) -> None:
        """Record that the attempt no longer depends on the worker."""
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
        """Determine what became of silent workers and of workers with broken streams."""
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
        """Whether some silent worker's death is still undecided."""
        return bool(self._silences)

    def finished(self, fingerprint: str) -> None:
        """Clear a request that ended successfully: it has not killed any worker, silent ones included."""
        for incarnation, silence in self._silences.items():
            if any(stay.fingerprint == fingerprint for stay in silence.present):
                present = tuple(stay for stay in silence.present if stay.fingerprint != fingerprint)
                self._silences[incarnation] = _Silence(present, silence.counted)

    def num_at(self, incarnation: Incarnation) -> int:
        """Number of attempts now at a worker."""
        return len(self._visits.get(incarnation, {}))

    def is_unsettled(self, incarnation: Incarnation) -> bool:
        """Whether a connection to the worker broke, and it is undecided whether the worker died."""
        broken_s = self._broken.get(incarnation)
        if broken_s is None:
            return False
        if self._members.heard_since(incarnation, broken_s + HEARD_S) or broken_s + BROKEN_S < self._clock.now_s():
            self._settle(incarnation)
            del self._broken[incarnation]
            return False
        return True

    def _settle(self, incarnation: Incarnation) -> None:
        """Forget the broken stays at a worker that turned out to be alive, or whose time for a decision is over."""
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
    """Shared view of workers and requests.

    Attributes:
        members: live and lost workers.
        drains: drains in progress.
        in_flight_requests: which requests are at which worker.
        local: whether decode workers can do without a prefill worker.
        canary: which workers can be trusted to serve.
    """

    members: Members
    drains: Drains
    in_flight_requests: InFlightRequests
    local: LocalPrefill = field(default_factory=LocalPrefill)
    canary: CanaryWatch = field(default_factory=CanaryWatch)


class Guest(Protocol):
    """How a leg registers with a worker."""

    def enter(self, incarnation: Incarnation, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """See `Visitor`."""
        ...


class Inspector:
    """A request of the router's own: it is told when an incarnation is lost, but is not counted as in flight.

    Args:
        members: live and lost workers.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def enter(self, incarnation: Incarnation, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """See `Visitor`."""
        unwatch = self._members.watch(incarnation, lambda: on_lost(_lost(self._members, incarnation, role)))
        return lambda how: unwatch()


class Visitor:
    """One client's request, as it passes through its attempts.

    Args:
        in_flight_tracker: where visits are recorded.
        request: the client's request.
        may_move: whether the request can now leave a draining worker for another.
    """

    def __init__(
        self, in_flight_tracker: InFlightTracker, request: GenerationRequest, may_move: Callable[[], bool]
    ) -> None:
        self._in_flight_tracker = in_flight_tracker
        self._request = request
        self._may_move = may_move

    def enter(self, incarnation: Incarnation, role: str, key: AttemptKey, on_lost: OnLost) -> Callable[[Leaving], None]:
        """Make an attempt depend on a worker from now on.

        Args:
            incarnation: the worker's incarnation.
            role: the worker's role in the attempt.
            key: the attempt's key.
            on_lost: called with the reason when the attempt must leave; at once if the incarnation is already lost.

        Returns:
            a function that ends the dependence.
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
