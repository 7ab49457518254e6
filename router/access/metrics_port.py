"""Serves Prometheus metrics over HTTP, or over HTTPS if the router has certificates; scrapers then need its CA."""

import ssl
from collections.abc import Callable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.core.errors import PortInUse
from baton.core.tls_files import TlsFiles, TlsWatch, server_context

TIMEOUT_S = 10.0  # for a scraper that does not finish its handshake or its request


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, tls: TlsFiles | None = None
) -> tuple[int, Callable[[], None]]:
    """Start serving; return the port (the system picks one for 0) and a function that stops the server.

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
        """Accept a connection. Its own thread does the handshake, so that a slow one delays no other."""
        connection, address = super().get_request()
        connection.settimeout(TIMEOUT_S)
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore failed handshakes and scrapers that disconnect: they are no errors of the router."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""
