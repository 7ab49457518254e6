"""Workers under virtual time, for admission: each computes one prompt after the other at a fixed rate."""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from baton.core.errors import Overloaded
from baton.router.admission.admission import NORMAL, Capacity, RequestWork
from baton.router.admission.fair_queue import FairQueue, QueueLimits


@dataclass
class Result:
    """What became of all requests."""

    tokens_in_time: Counter = field(default_factory=Counter)  # by tenant
    offered: Counter = field(default_factory=Counter)
    tokens_in_time_by_deadline: Counter = field(default_factory=Counter)  # by the deadline that `arrivals` got
    waits_s: list = field(default_factory=list)
    refused: Counter = field(default_factory=Counter)
    hints_s: list = field(default_factory=list)
    num_late: int = 0
    num_accepted: Counter = field(default_factory=Counter)  # by priority
    most_positions: int = 0


class Simulation:
    """An arrival process against a FairQueue and `num_workers` workers."""

    def __init__(self, *, num_workers=4, rate=10_000.0, num_positions=0, residence_s=0.0, error=0.0, seed=0, **limits):
        self.rng = random.Random(seed)
        self.rate, self.residence_s, self.error = rate, residence_s, error
        self.queue = FairQueue(QueueLimits(**{"ahead": 2, "margin_s": 0.02, **limits}))
        self.capacity_tokens_per_s = rate * num_workers
        self.queue.set_capacity(
            Capacity(
                tokens_per_s=rate * num_workers,
                num_workers=num_workers,
                num_positions=num_positions,
                residence_s=residence_s * 1.2,  # and what it holds while it is computed
            )
        )
        self.free_s = [0.0] * num_workers
        self.events = []
        self.until_s = 0.0
        self.tickets = {}
        self.deadlines_s = {}  # of arriving work
        self.result = Result()
        self._ties = itertools.count()

    def at(self, time_s, what, *arguments):
        heapq.heappush(self.events, (time_s, next(self._ties), what, arguments))

    def offer(self, now_s, work):
        self.result.offered[work.tenant] += work.num_tokens
        try:
            ticket = self.queue.offer(work, now_s)
        except Overloaded as error:
            self.result.refused[error.fields["reason"]] += 1
            self.result.hints_s.append(error.fields["retry_after_s"])
            return
        self.result.num_accepted[work.priority] += 1
        self.tickets[ticket] = now_s

    def first_token(self, now_s, ticket):
        self.queue.first_token(ticket)
        if now_s > ticket.work.deadline_s:
            self.result.num_late += 1
        elif now_s <= self.until_s:
            self.result.tokens_in_time[ticket.work.tenant] += ticket.work.num_tokens
            self.result.tokens_in_time_by_deadline[self.deadlines_s.get(ticket.work)] += ticket.work.num_tokens
        self.at(now_s + self.residence_s, self.leave, ticket)

    def leave(self, now_s, ticket):
        self.queue.leave(ticket)

    def run(self, until_s):
        """What was accepted is served to its end, and counts as goodput until then."""
        self.until_s = until_s
        while self.events:
            now_s, _, what, arguments = heapq.heappop(self.events)
            what(now_s, *arguments)
            for ticket in self.queue.grant(now_s):
                self.result.waits_s.append(now_s - self.tickets.pop(ticket))
                worker = min(range(len(self.free_s)), key=self.free_s.__getitem__)
                actual = self.rate * (1 + self.rng.uniform(-self.error, self.error))
                self.free_s[worker] = max(now_s, self.free_s[worker]) + ticket.work.num_tokens / actual
                self.at(self.free_s[worker], self.first_token, ticket)
            self.result.most_positions = max(self.result.most_positions, self.queue._num_positions)
        assert not self.tickets, "all that were accepted were granted"
        assert (self.queue.num_waiting, self.queue.num_running) == (0, 0)
        return self.result

    def arrivals(self, load, seconds, *, tenants, deadline_s=2.0, priorities=(NORMAL,), tokens=(100, 2000)):
        """Poisson arrivals at `load` times the capacity; `tenants` are weights."""
        mean = sum(tokens) / 2
        per_s = load * self.capacity_tokens_per_s / mean
        now_s = 0.0
        while (now_s := now_s + self.rng.expovariate(per_s)) < seconds:
            num_tokens = self.rng.randint(*tokens)
            work = RequestWork(
                tenant=self.rng.choices(list(tenants), weights=list(tenants.values()))[0],
                num_tokens=num_tokens,
                num_positions=num_tokens + 64,
                deadline_s=now_s + deadline_s * self.rng.uniform(0.8, 1.2),
                priority=self.rng.choice(priorities),
            )
            self.deadlines_s[work] = deadline_s
            self.at(now_s, self.offer, work)
