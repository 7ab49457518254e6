"""Runs one attempt of a request at a pair of workers: opens both legs, orders the tokens, and ends both legs together.

`RequestRun` owns the attempt's two streams. It never touches blocks or text, and it never retries (`attempts` does).
However the attempt ends, both legs end: a leg that only has its final report left gets a moment for it, any other is
cancelled.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.clock import Clock
from baton.core.errors import (
    BatonError,
    ModelOutputInvalid,
    ProtocolError,
    RequestCancelled,
    RequestDeadlineExceeded,
    TransferFailed,
    WorkerLost,
    as_internal,
)
from baton.core.requests.request import AttemptKey, FinishReason, GenerationRequest
from baton.proto import inference_pb2, wire, worker_pb2
from baton.proto.stream_mux_wire import StreamTokens
from baton.router.attempt.channels import Channels, StreamMuxClient
from baton.router.attempt.continuation import Cause, TokenOrder
from baton.router.attempt.in_flight_requests import Guest, Leaving
from baton.router.placement.members import Member
from baton.router.placement.policy import Pair

NO_CONNECTION: Final = "failed to connect"  # gRPC has no status code for this


class Leg:
    """The part of an attempt at one worker."""

    def __init__(self, role: str, member: Member) -> None:
        self.role = role
        self.incarnation = member.incarnation
        self.is_open = False
        self._give_up: Callable[[], object] | None = None
        self._leaving = Leaving.IN_ORDER
        self._leave: Callable[[Leaving], None] | None = None

    def __str__(self) -> str:
        return f"{self.role} worker {self.incarnation.worker_id}"

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        return self.incarnation.worker_id

    def join(
        self,
        stream_mux: StreamMuxClient,
        message: Any,
        on_said: Callable[[Any], None],
        on_ended: Callable[["Leg", BaseException | None], None],
    ) -> None:
        """Open a stream; when it ends, `on_ended` gets this leg and the error that ended it, None for a clean end.

        `on_ended` is not called for a cancelled leg.
        """
        self.is_open = True
        self._give_up = stream_mux.open(message, _Muxed(self, on_said, on_ended))

    def watch(self, guest: Guest, key: AttemptKey, on_lost: Callable[[BatonError], None]) -> None:
        """Have `on_lost` called with a WorkerLost when the incarnation is lost, or when the request should leave."""
        self._leave = guest.enter(self.incarnation, self.role, key, on_lost)

    def unwatch(self) -> None:
        """Stop depending on this worker."""
        if self._leave is not None:
            self._leave(self._leaving)
            self._leave = None

    def doubt(self) -> None:
        """Record that the hand-off failed, perhaps because the worker died."""
        if self._leaving is Leaving.IN_ORDER:
            self._leaving = Leaving.DOUBTED

    def cancel(self) -> None:
        """Cancel the stream; the worker then releases what it holds for the request."""
        if self.is_open and self._give_up is not None:
            self.is_open = False
            try:
                self._give_up()
            except Exception as error:  # noqa: BLE001  ending a request must run to completion
                as_internal(f"leaving {self}", error)

    def explain(self, error: BaseException) -> BatonError:
        """Translate this leg's error into the error of the request."""
        lost = {"worker_id": self.worker_id, "role": self.role}
        if isinstance(error, asyncio.CancelledError):
            return WorkerLost(f"{self}: the connection was closed", cause=Cause.DEATH.value, **lost)
        typed = wire.error_from_rpc(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(typed, RequestCancelled):  # not cancelled by the router: the worker gave up, or is shutting down
            return WorkerLost(f"{self} gave the request up: {typed.message}", cause=Cause.STREAM.value, **lost)
        if isinstance(typed, WorkerLost):
            self._leaving = Leaving.TURNED_AWAY if NO_CONNECTION in typed.message else Leaving.BROKEN
            fields = typed.fields | lost | {"cause": Cause.DEATH.value}
            return WorkerLost(f"{self}: {typed.message}", **fields)
        if type(typed) is BatonError:  # the worker failed in a way that has no type of its own
            return BatonError(f"{self}: {typed.message}", **(typed.fields | lost | {"cause": Cause.STREAM.value}))
        if isinstance(typed, BatonError):
            return typed
        return as_internal(f"reading the stream of {self}", error)


class _Muxed:
    """Adapts a leg to the stream multiplexer's reader interface."""

    __slots__ = ("_leg", "_on_ended", "_on_said")

    def __init__(
        self,
        leg: Leg,
        on_said: Callable[[Any], None],
        on_ended: Callable[[Leg, BaseException | None], None],
    ) -> None:
        self._leg = leg
        self._on_ended = on_ended
        self._on_said = on_said

    @property
    def on_said(self) -> Callable[[Any], None]:
        """See `MuxStreamReader`."""
        return self._on_said

    def on_end(self, error: BaseException | None) -> None:
        self._leg.is_open = False
        self._on_ended(self._leg, error)


LINGER_S: Final = 2.0
CAUSE_WAIT_S: Final = 0.25  # if decode reports a failed hand-off, prefill knows the cause; its report may be on its way
_FINISH_REASONS: Final = frozenset((FinishReason.STOP.value, FinishReason.LENGTH.value))


@dataclass(slots=True)  # not frozen, which would make construction three times as expensive
class CertainTokens:
    """Final tokens in order, with log-probabilities if requested; the last event holds the finish reason."""

    index: int
    token_ids: list[int]
    finish_reason: str = ""
    logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
    prompt_logprobs: Sequence[inference_pb2.TokenLogprobs] = ()  # sent with the first token


class RequestRun:
    """One attempt. Call `start`, then `take`, waiting for `changed` in between; always `close` and `linger` at the end.

    Tokens that arrive before the reader takes the last event are merged into it. A chunk therefore has the tokens of
    one decode step, or of several if the client or this process lags, which makes each token cheaper. A slow reader
    costs at most the memory of its answer's `max_tokens` tokens. Nothing waits for it: neither other streams nor the
    workers, which are free as soon as they are done.
    """

    is_local = False  # whether the decode worker computes the prompt

    def __init__(self, request: GenerationRequest, pair: Pair, *, channels: Channels, clock: Clock) -> None:
        self.request = request
        self.num_queued_tokens = 0  # told to a decode worker that computes the prompt
        self.first: worker_pb2.FirstToken | None = None
        self.prefill_done: worker_pb2.PrefillDone | None = None
        self.decode_stats: worker_pb2.DecodeStats | None = None
        self.decode_start: worker_pb2.DecodeStart | None = None
        self.started_s = clock.now_s()
        self._clock = clock
        self._prefill = Leg("prefill", pair.prefill)
        self._decode = Leg("decode", pair.decode)
        self._channels = channels
        self._pair = pair
        self._peer = worker_pb2.Peer(
            worker_id=pair.decode.state.worker_id,
            kv_address=pair.decode.state.kv_address,
            epoch=pair.decode.state.kv_epoch or pair.decode.incarnation.epoch,
        )
        self._order = TokenOrder(request.sampling.max_tokens, request.forced_token_ids)
        self._prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        self._early: list[worker_pb2.DecodeTokens] = []  # arrived before prefill's first token
        self._waiting: CertainTokens | None = None  # for the reader
        self._error: BatonError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._decode_finished = False
        self._ended = False
        self.on_arrival: Callable[[int, bool], None] | None = None  # gets (number of new tokens, whether last)
        self._timers: list[asyncio.TimerHandle] = []
        self._suspended: BatonError | None = None  # decode's error, held until prefill reports the cause
        self._lingering: asyncio.TimerHandle | None = None

    @property
    def prefill_worker(self) -> str:
        """The worker that computes the prompt."""
        return self._prefill.worker_id

    @property
    def decode_worker(self) -> str:
        """The worker that decodes the answer; empty once the request has ended at its first token."""
        ended_at_prefill = self.first is not None and self.first.finish_reason != ""
        return "" if ended_at_prefill else self._decode.worker_id

    def start(self, guest: Guest) -> None:
        """Open both legs. The decode leg subscribes first, but nothing waits for it.

        Args:
            guest: the client's request. It is not kept: it refers back to its attempts, and reference cycles wait for
                the garbage collector, which stops every thread.
        """
        now_s = self._clock.now_s()
        left_s = self.request.deadline_s - now_s
        self._timers.append(asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire))
        self._open_decode(now_s)
        self._open_prefill(now_s)
        for leg in (self._decode, self._prefill):
            leg.watch(guest, self.request.key, self._fail)
        if self._ended:  # a worker is already lost
            self._end()

    def take(self) -> CertainTokens | None:
        """Return the next tokens in order, up to those with a finish reason; None if there are none until `changed`.

        Raises:
            BatonError: what ended the request; all tokens that had arrived were taken before.
        """
        emitted, self._waiting = self._waiting, None
        if emitted is None and self._error is not None:
            raise self._error
        return emitted

    def changed(self) -> "asyncio.Future[None]":
        """Return a future that is done as soon as `take` has something. It supports one reader."""
        self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _wake(self) -> None:
        reader, self._changed = self._changed, None  # in the queue at most once
        if reader is not None:
            self._channels.wake_queue.wake(reader)

    def _put(self, emitted: CertainTokens) -> None:
        if self.on_arrival is not None:
            self.on_arrival(len(emitted.token_ids), emitted.finish_reason != "")
        waiting = self._waiting
        if waiting is None:
            self._waiting = emitted
        else:
            waiting.token_ids += emitted.token_ids
            if emitted.logprobs:
                waiting.logprobs = [*waiting.logprobs, *emitted.logprobs]
            waiting.finish_reason = emitted.finish_reason
        self._wake()

    def close(self) -> None:
        """End the attempt if it has not ended: the reader is gone."""
        self._fail(RequestCancelled("the client went away or cancelled"))

    def linger(self) -> None:
        """Give the legs of an ended attempt a moment to end by themselves, then cancel them."""
        if self._prefill.is_open or self._decode.is_open:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._cancel)

    def _cancel(self) -> None:
        self._prefill.cancel()
        self._decode.cancel()

    # Each leg reads one stream; an error in it ends the attempt.

    def _open_prefill(self, now_s: float) -> None:
        message, stream_mux = (
            wire.prefill_request(self.request, self._peer, now_s),
            self._channels.stream_mux(self._pair.prefill),
        )
        self._prefill.join(stream_mux, message, self._on_prefill_event, self._on_leg_ended)

    def _open_decode(self, now_s: float) -> None:
        message, stream_mux = self._attend_request(now_s), self._channels.stream_mux(self._pair.decode)
        self._decode.join(stream_mux, message, self._on_decode_event, self._on_leg_ended)

    def _on_prefill_event(self, event: worker_pb2.PrefillEvent) -> None:
        if event.HasField("first_token"):
            self._on_first_token(event.first_token)
        elif event.HasField("prompt_logprobs"):
            self._on_prompt_logprobs(event.prompt_logprobs)
        elif event.HasField("done"):
            self._on_prefill_done(event.done)

    def _on_decode_event(self, event: worker_pb2.DecodeEvent | StreamTokens) -> None:
        if isinstance(event, StreamTokens):
            self._on_plain_tokens(event)
        elif event.HasField("tokens"):
            self._decode_finished = event.tokens.finish_reason != ""
            self._on_decode_tokens(event.tokens)
        else:
            self._on_other(event)

    def _attend_request(self, now_s: float) -> worker_pb2.AttendRequest:
        return wire.attend_request(self.request, now_s)

    def _on_other(self, event: worker_pb2.DecodeEvent) -> None:
        """Handle an event that only a worker that computes the prompt sends."""

    def _on_prompt_logprobs(self, reports: worker_pb2.PromptLogprobs) -> None:
        self._prompt_logprobs.extend(reports.tokens)
        if len(self._prompt_logprobs) >= self.request.prompt_len:
            raise ProtocolError(f"{self._prefill} reported on more tokens than the prompt has")

    def _on_first_token(self, first: worker_pb2.FirstToken) -> None:
        if self._ended:
            return
        if self.first is not None:
            raise ProtocolError(f"{self._prefill} sent a second first token")
        is_asked = self.request.sampling.prompt_logprobs is not None
        if len(self._prompt_logprobs) != (self.request.prompt_len - 1) * is_asked:
            raise ProtocolError(f"{self._prefill} reported on {len(self._prompt_logprobs)} tokens of the prompt")
        if first.index != self.request.num_forced:
            # A worker that ignores forced tokens would count them as part of the prompt.
            expected = self.request.num_forced
            message = f"{self._prefill} began at token {first.index}, not {expected}"
            raise ProtocolError(message, index=first.index, expected=expected)
        self.first = first
        self._emit(
            first.index, [first.token], first.finish_reason, [first.logprobs] if first.HasField("logprobs") else []
        )
        if self._suspended is not None:
            self._fail(self._suspended)
        early, self._early = self._early, []
        try:
            for tokens in early:
                self._on_decode_tokens(tokens)
        # The error is the decode worker's, although it surfaces while prefill's stream is read: prefill's end may no
        # longer matter.
        except Exception as error:  # noqa: BLE001  the boundary of a stream's callback
            self._fail(as_internal(f"reading the stream of {self._decode}", error))

    def _on_prefill_done(self, done: worker_pb2.PrefillDone) -> None:
        if self.first is None:
            raise ProtocolError(f"{self._prefill} was done before its first token")
        if not self._ended and not done.handed_off:
            raise TransferFailed(f"{self._prefill} was done without handing over")
        self.prefill_done = done
        self._prefill.unwatch()

    def _on_plain_tokens(self, tokens: StreamTokens) -> None:
        if self.first is None:
            self._on_decode_tokens(worker_pb2.DecodeTokens(index=tokens.index, token_ids=tokens.token_ids))
        elif not self._ended:
            self._prefill.unwatch()
            self._emit(tokens.index, tokens.token_ids, "", [])

    def _on_decode_tokens(self, tokens: worker_pb2.DecodeTokens) -> None:
        if self._ended:
            return
        if self.first is None:
            if len(self._early) >= self.request.sampling.max_tokens:
                raise ProtocolError(f"{self._decode} sent more than {self.request.sampling.max_tokens} events")
            self._early.append(tokens)
            return
        self._prefill.unwatch()  # decode emits tokens only after a verified hand-off, so prefill is no longer needed
        if tokens.HasField("start"):
            self.decode_start = tokens.start
        if tokens.finish_reason:
            self._check_counts(tokens)
            self.decode_stats = tokens.stats
        self._emit(tokens.index, list(tokens.token_ids), tokens.finish_reason, list(tokens.logprobs))

    def _emit(
        self, index: int, token_ids: list[int], finish_reason: str, logprobs: list[inference_pb2.TokenLogprobs]
    ) -> None:
        if finish_reason and finish_reason not in _FINISH_REASONS:
            raise ProtocolError(f"a worker ended the request with {finish_reason!r}, which is no reason")
        if len(logprobs) != (0 if self.request.sampling.logprobs is None else len(token_ids)):
            raise ProtocolError(f"a worker sent {len(logprobs)} log-probabilities with {len(token_ids)} tokens")
        first = len(self._order)
        new = self._order.take(index, token_ids)
        if new or finish_reason:
            logprobs = logprobs[len(token_ids) - len(new) :]
            prompt_logprobs = () if first > self.request.num_forced else self._prompt_logprobs
            self._put(CertainTokens(first, new, finish_reason, logprobs, prompt_logprobs))
        if finish_reason:
            self._end()
            if self.first is not None and self.first.finish_reason:
                self._decode.cancel()

    @staticmethod
    def _cut_off(leg: Leg, how: str) -> ProtocolError:
        cause = Cause.STREAM.value
        return ProtocolError(f"{leg} ended its stream {how}", cause=cause, worker_id=leg.worker_id, role=leg.role)

    def _check_counts(self, tokens: worker_pb2.DecodeTokens) -> None:
        num_streamed = tokens.index + len(tokens.token_ids)
        num_emitted = self.request.num_forced + 1 + tokens.stats.num_emitted_tokens
        if num_streamed != num_emitted:
            message = f"{self._decode} emitted {num_emitted} tokens and streamed {num_streamed}"
            raise ProtocolError(message, num_emitted=num_emitted, num_streamed=num_streamed)

    # The attempt ends once, for one reason.

    def _on_leg_ended(self, leg: Leg, error: BaseException | None) -> None:
        try:
            self._judge_end(leg, error)
        except Exception as found:  # noqa: BLE001  the boundary of a stream's callback
            self._fail(as_internal(f"reading the end of the stream of {leg}", found))

    def _judge_end(self, leg: Leg, error: BaseException | None) -> None:
        if self._lingering is not None and not (self._prefill.is_open or self._decode.is_open):
            self._lingering.cancel()
        needed = leg is self._decode or self.prefill_done is None
        if leg is self._prefill and self.first is not None and len(self._order) > self.request.num_forced + 1:
            needed = False  # decode already has the hand-off
        if error is None:
            error = self._missing(leg)
        if error is None or self._ended or not needed:
            return
        explained = leg.explain(error)
        if leg is self._decode and self.first is None and isinstance(explained, TransferFailed):
            # The transfer was aborted. The request may have ended at its first token, or prefill may know why it
            # failed.
            self._suspended = explained
            self._timers.append(asyncio.get_running_loop().call_later(CAUSE_WAIT_S, self._fail, explained))
            return
        self._fail(explained)

    def _missing(self, leg: Leg) -> BatonError | None:
        """Return what is missing from a stream that ended without an error; None if nothing is."""
        if leg is self._prefill:
            return self._cut_off(leg, "before it was done") if self.prefill_done is None else None
        return None if self._decode_finished else self._cut_off(leg, "without a finish")

    def _expire(self) -> None:
        self._fail(RequestDeadlineExceeded("the request's deadline passed", num_tokens=len(self._order)))

    def _fail(self, error: BatonError) -> None:
        if self._ended:
            return
        self._error = error
        try:
            if isinstance(error, TransferFailed | ModelOutputInvalid):
                self._prefill.doubt()
                self._decode.doubt()
            self._end()
        finally:  # whatever fails above, the reader and the workers learn of the end
            self._ended = True
            self._wake()
            self._prefill.cancel()
            self._decode.cancel()

    def _end(self) -> None:
        self._ended = True
        for timer in self._timers:
            timer.cancel()
        try:
            self._prefill.unwatch()
        finally:
            self._decode.unwatch()


