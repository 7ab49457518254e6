"""How much may be in flight on one connection: two layers, or twice what the path holds, whichever is more.

What the path holds is its round trip, measured with HELLOs, times the best rate at which credit came back lately. It
refuses to know what is sent; resent and lost bytes are told like any others.
"""

from collections import deque

RATE_MEMORY_S = 10.0
MAX_SAMPLES = 256


class Window:
    """The estimate for one connection."""

    def __init__(self) -> None:
        self._posted_bytes = 0
        self._credited_bytes = 0
        # (moment, posted in all with it, credited in all by then)
        self._posts: deque[tuple[float, int, int]] = deque(maxlen=MAX_SAMPLES)
        self._rates: deque[tuple[float, float]] = deque()  # (moment, bytes per second), falling

    def posted(self, num_bytes: int, now_s: float) -> None:
        """So much left."""
        self._posted_bytes += num_bytes
        self._posts.append((now_s, self._posted_bytes, self._credited_bytes))

    def credited(self, num_bytes: int, now_s: float) -> None:
        """So much of it landed."""
        self._credited_bytes += num_bytes
        newest = None
        while self._posts and self._posts[0][1] <= self._credited_bytes:
            newest = self._posts.popleft()
        if newest is None or now_s <= newest[0]:
            return
        rate = (self._credited_bytes - newest[2]) / (now_s - newest[0])
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        if len(self._rates) > MAX_SAMPLES:
            self._rates.popleft()

    def lost(self, num_bytes: int) -> None:
        """So much will never be credited."""
        self._credited_bytes += num_bytes
        while self._posts and self._posts[0][1] <= self._credited_bytes:
            self._posts.popleft()

    def size_bytes(self, two_layers_bytes: int, round_trip_s: float, limit_bytes: int, now_s: float) -> int:
        """What may be in flight now."""
        return min(limit_bytes, max(two_layers_bytes, int(2 * self.rate(now_s) * round_trip_s)))

    def rate(self, now_s: float) -> float:
        """The best lately, in bytes per second; 0 if there was none."""
        while self._rates and self._rates[0][0] < now_s - RATE_MEMORY_S:
            self._rates.popleft()
        return self._rates[0][1] if self._rates else 0.0
