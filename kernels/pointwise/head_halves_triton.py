# mypy: ignore-errors
"""Heads in memory and as two halves side by side in one thread: columns that turn together are in one place of both.

Of what turns, a half is the first of each pair, another the second; what does not turn is divided into two parts that
follow. Shapes: A heads, J columns of half a head, filled up to a power of two; E columns of a head.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant


def variants() -> list[Variant]:
    """None: this is a part of other kernels."""
    return []


def half_len(head_dim: int) -> int:
    """Columns of half a head in a tile."""
    return triton.next_power_of_2(-(-head_dim // 2))


@triton.jit
def _columns(pair_1J, E: tl.constexpr, ROTARY: tl.constexpr):
    """Columns of both halves: what turns together, then the rest in two parts."""
    HALF: tl.constexpr = (E + 1) // 2
    left_1J = tl.where(pair_1J < ROTARY // 2, pair_1J, pair_1J + ROTARY // 2)
    right_1J = pair_1J + tl.where(pair_1J < ROTARY // 2, ROTARY // 2, HALF)
    if (ROTARY // 2) % 8 == 0 and HALF % 8 == 0:
        left_1J = tl.max_contiguous(tl.multiple_of(left_1J, [1, 8]), [1, 8])
        right_1J = tl.max_contiguous(tl.multiple_of(right_1J, [1, 8]), [1, 8])
    return left_1J, right_1J


@triton.jit
def load_halves(at, is_head_A1, pair_1J, A: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr,
                 INTERLEAVED: tl.constexpr):  # fmt: skip
    """[A, J] each, from pointers [A, 1] to heads, or one pointer that all heads have."""
    J: tl.constexpr = pair_1J.shape[1]
    if INTERLEAVED:
        column_1D = tl.arange(0, 2 * J)[None, :]
        at_AD = tl.broadcast_to(at + column_1D, [A, 2 * J])
        both_AD = tl.load(at_AD, mask=is_head_A1 & (column_1D < E), other=0.0)
        left_AJ, right_AJ = tl.split(tl.reshape(both_AD, [A, J, 2]))
    else:
        left_1J, right_1J = _columns(pair_1J, E, ROTARY)
        # Addresses are spread over rows, so that every thread loads what it needs.
        at_left_AJ = tl.broadcast_to(at + left_1J, [A, J])
        at_right_AJ = tl.broadcast_to(at + right_1J, [A, J])
        left_AJ = tl.load(at_left_AJ, mask=is_head_A1 & (pair_1J < (E + 1) // 2), other=0.0)
        right_AJ = tl.load(at_right_AJ, mask=is_head_A1 & (pair_1J < (E + 1) // 2) & (right_1J < E), other=0.0)
    return left_AJ, right_AJ


@triton.jit
def store_halves(at_A1, is_head_A1, pair_1J, left_AJ, right_AJ, E: tl.constexpr, ROTARY: tl.constexpr,
                  INTERLEAVED: tl.constexpr):  # fmt: skip
    """To pointers to heads, in their dtype."""
    J: tl.constexpr = pair_1J.shape[1]
    if INTERLEAVED:
        column_1D = tl.arange(0, 2 * J)[None, :]
        both_AD = tl.reshape(tl.join(left_AJ, right_AJ), [left_AJ.shape[0], 2 * J])
        tl.store(at_A1 + column_1D, both_AD.to(at_A1.dtype.element_ty), mask=is_head_A1 & (column_1D < E))
    else:
        left_1J, right_1J = _columns(pair_1J, E, ROTARY)
        is_left = is_head_A1 & (pair_1J < (E + 1) // 2)
        tl.store(at_A1 + left_1J, left_AJ.to(at_A1.dtype.element_ty), mask=is_left)
        tl.store(at_A1 + right_1J, right_AJ.to(at_A1.dtype.element_ty), mask=is_left & (right_1J < E))
