"""How a client gets into a deployment: certificates and an API key. Neither is ever part of a repr or a message."""

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
    """What to show, and whom to believe. Nothing given: no encryption, no key.

    Attributes:
        tls: the CA that the deployment's certificate is of; a certificate and key of one's own where it asks for one.
        api_key: sent with every call.

    Raises:
        ConfigInvalid: the key has a character that no key has, such as the end of a line.
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
        """From what is given by the names in `VARIABLES`; a key in a file is read.

        Raises:
            ConfigInvalid: the file of the key cannot be read, or holds none.
        """
        tls = TlsFiles(**{name.removeprefix("tls_"): path for name, path in values.items() if name.startswith("tls_")})
        path = values.get("api_key_file", "")
        return cls(tls=tls, api_key=_read_key(Path(path)) if path else api_key)

    @classmethod
    def from_environment(cls) -> "Access":
        """From the environment's `BATON_...` variables.

        Raises:
            ConfigInvalid: see `of`.
        """
        found = {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}
        return cls.of(found, os.environ.get(KEY_VARIABLE, "").strip())

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def open(self, address: str, options: Options = ()) -> grpc.Channel:
        """A channel.

        Raises:
            ConfigInvalid: the certificates cannot be used.
        """
        return SecureChannels(self.tls).open(address, options)

    def open_aio(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel for asyncio.

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
    """Whether a header may have it: some visible characters of ASCII."""
    return bool(text) and all("!" <= character <= "~" for character in text)
