"""Removes what a killed deployment may leave behind: its directory, its processes, its files in shared memory.

A directory belongs to the process that holds a lock on a file in it; the operating system releases the lock when the
process ends, however it ends. So the lock, never an age, says whether a deployment lives. Nothing of another user is
touched, nor any directory without such a file.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from baton.cluster import processes
from baton.cluster.private_files import PREFIX, ROOT
from baton.kvtransfer.protocol.incarnation_file import sweep_incarnations
from baton.kvtransfer.shared_region import sweep as sweep_regions

OWNER: Final = "owner.lock"
SWEEP_EVERY_S: Final = 0.1
END_GRACE_S: Final = 1.0  # time for processes that are about to end by themselves

_logger = logging.getLogger(__name__)


def claim(directory: Path) -> int:
    """Claim `directory` for this process, until it ends or closes the descriptor that is returned.

    The file is locked before it gets its name, so that no process ever finds it unlocked.
    """
    draft = directory / f".{OWNER}.{os.getpid()}"
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(directory / OWNER)
    return file


def is_abandoned(directory: Path) -> bool:
    """Return whether a directory of this user belongs to a deployment whose process has ended."""
    try:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        file = os.open(directory / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # the owner file does not exist, or the directory is gone
        return False
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # the owner still runs
        return False
    finally:
        os.close(file)
    return True


def sweep() -> list[Path]:
    """Remove what killed deployments have left; return their directories."""
    swept = [path for path in ROOT.glob(f"{PREFIX}*") if is_abandoned(path)]
    for path in swept:
        clear(path)
        _logger.warning("%s was left by a deployment that was killed, and is removed", path)
    sweep_memory()
    return swept


def clear(directory: Path) -> None:
    """End the processes that a dead deployment has left, and remove its directory."""
    left = processes.end_processes(users_of(directory), grace_s=END_GRACE_S)
    if left:
        _logger.error("processes %s of %s do not end", left, directory)
    shutil.rmtree(directory, ignore_errors=True)


def sweep_memory() -> None:
    """Remove files in shared memory whose owners are dead."""
    sweep_regions()
    sweep_incarnations()


def sweep_late_memory(wait_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Sweep repeatedly for `wait_s`: processes that die with their parent release memory later than `clear` can see."""
    for _ in range(round(wait_s / SWEEP_EVERY_S)):
        sweep_memory()
        sleep(SWEEP_EVERY_S)
    sweep_memory()


def users_of(directory: Path) -> list[psutil.Process]:
    """Return this user's Ray and Baton processes, except this one, that name a directory or write files there.

    Ray's agents and workers rewrite their command lines, but write logs there. A process that only reads a log there is
    left alone.
    """
    marker, found = str(directory), []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and (_names(process, marker) or _writes(process, marker)):
                found.append(process)
    return found


def _names(process: psutil.Process, marker: str) -> bool:
    parts = process.cmdline()
    if not any(marker in part for part in parts):
        return False
    exe = process.exe()
    if exe != psutil.Process().exe() and "/ray/" not in exe:
        return False
    return any(_is_below(part[part.find(marker) :], marker) for part in parts if marker in part)


def _writes(process: psutil.Process, marker: str) -> bool:
    """Return whether it has a file there open for writing; a reader of logs does not."""
    place = Path("/proc") / str(process.pid)
    for number in os.listdir(place / "fd"):
        with contextlib.suppress(OSError):
            if _is_below(os.readlink(place / "fd" / number), marker) and _is_writable(place / "fdinfo" / number):
                return True
    return False


def _is_writable(info: Path) -> bool:
    flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _is_below(path: str, marker: str) -> bool:
    """Return whether a path is `marker` or below it: /tmp/baton-12 is not below /tmp/baton-1."""
    return path.startswith(marker) and path[len(marker) : len(marker) + 1] in ("", "/", " ", ",", ":")
