"""How a client gets access to a deployment: certificates and an API key. Neither appears in a repr or a message."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from baton.core.errors import ConfigInvalid
from baton.core.tls_files import TlsFiles
from baton.proto.secure_channel import Options, SecureChannels

VARIABLES = {
    "tls_ca_file": "BATON_TLS_CA_FILE",
    "tls_cert_file": "BATON_TLS_CERT_FILE",
    "tls_key_file": "BATON_TLS_KEY_FILE",
    "tls_server_name": "BATON_TLS_SERVER_NAME",
    "api_key_file": "BATON_API_KEY_FILE",
}
KEY_VARIABLE = "BATON_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a client presents, and which server it trusts. By default: no encryption, no key.

    Attributes:
        tls: the CA of the deployment's certificate; also the client's certificate and key, if the deployment requires
            one.
        api_key: sent with every call.

    Raises:
        ConfigInvalid: the key has a character that no key has, such as a line end.
    """

    tls: TlsFiles = field(default_factory=TlsFiles)
    api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.api_key and not _is_key(self.api_key):
            message = (
                f"the API key (api_key, or {KEY_VARIABLE}) has a space, a line end or another character no key has"
            )
            raise ConfigInvalid(message, keys=["api_key"])

    @classmethod
    def of(cls, values: Mapping[str, str], api_key: str = "") -> "Access":
        """Make an access from values given by the names in `VARIABLES`; a key in a file is read.

        Raises:
            ConfigInvalid: the key file cannot be read, or holds no key.
        """
        tls = TlsFiles(**{name.removeprefix("tls_"): path for name, path in values.items() if name.startswith("tls_")})
        path = values.get("api_key_file", "")
        return cls(tls=tls, api_key=_read_key(Path(path)) if path else api_key)

    @classmethod
    def from_environment(cls) -> "Access":
        """Make an access from the environment's `BATON_...` variables.

        Raises:
            ConfigInvalid: see `of`.
        """
        found = {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
        return cls.of(found, os.environ.get(KEY_VARIABLE, "").strip())

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata to send with every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def open(self, address: str, options: Options = ()) -> grpc.Channel:
        """Open a channel.

        Raises:
            ConfigInvalid: the certificates cannot be used.
        """
        return SecureChannels(self.tls).open(address, options)

    def open_aio(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """Open a channel for asyncio.

        Raises:
            ConfigInvalid: the certificates cannot be used.
        """
        return SecureChannels(self.tls).open_aio(address, options)


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigInvalid(f"api_key_file {path}: {why}", keys=["api_key_file"]) from None
    if not _is_key(key):
        raise ConfigInvalid(f"api_key_file {path} holds no key", keys=["api_key_file"])
    return key


def _is_key(text: str) -> bool:
    """Return whether a header can carry the text: at least one character, all visible ASCII."""
    return bool(text) and all("!" <= character <= "~" for character in text)
