"""The decode role: grants landings, admits what is sealed and verified, and decodes it speculatively.

A plain class around one loop thread, so that tests run it without Ray. No step ever reads blocks of a landing that
is not sealed: a sequence enters a slot only through `Sealed`, which kvtransfer sends once every position of every
layer is there and its digest matches.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from baton.core.clock import Clock
from baton.core.config import SchedulingName
from baton.core.errors import (
    BatonError,
    InvalidRequest,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    as_internal,
)
from baton.core.logprobs import TokenLogprobs
from baton.core.logs import shown
from baton.core.pace import PrefillPace
from baton.core.request import AttemptKey, FinishReason, GenerationRequest
from baton.core.span import Tracer
from baton.core.tokenizer import Tokenizer
from baton.core.validate import RequestLimits, validate_attempt
from baton.decode_worker.chunk_budget import ChunkBudget
from baton.decode_worker.events import first_token_event, prompt_logprobs_event, token_event
from baton.decode_worker.handover import check_reserve, sequence_start
from baton.decode_worker.inventory import decode_inventory
from baton.decode_worker.recompute import Computed, Prefill, Recompute
from baton.decode_worker.returns import Returns, admit
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequence import DecodeSequence, DecodeState, DecodeStream
from baton.decode_worker.tracing import trace_decode
from baton.engine.decode import DecodeRunner
from baton.engine.finish import FinishChecker
from baton.engine.gang import LeadDecode
from baton.engine.grammar import check_compiles
from baton.engine.preemption import Preemption
from baton.engine.prefill import SequenceStart
from baton.engine.speculation import Speculation
from baton.engine.step_pipeline import StepPipeline
from baton.engine.step_tally import Dropped, Fate, StepTally
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.kvtransfer.landing import Drained, LandingFailed, LandingService, ReserveWanted, Sealed
from baton.proto import kv_pb2, worker_pb2
from baton.worker.cork import Cork
from baton.worker.gate import Gate
from baton.worker.loop import LoopThread

FINISHED = "finished"

log = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker; `attend` and `cancel` may be called from any thread.

    With `prefill`, over the same pool, it takes more sequences than its pool holds to their ends (`overcommit`), and
    preempts; `preempt_at` is for tests: preempt every sequence once at each of these output lengths, or later.
    """

    def __init__(
        self,
        *,
        runner: DecodeRunner | LeadDecode,
        pool: KVPool,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        landing: LandingService,
        max_num_seqs: int,
        max_queue_len: int,
        clock: Clock,
        on_fatal: Callable[[BaseException], None],
        scheduling: SchedulingName = "async",
        prefill: Prefill | None = None,
        chunk_len: int = 256,
        overcommit: bool = False,
        preempt_at: Sequence[int] = (),
        speculation: Speculation | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        assert prefill is not None or not (overcommit or preempt_at), "what is dropped must be computed again"
        self._runner = runner
        self.speculation = speculation or Speculation(runner.num_draft_tokens, runner.num_draft_tokens, clock)
        self._steps = StepPipeline[DecodeSequence](runner, scheduling, self.speculation)
        self._pool = pool
        self._tokenizer = tokenizer
        self._landing = landing
        self._clock = clock
        self._allocator = BlockAllocator(pool.num_blocks, pool.layout.block_size)
        self._scheduler = DecodeScheduler(self._allocator, max_num_seqs, overcommit=overcommit)
        self._preemption = Preemption(self._allocator, self._scheduler, runner, self._steps)
        self._recompute = None if prefill is None else self._make_recompute(prefill, chunk_len)
        self._returns = Returns(self._scheduler, self._preemption, self._steps, runner, self._recompute, preempt_at)
        self._limits = dataclasses.replace(limits, decode_capacity_len=pool.num_blocks * pool.layout.block_size)
        self._gate = Gate("the decode worker is full", max_queue_len)
        self._tally = StepTally(runner.num_draft_tokens)
        self.cork = Cork()  # held while a step is published
        self._num_finished = 0
        self._num_failed = 0
        self._loop = LoopThread("decode-loop", self._step, on_fatal)
        landing.wakeup = self._loop.wake

    def _make_recompute(self, prefill: Prefill, chunk_len: int) -> Recompute:
        pace, meter = PrefillPace(), self._runner.meter
        budget = ChunkBudget(chunk_len, pace, lambda: meter.times()[0])
        return Recompute(
            prefill, chunk_len, budget=budget, pace=pace, on_computed=self._publish_computed, clock=self._clock
        )

    def start(self) -> None:
        """Begin to serve."""
        self._landing.start()
        self._loop.start()

    def close(self) -> None:
        """Stop; requests that are here end with `RequestCancelled`."""
        self._loop.close()
        self._runner.drain()  # a step in flight writes the pool, whose memory is the landing's
        for sequence in self._scheduler.sequences():
            sequence.stream.end(RequestCancelled("the decode worker is shutting down"))
        self._landing.close()

    def attend(self, request: GenerationRequest, stream: DecodeStream, *, prefill_here: bool = False) -> None:
        """Expect this attempt's landing, or compute its prompt here; tokens go to `stream`. Allocates nothing.

        Raises:
            InvalidRequest: it can never be served here.
            Overloaded: too many streams are open.
        """
        if prefill_here and self._recompute is None:
            raise InvalidRequest("this decode worker computes no prompts", field="prefill_here")
        self.check(request)
        checker = FinishChecker.of(request, self._tokenizer)
        sequence = DecodeSequence(request, stream, checker, is_local=prefill_here)
        self._gate.enter()
        try:
            self._loop.post(lambda: self._add(sequence), always=True)
        except BaseException:  # it was not posted
            self._gate.leave()
            raise

    def check(self, request: GenerationRequest) -> None:
        """What `attend` checks first; a new grammar is compiled, which may take a while. Any thread.

        Raises:
            InvalidRequest: it can never be served here.
        """
        validate_attempt(request, self._limits)
        check_compiles(request.sampling.grammar, self._runner.grammars, request.forced_token_ids)

    def cancel(self, key: AttemptKey, stream: DecodeStream | None = None) -> None:
        """Give a request up, wherever it is. Unknown keys are fine: it may have ended.

        Args:
            key: the attempt.
            stream: if given, only the request that this stream was opened for.
        """
        self._loop.post(lambda: self._cancel(key, stream), always=True)

    def inventory(self) -> worker_pb2.Inventory:
        """What this worker holds. Any thread; counts may be a step apart from each other."""
        found = decode_inventory(
            self._scheduler,
            self._allocator,
            self._runner,
            self._tally,
            self._landing.inventory(),
            self._preemption.counts,
            self._recompute,
            num_host_blocks_used=self._preemption.num_host_blocks_used,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            max_handoff_len=self._landing.staging_len,
        )
        if self._runner.grammars is not None:
            found.grammar_seconds = self._runner.grammars.spent_s
        return found

    # The loop: receive -> preempt -> grant -> admit -> launch -> publish. Everything below runs on the loop thread.

    def _step(self) -> bool:
        worked = self._receive()
        self._expire()
        for key in self._returns.preempt():
            self._landing.release(key)
        self._returns.start()
        self._grant()
        self._admit()
        has_launched = self._returns.compute() and self._launch()
        self._runner.meter.copy_if_wanted()
        is_stepping = has_launched or self._returns.is_working or not self._steps.is_empty
        self._read(has_launched)
        return worked or is_stepping

    def _add(self, sequence: DecodeSequence) -> None:
        key = sequence.key
        if self._scheduler.get(key) is not None:
            sequence.stream.end(RequestCancelled(f"{key} is already here", key=str(key)))
            self._gate.leave()
            return
        sequence.times.attended_s = self._clock.now_s()
        self._scheduler.add(sequence)

    def _receive(self) -> bool:
        events = self._landing.poll()
        for event in events:
            if isinstance(event, ReserveWanted):
                if not self._scheduler.want(event):
                    self._landing.deny(event.attempt, kv_pb2.Deny.STALE, "the attempt has ended")
                continue
            if isinstance(event, Drained):
                self._scheduler.drained(event.attempt)
                continue
            if isinstance(event, LandingFailed):
                self._scheduler.drop_reserves(event.attempt)
            sequence = self._scheduler.get(event.attempt)
            if sequence is None:
                continue
            match event:
                case Sealed():
                    self._sealed(sequence, event)
                case LandingFailed():
                    self._landing_failed(sequence, event)
        return bool(events)

    def _landing_failed(self, sequence: DecodeSequence, event: LandingFailed) -> None:
        error = TransferFailed(f"the KV hand-off failed: {event.reason}")
        if event.by_peer and not sequence.stream.ended:
            # The prefill worker gave the request up and counts it itself: finished at its first token, or failed.
            sequence.stream.end(error)
        self._fail(sequence, error)

    def _sealed(self, sequence: DecodeSequence, event: Sealed) -> None:
        if sequence.state is not DecodeState.LANDING:
            return
        try:
            start = self._sequence_start(sequence, event)
        except Exception as error:  # noqa: BLE001  what its commit raises ends this request
            self._scheduler.seal(sequence, event, None)
            self._fail(sequence, as_internal("the hand-off of a request", error))
        else:
            sequence.handoff_ms = 1e3 * max(self._clock.now_s() - event.prefill_end_s, 0.0)
            self._scheduler.seal(sequence, event, start)

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for sequence in self._scheduler.sequences():
            if not sequence.stream.ended and sequence.request.deadline_s <= now_s:
                self._fail(sequence, RequestDeadlineExceeded("the deadline passed before the last token"))
        for reserve in self._scheduler.expired_reserves(now_s):
            self._landing.deny(reserve.attempt, kv_pb2.Deny.BUSY, "no blocks, or no stream, in time")

    def _grant(self) -> None:
        for reserve, attending in self._scheduler.open_reserves():
            try:
                check_reserve(reserve, attending.request)
            except TransferFailed as error:
                self._fail(attending, error)
        while (sequence := self._scheduler.next_grant()) is not None:
            assert sequence.table is not None
            sequence.times.granted_s = self._clock.now_s()
            self._landing.grant(sequence.key, sequence.table)

    def _admit(self) -> None:
        while (sequence := self._scheduler.next_admission()) is not None:
            sealed, start = sequence.sealed, sequence.start
            assert sealed is not None
            assert start is not None
            sequence.times.admitted_s = now_s = self._clock.now_s()
            sequence.handoff_ms = 1e3 * max(now_s - sealed.prefill_end_s, 0.0)  # until it has a slot
            admit(self._runner, sequence, start)

    def _sequence_start(self, sequence: DecodeSequence, sealed: Sealed) -> SequenceStart:
        start = sequence_start(
            sealed,
            sequence.request,
            vocab_size=self._limits.vocab_size,
            hidden_size=self._runner.hidden_size,
            dtype=self._runner.hidden_dtype,
        )
        _, reason = sequence.checker.accept([start.first_token])
        if reason is not None:
            raise TransferFailed("the commit of the prefill worker cannot be: its first token ends the request")
        return start

    def _launch(self) -> bool:
        running = self._scheduler.running()
        return self._preemption.launch([sequence.slot for sequence in running], running)

    def _read(self, has_launched: bool) -> None:
        proposed_lens: list[int] = []
        accepted_lens: list[int] = []
        dropped: list[Dropped] = []
        num_emitted, has_read = 0, False
        published: list[tuple[DecodeSequence, list[int], Sequence[TokenLogprobs], FinishReason | None]] = []
        for sequence, emitted in self._steps.collect(has_launched=has_launched):
            has_read = True
            if emitted.is_idle and emitted.error is None:
                continue  # its grammar was late; the next step has it again
            if sequence.state is not DecodeState.RUNNING:
                dropped.append(Dropped(Fate.LATE, emitted))  # it ended, or was given up, after this step was launched
                continue
            if emitted.error is not None:
                dropped.append(Dropped(Fate.FAILED, emitted))
                self._fail(sequence, emitted.error)
                continue
            try:
                kept, reason = sequence.checker.accept(emitted.token_ids)
            except Exception as error:  # noqa: BLE001  likewise below: it ends the request whose text was looked at
                dropped.append(Dropped(Fate.FAILED, emitted))
                self._fail(sequence, as_internal("a token of a request", error))
                continue
            proposed_len, num_accepted = emitted.proposed_len, min(emitted.accepted_len, len(kept))
            sequence.counts.add_step(num_proposed=proposed_len, num_accepted=num_accepted, num_emitted=len(kept))
            proposed_lens.append(proposed_len)
            accepted_lens.append(num_accepted)
            num_emitted += len(kept)
            if reason is not None and len(kept) < len(emitted.token_ids):
                dropped.append(Dropped(Fate.CUT, emitted, len(kept)))
            published.append((sequence, kept, (emitted.logprobs or ())[: len(kept)], reason))
        if has_read:  # counted before anybody hears of it
            self._tally.add_step(proposed_lens, accepted_lens, num_emitted, dropped)
        with self.cork.hold():
            for sequence, kept, logprobs, reason in published:
                try:
                    self._publish(sequence, kept, logprobs, reason)
                except Exception as error:  # what one request's events raise ends that request
                    if sequence.state is DecodeState.ENDED:  # what it still holds is not known: that ends the loop
                        raise
                    self._fail(sequence, as_internal("a token of a request", error))

    def _publish_computed(self, sequence: DecodeSequence, computed: Computed) -> None:
        if computed.prompt_logprobs:
            sequence.stream.emit(prompt_logprobs_event(computed.prompt_logprobs))
        token = computed.first_token
        if token is None:
            return
        _, reason = sequence.checker.accept([token])
        sequence.stream.emit(first_token_event(sequence, token, computed, reason))
        if reason is not None:  # nothing is decoded
            sequence.stream.end()
            self._num_finished += 1
            self._give_up(sequence, FINISHED)

    def _publish(
        self,
        sequence: DecodeSequence,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs],
        reason: FinishReason | None,
    ) -> None:
        sequence.stream.emit(token_event(sequence, token_ids, logprobs, reason, self._clock.now_s()))
        sequence.token_ids += token_ids
        if reason is not None:
            sequence.stream.end()
            self._num_finished += 1
            self._give_up(sequence, FINISHED)

    def _cancel(self, key: AttemptKey, stream: DecodeStream | None) -> None:
        sequence = self._scheduler.get(key)
        if sequence is not None and stream in (None, sequence.stream):
            self._fail(sequence, RequestCancelled("cancelled"))

    def _fail(self, sequence: DecodeSequence, error: BatonError) -> None:
        if not sequence.stream.ended:
            sequence.stream.end(error)
            if not isinstance(error, RequestCancelled):
                log.warning("%s failed: %s", sequence.key, shown(error))
                self._num_failed += 1
        self._give_up(sequence, error.message)

    def _give_up(self, sequence: DecodeSequence, why: str) -> None:
        """Stop working on a request. Blocks that may still be written are quarantined until the landing has drained."""
        for reserve in self._scheduler.drop_reserves(sequence.key):
            self._landing.deny(reserve.attempt, kv_pb2.Deny.STALE, why)
        if self._tracer is not None and sequence.state is not DecodeState.ENDED:
            trace_decode(self._tracer, sequence, self._clock.now_s(), "" if why is FINISHED else why)
        match sequence.state:
            case DecodeState.LANDING:
                self._landing.abort(sequence.key, why)
                self._scheduler.quarantine(sequence)
                self._gate.leave()
            case DecodeState.ATTENDING:
                self._forget(sequence)
            case DecodeState.READY:
                # Sealed: nothing of this landing is written any more, so its blocks are free at once.
                if not sequence.is_local:
                    self._landing.release(sequence.key)
                self._forget(sequence)
            case DecodeState.RUNNING:
                if sequence.num_preemptions == 0 and not sequence.is_local:
                    self._landing.release(sequence.key)
                self._scheduler.retire(sequence)
                self._gate.leave()
                self._steps.retire(sequence.slot, lambda: self._scheduler.free(sequence))
            case DecodeState.PREEMPTED | DecodeState.COMPUTING:
                self._preemption.forget(sequence)
                self._forget(sequence)
            case DecodeState.ENDED:
                pass

    def _forget(self, sequence: DecodeSequence) -> None:
        self._scheduler.remove(sequence)
        self._gate.leave()
