# mypy: ignore-errors
"""A step of the online softmax, which forms of decode attention share.

Source: Milakov and Gimelshein 2018.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant


def variants() -> list[Variant]:
    """None: this is a part of other kernels."""
    return []


@triton.jit
def softmax_step(score, most_R, score_scale, AXIS: tl.constexpr):
    """Weights of a tile's keys, the new maximum of each row, and what earlier sums are multiplied with."""
    new_R = tl.maximum(most_R, tl.max(score, axis=AXIS))
    # Rows that have seen nothing yet: the difference of two infinities would be NaN.
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R) * score_scale
    weight = tl.exp2(score * score_scale - tl.expand_dims(base_R, AXIS))
    return weight, new_R, tl.expand_dims(tl.exp2(most_R * score_scale - base_R), AXIS)
