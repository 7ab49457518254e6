"""Runs a generating HTTP call: body, checks, chunks, reply. A call ends at once when its client disconnects."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from baton.core.errors import BatonError, InvalidGrammar, InvalidRequest, PromptTooLong, as_internal
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES
from baton.core.telemetry.span import HEADER, INCOMING
from baton.proto import inference_pb2
from baton.router.openai.connection import until_disconnect
from baton.router.openai.front import Front, connection_of, num_header_bytes, principal_of
from baton.router.openai.options import CommonOptions
from baton.router.openai.reply import OPENAI, HttpRefusal, Manner, Reply, Usage
from baton.router.openai.understood import REQUEST_ID, Understood

# Fields that vLLM may add to an answer and Baton never knows.
UNKNOWN: Final = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params"))
IGNORED_HEADER: Final = "x-baton-ignored"
MAX_IGNORED_SHOWN: Final = 20

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=CommonOptions)


class Events(Protocol):
    """The events of a stream, after its headers."""

    def first(self) -> list[dict[str, Any]]:
        """Events before the first chunk."""
        ...

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """Events for a chunk of the `at`-th request; usage already includes it."""
        ...

    def last(self) -> list[dict[str, Any]]:
        """Events after the last chunk."""
        ...


class Call(Generic[Body]):
    """One parsed call; subclasses implement what differs between endpoints.

    Attributes:
        requests: messages for the workers, one for each prompt.
        sampling: shared by all of them.
        default_max_tokens: used if `max_tokens` is absent.
        hides_answers: whether answers are generated but not sent to the client.
    """

    requests: list[inference_pb2.GenerateRequest]
    sampling: inference_pb2.Sampling
    default_max_tokens: int
    hides_answers: bool = False
    id: str
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Prepare for the answers; the requests have been checked."""
        raise NotImplementedError

    def first(self) -> list[dict[str, Any]]:
        """Choices of a stream's first events."""
        return []

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """Return what a chunk of the `at`-th request adds to a stream: choices, one per event."""
        raise NotImplementedError

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `whole`."""
        raise NotImplementedError

    def reasoning_tokens(self) -> int | None:
        """Tokens of thoughts so far; None if none are split off."""
        return None

    def whole(self) -> dict[str, Any]:
        """The choices of a reply that is not streamed, and the fields beside them."""
        raise NotImplementedError

    def document(self, envelope: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """Build the whole reply."""
        return envelope | {"object": self.object} | self.whole() | {"usage": usage.as_data()} | UNKNOWN

    def events(self, asked: Body, envelope: dict[str, Any], usage: Usage) -> Events:
        """Build the stream's events."""
        return ChoiceEvents(asked, self, envelope | {"object": self.chunk_object}, usage)


