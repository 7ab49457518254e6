"""What kernels that choose tokens share: a row's logits, the drafts that count, and numbers in order as whole numbers.

Shapes: N tokens.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant


def variants() -> list[Variant]:
    """None: these are parts of other kernels."""
    return []


@triton.jit
def raw_tokens(logits, base, token_N, limit):
    """The logits of these tokens as they are stored; -inf from a limit on."""
    return tl.load(logits + base + token_N, mask=token_N < limit, other=float("-inf"))


@triton.jit
def widened(x_N, PAIRS: tl.constexpr):
    """The same numbers, float32; of bfloat16 two at a time, which the compiler would first take apart."""
    if PAIRS and x_N.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x_N], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x_N.to(tl.float32)


@triton.jit
def row_tokens(logits, base, edited, source, token_N, V, EDITED: tl.constexpr):
    """The logits of these tokens, float32; -inf beyond V. `source` is the row's place among edited ones, or -1."""
    inside_N = token_N < V
    if EDITED:
        raw_N = tl.load(logits + base + token_N, mask=inside_N & (source < 0), other=float("-inf")).to(tl.float32)
        from_N = edited + source.to(tl.int64) * V + token_N
        edited_N = tl.load(from_N, mask=inside_N & (source >= 0), other=float("-inf"))
        return tl.where(source >= 0, edited_N, raw_N)
    else:
        return tl.load(logits + base + token_N, mask=inside_N, other=float("-inf")).to(tl.float32)


@triton.jit
def num_usable(drafts, cap, sequence, K: tl.constexpr):
    """Drafts of a sequence before its cap and before any that is missing."""
    count = 0
    if K > 0:
        count = tl.load(cap + sequence).to(tl.int32)
    for place in tl.static_range(K):
        is_missing = tl.load(drafts + sequence * K + place) < 0
        count = tl.minimum(count, tl.where(is_missing, place, K))
    return tl.minimum(tl.maximum(count, 0), K)


@triton.jit
def cuts_of(top_k_B, top_p_B, min_p_B, sequence, V, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr):
    """Top-k (int64, 0 for none), top-p and min-p (float64) of a sequence, and whether any of them may cut."""
    top_k = tl.full([], 0, tl.int64)
    top_p, min_p = tl.full([], 1.0, tl.float64), tl.full([], 0.0, tl.float64)
    if HAS_K:
        top_k = tl.load(top_k_B + sequence)
        top_k = tl.where((top_k < 0) | (top_k >= V), 0, top_k)
    if HAS_P:
        top_p = tl.load(top_p_B + sequence).to(tl.float64)
    if HAS_MIN:
        min_p = tl.load(min_p_B + sequence).to(tl.float64)
    return top_k, top_p, min_p, (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def order_key(x_N):
    """Whole numbers, int32, that rise with x; equal for both zeros."""
    bits_N = tl.where(x_N == 0.0, 0.0, x_N).to(tl.int32, bitcast=True)
    return bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)


@triton.jit
def of_order_key(key_N):
    """The numbers of `order_key`."""
    return (key_N ^ ((key_N >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
