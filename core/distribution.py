"""Counts of values between fixed bounds, from which histogram metrics and quantiles are made.

As in Prometheus, a value belongs to the first bucket whose bound it does not exceed, and the last bucket has no bound.
`Buckets` is filled by one writer; `Distribution` is a reading of it, which can be subtracted from a later one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.core.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class Distribution:
    """A reading of the counts.

    Attributes:
        bounds: upper bounds of all buckets but the last, ascending.
        counts: values in each bucket, one more than there are bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def checked(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> "Distribution":
        """Check and build a distribution received over a wire.

        Raises:
            MalformedMessage: the counts do not fit the bounds, or the bounds do not ascend.
        """
        if len(counts) != len(bounds) + 1 or not all(low < high for low, high in pairwise(bounds)):
            raise MalformedMessage(f"a distribution of {len(counts)} counts between {len(bounds)} bounds")
        return cls(tuple(bounds), tuple(counts), total)

    @property
    def num(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Exact mean of all values; None without any."""
        return self.total / self.num if self.num else None

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all values do not exceed, by linear interpolation within its bucket.

        As in Prometheus' `histogram_quantile`, the first bucket starts at 0, and a value past the last bound is
        reported as that bound. None without values.
        """
        assert 0 <= share <= 1
        num_wanted, num_before = share * self.num, 0
        low = 0.0
        for bound, count in zip(self.bounds, self.counts[:-1], strict=True):
            if count and num_before + count >= num_wanted:
                return low + (bound - low) * max(0.0, num_wanted - num_before) / count
            num_before += count
            low = bound
        return low if self.num else None

    def since(self, earlier: "Distribution") -> "Distribution":
        """Subtract an earlier reading of the same buckets."""
        assert self.bounds == earlier.bounds
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Distribution(self.bounds, counts, self.total - earlier.total)


class Buckets:
    """Buckets filled by one writer; a reader on another thread needs the writer's lock.

    Args:
        bounds: ascending upper bounds.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert all(low < high for low, high in pairwise(bounds))
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """Read the current counts."""
        return Distribution(self._bounds, tuple(self._counts), self._total)