class ChoiceEvents:
    """A stream with one choice per event; usage is sent beside each choice, or in a final event.

    Args:
        asked: says what the stream carries besides choices.
        call: makes the choices.
        envelope: fields of each event.
        usage: usage of the call.
    """

    def __init__(self, asked: CommonOptions, call: Call[Any], envelope: dict[str, Any], usage: Usage) -> None:
        self._asked = asked
        self._call = call
        self._envelope = envelope
        self._usage = usage

    def first(self) -> list[dict[str, Any]]:
        """Events that announce the choices."""
        return self._events(self._call.first())

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """Events for what the chunk adds."""
        return self._events(self._call.push(at, chunk))

    def last(self) -> list[dict[str, Any]]:
        """The final usage event, if requested."""
        return [self._envelope | {"choices": [], "usage": self._usage.as_data()}] if self._asked.include_usage else []

    def _events(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        beside: dict[str, Any] = {}
        if self._asked.include_usage:
            beside["usage"] = self._usage.as_data() if self._asked.continuous_usage else None
        return [self._envelope | {"choices": [choice]} | beside for choice in choices]


class GenerationEndpoint(Generic[Body]):
    """An ASGI application for one path.

    Args:
        front: what all endpoints share.
    """

    kind: type[BaseModel]
    manner: ClassVar[Manner] = OPENAI

    def __init__(self, front: Front) -> None:
        self.front = front
        self._warned: set[str] = set()

    def call(self, asked: Body, understood: Understood) -> Call[Body]:
        """Make the call for a request; nothing is allocated yet."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = Reply(send, self.manner)
        try:
            request = Request(scope, receive)
            INCOMING.set(request.headers.get(HEADER, ""))
            given = request.headers.get("x-request-id", "")
            if REQUEST_ID.fullmatch(given):  # so that a refusal of the body carries it too
                reply.headers["x-request-id"] = given
            understood = await self.front.reader.read(request, self.kind)
            asked: Any = understood.asked
            reply.headers["x-request-id"] = understood.request_id
            self._note_ignored(understood.ignored, reply)
            call = self.call(asked, understood)
            tenant = self._make_own(call, scope)
        except Exception as error:  # noqa: BLE001  the call's boundary
            await self._fail("the request", error, reply)
            return
        try:
            num = len(call.requests) * min(max(call.sampling.n, 1), MAX_CHOICES)
            num_bytes = num_header_bytes(scope)
            with self.front.authenticator.stream(
                tenant, connection_of(scope), num, principal_of(scope), num_header_bytes=num_bytes
            ):
                await until_disconnect(receive, self._serve(asked, call, reply))
        except BatonError as error:  # already counted
            self._name_field(error, understood)
            await reply.fail(error)
        except Exception as error:  # noqa: BLE001  the call's boundary
            await self._fail("the reply", error, reply)

    async def _fail(self, where: str, error: Exception, reply: Reply) -> None:
        """Count an error and send it.

        The caller must not bind the error to a name: its traceback holds the caller's frame, so that would make a
        cycle.
        """
        if isinstance(error, HttpRefusal):  # refusal of a body: the client's mistake
            self.front.metrics.requests_failed.labels(InvalidRequest.__name__).inc()
            await reply.fail(error)
            return
        typed = as_internal(where, error)
        self.front.metrics.requests_failed.labels(type(typed).__name__).inc()
        self._name_field(typed)
        await reply.fail(typed)

    def _name_field(self, error: BatonError, understood: Understood | None = None) -> None:
        """Name the field that an error of a prompt or a grammar is about: gRPC has these under other names."""
        if "field" in error.fields:
            return
        if isinstance(error, PromptTooLong):
            is_chat = not {"messages", "input"}.isdisjoint(self.kind.model_fields)
            error.fields["field"] = "messages" if is_chat else "prompt"
        elif isinstance(error, InvalidGrammar) and understood is not None:
            of_tool = error.message.startswith("tool ")
            error.fields["field"] = (not of_tool and understood.constrained_by) or "tools"

    def _make_own(self, call: Call[Body], scope: Scope) -> str:
        """Set the call's tenant and return it: the principal's, or without keys the `cache_salt`.

        With keys, `cache_salt` must be absent or name the principal's own tenant.

        Raises:
            PermissionDenied: the caller names another tenant.
        """
        principal, tenant = principal_of(scope), ""
        for request in call.requests:
            tenant = request.tenant = self.front.authenticator.tenant_of(principal, request.tenant)
        return tenant

    async def _serve(self, asked: Body, call: Call[Body], reply: Reply) -> None:
        opened = self.front.inference.open(
            call.requests, default_max_tokens=call.default_max_tokens, sampling=call.sampling
        )
        async with opened as answers:
            call.begin(answers.requests)
            usage = Usage(answers.requests, call.reasoning_tokens, hides_answers=call.hides_answers)
            envelope = {"id": call.id, "created": int(self.front.now_unix_s()), "model": self.front.model.name}
            async with aclosing(answers.chunks()) as chunks:
                if asked.stream:
                    await self._stream(chunks, usage, call.events(asked, envelope, usage), reply)
                    return
                async for at, chunk in chunks:
                    usage.add(at, chunk)
                    call.add(at, chunk)
                document = call.document(envelope, usage)
        await reply.json(document)

    async def _stream(self, chunks: Any, usage: Usage, events: Events, reply: Reply) -> None:
        async def send(made: list[dict[str, Any]]) -> None:
            for event in made:
                await reply.event(event)

        async with reply.headers_in_time():
            at, chunk = await anext(chunks)
        await send(events.first())
        usage.add(at, chunk)
        await send(events.push(at, chunk))
        async for at, chunk in chunks:
            usage.add(at, chunk)
            await send(events.push(at, chunk))
        await send(events.last())
        await reply.end()

    def _note_ignored(self, names: list[str], reply: Reply) -> None:
        if not names:
            return
        reply.headers[IGNORED_HEADER] = ",".join(names[:MAX_IGNORED_SHOWN])
        new = set(names) - self._warned
        if new and len(self._warned) < 1000:
            self._warned |= new
            log.warning("parameters that are not known are ignored: %s", ", ".join(sorted(new)))
