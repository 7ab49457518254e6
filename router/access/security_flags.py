"""The router's flags, as far as they are about who gets in, to `RouterSecurity`."""

import argparse

from baton.core.config import ServeConfig
from baton.core.tls_files import TlsFiles
from baton.router.access.security import MIB, ClientLimits, RouterSecurity


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
