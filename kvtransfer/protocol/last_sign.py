"""Tracks when a peer was last heard from, and how much of the silence since then is excused.

A process that was itself paused must not blame its peers for what it did not hear. The excuse between two signs of life
is limited, so that a process that pauses again and again still notices that a peer is gone.
"""


class LastSign:
    """The time of the last sign of life, shifted by the silence forgiven since then."""

    __slots__ = ("_forgiven_s", "at_s")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self._forgiven_s = 0.0

    def renew(self, now_s: float) -> None:
        """Record a sign of life at `now_s`."""
        self.at_s = now_s
        self._forgiven_s = 0.0

    def silence_s(self, now_s: float) -> float:
        """Return how long nothing was heard."""
        return now_s - self.at_s

    def forgive(self, pause_s: float, limit_s: float, now_s: float) -> None:
        """Shorten the silence by `pause_s`, at most to zero.

        All such reductions since the last sign of life add up to at most `limit_s`.
        """
        share_s = max(0.0, min(pause_s, limit_s - self._forgiven_s, now_s - self.at_s))
        self._forgiven_s += share_s
        self.at_s += share_s
