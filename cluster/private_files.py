"""A deployment's files on this host: readable by this account only, removed at a normal end, kept after a failure.

Only the processes' logs are kept. They go to a folder of their own, whose name an error message can state in advance.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from baton.core.errors import BatonError, ConfigInvalid, RayUnavailable, StartupError, WorkerStartFailed

PRIVATE_UMASK: Final = 0o077
ROOT: Final = Path("/tmp")  # short, because sockets below a deployment's folder have long names
PREFIX: Final = "baton-"
LOGS_PREFIX: Final = "baton_logs-"
MAX_KEPT: Final = 8  # log folders per account; the oldest is removed first
LOG_SUFFIXES: Final = (".err", ".out", ".log")


def make_folder() -> Path:
    """Make a new folder for this account only. Ray opens its own folder to all accounts, so that is a subfolder."""
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=ROOT))


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a binary file, creating it readable by this account only."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def kept_logs(folder: Path) -> Path:
    """Return where `keep_logs` will put the logs of a deployment's folder."""
    return folder.with_name(LOGS_PREFIX + folder.name.removeprefix(PREFIX))


def keep_logs(folder: Path) -> Path:
    """Move the logs below `folder` to `kept_logs`, and remove the oldest folders of that kind."""
    into = kept_logs(folder)
    into.mkdir(mode=0o700)
    for path in _logs_below(folder):
        path.chmod(0o600)
        path.rename(into / path.name)
    kept = [path for path in ROOT.glob(f"{LOGS_PREFIX}*") if path.stat().st_uid == os.geteuid()]
    for path in sorted(kept, key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return into


def worker_died(folder: Path) -> bool:
    """Return whether a worker of the private Ray below `folder` has left a log but no process."""
    names = [path.name for path in _logs_below(folder) if path.name.startswith("worker-") and path.suffix == ".err"]
    return any(not Path("/proc", name.removesuffix(".err").rpartition("-")[2]).exists() for name in names)


def is_worth_logs(error: Exception) -> bool:
    """Return whether logs may say more than the error, and so should be kept.

    A wrong key or a port in use needs none, and their logs would push out others.
    """
    if isinstance(error, (WorkerStartFailed, RayUnavailable)):
        return error.fields.get("cause") != ConfigInvalid.__name__
    return not isinstance(error, StartupError)


def say_where(error: BatonError, folder: Path) -> None:
    """Add to an error where the logs of the failed processes will be."""
    logs = str(kept_logs(folder))
    if error.fields.get("logs") != logs:
        error.fields["logs"] = logs
        error.message += f" (logs: {logs})"
        error.args = (error.message,)


def _logs_below(folder: Path) -> Iterator[Path]:
    """Log files that are not empty; Ray's links to its folders are not followed."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            if path.suffix in LOG_SUFFIXES and not path.is_symlink() and path.is_file() and path.stat().st_size:
                yield path
