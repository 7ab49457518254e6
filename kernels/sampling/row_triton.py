# mypy: ignore-errors
"""What kernels that choose tokens share: a row's logits, the drafts that count, and numbers in order as whole numbers.

Shapes: N tokens, X blocks of four of them, T words of such a block: four numbers, or two pairs.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant

_NO_PAIR = tl.constexpr(-0x7F0080)  # two of bfloat16's -inf


def variants() -> list[Variant]:
    """None: these are parts of other kernels."""
    return []


@triton.jit
def raw_tokens(logits, base, token_N, limit):
    """The logits of these tokens as they are stored; -inf from a limit on."""
    return tl.load(logits + base + token_N, mask=token_N < limit, other=float("-inf"))


@triton.jit
def blocks_of(start, N: tl.constexpr):
    """The tokens of a chunk, in blocks of four: [X, 4]."""
    return start + tl.arange(0, N // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def raw_pairs(logits, base, start, limit, N: tl.constexpr):
    """A chunk's logits in bfloat16 as they are stored, two to an int32, [X, 2]; -inf from a limit on, which is even."""
    pair_X2 = tl.arange(0, N // 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    at_X2 = (logits + (base + start)).to(tl.pointer_type(tl.int32), bitcast=True) + pair_X2
    if start + N <= limit:  # nearly always: neither a mask nor numbers in its place
        pair_X2 = tl.load(at_X2)
    else:
        pair_X2 = tl.load(at_X2, mask=pair_X2 * 2 < limit - start, other=_NO_PAIR)
    return pair_X2


@triton.jit
def lower_of(pair_X):
    """The first token's logit of each pair, float32."""
    return (pair_X << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper_of(pair_X):
    """The second token's logit of each pair, float32."""
    return (pair_X & -65536).to(tl.float32, bitcast=True)


@triton.jit
def fours(raw_XT, PAIRS: tl.constexpr):
    """The logits of each block of four, float32: a tensor for each place in a block."""
    if PAIRS:
        pair_0X, pair_1X = tl.split(raw_XT)
        return lower_of(pair_0X), upper_of(pair_0X), lower_of(pair_1X), upper_of(pair_1X)
    else:
        even_X2, odd_X2 = tl.split(tl.reshape(raw_XT, [raw_XT.shape[0], 2, 2]))
        x_0X, x_2X = tl.split(even_X2)
        x_1X, x_3X = tl.split(odd_X2)
        return x_0X, x_1X, x_2X, x_3X


@triton.jit
def _larger_pair(left, right):
    return tl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def best_of(raw_XT, PAIRS: tl.constexpr, QUICK: tl.constexpr):
    """The largest logit of a chunk, float32."""
    if PAIRS and QUICK:
        pair = tl.reduce(raw_XT, None, _larger_pair)
        return tl.maximum(lower_of(pair), upper_of(pair))
    else:
        x_0X, x_1X, x_2X, x_3X = fours(raw_XT, PAIRS)
        return tl.max(tl.maximum(tl.maximum(x_0X, x_1X), tl.maximum(x_2X, x_3X)))


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
