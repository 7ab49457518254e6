"""The HTTP server, on the router's own event loop beside gRPC."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from baton.core.errors import BatonError
from baton.router.access.security import IDLE_S
from baton.router.openai.connection import Connection, Connections

BACKLOG: Final = 2048

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Signals are the process's business."""

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
        self._server.should_exit = True
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
