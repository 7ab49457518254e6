"""A whole deployment in one process: the plain worker classes over real ZMQ, and a minimal router.

Everything is Baton's own but the front door: no Ray, no gRPC. The model is loaded once and shared, pools are
each worker's own.
"""

import itertools
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from baton.core.clock import MonotonicClock
from baton.core.config import MAX_DRAFTS
from baton.core.errors import BatonError
from baton.core.requests.request import GenerationRequest, TokenLogprobs
from baton.decode_worker.worker import DecodeWorker
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.step.runner import Runner
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import ReceiverService
from baton.kvtransfer.sender.service import DecodePeer, PushService
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import wire
from baton.tests.patience import STALLS_S, patient
from baton.worker.loading import num_state_slots_of, request_limits


class QueueSink:
    """An EventSink that a test thread reads."""

    def __init__(self):
        self.queue = queue.Queue()
        self.ended = False

    def emit(self, event):
        self.queue.put(event)

    def end(self, error=None):
        if not self.ended:
            self.ended = True
            self.queue.put(error)

    def events(self, timeout_s=60.0):
        """Events until the end; raises the error the stream ended with."""
        while (item := self.queue.get(timeout=timeout_s)) is not None:
            if isinstance(item, BatonError):
                raise item
            yield item


@dataclass
class Outcome:
    """What one request produced."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    decode_steps: list[list[int]] = field(default_factory=list)  # tokens of each step of a decode worker
    num_cached_tokens: int = 0
    decode_stats: Any = None
    prefill_done: Any = None
    first: Any = None  # FirstToken of a decode worker that computed the prompt
    error: BatonError | None = None


NUM_CHECKPOINTS = 24  # of a pool whose layout has state


def pool_of(model, num_blocks, block_size, max_num_seqs, num_checkpoints):
    layout = model.kv_layout(block_size)
    num_checkpoints = num_checkpoints if layout.has_state else 0
    num_state_slots = num_state_slots_of(layout, max_num_seqs) + num_checkpoints
    return KVPool(layout, num_blocks, model.device, num_state_slots=num_state_slots, num_checkpoints=num_checkpoints)


class PrefillSide:
    """One prefill worker and its parts."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        epoch,
        num_blocks,
        block_size,
        chunk_len,
        transfer,
        prefix_cache,
        fatal,
        num_checkpoints=NUM_CHECKPOINTS,
    ):
        clock = MonotonicClock()
        self.pool = pool_of(model, num_blocks, block_size, 16, num_checkpoints)
        self.push = PushService(
            pool=self.pool,
            layout=self.pool.layout,
            epoch=epoch,
            transport=ZmqTransport(config=transfer),
            config=transfer,
            clock=clock,
        )
        self.worker = PrefillWorker(
            runner=Runner(
                model,
                self.pool,
                max_num_seqs=16,
                num_draft_tokens=0,
                eos_token_ids=tokenizer.eos_token_ids,
                grammars=GrammarCompiler(tokenizer, model.config.vocab_size),
                open_push=self.push.open_step,
            ),
            pool=self.pool,
            tokenizer=tokenizer,
            limits=request_limits(model, max_model_len=1 << 20, num_draft_tokens=MAX_DRAFTS),
            push=self.push,
            max_num_batched_tokens=chunk_len,
            max_queue_len=1024,
            prefix_cache=prefix_cache,
            clock=clock,
            on_fatal=fatal,
        )
        self.worker.start()


