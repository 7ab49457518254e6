"""How a router is protected: its certificates, its keys, its ports and the limits at its door. Checked, not enforced.

With an admin port there are two kinds of callers. Clients come to the public port: with TLS, with certificates of the
clients' CA if one is named, with API keys if there are any. Workers and operators come to the admin port, where the
deployment's own CA is asked for. Without an admin port all callers come to one port, and whatever protects it is
asked of all.
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
    """Feeding is by the named attributes.

    Args:
        registry: where they are shown; a router has them only if anything is protected or limited.
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
        """Counts what a watch of files tells."""

        def count(taken: bool) -> None:
            self.reloads.labels(what, "taken" if taken else "refused").inc()

        return count


MIB = 1 << 20
# A client's connection without a request is closed then, over HTTP and gRPC; longer than HTTP clients keep one, so that
# they do not write to one that closes. gRPC's clients open another by themselves.
IDLE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a client may take. None is no limit of its own.

    Attributes:
        max_message_bytes: of a request.
        max_prompt_tokens: of a prompt, where that is less than the model's length.
        max_streams_per_connection: answers that stream over one connection.
        max_streams_per_tenant: answers that stream to one tenant.
        max_queued_tokens_per_tenant: of the prompts of one tenant's requests under way.
        max_connections_per_tenant: open over HTTP, and in use over gRPC.
        max_header_bytes_per_tenant: of one tenant's calls under way.
        max_connections: to the public port; more are closed at once.
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
    """Everything a router is told about it.

    Attributes:
        tls: its certificate, which it shows to clients and to workers, and the deployment's CA.
        client_ca_file: who signed clients' certificates; with it, clients must present one.
        api_keys_file: with it, clients must present a key of it.
        admin_port: where workers and operators come; None: to the public port. 0 picks a free one.
        admin_keys_file: with it, operators must present a key of it.
        operator_key_digest: SHA-256 of one more such key: of who has started the router.
        limits: of the public port.
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
        """Check that ports of this host ask their callers for a credential, unless only this machine reaches them.

        Raises:
            ConfigInvalid: clients, or operators, would need none.
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
        """Of the port that clients come to."""
        ca_file = self.tls.ca_file if self.admin_port is None else self.client_ca_file
        return TlsFiles(cert_file=self.tls.cert_file, key_file=self.tls.key_file, ca_file=ca_file)

    def keys_path(self, *, admin: bool = False) -> Path | None:
        """Of the keys of clients, or of operators."""
        name = self.admin_keys_file if admin else self.api_keys_file
        return Path(name) if name else None

    @property
    def operator_keys(self) -> tuple[KeyEntry, ...]:
        """Beside those of the file."""
        if not self.operator_key_digest:
            return ()
        return (KeyEntry(name="operator", tenant="operators", sha256=self.operator_key_digest),)
