"""Implements `baton.v1.Inference`, the clients' service. It checks a request before anything is allocated anywhere."""

import asyncio
import logging
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.core.clock import Clock, clock_id
from baton.core.errors import (
    BatonError,
    EmptyPrompt,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    as_internal,
)
from baton.core.requests.answer_structure import MAX_GRAMMAR_BYTES
from baton.core.requests.answer_text import AnswerText
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES, SamplingParams
from baton.core.requests.validate import RequestLimits, readable_end, validate_request
from baton.core.telemetry.logs import shown
from baton.core.telemetry.span import INCOMING, Tracer, from_metadata
from baton.proto import inference_pb2, inference_pb2_grpc, wire
from baton.router.access.message_limits import check_message, check_num_answers
from baton.router.access.quota import CURRENT
from baton.router.admission.admission import HIGH, NORMAL, PRIORITIES, Admission, Settling
from baton.router.admission.admission_queue import AdmissionQueue
from baton.router.attempt.attempts import Attempts, AttemptsContext
from baton.router.attempt.choices import Answers, Choices
from baton.router.attempt.stats import RequestTracing, StreamStats
from baton.router.attempt.wake_queue import WakeQueue
from baton.router.metrics import RouterMetrics, is_clients
from baton.router.placement.members import DECODE, PREFILL, Members
from baton.router.placement.policy import Pair, require
from baton.router.served_model import ServedModel
from baton.router.shutdown import Shutdown

