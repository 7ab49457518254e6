"""The admission queue: the fair queue with a clock, coroutines and measurements.

Predictions rest on what live workers report (prompt tokens per second in full steps, KV blocks) and on what the router
measures: how long requests hold KV, how long answers are, and how long they take. The router times tokens when workers
send them, however slowly a client reads. Measurements fade, and refused requests measure nothing. Before the first
measurement, or after all have faded, requests are refused only for memory. The first token must come early enough that
the rest of the answer fits the deadline; otherwise an accepted request would be late because it had waited.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from baton.core.clock import Clock
from baton.core.errors import BatonError, RequestDeadlineExceeded, as_internal
from baton.core.requests.request import GenerationRequest
from baton.router.admission.admission import Capacity, RequestWork
from baton.router.admission.deficit_round_robin import Ticket
from baton.router.admission.fair_queue import FairQueue, QueueLimits
from baton.router.placement.members import DECODE, PREFILL, Member

WEIGHT: Final = 0.05  # minimum weight of the newest measurement
HALF_LIFE_S: Final = 5.0
NUM_DEVIATIONS: Final = 2.0
CLIP: Final = 4.0  # multiple of `high` at which values are clipped, so that one request does not dominate
FLOOR_S: Final = 0.05  # values up to this are never clipped


class Estimate:
    """A running mean and mean deviation, as in TCP's retransmission timer (RFC 6298); 0 before the first measurement.

    Args:
        half_life_s: half-life of a measurement's weight.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self.latest = 0.0  # mean as of the last measurement
        self._deviation = 0.0
        self._added_s = 0.0
        self._is_empty = True

    def mean(self, now_s: float) -> float:
        """The mean; it fades with time."""
        return self.latest * self._kept(now_s)

    def high(self, now_s: float) -> float:
        """A value that is seldom exceeded; it fades with time."""
        return self._high() * self._kept(now_s)

    def add(self, value: float, now_s: float) -> None:
        """Add a measurement."""
        if self._is_empty:
            self._is_empty = False
            self.latest, self._added_s = value, now_s
            return
        value = min(value, max(CLIP * self._high(), FLOOR_S))
        weight = max(WEIGHT, 1.0 - self._kept(now_s))
        self._deviation += weight * (abs(value - self.latest) - self._deviation)
        self.latest += weight * (value - self.latest)
        self._added_s = now_s

    def _high(self) -> float:
        return self.latest + NUM_DEVIATIONS * self._deviation

    def _kept(self, now_s: float) -> float:
        kept: float = 0.5 ** (max(0.0, now_s - self._added_s) / self._half_life_s)
        return kept


REQUEST_BYTES: Final = 32 << 10  # memory of a request besides its prompt: stream, tasks, answer
TOKEN_BYTES: Final = 40  # memory of a prompt token: an int, a reference to it, its share of messages
SPARE: Final = 2.0  # until an answer exceeds this multiple of the mean length, its KV is counted
# Multiple of all KV that may be promised. Decode workers know best what fits, and preempt; this only stops floods.
OVERCOMMIT: Final = 2.0
# Multiple of all sequences that decode workers may run: those beyond them wait at the workers, in order of arrival.
SPARE_SEQS: Final = 1.25


class TakingWorkers(Protocol):
    """The workers that take new requests."""

    def live(self, role: str) -> Sequence[Member]:
        """Those of a role."""
        ...


