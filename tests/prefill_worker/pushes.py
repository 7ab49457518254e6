"""A prefill worker over a toy model whose pushes go nowhere: the test plays the decode worker."""

import math
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from baton.core.clock import VirtualClock
from baton.core.config import MAX_DRAFTS
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.executor import executor_for
from baton.engine.step.runner import Runner
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.sender.service import Acked, DecodePeer, Denied, Granted, PushDrained, PushFailed
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import kv_pb2
from baton.tests.engine.toy_engine import letters_tokenizer
from baton.tests.worker.turns import Sink, turn
from baton.worker.loading import request_limits

BLOCK_SIZE = 4


@dataclass
class Push:
    """One transfer, as the worker was told to make it.

    Attributes:
        pushed: (layer, first position, number of positions) of each part, in order.
        cached: positions that steps before had computed.
        states: of its commits.
    """

    table: BlockTable
    prompt_len: int
    is_granted: bool = False
    has_failed: bool = False
    pushed: list = field(default_factory=list)
    cached: int = 0
    states: list = field(default_factory=list)
    aborts: list = field(default_factory=list)


class StepPush:
    def __init__(self, service, parts):
        self.service, self.parts, self.is_closed = service, parts, False

    def submit(self, layer):
        assert not self.is_closed
        for attempt, start, length in self.parts:
            self.service.known[attempt].pushed.append((layer, start, length))

    def close(self):
        self.is_closed = True


class Pushes:
    """Has the interface of `PushService`."""

    def __init__(self):
        self.wakeup = None
        self.open, self.known = {}, {}  # transfers that have not ended, and all there ever were
        self.events = []

    def start(self):
        pass

    def close(self):
        pass

    def open_step(self, parts):
        assert all(self.known[attempt].is_granted for attempt, _, _ in parts)
        return StepPush(self, parts)

    def reserve(self, attempt, peer, table, prompt_len, capacity_len, wait_s):
        assert attempt not in self.open
        assert 0 < prompt_len <= min(capacity_len, table.capacity_len)
        assert 0 < wait_s < math.inf
        self.open[attempt] = self.known[attempt] = Push(table, prompt_len)

    def push_cached(self, attempt, first, count):
        push = self.known[attempt]
        assert push.is_granted and not push.pushed and first == push.cached == 0
        assert attempt in self.open or push.has_failed, "it may have ended by itself meanwhile"
        push.cached = count

    def commit(self, attempt, state, prefill_end_s):
        self.open[attempt].states.append(state)

    def abort(self, attempt, reason):
        self.known[attempt].aborts.append(reason)  # it may have ended by itself meanwhile

    def poll(self):
        events, self.events = self.events, []
        return events

    def inventory(self):
        return Counter(num_pushes=len(self.open))  # whatever else is counted: 0

    def paths(self):
        return ()

    def data_paths(self):
        return {}

    # What the decode worker does

    def grant(self, attempt):
        self.open[attempt].is_granted = True
        self.events.append(Granted(attempt, None))

    def deny(self, attempt, reason=kv_pb2.Deny.BUSY, detail="full"):
        del self.open[attempt]
        self.events.append(Denied(attempt, reason, detail))

    def ack(self, attempt):
        assert self.open[attempt].states
        del self.open[attempt]
        self.events.append(Acked(attempt, 100))

    def fail(self, attempt, reason="the peer is gone"):
        self.open[attempt].has_failed = True
        self.events.append(PushFailed(attempt, reason))

    def drain(self, attempt):
        push = self.open.pop(attempt)
        assert push.aborts or push.has_failed
        self.events.append(PushDrained(attempt))


class Prefill:
    """A prefill worker of a toy model; with a `executor`, steps run there."""

    def __init__(self, model, *, num_blocks=40, chunk_len=5, max_num_seqs=8, executor=None, **options):
        self.model = model
        self.clock = VirtualClock()
        self.pool = KVPool(model.kv_layout(BLOCK_SIZE), num_blocks, model.device)
        self.pool.data_bytes.fill_(0xFF)  # what was never written reads as NaN
        self.pushes = Pushes()
        self.fatal = []
        with mock.patch(
            "baton.engine.step.runner.executor_for", (lambda device: executor) if executor else executor_for
        ):
            runner = Runner(
                model, self.pool, max_num_seqs=max_num_seqs, num_draft_tokens=0, open_push=self.pushes.open_step
            )
        self.worker = PrefillWorker(
            runner=runner,
            pool=self.pool,
            tokenizer=letters_tokenizer(),
            limits=request_limits(model, max_model_len=1 << 20, num_draft_tokens=MAX_DRAFTS),
            push=self.pushes,
            max_num_batched_tokens=chunk_len,
            clock=self.clock,
            on_fatal=self.fatal.append,
            **{"max_queue_len": 100} | options,
        )
        self.scheduler = self.worker.engine.scheduler
        self.sinks = {}

    def submit(self, prompt, name=None, tenant="", peer="d0", deadline_s=1e9, **sampling):
        """Queue a request."""
        request = GenerationRequest(
            key=AttemptKey(name or f"r{len(self.sinks)}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | sampling),
            deadline_s=deadline_s,
            tenant=tenant,
            num_draft_tokens=0,
        )
        sink = self.sinks[request.key] = Sink()
        self.worker.submit(request, DecodePeer(peer, f"{peer}:1", 1), sink)
        return request.key

    def turn(self):
        return turn(self.worker)

    def grant_all(self):
        for attempt, push in self.pushes.open.items():
            if not push.is_granted:
                self.pushes.grant(attempt)

    def run(self):
        """Until nothing is left to compute; each request is granted when it asks, and none is acknowledged."""
        while self.turn() or any(not push.is_granted for push in self.pushes.open.values()):
            self.grant_all()

    def sequence(self, key):
        return self.worker._requests[key].sequence

    def close(self):
        self.worker.close()
        self.worker._runner.close()
        assert not self.fatal
