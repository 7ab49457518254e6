"""Decides when to restart a worker that Ray has given up: soon at first, then later, and a limited number of times."""

from collections import deque
from collections.abc import Callable
from typing import Final

MAX_STARTS: Final = 12
WINDOW_S: Final = 600.0
FIRST_WAIT_S: Final = 0.5
MAX_WAIT_S: Final = 30.0


class Restarts:
    """Restarts of the workers of one deployment.

    Args:
        now_s: monotonic clock.
        max_starts: restarts of one worker within the window; one that needs more is given up.
        window_s: length of the window; older restarts are forgotten.
        first_wait_s, max_wait_s: wait before the first restart within the window, and upper bound of any wait.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        max_starts: int = MAX_STARTS,
        window_s: float = WINDOW_S,
        first_wait_s: float = FIRST_WAIT_S,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._now_s = now_s
        self._max_starts = max_starts
        self._window_s = window_s
        self._first_wait_s, self._max_wait_s = first_wait_s, max_wait_s
        self._starts: dict[str, deque[float]] = {}
        self._due_s: dict[str, float] = {}

    def died(self, worker_id: str) -> bool:
        """Record that a worker is dead for good; return whether it will be restarted. A repeated report is ignored."""
        if worker_id in self._due_s:
            return True
        now_s = self._now_s()
        starts = self._starts.setdefault(worker_id, deque())
        while starts and starts[0] + self._window_s <= now_s:
            starts.popleft()
        if len(starts) >= self._max_starts:
            self._due_s.pop(worker_id, None)
            return False
        wait_s: float = min(self._max_wait_s, self._first_wait_s * 2 ** len(starts))
        starts.append(now_s)
        self._due_s[worker_id] = now_s + wait_s
        return True

    def due(self) -> list[str]:
        """Workers whose restart is due; each is returned once."""
        now_s = self._now_s()
        names = sorted(name for name, due_s in self._due_s.items() if due_s <= now_s)
        for name in names:
            del self._due_s[name]
        return names

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is no longer wanted."""
        self._starts.pop(worker_id, None)
        self._due_s.pop(worker_id, None)
