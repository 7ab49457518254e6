"""Prometheus metrics over HTTP, or HTTPS where the router has certificates: then scrapers need one of its CA."""

import ssl
from collections.abc import Callable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.core.errors import PortInUse
from baton.core.tls_files import TlsFiles, TlsWatch, server_context

TIMEOUT_S = 10.0  # of a scraper that does not finish its handshake or its request


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, tls: TlsFiles | None = None
) -> tuple[int, Callable[[], None]]:
    """Serve until the second result is called; the first is the port, which 0 leaves to the system.

    Raises:
        PortInUse: the port cannot be bound.
        ConfigInvalid: the certificates cannot be used.
    """
    context = server_context(TlsWatch(tls)) if tls is not None and tls.cert_file else None
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        raise PortInUse(f"metrics port {port} on {host}: {error.strerror}", host=host, port=port) from error
    server.context = context
    server.set_app(make_wsgi_app(registry))
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def close() -> None:
        server.shutdown()
        server.server_close()

    return server.server_port, close


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    context: ssl.SSLContext | None = None

    def get_request(self) -> tuple[Any, Any]:
        """The handshake is made by the connection's own thread, so that a slow one keeps no other waiting."""
        connection, address = super().get_request()
        connection.settimeout(TIMEOUT_S)
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that fails, or a scraper that goes away, is no error of ours."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
