# mypy: ignore-errors
"""The kernels of `kv_scatter` and `kv_digest`: tiles of rows, the digest's arithmetic, and how a launch says its end.

Shapes: R rows of a tile, C words of each; as in `kernels.kv.scatter`.
"""

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from baton.kernels.kv.digest import PERIOD
from baton.kernels.launcher import Launcher
from baton.kernels.variant import Variant

WORD_BYTES = 8
MAX_COLUMNS = 512
MIN_COLUMNS = 16  # fewer would not fill a 128-byte line

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_0 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_1 = tl.constexpr(0x94D049BB133111EB)
_SALT_LAYER = tl.constexpr(1 << 60)
_SALT_WORD = tl.constexpr(4 << 60)
_PERIOD = tl.constexpr(PERIOD)
LAYER_COLUMNS = 3  # numbers that a launch reads of each layer
_LAYER_COLUMNS = tl.constexpr(LAYER_COLUMNS)
# Assembly, since Triton has no store with an order, and an atomic on host memory would need PCIe atomics, which virtual
# machines lack. By one thread, the one that stores scalars: so the fence covers the digests that it has just stored.
_PUBLISH = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p fence.acq_rel.sys;
    @p st.relaxed.sys.global.u64 [$1], $2;
    mov.u32 $0, t;
}""")


def tile_of(here: Any, there: Any, num_pairs: int, tuning: Any) -> dict[str, Any]:
    """The compile-time arguments for a pair of shapes; `num_pairs` (head, part) pairs are to be moved."""
    row_words = there.row_bytes // WORD_BYTES
    columns = min(row_words & -row_words, MAX_COLUMNS)
    if columns < MIN_COLUMNS:
        columns = min(triton.next_power_of_2(row_words), MAX_COLUMNS)
    rows = tuning.tile_words // columns
    unit = min(here.rows_per_block, there.rows_per_block, rows)
    pairs = min(rows // unit, triton.next_power_of_2(num_pairs))
    return {
        "W": row_words,
        "P": here.num_parts,
        "FROM_H": here.num_heads,
        "FROM_S": here.rows_per_block,
        "TO_H": there.num_heads,
        "TO_S": there.rows_per_block,
        "UNIT": unit,
        "PAIRS": pairs,
        "COLUMNS": columns,
        "num_warps": tuning.num_warps,
    }


@triton.jit
def mix(index):
    """`kernels.kv.digest.weight` of uint64 indices, as int64."""
    value = index * _GOLDEN + _GOLDEN
    value = (value ^ (value >> 30)) * _MULTIPLIER_0
    value = (value ^ (value >> 27)) * _MULTIPLIER_1
    return ((value ^ (value >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit
def offsets(
    blocks,
    position,
    head,
    its_R,
    step_R,
    column_C,
    H: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
):
    """Words of a tile, from the layer's start: `its_R` are (head, part) pairs from `head`, in one block."""
    block = tl.load(blocks + position // S).to(tl.int64)
    row_R = head * P * S + position % S + its_R * S + step_R
    return block * (H * P * S * W) + row_R[:, None] * W + column_C[None, :]


@triton.jit
def word_weights(head_first, its_R, column_C, P: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr):
    """Of the words of (head, part) pairs; 0 beyond the row."""
    head_R = (head_first + its_R // P).to(tl.uint64)
    pair_R = (head_R << 32) + ((its_R % P).to(tl.uint64) << 24) + _SALT_WORD
    word_RC = mix(pair_R[:, None] + column_C.to(tl.uint64)[None, :])
    if W % COLUMNS:
        word_RC = tl.where((column_C < W)[None, :], word_RC, 0)
    return word_RC


@triton.jit
def first_unit(program, num_programs, group, num_units):
    """Of a program in a group of `num_units` tiles, after so many such groups: tile t of all is t mod the programs'.

    Computed, not carried from group to group: Triton (to 3.7.1) takes what only bounds a loop for dead, and drops it.
    """
    num_before = group % num_programs * (num_units % num_programs) % num_programs
    return (program + num_programs - num_before) % num_programs


# Specialized code is compiled for each kind of value: heads differ by rank, words by slot, and the first transfer must
# not wait for it.
_NARROW = ["from_head", "to_head", "num_layers", "first", "count", "head_first", "num_heads"]
PLAIN = [*_NARROW, "completion", "sequence"]


@triton.jit(do_not_specialize=PLAIN)
def move_kernel(
    from_address: tl.int64,
    from_blocks,
    from_head: tl.int32,
    to_address: tl.int64,
    to_blocks,
    to_head: tl.int32,
    layers,
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
    COPY: tl.constexpr,
    DIGEST: tl.constexpr,
) -> None:
    """Tiles of PAIRS (head, part) pairs x UNIT positions x COLUMNS words; tile t goes to program t mod their number.

    A row of `layers` is a layer's number and where it begins in either pool, in words, an even number.
    """
    num_programs = tl.num_programs(0)
    num_units = (first + count + UNIT - 1) // UNIT - first // UNIT
    num_groups = (num_heads * P + PAIRS - 1) // PAIRS * ((W + COLUMNS - 1) // COLUMNS)
    from_pool = tl.multiple_of(from_address.to(tl.pointer_type(tl.int64)), 16)
    to_pool = tl.multiple_of(to_address.to(tl.pointer_type(tl.int64)), 16)
    pair_R = tl.arange(0, PAIRS * UNIT) // UNIT
    step_R = tl.arange(0, PAIRS * UNIT) % UNIT
    program = tl.program_id(0)
    for index in range(num_layers):
        layer = tl.load(layers + index * _LAYER_COLUMNS)
        from_base = from_pool + tl.multiple_of(tl.load(layers + index * _LAYER_COLUMNS + 1), 2)
        to_base = to_pool + tl.multiple_of(tl.load(layers + index * _LAYER_COLUMNS + 2), 2)
        total_RC = tl.zeros([PAIRS * UNIT, COLUMNS], dtype=tl.int64)
        for group in range(num_groups):
            its_R = group // ((W + COLUMNS - 1) // COLUMNS) * PAIRS + pair_R
            column_C = group % ((W + COLUMNS - 1) // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
            sum_RC = tl.zeros([PAIRS * UNIT, COLUMNS], dtype=tl.int64)
            start = first_unit(program, num_programs, index * num_groups + group, num_units)
            for unit in range(start, num_units, num_programs):
                position = (first // UNIT + unit) * UNIT
                mask_R = (position + step_R >= first) & (position + step_R < first + count) & (its_R < num_heads * P)
                mask_RC = mask_R[:, None] & (column_C < W)[None, :] if W % COLUMNS else mask_R[:, None]
                at_RC = offsets(from_blocks, position, from_head, its_R, step_R, column_C, FROM_H, FROM_S, P, W)
                words_RC = tl.load(from_base + at_RC, mask=mask_RC, other=0)
                if COPY:
                    at_RC = offsets(to_blocks, position, to_head, its_R, step_R, column_C, TO_H, TO_S, P, W)
                    tl.store(to_base + at_RC, words_RC, mask=mask_RC)
                if DIGEST:
                    low_R = tl.load(weights + (position % _PERIOD + step_R), mask=mask_R, other=0)
                    sum_RC += (words_RC + 1) * (low_R * tl.load(weights + (_PERIOD + position // _PERIOD)))[:, None]
            if DIGEST:
                total_RC += sum_RC * word_weights(head_first, its_R, column_C, P, W, COLUMNS)
        if DIGEST:
            layer_weight = mix(layer.to(tl.uint64) + _SALT_LAYER)
            tl.atomic_add(sums + 1 + index, tl.sum(total_RC) * layer_weight, sem="relaxed")
    complete(sums, completion, sequence, num_layers)


@triton.jit
def complete(sums, completion, sequence, num_layers) -> None:
    """Count this program as done; the last one hands the digests out, says so, and leaves the sums at zero."""
    # The stores of all threads come before the barrier, the release of one thread after it: so the program that
    # acquires the count, and any reader of the word written then, see them; "sys", as that may be the host or a peer.
    tl.debug_barrier()
    num_done = tl.atomic_add(sums, 1, sem="acq_rel", scope="sys")
    if num_done == tl.num_programs(0) - 1:
        words = completion.to(tl.pointer_type(tl.int64))
        for index in range(num_layers):
            tl.store(words + 1 + index, tl.atomic_xchg(sums + 1 + index, 0, sem="relaxed"))
        tl.atomic_xchg(sums, 0, sem="relaxed")
        if _INTERPRETED:
            tl.store(words, sequence)
        else:
            tl.inline_asm_elementwise(_PUBLISH, "=r,l,l", [completion, sequence], dtype=tl.int32, is_pure=False, pack=1)


launch_move = Launcher(move_kernel)

POINTERS = {"from_blocks": "*i32", "to_blocks": "*i32", "layers": "*i64", "weights": "*i64", "sums": "*i64"}
_WIDE = ("from_address", "to_address")
TYPES = POINTERS | dict.fromkeys((*_WIDE, "completion", "sequence"), "i64") | dict.fromkeys(_NARROW, "i32")
ALIGNED = (*POINTERS, *_WIDE)
# Warps and words of a tile: those of `kernels.kv.scatter.Tuning` unless told otherwise, and smaller ones.
FORMS = ((16, 4096), (4, 1024), (8, 2048))


def shape_of(block_size: int, row_bytes: int, num_heads: int = 8) -> Any:
    """A layer's rows, as `kernels.kv.scatter.LayerShape`, for what is compiled ahead of time."""
    return SimpleNamespace(num_heads=num_heads, num_parts=2, rows_per_block=block_size, row_bytes=row_bytes)


def variants() -> list[Variant]:
    """What serving launches for heads of 128 in bfloat16: between pools, and the digest alone; and smaller tiles."""
    found = []
    shape = shape_of(16, 256)
    rows = [("kv_scatter", True, form) for form in FORMS] + [("kv_digest", False, FORMS[0])]
    for name, copy, (num_warps, words) in rows:
        constants = tile_of(shape, shape, 16, SimpleNamespace(tile_words=words, num_warps=num_warps))
        found.append(
            Variant(
                name=f"{name} S=16{'' if (num_warps, words) == FORMS[0] else f' w{num_warps}'}",
                kernel=move_kernel,
                types=TYPES,
                num_warps=constants.pop("num_warps"),
                constants=constants | {"COPY": copy, "DIGEST": True},
                aligned=ALIGNED,
                contains=("ATOMG",),
                max_registers=128,
                on_amd=False,  # the end is said by NVIDIA's instructions
            )
        )
    return found
