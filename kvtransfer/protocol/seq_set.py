"""Which sequence numbers of one sender were seen: each counts once, however often and in whatever order it comes."""

MAX_AHEAD = 1 << 16  # a window never lets more frames out


class SeqSet:
    """The numbers below a base, and some above it."""

    __slots__ = ("_above", "base")

    def __init__(self) -> None:
        self.base = 0
        self._above: set[int] = set()

    def add(self, seq: int) -> bool:
        """Note a number; whether it was new. One too far above the base is never new: nothing honest is there."""
        if seq < self.base or seq in self._above or seq >= self.base + MAX_AHEAD:
            return False
        self._above.add(seq)
        self._advance()
        return True

    def raise_base(self, base: int) -> None:
        """Count everything below `base` as seen."""
        if base > self.base:
            self.base = base
            self._above = {seq for seq in self._above if seq >= base}
            self._advance()

    def _advance(self) -> None:
        while self.base in self._above:
            self._above.remove(self.base)
            self.base += 1
