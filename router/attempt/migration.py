"""Holds the router's state for answers that outlive their workers: drains, in-flight requests, quarantine, retries."""

import logging
from dataclasses import dataclass

from baton.core.clock import Clock
from baton.core.errors import RequestQuarantined
from baton.core.requests.request import GenerationRequest
from baton.router.attempt.continuation import Cause, MigrationLimits
from baton.router.attempt.in_flight_requests import InFlightRequests, InFlightTracker, fingerprint
from baton.router.attempt.poison_detector import HOLD_S, NUM_DEATHS, Blamed, PoisonDetector
from baton.router.metrics import RouterMetrics
from baton.router.placement.canary import CanaryWatch
from baton.router.placement.drains import Drains
from baton.router.placement.local_prefill import LocalPrefill
from baton.router.placement.members import DECODE, PREFILL, Members


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """Parameters of the retry budget's token bucket.

    Attributes:
        share: tokens that each request adds.
        per_s: tokens added per second.
        burst: capacity of the bucket.
    """

    share: float = 0.2
    per_s: float = 1.0
    burst: float = 50.0


class RetryBudget:
    """A router's token bucket for retries."""

    def __init__(self, limits: RetryLimits, now_s: float) -> None:
        self._limits = limits
        self._tokens = limits.burst
        self._filled_s = now_s
        self.num_refused = 0

    def tokens(self, now_s: float) -> float:
        """Number of retries that could be made now."""
        self._fill(now_s)
        return self._tokens

    def request(self, now_s: float) -> None:
        """Add a new request's share to the bucket; its first attempt is no retry."""
        self._fill(now_s)
        self._add(self._limits.share)

    def retry(self, now_s: float) -> float:
        """Take one retry; return 0, or the seconds until one becomes available."""
        self._fill(now_s)
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        self.num_refused += 1
        return (1.0 - self._tokens) / self._limits.per_s

    def _fill(self, now_s: float) -> None:
        self._add(max(0.0, now_s - self._filled_s) * self._limits.per_s)
        self._filled_s = max(now_s, self._filled_s)

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._limits.burst, self._tokens + tokens)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationConfig:
    """Configuration of migration and quarantine.

    Attributes:
        max_migrations: per answer; 0 disables migration.
        wait_s: how long an answer waits for a pair to continue on.
        drain_grace_s: how long streams of a draining worker may run before they migrate.
        quarantine_deaths: deaths of workers before a request is blamed; 0 blames none.
        quarantine_s: how long a blamed request is refused.
    """

    max_migrations: int = 2
    wait_s: float = 30.0
    drain_grace_s: float = 10.0
    quarantine_deaths: int = NUM_DEATHS
    quarantine_s: float = HOLD_S


class Migration:
    """Drains, in-flight requests and quarantine of one router."""

    def __init__(
        self,
        config: MigrationConfig,
        members: Members,
        clock: Clock,
        metrics: RouterMetrics,
        local: LocalPrefill | None = None,
        canary: CanaryWatch | None = None,
    ) -> None:
        self.config = config
        self.limits = MigrationLimits(max_migrations=config.max_migrations, wait_s=config.wait_s)
        self.poison_detector = PoisonDetector(num_deaths=config.quarantine_deaths, hold_s=config.quarantine_s)
        self.drains = Drains(members, clock)
        self.in_flight_requests = InFlightRequests(members, self.poison_detector, clock, _log_blamed)
        self.in_flight_tracker = InFlightTracker(
            members, self.drains, self.in_flight_requests, local or LocalPrefill(), canary or CanaryWatch()
        )
        self._members = members
        self._clock = clock
        self._metrics = metrics

    @property
    def serving(self) -> bool:
        """Whether a new request could be served: each role has a live worker that is not draining.

        If decode workers compute prompts, no prefill worker is needed.
        """
        prefill, decode = self.drains.live(PREFILL), self.drains.live(DECODE)
        return bool(decode) and (bool(prefill) or self.in_flight_tracker.local.suffices(decode))

    def admit(self, request: GenerationRequest) -> None:
        """Check that a request is not quarantined.

        Raises:
            RequestQuarantined: it is blamed for workers' deaths.
        """
        if not len(self.poison_detector):
            return
        now_s = self._clock.now_s()
        blamed = self.poison_detector.find(fingerprint(request), now_s)
        if blamed is not None:
            left_s = blamed.until_s - now_s
            workers = ", ".join(blamed.workers)
            message = f"this prompt with these parameters was at the deaths of {workers}; refused for {left_s:.0f} s"
            raise RequestQuarantined(message, fingerprint=blamed.fingerprint, workers=list(blamed.workers))

    def finished(self, request: GenerationRequest) -> None:
        """Record that a request ended successfully."""
        if len(self.poison_detector) or self.in_flight_requests.has_silences:
            name = fingerprint(request)
            self.poison_detector.finished(name)
            self.in_flight_requests.finished(name)

    def migrated(self, cause: Cause) -> None:
        """Count an answer's migration."""
        self._metrics.migrations.labels(cause.value).inc()


def _log_blamed(blamed: Blamed) -> None:
    log.error("request %s is refused from now on: it was at the deaths of %s", blamed.fingerprint, blamed.workers)
