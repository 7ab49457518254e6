"""`baton keys`: makes, lists and revokes API keys in a file that the router reloads when it changes.

A key is shown once, when it is made; the file holds its digest. The file is replaced atomically, is readable by its
owner only, and is locked against other `baton keys` processes while it is changed.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from baton.cluster.outcome import ExitCode, Output, format_table
from baton.core.errors import ConfigInvalid
from baton.router.access.api_keys import QUOTAS, KeyEntry, digest_of, new_key, parse_keys, read_keys

MODE = 0o600
HEADER = "# API keys of Baton, one JSON object a line. Made by `baton keys`; keys themselves are not in here.\n"


def create(
    output: Output, *, file: Path, name: str, tenant: str, days: float | None, quota: Mapping[str, Any] | None = None
) -> ExitCode:
    """Make a key and print it; it cannot be read again. `quota` limits what its holder may use.

    Raises:
        ConfigInvalid: the name is taken, or a value is not usable.
        OSError: the key could not be printed, and was removed from the file.
    """
    output.require_stdout()
    if days is not None and not 0 < days < 36_500:
        raise ConfigInvalid(f"--expires-days {days:g} is not between 0 and 36500", keys=["expires_days"])
    until = None if days is None else (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    key = new_key()
    entry = KeyEntry(name=name, tenant=tenant, sha256=digest_of(key), expires=until, **quota or {})
    with _changing(file, may_create=True) as entries:
        if any(other.name == name for other in entries):
            raise ConfigInvalid(f"{file} has a key named {name!r} already", keys=["name"])
        _write(file, [*entries, entry])
    output.note(f"baton: {name} of tenant {tenant} added to {file}; the key is shown only now")
    try:
        output.emit({"name": name, "tenant": tenant, "expires": until, "key": key}, key)
    except OSError:  # including a closed pipe
        with _changing(file) as entries:
            _write(file, [other for other in entries if other.sha256 != entry.sha256])
        output.note(f"baton: the key could not be shown, and is taken out of {file} again", "ERROR")
        raise
    return ExitCode.OK


def list_keys(output: Output, *, file: Path, now_s: Callable[[], float] = time.time) -> ExitCode:
    """Print names, tenants and times, but no digests or keys. PARTIAL if a key has expired.

    Raises:
        ConfigInvalid: the file cannot be used.
    """
    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "tenant": entry.tenant,
            "expires": entry.expires,
            "is_expired": now_s() >= entry.expires_s,
            "max_priority": entry.max_priority,
            **{name: getattr(entry, name) for name in QUOTAS},
        }
        for entry in read_keys(file)
    ]
    cells = [
        (row["name"], row["tenant"], row["expires"] or "never", "EXPIRED" if row["is_expired"] else "good")
        for row in rows
    ]
    output.emit({"file": str(file), "keys": rows}, format_table(("name", "tenant", "expires", ""), cells))
    return ExitCode.PARTIAL if any(row["is_expired"] for row in rows) else ExitCode.OK


def revoke(output: Output, *, file: Path, name: str) -> ExitCode:
    """Remove a key from the file; routers refuse it within a second. Answers that are streaming continue.

    Raises:
        ConfigInvalid: there is no such key.
    """
    with _changing(file) as entries:
        left = [entry for entry in entries if entry.name != name]
        if len(left) == len(entries):
            raise ConfigInvalid(f"{file} has no key named {name!r}", keys=["name"])
        _write(file, left)
    output.emit({"file": str(file), "name": name, "revoked": True}, f"{name} is revoked")
    return ExitCode.OK


@contextmanager
def _changing(file: Path, *, may_create: bool = False) -> Iterator[tuple[KeyEntry, ...]]:
    lock_path = file.with_name(file.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise ConfigInvalid(f"{lock_path}: {error.strerror}", keys=["file"]) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield () if may_create and not file.exists() else read_keys(file)
    finally:
        os.close(lock)


def _write(file: Path, entries: Sequence[KeyEntry]) -> None:
    text = HEADER + "".join(entry.to_line() + "\n" for entry in entries)
    parse_keys(text, str(file))  # never write what a router would refuse
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, MODE), "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigInvalid(f"cannot write {file}: {error.strerror}", keys=["file"]) from error
