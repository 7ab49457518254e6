"""A decode worker over a toy model whose KV receiver is played by the test: it asks, lands, fails and drains."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from unittest import mock

from baton.core.clock import VirtualClock
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.decode_worker.worker import DecodeWorker
from baton.engine.step.executor import executor_for
from baton.engine.step.plan import Chunk, Place, Release, Step
from baton.engine.step.runner import Runner
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed, ReserveWanted
from baton.proto import kv_pb2
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import EOS, letters_tokenizer
from baton.tests.worker.turns import Sink, turn
from baton.worker.loading import request_limits

BLOCK_SIZE = 4
MODEL = ToyModel()
BLOCK_BYTES = 3 * 2 * 2 * BLOCK_SIZE * 8  # of the toy: layers, heads, K and V, positions, float64


@functools.cache
def expected_tokens(prompt, params, *, with_eos=True):
    """What a plain loop says, one token at a time and nothing stored."""
    return tuple(reference.generate(MODEL, prompt, params, (EOS,) if with_eos else ()))


class _NoPush:
    def submit(self, layer):
        pass

    def close(self):
        pass


class Prefiller:
    """The arithmetic of a prefill worker: a prompt's KV, its first token and its draft."""

    def __init__(self, model):
        self.model = model
        self.pool = KVPool(model.kv_layout(BLOCK_SIZE), 32, model.device)
        self.pool.data_bytes.fill_(0xFF)
        self.runner = Runner(
            model,
            self.pool,
            max_num_seqs=1,
            num_draft_tokens=0,
            eos_token_ids=(EOS,),
            open_push=lambda parts: _NoPush(),
        )
        self.of = functools.cache(self._of)

    def _of(self, prompt, num_forced, params):
        """(KV of each layer [n, ...], `SequenceState`)."""
        blocks = tuple(range(-(-len(prompt) // BLOCK_SIZE)))
        place = Place(slot=0, token_ids=prompt, num_output=num_forced, blocks=blocks, sampling=params, draft_cap=0)
        self.runner.execute(place)
        chunk = Chunk(slot=0, start=0, length=len(prompt), push=AttemptKey("p", 1))
        ticket = self.runner.launch(Step(chunks=(chunk,)))
        token = ticket.result().chunks[0].token
        (handed,) = ticket.handoffs()
        self.runner.execute(Release(0))
        state = kv_pb2.SequenceState(first_token=token, num_draws=1)
        if handed.draft_token is not None:
            state.draft_tokens.append(handed.draft_token)
            state.hidden = handed.hidden
        layers = range(self.pool.layout.num_layers)
        return [self.pool.blocks(layer)[: len(blocks)].clone() for layer in layers], state


PREFILLERS = {model.with_mtp: Prefiller(model) for model in (MODEL, ToyModel(with_mtp=False))}


@dataclass
class IncomingTransfer:
    """One transfer, as the receiver knows it."""

    reserve: ReserveWanted
    table: BlockTable | None = None
    is_complete: bool = False
    has_failed: bool = False  # the worker knows, or has said so
    reason: str = ""


class IncomingTransfers:
    """Has the interface of `ReceiverService`."""

    def __init__(self, pool, prefiller):
        self.pool, self.prefiller = pool, prefiller
        self.wakeup = None
        self.staging_len = 0
        self.open = {}
        self.denied = []  # (attempt, reason)
        self.released = []
        self.events = []
        self._ids = itertools.count(1)

    def start(self):
        pass

    def close(self):
        pass

    def poll(self):
        events, self.events = self.events, []
        found = []
        for event in events:
            known = self.open.get(event.attempt)
            if isinstance(event, Completed):
                if known is None or known.has_failed:
                    continue  # it was given up since
                known.is_complete = True
            elif isinstance(event, IncomingFailed):
                if known is not None and known.table is not None:
                    known.has_failed = True
                else:
                    self.open.pop(event.attempt, None)
            elif isinstance(event, Drained):
                del self.open[event.attempt]
            found.append(event)
        return found

    def grant(self, attempt, table):
        known = self.open[attempt]
        assert known.table is None
        known.table = table

    def deny(self, attempt, reason, detail):
        known = self.open.pop(attempt, None)
        assert known is None or known.table is None, "it was granted"
        self.denied.append((attempt, reason))

    def abort(self, attempt, reason):
        known = self.open.get(attempt)
        if known is not None:
            assert known.table is not None and not known.is_complete
            known.has_failed, known.reason = True, reason

    def release(self, attempt):
        assert self.open.pop(attempt).is_complete
        self.released.append(attempt)

    def inventory(self):
        return Counter(num_kv_receives=len(self.open))  # whatever else is counted: 0

    # What prefill workers do

    def prefilled(self, request):
        """What a prefill worker makes of its prompt."""
        return self.prefiller.of(request.prompt_token_ids, request.num_forced, request.sampling)

    def ask(self, request, **changes):
        wanted = ReserveWanted(request.key, request.prompt_len, request.capacity_len, deadline_s=math.inf)
        wanted = replace(wanted, **changes)
        self.open[request.key] = IncomingTransfer(wanted)
        self.events.append(wanted)

    def is_granted(self, attempt):
        known = self.open.get(attempt)
        return known is not None and known.table is not None and not known.is_complete

    def land(self, request, seconds=0.0, **changes):
        """All its KV is written, and complete."""
        known = self.open[request.key]
        kv, state = self.prefilled(request)
        for layer, kv_nHPSD in enumerate(kv):
            self.pool.blocks(layer)[list(known.table.blocks[: len(kv_nHPSD)])] = kv_nHPSD
        if changes:
            said = kv_pb2.SequenceState()
            said.CopyFrom(state)
            said.MergeFrom(kv_pb2.SequenceState(**changes))
            state = said
        self.events.append(
            Completed(
                attempt=request.key,
                incoming_id=next(self._ids),
                prompt_len=request.prompt_len,
                state=state,
                bytes_landed=1000,
                bytes_landed_before_prefill_end=600,
                prefill_end_s=seconds,
                completed_s=seconds,
            )
        )

    def fail(self, attempt, *, by_peer=False):
        self.events.append(IncomingFailed(attempt, "the peer is gone", by_peer))

    def drain(self, attempt):
        """Nothing writes its blocks any more."""
        known = self.open[attempt]
        assert known.has_failed
        self.events.append(Drained(attempt))


class Decode:
    """A decode worker of the toy model; with a `executor`, steps run there."""

    def __init__(
        self,
        *,
        num_blocks=40,
        max_num_seqs=4,
        k=2,
        chunk_len=16,
        num_host_blocks=0,
        model=MODEL,
        executor=None,
        **options,
    ):
        self.clock = VirtualClock()
        self.pool = KVPool(model.kv_layout(BLOCK_SIZE), num_blocks, model.device)
        self.pool.data_bytes.fill_(0xFF)  # what was never written reads as NaN
        self.incoming_transfers = IncomingTransfers(self.pool, PREFILLERS[model.with_mtp])
        self.fatal = []
        with mock.patch(
            "baton.engine.step.runner.executor_for", (lambda device: executor) if executor else executor_for
        ):
            self.runner = Runner(
                model,
                self.pool,
                max_num_seqs=max_num_seqs,
                num_draft_tokens=k,
                eos_token_ids=(EOS,),
                host_kv_bytes=num_host_blocks * BLOCK_BYTES,
                clock=self.clock,
            )
        self.worker = DecodeWorker(
            runner=self.runner,
            pool=self.pool,
            tokenizer=letters_tokenizer(),
            limits=request_limits(model, max_model_len=1 << 20, num_draft_tokens=k),
            incoming=self.incoming_transfers,
            max_num_batched_tokens=chunk_len,
            clock=self.clock,
            on_fatal=self.fatal.append,
            **{"max_queue_len": 100} | options,
        )
        self.engine = self.worker.engine
        self.scheduler = self.engine.scheduler
        self.allocator = self.scheduler.allocator
        self.requests, self.sinks = {}, {}

    def attend(
        self,
        prompt,
        name=None,
        *,
        local=False,
        num_queued_tokens=0,
        k=2,
        deadline_s=1e9,
        num_forced=0,
        tenant="",
        **sampling,
    ):
        """A request comes from the router."""
        request = GenerationRequest(
            key=AttemptKey(name or f"r{len(self.requests)}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling),
            deadline_s=deadline_s,
            num_draft_tokens=k,
            num_forced=num_forced,
            tenant=tenant,
        )
        sink = Sink()
        self.worker.attend(request, sink, prefill_here=local, num_queued_tokens=num_queued_tokens)
        self.requests[request.key], self.sinks[request.key] = request, sink
        return request

    def turn(self):
        return turn(self.worker)

    def turns(self):
        """Until there is nothing to do."""
        while self.turn():
            pass

    def waiting(self):
        """Why requests wait, and how many."""
        return {item.reason: item.num_requests for item in self.worker.inventory().waiting if item.num_requests}

    def sequence(self, request):
        return self.worker._requests[request.key].sequence

    def phase(self, request):
        return self.sequence(request).phase

    def hand_over(self, request):
        """Its prefill worker asks and is granted some time, and its KV lands."""
        self.incoming_transfers.ask(request)
        while not self.incoming_transfers.is_granted(request.key):
            assert self.turn()
        self.incoming_transfers.land(request)

    def tokens(self, request):
        """Of its answer so far, as the router knows it: the first from wherever it was made."""
        sink = self.sinks[request.key]
        found = list(request.forced_token_ids)
        if not any(event.HasField("first_token") for event in sink.events) and self._decodes(sink):
            found.append(self.incoming_transfers.prefilled(request)[1].first_token)
        for event in sink.events:
            if event.HasField("first_token"):
                assert event.first_token.index == len(found)
                found.append(event.first_token.token)
            elif event.HasField("tokens"):
                assert event.tokens.index == len(found)
                found += event.tokens.token_ids
        return tuple(found)

    @staticmethod
    def _decodes(sink):
        return any(event.HasField("tokens") for event in sink.events)

    def expected(self, request):
        prompt = request.prompt_token_ids[: request.prompt_len - request.num_forced]
        return expected_tokens(prompt, request.sampling)

    def check_finished(self, request):
        sink = self.sinks[request.key]
        assert (sink.ended, sink.error) == (True, None)
        assert self.tokens(request) == self.expected(request)

    def check_nothing_left(self):
        self.turns()
        assert not self.worker._requests
        assert not self.incoming_transfers.open
        assert not self.worker._reserves
        assert not self.worker._draining
        self.scheduler.check_empty()
        held = self.worker.inventory()
        assert held.num_blocks_free == held.num_blocks == self.pool.num_blocks
        left = (held.num_requests_held, held.num_slots_in_use, held.num_blocks_quarantined, held.num_host_blocks_used)
        assert left == (0, 0, 0, 0)
        assert held.num_requests_waiting == held.num_requests_running == held.num_prefill_tokens_queued == 0
        assert self.worker._request_limit.num_inside == 0
        assert self.engine.is_idle

    def close(self):
        self.worker.close()
        self.runner.close()
        assert not self.fatal
