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
def order_key(x_N):
    """Whole numbers, int32, that rise with x; equal for both zeros."""
    bits_N = tl.where(x_N == 0.0, 0.0, x_N).to(tl.int32, bitcast=True)
    return bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)


@triton.jit
def of_order_key(key_N):
    """The numbers of `order_key`."""
    return (key_N ^ ((key_N >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