class DecodeSide:
    """One decode worker and its parts."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        epoch,
        num_blocks,
        block_size,
        num_drafts,
        max_num_seqs,
        transfer,
        fatal,
        chunk_len=256,
        host_kv_bytes=0,
        lookup=None,
        num_checkpoints=NUM_CHECKPOINTS,
        **options,
    ):
        clock = MonotonicClock()
        eos_token_ids = tokenizer.eos_token_ids
        self.epoch = epoch
        self.pool = pool_of(model, num_blocks, block_size, max_num_seqs, num_checkpoints)
        self.incoming = ReceiverService.on_thread(
            pool=self.pool,
            layout=self.pool.layout,
            epoch=epoch,
            transport=ZmqTransport(bind="tcp://127.0.0.1:0", config=transfer),
            config=transfer,
            clock=clock,
        )
        self.worker = DecodeWorker(
            runner=Runner(
                model,
                self.pool,
                max_num_seqs=max_num_seqs,
                num_draft_tokens=num_drafts,
                lookup=lookup,
                eos_token_ids=eos_token_ids,
                grammars=GrammarCompiler(tokenizer, model.config.vocab_size),
                host_kv_bytes=host_kv_bytes,
            ),
            pool=self.pool,
            tokenizer=tokenizer,
            limits=request_limits(model, max_model_len=1 << 20, num_draft_tokens=num_drafts),
            incoming=self.incoming,
            max_num_batched_tokens=chunk_len,
            max_queue_len=1024,
            clock=clock,
            on_fatal=fatal,
            **options,
        )
        self.worker.start()

    @property
    def peer(self):
        return DecodePeer("decode", self.incoming.address, self.epoch)


class Topology:
    """`num_prefill` x `num_decode` workers; `generate` runs requests round robin over them."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        num_prefill=1,
        num_decode=1,
        num_drafts=0,
        chunk_len=256,
        num_blocks=1024,
        block_size=16,
        max_num_seqs=16,
        transfer=None,
        num_prefill_blocks=None,
        prefix_cache=True,
        num_checkpoints=NUM_CHECKPOINTS,
        **decode_options,
    ):
        self.fatal = []
        transfer = transfer or patient()
        common = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "transfer": transfer,
            "fatal": self.fatal.append,
            "num_checkpoints": num_checkpoints,
        }
        self.prefill = [
            PrefillSide(
                model,
                tokenizer,
                epoch=100 + index,
                chunk_len=chunk_len,
                prefix_cache=prefix_cache,
                **{**common, "num_blocks": num_prefill_blocks or num_blocks},
            )
            for index in range(num_prefill)
        ]
        self.decode = [
            DecodeSide(
                model,
                tokenizer,
                epoch=200 + index,
                num_drafts=num_drafts,
                max_num_seqs=max_num_seqs,
                **common,
                **decode_options,
            )
            for index in range(num_decode)
        ]
        self._turn = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        for side in (*self.prefill, *self.decode):
            side.worker.close()
        assert not self.fatal, self.fatal

    def start(self, request: GenerationRequest):
        """Begin one request; returns what `cancel` and `finish` need."""
        turn = next(self._turn)
        prefill = self.prefill[turn % len(self.prefill)]
        decode = self.decode[turn % len(self.decode)]
        decode_sink, prefill_sink = QueueSink(), QueueSink()
        decode.worker.attend(request, decode_sink)
        prefill.worker.submit(request, decode.peer, prefill_sink)
        return request, prefill, decode, prefill_sink, decode_sink

    def start_local(self, request: GenerationRequest):
        """The same without a prefill worker."""
        decode, sink = self.decode[next(self._turn) % len(self.decode)], QueueSink()
        decode.worker.attend(request, sink, prefill_here=True)
        return request, None, decode, None, sink

    def cancel(self, running):
        request, prefill, decode, _, _ = running
        if prefill is not None:
            prefill.worker.cancel(request.key)
        decode.worker.cancel(request.key)

    def finish(self, running, timeout_s=120.0) -> Outcome:
        """Wait for a request's end, as a router would: the first token from prefill, the others from decode."""
        request, prefill, decode, prefill_sink, decode_sink = running
        outcome = Outcome()
        if prefill is None:
            local: Outcome = self._finish_local(request, outcome, decode, decode_sink.events(timeout_s))
            return local
        try:
            for event in prefill_sink.events(timeout_s):
                if event.HasField("prompt_logprobs"):
                    outcome.prompt_logprobs += map(wire.logprobs_from_proto, event.prompt_logprobs.tokens)
                elif event.HasField("first_token"):
                    if event.first_token.HasField("logprobs"):
                        outcome.logprobs.append(wire.logprobs_from_proto(event.first_token.logprobs))
                    assert event.first_token.index == request.num_forced
                    outcome.token_ids.append(event.first_token.token)
                    outcome.finish_reason = event.first_token.finish_reason
                    outcome.num_cached_tokens = event.first_token.num_cached_tokens
                else:
                    outcome.prefill_done = event.done
            if outcome.finish_reason:
                decode.worker.cancel(request.key)
                return outcome
            for event in decode_sink.events(timeout_s):
                tokens = event.tokens
                assert tokens.index == request.num_forced + len(outcome.token_ids)
                outcome.decode_steps.append(list(tokens.token_ids))
                outcome.token_ids.extend(tokens.token_ids)
                outcome.logprobs += map(wire.logprobs_from_proto, tokens.logprobs)
                if tokens.finish_reason:
                    outcome.finish_reason = tokens.finish_reason
                    outcome.decode_stats = tokens.stats
        except BatonError as error:
            outcome.error = error
            self.cancel(running)
        return outcome

    @staticmethod
    def _finish_local(request, outcome, decode, events):
        """Everything from one worker; nothing comes before the reports on the prompt, or behind the end."""
        try:
            for event in events:
                assert not outcome.finish_reason
                kind = event.WhichOneof("event")
                if kind == "prompt_logprobs":
                    assert not outcome.token_ids
                    outcome.prompt_logprobs += map(wire.logprobs_from_proto, event.prompt_logprobs.tokens)
                    continue
                if kind == "first_token":
                    first = event.first_token
                    index, tokens, logprobs = first.index, [first.token], [first.logprobs] * first.HasField("logprobs")
                    outcome.finish_reason = first.finish_reason
                    outcome.first = first
                else:
                    assert kind == "tokens"
                    index, tokens, logprobs = event.tokens.index, event.tokens.token_ids, event.tokens.logprobs
                    outcome.decode_steps.append(list(tokens))
                    outcome.finish_reason = event.tokens.finish_reason
                    outcome.decode_stats = event.tokens.stats if event.tokens.finish_reason else None
                assert index == request.num_forced + len(outcome.token_ids)
                outcome.token_ids.extend(tokens)
                outcome.logprobs += map(wire.logprobs_from_proto, logprobs)
        except BatonError as error:
            outcome.error = error
            decode.worker.cancel(request.key)
        return outcome

    def generate(self, requests, timeout_s=120.0, *, local=False) -> list[Outcome]:
        """All requests at once; every emitted token is accounted for."""
        start = self.start_local if local else self.start
        outcomes = [self.finish(running, timeout_s) for running in [start(request) for request in requests]]
        for outcome in outcomes:
            stats = outcome.decode_stats
            if stats is not None:
                assert stats.num_emitted_tokens + 1 == len(outcome.token_ids)
                assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
        return outcomes

    def inventories(self):
        return [side.worker.inventory() for side in (*self.prefill, *self.decode)]

    def idle(self) -> bool:
        """Whether no worker holds anything of any request."""
        return all(
            inventory.num_blocks_free == inventory.num_blocks
            and inventory.num_requests_held == 0
            and inventory.num_kv_receives == 0
            and inventory.num_slots_in_use == 0
            and inventory.num_blocks_quarantined == 0
            for inventory in self.inventories()
        )

    def wait_idle(self, timeout_s=STALLS_S) -> float:
        """Seconds until everything is released; by default sooner than a lease could end."""
        start_s = time.monotonic()
        while not self.idle():
            assert time.monotonic() - start_s < timeout_s, self.inventories()
            time.sleep(0.005)
        return time.monotonic() - start_s


def live_threads():
    """Names of the threads that are alive, for leak checks."""
    return sorted(thread.name for thread in threading.enumerate())
