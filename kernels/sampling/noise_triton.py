# mypy: ignore-errors
"""Philox words and Gumbel noise inside kernels: those of `kernels.sampling.noise`, never a tensor of them in memory.

Words are exact. There are two forms of the noise: `gumbel` is the reference's arithmetic (float64, then rounded to
float32), for the few tokens that may win; `log2_count` gives a bound of it, which finds these few among all.

Shapes: any, N here; four tokens share one Philox block.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_0 = tl.constexpr(0x9E3779B9)
_KEY_1 = tl.constexpr(0xBB67AE85)


def variants() -> list[Variant]:
    """None: these are parts of other kernels."""
    return []


@triton.jit
def _product(left, right: tl.constexpr, QUICK: tl.constexpr):
    """64 bits of a product of 32-bit words. Left to itself, the compiler multiplies twice, for each half."""
    if QUICK:
        return tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, $2;", "=l,r,r", [left, right], dtype=tl.uint64, is_pure=True, pack=1
        )
    else:
        return left.to(tl.uint64) * right


@triton.jit
def philox(block_N, position, choice, purpose, seed, QUICK: tl.constexpr = False):
    """Four uint32 words of each block (`kernels.sampling.noise.philox4x32`)."""
    word_0 = block_N.to(tl.uint32)
    word_1 = position.to(tl.uint32)
    word_2 = choice.to(tl.uint32)
    word_3 = purpose.to(tl.uint32)
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    for index in tl.static_range(10):
        if index > 0:
            key_0 = (key_0 + _KEY_0).to(tl.uint32)
            key_1 = (key_1 + _KEY_1).to(tl.uint32)
        product_0 = _product(word_0, _MULTIPLIER_0, QUICK)
        product_1 = _product(word_2, _MULTIPLIER_1, QUICK)
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_1.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
    return word_0, word_1, word_2, word_3


@triton.jit
def uniform(number_N, position, choice, purpose, seed):
    """The draws of these numbers, float64 in (0, 1)."""
    word_0, word_1, word_2, word_3 = philox(number_N // 4, position, choice, purpose, seed)
    place_N = number_N % 4
    low_N = tl.where(place_N == 0, word_0, word_1)
    high_N = tl.where(place_N == 2, word_2, word_3)
    return (tl.where(place_N < 2, low_N, high_N).to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel(token_N, position, choice, purpose, seed):
    """The noise of tokens, float32, as the reference rounds it."""
    draw_N = uniform(token_N, position, choice, purpose, seed)
    return (-tl.log(-tl.log(draw_N))).to(tl.float32)


@triton.jit
def _log2(x_N, QUICK: tl.constexpr):
    """Log2; with QUICK one instruction of NVIDIA's, good to 2^-22 of the larger of it and 1."""
    if QUICK:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x_N], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x_N)


@triton.jit
def quick_exp2(x_N, QUICK: tl.constexpr):
    """2^x; with QUICK one instruction of NVIDIA's, which has 0 below 2^-126."""
    if QUICK:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x_N], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x_N)


@triton.jit
def log2_count(count_N, QUICK: tl.constexpr):
    """32 less a bound of a word's noise over ln 2, float32, by how many words are above it; -inf for the last of 2^32.

    With 1 - u = r the noise is -ln(-ln(1 - r)), and -ln(1 - r) >= r: so it is at most -ln r, which takes one logarithm,
    and nothing cancels where noise is large. The two differ by r / 2 there, and much only where noise is small. Of r,
    which is (count + 1/2) / 2^32, the half is left out, too, which only adds to the bound.
    """
    return _log2(count_N.to(tl.float32), QUICK)
