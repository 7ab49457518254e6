"""Baton in one process: continuous batching over one model and one pool, without Ray, sockets or hand-off.

It is the reference that every other deployment is compared with, and what `baton generate --local` runs. It rejects
requests that can never fit with a typed error before it allocates anything, and ends every request by its deadline. Not
thread-safe: one caller drives it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.clock import Clock, MonotonicClock
from baton.core.config import SchedulingName
from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import BatonError, RequestCancelled
from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import AttemptKey, GenerationRequest, TokenLogprobs, choices_of
from baton.core.requests.tokenizer import Tokenizer
from baton.core.requests.validate import RequestLimits, validate_request
from baton.core.telemetry.step_report import StepReport
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine import sequence as sequences
from baton.engine.engine import SETTLE_S, Engine, Published
from baton.engine.finish import FinishChecker
from baton.engine.generation import GenerationResult, TokenEvent
from baton.engine.grammar.grammar import GrammarCompiler, HeldGrammar
from baton.engine.graphs.graphed_step import graphed_step
from baton.engine.graphs.kernel_warm_up import Reach
from baton.engine.preemption import PreemptionCounts
from baton.engine.scheduler import Scheduler
from baton.engine.speculation.speculation import Speculation
from baton.engine.step.result import HandoffState
from baton.engine.step.runner import Runner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.model import Model


@dataclass(slots=True)
class _Reports:
    """Log-probabilities of one answer."""

    tokens: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)


class _Caller:
    """The engine's role in one process: tokens go to the caller."""

    def __init__(self) -> None:
        self.unread: dict[AttemptKey, list[TokenEvent]] = {}
        self.num_open: dict[AttemptKey, int] = {}  # answers that have not ended
        self._reports: dict[sequences.Sequence, _Reports] = {}

    def open(self, sequence: sequences.Sequence) -> None:
        self._reports[sequence] = _Reports()

    def receive(self) -> bool:
        return False

    def granted(self, sequence: sequences.Sequence) -> None:
        raise AssertionError("nothing is received here")

    def plan(self) -> None:
        pass

    def prompt_logprobs(self, sequence: sequences.Sequence, reports: tuple[TokenLogprobs, ...]) -> None:
        self._reports[sequence].prompt += reports

    def publish(self, published: Sequence[Published]) -> None:
        for item in published:
            self._reports[item.sequence].tokens += item.logprobs
            if item.reason is None:
                self._put(item.sequence, TokenEvent(item.token_ids, None, item.sequence.request.choice))
            else:
                self._end(item.sequence, item.token_ids, None)

    def hand_off(self, sequence: sequences.Sequence, first_token: int, state: HandoffState) -> None:
        raise AssertionError("nothing is pushed here")

    def preempted(self, sequence: sequences.Sequence) -> None:
        pass

    def ended(self, sequence: sequences.Sequence, error: BatonError | None) -> None:
        if sequence in self._reports:  # else its last tokens already said so
            self._end(sequence, (), error)

    def _end(self, sequence: sequences.Sequence, token_ids: tuple[int, ...], error: BatonError | None) -> None:
        reports = self._reports.pop(sequence)
        result = GenerationResult.of(sequence, error, tuple(reports.tokens), tuple(reports.prompt))
        self._put(sequence, TokenEvent(token_ids, result, result.choice))
        self.num_open[sequence.key] -= 1

    def _put(self, sequence: sequences.Sequence, event: TokenEvent) -> None:
        self.unread[sequence.key].append(event)


