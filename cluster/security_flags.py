"""Flags about security that several commands have, added to their signatures: a table instead of many lines in each.

Nothing heavy is imported before a command runs: `--help` is to be quick. Secrets come by file or environment only; on
a command line everybody who lists processes would see them.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from baton.cluster.cli_types import option

KEY_VARIABLE = "BATON_API_KEY"
_SERVE: dict[str, tuple[type, str]] = {
    "secret_file": (str, "the deployment's secret; made if not there  [another one at each start]"),
    "kv_curve_key_file": (str, "ZMQ key pair of the deployment: encrypts KV, admits nobody else"),
    "kv_tls_cert_file": (str, "with --transport grpc: certificate of this host's workers"),
    "kv_tls_key_file": (str, "and its private key"),
    "kv_tls_ca_file": (str, "who signed the certificates; peers must present one"),
    "kv_tls_server_name": (str, "the name in the certificates, if it is not the address"),
    "kv_plaintext": (bool, "KV may go in clear beside TLS: its network is trusted"),
    "tls_cert_file": (str, "certificate of this host's router and workers (PEM)"),
    "tls_key_file": (str, "and its private key"),
    "tls_ca_file": (str, "who signed them; router, workers and operators must present one"),
    "tls_server_name": (str, "the name in the certificates, if it is not the address"),
    "tls_client_ca_file": (str, "with it, clients must present a certificate of this CA"),
    "api_keys_file": (str, "with it, clients must present a key of it: baton keys create"),
    "admin_port": (int, "of operators and workers; 0 picks a free one  [the gRPC port]"),
    "admin_keys_file": (str, "with it, operators must present a key of it"),
    "max_message_mib": (int, "bytes of a request; longer ones are refused  [16]"),
    "max_prompt_tokens": (int, "longer prompts are refused  [what the model takes]"),
    "max_streams_per_connection": (int, "answers over one connection  [no limit]"),
    "max_streams_per_tenant": (int, "answers to one tenant at once, prompts times n  [no limit]"),
    "max_queued_tokens_per_tenant": (int, "of one tenant's prompts under way  [no limit]"),
    "max_connections_per_tenant": (int, "of one tenant: open over HTTP, in use over gRPC  [no limit]"),
    "max_header_bytes_per_tenant": (int, "of one tenant's calls under way  [no limit]"),
    "max_connections": (int, "of clients, over gRPC and HTTP each  [half the file numbers]"),
}
_ACCESS = {
    "tls_ca_file": "who signed the deployment's certificate; the connection is then encrypted",
    "tls_cert_file": "own certificate, where the deployment asks for one",
    "tls_key_file": "and its private key",
    "tls_server_name": "the name in the deployment's certificate, if it is not the address",
    "api_key_file": f"file with an API key; or set {KEY_VARIABLE}",
}
Command = Callable[..., int]


def with_serve_flags(command: Command) -> Command:
    """Add the keys of `ServeConfig` that are about security; the command gets them with its other keywords."""
    return _extended(command, {name: (kind, text, None) for name, (kind, text) in _SERVE.items()}, panel="Security")


def with_access(command: Command) -> Command:
    """Add certificates and key of a client, or take them from `BATON_...`; what the command opens has them."""

    @functools.wraps(command)
    def reach(**values: Any) -> int:
        from baton.client.access import Access
        from baton.cluster.access import using
        from baton.cluster.outcome import Output
        from baton.core.errors import BatonError

        given = {name: values.pop(name) or "" for name in _ACCESS}
        try:
            access = Access.of(given, os.environ.get(KEY_VARIABLE, ""))
        except BatonError as error:
            return Output(bool(values.get("json"))).fail(error)
        with using(access):
            return command(**values)

    flags = {name: (str, text, f"BATON_{name.upper()}") for name, text in _ACCESS.items()}
    return _extended(reach, flags, panel="Access")


def _extended(command: Command, flags: Mapping[str, tuple[type, str, str | None]], *, panel: str) -> Command:
    signature = inspect.signature(command)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option(text, panel=panel, variable=variable)],
        )
        for name, (kind, text, variable) in flags.items()
    ]

    @functools.wraps(command)
    def extended(**values: Any) -> int:
        return command(**values)

    extended.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    extended.__annotations__ = {item.name: item.annotation for item in (*own, *added)} | {"return": int}
    return extended
