"""The deployment's secret, and how calls inside the deployment prove that the caller knows a key derived from it.

A deployment has one secret, which the router knows. A worker gets two keys derived from it: its own, for calls between
it and the router, and one that all workers share, for the hand-off of KV (`baton.kvtransfer.protocol.proof`). So a
worker can speak neither for another worker nor for the router. A proof names the method, the called server with its
incarnation, the time, and a nonce, and contains no key: it is useless to a server for which it was not made. Nothing
here reads a clock or a socket.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

from baton.core.errors import ConfigInvalid, Unauthenticated

ENVIRONMENT: Final = "BATON_SECRET"  # environment variable with a process's secret
SECRET_BYTES: Final = 32
VALID_S: Final = 60.0  # hosts' clocks may also differ by this much
MAX_NONCES: Final = 1 << 17
ROUTER: Final = "router"
VERSION: Final = "1"
_NUM_PARTS: Final = 6


@dataclass(frozen=True, slots=True)
class DeploymentSecret:
    """Random bytes that the processes of one deployment, and no others, can prove to know."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != SECRET_BYTES:
            raise ConfigInvalid(f"a deployment's secret has {SECRET_BYTES} bytes in hexadecimal", keys=[ENVIRONMENT])

    @classmethod
    def new(cls) -> "DeploymentSecret":
        """Generate a new secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def of_text(cls, text: str) -> "DeploymentSecret":
        """Parse a secret.

        Raises:
            ConfigInvalid: `text` is not a secret; the error does not repeat it.
        """
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:
            message = f"a deployment's secret has {SECRET_BYTES} bytes in hexadecimal"
            raise ConfigInvalid(message, keys=[ENVIRONMENT]) from None

    @classmethod
    def given(cls) -> "DeploymentSecret | None":
        """Return the secret that this process was started with; None if there is none.

        Raises:
            ConfigInvalid: what it was started with is not a secret.
        """
        text = os.environ.get(ENVIRONMENT, "")
        return cls.of_text(text) if text else None

    @classmethod
    def of_process(cls) -> "DeploymentSecret":
        """Return the secret that this process was started with, else one of its own that no other process knows."""
        return cls.given() or _own()

    @classmethod
    def of_file(cls, path: Path) -> "DeploymentSecret":
        """Read the secret from a file that only its owner may read; create the file if it does not exist.

        Raises:
            ConfigInvalid: others may read the file, it holds no secret, or it cannot be created.
        """
        try:
            try:
                number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            except FileExistsError:
                pass
            else:
                with os.fdopen(number, "w", encoding="ascii") as file:
                    file.write(cls.new().text + "\n")
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                message = f"secret_file {path}: others may read it; chmod 600, and change the secret"
                raise ConfigInvalid(message, keys=["secret_file"])
            return cls.of_text(path.read_text(encoding="ascii", errors="replace"))
        except OSError as error:
            raise ConfigInvalid(f"secret_file {path}: {error.strerror}", keys=["secret_file"]) from error

    @property
    def text(self) -> str:
        """The secret in hex, to hand on to other processes; never for a command line or a log."""
        return self.value.hex()

    def worker_key(self, name: str) -> bytes:
        """Derive the key that the router shares with the worker of this name (`worker_name`)."""
        return self._derive(b"worker", name.encode())

    def router_verifier(self, incarnation: int, now_s: Callable[[], float]) -> "ProofVerifier":
        """Make the verifier of calls to the router, which come from workers, each with its own key."""

        def key_of(name: str) -> bytes | None:
            return None if name == ROUTER else self.worker_key(name)

        return ProofVerifier(incarnation_name(ROUTER, incarnation), key_of, now_s)

    def kv_key(self) -> bytes:
        """Derive the key that all workers share."""
        return self._derive(b"kv")

    def desired_state_key(self) -> bytes:
        """Derive the key of the desired state, which workers keep for the next router; only routers have it."""
        return self._derive(b"desired state")

    def _derive(self, *labels: bytes) -> bytes:
        return hmac.digest(self.value, _joined(b"baton key", *labels), hashlib.sha256)


@cache
def _own() -> DeploymentSecret:
    return DeploymentSecret.new()


def worker_name(role: str, worker_id: str) -> str:
    """Name of a worker in proofs."""
    return f"{quote(role, safe='')}/{quote(worker_id, safe='')}"


def incarnation_name(name: str, epoch: int) -> str:
    """Name of a server in proofs: its own name and its incarnation."""
    return f"{name}@{epoch:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A worker's identity towards its router.

    Attributes:
        role: its role.
        worker_id: its name.
        epoch: epoch of this incarnation.
        key: shared with the router only; empty: derived from this process's secret.
    """

    role: str
    worker_id: str
    epoch: int
    key: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """The worker's name in proofs."""
        return worker_name(self.role, self.worker_id)

    @property
    def caller(self) -> "Caller":
        """Makes the proofs of its calls to the router."""
        return Caller(self.name, self._own_key())

    def verifier(self, now_s: Callable[[], float]) -> "ProofVerifier":
        """Make the verifier of calls to this worker, which come from the router."""
        key = self._own_key()
        return ProofVerifier(
            incarnation_name(self.name, self.epoch), lambda name: key if name == ROUTER else None, now_s
        )

    def _own_key(self) -> bytes:
        return self.key or DeploymentSecret.of_process().worker_key(self.name)


