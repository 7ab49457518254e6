"""Where requests wait for their turn: the fair queue, with a clock and coroutines around it.

What is predicted rests on what live workers report: prompt tokens per second, KV blocks; and on what passes here: how
long requests hold KV, how long answers are, and how long they take. Before anything was measured, nothing is refused
but by number. A request must have its first token early enough that the rest of its answer still fits its deadline:
else one that was accepted would be late because it had waited.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Final

from baton.core.clock import Clock
from baton.core.errors import RequestDeadlineExceeded
from baton.core.request import GenerationRequest
from baton.router.estimate import Estimate
from baton.router.fair_queue import FairQueue, QueueLimits
from baton.router.fair_ring import Ticket
from baton.router.members import DECODE, PREFILL, Members
from baton.router.work import Capacity, Work

WEIGHT: Final = 0.05  # of the newest in what was measured here
SPARE: Final = 2.0  # an answer may be so much longer than the mean before its KV is not counted
OVERCOMMIT: Final = 2.0  # times all KV may be promised: decode workers know best, and preempt; this only stops floods


class Turn:
    """A request's turn; `leave` in any case."""

    def __init__(self, gate: "Gate", ticket: Ticket) -> None:
        self._gate = gate
        self._ticket = ticket
        self._has_first_token = False
        self._has_left = False
        self._begin_s = gate.clock.now_s()
        self._first_s = 0.0
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        """So many more tokens came."""
        self._num_tokens += num_tokens
        if not self._has_first_token:
            self._has_first_token = True
            self._first_s = self._gate.clock.now_s()
            self._gate.slack.add(max(0.0, self._first_s - self._begin_s - self._ticket.expected_s))
            self._gate.queue.first_token(self._ticket)
            self._gate.look()

    def leave(self) -> None:
        """The request has ended; later calls change nothing."""
        if not self._has_left:
            self._has_left = True
            if self._has_first_token:
                now_s = self._gate.clock.now_s()
                self._gate.measure(now_s - self._begin_s, self._num_tokens)
                if self._num_tokens > 1:
                    self._gate.pace.add((now_s - self._first_s) / (self._num_tokens - 1))
            self._gate.queue.leave(self._ticket)
            self._gate.look()


class Gate:
    """Call `look` several times a second.

    Args:
        limits: of the queue.
        members: whose capacity it is.
        clock: that deadlines are read from.
        cached_len: how many tokens of a prompt some worker has cached, as far as is known.
    """

    def __init__(
        self,
        limits: QueueLimits,
        members: Members,
        clock: Clock,
        cached_len: Callable[[GenerationRequest], int],
    ) -> None:
        self.queue = FairQueue(limits)
        self.slack = Estimate()  # seconds by which first tokens come later than the workers' rates say
        self.pace = Estimate()  # seconds from one token of an answer to the next
        self._margin_s = limits.margin_s
        self.clock = clock
        self._members = members
        self._cached_len = cached_len
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._residence_s = 0.0
        self._answer_len = 0.0

    async def enter(self, request: GenerationRequest) -> Turn:
        """Wait for a request's turn.

        Raises:
            Overloaded: it would take too long; `retry_after_s` says when there may be room.
            RequestDeadlineExceeded: its turn did not come in time after all.
        """
        now_s = self.clock.now_s()
        ticket = self.queue.offer(self._work(request, now_s), now_s)
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self.look()
        try:
            if not turn.done():
                async with asyncio.timeout(request.deadline_s - now_s):
                    await turn
        except TimeoutError:
            self._give_up(ticket)
            raise RequestDeadlineExceeded("the deadline passed before the request's turn") from None
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise
        return Turn(self, ticket)

    def look(self) -> None:
        """Hear what the workers can do, and let in whose turn it is."""
        self.queue.set_capacity(self._capacity())
        for ticket in self.queue.grant(self.clock.now_s()):
            turn = self._waiting.pop(ticket)
            if not turn.done():
                turn.set_result(None)

    def measure(self, residence_s: float, num_tokens: int) -> None:
        """A request has ended, after so long, with so many tokens."""
        weight = WEIGHT if self._residence_s else 1.0
        self._residence_s += weight * (residence_s - self._residence_s)
        self._answer_len += weight * (num_tokens - self._answer_len)

    def _give_up(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket, None)
        self.queue.leave(ticket)
        self.look()

    def _work(self, request: GenerationRequest, now_s: float) -> Work:
        num_answers, max_tokens = request.sampling.n, request.sampling.max_tokens
        answer_len = min(max_tokens, math.ceil(SPARE * self._answer_len)) if self._answer_len else max_tokens
        work = Work(
            tenant=request.tenant,
            num_tokens=num_answers * (request.prompt_len - self._cached_len(request)),
            num_positions=num_answers * (request.prompt_len + answer_len),
            deadline_s=request.deadline_s,
            priority=request.priority,
        )
        rest_s = self.slack.high + self.pace.high * (answer_len - 1) if self._answer_len else 0.0
        # Who would be late even if nobody else were here is not refused for it.
        alone_s = self.queue.capacity.own_s(work) + 2 * self._margin_s
        latest_s = min(request.deadline_s, max(request.deadline_s - rest_s, now_s + alone_s))
        return dataclasses.replace(work, deadline_s=latest_s)

    def _capacity(self) -> Capacity:
        decode = self._members.live(DECODE)
        prefill = self._members.live(PREFILL) or decode  # which compute prompts then, or nobody does
        rates = [member.state.inventory.prefill_tokens_per_s for member in prefill]
        measured = [rate for rate in rates if rate > 0]
        mean = sum(measured) / len(measured) if measured else 0.0
        return Capacity(
            tokens_per_s=mean * len(prefill),
            num_workers=max(1, len(prefill)),
            num_positions=int(OVERCOMMIT * sum(member.capacity_len for member in decode)),
            residence_s=self._residence_s,
        )
