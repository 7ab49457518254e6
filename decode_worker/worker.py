"""The decode role: an engine that receives KV from prefill workers, and computes prompts itself when asked to.

A plain class around one loop thread, so that tests run it without Ray. No step ever reads blocks of a transfer that is
not complete: a sequence gets a slot only through `Completed`, which kvtransfer emits once every position of every layer
has arrived and its digest matches.
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from baton.core.clock import Clock
from baton.core.config import SchedulingName
from baton.core.errors import BatonError, RequestCancelled, TransferFailed, as_internal
from baton.core.requests.request import AttemptKey, GenerationRequest, TokenLogprobs
from baton.core.requests.tokenizer import Tokenizer
from baton.core.requests.validate import RequestLimits, validate_attempt
from baton.core.telemetry.logs import shown
from baton.core.telemetry.span import Tracer
from baton.decode_worker.inventory import decode_inventory
from baton.decode_worker.request import (
    DecodeRequest,
    DecodeStream,
    first_token_event,
    prompt_logprobs_event,
    token_event,
    trace_decode,
)
from baton.engine.engine import Engine, Published
from baton.engine.finish import FinishChecker
from baton.engine.grammar.grammar import HeldGrammar, check_compiles
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase
from baton.engine.sequence import Sequence as EngineSequence
from baton.engine.speculation.speculation import Speculation
from baton.engine.step.plan import Resume
from baton.engine.step.result import HandoffState
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import Rank0Runner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed, ReceiverService, ReserveWanted
from baton.proto import kv_pb2, worker_pb2
from baton.worker.loop import LoopThread, RequestLimit
from baton.worker.prefixes import PrefixNames, prefix_index
from baton.worker.stream_mux import WriteCoalescer


def check_reserve(reserve: ReserveWanted, request: GenerationRequest) -> None:
    """Check that the prefill worker reserves what the router told this worker about the request.

    Raises:
        TransferFailed: the lengths differ. An incoming transfer smaller than the sequence would silently lose its end.
    """
    wanted = (reserve.prompt_len, reserve.capacity_len)
    own = (request.prompt_len, request.capacity_len)
    if wanted != own:
        raise TransferFailed(f"the prefill worker reserves (prompt, capacity) {wanted}; the router said {own}")


def resume_of(
    complete: Completed, request: GenerationRequest, *, vocab_size: int, hidden_bytes: int
) -> tuple[int, Resume]:
    """Return the first token, and the state from which decoding continues, as a COMMIT describes them.

    Args:
        complete: the transfer.
        request: the request as the router sent it.
        vocab_size: number of tokens of the model.
        hidden_bytes: size of a hidden state; 0 where no head makes drafts.

    Raises:
        TransferFailed: a value is missing, out of range or of the wrong size.
    """
    state = complete.state
    _require(complete.prompt_len == request.prompt_len, f"a prompt of {complete.prompt_len} tokens")
    _require(state.first_token < vocab_size, f"first token {state.first_token}")
    if not state.draft_tokens:
        _require(request.num_draft_tokens == 0 or not hidden_bytes, "no draft, and the request has drafts")
        return state.first_token, Resume()
    _require(hidden_bytes > 0, "a draft, and no head makes any")
    _require(len(state.draft_tokens) == 1, f"{len(state.draft_tokens)} drafts")
    _require(state.draft_tokens[0] < vocab_size, f"draft token {state.draft_tokens[0]}")
    _require(len(state.hidden) == hidden_bytes, f"a hidden state of {len(state.hidden)} bytes for {hidden_bytes}")
    return state.first_token, Resume(state.draft_tokens[0], state.hidden)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise TransferFailed(f"the commit of the prefill worker cannot be: {what}")


MAX_ENDED = 4096  # ended attempts to remember, so that a late RESERVE is refused and not parked

log = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker; any thread may call `attend` and `cancel`.

    With `overcommit` it admits more sequences than its pool can finish, and preempts. `preempt_at` is for tests: it
    preempts every sequence once at each of these output lengths, or later.
    """

    def __init__(
        self,
        *,
        runner: Runner | Rank0Runner,
        pool: KVPool,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        incoming: ReceiverService,
        max_queue_len: int,
        clock: Clock,
        on_fatal: Callable[[BaseException], None],
        max_num_batched_tokens: int,
        scheduling: SchedulingName = "async",
        overcommit: bool = False,
        prefix_cache: bool = True,
        state_checkpoint_interval: int = 0,
        preempt_at: Sequence[int] = (),
        speculation: Speculation | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._runner = runner
        self._tokenizer = tokenizer
        self._incoming = incoming
        self._clock = clock
        self.names = PrefixNames(
            pool.layout,
            pool.num_checkpoints,
            with_mtp=runner.has_mtp,
            enabled=prefix_cache,
            checkpoint_interval=state_checkpoint_interval,
        )
        self.block_log = BlockLog(num_indices=runner.num_pools)
        allocator, *others = (
            BlockAllocator(
                pool.num_blocks,
                pool.layout.block_size,
                prefix_index(pool, self.block_log, state_checkpoint_interval),
                num_state_slots=pool.num_sequence_slots,
                first=rank * pool.num_blocks,
            )
            for rank in range(runner.num_pools)
        )
        self.engine = Engine(
            runner=runner,
            scheduler=Scheduler(allocator, num_slots=runner.max_num_seqs, overcommit=overcommit, others=others),
            role=self,
            clock=clock,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduling=scheduling,
            speculation=speculation,
            preempt_at=preempt_at,
        )
        self._limits = dataclasses.replace(limits, decode_capacity_len=pool.num_blocks * pool.layout.block_size)
        self._request_limit = RequestLimit("the decode worker is full", max_queue_len)
        self.write_coalescer = WriteCoalescer()  # held while a step is published
        self._requests: dict[AttemptKey, DecodeRequest] = {}
        self._reserves: deque[ReserveWanted] = deque()  # not answered yet, in order of arrival
        self._draining: dict[AttemptKey, EngineSequence] = {}  # ended; a prefill worker may still write its blocks
        self._ended: OrderedDict[AttemptKey, None] = OrderedDict()
        self._num_finished = 0
        self._num_failed = 0
        self._loop = LoopThread("decode-loop", self.engine.step, on_fatal)
        incoming.wakeup = self._loop.wake

    @property
    def speculation(self) -> Speculation:
        """The number of drafts that its steps verify."""
        return self.engine.speculation

    def start(self) -> None:
        """Begin to serve."""
        self._incoming.start()
        self._loop.start()

    def close(self) -> None:
        """Stop; present requests end with `RequestCancelled`."""
        self._loop.close()
        self._runner.drain()  # a step in flight writes the pool, whose memory belongs to the KV receiver
        for request in self._requests.values():
            request.stream.end(RequestCancelled("the decode worker is shutting down"))
        self._incoming.close()

    def attend(
        self,
        request: GenerationRequest,
        stream: DecodeStream,
        *,
        prefill_here: bool = False,
        num_queued_tokens: int = 0,
    ) -> None:
        """Expect this attempt's KV, or compute its prompt here; tokens go to `stream`. Allocates nothing.

        Args:
            request: the attempt.
            stream: where its tokens go.
            prefill_here: whether its prompt is computed here.
            num_queued_tokens: if so, prompt tokens that wait at the router for this worker.

        Raises:
            InvalidRequest: the request can never be served here.
            Overloaded: too many streams are open.
        """
        grammar = self.check(request)
        sequence = EngineSequence(
            request=request,
            checker=FinishChecker.of(request, self._tokenizer),
            draft_cap=request.num_draft_tokens,
            submitted_s=self._clock.now_s(),
            grammar=grammar,
            phase=Phase.WAITING if prefill_here else Phase.EXPECTED,
            is_received=not prefill_here,
            block_hashes=self.names.of(request),
        )
        self._request_limit.enter()
        try:
            self._loop.post(lambda: self._add(DecodeRequest(sequence, stream), num_queued_tokens), always=True)
        except BaseException:  # the command was not posted
            self._request_limit.leave()
            raise

    def check(self, request: GenerationRequest) -> HeldGrammar | None:
        """Run the checks of `attend`; a new grammar is compiled, which may take a while. Any thread may call this.

        Returns:
            A handle that keeps the request's grammar.

        Raises:
            InvalidRequest: the request can never be served here.
        """
        validate_attempt(request, self._limits)
        return check_compiles(request.sampling.grammar, self._runner.grammars, request.forced_token_ids)

    def cancel(self, key: AttemptKey, stream: DecodeStream | None = None) -> None:
        """Give a request up, wherever it is. Unknown keys are fine: the request may have ended.

        Args:
            key: the attempt.
            stream: if given, only the request that this stream was opened for.
        """
        self._loop.post(lambda: self._cancel(key, stream), always=True)

    def inventory(self) -> worker_pb2.Inventory:
        """Return what this worker holds. Any thread may call this; counts may be a step apart from each other."""
        asking = {reserve.attempt for reserve in tuple(self._reserves)}
        found = decode_inventory(
            self.engine,
            self._runner,
            self._incoming.inventory(),
            asking=asking,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            max_handoff_len=self._incoming.staging_len,
        )
        if self._runner.grammars is not None:
            found.grammar_seconds = self._runner.grammars.spent_s
        return found

    # The engine's role (`engine.engine.Role`). Everything below runs on the loop thread.

    def receive(self) -> bool:
        """See `Role`."""
        events = self._incoming.poll()
        for event in events:
            match event:
                case ReserveWanted():
                    self._reserve(event)
                case Drained():
                    self.engine.scheduler.drained(self._draining.pop(event.attempt))
                case Completed():
                    request = self._requests.get(event.attempt)
                    if request is not None and request.sequence.phase is Phase.RECEIVING:
                        self._complete(request, event)
                case IncomingFailed():
                    self._deny(event.attempt, None, "")
                    request = self._requests.get(event.attempt)
                    if request is not None:
                        self._incoming_failed(request, event)
        now_s = self._clock.now_s()
        for reserve in [reserve for reserve in self._reserves if reserve.deadline_s <= now_s]:
            self._deny(reserve.attempt, kv_pb2.Deny.BUSY, "no blocks, or no stream, in time")
        return bool(events)

    def plan(self) -> None:
        """See `Role`: requests of prefill workers for room queue together with prompts that are computed here."""
        for reserve in tuple(self._reserves):
            request = self._requests.get(reserve.attempt)
            if request is None or request.sequence.phase is not Phase.EXPECTED:
                continue
            try:
                check_reserve(reserve, request.sequence.request)
            except TransferFailed as error:
                self.engine.end(request.sequence, error)
            else:
                self.engine.scheduler.expect_now(request.sequence)

    def granted(self, sequence: EngineSequence) -> None:
        """See `Role`."""
        assert sequence.table is not None
        reserve = next(item for item in self._reserves if item.attempt == sequence.key)
        self._reserves.remove(reserve)
        self._requests[sequence.key].granted_s = self._clock.now_s()
        self._incoming.grant(sequence.key, sequence.table)

    def prompt_logprobs(self, sequence: EngineSequence, reports: tuple[TokenLogprobs, ...]) -> None:
        """See `Role`."""
        self._requests[sequence.key].stream.emit(prompt_logprobs_event(reports))

    def publish(self, published: Sequence[Published]) -> None:
        """See `Role`."""
        now_s = self._clock.now_s()
        with self.write_coalescer.hold():
            for made in published:
                request = self._requests.get(made.sequence.key)
                if request is None:
                    continue
                try:
                    self._publish(request, made, now_s)
                except Exception as error:  # noqa: BLE001  what one request's events raise ends that request
                    self.engine.end(made.sequence, as_internal("a token of a request", error))

    def hand_off(self, sequence: EngineSequence, first_token: int, state: HandoffState) -> None:
        """See `Role`."""
        raise AssertionError("a decode worker pushes nothing")

    def preempted(self, sequence: EngineSequence) -> None:
        """See `Role`: the sequence has left the blocks that its KV was pushed into."""
        if sequence.is_received and sequence.num_preemptions == 1:
            self._incoming.release(sequence.key)

    def ended(self, sequence: EngineSequence, error: BatonError | None) -> None:
        """See `Role`."""
        request = self._requests.pop(sequence.key)
        why = "finished" if error is None else error.message
        if error is not None and not request.stream.ended:
            request.stream.end(error)
            if not isinstance(error, RequestCancelled):
                log.warning("%s failed: %s", sequence.key, shown(error))
                self._num_failed += 1
        self._deny(sequence.key, kv_pb2.Deny.STALE, why)
        if self._tracer is not None:
            trace_decode(self._tracer, request, self._clock.now_s(), "" if error is None else why)
        if sequence.phase is Phase.RECEIVING:
            self._incoming.abort(sequence.key, why)
            self._draining[sequence.key] = sequence
        elif sequence.is_received and sequence.phase in (Phase.READY, Phase.RUNNING) and not sequence.num_preemptions:
            # The transfer is complete: nothing writes into it any more.
            self._incoming.release(sequence.key)
        self._ended[sequence.key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._request_limit.leave()

    def _add(self, request: DecodeRequest, num_queued_tokens: int = 0) -> None:
        if request.is_local:
            self.engine.num_queued_tokens = num_queued_tokens
        key = request.key
        if key in self._requests:
            request.stream.end(RequestCancelled(f"{key} is already here", key=str(key)))
            self._request_limit.leave()
            return
        self._requests[key] = request
        self.engine.add(request.sequence)

    def _reserve(self, reserve: ReserveWanted) -> None:
        request = self._requests.get(reserve.attempt)
        if reserve.attempt in self._ended or (request is not None and request.is_local):
            self._incoming.deny(reserve.attempt, kv_pb2.Deny.STALE, "the attempt has ended")
        else:
            self._reserves.append(reserve)

    def _deny(self, key: AttemptKey, reason: kv_pb2.Deny.Reason | None, why: str) -> None:
        """Remove the reserve of an attempt, and tell the prefill worker why, unless it knows."""
        for reserve in [item for item in self._reserves if item.attempt == key]:
            self._reserves.remove(reserve)
            if reason is not None:
                self._incoming.deny(key, reason, why)
        request = self._requests.get(key)
        if request is not None and request.sequence.phase is Phase.WAITING and request.sequence.is_received:
            if not request.sequence.num_preemptions:
                self.engine.scheduler.step_back(request.sequence)

    def _complete(self, request: DecodeRequest, complete: Completed) -> None:
        request.complete = complete
        sequence, runner = request.sequence, self._runner
        try:
            first_token, resume = resume_of(
                complete,
                sequence.request,
                vocab_size=self._limits.vocab_size,
                hidden_bytes=runner.hidden_size * runner.hidden_dtype.itemsize if runner.has_mtp else 0,
            )
            _, reason = sequence.checker.accept([first_token])
            if reason is not None:
                raise TransferFailed("the commit of the prefill worker cannot be: its first token ends the request")
        except Exception as error:  # noqa: BLE001  what its commit raises ends this request
            self.engine.scheduler.make_ready(sequence)
            self.engine.end(sequence, as_internal("the hand-off of a request", error))
            return
        sequence.token_ids.append(first_token)
        sequence.resume = resume
        assert sequence.table is not None
        # Nothing writes these positions any more: prompts with the same prefix that are computed here may share them.
        self.engine.scheduler.name_blocks(sequence, sequence.table, 0, sequence.request.prompt_len)
        self.engine.scheduler.make_ready(sequence)

    def _incoming_failed(self, request: DecodeRequest, event: IncomingFailed) -> None:
        error = TransferFailed(f"the KV hand-off failed: {event.reason}")
        if event.by_peer and not request.stream.ended:
            # The prefill worker gave the request up and counts it itself: finished at its first token, or failed.
            request.stream.end(error)
        self.engine.end(request.sequence, error)

    def _publish(self, request: DecodeRequest, made: Published, now_s: float) -> None:
        event = first_token_event(request, made) if made.is_first else token_event(request, made, now_s)
        request.stream.emit(event)
        if made.reason is not None:
            request.stream.end()
            self._num_finished += 1

    def _cancel(self, key: AttemptKey, stream: DecodeStream | None) -> None:
        request = self._requests.get(key)
        if request is not None and stream in (None, request.stream):
            self.engine.end(request.sequence, RequestCancelled("cancelled"))