@dataclass(frozen=True, slots=True)
class Caller:
    """Makes proofs for a caller.

    Args:
        name: the caller's name: `ROUTER`, or a worker's.
        key: key that the server can also derive.
    """

    name: str
    key: bytes = field(repr=False)

    def prove(self, method: str, callee: str, now_s: float, nonce: str) -> str:
        """Make the proof of one call, as the text of a header.

        Args:
            method: the method's full name.
            callee: the called server, as `incarnation_name` writes it.
            now_s: time of day.
            nonce: random, and never used before.
        """
        sent_ms = int(now_s * 1e3)
        mac = _mac(self.key, method, callee, self.name, sent_ms, nonce)
        return " ".join((VERSION, self.name, callee, str(sent_ms), nonce, mac))


class ProofVerifier:
    """Checks proofs of calls to one server.

    Args:
        callee: the server's name with its incarnation.
        key_of: returns the key of a caller with this name; None if it may not call at all.
        now_s: time of day.
    """

    def __init__(self, callee: str, key_of: Callable[[str], bytes | None], now_s: Callable[[], float]) -> None:
        self.callee = callee
        self._key_of = key_of
        self._now_s = now_s
        self._nonces: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (when it was sent, when it was accepted)
        self._floor_s = float("-inf")  # nonces of calls sent until then may have been forgotten

    def verify(self, method: str, header: str | None) -> str:
        """Verify a proof and return the caller's name.

        Raises:
            Unauthenticated: `reason` is missing, malformed, callee, unknown, stale or replayed. With "callee", the
                field `callee` is this server's current name.
        """
        if header is None:
            raise self._refusal("missing", "the call does not prove that it comes from this deployment")
        parts = header.split(" ") if len(header) <= 1024 and header.isascii() else []
        if len(parts) != _NUM_PARTS or parts[0] != VERSION or not parts[3].isdigit() or len(parts[3]) > 16:
            raise self._refusal("malformed", "the proof of the call is none of this version")
        _, name, callee, sent_text, nonce, mac = parts
        key = self._key_of(name)
        sent_ms = int(sent_text)
        if key is None or not hmac.compare_digest(mac, _mac(key, method, callee, name, sent_ms, nonce)):
            raise self._refusal("unknown", "the caller does not know the secret of this deployment")
        if callee != self.callee:
            raise self._refusal("callee", "the call is meant for another server, or another incarnation of this one")
        now_s, sent_s = self._now_s(), sent_ms / 1e3
        if abs(now_s - sent_s) > VALID_S or sent_s <= self._floor_s:
            late = f"the clocks of caller and server differ by {now_s - sent_s:.0f} s, or the call is an old one"
            raise self._refusal("stale", late)
        if nonce in self._nonces:
            raise self._refusal("replayed", "the proof of the call was used before")
        self._remember(nonce, sent_s, now_s)
        return name

    def _remember(self, nonce: str, sent_s: float, now_s: float) -> None:
        self._nonces[nonce] = sent_s, now_s
        while self._nonces:
            oldest = next(iter(self._nonces))
            its_sent_s, taken_s = self._nonces[oldest]
            if now_s - taken_s <= 2 * VALID_S and len(self._nonces) <= MAX_NONCES:
                return
            # This includes old nonces: the time of day may step forward and back, which would make them valid again.
            self._floor_s = max(self._floor_s, its_sent_s)
            del self._nonces[oldest]

    def _refusal(self, reason: str, message: str) -> Unauthenticated:
        return Unauthenticated(message, reason=reason, callee=self.callee)


def _mac(key: bytes, method: str, callee: str, name: str, sent_ms: int, nonce: str) -> str:
    parts = (text.encode() for text in (method, callee, name, str(sent_ms), nonce))
    return hmac.digest(key, _joined(b"baton call", *parts), hashlib.sha256).hex()


def _joined(*parts: bytes) -> bytes:
    """Join byte strings unambiguously: no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