ANY_ROOM: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Sampling parameters whose values are in range. An unset seed or length is filled in for each prompt."""

    params: SamplingParams
    has_seed: bool
    has_max_tokens: bool

    def complete(self, room_len: int) -> SamplingParams:
        """Fill in the seed and `max_tokens` for a prompt that leaves `room_len` positions.

        Large fields are shared, not copied.
        """
        seed = self.params.seed if self.has_seed else _draw_seed()
        max_tokens = self.params.max_tokens if self.has_max_tokens else max(1, min(self.params.max_tokens, room_len))
        return replace(self.params, seed=seed, max_tokens=max_tokens)


def check_sampling(asked: inference_pb2.Sampling, vocab_size: int, default_max_tokens: int) -> CheckedSampling:
    """Check sampling values without the workers, so that a bad value is reported even when no worker is available.

    Raises:
        InvalidRequest: there are too many entries in a field, or a value is out of range.
    """
    check_message(asked, "sampling.")
    params = wire.sampling_from_client(
        asked, room_len=ANY_ROOM, draw_seed=_draw_seed, default_max_tokens=default_max_tokens
    )
    params.validate(vocab_size)
    return CheckedSampling(params, asked.HasField("seed"), asked.HasField("max_tokens"))


def num_choices(sampling: inference_pb2.Sampling) -> int:
    """Number of answers to each prompt, clamped to what a request may ask for."""
    return min(max(sampling.n, 1), MAX_CHOICES)


def _draw_seed() -> int:
    return secrets.randbits(63)


def end_of(token_ids: Sequence[int], num_tokens: int, room_len: int) -> Sequence[int]:
    """Return the last `num_tokens` tokens of a prompt; -1 keeps as many as leave room for the answer.

    Raises:
        InvalidRequest: `num_tokens` is neither positive nor -1.
    """
    if num_tokens == 0 or num_tokens < -1:
        message = f"truncate_prompt_tokens = {num_tokens}: a number of tokens, or -1 for as many as fit"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    return token_ids[-max(1, room_len if num_tokens == -1 else num_tokens) :]


log = logging.getLogger(__name__)


def log_request(shown_id: str, tenant: str, times: str, error: BaseException | None) -> None:
    """Log one line for a request that ended, successfully or not.

    Args:
        shown_id: the request's id as the client knows it.
        tenant: the request's tenant; empty if none was given.
        times: counts and times, as `StreamStats.line` writes them.
        error: what ended the request; None if it succeeded.
    """
    how = "ok" if error is None else type(error).__name__
    log.info("request %r%s: %s, %s", shown_id, f" of {tenant!r}" if tenant else "", how, times)


def log_end(key: AttemptKey, shown_id: str, error: BaseException | None, *, was_sent: bool) -> None:
    """Log a warning for a request that ended by an error of ours; clients' own errors and cancels are logged as debug.

    Args:
        key: the request's first attempt.
        shown_id: the request's id as the client knows it.
        error: what ended the request; None if it succeeded.
        was_sent: whether the request reached any worker.
    """
    if isinstance(error, Overloaded) and not was_sent:
        return
    if isinstance(error, BatonError) and not is_clients(type(error).__name__):
        log.warning("request %s failed at the workers as %s: %s", shown_id, key, shown(error))
    elif error is not None:
        log.debug("request %s, at the workers %s, ended by its client: %s", shown_id, key, shown(error))


THREAD_TEXT_LEN: Final = 2048  # longer texts (> 0.5 ms) are tokenized in a thread, so as not to delay other streams
# A request may have BASE_BYTES, plus BYTES_PER_POSITION for each position of the model. No text that fits the model is
# longer, except runs of a few very long tokens. The router refuses longer requests unread.
BASE_BYTES: Final = (64 << 10) + MAX_GRAMMAR_BYTES
BYTES_PER_POSITION: Final = 16
MAX_BEGUN: Final = 2  # calls in one pass of the event loop (2 ms each), so that a burst of them holds up no stream
MAX_CALL_ANSWERS: Final = 256  # per call, unless an operator set how many requests the router holds
MAX_PROMPT_LOGPROBS: Final = 2048  # per chunk, which keeps a chunk below 1 MiB
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Checks, admits and streams requests, for gRPC and HTTP alike."""

    def __init__(
        self,
        *,
        model: ServedModel,
        host: str,
        request_timeout_s: float,
        admission: Admission,
        members: Members,
        attempts: AttemptsContext,
        metrics: RouterMetrics,
        clock: Clock,
        admission_queue: AdmissionQueue | None = None,
        max_prompt_len: int | None = None,
        tracer: Tracer | None = None,
        log_requests: bool = False,
        shutdown: Shutdown | None = None,
        settling: Settling | None = None,
    ) -> None:
        self._settling = settling
        self._beginnings = WakeQueue(MAX_BEGUN)
        self.shutdown = shutdown or Shutdown()
        self._admission_queue = admission_queue
        self._log_requests = log_requests
        self._max_prompt_len = max_prompt_len
        self._tracing = None if tracer is None else RequestTracing(tracer, clock, self._is_near)
        self._model = model
        self._hosts = {host, *LOCAL_HOSTS}
        self._request_timeout_s = request_timeout_s
        self._admission = admission
        self._members = members
        self._attempts_context = attempts
        self._metrics = metrics
        self._clock = clock

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Stream one answer, or `n` answers side by side.

        It writes chunks to the context, so a client's cancel is raised here wherever this method waits.
        """
        try:
            if self._tracing is not None:
                INCOMING.set(from_metadata(context.invocation_metadata()))
            async with self.open([request], context.time_remaining()) as answers:
                async for chunk in answers.only():
                    await _write(context, chunk)
        except BatonError as error:  # `open` has counted the failure
            wire.end_with(context, error)
        except Exception as error:  # noqa: BLE001  the call's boundary: raised outside `open`, which did not count it
            self._metrics.requests_failed.labels(InternalError.__name__).inc()
            wire.end_with(context, as_internal("the request", error))

    @asynccontextmanager
    async def open(
        self,
        asked: Sequence[inference_pb2.GenerateRequest],
        time_left_s: float | None = None,
        default_max_tokens: int = wire.DEFAULT_MAX_TOKENS,
        sampling: inference_pb2.Sampling | None = None,
    ) -> AsyncIterator[Answers]:
        """Check and admit one call's requests, all before any begins; on exit, end those still running.

        Args:
            asked: one request for each prompt; they succeed or fail together.
            time_left_s: seconds until the client's own deadline; None if it has none.
            default_max_tokens: `max_tokens` where a request has none; the rest of the context caps it.
            sampling: shared by all requests and checked once; None if each brings its own.

        Raises:
            BatonError: a request is refused or fails.
        """
        all_stats: list[StreamStats] = []
        try:
            received_s = self._clock.now_s()
            num_answers = sum(num_choices(one.sampling if sampling is None else sampling) for one in asked)
            check_num_answers(num_answers, self.max_answers)
            all_stats.extend(StreamStats(self._clock, self._metrics, received_s) for _ in asked)
            async with self.shutdown.call(), self._held(num_answers):
                check = partial(
                    check_sampling, vocab_size=self._model.vocab_size, default_max_tokens=default_max_tokens
                )
                self.check_model(asked[0].model)
                shared = None if sampling is None else check(sampling)
                admit = partial(self._admit, received_s=received_s, time_left_s=time_left_s)
                requests = [await admit(one, shared or check(one.sampling)) for one in asked]
                shown_ids = [
                    one.request_id or request.key.request_id for one, request in zip(asked, requests, strict=True)
                ]
                streams = map(self._stream, requests, shown_ids, all_stats)
                async with Answers(requests, streams) as answers:
                    yield answers
        except BatonError as error:
            self._metrics.requests_failed.labels(type(error).__name__).inc()
            raise
        except Exception as error:  # noqa: BLE001  the boundary of every call
            self._metrics.requests_failed.labels(InternalError.__name__).inc()
            raise as_internal("the request", error) from None
        except (asyncio.CancelledError, GeneratorExit):
            if not all(stats.counted for stats in all_stats):  # else the client got everything but the status
                self._metrics.requests_failed.labels("RequestCancelled").inc()
            raise

    @asynccontextmanager
    async def _held(self, num_answers: int) -> AsyncIterator[None]:
        with self._admission.slot(num_answers), self._metrics.num_streams_open.track_inprogress():
            if self._settling is not None:
                await self._settling.wait()
            await self._beginnings.turn()
            yield

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> inference_pb2.TokenizeReply:
        """Return the token ids of a text."""
        try:
            return inference_pb2.TokenizeReply(token_ids=await self.tokenize(request))
        except Exception as error:  # noqa: BLE001  the call's boundary
            await wire.abort_with(context, as_internal("the request", error))

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        """Describe the served model as the live workers report it."""
        try:
            return self.model()
        except BatonError as error:
            await wire.abort_with(context, error)

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        """Return the token ids of a text.

        Raises:
            InvalidRequest: the request names another model, or its text is too long or not valid Unicode.
        """
        self.check_model(request.model)
        self._check_size(request)
        return await self._encode(request)

    def model(self) -> inference_pb2.Model:
        """Describe the served model as the live workers report it.

        Raises:
            NoWorker: a role has no live worker.
        """
        limits = self._limits()
        state = self._members.live(DECODE)[0].state
        return inference_pb2.Model(
            name=self._model.name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_draft_tokens=limits.num_draft_tokens,
            numerics=state.numerics,
            dtype=state.dtype,
            kv_dtype=state.kv_dtype,
        )

    def prefix_block_size(self) -> int:
        """Positions in a block of the prefix cache; 0 if no live worker reports one."""
        live = (*self._members.live(PREFILL), *self._members.live(DECODE))
        return next((size for member in live if (size := member.state.prefix_naming.block_size)), 0)

    async def _admit(
        self,
        asked: inference_pb2.GenerateRequest,
        checked: CheckedSampling,
        received_s: float,
        time_left_s: float | None,
    ) -> GenerationRequest:
        """Check a request; nothing is allocated yet.

        Raises:
            InvalidRequest: the request can never be served as it is.
            NoWorker: there is no worker to serve it.
        """
        self.check_model(asked.model)
        check_message(asked)
        if not asked.request_id.isprintable():
            raise InvalidRequest("request_id holds characters that cannot be printed", field="request_id")
        self._check_size(asked)
        hold = CURRENT.get()
        priority = _priority(asked)
        if hold is not None and asked.HasField("priority"):
            hold.check_priority(priority)
        elif hold is not None:
            priority = min(priority, hold.quota.max_priority)
        limits = self._limits()
        num_draft_tokens = _num_draft_tokens(asked, limits)
        prompt_token_ids = await self._prompt(asked, limits)  # the expensive step, so last of the checks
        positions = min(limits.max_model_len, limits.decode_capacity_len - limits.num_draft_tokens)
        if asked.HasField("truncate_prompt_tokens"):
            room_len = _prompt_room(checked, limits, positions)
            prompt_token_ids = end_of(prompt_token_ids, asked.truncate_prompt_tokens, room_len)
        sampling = checked.complete(positions - len(prompt_token_ids))
        is_text = asked.HasField("text")
        validate_request(prompt_token_ids, sampling, limits, sampling_is_checked=True, tokens_are_known=is_text)
        if hold is not None:
            hold.add_tokens(len(prompt_token_ids))
        timeout_s = self._request_timeout_s if time_left_s is None else min(time_left_s, self._request_timeout_s)
        return GenerationRequest(
            key=AttemptKey(_unique_id(asked.request_id), 1),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            deadline_s=received_s + timeout_s,
            num_draft_tokens=num_draft_tokens,
            tenant=asked.tenant,
            priority=priority,
            split_only=asked.split_only,
            keeps_drafts=asked.sampling.HasField("seed"),
            trace=None if self._tracing is None else self._tracing.begin(),
        )

    async def _stream(
        self, request: GenerationRequest, shown_id: str, stats: StreamStats
    ) -> AsyncGenerator[inference_pb2.GenerateChunk]:
        choices = Choices(request, self._attempts, self._admission_queue)
        sampling = request.sampling
        texts = [AnswerText(self._model.tokenizer, sampling) for _ in choices.attempts]
        try:
            async for event in choices.events():
                emitted, text = event.emitted, texts[event.choice]
                if emitted.prompt_logprobs:
                    for reports in _batched(emitted.prompt_logprobs, MAX_PROMPT_LOGPROBS):
                        yield inference_pb2.GenerateChunk(request_id=shown_id, prompt_logprobs=reports)
                chunk = inference_pb2.GenerateChunk()  # filling it in place halves the time of the constructor
                chunk.request_id = shown_id
                chunk.index = emitted.index
                chunk.token_ids.extend(emitted.token_ids)
                chunk.text = text.push(emitted.token_ids)
                if event.choice:
                    chunk.choice = event.choice
                if emitted.logprobs:
                    chunk.logprobs.extend(emitted.logprobs)
                if emitted.token_ids:
                    stats.mark(event.choice, len(emitted.token_ids))
                if emitted.finish_reason:
                    chunk.text += text.finish()
                    attempts = choices.attempts[event.choice]
                    same_host = self._is_near(attempts.first_pair)
                    summary = stats.summary(event.choice, attempts, same_host=same_host)
                    stats.count(summary, emitted.finish_reason, num_choices=sampling.n)
                    chunk.finish.CopyFrom(inference_pb2.Finish(reason=emitted.finish_reason, stats=summary))
                    _say_what_stopped(chunk.finish, text.stop_reason)
                yield chunk
        finally:
            try:
                choices.close()
            finally:
                # Do not bind the error to a name here: its traceback holds this frame, and the cycle would keep both
                # alive.
                self._note_end(request, shown_id, choices, stats, None if stats.counted else sys.exception())

    def _note_end(
        self,
        request: GenerationRequest,
        shown_id: str,
        choices: Choices,
        stats: StreamStats,
        error: BaseException | None,
    ) -> None:
        log_end(request.key, shown_id, error, was_sent=any(attempts.runs for attempts in choices.attempts))
        if self._log_requests:
            log_request(shown_id, request.tenant, stats.line(request.prompt_len), error)
        if self._tracing is not None:
            self._tracing.end(request, shown_id, choices.attempts, stats, error)

    def _attempts(self, request: GenerationRequest) -> Attempts:
        return Attempts(request, self._attempts_context)

    def _is_near(self, pair: Pair | None) -> bool:
        """Whether both workers run on this host's clock."""
        return pair is not None and all(
            state.clock_id == clock_id() if state.clock_id else state.address.rpartition(":")[0] in self._hosts
            for state in (pair.prefill.state, pair.decode.state)
        )

    @property
    def num_answers(self) -> int:
        """Number of answers in progress."""
        return self._admission.num_in_flight

    def check_model(self, name: str) -> None:
        """Check a model name; an empty name means the served model.

        Raises:
            ModelNotFound: another model is served here.
        """
        if name and name not in self._model.names:
            message = f"this deployment serves {', '.join(map(repr, self._model.names))}, not {name[:200]!r}"
            raise ModelNotFound(message, model=name[:200], served=self._model.name)

    @property
    def max_answers(self) -> int:
        """Maximum number of answers in one call; even an idle router could not hold more."""
        return MAX_CALL_ANSWERS if self._admission.limit is None else self._admission.limit

    def _check_size(self, asked: Message) -> None:
        """Refuse a message that cannot fit, before any work is spent on it.

        Raises:
            PromptTooLong: it has more bytes than the longest prompt and its sampling values take.
            NoWorker: it exceeds `BASE_BYTES`, and no worker is there to say how long a prompt may be.
        """
        self.check_num_bytes(asked.ByteSize())

    def check_num_bytes(self, num_bytes: int) -> None:
        """Refuse a request that cannot fit, judged by its number of bytes alone.

        Raises:
            PromptTooLong: it exceeds `max_request_bytes`.
            NoWorker: it exceeds `BASE_BYTES`, and no worker is there to say how long a prompt may be.
        """
        if num_bytes <= BASE_BYTES:
            return
        limit_bytes = self.max_request_bytes()
        if num_bytes > limit_bytes:
            message = f"the prompt is too long: {num_bytes} bytes with its options; at most {limit_bytes} are read here"
            raise PromptTooLong(message, num_bytes=num_bytes, limit_bytes=limit_bytes)

    def max_request_bytes(self) -> int:
        """Maximum size of a request: room for the longest prompt and its sampling values.

        Raises:
            NoWorker: a role has no live worker.
        """
        return BASE_BYTES + BYTES_PER_POSITION * self._limits().max_model_len

    async def _prompt(self, asked: inference_pb2.GenerateRequest, limits: RequestLimits) -> Sequence[int]:
        match asked.WhichOneof("prompt"):
            case "text":
                return await self._encode(asked)
            case "token_ids":
                num_kept = asked.truncate_prompt_tokens if asked.HasField("truncate_prompt_tokens") else None
                return tuple(readable_end(asked.token_ids.ids, num_kept, limits.max_model_len))
        raise EmptyPrompt("the request holds neither a text nor token ids")

    async def _encode(self, asked: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> list[int]:
        adds = not asked.HasField("add_special_tokens") or asked.add_special_tokens
        encode = partial(self._model.tokenizer.encode, asked.text, add_special_tokens=adds)
        return encode() if len(asked.text) < THREAD_TEXT_LEN else await asyncio.to_thread(encode)

    def _limits(self) -> RequestLimits:
        """The limits that every live worker can hold, so that a request's outcome does not depend on its placement.

        Raises:
            NoWorker: a role has no live worker.
        """
        prefill, decode = self._members.live(PREFILL), self._members.live(DECODE)
        require(decode, DECODE)
        if not prefill and self._attempts_context.in_flight_tracker.local.suffices(decode):
            prefill = decode
        require(prefill, PREFILL)
        return RequestLimits(
            max_model_len=min(member.state.max_model_len for member in (*prefill, *decode)),
            vocab_size=self._model.vocab_size,
            num_draft_tokens=min(member.state.num_draft_tokens for member in decode),
            prefill_capacity_len=min(member.capacity_len for member in prefill),
            decode_capacity_len=min(member.capacity_len for member in decode),
            max_prompt_len=self._max_prompt_len,
        )


async def _write(context: Context, chunk: inference_pb2.GenerateChunk) -> None:
    """Write a chunk; cancel the call if its connection is gone, as gRPC does once it notices."""
    try:
        await context.write(chunk)
    except grpc.aio.InternalError:
        call = asyncio.current_task()
        assert call is not None
        call.cancel()
        await asyncio.sleep(0)  # raises the cancel


def _prompt_room(checked: CheckedSampling, limits: RequestLimits, positions: int) -> int:
    """Tokens of a prompt that leave room for its answer: at least half of the positions without `max_tokens`."""
    answer_len = checked.params.max_tokens
    if not checked.has_max_tokens:
        answer_len = min(answer_len, positions // 2)
    prompt_len = limits.prefill_capacity_len if limits.max_prompt_len is None else limits.max_prompt_len
    return min(positions - answer_len, prompt_len, limits.prefill_capacity_len)


def _num_draft_tokens(asked: inference_pb2.GenerateRequest, limits: RequestLimits) -> int:
    if not asked.HasField("num_draft_tokens"):
        return limits.num_draft_tokens
    if asked.num_draft_tokens > limits.num_draft_tokens:
        message = f"num_draft_tokens = {asked.num_draft_tokens}: this deployment drafts {limits.num_draft_tokens}"
        raise InvalidRequest(message, field="num_draft_tokens", limit=limits.num_draft_tokens)
    return asked.num_draft_tokens


def _priority(asked: inference_pb2.GenerateRequest) -> int:
    priority = asked.priority if asked.HasField("priority") else NORMAL
    if priority not in PRIORITIES:
        raise InvalidRequest(f"priority = {priority}: 0 is low, 1 normal, 2 high", field="priority", limit=HIGH)
    return priority


def _say_what_stopped(finish: inference_pb2.Finish, stop_reason: int | str | None) -> None:
    if isinstance(stop_reason, str):
        finish.stop_string = stop_reason
    elif stop_reason is not None:
        finish.stop_token_id = stop_reason


def _unique_id(given: str) -> str:
    """Derive the workers' name for a request. Clients may reuse an id; a hand-off's id must be unique."""
    unique = secrets.token_hex(8)
    return f"{given}-{unique}" if given else unique


def _batched(
    reports: Sequence[inference_pb2.TokenLogprobs], size: int
) -> Iterator[Sequence[inference_pb2.TokenLogprobs]]:
    for first in range(0, len(reports), size):
        yield reports[first : first + size]
