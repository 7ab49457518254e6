"""Builds HTTP replies: a JSON document or server-sent events, with their usage."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Send

from baton.core.errors import BatonError, ModelNotFound, Overloaded, PromptTooLong, Retry
from baton.core.requests.request import GenerationRequest
from baton.proto import inference_pb2

DEFAULT_RETRY_AFTER_S: Final = 1.0
# Codes that OpenAI's clients look for; every other error's code is its name in snake case.
_CODES: Final[dict[type[BatonError], str]] = {
    ModelNotFound: "model_not_found",
    PromptTooLong: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
}


class HttpRefusal(Exception):
    """A refusal by HTTP itself: unknown path, wrong method, or a body that is too large."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def error_data(error: BatonError | HttpRefusal) -> dict[str, Any]:
    """Build an error's JSON."""
    if isinstance(error, HttpRefusal):
        return _data(error.message, error_type(error.status), None, error.code)
    field = error.fields.get("field")
    code = _CODES.get(type(error)) or _snake(type(error).__name__)
    return _data(error.message, error_type(error.http_status), None if field is None else str(field), code)


def error_status(error: BatonError | HttpRefusal) -> int:
    """HTTP status of an error."""
    return error.status if isinstance(error, HttpRefusal) else error.http_status


def error_headers(error: BatonError | HttpRefusal) -> dict[str, str]:
    """Headers of an error: `Retry-After` if a retry helps; if not, a 5xx tells OpenAI's clients not to retry."""
    if isinstance(error, HttpRefusal):
        return {}
    if error.retry is Retry.NEVER:
        return {"x-should-retry": "false"} if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else {}
    after_s = float(error.fields.get("retry_after_s", DEFAULT_RETRY_AFTER_S))
    return {"retry-after": str(max(1, round(after_s))), "retry-after-ms": str(round(1e3 * after_s))}


def error_type(status: int) -> str:
    """OpenAI's error type for a status."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def _data(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Usage:
    """Counts the tokens of a call as its chunks pass.

    Args:
        requests: the call's requests; a prompt counts once, however many answers it has.
        reasoning_tokens: returns the number of tokens in thoughts; None if none are split off.
        hides_answers: whether answers are generated but not sent to the client.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        reasoning_tokens: Callable[[], int | None],
        *,
        hides_answers: bool = False,
    ) -> None:
        self._reasoning_tokens = reasoning_tokens
        self._hides_answers = hides_answers
        self._prompt_tokens = sum(request.prompt_len for request in requests)
        self._cached = [0] * len(requests)
        self.completion_tokens = 0

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Count a chunk of the `at`-th request."""
        self.completion_tokens += 0 if self._hides_answers else len(chunk.token_ids)
        if chunk.HasField("finish"):
            self._cached[at] = max(self._cached[at], chunk.finish.stats.num_cached_tokens)

    def as_data(self) -> dict[str, Any]:
        """The usage so far. Cached tokens, whose KV a worker had already, are known only at the end."""
        num_reasoning = self._reasoning_tokens()
        details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            **details,
        }


HEADERS_WITHIN_S: Final = 5.0  # a proxy gives up on a server that sends nothing
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Manner:
    """How an API formats errors and streams; the default is that of chats and completions.

    Attributes:
        names_events: whether each event's `type` is also sent as its name.
        done: bytes that end a stream.
        renamed: this API's names of a chat's fields.
    """

    names_events: bool = False
    done: bytes = DONE
    renamed: Mapping[str, str] = field(default_factory=dict)

    def error(self, error: BatonError | HttpRefusal) -> dict[str, Any]:
        """Build an error's JSON."""
        data = error_data(error)
        data["error"]["param"] = self.renamed.get(data["error"]["param"], data["error"]["param"])
        return data

    def error_event(self, error: BatonError | HttpRefusal, num_events: int) -> dict[str, Any]:
        """Build the error's event in a stream, after `num_events` events."""
        return self.error(error)


OPENAI: Final = Manner()


class Reply:
    """One reply. An error is sent as a status before anything else was sent, and as an event afterwards.

    Args:
        send: ASGI's send function.
        manner: formats of the API that was called.
        headers: headers to send with the reply.
    """

    def __init__(self, send: Send, manner: Manner = OPENAI, headers: Mapping[str, str] | None = None) -> None:
        self._send = send
        self._manner = manner
        self._num_events = 0
        self.headers = dict(headers or {})
        self.is_streaming = False

    async def json(self, data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send one document and end the reply."""
        body = json_bytes(data)
        fields = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, fields | self.headers | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: BatonError | HttpRefusal) -> None:
        """Send an error and end the reply."""
        if not self.is_streaming:
            await self.json(self._manner.error(error), error_status(error), error_headers(error))
            return
        await self.event(self._manner.error_event(error, self._num_events))
        await self.end()

    @asynccontextmanager
    async def headers_in_time(self) -> AsyncIterator[None]:
        """Limit the wait for the first event: until then an error can still have its own status, but not for ever.

        Headers already on their way to a slow reader are sent completely: nothing could follow half of them.
        """
        is_over = asyncio.Event()
        late = asyncio.create_task(self._start_late(is_over))
        try:
            yield
        except asyncio.CancelledError:  # there is no client to read them
            late.cancel()
            raise
        finally:
            is_over.set()
            await late

    async def event(self, data: Any) -> None:
        """Send one server-sent event."""
        if not self.is_streaming:
            await self.start()
        self._num_events += 1
        name = b"event: %b\n" % data["type"].encode("ascii") if self._manner.names_events else b""
        body = b"%bdata: %b\n\n" % (name, json_bytes(data))
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def start(self) -> None:
        """Send a stream's headers, if they have not been sent."""
        if not self.is_streaming:
            self.is_streaming = True
            fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
            await self._start(200, fields | {"x-accel-buffering": "no"} | self.headers)

    async def end(self) -> None:
        """Send the API's end mark and end the stream."""
        await self.start()
        await self._send({"type": "http.response.body", "body": self._manner.done})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def _start_late(self, is_over: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(HEADERS_WITHIN_S):
                await is_over.wait()
        except TimeoutError:
            await self.start()


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # `dumps` would make one for each event


def json_bytes(data: Any) -> bytes:
    """Encode compact JSON. Text is escaped to ASCII, so that no reader can split a character or a line of it."""
    return _ENCODER.encode(data).encode("ascii")


class JsonResponse(Response):
    """A JSON response in ASCII.

    Args:
        data: the document.
        status: HTTP status.
        headers: additional headers.
    """

    media_type = "application/json"

    def __init__(self, data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json_bytes(data), status, headers)

    @classmethod
    def of_error(
        cls, error: BatonError | HttpRefusal, headers: Mapping[str, str] | None = None, manner: Manner = OPENAI
    ) -> "JsonResponse":
        """Build the response of an error, with its headers."""
        return cls(manner.error(error), error_status(error), error_headers(error) | dict(headers or {}))


def error_bytes(refusal: HttpRefusal) -> bytes:
    """Build a whole HTTP reply that closes the connection, for errors without a request to reply to."""
    body = json_bytes(error_data(refusal))
    status = HTTPStatus(refusal.status)
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}\r\n".encode("ascii") + body
