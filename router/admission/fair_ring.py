"""Queues of tenants, served by deficit round robin over tokens, one ring for each priority. Pure.

Deficit round robin (Shreedhar and Varghese, 1996): a tenant's turn adds a quantum to what it may have; it is served
while that covers its next request, and what is left stays for its next turn. What is taken out of turn is charged too.
"""

import math
from collections import deque
from typing import Final

from baton.router.admission.work import PRIORITIES, Work

QUANTUM: Final = 512  # tokens


class Ticket:
    """One request's place."""

    __slots__ = ("expected_s", "granted", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.granted = False
        self.expected_s = 0.0  # from the grant to the first token


class FairRing:
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
        """Give everybody at once the rounds in which nobody would be served."""
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
