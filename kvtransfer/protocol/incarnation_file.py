"""Evidence that a process of this host is dead: a file that it holds locked for as long as it lives.

A prefill rank that writes into memory of others holds one and names it in its HELLO. Once the lock can be taken, none
of its threads runs any more: the kernel lets go of a process's files after its memory. What it had told a device to
write is over when the process is gone altogether, so that is asked too. Time is never evidence.
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
    """This process's own, from here to `close` or its end, whichever comes first.

    Args:
        p_epoch: its incarnation; random, so the name is new.
        rank: in its tensor-parallel group.
    """

    def __init__(self, p_epoch: int, rank: int = 0) -> None:
        self.path = incarnation_path(p_epoch, rank)
        # Written and locked under another name first, so that no process ever finds it without its lock.
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, f"{os.getpid()} {_birth(os.getpid())}".encode())
        draft.rename(self.path)

    def close(self) -> None:
        """Say that this incarnation writes nothing any more: whatever leads to memory of others is closed."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def incarnation_path(p_epoch: int, rank: int = 0) -> Path:
    """Where the file of an incarnation is; the only path that its HELLO may name."""
    return DIRECTORY / f"{PREFIX}{p_epoch:016x}-{rank}"


def is_over(path: Path) -> bool:
    """Whether an incarnation of this host is proven to be over.

    There was such a file: an incarnation makes it before it says HELLO. So one that is gone was closed, or swept.
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
    except (OSError, ValueError):  # it holds the lock; or it is none of ours
        return False
    finally:
        os.close(file)
    return _birth(pid) != birth


def sweep_incarnations() -> list[Path]:
    """Remove the files of incarnations that are over; returns them."""
    swept = []
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        if is_over(path):
            with contextlib.suppress(OSError):  # another user's
                path.unlink(missing_ok=True)
                swept.append(path)
    return swept


def _birth(pid: int) -> int:
    """When a process started, in ticks since the boot; 0 if there is none any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = stat.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(rest[18])


# What proves that a prefill rank which may write into this worker's memory is dead. See `incarnation_file`.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """The same for two processes of one machine and one boot that see the same /dev/shm; empty if that is not known.

    Containers of one machine may have a /dev/shm each: there a file that is missing would prove nothing.
    """
    try:
        return f"{BOOT_ID.read_text().strip()}-{DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


class Evidence:
    """Looks for proof that incarnations are over.

    Args:
        legacies: what former incarnations of this receiver left: their prefill workers may never say HELLO to this one.
    """

    def __init__(self, legacies: Iterable[Legacy]) -> None:
        self._of_this_host = {legacy.p_epoch for legacy in legacies if is_same_host(legacy.data_path)}

    def is_over(self, incarnation: PeerIncarnation) -> bool:
        """Whether this rank is proven dead. False also if nothing can prove it here."""
        path = incarnation_path(incarnation.p_epoch, incarnation.rank)
        if (
            incarnation.incarnation_file
        ):  # a peer's word, and only believed where it names the one file that can be its own
            return incarnation.host_id == host_id() and incarnation.incarnation_file == str(path) and is_over(path)
        return incarnation.p_epoch in self._of_this_host and is_over(path)
