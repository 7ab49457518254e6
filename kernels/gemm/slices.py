"""How many slices a whole inner dimension is cut into with batch-invariant kernels. Arithmetic alone, without torch."""

import math

MAX_SLICES = 8  # of a whole inner dimension; the most ranks that can share it in invariant numerics


def num_slices(inner_size: int) -> int:
    """Slices of a whole inner dimension."""
    return math.gcd(MAX_SLICES, inner_size)
