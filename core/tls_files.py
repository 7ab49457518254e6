"""TLS certificate files: their paths, checks and current contents.

A file that changes is read again. Half-written files are never used: inconsistent ones are counted and logged once, and
the previous contents stay in use. Private keys are never part of a repr, a message or an error.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.errors import ConfigInvalid
from baton.core.files import file_state

CHECK_S = 0.5  # minimum interval between checks of the files

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; empty ones are not used.

    Attributes:
        cert_file: own certificate, followed by its chain to the CA.
        key_file: its private key, not encrypted.
        ca_file: CA of the peers' certificates. A server with one admits only callers with such a certificate.
        server_name: name in a server's certificate, if it is not its address.
    """

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    server_name: str = ""

    @property
    def is_on(self) -> bool:
        """Whether anything is encrypted."""
        return bool(self.cert_file or self.key_file or self.ca_file)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are used."""
        return tuple(path for path in (self.cert_file, self.key_file, self.ca_file) if path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """What the files held when they were last read in full.

    Attributes:
        key: PEM; None without a certificate.
        chain: PEM.
        ca: PEM; None if peers' certificates are not checked against our CA.
        version: different after each change.
    """

    key: bytes | None = field(repr=False)
    chain: bytes | None = field(repr=False)
    ca: bytes | None = field(repr=False)
    version: int


class TlsWatch:
    """Reads the files, and again after they have changed. Thread-safe.

    Args:
        files: the files; a certificate and a key go together.
        check_s: minimum interval between checks of the files.
        now_s: clock for that interval.
        now_unix_s: clock of the certificates.
        on_reload: called after each detected change with whether it was accepted.

    Raises:
        ConfigInvalid: a file cannot be read, or the files do not fit together.
    """

    def __init__(
        self,
        files: TlsFiles,
        *,
        check_s: float = CHECK_S,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_s: Callable[[], float] = time.time,
        on_reload: Callable[[bool], None] = lambda taken: None,
    ) -> None:
        self.files = files
        self.on_reload = on_reload
        self.num_reloads = 0
        self.num_refused = 0
        self._check_s = check_s
        self._now_s = now_s
        self._now_unix_s = now_unix_s
        self._lock = threading.Lock()
        self._signature = _signature(files)
        self._material = read_tls(files, version=1)
        self._checked_s = now_s()

    def current(self) -> TlsMaterial:
        """Return the newest valid contents. Never raises."""
        with self._lock:
            now_s = self._now_s()
            if now_s - self._checked_s < self._check_s:
                return self._material
            self._checked_s = now_s
            signature = _signature(self.files)
            if signature == self._signature:
                return self._material
            taken = self._read_again(signature)
        self.on_reload(taken)
        return self._material

    def _read_again(self, signature: tuple[object, ...]) -> bool:
        names = ", ".join(self.files.paths)
        try:
            material = read_tls(self.files, version=self._material.version + 1)
            self._require_unexpired()
        except ConfigInvalid as error:
            self._signature = signature  # logged once for each state of the files
            self.num_refused += 1
            log.error("changed certificates are not taken, the old ones stay in use: %s", error.message)
            return False
        if _signature(self.files) != signature:
            return False  # still being written; the next check sees it again
        self._signature, self._material = signature, material
        self.num_reloads += 1
        log.info("certificates read again: %s", names)
        return True

    def _require_unexpired(self) -> None:
        """Refuse a change to a certificate that no peer would accept any more."""
        path = self.files.cert_file
        if path and end_of_certificate_s(path) <= self._now_unix_s():
            raise ConfigInvalid(f"tls_cert_file {path}: the certificate has expired", keys=["tls_cert_file"])


def end_of_certificate_s(path: str) -> float:
    """Unix time at which the first certificate of a PEM file expires.

    Raises:
        ConfigInvalid: the file holds no certificate.
    """
    try:
        decoded: dict[str, str] = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
        return ssl.cert_time_to_seconds(decoded["notAfter"])
    except (OSError, KeyError, ValueError) as error:  # includes SSLError
        raise ConfigInvalid(f"{path} holds no certificate: {error}", keys=["tls_cert_file"]) from error


def read_tls(files: TlsFiles, version: int = 1) -> TlsMaterial:
    """Read and check the files.

    Raises:
        ConfigInvalid: a file cannot be read or is not PEM, or the key is encrypted or belongs to another certificate.
    """
    if bool(files.cert_file) != bool(files.key_file):
        raise ConfigInvalid("tls_cert_file and tls_key_file go together", keys=["tls_cert_file", "tls_key_file"])
    key = _read(files.key_file, "tls_key_file") if files.key_file else None
    chain = _read(files.cert_file, "tls_cert_file") if files.cert_file else None
    ca = _read(files.ca_file, "tls_ca_file") if files.ca_file else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.cert_file:
        _load_pair(context, files)
    if ca is not None:
        _load_ca(context, files.ca_file, ca)
    return TlsMaterial(key=key, chain=chain, ca=ca, version=version)


def server_context(watch: TlsWatch) -> ssl.SSLContext:
    """Make a context for servers that take Python's contexts (HTTP); each handshake uses the current files.

    With a CA, clients must present a certificate of it.
    """
    version = 0
    newest = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    lock = threading.Lock()

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, before: ssl.SSLContext) -> None:
        nonlocal newest, version
        with lock:
            material = watch.current()
            if material.version != version:
                try:
                    newest, version = _context_of(watch.files), material.version
                except ConfigInvalid as error:  # changed again since they were read: the next handshake sees it
                    log.warning("a handshake goes on with the certificates before: %s", error.message)
        connection.context = newest

    newest, version = _context_of(watch.files), watch.current().version
    outer = _context_of(watch.files)
    outer.sni_callback = renew
    return outer


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, files)
    if files.ca_file:
        _load_ca(context, files.ca_file, _read(files.ca_file, "tls_ca_file"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password=_no_password)
    except (OSError, ValueError) as error:  # includes SSLError
        why = "they do not go together, or are no unencrypted PEM"
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror:
            why = error.strerror
        message = f"tls_cert_file {files.cert_file} and tls_key_file {files.key_file}: {why}"
        raise ConfigInvalid(message, keys=["tls_cert_file", "tls_key_file"]) from None  # its text could hold the key


def _load_ca(context: ssl.SSLContext, path: str, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigInvalid(f"tls_ca_file {path}: holds no certificate in PEM", keys=["tls_ca_file"]) from error


def _no_password() -> str:
    return ""  # an encrypted key is refused instead of asking for a password


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{name} {path}: {error.strerror}", keys=[name]) from error


def _signature(files: TlsFiles) -> tuple[object, ...]:
    return tuple(file_state(path) for path in files.paths)
