"""The kernel of `kv_scatter` that makes float8 of bfloat16 on the way; the digest is of what it writes.

A tile has the rows and words of `kv_scatter_triton`, words of the target that is, each made of eight elements. A thread
has whole words, so they are put together from bytes in its registers. Rounding is the hardware's: to even, saturating,
infinities too; what is no number becomes the one that float8 has.

Shapes: R rows of a tile, C words of each in the target, X = 8 C elements.
"""

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from baton.kernels.digest import PERIOD
from baton.kernels.kv_scatter_triton import (
    ALIGNED,
    FORMS,
    PLAIN,
    TYPES,
    complete,
    first_unit,
    mix,
    offsets,
    shape_of,
    tile_of,
    word_weights,
)
from baton.kernels.variant import Variant

_PERIOD = tl.constexpr(PERIOD)
_SALT_LAYER = tl.constexpr(1 << 60)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Assembly, since ptxas (12.8 and 12.9) crashes on some of the ways to put words together from the bytes of conversions.
_WORD = tl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 low, high;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    cvt.rn.satfinite.e4m3x2.f32 c, $6, $5;
    cvt.rn.satfinite.e4m3x2.f32 d, $8, $7;
    mov.b32 low, {a, b};
    mov.b32 high, {c, d};
    mov.b64 $0, {low, high};
}""")
_STRIDES = ["layer_stride", "part_stride", "head_stride"]


def tile_for(here: Any, there: Any, num_pairs: int, tuning: Any) -> dict[str, Any]:
    """The compile-time arguments: as many bytes of the source in a step as where nothing is converted."""
    half = SimpleNamespace(tile_words=tuning.tile_words // 2, num_warps=tuning.num_warps)
    return tile_of(here, there, num_pairs, half)


@triton.jit
def _byte(value, place: tl.constexpr):
    """float8 of a float32, as a byte of a word."""
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int64) << 8 * place


@triton.jit
def words_of(value_RX, R: tl.constexpr, C: tl.constexpr):
    """Words of eight float8 each, made of float32: the first is the lowest byte."""
    even_RC22, odd_RC22 = tl.split(value_RX.reshape(R, C, 2, 2, 2))
    low_RC2, high_RC2 = tl.split(even_RC22)
    v0, v4 = tl.split(low_RC2)
    v2, v6 = tl.split(high_RC2)
    low_RC2, high_RC2 = tl.split(odd_RC22)
    v1, v5 = tl.split(low_RC2)
    v3, v7 = tl.split(high_RC2)
    if _INTERPRETED:
        low_RC = _byte(v0, 0) | _byte(v1, 1) | _byte(v2, 2) | _byte(v3, 3)
        words_RC = low_RC | _byte(v4, 4) | _byte(v5, 5) | _byte(v6, 6) | _byte(v7, 7)
    else:
        words_RC = tl.inline_asm_elementwise(
            _WORD, "=l,f,f,f,f,f,f,f,f", [v0, v1, v2, v3, v4, v5, v6, v7], dtype=tl.int64, is_pure=True, pack=1
        )
    return words_RC


@triton.jit(do_not_specialize=[*PLAIN, *_STRIDES])
def convert_kernel(
    from_address: tl.int64,
    from_blocks,
    from_offset: tl.int64,
    from_layer_words: tl.int64,
    from_head: tl.int32,
    to_address: tl.int64,
    to_blocks,
    to_offset: tl.int64,
    to_layer_words: tl.int64,
    to_head: tl.int32,
    scales,
    layer_stride: tl.int32,
    part_stride: tl.int32,
    head_stride: tl.int32,
    layer: tl.int32,
    num_layers: tl.int32,
    first: tl.int32,
    count: tl.int32,
    head_first: tl.int32,
    num_heads: tl.int32,
    weights,
    sums,
    completion: tl.int64,
    sequence: tl.int64,
    W: tl.constexpr,
    P: tl.constexpr,
    FROM_H: tl.constexpr,
    FROM_S: tl.constexpr,
    TO_H: tl.constexpr,
    TO_S: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIGEST: tl.constexpr,
) -> None:
    """Tiles as in `move_kernel`; offsets and steps between layers are in words of 8 bytes of either pool."""
    num_programs = tl.num_programs(0)
    num_units = (first + count + UNIT - 1) // UNIT - first // UNIT
    num_groups = (num_heads * P + PAIRS - 1) // PAIRS * ((W + COLUMNS - 1) // COLUMNS)
    from_base = tl.multiple_of(from_address.to(tl.pointer_type(tl.bfloat16)), 16) + 4 * from_offset
    to_base = tl.multiple_of(to_address.to(tl.pointer_type(tl.float8e4nv)), 16) + 8 * to_offset
    pair_R = tl.arange(0, PAIRS * UNIT) // UNIT
    step_R = tl.arange(0, PAIRS * UNIT) % UNIT
    program = tl.program_id(0)
    for index in range(num_layers):
        total_RC = tl.zeros([PAIRS * UNIT, COLUMNS], dtype=tl.int64)
        for group in range(num_groups):
            its_R = group // ((W + COLUMNS - 1) // COLUMNS) * PAIRS + pair_R
            column = group % ((W + COLUMNS - 1) // COLUMNS) * COLUMNS
            column_C = column + tl.arange(0, COLUMNS)
            column_X = 8 * column + tl.arange(0, 8 * COLUMNS)
            is_real_R = its_R < num_heads * P
            scale_at_R = (layer + index) * layer_stride + its_R % P * part_stride + (to_head + its_R // P) * head_stride
            scale_R = tl.load(scales + scale_at_R, mask=is_real_R, other=1.0)
            inverse_R = tl.div_rn(tl.full(scale_R.shape, 1.0, tl.float32), scale_R)
            sum_RC = tl.zeros([PAIRS * UNIT, COLUMNS], dtype=tl.int64)
            start = first_unit(program, num_programs, index * num_groups + group, num_units)
            for unit in range(start, num_units, num_programs):
                position = (first // UNIT + unit) * UNIT
                mask_R = (position + step_R >= first) & (position + step_R < first + count) & is_real_R
                mask_RX = mask_R[:, None] & (column_X < 8 * W)[None, :] if W % COLUMNS else mask_R[:, None]
                at_RX = offsets(from_blocks, position, from_head, its_R, step_R, column_X, FROM_H, FROM_S, P, 8 * W)
                wide_RX = tl.load(from_base + at_RX, mask=mask_RX, other=0.0).to(tl.float32)
                value_RX = wide_RX * inverse_R[:, None]
                at_RX = offsets(to_blocks, position, to_head, its_R, step_R, column_X, TO_H, TO_S, P, 8 * W)
                tl.store(to_base + at_RX, value_RX.to(tl.float8e4nv), mask=mask_RX)
                if DIGEST:
                    words_RC = words_of(value_RX, PAIRS * UNIT, COLUMNS)
                    low_R = tl.load(weights + (position % _PERIOD + step_R), mask=mask_R, other=0)
                    sum_RC += (words_RC + 1) * (low_R * tl.load(weights + (_PERIOD + position // _PERIOD)))[:, None]
            if DIGEST:
                total_RC += sum_RC * word_weights(head_first, its_R, column_C, P, W, COLUMNS)
        if DIGEST:
            layer_weight = mix((layer + index).to(tl.uint64) + _SALT_LAYER)
            tl.atomic_add(sums + 1 + index, tl.sum(total_RC) * layer_weight, sem="relaxed")
        from_base += 4 * from_layer_words
        to_base += 8 * to_layer_words
    complete(sums, completion, sequence, num_layers)


def variants() -> list[Variant]:
    """Heads of 128, with and without digests, into blocks of either size; and rows that are no power of two."""
    few, *others = FORMS
    rows = [(16, 16, 128, few, True), (16, 16, 128, few, False), (16, 64, 128, few, True), (64, 16, 24, few, True)]
    rows += [(from_size, 16, width, form, True) for from_size, width in ((16, 128), (64, 24)) for form in others]
    found = []
    for from_size, to_size, width, (num_warps, words), digest in rows:
        here, there = shape_of(from_size, 2 * width), shape_of(to_size, width)
        constants = tile_for(here, there, 16, SimpleNamespace(tile_words=words, num_warps=num_warps))
        sizes = f"S={from_size}" if from_size == to_size else f"S={from_size}>{to_size}"
        parts = ["kv_scatter fp8", sizes, "" if width == 128 else f"D={width}", "" if digest else "no digest"]
        parts.append("" if num_warps == few[0] else f"w{num_warps}")
        found.append(
            Variant(
                name=" ".join(filter(None, parts)),
                kernel=convert_kernel,
                types=TYPES | {"scales": "*fp32"} | dict.fromkeys(_STRIDES, "i32"),
                num_warps=constants.pop("num_warps"),
                constants=constants | {"DIGEST": digest},
                aligned=(*ALIGNED, "scales"),
                contains=("ATOMG",),
                max_registers=128,
                may_spill=width != 128,  # of no model: ptxas rather saves registers
                on_amd=False,  # gfx942 has another float8
            )
        )
    return found
