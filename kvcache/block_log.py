"""A log of the names in prefix indices, for readers elsewhere that may have missed changes.

Only the indices' own thread records; any thread reads. With one index per rank, a name is present while any of them has
it. A ring keeps the latest changes, so a reader gets what it missed, or everything if that is no longer in the ring.
Readers have no queues here: a slow one gets larger changes.
"""

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from baton.core.block_hash import BlockChange

RING_LEN: Final = 1 << 16
MAX_NAMES: Final = 1 << 15  # per message with one change: half a MiB


class BlockLog:
    """The present names, and the latest changes.

    Args:
        ring_len: number of changes to keep.
        max_names: maximum number of names in one part of a full listing.
        num_indices: number of indices that report names; each may have a block of the same name.
    """

    def __init__(self, ring_len: int = RING_LEN, max_names: int = MAX_NAMES, num_indices: int = 1) -> None:
        assert ring_len >= 1
        assert max_names >= 1
        self._num_indices = num_indices
        self._max_names = max_names
        self._names: dict[bytes, int] = {}  # and how many indices have each
        self._ring: deque[tuple[bytes, bool]] = deque(maxlen=ring_len)
        self._version = 0
        self._lock = threading.Lock()
        self._waiting: dict[object, Callable[[], None]] = {}

    @property
    def version(self) -> int:
        """Number of changes so far. Any thread may read it."""
        return self._version

    def stored(self, name: bytes) -> None:
        """Record that a block of one index got this name; no other block of that index has it."""
        with self._lock:
            num_others = self._names.get(name, 0)
            assert num_others < self._num_indices
            self._names[name] = num_others + 1
            if num_others:
                return
            self._record(name, True)
        self._wake()

    def removed(self, name: bytes) -> None:
        """Record that no block of one index has this name any more."""
        with self._lock:
            self._names[name] -= 1
            if self._names[name]:
                return
            del self._names[name]
            self._record(name, False)
        self._wake()

    def since(self, version: int) -> list[BlockChange]:
        """Return the changes from a reader's version to the present one, in order. Any thread may call this."""
        with self._lock:
            now = self._version
            num_missed = now - version
            if num_missed == 0:
                return []
            if 0 < num_missed <= len(self._ring):
                latest = list(islice(reversed(self._ring), num_missed))
                names = None
            else:
                latest = []
                names = tuple(self._names)
        return _whole(names, now, self._max_names) if names is not None else [_difference(latest, version, now)]

    def call_at_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once, after the next change, on the thread that makes it. Return what cancels this."""
        key = object()
        with self._lock:
            self._waiting[key] = callback

        def forget() -> None:
            with self._lock:
                self._waiting.pop(key, None)

        return forget

    def _record(self, name: bytes, is_there: bool) -> None:
        self._ring.append((name, is_there))
        self._version += 1

    def _wake(self) -> None:
        if not self._waiting:  # usual case; a callback registered meanwhile checks the version again
            return
        with self._lock:
            callbacks, self._waiting = tuple(self._waiting.values()), {}
        for callback in callbacks:
            callback()


def _difference(latest: list[tuple[bytes, bool]], after: int, version: int) -> BlockChange:
    """Merge changes, given newest first, into the final state of each name."""
    last = dict(reversed(latest))
    return BlockChange(
        after=after,
        version=version,
        stored=tuple(name for name, is_there in last.items() if is_there),
        removed=tuple(name for name, is_there in last.items() if not is_there),
    )


def _whole(names: tuple[bytes, ...], version: int, max_names: int) -> list[BlockChange]:
    parts = [names[first : first + max_names] for first in range(0, len(names), max_names)] or [()]
    last = len(parts) - 1
    return [
        BlockChange(after=0, version=version if at == last else 0, part=at, cleared=at == 0, stored=part)
        for at, part in enumerate(parts)
    ]