class AdmissionTicket:
    """A request's place; always call `leave`. It leaves by itself when workers have sent the end of all its answers."""

    def __init__(self, admission_queue: "AdmissionQueue", ticket: Ticket, num_answers: int) -> None:
        self._admission_queue = admission_queue
        self._ticket = ticket
        self._num_open = num_answers
        self._has_left = False
        self._begin_s = admission_queue.clock.now_s()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_tokens = 0

    def arrived(self, num_tokens: int, is_last: bool) -> None:
        """Count new tokens of one answer, when they arrive from a worker, whether the client has read them or not."""
        self._num_tokens += num_tokens
        self._last_s = self._admission_queue.clock.now_s()
        if self._first_s is None:
            self._first_s = self._last_s
            late_s = max(0.0, self._first_s - self._begin_s - self._ticket.expected_s)
            self._admission_queue.slack.add(late_s, self._last_s)
            self._admission_queue.keep(lambda: self._admission_queue.queue.first_token(self._ticket))
            self._admission_queue.look()
        if is_last:
            self._num_open -= 1
            if not self._num_open:
                self.leave()

    def leave(self) -> None:
        """Release the place when the request has ended; later calls change nothing."""
        if not self._has_left:
            self._admission_queue.drop(self._ticket)
            self._has_left = True  # set last: if `drop` raised, the end of the request calls this again
            if self._first_s is not None:
                self._measure(self._first_s)
            self._admission_queue.look()

    def _measure(self, first_s: float) -> None:
        self._admission_queue.measure(self._last_s - self._begin_s, self._num_tokens)
        if self._num_tokens > 1:
            self._admission_queue.pace.add((self._last_s - first_s) / (self._num_tokens - 1), self._last_s)


