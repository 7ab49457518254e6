"""API keys, which identify callers. A file holds names, tenants and digests; the keys themselves are stored nowhere.

The file has one JSON object per line: `name`, `tenant`, `sha256` (hex, of the key), `expires` (ISO 8601 with a zone, or
null). Optional fields limit or extend what the key's holder may do: `max_priority` (low, normal or high; default
normal), `max_answers`, `max_queued_tokens` and `max_connections`. The file is read again when it changes. If it can no
longer be read, the previous keys stay in force, and the failure is logged and counted. No client loses access by that,
but a revocation takes effect only once the file is valid again.

A key is 256 random bits, so it cannot be guessed from its plain SHA-256. Digests are looked up under a hash keyed with
a random value of this process, and compared in constant time: the duration of a refusal reveals nothing about any key.
"""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from baton.core.errors import ConfigInvalid, Unauthenticated
from baton.core.files import file_state
from baton.router.access.quota import NO_LIMITS, PRIORITY_NAMES, Quota

CHECK_S: Final = 0.5  # minimum interval between checks of the file
PREFIX: Final = "baton-"
MAX_NAME_LEN: Final = 256  # for names and tenants
MAX_HEADER_LEN: Final = 1024
SCHEME: Final = "bearer"
DEFAULT_PRIORITY: Final = "normal"  # the highest priority that requests of a key may have by default
QUOTAS: Final = ("max_answers", "max_queued_tokens", "max_connections", "max_header_bytes")
_FIELDS: Final = frozenset(("name", "tenant", "sha256", "expires", "max_priority", *QUOTAS))
_SHA256_LEN: Final = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller.

    Attributes:
        name: the key's name; safe for logs.
        tenant: the tenant of its requests.
        quota: what it may hold at once, and the highest priority it may use.
    """

    name: str
    tenant: str
    quota: Quota = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One line of the file."""

    name: str
    tenant: str
    sha256: str = field(repr=False)
    expires: str | None = None
    max_priority: str = DEFAULT_PRIORITY
    max_answers: int | None = None
    max_queued_tokens: int | None = None
    max_connections: int | None = None
    max_header_bytes: int | None = None

    @property
    def quota(self) -> Quota:
        """What the key's holder may use at once."""
        values = {name: getattr(self, name) for name in QUOTAS}
        return Quota(**values, max_priority=PRIORITY_NAMES[self.max_priority])

    @property
    def expires_s(self) -> float:
        """When the key expires, in Unix time; infinite if it does not."""
        return float("inf") if self.expires is None else datetime.fromisoformat(self.expires).timestamp()

    def to_line(self) -> str:
        """Format the entry as a line of the file."""
        data: dict[str, Any] = {
            "name": self.name,
            "tenant": self.tenant,
            "sha256": self.sha256,
            "expires": self.expires,
        }
        if self.max_priority != DEFAULT_PRIORITY:
            data["max_priority"] = self.max_priority
        data |= {name: getattr(self, name) for name in QUOTAS if getattr(self, name) is not None}
        return json.dumps(data)


def new_key() -> str:
    """Generate a random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """The digest of a key, as the file holds it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def parse_keys(text: str, path: str) -> tuple[KeyEntry, ...]:
    """Parse the entries of a file.

    Raises:
        ConfigInvalid: a line is not a valid entry, or a name or digest is duplicated. The error quotes no line.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            entries.append(_entry(line, f"{path}:{number}"))
    for what in ("name", "sha256"):
        values = [getattr(entry, what) for entry in entries]
        if len(set(values)) != len(values):
            raise ConfigInvalid(f"{path}: a {what} is there twice", keys=["api_keys_file"])
    return tuple(entries)


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Read and parse a file; see `parse_keys`.

    Raises:
        ConfigInvalid: likewise, or the file cannot be read.
    """
    try:
        return parse_keys(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigInvalid(f"api_keys_file {path}: {error.strerror}", keys=["api_keys_file"]) from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"api_keys_file {path} is not UTF-8", keys=["api_keys_file"]) from error


