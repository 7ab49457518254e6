"""One port of the router: a gRPC server with its authenticator, certificates and limits."""

import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.config import LOOPBACK
from baton.core.errors import BatonError, ConfigInvalid, PortInUse
from baton.core.files import share_of_clients
from baton.core.handshakes import Handshakes
from baton.core.inside import ProofVerifier
from baton.core.tls_files import TlsFiles, TlsWatch, server_context
from baton.proto.inside import RequireProof
from baton.proto.roles import ALLOWED, RequireRole
from baton.proto.secure_channel import server_credentials
from baton.proto.unreadable import RefuseUnreadable
from baton.router.access.api_keys import KeyEntry
from baton.router.access.authenticator import OPEN, Authenticator, AuthInterceptor
from baton.router.access.security import IDLE_S, ClientLimits, SecurityMetrics

MAX_SEND_BYTES: Final = 16 << 20
STREAM_HEADROOM: Final = 32  # streams beyond a connection's limit that get a refusal instead of being held back
CLIENT_MESSAGES: Final = ("baton.v1.GenerateRequest", "baton.v1.TokenizeRequest")  # bounded by the model's length
NUM_DOORS: Final = 2  # gRPC and HTTP share the file descriptors
SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a second router on the port must fail, not share it
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

log = logging.getLogger(__name__)


class Listener:
    """A port. Call `open`, register services with its `server`, then call `listen`.

    Args:
        name: the port's name, for logs and counters.
        tls: certificate, key and the CA that must have signed callers' certificates; empty for no encryption.
        keys: API keys that callers must present; None for none.
        limits: limits of messages, streams and connections.
        metrics: counts refusals.
        open_services: services that need no key, in addition to health and reflection.
        extra_keys: keys in addition to the file's.
        verifier: verifies calls from inside the deployment: all calls except those to `outside`.
        outside: services for callers outside the deployment.

    Attributes:
        authenticator: shared with HTTP, which serves the same callers.
        server: the gRPC server; the owner of the listener starts and stops it.
        check_num_bytes: called with a client message's size before it is parsed; raises if it is too large.

    Raises:
        ConfigInvalid: the keys or the certificates cannot be used.
    """

    def __init__(
        self,
        name: str,
        *,
        tls: TlsFiles,
        keys: Path | None,
        limits: ClientLimits,
        metrics: SecurityMetrics,
        open_services: Collection[str] = (),
        extra_keys: tuple[KeyEntry, ...] = (),
        verifier: ProofVerifier,
        outside: Collection[str],
    ) -> None:
        self._metrics = metrics
        self._verifier = verifier
        self._outside = frozenset(outside)
        self._name = name
        self.authenticator = Authenticator(keys, limits, metrics, extra=extra_keys)
        self.watch = TlsWatch(tls, on_reload=metrics.reloaded("certificates")) if tls.is_on else None
        self._handshakes: Handshakes | None = None
        if self.watch is not None:
            self._handshakes = Handshakes(name, metrics.lost_handshakes.labels(name).inc)
        self._limits = limits
        self._auth_interceptor = AuthInterceptor(self.authenticator, (*OPEN, *open_services), self._handshakes)
        self.server: Any = None
        self.port = 0
        self.check_num_bytes: Callable[[int], None] = lambda num_bytes: None

    def open(self) -> None:
        """Create the server, on the running event loop."""
        options = _options(self._limits)
        require_proof = RequireProof(self._verifier, self._outside, self._count_refused)
        require_role = RequireRole(ALLOWED.get, self._metrics.refused.labels("certificate_role").inc)
        interceptors = (require_proof, self._auth_interceptor, require_role, RefuseUnreadable(check_size=self._check))
        self.server = grpc.aio.server(options=options, interceptors=interceptors)

    def _check(self, name: str, num_bytes: int) -> None:
        if name in CLIENT_MESSAGES:
            self.check_num_bytes(num_bytes)

    def listen(self, host: str, port: int) -> None:
        """Bind the port; 0 picks a free one.

        Raises:
            PortInUse: the port is taken.
            ConfigInvalid: the address cannot be bound, or there is a CA without a certificate.
        """
        place = f"{host}:{port}"
        try:
            if self.watch is None or self._handshakes is None:
                self.port = self.server.add_insecure_port(place)
            else:
                self.port = self.server.add_secure_port(place, server_credentials(self.watch, self._handshakes.begun))
        except RuntimeError as error:
            raise why_not_bound(host, port) from error
        if self.authenticator.keys is not None and self.watch is None and host not in LOOPBACK:
            log.warning("API keys cross the network in clear: the %s port has no certificate", self._name)

    def http_context(self) -> ssl.SSLContext | None:
        """TLS context for an HTTP server with the same callers, reloaded likewise; None without TLS."""
        return None if self.watch is None else server_context(self.watch)

    @property
    def asks_certificates(self) -> bool:
        """Whether callers must present a certificate."""
        return self.watch is not None and bool(self.watch.files.ca_file)

    def _count_refused(self, reason: str) -> None:
        self._metrics.refused.labels(f"proof_{reason}").inc()

    def tick(self) -> None:
        """Must be called periodically."""
        if self._handshakes is not None:
            self._handshakes.tick()


def _options(limits: ClientLimits) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        ("grpc.max_connection_idle_ms", round(1e3 * IDLE_S)),
    ]
    if limits.max_streams_per_connection is not None:
        options.append(("grpc.max_concurrent_streams", limits.max_streams_per_connection + STREAM_HEADROOM))
    most = share_of_clients(NUM_DOORS)
    most = most if limits.max_connections is None else min(most, limits.max_connections)
    options.append(("grpc.max_allowed_incoming_connections", most))
    return options


def why_not_bound(host: str, port: int, key: str = "grpc_port") -> BatonError:
    """Find the reason for a failed bind, which gRPC does not report; `key` is the setting of the port."""
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:  # includes gaierror
        if error.errno != errno.EADDRINUSE:
            return ConfigInvalid(f"cannot listen on {host}:{port}: {error.strerror}", keys=["host", key])
    return PortInUse(f"port {port} on {host} is taken; choose another, or 0 for a free one", host=host, port=port)
