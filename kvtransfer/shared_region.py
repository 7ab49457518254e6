"""The memory that a decode worker shares with its KV receiver and, on one host, with prefill workers: a named file.

It owns the file: its order (header, then the receiver's link, then the pool of each rank, page aligned), its space in
/dev/shm, and its end. The process that made it holds a lock on it as long as it lives; `sweep` relies on that lock,
never on age. It does not know what the bytes mean.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigInvalid, ProtocolError

DIRECTORY = Path("/dev/shm")
PREFIX = "baton-kv-"
MAGIC = b"BATONKV1"
VERSION = 1
MAX_POOLS = 64
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, number of pools, nonce, bytes of the link, total bytes
NONCE_AT, NONCE_BYTES = 16, 8  # in the file, little endian
_EPOCH_AT = 64  # a word on its own cache line: the incarnation of the KV receiver that the memory belongs to now
_POOLS_AT = 128
_POOL = struct.Struct("<QQ")  # offset, bytes


def _is_inside(offset_bytes: int, num_bytes: int, file_bytes: int) -> bool:
    """Return whether a pool lies behind the header, where pools begin, and ends within the file."""
    return not offset_bytes % PAGE_BYTES and PAGE_BYTES <= offset_bytes <= file_bytes - num_bytes


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where in the file the pool of one rank lies."""

    offset_bytes: int
    num_bytes: int


class SharedRegion:
    """One mapped file. `create` makes it, `attach` maps one that another process made.

    Attributes:
        path: path of the file.
        nonce: random number, also in the header; a process that maps the path recognizes the right file by it.
        pools: places of the ranks' pools.
    """

    def __init__(self, path: Path, file: int, memory: mmap.mmap, *, is_owner: bool) -> None:
        self.path = path
        self._file = file  # open as long as the owner lives, since it holds the lock
        self._is_owner = is_owner
        self._memory = memoryview(memory)
        magic, version, num_pools, nonce, link_bytes, num_bytes = _HEADER.unpack_from(self._memory)
        assert (magic, version, num_bytes) == (MAGIC, VERSION, len(memory))
        self.nonce: int = nonce
        self.num_bytes: int = num_bytes
        self._link_bytes: int = link_bytes
        places = _POOL.iter_unpack(self._memory[_POOLS_AT : _POOLS_AT + num_pools * _POOL.size])
        self.pools = tuple(PoolPlace(*place) for place in places)

    @classmethod
    def create(cls, *, link_bytes: int, pool_bytes: Sequence[int], key: str = "kv_memory_mib") -> "SharedRegion":
        """Make the file and allocate its memory at once, so that missing memory does not show as a bus error later.

        Args:
            link_bytes: size of rings, words and counters.
            pool_bytes: size of each rank's pool.
            key: configuration key that an operator would lower.

        Raises:
            ConfigInvalid: /dev/shm does not have enough space.
        """
        assert 0 < len(pool_bytes) <= MAX_POOLS
        offset = PAGE_BYTES + _whole_pages(link_bytes)
        places = []
        for num_bytes in pool_bytes:
            places.append(PoolPlace(offset, num_bytes))
            offset += _whole_pages(num_bytes)
        try:
            path, file = _make_locked_file()
        except OSError as error:
            raise ConfigInvalid(f"{key}: no shared memory in {DIRECTORY}: {error.strerror}", keys=[key]) from error
        try:
            _take_memory(file, offset, key)
            memory = mmap.mmap(file, offset)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        nonce = secrets.randbits(64)
        for index, place in enumerate(places):
            _POOL.pack_into(memory, _POOLS_AT + index * _POOL.size, place.offset_bytes, place.num_bytes)
        _HEADER.pack_into(memory, 0, MAGIC, VERSION, len(places), nonce, link_bytes, offset)
        return cls(path, file, memory, is_owner=True)

    @classmethod
    def attach(cls, path: Path, nonce: int, *, is_touched: bool = True) -> "SharedRegion":
        """Map a file that another process made, and touch every page, so that no page fault comes later.

        Args:
            path: path of the file.
            nonce: nonce that the right file has.
            is_touched: whether to touch every page; False if little of it will be used.

        Raises:
            ProtocolError: there is no such file, or it is another one.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ProtocolError(f"cannot open {path}: {error.strerror}", path=str(path)) from error
        try:
            header = os.pread(file, _HEADER.size, 0)
            if len(header) < _HEADER.size:
                raise ProtocolError(f"{path} is no region", path=str(path))
            magic, version, num_pools, found, _, num_bytes = _HEADER.unpack(header)
            whole = (magic, version, found, num_bytes) == (MAGIC, VERSION, nonce, os.fstat(file).st_size)
            if not whole or num_pools > MAX_POOLS or num_bytes < PAGE_BYTES:
                raise ProtocolError(f"{path} is another region, or none", path=str(path))
            places = os.pread(file, num_pools * _POOL.size, _POOLS_AT)
            if not all(_is_inside(first, size, num_bytes) for first, size in _POOL.iter_unpack(places)):
                raise ProtocolError(f"{path} has pools that do not lie in it", path=str(path))
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_touched else 0)
            memory = mmap.mmap(file, num_bytes, flags=flags)
        except OSError as error:
            raise ProtocolError(f"cannot map {path}: {error.strerror}", path=str(path)) from error
        finally:
            os.close(file)
        return cls(path, -1, memory, is_owner=False)

    @property
    def link(self) -> memoryview:
        """The part for `ReceiverLink`."""
        return self._memory[PAGE_BYTES : PAGE_BYTES + self._link_bytes]

    def pool(self, rank: int) -> memoryview:
        """Return the pool of one rank."""
        place = self.pools[rank]
        return self._memory[place.offset_bytes : place.offset_bytes + place.num_bytes]

    @property
    def epoch(self) -> int:
        """The KV receiver's incarnation that may write here; 0 while there is none."""
        return self._memory[_EPOCH_AT : _EPOCH_AT + 8].cast("Q")[0]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._memory[_EPOCH_AT : _EPOCH_AT + 8].cast("Q")[0] = epoch

    def unlink(self) -> None:
        """Remove the name; mappings stay valid. A process that knows that the owner is gone may also call this."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the file, if this is the owner. The memory is freed with the last view of it, in any process."""
        if self._is_owner and self._file >= 0:
            self.unlink()
            os.close(self._file)
            self._file = -1


def sweep() -> list[Path]:
    """Remove the files of dead owners; return what was removed.

    A file whose lock can be taken has no owner: its maker takes the lock before the file counts.
    """
    swept = []
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept.append(path)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(file)
    return swept


def _make_locked_file() -> tuple[Path, int]:
    while True:
        path = DIRECTORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a sweeper holds the lock right now, and removes the file
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.stat(path).st_ino == os.fstat(file).st_ino:
                return path, file
        os.close(file)


def _take_memory(file: int, num_bytes: int, key: str) -> None:
    free = os.statvfs(DIRECTORY)
    free_bytes = free.f_bavail * free.f_frsize
    problem = f"{num_bytes >> 20} MiB of shared memory are wanted and {DIRECTORY} has {free_bytes >> 20} MiB free"
    try:
        if num_bytes > free_bytes:
            raise OSError(problem)
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise ConfigInvalid(f"{key}: {problem}; lower it, or enlarge {DIRECTORY}", keys=[key]) from error
