"""Baton in one process: continuous batching over one model and one pool, without Ray, sockets or hand-off.

It is the reference every other arrangement is compared with, and what `baton generate --local` calls. It refuses what
can never fit with a typed error before anything is allocated, and ends every request by its deadline. Not thread-safe:
one caller drives it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.clock import Clock, MonotonicClock
from baton.core.config import SchedulingName
from baton.core.errors import BatonError, RequestCancelled, RequestDeadlineExceeded
from baton.core.logprobs import TokenLogprobs
from baton.core.request import AttemptKey, FinishReason, GenerationRequest, SpeculationCounts, choices_of
from baton.core.tokenizer import Tokenizer
from baton.core.validate import RequestLimits, validate_request
from baton.core.verification import VerificationConfig
from baton.engine.decode import DecodeRunner
from baton.engine.finish import FinishChecker
from baton.engine.grammar import GrammarCompiler
from baton.engine.local_scheduler import LocalScheduler, LocalSequence
from baton.engine.prefill import PrefillRunner
from baton.engine.speculation import Speculation
from baton.engine.step_pipeline import StepPipeline
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What became of a request, or of one of its `n` answers.

    Attributes:
        key: the request's.
        token_ids: everything generated, the token that ended it included.
        finish_reason: why it ended; None if `error` says so.
        error: what ended it instead (deadline, cancel, a grammar beyond its limits); `token_ids` were made before.
        counts: drafts proposed, accepted, and tokens emitted (the first token, which prefill makes, included).
        ttft_s: from submission to the first token; None if there is none.
        tpot_s: mean time of a token after the first; None with fewer than two.
        choice: which of the request's answers this is.
        logprobs: of each token; None if none were asked for.
        prompt_logprobs: of each prompt token but the first, with choice 0; None if none were asked for.
    """

    key: AttemptKey
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: BatonError | None
    counts: SpeculationCounts
    ttft_s: float | None
    tpot_s: float | None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """Tokens of one answer as one step made them; its last event carries the result."""

    token_ids: tuple[int, ...]
    result: GenerationResult | None
    choice: int = 0


class LocalEngine:
    """Runs requests to completion on one model.

    With `scheduling="async"` a decode step is launched before the results of the one before are read; the tokens, and
    how many drafts are accepted in each step, are those of "sync". `speculation` says how many drafts each step makes,
    `num_draft_tokens` if it is None; it may be told another number while the engine runs.
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
        speculation: Speculation | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        self.pool = KVPool(model.kv_layout(block_size), num_blocks, model.device)
        self._scheduler = LocalScheduler(
            BlockAllocator(num_blocks, block_size), num_slots=max_num_sequences, chunk_len=chunk_len
        )
        eos_token_ids = tokenizer.eos_token_ids
        self._grammars = GrammarCompiler(tokenizer, model.config.vocab_size)
        self._prefill = PrefillRunner(model, self.pool, eos_token_ids=eos_token_ids, grammars=self._grammars)
        self._decode = DecodeRunner(
            model,
            self.pool,
            max_num_sequences,
            num_draft_tokens,
            eos_token_ids=eos_token_ids,
            verification=verification,
            grammars=self._grammars,
        )
        self.speculation = speculation or Speculation(num_draft_tokens, num_draft_tokens, self._clock)
        self._steps = StepPipeline[LocalSequence](self._decode, scheduling, self.speculation)
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
        """Expire, start, prefill a chunk, decode once."""
        # A step that raised leaves sequences half moved; going on from there could decode from missing KV.
        assert not self._in_step, "an earlier step failed: this engine can only be dropped"
        self._in_step = True
        self._end_overdue()
        self._scheduler.start_waiting()
        self._prefill_step()
        self._decode_step()
        self._scheduler.check_empty()
        self._in_step = False

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
        self.speculation.disturb()
        forward = self._prefill.forward([chunk for _, chunk in planned], _ignore_layer)
        rows = zip(planned, forward.first_tokens, forward.first_logprobs, forward.prompt_logprobs, strict=True)
        for (sequence, chunk), token, logprobs, prompt_logprobs in rows:
            sequence.num_prefilled = chunk.end
            sequence.prompt_logprobs += prompt_logprobs or ()
            if token is not None:
                kept = self._take(sequence, (token,), () if logprobs is None else (logprobs,))
                sequence.counts.num_emitted_tokens += len(kept)
                self._publish(sequence, kept)
        # Blocks of a sequence that ended above are free already, but nobody gets them before the next step.
        starts = self._prefill.draft(forward, _ignore_layer)
        for (sequence, chunk), start in zip(planned, starts, strict=True):
            if start is not None and sequence.finish_reason is None:
                assert sequence.slot is not None
                self._decode.admit(
                    sequence.slot,
                    start,
                    start.prompt_len,
                    chunk.sampling,
                    chunk.table,
                    sequence.draft_cap,
                    prompt_token_ids=chunk.prompt_token_ids,
                    choice=chunk.choice,
                )
                sequence.is_decoding = True

    def _decode_step(self) -> None:
        sequences = self._scheduler.decoding()
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        has_launched = self._steps.launch(slots, sequences)
        for sequence, emitted in self._steps.collect(has_launched=has_launched):
            if not sequence.is_decoding:
                continue  # it ended in an earlier step; this one was launched before that was known
            if emitted.error is not None:
                self._end(sequence, (), emitted.error)
                continue
            accepted_len, proposed_len = emitted.accepted_len, emitted.proposed_len
            kept = self._take(sequence, emitted.token_ids, emitted.logprobs or ())
            sequence.counts.add_step(
                num_proposed=proposed_len, num_accepted=min(accepted_len, len(kept)), num_emitted=len(kept)
            )
            self._publish(sequence, kept)

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
            assert sequence.slot is not None
            sequence.is_decoding = False
            self._scheduler.retire(sequence)
            self._steps.retire(sequence.slot, lambda: self._scheduler.free(sequence))
        else:
            self._scheduler.remove(sequence)
        result = _result(sequence, error)
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
            for sequence, _ in self._steps.drain():
                assert not sequence.is_decoding
        self._scheduler.check_empty()


def _result(sequence: LocalSequence, error: BatonError | None) -> GenerationResult:
    asked = sequence.request.sampling
    ttft_s = tpot_s = None
    num_tokens = len(sequence.token_ids)
    if sequence.first_token_s is not None and sequence.last_token_s is not None:
        ttft_s = sequence.first_token_s - sequence.submitted_s
        if num_tokens > 1:
            tpot_s = (sequence.last_token_s - sequence.first_token_s) / (num_tokens - 1)
    return GenerationResult(
        key=sequence.key,
        token_ids=tuple(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        error=error,
        counts=sequence.counts,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        choice=sequence.request.choice,
        logprobs=None if asked.logprobs is None else tuple(sequence.logprobs),
        prompt_logprobs=None if asked.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
    )


def _ignore_layer(layer: int) -> None:
    """One process, one pool: nothing to push."""
