"""The router's flags that are keys of `ServeConfig`: derived from the keys' declarations, and written for a router."""

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from baton.core.config import ServeConfig
from baton.core.config_key import keys_of
from baton.core.tls_files import TlsFiles
from baton.router.access.security import MIB, ClientLimits, RouterSecurity

KEYS = {name: key for name, key in keys_of(ServeConfig).items() if key.is_for_router}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, with the same names, defaults and bounds as in `baton serve`."""
    for name, key in KEYS.items():
        default = ServeConfig.model_fields[name].default
        if key.kind is bool:
            parser.add_argument(key.flag, action=argparse.BooleanOptionalAction, default=default, help=key.help)
        else:
            metavar = key.metavar or None
            parser.add_argument(key.flag, type=_reader(name), default=default, metavar=metavar, help=key.help)


def flags_of(config: ServeConfig) -> list[str]:
    """The command-line flags of a router that is started with this configuration."""
    flags: list[str] = []
    for name, key in KEYS.items():
        value = getattr(config, name)
        if key.kind is bool:
            flags.append(key.flag if value else f"--no-{key.flag[2:]}")
        elif value not in (None, ""):
            flags += [key.flag, str(value)]
    return flags


def _reader(name: str) -> Callable[[str], Any]:
    """Return a function that parses a value for argparse and words the error."""

    def read(text: str) -> Any:
        try:
            return getattr(ServeConfig.model_validate_strings({name: text}), name)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(error.errors()[0]["msg"]) from error

    return read


MAX_PORT = 65535


def port(text: str) -> int:
    """Parse a port or 0. Without this check, gRPC and uvicorn would take larger numbers modulo 65536."""
    value = int(text)
    if not 0 <= value <= MAX_PORT:
        raise ArgumentTypeError(f"{value} is no port")
    return value


def count(text: str) -> int:
    """Parse a number that is 0 or more."""
    value = int(text)
    if value < 0:
        raise ArgumentTypeError(f"{value} is negative")
    return value


def security_of(options: argparse.Namespace | ServeConfig) -> RouterSecurity:
    """Build the security configuration from the flags, or from the keys of a configuration.

    Raises:
        ConfigInvalid: they contradict each other, or a port beyond loopback would need no credential.
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
        limits=ClientLimits(
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
