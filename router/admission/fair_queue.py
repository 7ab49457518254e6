"""Decides which requests go to the workers, which wait, and which are refused at once. Pure; time is an argument.

A request is accepted only if its first token is predicted within its deadline, and those of all requests accepted
before it still are. Accepted requests wait here, so that the workers' own queues stay short and the order is fair: by
priority, then by tenant with deficit round robin, and likewise between a tenant's near and far deadlines. Where that
order would make a request late, the earliest deadline goes first instead, which meets all deadlines if any order does
(Jackson's rule). So the queue makes no accepted request late, as long as the workers perform as they reported.

Two rules override all predictions. While fewer requests run than there are workers of either role, and none waits, the
next request is accepted: some worker is idle, and a prediction from an earlier load may be wrong. And the router memory
that all requests take is bounded; their number is not, unless an operator sets a limit.

A tenant's part of the queue is its share among the tenants that sent requests recently, so a tenant that sends more is
refused more. Within a tenant, deadlines of about the same length (a *band*, a power of two of seconds) share its part
alike. Far deadlines, of which more fit into the queue, would take all of it otherwise. A priority may fill only a part
of the queue, so that higher ones find room; what counts is the work due no later than the new request. Refusals say
when to retry.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.errors import Overloaded
from baton.router.admission.admission import HIGH, LOW, NORMAL, Capacity, RequestWork
from baton.router.admission.deficit_round_robin import NEAREST_S, DeficitRoundRobin, Ticket, band_of

MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 30.0
MAX_TENANTS: Final = 4096  # maximum number of remembered tenants
ROOM: Final = {LOW: 0.4, NORMAL: 0.7, HIGH: 1.0}  # part of the queue for each priority together with higher ones


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of the queue.

    Attributes:
        max_waiting: requests; None: as many as their deadlines and the memory allow.
        max_wait_s: maximum wait of a request, however far its deadline is; None: only its deadline counts.
        max_bytes: memory of all requests that wait or run.
        max_running: requests that are at workers and have not ended.
        ahead: granted requests per prefill worker without a first token yet; further ones wait,
        ahead_s: unless all granted work is less than this many seconds, so that short prompts can fill a step.
        memory_s: how long a tenant, or a band of its deadlines, keeps its part of the queue after its last request.
        stall_s: a request that takes twice the predicted time to its first token, plus this, is waiting for something
            other than a prefill worker, and no longer holds up the others.
        margin_s: safety margin between predictions and deadlines.
    """

    max_waiting: int | None = None
    max_wait_s: float | None = None
    max_bytes: int = 1 << 30
    max_running: int = 8192
    ahead: int = 4
    ahead_s: float = 0.2
    memory_s: float = 5.0
    stall_s: float = 1.0
    margin_s: float = 0.05


@dataclass(slots=True)
class _Band:
    """One tenant's requests with about as long until their deadlines.

    All of them are judged by the nearest deadline asked for recently. Otherwise the farther half of a band would keep
    out the nearer one. But the nearest band has no lower end: a deadline that nothing could meet would keep out all
    others. So `NEAREST_S` stands for all deadlines below it.

    Attributes:
        asked_s: when the last request came.
        room_s: seconds until the nearest deadline, at least `NEAREST_S`; it grows with time, as long as no such request
            comes.
    """

    asked_s: float
    room_s: float