class ApiKeys:
    """The keys in force.

    Args:
        path: the keys file.
        now_s: Unix time.
        check_s: minimum interval between checks of the file.
        on_reload: called after each detected change with whether it was accepted.
        extra: entries in addition to the file's.

    Raises:
        ConfigInvalid: the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        now_s: Callable[[], float] = time.time,
        check_s: float = CHECK_S,
        on_reload: Callable[[bool], None] = lambda taken: None,
        extra: tuple[KeyEntry, ...] = (),
    ) -> None:
        self.on_reload = on_reload
        self._extra = extra
        self._path = path
        self._now_s = now_s
        self._check_s = check_s
        self._pepper = secrets.token_bytes(32)
        self._state = file_state(path)
        self._entries = self._by_mark(read_keys(path))
        self._checked_s = time.monotonic()

    def authenticate(self, header: str | None) -> Principal:
        """Return the principal that presents this `Authorization` header.

        Args:
            header: `Bearer KEY`, as gRPC metadata and HTTP carry it; None if there is none.

        Raises:
            Unauthenticated: there is no key, it is unknown, or it has expired. The error never repeats what was
                presented.
        """
        self._follow()
        scheme, _, key = (header or "").strip().partition(" ")
        key = key.strip()
        if not header:
            raise Unauthenticated("no API key: send `authorization: Bearer KEY`", reason="missing")
        is_one = not set(" ,") & set(key)  # several headers would be joined by commas
        if scheme.lower() != SCHEME or not key or not is_one or len(header) > MAX_HEADER_LEN:
            raise Unauthenticated("the authorization header is not `Bearer KEY`", reason="malformed")
        digest = digest_of(key)
        entry = self._entries.get(self._mark(digest))
        if not hmac.compare_digest(digest, entry.sha256 if entry is not None else "0" * _SHA256_LEN) or entry is None:
            raise Unauthenticated("this API key is not one of this deployment's, or was revoked", reason="unknown")
        if self._now_s() >= entry.expires_s:
            raise Unauthenticated(f"the API key {entry.name!r} expired at {entry.expires}", reason="expired")
        return Principal(entry.name, entry.tenant, entry.quota)

    def __len__(self) -> int:
        return len(self._entries)

    def _follow(self) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s < self._check_s:
            return
        self._checked_s = now_s
        state = file_state(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._entries = self._by_mark(read_keys(self._path))
        except ConfigInvalid as error:
            log.error("the changed API keys are not taken, those before stay in force: %s", error.message)
            self.on_reload(False)
            return
        level = logging.INFO if self._entries else logging.WARNING  # then every call is refused
        log.log(level, "API keys read again: %d in %s", len(self._entries), self._path)
        self.on_reload(True)

    def _by_mark(self, entries: tuple[KeyEntry, ...]) -> dict[bytes, KeyEntry]:
        return {self._mark(entry.sha256): entry for entry in (*entries, *self._extra)}

    def _mark(self, digest: str) -> bytes:
        return hashlib.blake2b(digest.encode("ascii"), key=self._pepper, digest_size=16).digest()


def _entry(line: str, where: str) -> KeyEntry:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigInvalid(f"{where} is not JSON", keys=["api_keys_file"]) from None
    if not isinstance(data, dict) or set(data) - _FIELDS or not {"name", "tenant", "sha256"} <= set(data):
        message = f"{where} is no object with name, tenant, sha256 and perhaps expires, max_priority or quotas"
        raise ConfigInvalid(message, keys=["api_keys_file"])
    for what in ("name", "tenant"):
        if not isinstance(data[what], str) or not 0 < len(data[what]) <= MAX_NAME_LEN or not data[what].isprintable():
            message = f"{where}: {what} is not a text of 1 to {MAX_NAME_LEN} printable characters"
            raise ConfigInvalid(message, keys=["api_keys_file"])
    digest = data["sha256"]
    if not isinstance(digest, str) or len(digest) != _SHA256_LEN or set(digest) - set("0123456789abcdef"):
        raise ConfigInvalid(f"{where}: sha256 is not 64 hex digits, lower case", keys=["api_keys_file"])
    values = {name: data[name] for name in ("max_priority", *QUOTAS) if data.get(name) is not None}
    if values.get("max_priority", DEFAULT_PRIORITY) not in PRIORITY_NAMES:
        message = f"{where}: max_priority is none of {', '.join(PRIORITY_NAMES)}"
        raise ConfigInvalid(message, keys=["api_keys_file"])
    for name in QUOTAS:
        value = values.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigInvalid(f"{where}: {name} is not a positive number", keys=["api_keys_file"])
    expires = _expires(data, where)
    return KeyEntry(name=data["name"], tenant=data["tenant"], sha256=digest, expires=expires, **values)


def _expires(data: dict[str, Any], where: str) -> str | None:
    text = data.get("expires")
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        moment = None
    if moment is None or moment.tzinfo is None:
        message = f"{where}: expires is not a time with a zone, like 2027-01-31T12:00:00+00:00"
        raise ConfigInvalid(message, keys=["api_keys_file"])
    return str(text)
