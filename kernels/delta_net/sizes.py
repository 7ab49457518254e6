"""How long the rows are that a gated delta net keeps; without torch, for those who know layouts and not tensors."""

from typing import Final

TILE: Final = 16  # positions between two kept states
RING: Final = 2 * TILE  # rows of k, u and g: an open tile, and a step beside it
CONV_RING: Final = 16  # inputs of the convolution: those that an output sees, and a step beside them
MAX_TAPS: Final = 5  # positions that an output sees
_ALIGNED = 4  # rows are multiples of so many elements


def conv_len(key_dim: int, value_dim: int, num_values: int) -> int:
    """Channels of one key head: its query, its key, the values of its value heads."""
    return 2 * key_dim + num_values * value_dim


def tail_len(key_dim: int, value_dim: int, num_values: int) -> int:
    """Elements of a ring's row for one key head: k, its value heads' u, their g."""
    return _aligned(key_dim + num_values * value_dim + num_values)


def state_len(key_dim: int, value_dim: int, num_values: int) -> int:
    """Elements of a key head's states, [num_values, key_dim, value_dim], and of the number behind them."""
    return _aligned(num_values * key_dim * value_dim + 1)


def _aligned(num_elements: int) -> int:
    return -(-num_elements // _ALIGNED) * _ALIGNED
