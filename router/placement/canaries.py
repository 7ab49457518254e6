"""Sends the router's own small requests to idle workers: one at a time, each to one exact pair.

It sends what `canary` decides, and reports the outcome to it. A canary is not a client's request: it takes no place in
a queue and uses no retry, it is never blamed for a worker's death, and no count or trace of clients' requests includes
it. At its deadline it is cancelled like any request, and leaves as little behind.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.clock import Clock
from baton.core.errors import BatonError, Overloaded, TransferFailed, WorkerLost
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.router.attempt.channels import Channels
from baton.router.attempt.in_flight_requests import BROKEN_S, HEARD_S, InFlightTracker, Inspector
from baton.router.attempt.request_run import LocalRun, RequestRun
from baton.router.placement.canary import CanaryOutcome, CanaryRoster, CanaryWatch, Probe
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member, Members
from baton.router.placement.policy import Pair
from baton.router.placement.refusals import Refusals

TENANT: Final = "baton-canary"  # no other tenant can use its cached prompt, which is too short for that anyway
PROMPT_LEN: Final = 4  # shorter than any block, so no prefix index holds it
SAMPLING: Final = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)  # one token from each worker
LOOK_S: Final = 0.1  # minimum time between scans of all workers, and so between canaries
LOOKS: Final = 60  # maximum number of scans in `idle_s`
SETTLE_S: Final = 0.05  # between checks whether a worker died

log = logging.getLogger(__name__)


class Canaries:
    """The canaries of one router. `tick` must be called several times a second.

    Args:
        in_flight_tracker: live workers, in-flight requests, and the `CanaryWatch`.
        refusals: incompatible pairs; canaries add those they find.
        channels: gRPC channels to workers.
        clock: clock of the deadlines.
        spawn: runs a coroutine in the background and keeps a reference to its task.
        vocab_size: exclusive upper bound of token ids.
    """

    def __init__(
        self,
        in_flight_tracker: InFlightTracker,
        refusals: Refusals,
        channels: Channels,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        vocab_size: int,
    ) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()  # by worker, role and outcome; known workers only
        self._in_flight_tracker = in_flight_tracker
        self._watch = in_flight_tracker.canary
        self._refusals = refusals
        self._channels = channels
        self._clock = clock
        self._spawn = spawn
        self._prompt = tuple((at + 1) % vocab_size for at in range(PROMPT_LEN))
        self._look_s = 0.0

    def tick(self) -> None:
        """Send a canary if one is due."""
        now_s = self._clock.now_s()
        if not self._watch.config.idle_s or self._watch.under_way is not None or now_s < self._look_s:
            return
        members = {role: self._in_flight_tracker.members.live(role) for role in (PREFILL, DECODE)}
        self._look_s = now_s + max(LOOK_S, self._watch.config.idle_s / LOOKS)
        probe = self._watch.begin(self._roster(members[PREFILL], members[DECODE]), now_s)
        if probe is None:
            return
        by_incarnation = {member.incarnation: member for member in (*members[PREFILL], *members[DECODE])}
        self._spawn(self._ask(probe, Pair(by_incarnation[probe.prefill], by_incarnation[probe.decode])))

    def _roster(self, prefill: list[Member], decode: list[Member]) -> CanaryRoster:
        draining, refused = self._in_flight_tracker.drains.incarnations(), self._refusals.incarnations()
        barred = {
            member.incarnation
            for member in (*prefill, *decode)
            if member.incarnation in draining or not self._fits(member)
        }
        alone = set()
        if all(member.incarnation in draining for member in prefill):
            alone = {member.incarnation for member in self._in_flight_tracker.local.able(decode, refused)}
        return CanaryRoster(
            prefill={member.incarnation for member in prefill},
            decode={member.incarnation for member in decode},
            barred=barred,
            apart=refused,
            alone=alone,
            is_busy=lambda incarnation: self._in_flight_tracker.in_flight_requests.num_at(incarnation) > 0,
        )

    @staticmethod
    def _fits(member: Member) -> bool:
        need_len = PROMPT_LEN + SAMPLING.max_tokens
        state = member.state
        return need_len <= state.max_model_len and need_len + state.num_draft_tokens <= member.capacity_len

    async def _ask(self, probe: Probe, pair: Pair) -> None:
        outcome, why = CanaryOutcome.LOST, ""
        try:
            if self._all_live(probe):
                error = await self._send(pair)
                outcome = await self._outcome(probe, pair, error)
                why = "" if error is None else f"{type(error).__name__}: {error.message}"
        finally:
            self._watch.ended(probe, outcome, self._clock.now_s(), why)
            self._count(probe, pair, outcome)

    async def _send(self, pair: Pair) -> BatonError | None:
        """Send the request and wait for its answer; return the error that ended it, None if it was answered."""
        request = GenerationRequest(
            key=AttemptKey(f"canary-{secrets.token_hex(8)}", 1),
            prompt_token_ids=self._prompt,
            sampling=SAMPLING,
            deadline_s=self._clock.now_s() + self._watch.config.timeout_s,
            num_draft_tokens=pair.decode.state.num_draft_tokens,
            tenant=TENANT,
        )
        kind = LocalRun if pair.is_local else RequestRun
        run = kind(request, pair, channels=self._channels, clock=self._clock)
        try:
            run.start(Inspector(self._in_flight_tracker.members))
            is_finished = False
            while not is_finished:
                emitted = run.take()
                if emitted is None:
                    await run.changed()
                else:
                    is_finished = emitted.finish_reason != ""
        except BatonError as error:
            return error
        finally:
            run.close()
            run.linger()
        return None

    async def _outcome(self, probe: Probe, pair: Pair, error: BatonError | None) -> CanaryOutcome:
        if error is None:
            return CanaryOutcome.ANSWERED
        if isinstance(error, Overloaded):
            return CanaryOutcome.OVERLOADED
        reason = error.fields.get("pair_refused") if isinstance(error, TransferFailed) else None
        if reason:
            self._refusals.add(pair, str(reason))
            log.warning(
                "%s and %s are not paired: %s", *(incarnation.worker_id for incarnation in pair.incarnations), reason
            )
            return CanaryOutcome.REFUSED
        if isinstance(error, WorkerLost):
            await self._settle(probe)
        return CanaryOutcome.FAILED if self._all_live(probe) else CanaryOutcome.LOST

    async def _settle(self, probe: Probe) -> None:
        """After a broken connection, wait until an incarnation is lost, or all are heard of well after the break."""
        members, broken_s = self._in_flight_tracker.members, self._clock.now_s()
        while self._all_live(probe) and self._clock.now_s() < broken_s + BROKEN_S:
            if all(members.heard_since(incarnation, broken_s + HEARD_S) for incarnation in probe.incarnations):
                return
            await asyncio.sleep(SETTLE_S)

    def _all_live(self, probe: Probe) -> bool:
        return all(self._is_live(incarnation) for incarnation in probe.incarnations)

    def _is_live(self, incarnation: Incarnation) -> bool:
        live = (member for role in (PREFILL, DECODE) for member in self._in_flight_tracker.members.live(role))
        return any(member.incarnation == incarnation for member in live)

    def _count(self, probe: Probe, pair: Pair, outcome: CanaryOutcome) -> None:
        roles = {probe.prefill: PREFILL, probe.decode: DECODE}
        for incarnation in probe.incarnations:
            self.counts[incarnation.worker_id, roles[incarnation], outcome.value] += 1
        known = {member.state.worker_id for member in self._in_flight_tracker.members.all()}
        for key in [key for key in self.counts if key[0] not in known]:
            del self.counts[key]


class CanaryCollector(Collector):
    """Exports one router's canary metrics."""

    def __init__(self, canaries: Canaries, watch: CanaryWatch, members: Members) -> None:
        self._canaries = canaries
        self._watch = watch
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; a canary counts for each worker that it was sent to."""
        sent = CounterMetricFamily(
            "baton_canaries",
            "The router's own requests to idle workers, by how they ended",
            labels=("worker", "role", "outcome"),
        )
        for labels, count in tuple(self._canaries.counts.items()):
            sent.add_metric(labels, count)
        unfit = GaugeMetricFamily(
            "baton_worker_unfit",
            "1 while a live worker answers neither canaries nor clients, else 0",
            labels=("worker", "role"),
        )
        for member in self._members.all():
            if member.alive:
                unfit.add_metric((member.state.worker_id, member.state.role), self._watch.is_unfit(member.incarnation))
        yield from (sent, unfit)
