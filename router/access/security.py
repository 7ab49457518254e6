"""A router's security configuration: certificates, keys, ports and clients' limits. Checked here, enforced elsewhere.

With an admin port there are two kinds of callers. Clients use the public port: with TLS, with certificates of the
clients' CA if one is configured, and with API keys if there are any. Workers and operators use the admin port, which
requires certificates of the deployment's own CA. Without an admin port all callers share one port, and its protection
applies to all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from baton.core.config import LOOPBACK
from baton.core.errors import ConfigInvalid
from baton.core.tls_files import TlsFiles
from baton.router.access.api_keys import KeyEntry


class SecurityMetrics:
    """Metrics of access control. Callers update the named attributes.

    Args:
        registry: where they are exported.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self.refused = Counter(
            "baton_requests_refused",
            "Calls refused at the door: keys, tenants, limits of streams",
            ("reason",),
            registry=registry,
        )
        self.lost_handshakes = Counter(
            "baton_tls_connections_refused",
            "Connections to a TLS port that never came to a call: no or a wrong certificate, no TLS, or a probe",
            ("port",),
            registry=registry,
        )
        self.reloads = Counter(
            "baton_security_reloads",
            "Files of keys and certificates that changed while they were in use",
            ("what", "outcome"),
            registry=registry,
        )

    def reloaded(self, what: str) -> Callable[[bool], None]:
        """Return a callback that counts reloads of watched files."""

        def count(taken: bool) -> None:
            self.reloads.labels(what, "taken" if taken else "refused").inc()

        return count


MIB = 1 << 20
# After this, the router closes a client's connection without a request, over HTTP and gRPC. It is longer than HTTP
# clients keep an idle connection, so that they do not write to one that is closing. gRPC clients reconnect by
# themselves.
IDLE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a client may use. None means no separate limit.

    Attributes:
        max_message_bytes: bytes of a request.
        max_prompt_tokens: tokens of a prompt, if fewer than the model's length.
        max_streams_per_connection: answers streaming over one connection.
        max_streams_per_tenant: answers streaming to one tenant.
        max_queued_tokens_per_tenant: prompt tokens of one tenant's requests in progress.
        max_connections_per_tenant: connections open over HTTP, or in use over gRPC.
        max_header_bytes_per_tenant: headers of one tenant's calls in progress.
        max_connections: connections to the public port; further ones are closed at once.
    """

    max_message_bytes: int = 16 * MIB
    max_prompt_tokens: int | None = None
    max_streams_per_connection: int | None = None
    max_streams_per_tenant: int | None = None
    max_queued_tokens_per_tenant: int | None = None
    max_connections_per_tenant: int | None = None
    max_header_bytes_per_tenant: int | None = None
    max_connections: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSecurity:
    """A router's security configuration.

    Attributes:
        tls: the router's certificate for clients and workers, its key, and the deployment's CA.
        client_ca_file: CA of clients' certificates; if set, clients must present one.
        api_keys_file: if set, clients must present a key from it.
        admin_port: port of workers and operators; None: they use the public port. 0 picks a free one.
        admin_keys_file: if set, operators must present a key from it.
        operator_key_digest: SHA-256 of one more operator key, held by the process that started the router.
        limits: limits of the public port.
    """

    tls: TlsFiles = field(default_factory=TlsFiles)
    client_ca_file: str = ""
    api_keys_file: str = ""
    admin_port: int | None = None
    admin_keys_file: str = ""
    operator_key_digest: str = field(default="", repr=False)
    limits: ClientLimits = field(default_factory=ClientLimits)

    def __post_init__(self) -> None:
        if self.admin_port is None:
            for name in ("client_ca_file", "api_keys_file", "admin_keys_file"):
                if getattr(self, name):
                    shown = "tls_client_ca_file" if name == "client_ca_file" else name
                    message = f"{shown} without admin_port: clients could reach what only workers and operators may"
                    raise ConfigInvalid(message, keys=[shown, "admin_port"])
        if (self.client_ca_file or self.tls.ca_file) and not self.tls.cert_file:
            raise ConfigInvalid("a CA without tls_cert_file: a router needs a certificate", keys=["tls_cert_file"])

    def require_credentials(self, host: str) -> None:
        """Check that the ports require credentials, unless the host is reachable from this machine only.

        Raises:
            ConfigInvalid: clients or operators would need none.
        """
        if host in LOOPBACK:
            return
        beyond = f"host: {host} is reached from other machines"
        if not self.api_keys_file and not self.public_tls.ca_file:
            message = f"{beyond}, so clients need a credential: give api_keys_file (`baton keys create`) and admin_port"
            raise ConfigInvalid(message, keys=["host", "api_keys_file", "admin_port"])
        if not self.admin_keys_file and not self.tls.ca_file:
            message = f"{beyond}, so operators need a credential: give admin_keys_file, or tls_ca_file"
            raise ConfigInvalid(message, keys=["host", "admin_keys_file"])

    @property
    def public_tls(self) -> TlsFiles:
        """Certificates of the clients' port."""
        ca_file = self.tls.ca_file if self.admin_port is None else self.client_ca_file
        return TlsFiles(cert_file=self.tls.cert_file, key_file=self.tls.key_file, ca_file=ca_file)

    def keys_path(self, *, admin: bool = False) -> Path | None:
        """File with the clients' keys, or the operators'; None if there is none."""
        name = self.admin_keys_file if admin else self.api_keys_file
        return Path(name) if name else None

    @property
    def operator_keys(self) -> tuple[KeyEntry, ...]:
        """Operators' keys in addition to the file's."""
        if not self.operator_key_digest:
            return ()
        return (KeyEntry(name="operator", tenant="operators", sha256=self.operator_key_digest),)
