"""The deployment's secret, and how a call inside the deployment proves that its caller knows a key made from it.

A deployment has one secret. The router knows it; a worker is given two keys made from it: one of its own, for what it
and the router say to each other, and one that all workers share, for the hand-off of KV
(`baton.kvtransfer.protocol.proof`). So a worker cannot speak for another one, nor for the router. A proof names the
method, the server that is meant in the incarnation it is in, the moment and a number used once, and holds no key: a
server that is not the one that was meant can do nothing with it. Nothing here reads a clock or a socket.
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

ENVIRONMENT: Final = "BATON_SECRET"  # of a process that is started with it
SECRET_BYTES: Final = 32
VALID_S: Final = 60.0  # clocks of hosts may differ by so much, too
MAX_NONCES: Final = 1 << 17
ROUTER: Final = "router"
VERSION: Final = "1"
_NUM_PARTS: Final = 6


@dataclass(frozen=True, slots=True)
class DeploymentSecret:
    """Random bytes that everything of one deployment, and nothing else, can prove to know."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != SECRET_BYTES:
            raise ConfigInvalid(f"a deployment's secret has {SECRET_BYTES} bytes in hexadecimal", keys=[ENVIRONMENT])

    @classmethod
    def new(cls) -> "DeploymentSecret":
        """Another one."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def of_text(cls, text: str) -> "DeploymentSecret":
        """As `text` gives it.

        Raises:
            ConfigInvalid: it is none; the message does not repeat it.
        """
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:
            message = f"a deployment's secret has {SECRET_BYTES} bytes in hexadecimal"
            raise ConfigInvalid(message, keys=[ENVIRONMENT]) from None

    @classmethod
    def given(cls) -> "DeploymentSecret | None":
        """The one that this process was started with.

        Raises:
            ConfigInvalid: what it was started with is none.
        """
        text = os.environ.get(ENVIRONMENT, "")
        return cls.of_text(text) if text else None

    @classmethod
    def of_process(cls) -> "DeploymentSecret":
        """The one that this process was started with; else one of its own, which no other process knows."""
        return cls.given() or _own()

    @classmethod
    def of_file(cls, path: Path) -> "DeploymentSecret":
        """The one in a file that only its owner may read; a file that is not there is made.

        Raises:
            ConfigInvalid: others may read it, it holds none, or it cannot be made.
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
        """To be handed on; never in a command line or a log."""
        return self.value.hex()

    def worker_key(self, name: str) -> bytes:
        """The key that the router shares with the worker of this name (`worker_name`)."""
        return self._derive(b"worker", name.encode())

    def router_verifier(self, incarnation: int, now_s: Callable[[], float]) -> "ProofVerifier":
        """Of the calls to the router: they come from workers, each with a key of its own."""

        def key_of(name: str) -> bytes | None:
            return None if name == ROUTER else self.worker_key(name)

        return ProofVerifier(incarnation_name(ROUTER, incarnation), key_of, now_s)

    def kv_key(self) -> bytes:
        """The key that all workers share."""
        return self._derive(b"kv")

    def desired_state_key(self) -> bytes:
        """The key of what workers keep for the router that comes after it; only routers have it."""
        return self._derive(b"desired state")

    def _derive(self, *labels: bytes) -> bytes:
        return hmac.digest(self.value, _joined(b"baton key", *labels), hashlib.sha256)


@cache
def _own() -> DeploymentSecret:
    return DeploymentSecret.new()


def worker_name(role: str, worker_id: str) -> str:
    """What a worker is called in proofs."""
    return f"{quote(role, safe='')}/{quote(worker_id, safe='')}"


def incarnation_name(name: str, epoch: int) -> str:
    """What a server is called in proofs: it, and the incarnation that it is in."""
    return f"{name}@{epoch:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who a worker is towards its router.

    Attributes:
        role: its role.
        worker_id: its name.
        epoch: of this incarnation.
        key: that only the router can make, too; empty: made from the secret of this process.
    """

    role: str
    worker_id: str
    epoch: int
    key: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """In proofs."""
        return worker_name(self.role, self.worker_id)

    @property
    def caller(self) -> "Caller":
        """Proves its calls to the router."""
        return Caller(self.name, self._own_key())

    def verifier(self, now_s: Callable[[], float]) -> "ProofVerifier":
        """Of the calls to it: they come from the router."""
        key = self._own_key()
        return ProofVerifier(
            incarnation_name(self.name, self.epoch), lambda name: key if name == ROUTER else None, now_s
        )

    def _own_key(self) -> bytes:
        return self.key or DeploymentSecret.of_process().worker_key(self.name)


@dataclass(frozen=True, slots=True)
class Caller:
    """Makes proofs.

    Args:
        name: whose: `ROUTER`, or a worker's.
        key: that the server can make, too.
    """

    name: str
    key: bytes = field(repr=False)

    def prove(self, method: str, callee: str, now_s: float, nonce: str) -> str:
        """One call's, as the text of a header.

        Args:
            method: its full name.
            callee: the server that is meant, `incarnation_name`.
            now_s: time of day.
            nonce: random, and never used before.
        """
        sent_ms = int(now_s * 1e3)
        mac = _mac(self.key, method, callee, self.name, sent_ms, nonce)
        return " ".join((VERSION, self.name, callee, str(sent_ms), nonce, mac))


class ProofVerifier:
    """Checks proofs of calls to one server.

    Args:
        callee: its name, and the incarnation that it is in.
        key_of: the key of a caller with this name; None if it may not call at all.
        now_s: time of day.
    """

    def __init__(self, callee: str, key_of: Callable[[str], bytes | None], now_s: Callable[[], float]) -> None:
        self.callee = callee
        self._key_of = key_of
        self._now_s = now_s
        self._nonces: OrderedDict[str, tuple[float, float]] = OrderedDict()  # sent, and taken
        self._floor_s = float("-inf")  # what was sent until then may have been forgotten

    def verify(self, method: str, header: str | None) -> str:
        """The caller's name.

        Raises:
            Unauthenticated: `reason` says which: missing, malformed, callee, unknown, stale or replayed. With
                "callee", `callee` names this server as it is to be named.
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
            # Also of what is old by this clock: the time of day may step forward and back, and make it young again.
            self._floor_s = max(self._floor_s, its_sent_s)
            del self._nonces[oldest]

    def _refusal(self, reason: str, message: str) -> Unauthenticated:
        return Unauthenticated(message, reason=reason, callee=self.callee)


def _mac(key: bytes, method: str, callee: str, name: str, sent_ms: int, nonce: str) -> str:
    parts = (text.encode() for text in (method, callee, name, str(sent_ms), nonce))
    return hmac.digest(key, _joined(b"baton call", *parts), hashlib.sha256).hex()


def _joined(*parts: bytes) -> bytes:
    """No two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
