"""How many requests a worker lets in, counted where they come in, not where they are worked on."""

import threading

from baton.core.errors import Overloaded


class Gate:
    """A bounded count; any thread."""

    def __init__(self, what: str, limit: int) -> None:
        assert limit > 0
        self._what = what
        self._limit = limit
        self._num_inside = 0
        self._lock = threading.Lock()

    @property
    def num_inside(self) -> int:
        """Requests let in and not gone yet."""
        return self._num_inside

    def enter(self) -> None:
        """Let one in.

        Raises:
            Overloaded: the limit is reached.
        """
        with self._lock:
            if self._num_inside >= self._limit:
                raise Overloaded(f"{self._what}: {self._limit} requests are here already", limit=self._limit)
            self._num_inside += 1

    def leave(self) -> None:
        """One of those let in has gone."""
        with self._lock:
            assert self._num_inside > 0
            self._num_inside -= 1
