"""The prefill role: an engine that pushes the KV of its prompts to decode workers while it computes them.

A plain class around one loop thread, so that tests run it without Ray. It owns the order of a request's steps; the
engine does the computation, kvtransfer the hand-off.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from baton.core.clock import Clock
from baton.core.config import SchedulingName
from baton.core.errors import (
    BatonError,
    HandoffTooLong,
    Overloaded,
    PromptTooLong,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    as_internal,
)
from baton.core.requests.request import AttemptKey, GenerationRequest, TokenLogprobs
from baton.core.requests.tokenizer import Tokenizer
from baton.core.requests.validate import RequestLimits, validate_attempt
from baton.core.telemetry.logs import shown
from baton.core.telemetry.span import Tracer
from baton.engine.engine import Engine, Published
from baton.engine.finish import FinishChecker
from baton.engine.grammar.grammar import HeldGrammar, check_compiles
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase
from baton.engine.sequence import Sequence as EngineSequence
from baton.engine.speculation.speculation import Speculation
from baton.engine.step.result import HandoffState
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import Rank0Runner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.driver import STAGING_KEY
from baton.kvtransfer.sender.service import Acked, DecodePeer, Denied, Granted, PushDrained, PushFailed, PushService
from baton.prefill_worker.push_line import PushLine
from baton.prefill_worker.request import PrefillRequest, PrefillStream, trace_prefill
from baton.prefill_worker.tp_group import TPGroupPush
from baton.proto import kv_pb2, worker_pb2
from baton.proto.wire import logprobs_to_proto
from baton.worker.inventory import engine_inventory, graph_counts, push_counts
from baton.worker.loop import LoopThread, RequestLimit
from baton.worker.prefixes import PrefixNames, prefix_index


def error_of(event: Denied) -> BatonError:
    """Return the error that a denied request ends with."""
    if event.reason == kv_pb2.Deny.BUSY:
        return Overloaded(f"the decode worker has no room: {event.detail}")
    if event.reason == kv_pb2.Deny.TOO_LONG and event.detail.startswith(STAGING_KEY):
        return HandoffTooLong(f"the decode worker cannot take the hand-off: {event.detail}")
    if event.reason == kv_pb2.Deny.TOO_LONG:
        return PromptTooLong(f"the prompt is too long: the decode worker's pool is too small: {event.detail}")
    error = TransferFailed(f"the decode worker refused the incoming transfer: {event.detail}")
    if event.reason == kv_pb2.Deny.LAYOUT:
        error.fields["pair_refused"] = event.detail  # the router does not pair these two any more
    return error


def prefill_inventory(
    engine: Engine,
    line: PushLine,
    push: PushService | TPGroupPush,
    *,
    num_requests: int,
    num_finished: int,
    num_failed: int,
) -> worker_pb2.Inventory:
    """Build the inventory message of a prefill worker.

    Args:
        engine: the worker's engine.
        line: its requests, and which of them may ask for room.
        push: its side of the hand-off.
        num_requests: number of present requests.
        num_finished: number of requests that succeeded.
        num_failed: number of requests that failed.
    """
    pushes, num_waiting = push.inventory(), line.num_waiting()
    held = engine_inventory(
        engine,
        num_requests=num_requests,
        num_running=max(0, num_requests - num_waiting),  # a request may have arrived since they were counted
        waiting={"turn": num_waiting},
        num_finished=num_finished,
        num_failed=num_failed,
    )
    held.num_kv_receives = pushes["num_pushes"]
    held.kv_bytes = pushes["bytes_pushed"]
    held.transfer.CopyFrom(push_counts(pushes, push.paths(), push.data_paths()))
    held.num_prefill_tokens_queued = line.num_tokens_queued()
    held.prefill_tokens_per_s = engine.rate.per_s
    return held


MAX_RESERVE_WAIT_S = 3600.0

log = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill worker; any thread may call `submit` and `cancel`."""

    def __init__(
        self,
        *,
        runner: Runner | Rank0Runner,
        pool: KVPool,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        push: PushService | TPGroupPush,
        max_num_batched_tokens: int,
        max_queue_len: int,
        prefix_cache: bool = True,
        state_checkpoint_interval: int = 0,
        scheduling: SchedulingName = "async",
        clock: Clock,
        on_fatal: Callable[[BaseException], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._runner = runner
        self._tokenizer = tokenizer
        self._push = push
        self._clock = clock
        self.names = PrefixNames(
            pool.layout,
            pool.num_checkpoints,
            with_mtp=runner.has_mtp,
            enabled=prefix_cache,
            checkpoint_interval=state_checkpoint_interval,
        )
        self.block_log = BlockLog()
        allocator = BlockAllocator(
            pool.num_blocks,
            pool.layout.block_size,
            prefix_index(pool, self.block_log, state_checkpoint_interval),
            num_state_slots=pool.num_sequence_slots,
        )
        self.engine = Engine(
            runner=runner,
            scheduler=Scheduler(allocator, num_slots=runner.max_num_seqs),
            role=self,
            clock=clock,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduling=scheduling,
            speculation=Speculation(runner.num_draft_tokens, runner.num_draft_tokens, clock),
        )
        capacity_len = pool.num_blocks * pool.layout.block_size
        self._limits = dataclasses.replace(limits, prefill_capacity_len=capacity_len)
        self._request_limit = RequestLimit("the prefill worker is full", max_queue_len)
        self._requests: dict[AttemptKey, PrefillRequest] = {}
        self._line = PushLine(self.engine.scheduler, max_num_batched_tokens)
        self._num_finished = 0
        self._num_failed = 0
        self._loop = LoopThread("prefill-loop", self.engine.step, on_fatal)
        push.wakeup = self._loop.wake

    def start(self) -> None:
        """Begin to serve."""
        self._push.start()
        self._loop.start()

    def close(self) -> None:
        """Stop; present requests end with `RequestCancelled`."""
        self._loop.close()
        self._runner.drain()  # a step in flight pushes what it computes
        for request in self._requests.values():
            request.stream.end(RequestCancelled("the prefill worker is shutting down"))
        self._push.close()

    def submit(self, request: GenerationRequest, peer: DecodePeer, stream: PrefillStream) -> None:
        """Queue a request whose KV goes to `peer`; events and errors go to `stream`.

        Raises:
            InvalidRequest: the request can never be served here.
            Overloaded: the queue is full.
        """
        grammar = self.check(request)
        sequence = EngineSequence(
            request=request,
            checker=FinishChecker.of(request, self._tokenizer),
            draft_cap=request.num_draft_tokens,
            submitted_s=self._clock.now_s(),
            grammar=grammar,
            is_pushed=True,
            block_hashes=self.names.of(request),
        )
        self._request_limit.enter()
        try:
            self._loop.post(lambda: self._add(PrefillRequest(sequence, peer, stream)), always=True)
        except BaseException:
            self._request_limit.leave()
            raise

    def check(self, request: GenerationRequest) -> HeldGrammar | None:
        """Run the checks of `submit`; a new grammar is compiled, which may take a while. Any thread may call this.

        Returns:
            A handle that keeps the request's grammar.

        Raises:
            InvalidRequest: the request can never be served here.
        """
        validate_attempt(request, self._limits)
        grammar = check_compiles(request.sampling.grammar, self._runner.grammars, request.forced_token_ids)
        FinishChecker.of(request, self._tokenizer)
        return grammar

    def cancel(self, key: AttemptKey, stream: PrefillStream | None = None) -> None:
        """Give a request up, wherever it is. Unknown keys are fine: the request may have ended.

        Args:
            key: the attempt.
            stream: if given, only the request that was submitted with this stream.
        """
        self._loop.post(lambda: self._cancel(key, stream), always=True)

    def inventory(self) -> worker_pb2.Inventory:
        """Return what this worker holds. Any thread may call this; counts may be a step apart from each other."""
        found = prefill_inventory(
            self.engine,
            self._line,
            self._push,
            num_requests=len(self._requests),
            num_finished=self._num_finished,
            num_failed=self._num_failed,
        )
        found.MergeFrom(worker_pb2.Inventory(graphs=graph_counts(self._runner.graphs)))
        if self._runner.grammars is not None:
            found.grammar_seconds = self._runner.grammars.spent_s
        return found

    # The engine's role (`engine.engine.Role`). Everything below runs on the loop thread.

    def receive(self) -> bool:
        """See `Role`."""
        events = self._push.poll()
        for event in events:
            request = self._requests.get(event.attempt)
            if request is None:
                continue
            match event:
                case Granted():
                    self._granted(request)
                case Denied():
                    self._fail(request, self._or_late(request, error_of(event)))
                    self._forget(request)
                case Acked():
                    self._acked(request, event)
                case PushFailed():
                    error = TransferFailed(f"the KV hand-off failed: {event.reason}", reason=event.reason)
                    self.engine.end(request.sequence, self._or_late(request, error))
                case PushDrained():
                    # A push that ended by itself is reported as failed first, so the stream has ended.
                    assert request.stream.ended
                    self._forget(request)
        return bool(events)

    def granted(self, sequence: EngineSequence) -> None:
        """See `Role`."""
        raise AssertionError("a prefill worker receives nothing")

    def plan(self) -> None:
        """See `Role`: ask decode workers for room."""
        now_s = self._clock.now_s()
        while (request := self._line.next_to_reserve(now_s)) is not None:
            request.reserved_s = now_s
            asked, table = request.sequence.request, request.sequence.table
            assert table is not None
            self._push.reserve(
                request.key,
                request.peer,
                table,
                prompt_len=asked.prompt_len,
                capacity_len=asked.capacity_len,
                wait_s=min(max(asked.deadline_s - now_s, 0.001), MAX_RESERVE_WAIT_S),
            )

    def prompt_logprobs(self, sequence: EngineSequence, reports: tuple[TokenLogprobs, ...]) -> None:
        """See `Role`."""
        tokens = [logprobs_to_proto(report) for report in reports]
        event = worker_pb2.PrefillEvent(prompt_logprobs=worker_pb2.PromptLogprobs(tokens=tokens))
        self._requests[sequence.key].stream.emit(event)

    def publish(self, published: Sequence[Published]) -> None:
        """See `Role`."""
        for made in published:
            request = self._requests[made.sequence.key]
            try:
                self._publish(request, made)
            except Exception as error:  # noqa: BLE001  what one request's events raise ends that request
                self.engine.end(made.sequence, as_internal("the first token of a request", error))

    def hand_off(self, sequence: EngineSequence, first_token: int, state: HandoffState) -> None:
        """See `Role`."""
        request = self._requests[sequence.key]
        request.handed_off_s = now_s = self._clock.now_s()
        draft_ms = 1e3 * (now_s - sequence.first_token_s)
        committed = kv_pb2.SequenceState(first_token=first_token, num_draws=1, draft_ms=draft_ms)
        if state.draft_token is not None:
            committed.draft_tokens.append(state.draft_token)
            committed.hidden = state.hidden
        self._push.commit(sequence.key, committed, sequence.first_token_s)

    def preempted(self, sequence: EngineSequence) -> None:
        """See `Role`."""
        raise AssertionError("what is pushed is never preempted")

    def ended(self, sequence: EngineSequence, error: BatonError | None) -> None:
        """See `Role`."""
        request = self._requests[sequence.key]
        if error is not None:
            self._fail(request, error)
        if sequence.phase is Phase.WAITING:
            self._close(request)
        else:
            self._push.abort(sequence.key, "ended at its first token" if error is None else error.message)

    def _add(self, request: PrefillRequest) -> None:
        if request.key in self._requests:
            request.stream.end(RequestCancelled(f"{request.key} is already here", key=str(request.key)))
            self._request_limit.leave()
            return
        self._requests[request.key] = request
        self.engine.add(request.sequence)
        self._line.add(request)

    def _granted(self, request: PrefillRequest) -> None:
        sequence = request.sequence
        if sequence.phase is not Phase.RESERVING:
            return
        request.granted_s = self._clock.now_s()
        self.engine.scheduler.make_ready(sequence)
        if sequence.num_cached:  # cached positions are pushed before the first step
            self._push.push_cached(sequence.key, 0, sequence.num_cached)

    def _acked(self, request: PrefillRequest, event: Acked) -> None:
        # An abort may have crossed the acknowledgement; then the stream has already ended.
        if not request.stream.ended:
            data_path = self._push.data_paths().get(request.peer.kv_address)
            done = worker_pb2.PrefillDone(
                kv_bytes_pushed=event.bytes_pushed,
                handed_off=True,
                kv_data_path="" if data_path is None else data_path.data_path,
            )
            request.stream.emit(worker_pb2.PrefillEvent(done=done))
            request.stream.end()
            self._num_finished += 1
        self._forget(request)

    def _or_late(self, request: PrefillRequest, error: BatonError) -> BatonError:
        """Return the error that a failed hand-off ends with: the deadline's, if that has passed.

        Both sides hold the same deadline. If decode notices it first, it arrives here as a failed hand-off.
        """
        is_late = request.sequence.request.deadline_s <= self._clock.now_s()
        return RequestDeadlineExceeded("the deadline passed during prefill") if is_late else error

    def _publish(self, request: PrefillRequest, made: Published) -> None:
        sequence = made.sequence
        first = worker_pb2.FirstToken(
            token=made.token_ids[0],
            finish_reason=made.reason.value if made.reason else "",
            queue_ms=1e3 * (request.reserved_s - sequence.submitted_s),
            grant_wait_ms=1e3 * (request.granted_s - request.reserved_s),
            prefill_ms=1e3 * (sequence.first_token_s - request.granted_s),
            received_ns=int(1e9 * sequence.submitted_s),
            sent_ns=int(1e9 * sequence.first_token_s),
            num_cached_tokens=sequence.num_cached,
            logprobs=logprobs_to_proto(made.logprobs[0]) if made.logprobs else None,
            index=sequence.request.num_forced,
        )
        request.stream.emit(worker_pb2.PrefillEvent(first_token=first))
        if made.reason is not None:  # nothing is decoded: the decode worker's blocks are given back
            log.debug("%s ended at its first token: %s", request.key, made.reason.value)
            request.stream.emit(worker_pb2.PrefillEvent(done=worker_pb2.PrefillDone(handed_off=False)))
            request.stream.end()
            self._num_finished += 1

    def _cancel(self, key: AttemptKey, stream: PrefillStream | None) -> None:
        request = self._requests.get(key)
        if request is not None and stream in (None, request.stream):
            self.engine.end(request.sequence, RequestCancelled("cancelled"))

    def _fail(self, request: PrefillRequest, error: BatonError) -> None:
        if request.stream.ended:
            return
        request.stream.end(error)
        request.error = error.message
        if not isinstance(error, RequestCancelled):
            log.warning("%s failed: %s", request.key, shown(error))
            self._num_failed += 1

    def _forget(self, request: PrefillRequest) -> None:
        """Forget a request whose blocks no push reads any more."""
        self._close(request)
        self.engine.forget(request.sequence)

    def _close(self, request: PrefillRequest) -> None:
        if self._tracer is not None:
            trace_prefill(self._tracer, request, self._clock.now_s())
        del self._requests[request.key]
        self._line.remove(request)
        self._request_limit.leave()
