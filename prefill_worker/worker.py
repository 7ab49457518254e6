"""The prefill role: reads prompts, pushes their KV while it computes, hands over to a decode worker.

A plain class around one loop thread, so that tests run it without Ray. It owns the order of a request's steps; the
arithmetic is engine's, the hand-off kvtransfer's.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.core.clock import Clock
from baton.core.errors import (
    BatonError,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    as_internal,
)
from baton.core.logprobs import TokenLogprobs
from baton.core.logs import shown
from baton.core.pace import PrefillPace
from baton.core.rate import FullStepRate, RateMeter
from baton.core.request import AttemptKey, FinishReason, GenerationRequest
from baton.core.span import Tracer
from baton.core.tokenizer import Tokenizer
from baton.core.validate import RequestLimits, validate_attempt
from baton.engine.finish import FinishChecker
from baton.engine.gang import LeadPrefill
from baton.engine.grammar import check_compiles
from baton.engine.prefill import PrefillChunk, PrefillRunner, SequenceStart
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.pool import KVPool
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvtransfer.async_writer import PushPart
from baton.kvtransfer.push import Acked, DecodePeer, Denied, Granted, PushDrained, PushFailed, PushService
from baton.prefill_worker.denial import error_of
from baton.prefill_worker.gang import GangPush
from baton.prefill_worker.inventory import prefill_inventory
from baton.prefill_worker.prefix_names import PrefixNames
from baton.prefill_worker.scheduler import ChunkPlan, PrefillScheduler, PrefillSequence, PrefillState
from baton.prefill_worker.tracing import trace_prefill
from baton.proto import kv_pb2, worker_pb2
from baton.proto.wire import logprobs_to_proto
from baton.worker.gate import Gate
from baton.worker.loop import LoopThread
from baton.worker.stream import EventSink

MAX_RESERVE_WAIT_S = 3600.0

log = logging.getLogger(__name__)

PrefillStream = EventSink[worker_pb2.PrefillEvent]


@dataclass(slots=True)
class _Run:
    """What the worker keeps of a request beside its sequence."""

    sequence: PrefillSequence
    peer: DecodePeer
    stream: PrefillStream
    handed_over: bool = False  # this attempt has a push that kvtransfer knows


class PrefillWorker:
    """One prefill worker; `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        *,
        runner: PrefillRunner | LeadPrefill,
        pool: KVPool,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        push: PushService | GangPush,
        chunk_len: int,
        max_num_seqs: int,
        max_queue_len: int,
        prefix_cache: bool = True,
        clock: Clock,
        on_fatal: Callable[[BaseException], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._runner = runner
        self._tokenizer = tokenizer
        self._push = push
        self._clock = clock
        self.names = PrefixNames(pool.layout, with_mtp=runner.has_mtp, enabled=prefix_cache)
        self.block_log = BlockLog()
        index = PrefixIndex(self.block_log)
        self._allocator = BlockAllocator(pool.num_blocks, pool.layout.block_size, index)
        self._rate, self._pace = RateMeter(), PrefillPace()
        self._full_rate, self._chunk_len = FullStepRate(), chunk_len
        self._scheduler = PrefillScheduler(self._allocator, chunk_len, max_num_seqs)
        capacity_len = pool.num_blocks * pool.layout.block_size
        self._limits = dataclasses.replace(limits, prefill_capacity_len=capacity_len)
        self._gate = Gate("the prefill worker is full", max_queue_len)
        self._runs: dict[AttemptKey, _Run] = {}
        self._num_finished = 0
        self._num_failed = 0
        self._loop = LoopThread("prefill-loop", self._step, on_fatal)
        push.wakeup = self._loop.wake

    def start(self) -> None:
        """Begin to serve."""
        self._push.start()
        self._loop.start()

    def close(self) -> None:
        """Stop; requests that are here end with `RequestCancelled`."""
        self._loop.close()
        for run in self._runs.values():
            run.stream.end(RequestCancelled("the prefill worker is shutting down"))
        self._push.close()

    def submit(self, request: GenerationRequest, peer: DecodePeer, stream: PrefillStream) -> None:
        """Queue a request whose KV goes to `peer`; events and errors go to `stream`.

        Raises:
            InvalidRequest: it can never be served here.
            Overloaded: the queue is full.
        """
        self.check(request)
        names = self.names.of(request)
        self._gate.enter()
        try:
            self._loop.post(lambda: self._add(request, peer, stream, names), always=True)
        except BaseException:
            self._gate.leave()
            raise

    def check(self, request: GenerationRequest) -> None:
        """What `submit` checks first; a new grammar is compiled, which may take a while. Any thread.

        Raises:
            InvalidRequest: it can never be served here.
        """
        validate_attempt(request, self._limits)
        check_compiles(request.sampling.grammar, self._runner.grammars, request.forced_token_ids)
        FinishChecker.of(request, self._tokenizer)

    def cancel(self, key: AttemptKey, stream: PrefillStream | None = None) -> None:
        """Give a request up, wherever it is. Unknown keys are fine: it may have ended.

        Args:
            key: the attempt.
            stream: if given, only the request that this stream was submitted with.
        """
        self._loop.post(lambda: self._cancel(key, stream), always=True)

    def inventory(self) -> worker_pb2.Inventory:
        """What this worker holds. Any thread; counts may be a step apart from each other."""
        found = prefill_inventory(
            self._scheduler,
            self._allocator,
            self._push,
            self._rate,
            self._pace,
            full_tokens_per_s=self._full_rate.per_s(self._clock.now_s()),
            num_requests=len(self._runs),
            num_finished=self._num_finished,
            num_failed=self._num_failed,
        )
        if self._runner.grammars is not None:
            found.grammar_seconds = self._runner.grammars.spent_s
        return found

    # The loop: receive -> reserve -> schedule -> forward -> publish. Everything below runs on the loop thread.

    def _step(self) -> bool:
        worked = self._receive()
        self._expire()
        self._reserve()
        chunks = self._scheduler.plan()
        if chunks:
            self._forward(chunks)
        return worked or bool(chunks)

    def _add(
        self, request: GenerationRequest, peer: DecodePeer, stream: PrefillStream, block_names: tuple[bytes, ...]
    ) -> None:
        if request.key in self._runs:
            stream.end(RequestCancelled(f"{request.key} is already here", key=str(request.key)))
            self._gate.leave()
            return
        marks_s = {"submitted": self._clock.now_s()}
        sequence = PrefillSequence(request, peer.worker_id, block_names=block_names, marks_s=marks_s)
        self._runs[request.key] = _Run(sequence, peer, stream)
        self._scheduler.add(sequence)

    def _receive(self) -> bool:
        events = self._push.poll()
        for event in events:
            run = self._runs.get(event.attempt)
            if run is None:
                continue
            match event:
                case Granted():
                    self._granted(run)
                case Denied():
                    self._denied(run, event)
                case Acked():
                    self._acked(run, event)
                case PushFailed():
                    self._push_failed(run, event)
                case PushDrained():
                    self._drained(run)
        return bool(events)

    def _granted(self, run: _Run) -> None:
        if run.sequence.state is PrefillState.RESERVING:
            run.sequence.state = PrefillState.READY
            run.sequence.marks_s["granted"] = self._clock.now_s()
            if run.sequence.num_cached:  # what is not computed is on its way before the first forward
                self._push.push_cached(run.sequence.key, 0, run.sequence.num_cached)

    def _denied(self, run: _Run, event: Denied) -> None:
        self._end(run, self._or_late(run, error_of(event)))
        self._forget(run)

    def _acked(self, run: _Run, event: Acked) -> None:
        # An abort may have crossed the acknowledgement; then the stream has ended already.
        if not run.stream.ended:
            lane = self._push.lanes().get(run.peer.kv_address)
            done = worker_pb2.PrefillDone(
                kv_bytes_pushed=event.bytes_pushed, handed_off=True, kv_lane="" if lane is None else lane.lane
            )
            run.stream.emit(worker_pb2.PrefillEvent(done=done))
            run.stream.end()
            self._num_finished += 1
        self._forget(run)

    def _push_failed(self, run: _Run, event: PushFailed) -> None:
        error = TransferFailed(f"the KV hand-off failed: {event.reason}", reason=event.reason)
        self._fail(run, self._or_late(run, error))

    def _or_late(self, run: _Run, error: BatonError) -> BatonError:
        """Both sides hold the same deadline; where decode saw it first, its word arrives here as a failed hand-off."""
        is_late = run.sequence.request.deadline_s <= self._clock.now_s()
        return RequestDeadlineExceeded("the deadline passed during prefill") if is_late else error

    def _drained(self, run: _Run) -> None:
        # A push that ended by itself (its decode worker died) is reported failed first, so the stream has ended.
        assert run.stream.ended
        self._forget(run)

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for run in tuple(self._runs.values()):
            if not run.stream.ended and run.sequence.request.deadline_s <= now_s:
                self._fail(run, RequestDeadlineExceeded("the deadline passed during prefill"))

    def _reserve(self) -> None:
        now_s = self._clock.now_s()
        while (sequence := self._scheduler.next_to_reserve(now_s)) is not None:
            sequence.marks_s["reserved"] = now_s
            run = self._runs[sequence.key]
            run.handed_over = True
            assert sequence.table is not None
            self._push.reserve(
                sequence.key,
                run.peer,
                sequence.table,
                prompt_len=sequence.request.prompt_len,
                capacity_len=sequence.request.capacity_len,
                wait_s=min(max(sequence.request.deadline_s - now_s, 0.001), MAX_RESERVE_WAIT_S),
            )

    def _forward(self, plan: list[ChunkPlan]) -> None:
        start_s = self._clock.now_s()
        for chunk in plan:
            chunk.sequence.marks_s.setdefault("started", start_s)
        chunks = [self._chunk(chunk) for chunk in plan]
        writer = self._push.writer
        with writer.step([PushPart(c.sequence.key, c.start, c.length) for c in plan]) as step:
            forward = self._runner.forward(chunks, step.submit)
            first_token_s = self._clock.now_s()
            reports = zip(forward.first_tokens, forward.first_logprobs, forward.prompt_logprobs, strict=True)
            for chunk, (first_token, logprobs, prompt_logprobs) in zip(plan, reports, strict=True):
                chunk.sequence.computed(chunk.length, start_s, first_token_s)
                run = self._runs[chunk.sequence.key]
                try:
                    if prompt_logprobs:
                        self._publish_prompt_logprobs(run, prompt_logprobs)
                    if first_token is not None:
                        self._publish_first_token(run, first_token, logprobs, first_token_s)
                except Exception as error:  # noqa: BLE001  what one request's events raise ends that request
                    self._fail(run, as_internal("the first token of a request", error))
            starts = self._runner.draft(forward, step.submit)
        end_s, num_tokens = self._clock.now_s(), sum(chunk.length for chunk in plan)
        self._rate.add(num_tokens, end_s - start_s)
        self._full_rate.add(num_tokens, end_s - start_s, end_s, full_len=self._chunk_len)
        self._pace.add(num_tokens, end_s - start_s, end_s - first_token_s)
        for chunk in plan:
            self._scheduler.name_blocks(chunk)
        for chunk, start in zip(plan, starts, strict=True):
            ready = self._runs.get(chunk.sequence.key)
            if start is not None and ready is not None and ready.sequence.state is PrefillState.READY:
                self._hand_over(ready, start, first_token_s)

    def _chunk(self, chunk: ChunkPlan) -> PrefillChunk:
        request, table = chunk.sequence.request, chunk.sequence.table
        assert table is not None
        assert chunk.start >= chunk.sequence.num_cached, "shared blocks are only read"
        return PrefillChunk(
            prompt_token_ids=request.prompt_token_ids,
            start=chunk.start,
            length=chunk.length,
            table=table,
            sampling=request.sampling,
            draft_cap=request.num_draft_tokens,
            choice=request.choice,
            output_len=request.num_forced,
        )

    def _publish_prompt_logprobs(self, run: _Run, reports: Sequence[TokenLogprobs]) -> None:
        tokens = [logprobs_to_proto(report) for report in reports]
        run.stream.emit(worker_pb2.PrefillEvent(prompt_logprobs=worker_pb2.PromptLogprobs(tokens=tokens)))

    def _publish_first_token(self, run: _Run, token: int, logprobs: TokenLogprobs | None, now_s: float) -> None:
        marks, request = run.sequence.marks_s, run.sequence.request
        _, reason = FinishChecker.of(request, self._tokenizer).accept([token])
        first = worker_pb2.FirstToken(
            token=token,
            finish_reason=reason.value if reason else "",
            queue_ms=1e3 * (marks["reserved"] - marks["submitted"]),
            landing_ms=1e3 * (marks["granted"] - marks["reserved"]),
            prefill_ms=1e3 * (now_s - marks["granted"]),
            received_ns=int(1e9 * marks["submitted"]),
            sent_ns=int(1e9 * now_s),
            num_cached_tokens=run.sequence.num_cached,
            logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
            index=request.num_forced,
        )
        run.stream.emit(worker_pb2.PrefillEvent(first_token=first))
        if reason is not None:
            self._end_here(run, reason)

    def _end_here(self, run: _Run, reason: FinishReason) -> None:
        """The first token ended the request: the landing is given back, nothing is decoded."""
        log.debug("%s ended at its first token: %s", run.sequence.key, reason.value)
        run.stream.emit(worker_pb2.PrefillEvent(done=worker_pb2.PrefillDone(handed_off=False)))
        run.stream.end()
        self._num_finished += 1
        self._give_up(run, "ended at its first token")

    def _hand_over(self, run: _Run, start: SequenceStart, first_token_s: float) -> None:
        run.sequence.marks_s["handed over"] = now_s = self._clock.now_s()
        draft_ms = 1e3 * (now_s - first_token_s)
        state = kv_pb2.SequenceState(first_token=start.first_token, num_draws=1, draft_ms=draft_ms)
        if start.draft_token is not None:
            assert start.hidden_D is not None
            state.draft_tokens.append(start.draft_token)
            # bfloat16 has no numpy type, so the bytes are taken as bytes.
            state.hidden = start.hidden_D.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        run.sequence.state = PrefillState.COMMITTING
        self._push.commit(run.sequence.key, state, first_token_s)

    def _cancel(self, key: AttemptKey, stream: PrefillStream | None) -> None:
        run = self._runs.get(key)
        if run is not None and stream in (None, run.stream):
            self._fail(run, RequestCancelled("cancelled"))

    def _fail(self, run: _Run, error: BatonError) -> None:
        self._end(run, error)
        self._give_up(run, error.message)

    def _end(self, run: _Run, error: BatonError) -> None:
        if not run.stream.ended:
            run.stream.end(error)
            run.sequence.error = error.message
            if not isinstance(error, RequestCancelled):
                log.warning("%s failed: %s", run.sequence.key, shown(error))
                self._num_failed += 1

    def _give_up(self, run: _Run, why: str) -> None:
        """Stop working on a request. Blocks that a push may still read are freed when it has drained."""
        if run.sequence.state is PrefillState.ABORTING:
            return
        if not run.handed_over:
            self._forget(run)
            return
        run.sequence.state = PrefillState.ABORTING
        self._push.abort(run.sequence.key, why)

    def _forget(self, run: _Run) -> None:
        if self._tracer is not None:
            trace_prefill(self._tracer, run.sequence, self._clock.now_s())
        del self._runs[run.sequence.key]
        self._scheduler.remove(run.sequence)
        self._gate.leave()
