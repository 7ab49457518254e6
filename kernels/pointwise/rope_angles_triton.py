# mypy: ignore-errors
"""Cosines and sines of a token's rotations: from tables for each token or position, or from inverse frequencies.

A part of kernels that turn heads. It refuses to turn anything.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant

# Where angles come from.
FREQUENCIES = 0  # position times inverse frequency
BY_POSITION = 1  # rows of tables that a position picks
BY_TOKEN = 2  # one row of the tables for each token

_BY_TOKEN = tl.constexpr(BY_TOKEN)
_FREQUENCIES = tl.constexpr(FREQUENCIES)


def variants() -> list[Variant]:
    """None: this is a part of other kernels."""
    return []


@triton.jit
def _sine_cosine(angle):
    """Both of float32 angles, within 2 units of the last place; reduced in float64, which holds for any position."""
    quarter = tl.floor(angle.to(tl.float64) * 0.6366197723675814 + 0.5)
    rest = (angle.to(tl.float64) - quarter * 1.5707963267948966).to(tl.float32)
    turn = quarter.to(tl.int64).to(tl.int32) & 3
    square = rest * rest
    sine = rest + rest * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cosine = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * square + square * square * cosine
    is_odd = (turn & 1) == 1
    turned_sine = tl.where(is_odd, cosine, sine)
    turned_cosine = tl.where(is_odd, sine, cosine)
    turned_sine = tl.where(turn >= 2, -turned_sine, turned_sine)
    return turned_sine, tl.where((turn == 1) | (turn == 2), -turned_cosine, turned_cosine)


@triton.jit
def _position(
    positions, stride, token, pair, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXES: tl.constexpr,
    ALTERNATING: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Of each pair: of its own axis (time, height, width), where a token has three."""
    position = tl.load(positions + token) + tl.zeros(pair.shape, tl.int64)
    if AXES == 3:
        height = tl.load(positions + stride + token)
        width = tl.load(positions + 2 * stride + token)
        if ALTERNATING:
            is_height = (pair % 3 == 1) & (pair < 3 * HEIGHT)
            is_width = (pair % 3 == 2) & (pair < 3 * WIDTH)
        else:
            is_height = (pair >= PAIRS - HEIGHT - WIDTH) & (pair < PAIRS - WIDTH)
            is_width = pair >= PAIRS - WIDTH
        position = tl.where(is_width, width, tl.where(is_height, height, position))
    return position


@triton.jit
def load_angles(
    first, second, angle_stride, token, positions, position_stride, pair_1J, A: tl.constexpr, ROTARY: tl.constexpr,
    ANGLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXES: tl.constexpr, ALTERNATING: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of a token: [1, J] where they are computed, [A, J] where every thread loads its own."""
    position = token
    if ANGLES != _BY_TOKEN:
        position = _position(
            positions, position_stride, token, pair_1J, HEIGHT, WIDTH, AXES, ALTERNATING, ROTARY // 2
        )  # fmt: skip
    if ANGLES == _FREQUENCIES:
        angle_1J = position.to(tl.float32) * tl.load(first + pair_1J, mask=pair_1J < ROTARY // 2, other=0.0)
        sine, cosine = _sine_cosine(angle_1J)
    else:
        at_AJ = tl.broadcast_to(position * angle_stride + pair_1J, [A, pair_1J.shape[1]])
        cosine = tl.load(first + at_AJ, mask=pair_1J < ROTARY // 2, other=1.0)
        sine = tl.load(second + at_AJ, mask=pair_1J < ROTARY // 2, other=0.0)
    return cosine, sine