class LocalRun(RequestRun):
    """An attempt without a prefill worker: the decode worker computes the prompt."""

    is_local = True

    def __init__(self, request: GenerationRequest, pair: Pair, *, channels: Channels, clock: Clock) -> None:
        super().__init__(request, pair, channels=channels, clock=clock)
        self._prefill = Leg("decode", pair.decode)  # used in messages only; it is never started

    @property
    def prefill_worker(self) -> str:
        """Empty: a decode worker computes the prompt."""
        return ""

    @property
    def decode_worker(self) -> str:
        """The worker that computes the prompt and the answer, even if the answer ends at its first token."""
        return self._decode.worker_id

    def start(self, guest: Guest) -> None:
        """Open the single leg."""
        now_s = self._clock.now_s()
        left_s = self.request.deadline_s - now_s
        self._timers.append(asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire))
        self._open_decode(now_s)
        self._decode.watch(guest, self.request.key, self._fail)
        if self._ended:  # the worker is already lost
            self._end()

    def _attend_request(self, now_s: float) -> worker_pb2.AttendRequest:
        return wire.attend_request(self.request, now_s, prefill_here=True, num_queued_tokens=self.num_queued_tokens)

    def _on_other(self, event: worker_pb2.DecodeEvent) -> None:
        if event.HasField("first_token"):
            self._on_first_token(event.first_token)
        elif event.HasField("prompt_logprobs"):
            self._on_prompt_logprobs(event.prompt_logprobs)
