"""Number of slices of an inner dimension in batch-invariant kernels. Arithmetic only, without torch."""

import math

MAX_SLICES = 8  # also the most ranks that can share an inner dimension in batch-invariant numerics


def num_slices(inner_size: int) -> int:
    """Return the number of slices of a whole inner dimension."""
    return math.gcd(MAX_SLICES, inner_size)
