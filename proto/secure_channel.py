"""TLS for gRPC: credentials of servers and channels, made from files that may change while they are in use.

A server asks for the files at every handshake, so a new certificate serves the next connection and no stream ends.
A channel keeps what it was opened with; `SecureChannels` says when it is to be opened anew.
"""

import ipaddress
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import ConfigInvalid
from baton.core.tls_files import TlsFiles, TlsMaterial, TlsWatch

NAME_OPTION = "grpc.ssl_target_name_override"
Options = Sequence[tuple[str, Any]]
REFUSED_SIGNS = ("handshake failed", "CERTIFICATE_", "TLSV1_ALERT", "certificate verify")


def server_credentials(watch: TlsWatch, on_handshake: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
    """Credentials that follow the files. With a CA, clients must present a certificate of it.

    Args:
        watch: the files; a certificate among them.
        on_handshake: called when a connection begins, on a thread of gRPC's. Must not raise.

    Raises:
        ConfigInvalid: there is no certificate.
    """
    first = watch.current()
    if first.chain is None:
        message = "tls_ca_file without tls_cert_file: a listener needs a certificate"
        raise ConfigInvalid(message, keys=["tls_cert_file"])
    version = first.version

    def fetch() -> Any:  # the stubs do not know that None is "as before"
        nonlocal version
        on_handshake()
        material = watch.current()
        if material.version == version:
            return None
        version = material.version
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first), fetch, require_client_authentication=bool(watch.files.ca_file)
    )


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Without a CA, servers' certificates are checked against the usual public ones."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.chain)


class SecureChannels:
    """Opens channels, encrypted if the files say so. To this host itself none goes through the environment's proxy.

    Args:
        files: of this end; None or empty ones for no encryption.

    Raises:
        ConfigInvalid: a file cannot be read, or they do not fit together.
    """

    def __init__(self, files: TlsFiles | None = None) -> None:
        self.watch = TlsWatch(files) if files is not None and files.is_on else None

    @property
    def version(self) -> int:
        """Another one after each change of the files; a channel that was opened with one before is to be replaced."""
        return 0 if self.watch is None else self.watch.current().version

    def open_aio(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel for asyncio."""
        if self.watch is None:
            return grpc.aio.insecure_channel(address, options=(*options, *_route(address)))
        return grpc.aio.secure_channel(
            address, self._credentials(), options=(*options, *self._name(), *_route(address))
        )

    def open(self, address: str, options: Options = ()) -> grpc.Channel:
        """A channel for threads."""
        if self.watch is None:
            return grpc.insecure_channel(address, options=(*options, *_route(address)))
        return grpc.secure_channel(address, self._credentials(), options=(*options, *self._name(), *_route(address)))

    def _credentials(self) -> grpc.ChannelCredentials:
        assert self.watch is not None
        return channel_credentials(self.watch.current())

    def _name(self) -> Options:
        assert self.watch is not None
        name = self.watch.files.server_name
        return ((NAME_OPTION, name),) if name else ()


def _route(address: str) -> Options:
    """What keeps a channel to this host out of `http_proxy`, which gRPC obeys unless `no_proxy` names the host."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return (("grpc.enable_http_proxy", 0),) if is_loopback else ()


def is_refused_certificate(error: grpc.RpcError) -> bool:
    """Whether a call failed because one side did not accept the other's certificate, or its lack."""
    details = error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    return any(sign.lower() in (details or "").lower() for sign in REFUSED_SIGNS)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None and material.chain is not None
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.ca)
