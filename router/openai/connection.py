"""One client's HTTP connection, within limits: of header bytes, of time for headers and between requests, of number.

uvicorn's parser in C knows none of them. A connection over the number is closed at once with a 503, but first one that
is idle makes room for it. What is closed is counted, and said no more often than every few seconds.

A reply can be whole before its request is: a refusal of a body that is too long. If the connection ends with it, what
still comes is read and dropped first, for a while. Closed at once, the kernel would answer it with a reset, and that
takes the reply from a client that has not read it yet.
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
        Exception: whatever `work` raises, or `receive`.
    """
    try:
        gone = asyncio.create_task(_disconnected(receive))  # it ends with the connection, whatever follows
        task = asyncio.create_task(work)
    except BaseException:
        work.close()  # it has not begun
        raise
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = task.done()
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})
        if not task.cancelled() and not is_done:
            task.exception()  # of work that is not waited for any more
    try:
        (task if is_done else gone).result()  # a `receive` that failed does not say that the client is gone
    finally:
        # An error knows this frame: with the frame knowing the task, and so the error, neither would be freed.
        del task, gone, one


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_HEADER_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 20.0
LINGER_S: Final = 30.0  # as long as a body may take to come
SAY_EVERY_S: Final = 10.0
WAITING_BYTES: Final = 1024  # that a request takes which waits, beside its own
PLACE: Final = "baton.connection"  # in a scope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What connections may take.

    Attributes:
        max_connections: of all clients together.
        max_header_bytes: of one request's first line and headers; of what is around its body; of trailers behind it;
            of all requests that wait for the reply to an earlier one.
        head_timeout_s: from the first byte of a request, or the beginning of a connection, to the end of its headers.
        linger_s: for which a client may go on sending what is dropped, behind the reply to it.
    """

    max_connections: int
    max_header_bytes: int = MAX_HEADER_BYTES
    head_timeout_s: float = HEAD_TIMEOUT_S
    linger_s: float = LINGER_S


class Connections:
    """Those that are open.

    Args:
        limits: of them.
        registry: for their number, and for what was closed.
        held: by principal, with those over other ways in.
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
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._held = held or ConnectionsHeld()
        self._said_s = float("-inf")
        about = "HTTP connections that were closed by the router, by reason"
        self._closed = MetricCounter("baton_http_connections_closed", about, ("reason",), registry=registry)
        gauge = Gauge("baton_http_connections", "HTTP connections that are open", registry=registry)
        gauge.set_function(lambda: len(self._open))

    def take(self, connection: "Connection") -> bool:
        """Whether there is room for one more; an idle one is closed for it."""
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
        """It has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        if connection.principal is not None:
            self._held.remove(connection.principal)
            connection.principal = None

    def set_idle(self, connection: "Connection", *, is_idle: bool) -> None:
        """Whether it waits for a request."""
        if is_idle and connection in self._open:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)

    def own(self, connection: "Connection", principal: str, limit: int | None) -> None:
        """Whose it is, as of the request that came over it.

        Raises:
            Overloaded: the principal has as many as it may.
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
        """One was closed."""
        self._closed.labels(reason).inc()
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            log.warning("HTTP connections are closed (%s): %d are open", reason, len(self._open))


