"""The gate of a router under virtual time: its estimates, queue and turns are the real ones."""

import heapq
import itertools
import random
from collections import Counter
from types import SimpleNamespace

from baton.core.errors import Overloaded
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.router.admission.admission import NORMAL
from baton.router.admission.admission_queue import AdmissionQueue, AdmissionTicket
from baton.router.admission.fair_queue import QueueLimits
from baton.router.placement.members import DECODE, PREFILL


class Clock:
    """Virtual."""

    def __init__(self):
        self.time_s = 0.0

    def now_s(self):
        return self.time_s


class Fleet:
    """What the gate reads of `Members`.

    Args:
        numbers: of workers by role.
        reported: tokens per second that each prefill worker says it computes; 0: it says nothing.
        num_positions: of KV at each decode worker.
        num_seqs: that each decode worker runs; 0: it says nothing.
    """

    def __init__(self, numbers, reported, num_positions, num_seqs=0):
        def member():
            inventory = SimpleNamespace(full_prefill_tokens_per_s=reported)
            state = SimpleNamespace(inventory=inventory, max_num_seqs=num_seqs)
            return SimpleNamespace(state=state, capacity_len=num_positions)

        self.members = {role: [member() for _ in range(number)] for role, number in numbers.items()}

    def live(self, role):
        return self.members[role]

    def report(self, tokens_per_s):
        for member in self.members[PREFILL]:
            member.state.inventory.full_prefill_tokens_per_s = tokens_per_s


class _Waiting:
    """A future, as far as the gate needs it."""

    def __init__(self, granted):
        self._granted = granted

    def done(self):
        return False

    def set_result(self, result):
        self._granted()


class GateSimulation:
    """Requests against a gate; prompts are computed at `rate` by each of the prefill workers, one after the other."""

    def __init__(self, *, seed=0, num_prefill=1, num_decode=1, rate=10_000.0, reported=None, num_positions=1 << 20,
                 num_seqs=0, token_s=0.01, **limits):  # fmt: skip
        self.rng = random.Random(seed)
        self.rate, self.token_s = rate, token_s
        self.clock = Clock()
        self.fleet = Fleet(
            {PREFILL: num_prefill, DECODE: num_decode},
            rate if reported is None else reported,
            num_positions,
            num_seqs,
        )
        self.admission_queue = AdmissionQueue(QueueLimits(**limits), self.fleet, self.clock, lambda request: 0)
        self.free_s = [0.0] * num_prefill
        self.refused, self.num_answered = Counter(), 0
        self.errors = []
        self._events = []
        self._ties = itertools.count()

    def at(self, time_s, what, *arguments):
        heapq.heappush(self._events, (time_s, next(self._ties), what, arguments))

    def offer(self, prompt_len, max_tokens=16, timeout_s=600.0, tenant="", then=None, priority=NORMAL):
        """Returns whether it was accepted; `then` is called when it has ended, however."""
        now_s = self.clock.now_s()
        request = GenerationRequest(
            key=AttemptKey(f"r{next(self._ties)}", 1),
            prompt_token_ids=(1,) * prompt_len,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            deadline_s=now_s + timeout_s,
            num_draft_tokens=0,
            tenant=tenant,
            priority=priority,
        )
        admission_queue = self.admission_queue
        try:
            ticket = admission_queue.queue.offer(admission_queue._work(request, now_s), now_s)
        except Overloaded as error:
            self.refused[error.fields["reason"]] += 1
            self.errors.append(error.message)
            if then is not None:
                self.at(now_s + 0.001, then)
            return False
        admission_queue._waiting[ticket] = _Waiting(
            lambda: self._begin(AdmissionTicket(admission_queue, ticket, 1), request, then)
        )
        admission_queue.look()
        return True

    def run(self):
        """Until nothing happens any more."""
        while self._events:
            time_s, _, what, arguments = heapq.heappop(self._events)
            self.clock.time_s = max(self.clock.time_s, time_s)
            what(*arguments)
            self.admission_queue.look()
        assert (
            self.admission_queue.queue.num_waiting,
            self.admission_queue.queue.num_running,
            self.admission_queue.queue.num_bytes,
        ) == (0, 0, 0)

    def _begin(self, turn, request, then):
        worker = min(range(len(self.free_s)), key=self.free_s.__getitem__)
        first_s = max(self.clock.now_s(), self.free_s[worker]) + request.prompt_len / self.rate
        self.free_s[worker] = first_s
        num_tokens = self.rng.randint(1, request.sampling.max_tokens)
        token_s = self.token_s * self.rng.uniform(0.5, 2.0)
        for at in range(num_tokens):
            self.at(first_s + at * token_s, turn.arrived, 1, at == num_tokens - 1)
        self.at(first_s + num_tokens * token_s, self._end, turn, then)

    def _end(self, turn, then):
        turn.leave()
        self.num_answered += 1
        if then is not None:
            then()
