"""What is counted of refusals, handshakes and files that changed."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter


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
