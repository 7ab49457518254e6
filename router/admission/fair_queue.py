"""Who may go to the workers, who waits, and who is refused at once. Pure: time and capacity are given.

A request is accepted only if its first token is predicted within its deadline, and those of all accepted before it
still are. Accepted ones wait here, so that the workers' own queues stay short and turns are fair: by priority, then
tenants by deficit round robin. Where that order would make a request late, the earliest deadline goes first
instead, which meets all deadlines if any order does (Jackson's rule). So no accepted request is late because of the
queue, as long as the workers do what they reported.

Two rules stand above all predictions. While fewer requests run than there are workers of either role, and none waits,
the next one is accepted: some worker has nothing to do, and what was predicted from an earlier load may be wrong. And
what all that are here take of the router's memory is bounded; their number is not, unless an operator says so.

A tenant's part of the queue is its share among the tenants that have asked lately, so who asks more is refused more.
A priority may fill only a part of the queue, so that higher ones find room; what counts is due no later than the
request that comes. Refusals say when to try again.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.errors import Overloaded
from baton.router.admission.admission import HIGH, LOW, NORMAL, PRIORITIES, Capacity, RequestWork

QUANTUM: Final = 512  # tokens


class Ticket:
    """One request's place."""

    __slots__ = ("expected_s", "granted", "work")

    def __init__(self, work: RequestWork) -> None:
        self.work = work
        self.granted = False
        self.expected_s = 0.0  # from the grant to the first token


class DeficitRoundRobin:
    """Tickets by priority and tenant.

    Args:
        quantum: tokens that a turn is worth.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        assert quantum > 0
        self._quantum = quantum
        self._queues: dict[tuple[int, str], deque[Ticket]] = {}
        self._turns: dict[int, deque[str]] = {priority: deque() for priority in PRIORITIES}
        self._deficits: dict[tuple[int, str], float] = {}

    def add(self, ticket: Ticket) -> None:
        """Behind the others of its tenant and priority."""
        key = (ticket.work.priority, ticket.work.tenant)
        if key not in self._queues:
            self._queues[key] = deque()
            self._deficits[key] = 0.0
            self._turns[ticket.work.priority].append(ticket.work.tenant)
        self._queues[key].append(ticket)

    def next(self) -> Ticket | None:
        """Whose turn it is; it stays until it is taken."""
        for priority in PRIORITIES:
            turns = self._turns[priority]
            if not turns:
                continue
            if self._lacks(priority, turns[0]) > 0:
                self._skip_rounds(priority)
            while self._lacks(priority, turns[0]) > 0:
                turns.rotate(-1)
                self._deficits[priority, turns[0]] += self._quantum
            return self._queues[priority, turns[0]][0]
        return None

    def take(self, ticket: Ticket) -> None:
        """Remove a ticket, and charge its tenant."""
        key = self._remove(ticket)
        if key in self._deficits:
            self._deficits[key] -= ticket.work.num_tokens

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket that is not served."""
        self._remove(ticket)

    def _lacks(self, priority: int, tenant: str) -> float:
        """Tokens that a tenant's next request needs beyond what the tenant may have."""
        return self._queues[priority, tenant][0].work.num_tokens - self._deficits[priority, tenant]

    def _skip_rounds(self, priority: int) -> None:
        """Give all tenants at once the rounds in which none would be served."""
        turns = self._turns[priority]
        rounds = min(math.ceil(self._lacks(priority, tenant) / self._quantum) for tenant in turns) - 1
        if rounds > 0:
            for tenant in turns:
                self._deficits[priority, tenant] += rounds * self._quantum

    def _remove(self, ticket: Ticket) -> tuple[int, str]:
        key = (ticket.work.priority, ticket.work.tenant)
        self._queues[key].remove(ticket)
        if not self._queues[key]:
            del self._queues[key], self._deficits[key]
            self._turns[ticket.work.priority].remove(ticket.work.tenant)
        return key


MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 30.0
MAX_TENANTS: Final = 4096  # that are remembered for having asked
ROOM: Final = {LOW: 0.4, NORMAL: 0.7, HIGH: 1.0}  # part of the queue that each priority may fill, with those above it


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What bounds the queue.

    Attributes:
        max_waiting: requests; None: as many as their deadlines and the memory allow.
        max_wait_s: no request waits longer than so, however far its deadline is; None: its deadline alone counts.
        max_bytes: of memory that requests take which wait or run.
        max_running: requests that are with workers and have not ended.
        ahead: requests that each prefill worker may have been given without a first token yet; more wait here,
        ahead_s: unless all that workers were given is less than so many seconds' work, so that short ones fill a step.
        memory_s: a tenant has a part of the queue for so long after it asked.
        stall_s: a request that takes twice as long to its first token as it should, and so much more, waits for
            something else than a prefill worker, and does not hold the others up.
        margin_s: predictions must keep so far from deadlines.
    """

    max_waiting: int | None = None
    max_wait_s: float | None = None
    max_bytes: int = 1 << 30
    max_running: int = 8192
    ahead: int = 4
    ahead_s: float = 0.1
    memory_s: float = 5.0
    stall_s: float = 1.0
    margin_s: float = 0.05


class FairQueue:
    """Call `offer`, then `grant` whenever something changed; every ticket ends in `leave`.

    Args:
        limits: of the queue.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._capacity = Capacity()
        self._clear()
        self._asked_s: dict[str, float] = {}  # tenants, when they last asked
        self.num_refused: Counter[str] = Counter()  # by reason

    def _clear(self) -> None:
        self._ring = DeficitRoundRobin()
        self._waiting: list[tuple[float, int, Ticket]] = []  # by deadline
        self._order: dict[Ticket, tuple[float, int, Ticket]] = {}
        self._num_offered = 0
        self._ahead: dict[Ticket, float] = {}  # granted, without a first token: until when they count
        self._num_ahead_tokens = self._num_ahead_positions = 0  # of those
        self._running: dict[Ticket, None] = {}  # granted
        self._num_positions = 0  # of those
        self._num_bytes = 0  # of all that are here
        self._waiting_lens: list[int] = []  # positions of each that waits, in order
        self._num_waiting_tokens = 0  # of those, likewise
        self._num_waiting_positions = 0
        self._most_tokens = 0  # of one of those; of some that left, too, until none waits
        self._num_waiting_of: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that were granted and have not left."""
        return len(self._running)

    @property
    def capacity(self) -> Capacity:
        """What the workers can do."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Of memory that the requests take which are here."""
        return self._num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether some worker of each role has nothing to do, and no request waits."""
        return not self._waiting and len(self._running) < max(1, self._capacity.num_pairs)

    def set_capacity(self, capacity: Capacity) -> None:
        """What the workers can do from now on."""
        self._capacity = capacity

    def offer(self, work: RequestWork, now_s: float) -> Ticket:
        """A place for a request.

        Raises:
            Overloaded: it would wait too long, make others late, or take more than its tenant's or priority's part;
                `retry_after_s` says when there may be room.
        """
        self._remember(work.tenant, now_s)
        ticket = Ticket(work)
        if not self.is_idle:
            self._require_room(ticket, now_s)
        self._wait(ticket, now_s)
        return ticket

    def grant(self, now_s: float) -> list[Ticket]:
        """The tickets whose turn it is now, in order."""
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
        """A granted request's prompt is computed; said twice is fine."""
        self._discount_ahead(ticket)

    def leave(self, ticket: Ticket) -> None:
        """A request has ended, or waits no more."""
        self._num_bytes -= ticket.work.num_bytes
        if not ticket.granted:
            self._stop_waiting(ticket)
            self._ring.drop(ticket)
            return
        self._discount_ahead(ticket)
        del self._running[ticket]
        self._num_positions -= ticket.work.num_positions

    def predicted_s(self, work: RequestWork) -> float:
        """Seconds until a request's first token if it were offered now, at the most."""
        return self._ahead_s() + self._queue_s() + self._capacity.own_s(work)

    def rebuild(self, waiting: Iterable[Ticket], running: Iterable[Ticket], now_s: float) -> None:
        """Begin anew with these, after an exception left it unknown what was counted."""
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
        self._num_waiting_of[work.tenant] += 1
        self._num_bytes += work.num_bytes

    def _run(self, ticket: Ticket) -> None:
        ticket.granted = True
        self._running[ticket] = None
        self._num_positions += ticket.work.num_positions

    # Predictions: the workers as one server of all their rates, which works on what it was given, then on the queue.

    def _late_s(self, ticket: Ticket, now_s: float) -> float:
        """By how much the worst of all would be late with this one among them; <= 0: none is."""
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
        """Whose turn it is, unless that would make a request late that is not late in order of deadlines."""
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
        """Until what was granted lets the first of the queue start: its prompts are computed, or KV is free."""
        prefill_s = self._prefill_s()
        budget = self._capacity.num_positions
        if not budget or not self._waiting:
            return prefill_s
        largest = self._waiting_lens[-1]
        return max(prefill_s, self._capacity.kv_s(max(0, self._num_positions + largest - budget)))

    def _at_most_s(self, work: RequestWork | None = None) -> float:
        """No first token of those that wait, and of one more, is predicted later than so, in whatever order."""
        capacity, tokens, positions = self._capacity, self._num_waiting_tokens, self._num_waiting_positions
        most = self._most_tokens
        if work is not None:
            tokens, positions = tokens + work.num_tokens, positions + work.num_positions
            most = max(most, work.num_tokens)
        own_s = most * capacity.num_workers / capacity.tokens_per_s if capacity.tokens_per_s else 0.0
        return self._ahead_s() + self._sum_s(tokens, positions) + own_s + self._limits.margin_s

    def _sum_s(self, num_tokens: int, num_positions: int) -> float:
        """At least the sum of `share_s` of requests with so much together."""
        prefill_s = num_tokens / self._capacity.tokens_per_s if self._capacity.tokens_per_s else 0.0
        return prefill_s + self._capacity.kv_s(num_positions)

    def _prefill_s(self) -> float:
        capacity = self._capacity
        prefill_s = self._num_ahead_tokens / capacity.tokens_per_s if capacity.tokens_per_s else 0.0
        return max(prefill_s, capacity.kv_s(self._num_ahead_positions))

    def _count_ahead(self, ticket: Ticket, until_s: float) -> None:
        self._ahead[ticket] = until_s
        self._num_ahead_tokens += ticket.work.num_tokens
        self._num_ahead_positions += ticket.work.num_positions

    def _discount_ahead(self, ticket: Ticket) -> None:
        if self._ahead.pop(ticket, None) is not None:
            self._num_ahead_tokens -= ticket.work.num_tokens
            self._num_ahead_positions -= ticket.work.num_positions

    def _queue_s(self) -> float:
        return sum(self._capacity.share_s(item[2].work) for item in self._waiting)

    def _latest_s(self, work: RequestWork, now_s: float) -> float:
        max_wait_s = self._limits.max_wait_s
        return work.deadline_s if max_wait_s is None else min(work.deadline_s, now_s + max_wait_s)

    # Parts.

    def _require_room(self, ticket: Ticket, now_s: float) -> None:
        """Refuse what does not fit beside those that are here."""
        work, limits = ticket.work, self._limits
        if limits.max_waiting is not None and len(self._waiting) >= limits.max_waiting:
            raise self._refusal("queue", f"{len(self._waiting)} requests wait, the limit", self._queue_s())
        if self._num_bytes + work.num_bytes > limits.max_bytes:
            message = f"requests that are here take {self._num_bytes} bytes of memory, of {limits.max_bytes}"
            raise self._refusal("memory", message, self._queue_s())
        self._require_part(work, now_s)
        late_s = self._late_s(ticket, now_s)
        if late_s > 0:
            message = f"the first token would be {late_s:.2f} s late, this request's or that of one before it"
            raise self._refusal("deadline", message, late_s)

    def _require_part(self, work: RequestWork, now_s: float) -> None:
        """Refuse what is beyond the tenant's or the priority's part of the queue, in seconds of the workers' time."""
        latest_s = self._latest_s(work, now_s)
        room_s = latest_s - now_s - self._capacity.own_s(work)
        limit_s = max(0.0, room_s) * ROOM[work.priority]
        tokens = self._num_waiting_tokens + work.num_tokens
        positions = self._num_waiting_positions + work.num_positions
        if self._sum_s(tokens, positions) <= limit_s / max(1, len(self._asked_s)):
            return  # it would be no more than one tenant's part if all that wait were of one
        before_s = self._before_s(latest_s)
        if work.priority < HIGH and before_s > limit_s:
            message = f"the queue is full to {ROOM[work.priority]:.0%}, beyond which this priority may not fill it"
            raise self._refusal("priority", message, before_s - limit_s)
        if not self._num_waiting_of[work.tenant]:
            return  # one may always wait
        share = 1 / max(1, len(self._asked_s))
        queued = (item[2].work for item in self._waiting)
        own_s = sum(self._capacity.share_s(other) for other in queued if other.tenant == work.tenant)
        if own_s + self._capacity.share_s(work) > share * limit_s:
            message = f"this tenant has its part of the queue, one of {len(self._asked_s)}"
            raise self._refusal("tenant", message, (own_s - share * limit_s) / share)

    def _before_s(self, latest_s: float) -> float:
        """Seconds of the work that waits and is due no later.

        What is due later can go after it, so far deadlines, of which more fit into the queue, take no room from near
        ones; else who asks with a near one would hardly ever be let in.
        """
        at = bisect_right(self._waiting, latest_s, key=lambda item: item[0])
        return sum(self._capacity.share_s(item[2].work) for item in self._waiting[:at])

    def _remember(self, tenant: str, now_s: float) -> None:
        self._asked_s.pop(tenant, None)
        self._asked_s[tenant] = now_s  # dicts keep the order of insertion: the longest silent is first
        while len(self._asked_s) > 1:
            oldest = next(iter(self._asked_s))
            is_old = self._asked_s[oldest] < now_s - self._limits.memory_s
            if not is_old and len(self._asked_s) <= MAX_TENANTS:
                break
            del self._asked_s[oldest]

    # The admission queue.

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
        self._num_waiting_of[ticket.work.tenant] -= 1
        if not self._num_waiting_of[ticket.work.tenant]:
            del self._num_waiting_of[ticket.work.tenant]

    def _refusal(self, reason: str, message: str, wait_s: float) -> Overloaded:
        self.num_refused[reason] += 1
        retry_after_s = round(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S), 2)
        return Overloaded(f"{message}; try again in {retry_after_s:g} s", reason=reason, retry_after_s=retry_after_s)


class AdmissionCollector(Collector):
    """Shows one queue."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        waiting = GaugeMetricFamily("baton_router_requests_waiting", "Requests that wait at the router for their turn")
        waiting.add_metric((), self._queue.num_waiting)
        yield waiting
        refused = CounterMetricFamily(
            "baton_router_requests_refused", "Requests that were refused a place, by the reason", labels=("reason",)
        )
        for reason, count in tuple(self._queue.num_refused.items()):
            refused.add_metric((reason,), count)
        yield refused
