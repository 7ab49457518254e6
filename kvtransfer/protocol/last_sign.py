"""When something was last heard of, and how much of the silence since then does not count.

A process that was stopped itself must not blame its peers for what it did not hear. It refuses to excuse more than one
limit between two signs, so that a process that stops again and again still notices that a peer is gone.
"""


class LastSign:
    """One sign of life: its moment, shifted by what was forgiven since."""

    __slots__ = ("_forgiven_s", "at_s")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self._forgiven_s = 0.0

    def renew(self, now_s: float) -> None:
        """Heard of now."""
        self.at_s = now_s
        self._forgiven_s = 0.0

    def silence_s(self, now_s: float) -> float:
        """How long nothing was heard."""
        return now_s - self.at_s

    def forgive(self, pause_s: float, limit_s: float, now_s: float) -> None:
        """Take `pause_s` off the silence; with what was taken off before, no more than `limit_s`, or than there is."""
        share_s = max(0.0, min(pause_s, limit_s - self._forgiven_s, now_s - self.at_s))
        self._forgiven_s += share_s
        self.at_s += share_s
