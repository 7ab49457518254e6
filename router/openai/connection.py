"""One client's HTTP connection, within limits: header bytes, time for headers and between requests, number.

uvicorn's C parser enforces none of them. A connection beyond the maximum number is closed at once with a 503, unless an
idle one can be closed to make room. Closed connections are counted, and logged at most once every few seconds.

A reply can be complete before its request is, for example when the router refuses a body that is too long. If the
connection ends with that reply, the router first reads and drops what still arrives, for a while. If it closed at once,
the kernel would answer the remaining data with a reset, and the client would lose a reply that it has not read yet.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httptools
import uvicorn
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as MetricCounter
from starlette.types import ASGIApp, Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.core.errors import BatonError, Overloaded
from baton.proto.roles import roles_in
from baton.router.access.quota import ConnectionsHeld
from baton.router.access.security import IDLE_S
from baton.router.openai.reply import HttpRefusal, error_bytes


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the connection closes. The body must have been read.

    Raises:
        Exception: raised by `work` or `receive`.
    """
    try:
        gone = asyncio.create_task(_disconnected(receive))  # ends with the connection, whatever follows
        task = asyncio.create_task(work)
    except BaseException:
        work.close()  # it has not started
        raise
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = task.done()
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})
        if not task.cancelled() and not is_done:
            task.exception()  # retrieve the error of work whose result is not needed
    try:
        (task if is_done else gone).result()  # a `receive` that failed does not mean that the client is gone
    finally:
        # An error's traceback holds this frame; if the frame held the task, and so the error, neither would be freed.
        del task, gone, one


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_HEADER_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 20.0
LINGER_S: Final = 30.0  # as long as a body may take to arrive
SAY_EVERY_S: Final = 10.0
MAX_UNSENT_BYTES: Final = 64 << 10  # of a reply, that wait for the end of a pass of the event loop
WAITING_BYTES: Final = 1024  # overhead of a waiting request, besides its own bytes
PLACE: Final = "baton.connection"  # key of the connection in an ASGI scope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        max_connections: connections of all clients together.
        max_header_bytes: bytes of one request's first line and headers; of the framing around its body; of its
            trailers; of all requests that wait for the reply to an earlier one.
        head_timeout_s: from a request's first byte, or the start of a connection, to the end of the headers.
        linger_s: how long a client may go on sending dropped data after the reply.
    """

    max_connections: int
    max_header_bytes: int = MAX_HEADER_BYTES
    head_timeout_s: float = HEAD_TIMEOUT_S
    linger_s: float = LINGER_S


class Connections:
    """The open connections.

    Args:
        limits: limits of connections.
        registry: exports the number of open and closed connections.
        held: connections by principal, over gRPC and HTTP.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        registry: CollectorRegistry | None = None,
        held: ConnectionsHeld | None = None,
    ) -> None:
        registry = registry or CollectorRegistry()
        self.limits = limits
        self._open: set[Connection] = set()
        self._unsent: list[Connection] = []
        self._idle: dict[Connection, None] = {}  # in order of idleness, the longest first
        self._held = held or ConnectionsHeld()
        self._said_s = float("-inf")
        about = "HTTP connections that were closed by the router, by reason"
        self._closed = MetricCounter("baton_http_connections_closed", about, ("reason",), registry=registry)
        gauge = Gauge("baton_http_connections", "HTTP connections that are open", registry=registry)
        gauge.set_function(lambda: len(self._open))

    def send_soon(self, connection: "Connection") -> None:
        """Send what a connection has, after the current pass of the event loop and together with others.

        A system call may wake the client's process. Many in a row wake it once.
        """
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(connection)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.send()

    def take(self, connection: "Connection") -> bool:
        """Add a connection, closing an idle one if necessary; return whether there was room."""
        if len(self._open) >= self.limits.max_connections:
            if not self._idle:
                self.note("too_many")
                return False
            idle = next(iter(self._idle))
            self.note("idle")
            idle.end()
        self._open.add(connection)
        return True

    def drop(self, connection: "Connection") -> None:
        """Remove a connection that has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        if connection.principal is not None:
            self._held.remove(connection.principal)
            connection.principal = None

    def set_idle(self, connection: "Connection", *, is_idle: bool) -> None:
        """Record whether a connection is waiting for a request."""
        if is_idle and connection in self._open:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)

    def own(self, connection: "Connection", principal: str, limit: int | None) -> None:
        """Assign a connection to the principal of its latest request.

        Raises:
            Overloaded: the principal is at its limit.
        """
        if connection.principal == principal or connection not in self._open:
            return
        try:
            self._held.add(principal, limit)
        except Overloaded:
            self.note("too_many_of_principal")
            raise
        if connection.principal is not None:
            self._held.remove(connection.principal)
        connection.principal = principal

    def note(self, reason: str) -> None:
        """Count a closed connection, and log it unless one was logged recently."""
        self._closed.labels(reason).inc()
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            log.warning("HTTP connections are closed (%s): %d are open", reason, len(self._open))


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, within limits.

    It goes on reading while requests wait for the reply to an earlier one; otherwise it would not notice that the
    client is gone. Waiting requests beyond the limit are dropped, and the connection closes after the reply in
    progress; the client may send them again.

    Args:
        connections: all open connections.
        **given: uvicorn's own arguments.
    """

    def __init__(self, *, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.principal: str | None = None
        self._all = connections
        self._limits = connections.limits
        self._is_in_head = True
        self._has_ended_message = False
        self._is_refused = False  # what arrives is dropped
        self._num_head_bytes = 0
        self._num_bytes_without_body = 0
        self._answered: RequestResponseCycle | None = None
        self._waiting: deque[int] = deque()  # bytes of each request in `pipeline`
        self._unsent: list[bytes] = []  # of replies
        self._num_unsent_bytes = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, or refuse it."""
        super().connection_made(transport)
        if not self._all.take(self):
            self._refuse(HttpRefusal(503, "too many connections are open", "too_many_connections"))
            self.end()
            return
        self._all.set_idle(self, is_idle=True)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection.

        Uvicorn notifies only the newest request, which may not be the one in progress.
        """
        self._stop_timer()
        self._stop_lingering()
        if self._answered is not None and not self._answered.response_complete:
            self._end_cycle(self._answered)
        self._all.drop(self)
        super().connection_lost(exc)

    def write(self, data: bytes) -> None:
        """Send a part of a reply soon, in one piece with the parts that follow in this pass of the event loop."""
        if not self._unsent:
            self._all.send_soon(self)
        self._unsent.append(data)
        self._num_unsent_bytes += len(data)
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:  # the transport tells when the client reads too slowly
            self.send()

    def send(self) -> None:
        """Send what was written."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        self._num_unsent_bytes = 0
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def end(self) -> None:
        """Close the connection at once; nothing is in progress."""
        self._is_refused = True
        self._all.drop(self)
        self.transport.close()

    def close(self) -> None:
        """Close it after a reply, once the client has sent the whole request or `linger_s` have passed."""
        self.send()
        if self._is_in_head and not self._is_refused:
            self.transport.close()
        else:
            self._linger()

    def data_received(self, data: bytes) -> None:
        """Count bytes that arrive before the headers are complete, and bytes after them that are not body.

        The parser buffers a trailer, so one without an end would take memory, and time for each copy.
        """
        if self._is_refused:
            return
        if self._is_in_head:
            self._start_timer()
        self._has_ended_message = False
        self._num_bytes_without_body += len(data)
        self._parse(data)
        if self._is_refused or self.transport.is_closing():
            return
        if not self._is_in_head:
            if self._num_bytes_without_body > self._limits.max_header_bytes:
                self._all.note("header_bytes")
                self.end()
            return
        # If a message ended in these bytes, it is unknown how many belong to the next one, so none are counted.
        self._num_head_bytes = 0 if self._has_ended_message else self._num_head_bytes + len(data)
        if self._num_head_bytes > self._limits.max_header_bytes:
            self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """Parse like uvicorn, which would log a line for invalid HTTP and reply in plain text."""
        self._unset_keepalive_if_required()
        assert self.parser is not None  # set until the connection is lost
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the protocol is not served: the request is answered like any other
        except httptools.HttpParserError:
            self._all.note("no_http")
            self._refuse(HttpRefusal(400, "what came is no HTTP request", "invalid_http"))

    def on_message_begin(self) -> None:
        """Handle the start of a request."""
        super().on_message_begin()
        scope: Scope = self.scope  # type: ignore[assignment]
        scope[PLACE] = self
        if not self._is_refused:
            self._all.set_idle(self, is_idle=False)

    def on_headers_complete(self) -> None:
        """Start the request, unless its headers are too long in total."""
        if self._is_refused:
            return
        self._is_in_head = False
        self._num_bytes_without_body = 0
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            self._refuse_head()
            return
        super().on_headers_complete()
        self.cycle.transport = _Transport(self)  # type: ignore[assignment]
        if self.pipeline:
            self.flow.resume_reading()
            self._waiting.appendleft(WAITING_BYTES + num_bytes)
            self._drop_if_too_much()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header; a trailer is dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body."""
        self._num_bytes_without_body = 0
        if self._waiting and not self._is_refused:
            self._waiting[0] += len(body)
            self._drop_if_too_much()
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of the request; the next bytes are the next request's headers."""
        self._is_in_head = self._has_ended_message = True
        self._num_head_bytes = 0
        if not self._is_refused:
            self._stop_lingering()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Handle the end of the reply. The rest of its request may still arrive for `linger_s`, and is dropped."""
        self.send()
        if self._is_refused:
            return
        super().on_response_complete()
        if not self._is_in_head and not self._is_replying and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(self._limits.linger_s, self._on_unfinished)
        if not self.pipeline and not self.transport.is_closing():
            self._all.set_idle(self, is_idle=True)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        while len(self._waiting) > len(self.pipeline):
            self._waiting.pop()
        super()._start_asgi_task(cycle, app)

    def _drop_if_too_much(self) -> None:
        if sum(self._waiting) <= self._limits.max_header_bytes:
            return
        assert self._answered is not None  # the request that the others wait for
        self._all.note("waiting_bytes")
        self._is_refused = True
        self._waiting.clear()
        self.pipeline.clear()
        self.cycle = self._answered
        self.cycle.keep_alive = False

    @property
    def roles(self) -> frozenset[str]:
        """Roles in the client's certificate; empty without TLS, a certificate or a role in it."""
        inside = self.transport.get_extra_info("ssl_object")
        shown = (inside.getpeercert() or {}) if inside is not None else {}
        names = shown.get("subjectAltName", ())
        return roles_in(value.encode() for kind, value in names if kind == "URI")

    def own(self, principal: str, limit: int | None) -> None:
        """See `Connections.own`."""
        self._all.own(self, principal, limit)

    def _refuse_head(self) -> None:
        self._all.note("header_bytes")
        limit = self._limits.max_header_bytes
        self._refuse(HttpRefusal(431, f"the headers have more than {limit} bytes", "headers_too_large"))

    def _refuse(self, refusal: HttpRefusal) -> None:
        self._stop_timer()
        if self._is_replying:
            if self._is_in_head or self.pipeline or self.cycle.response_started:
                self.end()  # this refusal would go into the reply to an earlier request, or into one that has begun
                return
            self._end_cycle(self.cycle)
        self.transport.write(error_bytes(refusal))
        self._linger()

    def _end_cycle(self, cycle: RequestResponseCycle) -> None:
        """Let the application see the client gone; what it still replies is dropped."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _linger(self) -> None:
        """Drop what arrives until the client closes.

        Meanwhile the connection counts as idle and may be closed to make room for another.
        """
        self._is_refused = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._all.set_idle(self, is_idle=True)
        self._stop_lingering()
        self._linger_timer = self.loop.call_later(self._limits.linger_s, self.transport.close)

    def _stop_lingering(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _on_unfinished(self) -> None:
        self._linger_timer = None
        self._all.note("slow_body")
        self.end()

    @property
    def _is_replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._on_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self._is_replying:
            return
        self._all.note("slow_headers")
        self._refuse(HttpRefusal(408, "the headers were not whole in time", "request_timeout"))
        self.end()


class _Transport:
    """The transport of a reply; it closes the way its connection does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """See `Connection.write`."""
        self._connection.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """See `Connection.close`."""
        self._connection.close()


BACKLOG: Final = 2048
TICK_S: Final = 0.1


class _Server(uvicorn.Server):
    """A uvicorn server that ends as soon as it is told to, and leaves signals to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()

    def end(self) -> None:
        """Accept no new connection; `serve` returns when the open ones are closed."""
        self.should_exit = True
        self._is_told.set()

    async def main_loop(self) -> None:
        """Run uvicorn's loop, but end it at once instead of at its next check, ten times a second."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 10
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_told.wait(), TICK_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class HttpServer:
    """The HTTP server; serves from `start` to `stop`.

    Args:
        app: the ASGI application.
        connections: the open connections and their limits.
        tls: TLS context with its certificates; None for no encryption.
    """

    def __init__(self, app: ASGIApp, connections: Connections, tls: ssl.SSLContext | None = None) -> None:
        self._connections = connections
        self.port = 0
        self._tls = tls
        self._app = app
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Start listening; port 0 picks a free one.

        Raises:
            OSError: the address cannot be bound.
        """
        listener = _bound(host, port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_S,
            http=partial(Connection, connections=self._connections),  # type: ignore[arg-type]
        )
        config.load()
        config.ssl = self._tls  # uvicorn's own context would not reload changed files
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._task.done():
                raise BatonError("the HTTP server ended while it started") from self._task.exception()
            await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> None:
        """Accept no new connection, allow open replies a grace period, then end them."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s)) if grace_s else 0
        self._server.end()
        await self._task
        left = set(self._server.server_state.tasks)
        if left:
            await asyncio.wait(left)


def _bound(host: str, port: int) -> socket.socket:
    family, kind, number, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
