"""Certificates in files and at ports: what they are, whether they will do, and putting others in their place."""

import hashlib
import os
import shutil
import ssl
import time
from pathlib import Path
from typing import Any

from baton.cluster.doctor.wires import Wire, wires
from baton.core.errors import ConfigInvalid, PreconditionUnmet, StepFailed
from baton.core.tls_files import TlsFiles, read_tls
from baton.proto import admin_pb2

DAY_S = 86_400.0
SUFFIX = ".before"


def ports(address: str, status: admin_pb2.StatusReply, ca_file: str = "") -> list[Wire]:
    """What every TLS port of a deployment shows now; with `ca_file`, whether that is trusted."""
    return [wire for wire in wires(address, status, ca_file) if wire.fingerprint]


def fingerprint_of(path: str) -> str:
    """SHA-256 of a file's first certificate, as `baton doctor` shows it.

    Raises:
        ConfigInvalid: there is none.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = Path(path).read_text(encoding="ascii")
        body = text[text.index(begin) : text.index(end) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(body)).hexdigest()
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{path} holds no certificate: {error}", keys=["cert_file"]) from error


def pair_fits(cert_file: str, key_file: str) -> None:
    """Check that a certificate and a key are of each other.

    Raises:
        PreconditionUnmet: they are not, or cannot be read.
    """
    try:
        read_tls(TlsFiles(cert_file=cert_file, key_file=key_file), version=1)
    except ConfigInvalid as error:
        raise PreconditionUnmet(error.message) from error


def days_left(cert_file: str) -> float:
    """Until a certificate ends; negative when it has.

    Raises:
        PreconditionUnmet: it cannot be read.
    """
    try:
        decoded: dict[str, Any] = ssl._ssl._test_decode_cert(cert_file)  # type: ignore[attr-defined]
        return (ssl.cert_time_to_seconds(decoded["notAfter"]) - time.time()) / DAY_S
    except (OSError, KeyError, ValueError) as error:
        raise PreconditionUnmet(f"{cert_file}: {error}") from error


def is_trusted(cert_file: str, key_file: str, ca_file: str, names: list[str]) -> None:
    """Check in a handshake without a network that those who trust `ca_file` take a certificate.

    Args:
        cert_file: of the server.
        key_file: and its private key.
        ca_file: of the client.
        names: that must be in it.

    Raises:
        PreconditionUnmet: they do not.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name in names or [""]:
        try:
            server.load_cert_chain(cert_file, key_file)
            client = ssl.create_default_context(cafile=ca_file)
            client.check_hostname = bool(name)
            _shake_hands(client, server, name or None)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason
            raise PreconditionUnmet(f"{cert_file} is not trusted with {ca_file}: {why}") from error
        except OSError as error:
            raise PreconditionUnmet(f"{cert_file}, {ca_file}: {error}") from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


class Replacement:
    """New content for a file, and the way back; the old content is kept beside it until the new one is proven.

    Args:
        path: the file.
        source: holds what is to be in it.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self._source = source
        self._backup = f"{path}{SUFFIX}"
        self._is_kept = False

    def is_done(self) -> bool:
        """It holds that already."""
        return self._read(self.path) == self._read(self._source)

    def do(self) -> str:
        """Write beside, then rename."""
        try:
            shutil.copy2(self.path, self._backup)
            self._is_kept = True
            self._put(self._source)
        except OSError as error:
            raise StepFailed(f"{self.path} cannot be replaced: {error.strerror}", path=self.path) from error
        return f"the old one is {self._backup}"

    def undo(self) -> str:
        """What was in it before."""
        try:
            if self._is_kept:
                self._put(self._backup)
        except OSError as error:
            raise StepFailed(f"{self.path} cannot be put back: {error.strerror}", path=self.path) from error
        return f"{self.path} holds what it held"

    def _put(self, source: str) -> None:
        temporary = f"{self.path}.new"
        status = os.stat(self.path)
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(self._read(source))
        os.chmod(temporary, status.st_mode & 0o777)
        if os.geteuid() == 0:
            os.chown(temporary, status.st_uid, status.st_gid)
        os.replace(temporary, self.path)

    def _read(self, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise PreconditionUnmet(f"{path} cannot be read: {error.strerror}", path=path) from error