class AdmissionQueue:
    """The router's admission queue. `look` must be called several times a second.

    Args:
        limits: limits of the queue.
        members: workers that take new requests; their capacity counts.
        clock: clock of the deadlines.
        cached_len: how many of a request's prompt tokens some worker is known to have cached.
        prefill_role: role of the workers that compute prompts; decode workers if there are none of that role.
    """

    def __init__(
        self,
        limits: QueueLimits,
        members: TakingWorkers,
        clock: Clock,
        cached_len: Callable[[GenerationRequest], int],
        prefill_role: str = PREFILL,
    ) -> None:
        self._prefill_role = prefill_role
        self.queue = FairQueue(limits)
        self.slack = Estimate()  # seconds by which first tokens come later than the workers' rates predict
        self.pace = Estimate()  # seconds from one token of an answer to the next
        self._margin_s = limits.margin_s
        self._num_ahead = limits.ahead
        self.clock = clock
        self._members = members
        self._cached_len = cached_len
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._running: dict[Ticket, None] = {}  # requests whose turn has come
        self.residence = Estimate()  # seconds that a request spends at the workers
        self.answer_len = Estimate()  # tokens; only its `latest` is used, which does not fade

    async def enter(self, request: GenerationRequest) -> AdmissionTicket:
        """Wait for a request's turn.

        Raises:
            Overloaded: it would take too long; `retry_after_s` says when there may be room.
            RequestDeadlineExceeded: its turn did not come in time after all.
        """
        now_s = self.clock.now_s()
        work = self._work(request, now_s)
        granted = asyncio.get_running_loop().create_future()
        try:
            ticket = self.queue.offer(work, now_s)
        except BatonError:
            raise
        except Exception:
            self._rebuild()
            raise
        self._waiting[ticket] = granted
        try:
            self.look()
            if not granted.done():
                async with asyncio.timeout(request.deadline_s - now_s):
                    await granted
            return AdmissionTicket(self, ticket, request.sampling.n)
        except TimeoutError:
            self._give_up(ticket)
            raise RequestDeadlineExceeded("the deadline passed before the request's turn") from None
        except BaseException:
            self._give_up(ticket)
            raise

    def look(self) -> None:
        """Update the workers' capacity, and grant the requests whose turn it is."""
        self.queue.set_capacity(self._capacity())
        self.keep(self._grant)

    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait here for each decode worker, where these compute prompts; 0 if others do.

        Workers are told, because few requests at a time wait there: how fast a step computes prompts beside its decode
        rows depends on how many tokens wait.
        """
        if self._members.live(self._prefill_role) and self._prefill_role != DECODE:
            return 0
        num_workers = max(1, len(self._members.live(DECODE)))
        return -(-self.queue.num_waiting_tokens // num_workers)

    def _grant(self) -> None:
        for ticket in self.queue.grant(self.clock.now_s()):
            granted = self._waiting[ticket]
            if not granted.done():
                granted.set_result(None)
            # Only now: if `set_result` failed, the request waits on, and its turn comes again.
            self._running[ticket] = None
            del self._waiting[ticket]

    def keep(self, change: Callable[[], None]) -> None:
        """Change the queue; if that fails, rebuild it, so that other requests are not held up."""
        try:
            change()
        except Exception as error:  # noqa: BLE001  the boundary between the requests that share the queue
            as_internal("the queue before the workers", error)
            self._rebuild()

    def drop(self, ticket: Ticket) -> None:
        """Remove a request that has ended, or no longer waits."""
        try:
            self._forget(ticket)
        except Exception as error:  # noqa: BLE001  its place must not stay taken
            as_internal("a request's leaving the queue", error)
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket, None)
        self._running.pop(ticket, None)
        self.keep(lambda: self.queue.leave(ticket))

    def _rebuild(self) -> None:
        self.queue.rebuild(tuple(self._waiting), tuple(self._running), self.clock.now_s())

    def measure(self, residence_s: float, num_tokens: int) -> None:
        """Record an ended request's time at the workers and its number of tokens."""
        now_s = self.clock.now_s()
        self.residence.add(residence_s, now_s)
        self.answer_len.add(num_tokens, now_s)

    def _give_up(self, ticket: Ticket) -> None:
        self.drop(ticket)
        self.look()

    def _work(self, request: GenerationRequest, now_s: float) -> RequestWork:
        num_answers, max_tokens = request.sampling.n, request.sampling.max_tokens
        usual_len = self.answer_len.latest
        answer_len = min(max_tokens, math.ceil(SPARE * usual_len)) if usual_len else max_tokens
        work = RequestWork(
            tenant=request.tenant,
            num_tokens=num_answers * (request.prompt_len - self._cached_len(request)),
            num_positions=max(num_answers * (request.prompt_len + answer_len), self._places(num_answers)),
            deadline_s=request.deadline_s,
            priority=request.priority,
            num_bytes=num_answers * REQUEST_BYTES + request.prompt_len * TOKEN_BYTES,
            num_answer_tokens=num_answers * min(max_tokens, math.ceil(usual_len)),
        )
        rest_s = self.slack.high(now_s) + self.pace.high(now_s) * (answer_len - 1) if usual_len else 0.0
        # A request that would be late even if it were alone is not refused for it.
        alone_s = self.queue.capacity.own_s(work) + 2 * self._margin_s
        latest_s = min(request.deadline_s, max(request.deadline_s - rest_s, now_s + alone_s))
        return dataclasses.replace(work, deadline_s=latest_s)

    def _places(self, num_answers: int) -> int:
        """KV that answers count for at least: their part of all, if as many run as workers have sequences for.

        So many short answers wait here, too, once the workers run no more sequences however much KV is free. The many
        answers of one request count for half of all at most: it does not wait until nothing else runs.
        """
        num_seqs = sum(member.state.max_num_seqs for member in self._members.live(DECODE))
        if not num_seqs:
            return 0  # not reported
        most = math.ceil(SPARE_SEQS * num_seqs) + self._num_ahead * len(self._prefill())
        num_positions = self.queue.capacity.num_positions
        return min(num_answers * (num_positions // most), num_positions // 2)

    def _prefill(self) -> Sequence[Member]:
        """Workers that compute prompts: decode workers if there are no others."""
        return self._members.live(self._prefill_role) or self._members.live(DECODE)

    def _capacity(self) -> Capacity:
        decode, prefill = self._members.live(DECODE), self._prefill()
        rates = [member.state.inventory.full_prefill_tokens_per_s for member in prefill]
        measured = [rate for rate in rates if rate > 0]
        mean = sum(measured) / len(measured) if measured else 0.0
        return Capacity(
            tokens_per_s=mean * len(prefill),
            num_workers=max(1, len(prefill)),
            num_pairs=max(1, min(len(prefill), len(decode))),
            num_positions=int(OVERCOMMIT * sum(member.capacity_len for member in decode)),
            residence_s=self.residence.mean(self.clock.now_s()),
        )
