"""Baton in one process: continuous batching over one model and one pool, without Ray, sockets or hand-off.

It is the reference every other arrangement is compared with, and what `baton generate --local` calls. It refuses what
can never fit with a typed error before anything is allocated, and ends every request by its deadline. Not thread-safe:
one caller drives it.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from baton.core.clock import Clock, MonotonicClock
from baton.core.config import SchedulingName
from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import BatonError, RequestCancelled, RequestDeadlineExceeded
from baton.core.logprobs import TokenLogprobs
from baton.core.request import AttemptKey, GenerationRequest, choices_of
from baton.core.step_report import StepReport
from baton.core.tokenizer import Tokenizer
from baton.core.validate import RequestLimits, validate_request
from baton.core.verification import VerificationConfig
from baton.engine.decode import DecodeRunner
from baton.engine.finish import FinishChecker
from baton.engine.generation import GenerationResult, TokenEvent
from baton.engine.grammar import GrammarCompiler
from baton.engine.graphed_step import graphed_step
from baton.engine.kernel_warm_up import Reach
from baton.engine.local_scheduler import LocalScheduler, LocalSequence
from baton.engine.preemption import Preemption, PreemptionCounts
from baton.engine.prefill import PrefillRunner, SequenceStart
from baton.engine.speculation import Speculation
from baton.engine.step_pipeline import StepPipeline
from baton.engine.step_tally import Dropped, Fate, StepTally
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.model import Model


class LocalEngine:
    """Runs requests to completion on one model.

    With `scheduling="async"` a decode step is launched before the results of the one before are read; the tokens, and
    how many drafts are accepted in each step, are those of "sync".

    Args:
        model: with an MTP head if there are drafts.
        tokenizer: of the model.
        num_blocks: of the pool.
        block_size: positions of a block.
        num_draft_tokens: the most drafts of a step; requests may ask for fewer.
        chunk_len: prompt tokens of a prefill step.
        max_num_sequences: that run at once.
        clock: of deadlines and times.
        scheduling: see above.
        verification: of drafts.
        overcommit: start sequences without all the blocks they may need, and preempt when none is left.
        host_kv_bytes: host memory for the KV of preempted sequences; without it, it is computed again.
        preempt_at: also preempt every sequence once at each of these output lengths, or when steps have passed it; 0 is
            in the prompt, where that takes several chunks. For tests.
        graphs: which CUDA graphs to capture; none if None.
        speculation: how many drafts each step makes, which may be changed while the engine runs; `num_draft_tokens` if
            None.
        grammars: of this model and tokenizer; made here if None.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        num_blocks: int,
        block_size: int,
        num_draft_tokens: int,
        chunk_len: int,
        max_num_sequences: int,
        clock: Clock | None = None,
        scheduling: SchedulingName = "async",
        verification: VerificationConfig | None = None,
        overcommit: bool = False,
        host_kv_bytes: int = 0,
        preempt_at: Sequence[int] = (),
        graphs: CudaGraphConfig | None = None,
        speculation: Speculation | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        self.pool = KVPool(model.kv_layout(block_size), num_blocks, model.device)
        allocator = BlockAllocator(num_blocks, block_size)
        self._scheduler = LocalScheduler(
            allocator, num_slots=max_num_sequences, chunk_len=chunk_len, overcommit=overcommit
        )
        eos_token_ids = tokenizer.eos_token_ids
        self._grammars = grammars or GrammarCompiler(tokenizer, model.config.vocab_size)
        self._prefill = PrefillRunner(model, self.pool, eos_token_ids=eos_token_ids, grammars=self._grammars)
        self._decode = DecodeRunner(
            model,
            self.pool,
            max_num_sequences,
            num_draft_tokens,
            eos_token_ids=eos_token_ids,
            verification=verification,
            grammars=self._grammars,
            host_kv_bytes=host_kv_bytes,
            clock=self._clock,
            step=graphed_step(
                model,
                self.pool,
                graphs or CudaGraphConfig(mode="off"),
                max_num_sequences=max_num_sequences,
                num_draft_tokens=num_draft_tokens,
                max_model_len=model.config.max_model_len,
            ),
        )
        context_len = min(model.config.max_model_len, num_blocks * block_size)
        reach = Reach(num_tokens=chunk_len, num_sequences=max_num_sequences, context_len=context_len)
        self._prefill.warm_up(reach)
        self._decode.warm_up(reach)
        self._tally = StepTally(num_draft_tokens)
        self.speculation = speculation or Speculation(num_draft_tokens, num_draft_tokens, self._clock)
        self._steps = StepPipeline[LocalSequence](self._decode, scheduling, self.speculation)
        self._preemption = Preemption(allocator, self._scheduler, self._decode, self._steps)
        self._preempt_at = sorted(preempt_at)
        self._in_step = False
        self._unread: dict[AttemptKey, list[TokenEvent]] = {}
        self._num_open: dict[AttemptKey, int] = {}  # answers that have not ended
        self.limits = RequestLimits(
            max_model_len=model.config.max_model_len,
            vocab_size=model.config.vocab_size,
            num_draft_tokens=num_draft_tokens,
            prefill_capacity_len=num_blocks * block_size,
            decode_capacity_len=num_blocks * block_size,
        )

    @property
    def preemptions(self) -> PreemptionCounts:
        """What want of blocks has cost so far."""
        return self._preemption.counts

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Run the requests together; results in their order, the answers of one by choice.

        Raises:
            InvalidRequest: one of them can never be served; none is run.
        """
        for request in requests:
            self._validate(request)
        try:
            for request in requests:
                self.submit(request)
            while any(self._num_open[request.key] for request in requests):
                self.step()
            results: list[GenerationResult] = []
            for request in requests:
                ended = [event.result for event in self._unread[request.key] if event.result is not None]
                results += sorted(ended, key=lambda result: result.choice)
            return results
        finally:
            self._forget(requests)

    def run(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Run one request and yield its tokens, of all its answers, as they are made. Several runs may be interleaved.

        Raises:
            InvalidRequest: it can never be served.
            RequestDeadlineExceeded: its deadline passed; everything made before was yielded.
            InvalidGrammar: its grammar reached a limit, or left no token to choose; likewise.
        """
        self.submit(request)
        try:
            unread = self._unread[request.key]
            while unread or self._num_open[request.key]:
                if not unread:
                    self.step()
                    continue
                event = unread.pop(0)
                if event.result is not None and event.result.error is not None:
                    raise event.result.error
                yield event
        finally:
            self._forget([request])

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; `step` moves it.

        Raises:
            InvalidRequest: it can never be served.
        """
        self._validate(request)
        assert request.key not in self._unread, "one run a key"
        self._unread[request.key] = []
        self._num_open[request.key] = request.sampling.n
        for one in choices_of(request):
            sequence = LocalSequence(
                request=one,
                draft_cap=min(request.num_draft_tokens, self.limits.num_draft_tokens),
                finish=FinishChecker(request.sampling, self._tokenizer.eos_token_ids, self._tokenizer),
                submitted_s=self._clock.now_s(),
            )
            self._scheduler.submit(sequence)

    def step(self) -> None:
        """Expire, preempt, start, prefill a chunk, make room, decode once."""
        # A step that raised leaves sequences half moved; going on from there could decode from missing KV.
        assert not self._in_step, "an earlier step failed: this engine can only be dropped"
        self._in_step = True
        self._end_overdue()
        self._steps.settle()
        self._preempt_scripted()
        self._preemption.preempt_due()
        for sequence in self._scheduler.start_waiting():
            if sequence.saved is not None:
                self._resume(sequence)
            else:
                self._preemption.started_again(sequence)
        self._prefill_step()
        self._decode_step()
        self._scheduler.check_empty()
        self._in_step = False

    def step_report(self) -> StepReport:
        """What the decode steps did until now; waits for one that is running.

        Between two calls of `step` one step may be in flight: computed, and not read yet.
        """
        return self._tally.report(self._decode.meter, self._decode.meter.computed_now())

    def _validate(self, request: GenerationRequest) -> None:
        validate_request(request.prompt_token_ids, request.sampling, self.limits)
        if request.sampling.grammar is not None:
            self._grammars.compile(request.sampling.grammar)

    def _end_overdue(self) -> None:
        now_s = self._clock.now_s()
        for sequence in self._scheduler.unfinished():
            if now_s >= sequence.request.deadline_s:
                error = RequestDeadlineExceeded("the deadline passed", num_tokens=len(sequence.token_ids))
                self._end(sequence, (), error)

    def _prefill_step(self) -> None:
        planned = self._scheduler.next_chunks()
        if not planned:
            return
        self._decode.meter.interrupt()
        self.speculation.disturb()
        forward = self._prefill.forward([chunk for _, chunk in planned], _ignore_layer)
        rows = zip(planned, forward.first_tokens, forward.first_logprobs, forward.prompt_logprobs, strict=True)
        for (sequence, chunk), token, logprobs, prompt_logprobs in rows:
            sequence.num_prefilled = chunk.end
            sequence.prompt_logprobs += prompt_logprobs or ()
            if token is not None and chunk.next_token is None:
                kept = self._take(sequence, (token,), () if logprobs is None else (logprobs,))
                sequence.counts.num_emitted_tokens += len(kept)
                self._publish(sequence, kept)
        # Blocks of a sequence that ended above are free already, but nobody gets them before the next step.
        starts = self._prefill.draft(forward, _ignore_layer)
        for (sequence, _), start in zip(planned, starts, strict=True):
            if start is not None and sequence.finish_reason is None:
                self._admit(sequence, start)

    def _admit(self, sequence: LocalSequence, start: SequenceStart) -> None:
        request = sequence.request
        assert sequence.slot is not None
        assert sequence.table is not None
        self._decode.admit(
            sequence.slot,
            start,
            start.prompt_len,
            request.sampling,
            sequence.table,
            sequence.draft_cap,
            prompt_token_ids=sequence.prefilled_token_ids(),
            output_len=sequence.num_recomputed,
            choice=request.choice,
        )
        sequence.is_decoding = True

    def _resume(self, sequence: LocalSequence) -> None:
        """What it had in host memory comes back, its draft too."""
        assert sequence.slot is not None
        start = SequenceStart(
            first_token=sequence.token_ids[-1], draft_token=0, hidden_D=None, prompt_len=sequence.prefill_len
        )
        self._admit(sequence, start)
        self._preemption.load(sequence, sequence.slot)

    def _preempt_scripted(self) -> None:
        for sequence in self._scheduler.running() if self._preempt_at else ():
            num_due = bisect_right(self._preempt_at, len(sequence.token_ids))
            if num_due > sequence.num_scripted and sequence.num_kv > 0 and not sequence.is_giving_way:
                sequence.num_scripted = num_due
                self._preemption.request(sequence)

    def _decode_step(self) -> None:
        sequences = self._scheduler.decoding()
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        self._read(has_launched=self._preemption.launch(slots, sequences))

    def _read(self, *, has_launched: bool) -> None:
        proposed_lens: list[int] = []
        accepted_lens: list[int] = []
        dropped: list[Dropped] = []
        num_emitted, has_read = 0, False
        for sequence, emitted in self._steps.collect(has_launched=has_launched):
            has_read = True
            if emitted.is_idle and emitted.error is None:
                continue
            if not sequence.is_decoding:
                dropped.append(Dropped(Fate.LATE, emitted))  # it ended after this step was launched
                continue
            if emitted.error is not None:
                dropped.append(Dropped(Fate.FAILED, emitted))
                self._end(sequence, (), emitted.error)
                continue
            kept = self._take(sequence, emitted.token_ids, emitted.logprobs or ())
            num_accepted = min(emitted.accepted_len, len(kept))
            sequence.counts.add_step(
                num_proposed=emitted.proposed_len, num_accepted=num_accepted, num_emitted=len(kept)
            )
            proposed_lens.append(emitted.proposed_len)
            accepted_lens.append(num_accepted)
            num_emitted += len(kept)
            if len(kept) < len(emitted.token_ids):
                dropped.append(Dropped(Fate.CUT, emitted, len(kept)))
            self._publish(sequence, kept)
        if has_read:
            self._tally.add_step(proposed_lens, accepted_lens, num_emitted, dropped)

    def _take(
        self, sequence: LocalSequence, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[int, ...]:
        kept, sequence.finish_reason = sequence.finish.accept(token_ids)
        sequence.token_ids.extend(kept)
        sequence.logprobs.extend(logprobs[: len(kept)])
        sequence.last_token_s = self._clock.now_s()
        if sequence.first_token_s is None:
            sequence.first_token_s = sequence.last_token_s
        return tuple(kept)

    def _publish(self, sequence: LocalSequence, token_ids: tuple[int, ...]) -> None:
        if sequence.finish_reason is None:
            event = TokenEvent(token_ids=token_ids, result=None, choice=sequence.request.choice)
            self._unread[sequence.key].append(event)
        else:
            self._end(sequence, token_ids, None)

    def _end(self, sequence: LocalSequence, token_ids: tuple[int, ...], error: BatonError | None) -> None:
        if sequence.is_decoding:
            slot = sequence.slot
            assert slot is not None
            sequence.is_decoding = False
            self._steps.retire(slot, self._scheduler.retire(sequence))
        else:
            self._scheduler.remove(sequence)
            self._preemption.forget(sequence)
        result = GenerationResult.of(sequence, error)
        self._unread[sequence.key].append(TokenEvent(token_ids=token_ids, result=result, choice=result.choice))
        self._num_open[sequence.key] -= 1

    def _forget(self, requests: Sequence[GenerationRequest]) -> None:
        """Cancel what has not ended (its reader is gone) and drop what was not read."""
        keys = {request.key for request in requests}
        for sequence in self._scheduler.unfinished():
            if sequence.key in keys:
                self._end(sequence, (), RequestCancelled("nobody reads it any more"))
        for key in keys:
            self._unread.pop(key, None)
            self._num_open.pop(key, None)
        if not self._in_step and not self._scheduler.unfinished():
            while not self._steps.is_empty:
                self._read(has_launched=False)
            for _ in self._steps.drain():  # of copies, too
                raise AssertionError("every step was read")
        self._scheduler.check_empty()


def _ignore_layer(layer: int) -> None:
    """One process, one pool: nothing to push."""
