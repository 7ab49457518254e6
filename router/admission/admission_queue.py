"""Where requests wait for their turn: the fair queue, with a clock and coroutines around it.

What is predicted rests on what live workers report: prompt tokens per second in full steps, KV blocks; and on what
passes here: how long requests hold KV, how long answers are, and how long they take, all of it by when workers sent
what they sent, however slowly a client reads it. What was measured fades; what is refused measures nothing. Before
anything was measured, or after it has faded, nothing is refused but for memory. A request must have its first token
early enough that the rest of its answer still fits its deadline: else one that was accepted would be late because it
had waited.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Final

from baton.core.clock import Clock
from baton.core.errors import BatonError, RequestDeadlineExceeded, as_internal
from baton.core.requests.request import GenerationRequest
from baton.router.admission.admission import Capacity, RequestWork
from baton.router.admission.fair_queue import FairQueue, QueueLimits, Ticket
from baton.router.placement.members import DECODE, PREFILL, Members

WEIGHT: Final = 0.05  # of the newest, at least
HALF_LIFE_S: Final = 5.0
NUM_DEVIATIONS: Final = 2.0
CLIP: Final = 4.0  # times what is seldom exceeded: one request must not tell for all
FLOOR_S: Final = 0.05  # less is never clipped


class Estimate:
    """A running mean and mean deviation, of TCP's retransmission timer (RFC 6298); 0 before anything is measured.

    Args:
        half_life_s: of a measurement.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self.latest = 0.0  # the mean as of the last measurement
        self._deviation = 0.0
        self._added_s = 0.0
        self._is_empty = True

    def mean(self, now_s: float) -> float:
        """The mean; it fades."""
        return self.latest * self._kept(now_s)

    def high(self, now_s: float) -> float:
        """Seldom exceeded; it fades."""
        return self._high() * self._kept(now_s)

    def add(self, value: float, now_s: float) -> None:
        """A new measurement."""
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


REQUEST_BYTES: Final = 32 << 10  # that a request takes beside its prompt: its stream, tasks, answer
TOKEN_BYTES: Final = 40  # that a token of a prompt takes: an int, a reference to it, its part of messages
SPARE: Final = 2.0  # an answer may be so much longer than the mean before its KV is not counted
OVERCOMMIT: Final = 2.0  # times all KV may be promised: decode workers know best, and preempt; this only stops floods


class AdmissionTicket:
    """A request's turn; `leave` in any case. It ends by itself when workers have sent the last of all its answers."""

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
        """So many more tokens came from a worker, for one of its answers; called when they do, read or not."""
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
        """The request has ended; later calls change nothing."""
        if not self._has_left:
            self._admission_queue.drop(self._ticket)
            self._has_left = True  # not before: if that raised, the end of the request calls this again
            if self._first_s is not None:
                self._measure(self._first_s)
            self._admission_queue.look()

    def _measure(self, first_s: float) -> None:
        self._admission_queue.measure(self._last_s - self._begin_s, self._num_tokens)
        if self._num_tokens > 1:
            self._admission_queue.pace.add((self._last_s - first_s) / (self._num_tokens - 1), self._last_s)


class AdmissionQueue:
    """Call `look` several times a second.

    Args:
        limits: of the queue.
        members: whose capacity it is.
        clock: that deadlines are read from.
        cached_len: how many tokens of a prompt some worker has cached, as far as is known.
        prefill_role: whose workers compute prompts; decode workers if there are none.
    """

    def __init__(
        self,
        limits: QueueLimits,
        members: Members,
        clock: Clock,
        cached_len: Callable[[GenerationRequest], int],
        prefill_role: str = PREFILL,
    ) -> None:
        self._prefill_role = prefill_role
        self.queue = FairQueue(limits)
        self.slack = Estimate()  # seconds by which first tokens come later than the workers' rates say
        self.pace = Estimate()  # seconds from one token of an answer to the next
        self._margin_s = limits.margin_s
        self.clock = clock
        self._members = members
        self._cached_len = cached_len
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._running: dict[Ticket, None] = {}  # those whose turn has come
        self.residence = Estimate()  # seconds for which a request is with workers
        self.answer_len = Estimate()  # tokens; what was learnt of it stays until more is learnt

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
        """Hear what the workers can do, and let in whose turn it is."""
        self.queue.set_capacity(self._capacity())
        self.keep(self._grant)

    def _grant(self) -> None:
        for ticket in self.queue.grant(self.clock.now_s()):
            granted = self._waiting[ticket]
            if not granted.done():
                granted.set_result(None)
            # Only now: one that was not told waits on, and its turn comes again.
            self._running[ticket] = None
            del self._waiting[ticket]

    def keep(self, change: Callable[[], None]) -> None:
        """Change the queue. What goes wrong in it must not hold up those who are not to blame: it begins anew."""
        try:
            change()
        except Exception as error:  # noqa: BLE001  the boundary between the requests that share the queue
            as_internal("the queue before the workers", error)
            self._rebuild()

    def drop(self, ticket: Ticket) -> None:
        """A request has ended, or waits no more."""
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
        """A request has ended, after so long, with so many tokens."""
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
            num_positions=num_answers * (request.prompt_len + answer_len),
            deadline_s=request.deadline_s,
            priority=request.priority,
            num_bytes=num_answers * REQUEST_BYTES + request.prompt_len * TOKEN_BYTES,
        )
        rest_s = self.slack.high(now_s) + self.pace.high(now_s) * (answer_len - 1) if usual_len else 0.0
        # A request that would be late even if it were alone is not refused for it.
        alone_s = self.queue.capacity.own_s(work) + 2 * self._margin_s
        latest_s = min(request.deadline_s, max(request.deadline_s - rest_s, now_s + alone_s))
        return dataclasses.replace(work, deadline_s=latest_s)

    def _capacity(self) -> Capacity:
        decode = self._members.live(DECODE)
        prefill = self._members.live(self._prefill_role) or decode  # which compute prompts then, or no worker does
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
