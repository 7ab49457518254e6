# mypy: ignore-errors
"""Float8 K and V in decode attention, widened where a matmul wants them: no shared memory in between.

A matmul of 16-bit operands takes two neighbours of the dimension that it sums over in one register. Keys lie so;
values do not: their neighbours are columns. So two columns are loaded as one 16-bit integer, which the hardware's
transposing load understands, and each half is widened: a tile becomes that of its even columns and that of its odd
ones, with a matmul each.

Widening to float16 is exact either way: by the conversion of the hardware, or by moving bits (float8's exponent and
mantissa are the lower bits of float16's, whose exponent is worth 2 ** -8 less: `BITS_SCALE` undoes that). Moved bits
make a number of NaN, 480.

Shapes: T keys of a tile, R rows (padded), D head size, C pairs of columns, D / 2.
"""

import triton
import triton.language as tl

from baton.kernels.attention.softmax_triton import softmax_step
from baton.kernels.variant import Variant

BITS_SCALE = tl.constexpr(256.0)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Bytes 0 and 2 are the even columns of two keys, 1 and 3 the odd ones.
_CONVERT = tl.constexpr(
    """
    {
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }
    """
)
# Sign, and 7 bits moved one down from a byte that lies on top.
_MOVE = tl.constexpr(
    """
    {
    .reg .b32 low, moved;
    shl.b32 low, $2, 8;
    shl.b32 moved, $2, 7;
    and.b32 moved, moved, 0x3f803f80;
    lop3.b32 $0, low, 0x80008000, moved, 0xea;
    shr.u32 moved, $2, 1;
    and.b32 moved, moved, 0x3f803f80;
    lop3.b32 $1, $2, 0x80008000, moved, 0xea;
    }
    """
)


def variants() -> list[Variant]:
    """None: these are parts of another kernel."""
    return []


