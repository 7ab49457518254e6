"""The course of one call that generates: body, checks, chunks, reply; ended at once when its client is gone."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from baton.core.errors import BatonError, InvalidRequest, as_internal
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES
from baton.core.telemetry.span import HEADER, INCOMING
from baton.proto import inference_pb2
from baton.router.openai.connection import until_disconnect
from baton.router.openai.front import Front, connection_of, num_header_bytes, principal_of
from baton.router.openai.options import CommonOptions
from baton.router.openai.reply import OPENAI, HttpRefusal, Manner, Reply, Usage
from baton.router.openai.understood import REQUEST_ID, Understood

# What vLLM may write beside an answer, and what is never known here.
UNKNOWN: Final = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params"))
IGNORED_HEADER: Final = "x-baton-ignored"
MAX_IGNORED_SHOWN: Final = 20

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=CommonOptions)


class Events(Protocol):
    """What a stream consists of, behind its headers."""

    def first(self) -> list[dict[str, Any]]:
        """Before the first chunk."""
        ...

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """For a chunk of the `at`-th request, which has been counted."""
        ...

    def last(self) -> list[dict[str, Any]]:
        """Behind the last chunk."""
        ...


class Call(Generic[Body]):
    """One call that has been understood; what is particular to its kind.

    Attributes:
        requests: for the workers, one for each prompt.
        sampling: of all of them.
        default_max_tokens: where `max_tokens` is absent.
        hides_answers: they are made, and the client has none of them.
    """

    requests: list[inference_pb2.GenerateRequest]
    sampling: inference_pb2.Sampling
    default_max_tokens: int
    hides_answers: bool = False
    id: str
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """The requests have been checked."""
        raise NotImplementedError

    def first(self) -> list[dict[str, Any]]:
        """Choices of the events that a stream begins with."""
        return []

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """What a chunk of the `at`-th request adds to a stream: choices, each of one event."""
        raise NotImplementedError

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `whole`."""
        raise NotImplementedError

    def reasoning_tokens(self) -> int | None:
        """Tokens of thoughts so far; None where none are split off."""
        return None

    def whole(self) -> dict[str, Any]:
        """The choices of a reply in one piece, and what stands beside them."""
        raise NotImplementedError

    def document(self, envelope: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """The reply in one piece."""
        return envelope | {"object": self.object} | self.whole() | {"usage": usage.as_data()} | UNKNOWN

    def events(self, asked: Body, envelope: dict[str, Any], usage: Usage) -> Events:
        """The reply as a stream."""
        return ChoiceEvents(asked, self, envelope | {"object": self.chunk_object}, usage)


class ChoiceEvents:
    """A stream of choices, one in each event; usage stands beside them, or in an event of its own at the end.

    Args:
        asked: what a stream carries beside its choices.
        call: makes them.
        envelope: of each event.
        usage: of the call.
    """

    def __init__(self, asked: CommonOptions, call: Call[Any], envelope: dict[str, Any], usage: Usage) -> None:
        self._asked = asked
        self._call = call
        self._envelope = envelope
        self._usage = usage

    def first(self) -> list[dict[str, Any]]:
        """Whose turn it is."""
        return self._events(self._call.first())

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """What it adds."""
        return self._events(self._call.push(at, chunk))

    def last(self) -> list[dict[str, Any]]:
        """Usage."""
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
        """The call that a body is; nothing is allocated."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = Reply(send, self.manner)
        try:
            request = Request(scope, receive)
            INCOMING.set(request.headers.get(HEADER, ""))
            given = request.headers.get("x-request-id", "")
            if REQUEST_ID.fullmatch(given):  # so that a refusal of the body has it, too
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
        except BatonError as error:  # it has been counted
            await reply.fail(error)
        except Exception as error:  # noqa: BLE001  the call's boundary
            await self._fail("the reply", error, reply)

    async def _fail(self, where: str, error: Exception, reply: Reply) -> None:
        """Count and say it; not where it was raised: the error knows that frame, and a name there makes a cycle."""
        if isinstance(error, HttpRefusal):  # of a body: the client's mistake
            self.front.metrics.requests_failed.labels(InvalidRequest.__name__).inc()
            await reply.fail(error)
            return
        typed = as_internal(where, error)
        self.front.metrics.requests_failed.labels(type(typed).__name__).inc()
        await reply.fail(typed)

    def _make_own(self, call: Call[Body], scope: Scope) -> str:
        """Make the call its principal's; the tenant. Without keys that is the `cache_salt`, which else must be absent.

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