class Connection(HttpToolsProtocol):
    """Uvicorn's, within limits.

    It goes on reading while requests wait for the reply to an earlier one, or it would not see that the client is gone.
    Requests beyond the limit are dropped, and the connection closes behind the reply that is under way: a client may
    send them again.

    Args:
        connections: all that are open.
        **given: what uvicorn gives.
    """

    def __init__(self, *, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.principal: str | None = None
        self._all = connections
        self._limits = connections.limits
        self._is_in_head = True
        self._has_ended_message = False
        self._is_refused = False  # what comes is dropped
        self._num_head_bytes = 0
        self._num_bytes_without_body = 0
        self._answered: RequestResponseCycle | None = None
        self._waiting: deque[int] = deque()  # bytes of each request of `pipeline`
        self._linger_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, or refuse it."""
        super().connection_made(transport)
        if not self._all.take(self):
            self._refuse(HttpRefusal(503, "too many connections are open", "too_many_connections"))
            self.end()
            return
        self._all.set_idle(self, is_idle=True)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended; uvicorn tells it to the newest request, which need not be the one that is answered."""
        self._stop_timer()
        self._stop_lingering()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._all.drop(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """Close it; nothing is under way."""
        self._is_refused = True
        self._all.drop(self)
        self.transport.close()

    def close(self) -> None:
        """Close it behind a reply, when the client has sent all of what is replied to or `linger_s` have passed."""
        if self._is_in_head and not self._is_refused:
            self.transport.close()
        else:
            self._linger()

    def data_received(self, data: bytes) -> None:
        """Count what comes before a request's headers are whole, and what is no body behind them.

        The parser keeps what it has of a trailer, so one without an end would take memory, and time for each copy.
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
        # A message that ended in these bytes leaves it open how many are the next one's: none are counted.
        self._num_head_bytes = 0 if self._has_ended_message else self._num_head_bytes + len(data)
        if self._num_head_bytes > self._limits.max_header_bytes:
            self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """As uvicorn's, which logs a line for whatever is no HTTP and says so in plain text."""
        self._unset_keepalive_if_required()
        assert self.parser is not None  # until the connection is lost
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to a protocol that is not served: the request is answered as any other
        except httptools.HttpParserError:
            self._all.note("no_http")
            self._refuse(HttpRefusal(400, "what came is no HTTP request", "invalid_http"))

    def on_message_begin(self) -> None:
        """A request has begun."""
        super().on_message_begin()
        scope: Scope = self.scope  # type: ignore[assignment]
        scope[PLACE] = self
        if not self._is_refused:
            self._all.set_idle(self, is_idle=False)

    def on_headers_complete(self) -> None:
        """The headers are whole: begin, unless they are too long in all."""
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
        """A header; a trailer is dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """More of a body."""
        self._num_bytes_without_body = 0
        if self._waiting and not self._is_refused:
            self._waiting[0] += len(body)
            self._drop_if_too_much()
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole; what comes next is the next one's headers."""
        self._is_in_head = self._has_ended_message = True
        self._num_head_bytes = 0
        if not self._is_refused:
            self._stop_lingering()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The reply is whole; its request need not be, and has `linger_s` for what is dropped of it."""
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
        assert self._answered is not None  # what the others wait for
        self._all.note("waiting_bytes")
        self._is_refused = True
        self._waiting.clear()
        self.pipeline.clear()
        self.cycle = self._answered
        self.cycle.keep_alive = False

    @property
    def roles(self) -> frozenset[str]:
        """Those that the client's certificate names; none without TLS, a certificate or a role in it."""
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
        if self._is_replying:  # to an earlier request, into whose reply this one would go
            self.end()
            return
        self.transport.write(error_bytes(refusal))
        self._linger()

    def _linger(self) -> None:
        """Drop what comes until the client ends; meanwhile the connection is one that makes room for others."""
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
    """What a reply is written to: it closes as its connection does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send it."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """See `Connection.close`."""
        self._connection.close()


BACKLOG: Final = 2048
TICK_S: Final = 0.1


class _Server(uvicorn.Server):
    """Ends as soon as it is told to. Signals are the process's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()

    def end(self) -> None:
        """Take no new connection; `serve` returns when the others are closed."""
        self.should_exit = True
        self._is_told.set()

    async def main_loop(self) -> None:
        """As uvicorn's, which looks ten times a second whether it is to end."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 10
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_told.wait(), TICK_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are."""
        yield


class HttpServer:
    """Serves from `start` to `stop`.

    Args:
        app: what is served.
        connections: those that are open, and their limits.
        tls: its certificates; None for no encryption.
    """

    def __init__(self, app: ASGIApp, connections: Connections, tls: ssl.SSLContext | None = None) -> None:
        self._connections = connections
        self.port = 0
        self._tls = tls
        self._app = app
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 picks a free one.

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
        config.ssl = self._tls  # uvicorn's own would not follow files that change
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._task.done():
                raise BatonError("the HTTP server ended while it started") from self._task.exception()
            await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> None:
        """Take no new connection, give open replies a grace, then end them."""
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
