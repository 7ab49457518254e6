"""Which of a layer's experts a rank holds where ranks hold different ones, each whole. Without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """Neighbouring experts; the others of the layer are at other ranks.

    Attributes:
        first: the first one's number, as the router counts.
        count: how many.
        num_all: experts of the layer.
    """

    first: int
    count: int
    num_all: int

    @property
    def numbers(self) -> range:
        """As the router counts."""
        return range(self.first, self.first + self.count)

    @classmethod
    def of_rank(cls, num_all: int, rank: int, size: int) -> "HeldExperts":
        """Those of one of `size` ranks, which divides `num_all`."""
        count = num_all // size
        return cls(rank * count, count, num_all)