@triton.jit
def dequantize_pairs(pair_TC, MOVE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Two float8 in each 16-bit integer -> the lower ones and the upper ones in float16, over BITS_SCALE if moved."""
    if ASSEMBLY and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _MOVE if MOVE else _CONVERT, "=r,=r,r", [pair_TC], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    if MOVE:
        even_TC = ((pair_TC << 8) & -0x8000) | ((pair_TC << 7) & 0x3F80)
        odd_TC = (pair_TC & -0x8000) | ((pair_TC >> 1) & 0x3F80)
        return even_TC.to(tl.int16).to(tl.float16, bitcast=True), odd_TC.to(tl.int16).to(tl.float16, bitcast=True)
    even_TC = (pair_TC & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd_TC = ((pair_TC >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even_TC.to(tl.float16), odd_TC.to(tl.float16)


@triton.jit
def attend_together(
    even_RC, odd_RC, position_R, key, value, tables, first, end, last, stride_n, score_scale,
    D: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    MOVE: tl.constexpr, ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`attend_tiles` of float8 that is widened in the registers of the matmuls; everything by pairs of columns."""
    SPREAD: tl.constexpr = ROWS < 64
    C: tl.constexpr = D // 2
    most_R = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, TILE if SPREAD else 1], tl.float32)
    even = tl.zeros([ROWS, C], tl.float32)
    odd = tl.zeros([ROWS, C], tl.float32)
    place_T = tl.arange(0, TILE)
    slot_TC = (place_T % BLOCK)[:, None] * C + tl.arange(0, C)[None, :]
    pairs_TC = key.to(tl.pointer_type(tl.int16), bitcast=True) + slot_TC
    value_pairs_TC = value.to(tl.pointer_type(tl.int16), bitcast=True) + slot_TC
    last_column = last // BLOCK
    block_T = tl.load(tables + tl.minimum((first * TILE + place_T) // BLOCK, last_column))
    for tile in tl.range(first, end, num_stages=STAGES):
        seen_T = tile * TILE + place_T
        offset_T = block_T.to(tl.int32).to(tl.int64) * stride_n.to(tl.int64)
        if TILE < BLOCK:
            offset_T += tile * TILE % BLOCK * C
        key_at = pairs_TC + offset_T[:, None]
        value_at = key_at + BLOCK * C if JOINED else value_pairs_TC + offset_T[:, None]
        key_even_TC, key_odd_TC = dequantize_pairs(tl.load(key_at), MOVE, ASSEMBLY)
        if MOVE:
            value_TC = tl.load(value_at)
        else:
            value_TC = tl.load(value_at, mask=(seen_T <= last)[:, None], other=0)
        even_TC, odd_TC = dequantize_pairs(value_TC, MOVE, ASSEMBLY)
        block_T = tl.load(tables + tl.minimum(((tile + 1) * TILE + place_T) // BLOCK, last_column))
        score = tl.dot(even_RC, tl.trans(key_even_TC), input_precision="ieee")
        score = tl.dot(odd_RC, tl.trans(key_odd_TC), score, input_precision="ieee")
        score = tl.where(seen_T[None, :] <= position_R[:, None], score, float("-inf"))
        weight, most_R, fade = softmax_step(score, most_R, score_scale, 1)
        total = total * fade + (weight if SPREAD else tl.sum(weight, axis=1)[:, None])
        weight = weight.to(tl.float16)
        even = tl.dot(weight, even_TC, even * fade, input_precision="ieee")
        odd = tl.dot(weight, odd_TC, odd * fade, input_precision="ieee")
    mixed_RD = tl.reshape(tl.join(even, odd), [ROWS, D])
    return most_R, tl.sum(total, axis=1), mixed_RD * BITS_SCALE if MOVE else mixed_RD


@triton.jit
def _over_warps(sums, WARPS: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    """[W, R, C] -> [R, C], by halves: a plain sum would have the whole result in each warp's registers."""
    for level in tl.static_range(0, 3):
        if (WARPS >> level) > 1:
            halves = tl.reshape(sums, [2, WARPS >> (level + 1), ROWS, C])
            lower, upper = tl.split(tl.permute(halves, (1, 2, 3, 0)))
            sums = lower + upper
    return tl.reshape(sums, [ROWS, C])


@triton.jit
def attend_apart(
    even_RC, odd_RC, position_R, key, value, tables, first, end, last, stride_n, score_scale,
    D: tl.constexpr, BLOCK: tl.constexpr, JOINED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, MOVE: tl.constexpr, ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`attend_together` with sums of its own for each warp, which has its share of every tile's keys."""
    C: tl.constexpr = D // 2
    K: tl.constexpr = TILE // WARPS
    most_WR = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([WARPS, ROWS, K], tl.float32)
    even = tl.zeros([WARPS, ROWS, C], tl.float32)
    odd = tl.zeros([WARPS, ROWS, C], tl.float32)
    even_WRC = tl.broadcast_to(even_RC[None, :, :], [WARPS, ROWS, C])
    odd_WRC = tl.broadcast_to(odd_RC[None, :, :], [WARPS, ROWS, C])
    place_WK = tl.arange(0, WARPS)[:, None] * K + tl.arange(0, K)[None, :]
    slot = (place_WK % BLOCK)[:, :, None] * C + tl.arange(0, C)[None, None, :]
    pairs = key.to(tl.pointer_type(tl.int16), bitcast=True) + slot
    value_pairs = value.to(tl.pointer_type(tl.int16), bitcast=True) + slot
    last_column = last // BLOCK
    block_WK = tl.load(tables + tl.minimum((first * TILE + place_WK) // BLOCK, last_column))
    for tile in tl.range(first, end, num_stages=STAGES):
        seen_WK = tile * TILE + place_WK
        offset = block_WK.to(tl.int32).to(tl.int64) * stride_n.to(tl.int64)
        if TILE < BLOCK:
            offset += tile * TILE % BLOCK * C
        key_at = pairs + offset[:, :, None]
        value_at = key_at + BLOCK * C if JOINED else value_pairs + offset[:, :, None]
        key_even, key_odd = dequantize_pairs(tl.load(key_at), MOVE, ASSEMBLY)
        if MOVE:
            value_pair = tl.load(value_at)
        else:
            value_pair = tl.load(value_at, mask=(seen_WK <= last)[:, :, None], other=0)
        value_even, value_odd = dequantize_pairs(value_pair, MOVE, ASSEMBLY)
        block_WK = tl.load(tables + tl.minimum(((tile + 1) * TILE + place_WK) // BLOCK, last_column))
        score = tl.dot(even_WRC, tl.trans(key_even, 0, 2, 1), input_precision="ieee")
        score = tl.dot(odd_WRC, tl.trans(key_odd, 0, 2, 1), score, input_precision="ieee")
        score = tl.where(seen_WK[:, None, :] <= position_R[None, :, None], score, float("-inf"))
        weight, most_WR, fade = softmax_step(score, most_WR, score_scale, 2)
        total = total * fade + weight
        weight = weight.to(tl.float16)
        even = tl.dot(weight, value_even, even * fade, input_precision="ieee")
        odd = tl.dot(weight, value_odd, odd * fade, input_precision="ieee")
    most_R = tl.max(most_WR, axis=0)
    base_R = tl.where(most_R == float("-inf"), 0.0, most_R)
    share_WR = tl.exp2((most_WR - base_R[None, :]) * score_scale)
    total_R = tl.sum(tl.sum(total, axis=2) * share_WR, axis=0)
    even_RC = _over_warps(even * share_WR[:, :, None], WARPS, ROWS, C)
    odd_RC = _over_warps(odd * share_WR[:, :, None], WARPS, ROWS, C)
    mixed_RD = tl.reshape(tl.join(even_RC, odd_RC), [ROWS, D])
    return most_R, total_R, mixed_RD * BITS_SCALE if MOVE else mixed_RD
