"""Orders waiting requests: by priority, then in turns by tenant, then in turns by how far their deadlines are. Pure.

Both kinds of turns are deficit round robin (Shreedhar and Varghese, 1995): each turn adds a quantum of tokens to what a
flow may take. So flows that always have requests waiting get as many tokens each, whatever the sizes of the requests,
and no flow waits for more than one request and one quantum of each other one. Requests of one tenant, priority and band
of deadlines keep their order of arrival.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from baton.router.admission.admission import PRIORITIES, RequestWork

QUANTUM: Final = 512  # tokens
NEAREST_BAND: Final = -1  # deadlines in less than half a second
NEAREST_S: Final = 2.0 ** (NEAREST_BAND - 1)  # where that band would begin if it were like the others
FARTHEST_BAND: Final = 12  # those in 2,048 s or more


def band_of(room_s: float) -> int:
    """Return the number of the band of a deadline in `room_s`: k for at least 2^(k-1) and less than 2^k seconds."""
    return math.frexp(min(max(room_s, NEAREST_S), 2.0 ** (FARTHEST_BAND - 1)))[1]


class Ticket:
    """One request's place in the queue.

    Args:
        work: what the request needs.
        band: number of its band of deadlines.
    """

    __slots__ = ("band", "expected_s", "granted", "work")

    def __init__(self, work: RequestWork, band: int = 0) -> None:
        self.work = work
        self.band = band
        self.granted = False
        self.expected_s = 0.0  # from the grant to the first token


class _Flow(ABC):
    """Tickets in some order."""

    @abstractmethod
    def __bool__(self) -> bool:
        """Whether there are any tickets."""

    @abstractmethod
    def add(self, ticket: Ticket) -> None:
        """Add a ticket."""

    @abstractmethod
    def next(self) -> Ticket:
        """Return the ticket whose turn it is, without removing it; there must be one."""

    @abstractmethod
    def remove(self, ticket: Ticket, cost: int) -> None:
        """Remove a ticket, and charge `cost` tokens to its flows."""


class _Arrivals(_Flow):
    """Tickets in order of arrival."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)

    def next(self) -> Ticket:
        return self._tickets[0]

    def remove(self, ticket: Ticket, cost: int) -> None:
        self._tickets.remove(ticket)


class _Turns(_Flow):
    """Flows that take turns.

    Args:
        quantum: tokens that each turn adds to a flow's deficit.
        keys: the first names a ticket's flow, the others the flows within it.
    """

    def __init__(self, quantum: int, keys: tuple[Callable[[Ticket], Hashable], ...]) -> None:
        self._quantum = quantum
        self._key, *inner = keys
        self._inner = tuple(inner)
        self._flows: dict[Hashable, _Flow] = {}
        self._turns: deque[Hashable] = deque()
        self._deficits: dict[Hashable, float] = {}

    def __bool__(self) -> bool:
        return bool(self._flows)

    def add(self, ticket: Ticket) -> None:
        key = self._key(ticket)
        if key not in self._flows:
            self._flows[key] = _Turns(self._quantum, self._inner) if self._inner else _Arrivals()
            self._deficits[key] = 0.0
            self._turns.append(key)
        self._flows[key].add(ticket)

    def next(self) -> Ticket:
        if self._lacks(self._turns[0]) > 0:
            self._skip_rounds()
        while self._lacks(self._turns[0]) > 0:
            self._turns.rotate(-1)
            self._deficits[self._turns[0]] += self._quantum
        return self._flows[self._turns[0]].next()

    def remove(self, ticket: Ticket, cost: int) -> None:
        key = self._key(ticket)
        self._flows[key].remove(ticket, cost)
        self._deficits[key] -= cost
        if not self._flows[key]:
            del self._flows[key], self._deficits[key]
            self._turns.remove(key)

    def _lacks(self, key: Hashable) -> float:
        """Tokens by which a flow's next request exceeds the flow's deficit."""
        return self._flows[key].next().work.cost - self._deficits[key]

    def _skip_rounds(self) -> None:
        """Credit all flows at once with the rounds in which none would be served."""
        rounds = min(math.ceil(self._lacks(key) / self._quantum) for key in self._turns) - 1
        if rounds > 0:
            for key in self._turns:
                self._deficits[key] += rounds * self._quantum


class DeficitRoundRobin:
    """Orders tickets by priority, then by tenant and by band of deadlines with deficit round robin.

    Args:
        quantum: tokens that each turn adds to a tenant's or band's deficit.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        assert quantum > 0
        keys = (lambda ticket: ticket.work.tenant, lambda ticket: ticket.band)
        self._flows = {priority: _Turns(quantum, keys) for priority in PRIORITIES}

    def __bool__(self) -> bool:
        return any(self._flows.values())

    def add(self, ticket: Ticket) -> None:
        """Append a ticket behind the others of its priority, tenant and band."""
        self._flows[ticket.work.priority].add(ticket)

    def next(self) -> Ticket | None:
        """Return the ticket whose turn it is, without removing it."""
        return next((flow.next() for flow in self._flows.values() if flow), None)

    def take(self, ticket: Ticket) -> None:
        """Remove a ticket, and charge its tokens to its tenant and band."""
        self._flows[ticket.work.priority].remove(ticket, ticket.work.cost)

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket that will not be served."""
        self._flows[ticket.work.priority].remove(ticket, 0)