class LocalEngine:
    """Runs requests to completion on one model.

    With `scheduling="async"` a step is launched before the previous step's results are read; the tokens, and the number
    of accepted drafts in each step, are those of "sync".

    Args:
        model: with an MTP head if it makes the drafts.
        tokenizer: the model's tokenizer.
        num_blocks: blocks of the pool.
        block_size: positions of a block.
        num_draft_tokens: the most drafts of a step; requests may ask for fewer.
        chunk_len: tokens of a step; raised to what all sequences together decode in one.
        max_num_sequences: maximum number of sequences that run at once.
        clock: clock for deadlines and times.
        scheduling: see above.
        verification: how drafts are verified.
        lookup: how drafts are looked up in the text so far; None: the model's MTP head makes them.
        auto_drafts: choose the number of drafts of each step by measurement.
        chooses_method: choose the draft method, if any, by measurement, too.
        overcommit: start sequences without all the blocks they may need, and preempt when none is left.
        host_kv_bytes: host memory for the KV of preempted sequences; without it, KV is recomputed.
        preempt_at: also preempt every sequence once at each of these output lengths, or as soon as a step has passed
            it; 0 is within the prompt, if that takes several chunks. For tests.
        graphs: which CUDA graphs to capture; None: none.
        speculation: decides how many drafts each step makes, may be changed while the engine runs; None: made from the
            arguments above.
        grammars: compiler for this model and tokenizer; None: made here.
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
        lookup: PromptLookup | None = None,
        auto_drafts: bool = False,
        chooses_method: bool = False,
        overcommit: bool = False,
        host_kv_bytes: int = 0,
        preempt_at: Sequence[int] = (),
        graphs: CudaGraphConfig | None = None,
        speculation: Speculation | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        layout = model.kv_layout(block_size)
        num_state_slots = max_num_sequences if layout.has_state else 0
        self.pool = KVPool(layout, num_blocks, model.device, num_state_slots=num_state_slots)
        allocator = BlockAllocator(num_blocks, block_size, num_state_slots=num_state_slots)
        self.scheduler = Scheduler(allocator, num_slots=max_num_sequences, overcommit=overcommit)
        self._grammars = grammars or GrammarCompiler(tokenizer, model.config.vocab_size)
        num_tokens = max(chunk_len, max_num_sequences * (num_draft_tokens + 1))
        self.runner = Runner(
            model,
            self.pool,
            max_num_seqs=max_num_sequences,
            num_draft_tokens=num_draft_tokens,
            eos_token_ids=tokenizer.eos_token_ids,
            verification=verification,
            lookup=lookup,
            grammars=self._grammars,
            host_kv_bytes=host_kv_bytes,
            clock=self._clock,
        )
        context_len = min(model.config.max_model_len, num_blocks * block_size)
        reach = Reach(num_tokens=num_tokens, num_sequences=max_num_sequences, context_len=context_len)
        self.runner.compile_ahead(reach)
        self.runner.graphs = graphed_step(
            model,
            self.pool,
            graphs or CudaGraphConfig(mode="off"),
            max_num_sequences=max_num_sequences,
            num_draft_tokens=num_draft_tokens,
            max_model_len=model.config.max_model_len,
            max_num_tokens=num_tokens,
        )
        self.runner.warm_up(reach)
        self.speculation = speculation or Speculation(
            num_draft_tokens,
            None if auto_drafts else num_draft_tokens,
            self._clock,
            methods=self.runner.methods,
            chooses_method=chooses_method,
            keeps=verification is not None and verification.mode is VerificationMode.REJECTION,
        )
        self._caller = _Caller()
        self.engine = Engine(
            runner=self.runner,
            scheduler=self.scheduler,
            role=self._caller,
            clock=self._clock,
            max_num_batched_tokens=num_tokens,
            scheduling=scheduling,
            speculation=self.speculation,
            preempt_at=preempt_at,
        )
        self._in_step = False
        self.limits = RequestLimits(
            max_model_len=model.config.max_model_len,
            vocab_size=model.config.vocab_size,
            num_draft_tokens=num_draft_tokens,
            prefill_capacity_len=num_blocks * block_size,
            decode_capacity_len=num_blocks * block_size,
        )

    @property
    def preemptions(self) -> PreemptionCounts:
        """Cost of preemption so far."""
        return self.engine.preemptions

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Run the requests together; returns results in their order, the answers of each by choice.

        Raises:
            InvalidRequest: one of them can never be served; none is run.
        """
        held = [self._validate(request) for request in requests]  # held until the requests are submitted
        try:
            for request in requests:
                self.submit(request)
            held.clear()
            while any(self._caller.num_open[request.key] for request in requests):
                self.step()
            results: list[GenerationResult] = []
            for request in requests:
                ended = [event.result for event in self._caller.unread[request.key] if event.result is not None]
                results += sorted(ended, key=lambda result: result.choice)
            return results
        finally:
            self._forget(requests)

    def run(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Run one request and yield the tokens of all its answers as they are made. Several runs may be interleaved.

        Raises:
            InvalidRequest: it can never be served.
            RequestDeadlineExceeded: its deadline passed; everything made before was yielded.
            InvalidGrammar: its grammar reached a limit, or left no token to sample; everything made before was yielded.
        """
        self.submit(request)
        try:
            unread = self._caller.unread[request.key]
            while unread or self._caller.num_open[request.key]:
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
        """Queue a request; `step` advances it.

        Raises:
            InvalidRequest: it can never be served.
        """
        grammar = self._validate(request)
        assert request.key not in self._caller.unread, "one run a key"
        self._caller.unread[request.key] = []
        self._caller.num_open[request.key] = request.sampling.n
        for one in choices_of(request):
            sequence = sequences.Sequence(
                request=one,
                draft_cap=min(request.num_draft_tokens, self.limits.num_draft_tokens),
                checker=FinishChecker(request.sampling, self._tokenizer.eos_token_ids, self._tokenizer),
                submitted_s=self._clock.now_s(),
                grammar=grammar,
            )
            self._caller.open(sequence)
            self.engine.add(sequence)

    def step(self) -> None:
        """Run one iteration of the engine's loop."""
        # A step that raised leaves sequences in an inconsistent state; continuing could decode from missing KV.
        assert not self._in_step, "an earlier step failed: this engine can only be dropped"
        self._in_step = True
        rest_s = self.engine.step()
        if rest_s == SETTLE_S:
            time.sleep(rest_s)
        self.scheduler.check_empty()
        self._in_step = False

    def step_report(self) -> StepReport:
        """Report on the decode steps so far; waits for one that is running.

        Between two calls of `step` one step may be in flight, that is, computed but not read yet.
        """
        return self.engine.report()

    def _validate(self, request: GenerationRequest) -> HeldGrammar | None:
        validate_request(request.prompt_token_ids, request.sampling, self.limits)
        spec = request.sampling.grammar
        return None if spec is None else self._grammars.hold(spec)

    def _forget(self, requests: Sequence[GenerationRequest]) -> None:
        """Cancel what has not ended (its reader is gone) and drop unread tokens."""
        keys = {request.key for request in requests}
        for sequence in self.scheduler.sequences():
            if sequence.key in keys:
                self.engine.end(sequence, RequestCancelled("its reader is gone"))
        for key in keys:
            self._caller.unread.pop(key, None)
            self._caller.num_open.pop(key, None)
        if not self._in_step and not self.scheduler.sequences():
            self.engine.drain()
        self.scheduler.check_empty()
