"""Evidence that a process on this host is dead: a file that the process keeps locked for as long as it lives.

A prefill rank that writes into another process's memory holds such a file and names it in its HELLO. If the lock can be
taken, none of the rank's threads runs any more, because the kernel releases a process's files after its memory. Device
writes that the process had started are over only when the process is gone altogether, so that is checked too. Elapsed
time is never evidence.
"""

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterable
from pathlib import Path

from baton.core.kv_transports import is_same_host
from baton.kvtransfer.receiver.peers import PeerIncarnation
from baton.kvtransfer.receiver.setup import Legacy

DIRECTORY = Path("/dev/shm")
PREFIX = "baton-life-"
_MAX_CONTENT_BYTES = 64


class IncarnationFile:
    """This process's own incarnation file, from construction to `close` or the end of the process.

    Args:
        p_epoch: incarnation of this process; random, so the file name is new.
        rank: rank in the tensor-parallel group.
    """

    def __init__(self, p_epoch: int, rank: int = 0) -> None:
        self.path = incarnation_path(p_epoch, rank)
        # Written and locked under another name first, so that no process ever sees it unlocked.
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, f"{os.getpid()} {_birth(os.getpid())}".encode())
        draft.rename(self.path)

    def close(self) -> None:
        """Declare that this incarnation writes nothing any more; call it once access to others' memory is closed."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def incarnation_path(p_epoch: int, rank: int = 0) -> Path:
    """Return the path of an incarnation's file; its HELLO may name no other path."""
    return DIRECTORY / f"{PREFIX}{p_epoch:016x}-{rank}"


def is_over(path: Path) -> bool:
    """Return whether an incarnation on this host is proven to be over.

    An incarnation creates its file before it sends HELLO, so a missing file means that it was closed or swept.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        pid, birth = (int(word) for word in os.read(file, _MAX_CONTENT_BYTES).split())
    except (OSError, ValueError):  # the process holds the lock, or the file is not one of ours
        return False
    finally:
        os.close(file)
    return _birth(pid) != birth


def sweep_incarnations() -> list[Path]:
    """Remove the files of incarnations that are over, and return their paths."""
    swept = []
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        if is_over(path):
            with contextlib.suppress(OSError):  # the file is another user's
                path.unlink(missing_ok=True)
                swept.append(path)
    return swept


def _birth(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if the process does not exist any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = stat.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(rest[18])


# What proves that a prefill rank with write access to this worker's memory is dead. See `incarnation_file`.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """Return an identifier shared by processes of one machine and boot that see the same /dev/shm; empty if unknown.

    Containers on one machine may each have their own /dev/shm. There, a missing file would prove nothing.
    """
    try:
        return f"{BOOT_ID.read_text().strip()}-{DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


class Evidence:
    """Looks for proof that incarnations are over.

    Args:
        legacies: records left by former incarnations of this receiver; their prefill workers may never send HELLO to
            this one.
    """

    def __init__(self, legacies: Iterable[Legacy]) -> None:
        self._of_this_host = {legacy.p_epoch for legacy in legacies if is_same_host(legacy.data_path)}

    def is_over(self, incarnation: PeerIncarnation) -> bool:
        """Return whether this rank is proven dead. False also if nothing on this host can prove it."""
        path = incarnation_path(incarnation.p_epoch, incarnation.rank)
        if incarnation.incarnation_file:  # a peer's claim, believed only if it names the one file that can be its own
            return incarnation.host_id == host_id() and incarnation.incarnation_file == str(path) and is_over(path)
        return incarnation.p_epoch in self._of_this_host and is_over(path)
