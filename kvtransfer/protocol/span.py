"""What a frame covers: some positions of some heads of one layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Logical positions [first, first + count) of heads [head_first, head_first + head_count) of a layer."""

    layer: int
    first: int
    count: int
    head_first: int
    head_count: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count
