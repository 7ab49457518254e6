"""Sizes of a gated delta net: of the rows that it stores, and those that Triton kernels support; without torch."""

from typing import Final

TILE: Final = 16  # positions between two stored states
RING: Final = 2 * TILE  # rows of k, u and g: an open tile plus a step
CONV_RING: Final = 16  # inputs of the convolution: those that an output sees plus a step
MAX_TAPS: Final = 5  # positions that an output sees
HEAD_DIMS: Final = (16, 32, 64, 128, 256)  # of keys and values, in Triton
_ALIGNED = 4  # rows are multiples of this many elements


def conv_len(key_dim: int, value_dim: int, num_values: int) -> int:
    """Channels of one key head: its query, its key, the values of its value heads."""
    return 2 * key_dim + num_values * value_dim


def tail_len(key_dim: int, value_dim: int, num_values: int) -> int:
    """Elements of a ring's row for one key head: k, its value heads' u, their g."""
    return _aligned(key_dim + num_values * value_dim + num_values)


def state_len(key_dim: int, value_dim: int, num_values: int) -> int:
    """Elements of a key head's states, [num_values, key_dim, value_dim], plus the number behind them."""
    return _aligned(num_values * key_dim * value_dim + 1)


def unfit_delta_sizes(key_dim: int, value_dim: int) -> str:
    """Name the size of a gated delta net that the Triton kernels do not support; "" if all fit."""
    unfit = [size for size in (key_dim, value_dim) if size not in HEAD_DIMS]
    return f"a gated delta net's heads of {unfit[0]}" if unfit else ""


def _aligned(num_elements: int) -> int:
    return -(-num_elements // _ALIGNED) * _ALIGNED
