"""What goes back to one client: one JSON document, or server-sent events. Knows what has been sent already."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Send

from baton.core.errors import BatonError
from baton.router.openai.errors import HttpRefusal, error_data, error_headers, error_status

HEADERS_WITHIN_S: Final = 5.0  # a proxy gives up on a server that says nothing at all
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Manner:
    """How an API writes what is no answer; this is that of chats and completions.

    Attributes:
        names_events: each event has its `type` as its name, too.
        done: what ends a stream.
        renamed: a chat's fields, and what they are called here.
    """

    names_events: bool = False
    done: bytes = DONE
    renamed: Mapping[str, str] = field(default_factory=dict)

    def error(self, error: BatonError | HttpRefusal) -> dict[str, Any]:
        """The JSON of an error."""
        data = error_data(error)
        data["error"]["param"] = self.renamed.get(data["error"]["param"], data["error"]["param"])
        return data

    def error_event(self, error: BatonError | HttpRefusal, num_events: int) -> dict[str, Any]:
        """Likewise, in a stream, behind so many events."""
        return self.error(error)


OPENAI: Final = Manner()


class Reply:
    """One reply. An error is a status before anything was sent, and an event after.

    Args:
        send: ASGI's.
        manner: of the API that was called.
        headers: to go with whatever is sent.
    """

    def __init__(self, send: Send, manner: Manner = OPENAI, headers: Mapping[str, str] | None = None) -> None:
        self._send = send
        self._manner = manner
        self._num_events = 0
        self.headers = dict(headers or {})
        self.is_streaming = False

    async def json(self, data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """One document, and the end."""
        body = json_bytes(data)
        fields = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, fields | self.headers | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: BatonError | HttpRefusal) -> None:
        """An error, and the end."""
        if not self.is_streaming:
            await self.json(self._manner.error(error), error_status(error), error_headers(error))
            return
        await self.event(self._manner.error_event(error, self._num_events))
        await self.end()

    @asynccontextmanager
    async def headers_in_time(self) -> AsyncIterator[None]:
        """Around the wait for the first event: until then an error can still have its status, but not for ever."""
        late = asyncio.create_task(self._start_late())
        try:
            yield
        finally:
            late.cancel()
            await asyncio.wait({late})

    async def event(self, data: Any) -> None:
        """One server-sent event."""
        await self.start()
        self._num_events += 1
        name = b"event: %b\n" % data["type"].encode("ascii") if self._manner.names_events else b""
        body = b"%bdata: %b\n\n" % (name, json_bytes(data))
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def start(self) -> None:
        """Send the headers of a stream, if they have not been sent."""
        if not self.is_streaming:
            self.is_streaming = True
            fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
            await self._start(200, fields | {"x-accel-buffering": "no"} | self.headers)

    async def end(self) -> None:
        """The end of a stream, and before it what clients wait for."""
        await self.start()
        await self._send({"type": "http.response.body", "body": self._manner.done})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def _start_late(self) -> None:
        await asyncio.sleep(HEADERS_WITHIN_S)
        await self.start()


def json_bytes(data: Any) -> bytes:
    """Compact JSON. Text is escaped to ASCII, so that no reader can split a character or a line of it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")
