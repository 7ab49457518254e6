"""Durations of hand-offs: two histograms with a single writer, published among its service's counters."""

from collections.abc import Mapping
from typing import Final

from baton.core.distribution import Buckets, Distribution

TIME_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TRANSFER, EXPOSED = "transfer", "exposed"
_NUM_BUCKETS: Final = len(TIME_BOUNDS_S) + 1
TIME_NAMES: Final = tuple(f"{kind}_bucket_{at}" for kind in (TRANSFER, EXPOSED) for at in range(_NUM_BUCKETS))


class TransferTimes:
    """Durations of transfers that were acknowledged or complete."""

    def __init__(self) -> None:
        self._transfer = Buckets(TIME_BOUNDS_S)
        self._exposed = Buckets(TIME_BOUNDS_S)

    def observe(self, transfer_s: float, exposed_s: float) -> None:
        """Record one transfer.

        Args:
            transfer_s: from the transfer's first frame to its end.
            exposed_s: from the end of the prefill to the end of the transfer.
        """
        self._transfer.observe(transfer_s)
        self._exposed.observe(exposed_s)

    def as_counts(self) -> dict[str, int]:
        """Return the number of transfers in each bucket, keyed by `TIME_NAMES`."""
        counts = (*self._transfer.read().counts, *self._exposed.read().counts)
        return dict(zip(TIME_NAMES, counts, strict=True))


def distribution_of(counts: Mapping[str, int], kind: str) -> Distribution:
    """Return one of the histograms in a service's counters; its sum is the counter `<kind>_us`."""
    buckets = tuple(counts[f"{kind}_bucket_{at}"] for at in range(_NUM_BUCKETS))
    return Distribution(TIME_BOUNDS_S, buckets, counts[f"{kind}_us"] / 1e6)
