"""The router's command line, as far as it is about who gets in: flags to `RouterSecurity` and back."""

import argparse

from baton.core.config import ServeConfig
from baton.core.tls_files import TlsFiles
from baton.router import flag_values
from baton.router.security import MIB, DoorLimits, RouterSecurity

TEXTS = (
    "tls_cert_file",
    "tls_key_file",
    "tls_ca_file",
    "tls_server_name",
    "tls_client_ca_file",
    "api_keys_file",
    "admin_keys_file",
)
NUMBERS = (
    "admin_port",
    "max_message_mib",
    "max_prompt_tokens",
    "max_streams_per_connection",
    "max_streams_per_tenant",
    "max_queued_tokens_per_tenant",
    "max_connections_per_tenant",
    "max_header_bytes_per_tenant",
    "max_connections",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The same names as `baton serve` has."""
    fields = ServeConfig.model_fields
    for name in TEXTS:
        parser.add_argument(_flag(name), default="", help=fields[name].description)
    for name in NUMBERS:
        kind = flag_values.port if name == "admin_port" else flag_values.positive_int
        parser.add_argument(_flag(name), type=kind, default=fields[name].default, help=fields[name].description)
    parser.add_argument("--operator-key-digest", default="", help="SHA-256 of one more key that operators may present")


def security_of(options: argparse.Namespace | ServeConfig) -> RouterSecurity:
    """What the flags, or the keys of a configuration, say.

    Raises:
        ConfigInvalid: they do not go together, or a port beyond loopback would ask for no credential.
    """
    security = RouterSecurity(
        tls=TlsFiles(
            cert_file=options.tls_cert_file,
            key_file=options.tls_key_file,
            ca_file=options.tls_ca_file,
            server_name=options.tls_server_name,
        ),
        client_ca_file=options.tls_client_ca_file,
        api_keys_file=options.api_keys_file,
        admin_port=options.admin_port,
        admin_keys_file=options.admin_keys_file,
        operator_key_digest=getattr(options, "operator_key_digest", ""),
        limits=DoorLimits(
            max_message_bytes=options.max_message_mib * MIB,
            max_prompt_tokens=options.max_prompt_tokens,
            max_streams_per_connection=options.max_streams_per_connection,
            max_streams_per_tenant=options.max_streams_per_tenant,
            max_queued_tokens_per_tenant=options.max_queued_tokens_per_tenant,
            max_connections_per_tenant=options.max_connections_per_tenant,
            max_header_bytes_per_tenant=options.max_header_bytes_per_tenant,
            max_connections=options.max_connections,
        ),
    )
    security.require_credentials(options.host)
    return security


def flags_of(config: ServeConfig) -> list[str]:
    """The flags of a router that is started for this configuration."""
    names = (*TEXTS, *NUMBERS)
    values = {name: getattr(config, name) for name in names}
    return [part for name, value in values.items() if value not in ("", None) for part in (_flag(name), str(value))]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