class FairQueue:
    """The queue. Call `offer`, then `grant` whenever something changes; every ticket ends in `leave`.

    Args:
        limits: limits of the queue.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._capacity = Capacity()
        self._clear()
        self._asked_s: dict[str, float] = {}  # when each tenant last sent a request
        self._bands: dict[str, dict[int, _Band]] = {}  # of each of these tenants, by number
        self.num_refused: Counter[str] = Counter()  # by reason

    def _clear(self) -> None:
        self._ring = DeficitRoundRobin()
        self._waiting: list[tuple[float, int, Ticket]] = []  # by deadline
        self._order: dict[Ticket, tuple[float, int, Ticket]] = {}
        self._num_offered = 0
        self._ahead: dict[Ticket, float] = {}  # granted, without a first token; until when each counts
        self._num_ahead_tokens = 0  # sum over `_ahead`
        self._running: dict[Ticket, None] = {}  # granted
        self._num_positions = 0  # sum over `_running`
        self._num_bytes = 0  # memory of all requests
        self._waiting_lens: list[int] = []  # positions of each waiting request, sorted
        self._num_waiting_tokens = 0  # sums over the waiting requests, likewise
        self._num_waiting_positions = 0
        self._most_tokens = 0  # largest waiting request; may be one that left, until none waits
        self._num_waiting_of: Counter[tuple[str, int]] = Counter()  # by tenant and band

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that these would have computed."""
        return self._num_waiting_tokens

    @property
    def num_running(self) -> int:
        """Number of requests that were granted and have not left."""
        return len(self._running)

    @property
    def capacity(self) -> Capacity:
        """The workers' current capacity."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Router memory that all waiting and running requests take."""
        return self._num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether some worker of each role is idle, and no request waits."""
        return not self._waiting and len(self._running) < max(1, self._capacity.num_pairs)

    def set_capacity(self, capacity: Capacity) -> None:
        """Set the workers' capacity from now on."""
        self._capacity = capacity

    def offer(self, work: RequestWork, now_s: float) -> Ticket:
        """Accept a request into the queue, or refuse it.

        Raises:
            Overloaded: it would wait too long, make others late, or exceed its tenant's or priority's part of the
                queue; `retry_after_s` says when there may be room.
        """
        self._remember(work.tenant, now_s)
        ticket = Ticket(work, self._remember_band(work, now_s))
        if not self.is_idle:
            self._require_room(ticket, now_s)
        self._wait(ticket, now_s)
        return ticket

    def grant(self, now_s: float) -> list[Ticket]:
        """Grant and return the tickets whose turn it is now, in order."""
        granted: list[Ticket] = []
        for ticket in [ticket for ticket, until_s in self._ahead.items() if until_s <= now_s]:
            self._discount_ahead(ticket)
        while self._waiting and self._may_start():
            ticket = self._choose(now_s)
            if not self._has_kv(ticket.work):
                break
            expected_s = self._ahead_s() + self._capacity.own_s(ticket.work)
            self._stop_waiting(ticket)
            self._ring.take(ticket)
            self._run(ticket)
            ticket.expected_s = expected_s
            self._count_ahead(ticket, now_s + 2 * expected_s + self._limits.stall_s)
            granted.append(ticket)
        return granted

    def first_token(self, ticket: Ticket) -> None:
        """Record that a granted request's prompt is computed; repeated calls are harmless."""
        self._discount_ahead(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a request that has ended, or no longer waits."""
        self._num_bytes -= ticket.work.num_bytes
        if not ticket.granted:
            self._stop_waiting(ticket)
            self._ring.drop(ticket)
            return
        self._discount_ahead(ticket)
        del self._running[ticket]
        self._num_positions -= ticket.work.num_positions

    def predicted_s(self, work: RequestWork) -> float:
        """Upper bound of the seconds until a request's first token if it were offered now."""
        return self._ahead_s() + self._queue_s() + self._capacity.own_s(work)

    def rebuild(self, waiting: Iterable[Ticket], running: Iterable[Ticket], now_s: float) -> None:
        """Start over with these tickets, after an exception left the counts undefined."""
        self._clear()
        for ticket in running:
            self._run(ticket)
            self._num_bytes += ticket.work.num_bytes
        for ticket in waiting:
            ticket.granted = False
            self._wait(ticket, now_s)

    def _wait(self, ticket: Ticket, now_s: float) -> None:
        work = ticket.work
        self._num_offered += 1
        self._order[ticket] = (self._latest_s(work, now_s), self._num_offered, ticket)
        insort(self._waiting, self._order[ticket])
        insort(self._waiting_lens, work.num_positions)
        self._num_waiting_tokens += work.num_tokens
        self._num_waiting_positions += work.num_positions
        self._most_tokens = max(self._most_tokens, work.num_tokens)
        self._ring.add(ticket)
        self._num_waiting_of[work.tenant, ticket.band] += 1
        self._num_bytes += work.num_bytes

    def _run(self, ticket: Ticket) -> None:
        ticket.granted = True
        self._running[ticket] = None
        self._num_positions += ticket.work.num_positions

    # Predictions model the workers as one server with the sum of their rates, which serves granted work, then the
    # queue.

    def _late_s(self, ticket: Ticket, now_s: float) -> float:
        """Worst predicted lateness of all waiting requests with this one among them; <= 0 if none would be late."""
        latest_s = self._latest_s(ticket.work, now_s)
        first_s = min(latest_s, self._waiting[0][0]) if self._waiting else latest_s
        if now_s + self._at_most_s(ticket.work) <= first_s:
            return 0.0
        at = bisect_left(self._waiting, latest_s, key=lambda item: item[0])
        tickets = [item[2] for item in self._waiting]
        return self._worst_s([*tickets[:at], ticket, *tickets[at:]], now_s + self._ahead_s(), now_s)

    def _worst_s(self, tickets: list[Ticket], start_s: float, now_s: float) -> float:
        worst_s = float("-inf")
        capacity, margin_s = self._capacity, self._limits.margin_s
        for ticket in tickets:
            work = ticket.work
            order = self._order.get(ticket)
            latest_s = self._latest_s(work, now_s) if order is None else order[0]
            worst_s = max(worst_s, start_s + capacity.own_s(work) + margin_s - latest_s)
            start_s += capacity.share_s(work)
        return worst_s

    def _choose(self, now_s: float) -> Ticket:
        """Choose the ticket whose turn it is, unless that would make a request late.

        A request that would be late even in the order of deadlines does not count.
        """
        ticket, first = self._ring.next(), self._waiting[0][2]
        assert ticket is not None
        if ticket is first or now_s + self._at_most_s() <= self._waiting[0][0]:
            return ticket
        others = [item[2] for item in self._waiting if item[2] is not ticket]
        start_s = now_s + self._ahead_s()
        if self._worst_s(others, start_s + self._capacity.share_s(ticket.work), now_s) <= 0:
            return ticket
        return first

    def _ahead_s(self) -> float:
        """Seconds until granted work lets the queue's first request start: its prompts are computed, and KV is free."""
        prefill_s = self._prefill_s()
        budget = self._capacity.num_positions
        if not budget or not self._waiting:
            return prefill_s
        largest = self._waiting_lens[-1]
        return max(prefill_s, self._capacity.kv_s(max(0, self._num_positions + largest - budget)))

    def _at_most_s(self, work: RequestWork | None = None) -> float:
        """Upper bound of the predicted first token of every waiting request and one more, in any order."""
        capacity, tokens, positions = self._capacity, self._num_waiting_tokens, self._num_waiting_positions
        most = self._most_tokens
        if work is not None:
            tokens, positions = tokens + work.num_tokens, positions + work.num_positions
            most = max(most, work.num_tokens)
        own_s = most * capacity.num_workers / capacity.tokens_per_s if capacity.tokens_per_s else 0.0
        return self._ahead_s() + self._sum_s(tokens, positions) + own_s + self._limits.margin_s

    def _sum_s(self, num_tokens: int, num_positions: int) -> float:
        """Upper bound of the summed `share_s` of requests with these totals."""
        prefill_s = num_tokens / self._capacity.tokens_per_s if self._capacity.tokens_per_s else 0.0
        return prefill_s + self._capacity.kv_s(num_positions)

    def _prefill_s(self) -> float:
        return self._num_ahead_tokens / self._capacity.tokens_per_s if self._capacity.tokens_per_s else 0.0

    def _count_ahead(self, ticket: Ticket, until_s: float) -> None:
        self._ahead[ticket] = until_s
        self._num_ahead_tokens += ticket.work.num_tokens

    def _discount_ahead(self, ticket: Ticket) -> None:
        if self._ahead.pop(ticket, None) is not None:
            self._num_ahead_tokens -= ticket.work.num_tokens

    def _queue_s(self) -> float:
        return sum(self._capacity.share_s(item[2].work) for item in self._waiting)

    def _latest_s(self, work: RequestWork, now_s: float) -> float:
        max_wait_s = self._limits.max_wait_s
        return work.deadline_s if max_wait_s is None else min(work.deadline_s, now_s + max_wait_s)

    # The parts of tenants and priorities.

    def _require_room(self, ticket: Ticket, now_s: float) -> None:
        """Refuse a request that does not fit beside the current ones."""
        work, limits = ticket.work, self._limits
        if limits.max_waiting is not None and len(self._waiting) >= limits.max_waiting:
            raise self._refusal("queue", f"{len(self._waiting)} requests wait, the limit", self._queue_s())
        if self._num_bytes + work.num_bytes > limits.max_bytes:
            message = f"requests that are here take {self._num_bytes} bytes of memory, of {limits.max_bytes}"
            raise self._refusal("memory", message, self._queue_s())
        self._require_part(ticket, now_s)
        late_s = self._late_s(ticket, now_s)
        if late_s > 0:
            message = f"the first token would be {late_s:.2f} s late, this request's or that of one before it"
            raise self._refusal("deadline", message, late_s)

    def _require_part(self, ticket: Ticket, now_s: float) -> None:
        """Refuse a request beyond its priority's, tenant's or band's part of the queue.

        Parts are seconds of the workers' time.
        """
        work, bands = ticket.work, self._bands[ticket.work.tenant]
        latest_s = self._latest_s(work, now_s)
        own_s = self._capacity.own_s(work)
        share = 1 / (len(self._asked_s) * len(bands))
        room_s = min(bands[ticket.band].room_s, latest_s - now_s)
        part_s = share * ROOM[work.priority] * max(0.0, room_s - own_s)
        tokens = self._num_waiting_tokens + work.num_tokens
        positions = self._num_waiting_positions + work.num_positions
        if self._sum_s(tokens, positions) <= part_s:
            return  # within one band's part even if all waiting work were that band's
        limit_s = ROOM[work.priority] * max(0.0, latest_s - now_s - own_s)
        before_s = self._before_s(latest_s)
        if work.priority < HIGH and before_s > limit_s:
            message = f"the queue is full to {ROOM[work.priority]:.0%}, beyond which this priority may not fill it"
            raise self._refusal("priority", message, before_s - limit_s)
        if not self._num_waiting_of[work.tenant, ticket.band]:
            return  # every band may have one request waiting
        alike = (item[2].work for item in self._waiting if item[2].band == ticket.band)
        waiting_s = sum(self._capacity.share_s(other) for other in alike if other.tenant == work.tenant)
        if waiting_s + self._capacity.share_s(work) > part_s:
            message = f"this tenant has its part of the queue, one of {len(self._asked_s)}"
            if len(bands) > 1:
                message += f", and of that deadlines like this one have theirs, one of {len(bands)}"
            raise self._refusal("tenant", message, (waiting_s - part_s) / share)

    def _before_s(self, latest_s: float) -> float:
        """Seconds of waiting work that is due no later.

        Work that is due later can go after the request. So distant deadlines, of which more fit into the queue, take no
        room from near ones; otherwise a request with a near deadline would hardly ever be accepted.
        """
        at = bisect_right(self._waiting, latest_s, key=lambda item: item[0])
        return sum(self._capacity.share_s(item[2].work) for item in self._waiting[:at])

    def _remember(self, tenant: str, now_s: float) -> None:
        self._asked_s.pop(tenant, None)
        self._asked_s[tenant] = now_s  # dicts keep insertion order: the tenant silent for longest comes first
        while len(self._asked_s) > 1:
            oldest = next(iter(self._asked_s))
            is_old = self._asked_s[oldest] < now_s - self._limits.memory_s
            if not is_old and len(self._asked_s) <= MAX_TENANTS:
                break
            del self._asked_s[oldest]
            self._bands.pop(oldest, None)

    def _remember_band(self, work: RequestWork, now_s: float) -> int:
        """Return the number of a request's band, and record that its tenant has sent a request of it."""
        room_s = self._latest_s(work, now_s) - now_s
        number, room_s = band_of(room_s), max(room_s, NEAREST_S)
        bands = self._bands.setdefault(work.tenant, {})
        for other in [other for other, band in bands.items() if band.asked_s < now_s - self._limits.memory_s]:
            del bands[other]
        if number in bands:
            room_s = min(room_s, bands[number].room_s + now_s - bands[number].asked_s)
        bands[number] = _Band(now_s, room_s)
        return number

    # Starting requests.

    def _may_start(self) -> bool:
        has_room = len(self._ahead) < self._limits.ahead * self._capacity.num_workers
        has_room = has_room or self._prefill_s() < self._limits.ahead_s
        return has_room and len(self._running) < self._limits.max_running

    def _has_kv(self, work: RequestWork) -> bool:
        budget = self._capacity.num_positions
        return not budget or not self._running or self._num_positions + work.num_positions <= budget

    def _stop_waiting(self, ticket: Ticket) -> None:
        item, work = self._order.pop(ticket), ticket.work
        del self._waiting[bisect_left(self._waiting, item[:2], key=lambda found: found[:2])]
        del self._waiting_lens[bisect_left(self._waiting_lens, work.num_positions)]
        self._num_waiting_tokens -= work.num_tokens
        self._num_waiting_positions -= work.num_positions
        if not self._waiting:
            self._most_tokens = 0
        self._num_waiting_of[work.tenant, ticket.band] -= 1
        if not self._num_waiting_of[work.tenant, ticket.band]:
            del self._num_waiting_of[work.tenant, ticket.band]

    def _refusal(self, reason: str, message: str, wait_s: float) -> Overloaded:
        self.num_refused[reason] += 1
        retry_after_s = round(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S), 2)
        return Overloaded(f"{message}; try again in {retry_after_s:g} s", reason=reason, retry_after_s=retry_after_s)


class AdmissionCollector(Collector):
    """Exports one queue's metrics."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        waiting = GaugeMetricFamily("baton_router_requests_waiting", "Requests that wait at the router for their turn")
        waiting.add_metric((), self._queue.num_waiting)
        yield waiting
        refused = CounterMetricFamily(
            "baton_router_requests_refused", "Requests that were refused a place, by the reason", labels=("reason",)
        )
        for reason, count in tuple(self._queue.num_refused.items()):
            refused.add_metric((reason,), count)
        yield refused
