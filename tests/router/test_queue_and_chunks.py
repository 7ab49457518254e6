"""The router's queue, which sends a worker few prompts at a time, before the worker's chunk budget: both are real.

Steps take what a model of a GPU says. As in serving, a step is planned while the one before it runs, so a request that
was granted for a first token comes to the step after the next.
"""

from collections import deque

import pytest

from baton.engine.chunk_budget import ChunkBudget
from baton.engine.graphs.piecewise import MAX_ROWS
from baton.router.admission.admission import Capacity, RequestWork
from baton.router.admission.fair_queue import FairQueue, QueueLimits
from baton.tests.engine.test_chunk_budget import (
    ANSWER_LEN,
    FLOAT8_32B,
    LLAMA_8B,
    MOST,
    PROMPT_LEN,
    MoeLoad,
    closed_loop,
)

pytestmark = pytest.mark.fast
NUM_TURNS = 3


class Worker:
    """Clients that ask again as soon as they are answered, a router's queue, and one worker's steps."""

    def __init__(self, costs, num_clients, is_told):
        self.costs, self.is_told = costs, is_told
        self.queue = FairQueue(QueueLimits(margin_s=0.0))
        self.queue.set_capacity(Capacity(tokens_per_s=MOST / costs.step_s(0, MOST)))
        self.budget = ChunkBudget(MOST)
        self.now_s, self.num_emitted, self.num_queued = 0.0, 0, 0
        self.first_s = []  # from a request to its first token
        self.waiting = deque()  # [ticket, tokens left, turns left, when it was asked]
        self.coming = deque([[], []])  # granted while a step was planned or ran
        self.asked = {}
        for _ in range(num_clients):
            self.ask(NUM_TURNS)

    def ask(self, turns):
        work = RequestWork(tenant="", num_tokens=PROMPT_LEN, num_positions=PROMPT_LEN, deadline_s=self.now_s + 600.0)
        self.asked[self.queue.offer(work, self.now_s)] = (turns, self.now_s)

    def granted(self):
        found = [[ticket, PROMPT_LEN, *self.asked.pop(ticket)] for ticket in self.queue.grant(self.now_s)]
        if found and self.is_told:
            self.num_queued = self.queue.num_waiting_tokens
        return found

    def run(self):
        running = []  # [ticket, tokens left, turns left]
        while running or self.waiting or any(self.coming) or self.queue.num_waiting:
            self.coming.append(self.granted())
            self.waiting.extend(self.coming.popleft())
            num_tokens, started, num_waiting = 0, [], sum(item[1] for item in self.waiting)
            if num_waiting:
                room = self.budget.length(len(running), num_waiting + self.num_queued)
                while self.waiting and num_tokens < room:
                    part = min(self.waiting[0][1], room - num_tokens)
                    num_tokens += part
                    self.waiting[0][1] -= part
                    if not self.waiting[0][1]:
                        started.append(self.waiting.popleft())
            self.num_queued = max(0, self.num_queued - num_tokens)
            took_s = self.costs.step_s(len(running), num_tokens)
            self.now_s += took_s
            if running:
                self.budget.mixed(num_tokens, took_s, 1e-3) if num_tokens else self.budget.decoded(took_s)
            self.num_emitted += len(running) + len(started)
            running = [[ticket, left - 1, turns] for ticket, left, turns in running]
            for ticket, left, turns in running:
                if not left:
                    self.queue.leave(ticket)
                    if turns > 1:
                        self.ask(turns - 1)
            for ticket, _, turns, asked_s in started:
                self.queue.first_token(ticket)
                self.first_s.append(self.now_s - asked_s)
                running.append([ticket, ANSWER_LEN - 1, turns])
            running = [item for item in running if item[1]]
        return self

    @property
    def rate(self):
        return self.num_emitted / self.now_s

    @property
    def median_first_s(self):
        return sorted(self.first_s)[len(self.first_s) // 2]


@pytest.mark.parametrize("costs", [LLAMA_8B, FLOAT8_32B, MoeLoad()], ids=["8B", "32B in float8", "mixture of experts"])
@pytest.mark.parametrize("num_clients", [1, 16, 64, 256])
def test_a_worker_computes_prompts_as_if_all_of_them_waited_there(num_clients, costs):
    told = Worker(costs, num_clients, is_told=True).run()
    assert len(told.first_s) == NUM_TURNS * num_clients
    budget = ChunkBudget(MOST)
    alone, _ = closed_loop(budget.length, costs, num_clients, budget, NUM_TURNS)
    assert told.rate > 0.9 * alone


@pytest.mark.parametrize("costs", [LLAMA_8B, FLOAT8_32B, MoeLoad()], ids=["8B", "32B in float8", "mixture of experts"])
def test_a_worker_that_did_not_know_the_queue_would_leave_it_there(costs):
    """So that it matters: its steps would have few tokens beside many rows, and first tokens would be late."""
    told, blind = (Worker(costs, 256, is_told=is_told).run() for is_told in (True, False))
    assert told.rate > 1.03 * blind.rate
    assert told.median_first_s < 0.5 * blind.median_first_s


@pytest.mark.parametrize("costs", [LLAMA_8B, FLOAT8_32B], ids=["8B", "32B in float8"])
def test_a_queue_at_the_router_leaves_steps_their_graphs(costs, monkeypatch):
    """However many of its prompts decode meanwhile. A chunk that fits beside them may be longer."""
    worker, num_long = Worker(costs, 256, is_told=True), 0
    length = worker.budget.length

    def seen(num_rows, num_waiting):
        nonlocal num_long
        asked = length(num_rows, num_waiting)
        if num_rows and asked > worker.budget._fitting:
            num_long += 1
            assert num_rows + asked <= MAX_ROWS
        return asked

    monkeypatch.setattr(worker.budget, "length", seen)
    worker.run()
    assert num_long > 100
