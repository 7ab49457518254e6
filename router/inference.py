"""`baton.v1.Inference`: what clients call. Everything is checked here before anything is allocated anywhere."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.core.clock import Clock
from baton.core.errors import BatonError, EmptyPrompt, InvalidRequest, ModelNotFound, PromptTooLong
from baton.core.grammar_check import MAX_GRAMMAR_BYTES
from baton.core.metrics import RouterMetrics
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import MAX_CHOICES, SamplingParams
from baton.core.validate import RequestLimits, validate_request
from baton.proto import inference_pb2, inference_pb2_grpc, wire
from baton.router.admission import Admission
from baton.router.attempts import Attempts
from baton.router.channels import Channels
from baton.router.choices import Choices
from baton.router.members import DECODE, PREFILL, Members
from baton.router.policy import Pair, Policy, require
from baton.router.refusals import Refusals
from baton.router.served_model import ServedModel
from baton.router.stats import StreamStats
from baton.router.text import IncrementalText

MAX_REQUEST_ID_LEN: Final = 128
MAX_TENANT_LEN: Final = 256
THREAD_TEXT_LEN: Final = 4096  # longer texts (> 1 ms) are tokenized in a thread, so that other streams go on
# A request may have this many bytes, and so many more per position of the model: no text that fits is longer, but for
# runs of a few very long tokens; what is longer is refused unread.
BASE_BYTES: Final = (64 << 10) + MAX_GRAMMAR_BYTES
BYTES_PER_POSITION: Final = 16
MAX_PROMPT_LOGPROBS: Final = 2048  # in a chunk, which stays below 1 MiB
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The front door."""

    def __init__(
        self,
        *,
        model: ServedModel,
        host: str,
        request_timeout_s: float,
        admission: Admission,
        policy: Policy,
        members: Members,
        refusals: Refusals,
        channels: Channels,
        metrics: RouterMetrics,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._model = model
        self._hosts = {host, *LOCAL_HOSTS}
        self._request_timeout_s = request_timeout_s
        self._admission = admission
        self._policy = policy
        self._members = members
        self._refusals = refusals
        self._channels = channels
        self._metrics = metrics
        self._clock = clock
        self._spawn = spawn

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Stream one answer, or `n` side by side.

        Writes to the context: a cancel is then raised here, wherever this waits.
        """
        received_s = self._clock.now_s()
        stats = StreamStats(self._clock, self._metrics, received_s)
        try:
            num_choices = min(max(request.sampling.n, 1), MAX_CHOICES)
            with self._admission.slot(num_choices), self._metrics.num_streams_open.track_inprogress():
                admitted = await self._admit(request, received_s, context.time_remaining())
                await self._stream(admitted, request.request_id or admitted.key.request_id, stats, context)
        except BatonError as error:
            self._metrics.requests_failed.labels(type(error).__name__).inc()
            await wire.abort_with(context, error)
        except asyncio.CancelledError:
            if not stats.counted:  # else the client had everything but the status
                self._metrics.requests_failed.labels("RequestCancelled").inc()
            raise

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> inference_pb2.TokenizeReply:
        """Token ids of a text."""
        try:
            self._check_model(request.model)
            self._check_size(request)
            return inference_pb2.TokenizeReply(token_ids=await self._encode(request.text))
        except BatonError as error:
            await wire.abort_with(context, error)

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        """What is served, as the live workers report it."""
        try:
            limits = self._limits()
        except BatonError as error:
            await wire.abort_with(context, error)
        state = self._members.live(DECODE)[0].state
        return inference_pb2.Model(
            name=self._model.name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_draft_tokens=limits.num_draft_tokens,
            numerics=state.numerics,
            dtype=state.dtype,
        )

    async def _admit(
        self, asked: inference_pb2.GenerateRequest, received_s: float, time_left_s: float | None
    ) -> GenerationRequest:
        """Check a request; nothing is allocated yet.

        Raises:
            InvalidRequest: it can never be served as it is.
            NoWorker: there is nobody to serve it.
        """
        self._check_model(asked.model)
        if len(asked.request_id) > MAX_REQUEST_ID_LEN:
            message = f"request_id has {len(asked.request_id)} characters; at most {MAX_REQUEST_ID_LEN}"
            raise InvalidRequest(message, field="request_id", limit=MAX_REQUEST_ID_LEN)
        if len(asked.tenant) > MAX_TENANT_LEN:
            message = f"tenant has {len(asked.tenant)} characters; at most {MAX_TENANT_LEN}"
            raise InvalidRequest(message, field="tenant", limit=MAX_TENANT_LEN)
        self._check_size(asked)
        # Once without the workers, so that a bad value is named even when nobody is there to serve a good one.
        self._sampling(asked, room_len=1).validate(self._model.vocab_size)
        limits = self._limits()
        num_draft_tokens = _num_draft_tokens(asked, limits)
        prompt_token_ids = await self._prompt(asked)  # the only dear step: after all that can refuse without it
        positions = min(limits.max_model_len, limits.decode_capacity_len - limits.num_draft_tokens)
        sampling = self._sampling(asked, room_len=positions - len(prompt_token_ids))
        validate_request(prompt_token_ids, sampling, limits)
        timeout_s = self._request_timeout_s if time_left_s is None else min(time_left_s, self._request_timeout_s)
        return GenerationRequest(
            key=AttemptKey(_unique_id(asked.request_id), 1),
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            deadline_s=received_s + timeout_s,
            num_draft_tokens=num_draft_tokens,
            tenant=asked.tenant,
        )

    async def _stream(self, request: GenerationRequest, shown_id: str, stats: StreamStats, context: Context) -> None:
        choices = Choices(request, self._attempts)
        sampling = request.sampling
        texts = [IncrementalText(self._model.tokenizer, sampling.stop, sampling.min_tokens) for _ in choices.attempts]
        try:
            async for event in choices.events():
                emitted, text = event.emitted, texts[event.choice]
                for reports in _batched(emitted.prompt_logprobs, MAX_PROMPT_LOGPROBS):
                    await context.write(inference_pb2.GenerateChunk(request_id=shown_id, prompt_logprobs=reports))
                chunk = inference_pb2.GenerateChunk(
                    request_id=shown_id,
                    index=emitted.index,
                    token_ids=emitted.token_ids,
                    text=text.push(emitted.token_ids),
                    choice=event.choice,
                    logprobs=emitted.logprobs,
                )
                if emitted.token_ids:
                    stats.mark(event.choice, len(emitted.token_ids))
                if emitted.finish_reason:
                    chunk.text += text.finish()
                    attempts = choices.attempts[event.choice]
                    same_host = self._is_near(attempts.first_pair)
                    summary = stats.summary(event.choice, attempts, same_host=same_host)
                    stats.count(summary, emitted.finish_reason, num_choices=sampling.n)
                    chunk.finish.CopyFrom(inference_pb2.Finish(reason=emitted.finish_reason, stats=summary))
                await context.write(chunk)
        finally:
            choices.close()

    def _attempts(self, request: GenerationRequest) -> Attempts:
        return Attempts(
            request,
            policy=self._policy,
            members=self._members,
            refusals=self._refusals,
            channels=self._channels,
            clock=self._clock,
            spawn=self._spawn,
            on_retry=self._metrics.handoff_retries.inc,
        )

    def _is_near(self, pair: Pair | None) -> bool:
        """Whether the prefill worker's clock is ours."""
        return pair is not None and pair.prefill.state.address.rpartition(":")[0] in self._hosts

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            message = f"this deployment serves {self._model.name!r}, not {name[:200]!r}"
            raise ModelNotFound(message, model=name[:200], served=self._model.name)

    def _check_size(self, asked: Message) -> None:
        """Refuse what cannot fit before any work is spent on it.

        Raises:
            PromptTooLong: more bytes than the longest prompt and its sampling values take.
            NoWorker: it is not small, and there is nobody to say how long a prompt may be.
        """
        num_bytes = asked.ByteSize()
        if num_bytes <= BASE_BYTES:
            return
        limit_bytes = BASE_BYTES + BYTES_PER_POSITION * self._limits().max_model_len
        if num_bytes > limit_bytes:
            message = f"the request has {num_bytes} bytes; this deployment reads at most {limit_bytes}"
            raise PromptTooLong(message, num_bytes=num_bytes, limit_bytes=limit_bytes)

    async def _prompt(self, asked: inference_pb2.GenerateRequest) -> list[int]:
        match asked.WhichOneof("prompt"):
            case "text":
                return await self._encode(asked.text)
            case "token_ids":
                return list(asked.token_ids.ids)
        raise EmptyPrompt("the request holds neither a text nor token ids")

    async def _encode(self, text: str) -> list[int]:
        if len(text) < THREAD_TEXT_LEN:
            return self._model.tokenizer.encode(text)
        return await asyncio.to_thread(self._model.tokenizer.encode, text)

    def _sampling(self, asked: inference_pb2.GenerateRequest, room_len: int) -> SamplingParams:
        return wire.sampling_from_client(asked.sampling, room_len=room_len, draw_seed=lambda: secrets.randbits(63))

    def _limits(self) -> RequestLimits:
        """What every live worker can hold, so that an answer never depends on whose turn it is.

        Raises:
            NoWorker: a role has no live worker.
        """
        prefill, decode = self._members.live(PREFILL), self._members.live(DECODE)
        require(prefill, PREFILL)
        require(decode, DECODE)
        return RequestLimits(
            max_model_len=min(member.state.max_model_len for member in (*prefill, *decode)),
            vocab_size=self._model.vocab_size,
            num_draft_tokens=min(member.state.num_draft_tokens for member in decode),
            prefill_capacity_len=min(member.capacity_len for member in prefill),
            decode_capacity_len=min(member.capacity_len for member in decode),
        )


def _num_draft_tokens(asked: inference_pb2.GenerateRequest, limits: RequestLimits) -> int:
    if not asked.HasField("num_draft_tokens"):
        return limits.num_draft_tokens
    if asked.num_draft_tokens > limits.num_draft_tokens:
        message = f"num_draft_tokens = {asked.num_draft_tokens}: this deployment drafts {limits.num_draft_tokens}"
        raise InvalidRequest(message, field="num_draft_tokens", limit=limits.num_draft_tokens)
    return asked.num_draft_tokens


def _unique_id(given: str) -> str:
    """The workers' name for a request: clients may use an id twice, the hand-off never does."""
    unique = secrets.token_hex(8)
    return f"{given}-{unique}" if given else unique


def _batched(
    reports: Sequence[inference_pb2.TokenLogprobs], size: int
) -> Iterator[Sequence[inference_pb2.TokenLogprobs]]:
    for first in range(0, len(reports), size):
        yield reports[first : first + size]
