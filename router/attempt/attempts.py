"""Runs one request to its end: a first attempt, then others after lost workers or failed hand-offs.

`Attempts` chooses pairs of workers and waits for them. `continuation` decides what follows a failure, and `request_run`
runs a single attempt. The client's stream continues across attempts: the client sees a pause, but no token twice and
none missing.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from baton.core.clock import Clock
from baton.core.errors import BatonError, HandoffTooLong, NoWorker, TransferFailed, WorkersIncompatible, as_internal
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import GenerationRequest
from baton.proto import worker_pb2
from baton.router.attempt.channels import Channels
from baton.router.attempt.continuation import Again, Cause, Continuation, MigrationLimits, cause_of
from baton.router.attempt.in_flight_requests import InFlightTracker, Visitor
from baton.router.attempt.migration import RetryBudget
from baton.router.attempt.request_run import CertainTokens, LocalRun, RequestRun
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member
from baton.router.placement.policy import Pair, Policy
from baton.router.placement.refusals import Outcasts, Refusals, fits

Incarnations = tuple[Incarnation, Incarnation]


@dataclass(slots=True)
class TooLong:
    """Pairs of workers that cannot hand over a prompt of this length.

    Attributes:
        surely: the pair's reports say so, or it has refused the prompt.
        perhaps: the pair has not used a data path yet; it cannot if that path turns out not to be one-sided.
    """

    surely: set[Incarnations] = field(default_factory=set)
    perhaps: set[Incarnations] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.surely or self.perhaps)


def too_long(prefill: Sequence[Member], decode: Sequence[Member], prompt_len: int) -> TooLong:
    """Find pairs that cannot hand over a prompt of this length."""
    found = TooLong()
    for receiver in decode:
        if not 0 < receiver.state.inventory.max_handoff_len < prompt_len:
            continue
        for sender in prefill:
            data_path = _data_path(sender, receiver)
            if not is_one_sided(data_path):
                (found.surely if data_path else found.perhaps).add((sender.incarnation, receiver.incarnation))
    return found


def refusal(prompt_len: int, decode: Sequence[Member]) -> HandoffTooLong:
    """Build the error of a request that no pair can hand over and no decode worker may compute."""
    limit_len = max((member.state.inventory.max_handoff_len for member in decode), default=0)
    message = (
        f"no hand-off can carry {prompt_len} tokens, of at most {limit_len}: a larger kv_staging_mib would, or"
        " local_prefill: auto, with which decode workers compute such prompts"
    )
    return HandoffTooLong(message, num_tokens=prompt_len, limit=limit_len, keys=["kv_staging_mib", "local_prefill"])


def _data_path(sender: Member, receiver: Member) -> str:
    """The data path that the two workers used last; empty if they have used none."""
    address, epoch = receiver.state.kv_address, receiver.state.kv_epoch or receiver.incarnation.epoch
    paths = sender.state.inventory.transfer.paths
    return next((path.data_path for path in paths if path.kv_address == address and path.epoch == epoch), "")


SETTLE_S = 0.05  # between checks whether a worker died
SETTLE_LOOKS = 40

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsContext:
    """What the attempts of all requests share.

    Attributes:
        policy: chooses pairs of workers.
        in_flight_tracker: live workers, and which requests are at which worker.
        refusals: incompatible pairs; attempts add those they find.
        channels: gRPC channels to workers.
        clock: clock of the deadlines.
        spawn: runs a coroutine in the background and keeps a reference to its task.
        limits: limits of migration.
        budget: limits attempts after failed hand-offs.
        on_retry: called before each such attempt.
        on_retry_refused: called for each such attempt that the budget refuses.
        on_migration: called before each attempt that follows a lost worker.
        on_finished: called when an answer is complete.
        admit: raises if a request must no longer be sent to a worker.
        num_queued_tokens: prompt tokens that wait at the router for each decode worker, if those compute prompts.
    """

    policy: Policy
    in_flight_tracker: InFlightTracker
    refusals: Refusals
    channels: Channels
    clock: Clock
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    limits: MigrationLimits
    budget: RetryBudget
    on_retry: Callable[[], None]
    on_retry_refused: Callable[[], None]
    on_migration: Callable[[Cause], None]
    on_finished: Callable[[GenerationRequest], None]
    admit: Callable[[GenerationRequest], None]
    num_queued_tokens: Callable[[], int]


class Attempts:
    """All attempts of one request. The caller iterates `events`, then always calls `close`.

    Args:
        request: its first attempt, with the seed fixed.
        context: what all requests share.
    """

    def __init__(self, request: GenerationRequest, context: AttemptsContext) -> None:
        self.request = request
        self.first: worker_pb2.FirstToken | None = None  # of the attempt that gave the client's first token
        self.first_pair: Pair | None = None
        self.runs: list[RequestRun] = []  # every attempt, in order
        self.on_arrival: Callable[[int, bool], None] | None = None  # gets (number of new tokens, whether last)
        self._context = context
        self._answer = Continuation(request, context.limits, random.random)
        self._outcasts = Outcasts()
        self._too_long: set[Incarnations] = set()  # pairs that refused a prompt of this length
        self._pair: Pair | None = None
        self._run: RequestRun | None = None

    @property
    def run(self) -> RequestRun:
        """The current or last attempt."""
        assert self._run is not None
        return self._run

    @property
    def num_retries(self) -> int:
        """Number of attempts after failed hand-offs."""
        return self._answer.num_retries

    @property
    def num_migrations(self) -> int:
        """Number of attempts after lost workers."""
        return self._answer.num_migrations

    @property
    def num_forced(self) -> int:
        """Number of tokens that the last attempt took over from earlier ones."""
        return self._answer.num_forced

    async def events(self) -> AsyncIterator[CertainTokens]:
        """Yield tokens in order, each once; the last event has a finish reason.

        Raises:
            BatonError: what ended the request; all tokens that had arrived were yielded before.
        """
        self._context.admit(self.request)
        self._context.budget.request(self._context.clock.now_s())
        while True:
            self._pair = pair = await self._find_pair()
            self._run = run = self._start(pair)
            try:
                finished = begun = False
                while not finished:
                    emitted = run.take()
                    if emitted is None:
                        await run.changed()
                        continue
                    finished = emitted.finish_reason != ""
                    if not begun:
                        begun = True
                        self._came(pair.prefill)
                    if self.first is None:
                        self.first, self.first_pair = run.first, pair
                    new = self._take(run, emitted)
                    if new is not None:
                        yield new
                self._answer.finish()
                if run.decode_worker:  # else the request ended at its first token
                    self._came(pair.decode)
                self._context.on_finished(self.request)
                return
            except BatonError as error:
                await self._lost(pair, error)
            except Exception as error:
                raise as_internal("an attempt of a request", error) from error

    def close(self) -> None:
        """End the current attempt if it has not ended."""
        if self._run is not None:
            try:
                self._run.close()
            finally:
                self._run.linger()

    def _came(self, member: Member) -> None:
        """Record that a worker served its part of the request."""
        self._context.in_flight_tracker.canary.came(member.incarnation, self._context.clock.now_s())

    async def _find_pair(self) -> Pair:
        """Return a pair of workers; wait for one if the answer has already begun.

        Raises:
            NoWorker: a role has no live worker.
            WorkersIncompatible: every live pair has refused.
            RequestDeadlineExceeded: the deadline passed while waiting.
        """
        while True:
            try:
                return self._pick()
            except (NoWorker, WorkersIncompatible) as error:
                await asyncio.sleep(self._answer.no_pair(error, self._context.clock.now_s()))

    def _pick(self) -> Pair:
        """Choose workers that have not failed this request, else a pair that has not, else any pair.

        Raises:
            NoWorker: a role has no live worker.
            WorkersIncompatible: every live pair has refused.
            HandoffTooLong: no remaining pair can hand over so long a prompt, and no decode worker may compute it.
        """
        prefill, decode = self._serving(PREFILL), self._serving(DECODE)
        exclusions = self._exclusions(prefill, decode)
        if len(exclusions) == 1:
            return self._choose(prefill, decode, exclusions[0])
        for excluded in exclusions:
            try:
                return self._choose(prefill, decode, excluded)
            except WorkersIncompatible:
                continue
        raise refusal(self._prompt_len, decode)

    @property
    def _prompt_len(self) -> int:
        """Number of tokens that another attempt would have to hand over."""
        return self.request.prompt_len + self._answer.num_tokens

    def _exclusions(self, prefill: Sequence[Member], decode: Sequence[Member]) -> list[Set[Incarnations]]:
        """Sets of pairs to exclude: first the full set, then a smaller one to use if no other pair is left."""
        refused = self._context.refusals.incarnations()
        long = too_long(prefill, decode, self._prompt_len)
        long.surely |= self._too_long
        return [refused | long.surely | long.perhaps, refused | long.surely] if long else [refused]

    def _choose(self, prefill: list[Member], decode: list[Member], refused: Set[Incarnations]) -> Pair:
        outcasts = self._outcasts
        pick = self._context.policy.pick
        if outcasts.pairs:
            for fresh, excluded in ((True, refused), (False, refused | outcasts.pairs)):
                try:
                    only = outcasts.without(prefill) if fresh else prefill
                    return pick(only, outcasts.without(decode) if fresh else decode, excluded, self.request)
                except (NoWorker, WorkersIncompatible):
                    continue
        try:
            return pick(prefill, decode, refused, self.request)
        except WorkersIncompatible as error:
            raise self._incompatible(error) from None

    def _serving(self, role: str, *, is_again: bool = False) -> list[Member]:
        """Live workers that take requests and did not just lose this request's stream.

        Among these, workers that are fit and whose connections are settled are preferred, if there are any.

        Args:
            role: the workers' role.
            is_again: filter as after a first attempt.
        """
        in_flight_tracker = self._context.in_flight_tracker
        live = in_flight_tracker.drains.live(role)
        if is_again or self._answer.tried:  # the first attempt was already checked against all workers
            live = [member for member in self._outcasts.heard(live) if fits(self.request, member)]
        live = [member for member in live if not in_flight_tracker.canary.is_unfit(member.incarnation)] or live
        return [
            member for member in live if not in_flight_tracker.in_flight_requests.is_unsettled(member.incarnation)
        ] or live

    def _incompatible(self, error: WorkersIncompatible) -> WorkersIncompatible:
        found = next(iter(self._context.refusals.all()), None)
        if found is None:
            return error
        who = f"{found.prefill.worker_id} and {found.decode.worker_id}"
        return WorkersIncompatible(f"{error.message}; {who}: {found.reason}", reason=found.reason, **error.fields)

    def _start(self, pair: Pair) -> RequestRun:
        request = self._answer.begin(pair.prefill.capacity_len)
        context = self._context
        kind = LocalRun if pair.is_local else RequestRun
        run = kind(request, pair, channels=context.channels, clock=context.clock)
        run.on_arrival = self.on_arrival
        run.num_queued_tokens = context.num_queued_tokens()
        run.start(Visitor(context.in_flight_tracker, self.request, self._may_move))
        self.runs.append(run)
        return run

    def _take(self, run: RequestRun, emitted: CertainTokens) -> CertainTokens | None:
        first = self._answer.num_tokens
        new = self._answer.take(run.request.key.attempt, emitted.index, emitted.token_ids)
        if len(new) == len(emitted.token_ids) and (first == emitted.index > 0):
            return emitted  # the common case
        if new or emitted.finish_reason:
            logprobs = emitted.logprobs[len(emitted.token_ids) - len(new) :]
            prompt_logprobs = () if first else emitted.prompt_logprobs
            return CertainTokens(first, new, emitted.finish_reason, logprobs, prompt_logprobs)
        return None

    async def _lost(self, pair: Pair, error: BatonError) -> None:
        """End the attempt, and wait until the next one may begin.

        Raises:
            BatonError: no attempt follows.
        """
        self.close()
        reason = error.fields.get("pair_refused") if isinstance(error, TransferFailed) else None
        if reason:
            self._context.refusals.add(pair, str(reason))
            log.warning(
                "%s and %s are not paired again: %s",
                *(incarnation.worker_id for incarnation in pair.incarnations),
                reason,
            )
        if isinstance(error, HandoffTooLong):
            self._too_long.add(pair.incarnations)
        now_s = self._context.clock.now_s()
        self._outcasts.add(pair, role=error.fields.get("role") if cause_of(error) else None, now_s=now_s)
        names = [incarnation.worker_id for incarnation in pair.incarnations]
        again = self._answer.failed(error, prefill=names[0], decode=names[1], now_s=now_s)
        if again.takes_budget and (wait_s := self._context.budget.retry(now_s)):
            self._context.on_retry_refused()
            raise self._answer.unaffordable(error, wait_s)
        await self._prepare(again)
        log.warning("%s goes on elsewhere from token %d: %s", self.request.key, self._answer.num_tokens, error.message)

    async def _prepare(self, again: Again) -> None:
        if again.delay_s:
            await asyncio.sleep(again.delay_s)
        if again.cause is None:
            self._context.on_retry()
            return
        if again.cause is Cause.DEATH and self.num_migrations > 1:
            await self._settle()
        self._context.admit(self.request)
        self._context.on_migration(again.cause)

    async def _settle(self) -> None:
        """After a second broken stream, wait until it is known whether workers died, to spare a third one."""
        in_flight_requests = self._context.in_flight_tracker.in_flight_requests
        for _ in range(SETTLE_LOOKS):
            if not any(in_flight_requests.is_unsettled(incarnation) for incarnation in self._outcasts.lost):
                return
            await asyncio.sleep(SETTLE_S)

    def _may_move(self) -> bool:
        """Whether the request can leave a draining worker: a migration is left, and `_pick` would find a pair."""
        if self._pair is None or not self._answer.migrates:
            return False
        prefill, decode = self._serving(PREFILL, is_again=True), self._serving(DECODE, is_again=True)
        excluded = self._exclusions(prefill, decode)[-1]
        if any((one.incarnation, other.incarnation) not in excluded for one in prefill for other in decode):
            return True
        must_split = bool(prefill) and self.request.split_only
        return not must_split and bool(self._context.in_flight_tracker.local.able(decode, excluded))
