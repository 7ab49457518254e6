# mypy: ignore-errors
"""Causal attention of chunks of prompts over paged KV: the Triton kernel of `kernels.attention.prefill`.

A program owns BM rows of one KV head: (query, head of the group) pairs of one sequence, so that any group size fills
the tile and K and V are read once for the whole group. It walks over tiles of BN positions from the last that its rows
see down to position 0; only the first of them need a mask. Tiles begin at multiples of BN and a tile that a row does
not see changes nothing of it, bit for bit, so a row's result depends neither on its chunk nor on what lies beside it.

Positions past the last row's are read at that row's place instead: nothing beyond is touched, and no load is masked.

Float8 is widened to float16, which holds every value of it, and so are the queries.

Two forms. The plain one multiplies, weighs, multiplies. The overlapped one issues the scores of the next tile before it
weighs those of this one, so that tensor cores and exponentials work at the same time; what it takes for the compiler to
leave them asynchronous is said where it is done.

The grid is a bound that the host knows: sequence b has the tiles from starts[b] * G // BM + b on, which leaves at least
as many as it needs before those of b + 1; the rest end at once. Later tiles, which see more, come first.

Shapes: R rows of a tile (BM), N positions of a tile (BN), D head size, B sequences.
"""

# mypy: ignore-errors

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.attention.block_tables import in_words
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

SEARCHED = 256  # sequences that are looked at together

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_tile(starts, num_sequences, tile, G: tl.constexpr, BM: tl.constexpr, SEARCHED: tl.constexpr):
    """The sequence that has this tile of the launch, and the first of its rows."""
    sequence = -1
    for first in range(0, num_sequences, SEARCHED):
        index_B = first + tl.arange(0, SEARCHED)
        start_B = tl.load(starts + index_B, mask=index_B < num_sequences, other=0)
        begins_B = (start_B * G // BM + index_B <= tile) & (index_B < num_sequences)
        sequence += tl.sum(begins_B.to(tl.int32))
    start = tl.load(starts + sequence)
    return sequence, start, (tile - (start * G // BM + sequence)) * BM


@triton.jit
def _places(
    start, query_len, first_row, head, stride, head_stride, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Where the rows of a tile lie, [R, D], and which of them there are, [R, 1]."""
    row_R = first_row + tl.arange(0, BM)
    at_R = (start + row_R // G).to(tl.int64) * stride + (head * G + row_R % G) * head_stride
    return at_R[:, None] + tl.arange(0, D)[None, :], (row_R < query_len * G)[:, None]


@triton.jit
def _blocks(table, tile, index_N, BN: tl.constexpr, S: tl.constexpr, WORDS: tl.constexpr):
    """The block of each of these places of a tile of positions: the low word of an entry."""
    return tl.load(table + (tile * (BN // S) + index_N // S) * WORDS)


@triton.jit
def _load_tile(pool, block_N, index_N, block_stride, ROW: tl.constexpr, S: tl.constexpr, D: tl.constexpr, kind):
    """K or V at places of a tile of positions, [N, D], in the dtype of the queries."""
    at_N = block_N.to(tl.int64) * block_stride + (index_N % S) * ROW  # one instruction: 32 bits by 32
    return tl.load(pool + at_N[:, None] + tl.arange(0, D)[None, :]).to(kind)


@triton.jit
def _scale(score_RN, factor, PLAIN: tl.constexpr):
    """Scores times the factor, rounded: not to be folded into what is subtracted next.

    The overlapped form needs values of its own here: the registers of the scores are the target of the next matmul.
    """
    if PLAIN:
        return score_RN * factor
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [score_RN, tl.zeros_like(score_RN) + factor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _weigh(scaled_RN, maximum_R, total_R, mixed_RD):
    """One step of the online softmax, base 2; a row that has seen nothing yet stays at zero."""
    new_R = tl.maximum(maximum_R, tl.max(scaled_RN, axis=1))
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
    weight_RN = tl.exp2(scaled_RN - base_R[:, None])
    shrink_R = tl.exp2(maximum_R - base_R)
    total_R = tl.fma(total_R, shrink_R, tl.sum(weight_RN, axis=1))
    return weight_RN, new_R, total_R, mixed_RD * shrink_R[:, None]


@triton.jit
def _walk(
    query_RD, keys, values, table, block_stride, position_R, last, high, low, factor, maximum_R, total_R, mixed_RD,
    BN: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Tiles `high` down to `low`, one matmul after the other."""
    kind = query_RD.dtype
    index_N = tl.arange(0, BN)
    for step in tl.range(0, high - low + 1):
        tile = high - step
        read_N = tl.minimum(index_N, last - tile * BN) if MASKED else index_N
        block_N = _blocks(table, tile, read_N, BN, S, WORDS)
        key_ND = _load_tile(keys, block_N, read_N, block_stride, ROW, S, D, kind)
        scaled_RN = _scale(tl.dot(query_RD, key_ND.T), factor, PLAIN)
        if MASKED:
            scaled_RN = tl.where(index_N[None, :] <= (position_R - tile * BN)[:, None], scaled_RN, float("-inf"))
        weight_RN, maximum_R, total_R, mixed_RD = _weigh(scaled_RN, maximum_R, total_R, mixed_RD)
        value_ND = _load_tile(values, block_N, read_N, block_stride, ROW, S, D, kind)
        mixed_RD = tl.dot(weight_RN.to(kind), value_ND, mixed_RD)
    return maximum_R, total_R, mixed_RD


@triton.jit
def _walk_overlapped(
    query_RD, keys, values, table, block_stride, high, factor, maximum_R, total_R, mixed_RD,
    BM: tl.constexpr, BN: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WORDS: tl.constexpr,
    AHEAD: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Tiles `high` down to 0, all seen by all rows; the P V matmul of a tile comes one step late.

    In a step: V of the tile before (waited for, so that the scores of this tile, issued in the last step, are there
    too), the scores of the next tile (not waited for), the weights of this one. The compiler leaves the scores under
    way if nothing but the loop's end uses them, and the registers in place if the old ones are dead: hence `_scale`.
    AHEAD reads the block table one step before K and V, which lets more than one step's copies be under way.
    """
    kind = query_RD.dtype
    index_N = tl.arange(0, BN)
    score_RN = tl.zeros([BM, BN], tl.float32)
    block_N = _blocks(table, high, index_N, BN, S, WORDS)
    if high >= 0:  # always; without it the compiler keeps these keys in shared memory until the loop has ended
        key_ND = _load_tile(keys, block_N, index_N, block_stride, ROW, S, D, kind)
        score_RN = tl.dot(query_RD, key_ND.T)
    weight_RN = tl.zeros([BM, BN], kind)
    if AHEAD:
        next_value_N = block_N
        next_key_N = _blocks(table, tl.maximum(high - 1, 0), index_N, BN, S, WORDS)
    for step in tl.range(0, high + 1):
        tile = high - step
        # The first step has no weights yet and multiplies zeros by V; the last step's scores are not used.
        if AHEAD:
            value_N = next_value_N
            key_N = next_key_N
            next_value_N = _blocks(table, tile, index_N, BN, S, WORDS)
            next_key_N = _blocks(table, tl.maximum(tile - 2, 0), index_N, BN, S, WORDS)
        else:
            value_N = _blocks(table, tl.minimum(tile + 1, high), index_N, BN, S, WORDS)
        value_ND = _load_tile(values, value_N, index_N, block_stride, ROW, S, D, kind)
        mixed_RD = tl.dot(weight_RN, value_ND, mixed_RD)
        scaled_RN = _scale(score_RN, factor, PLAIN)
        if not AHEAD:
            key_N = _blocks(table, tl.maximum(tile - 1, 0), index_N, BN, S, WORDS)
        key_ND = _load_tile(keys, key_N, index_N, block_stride, ROW, S, D, kind)
        score_RN = tl.dot(query_RD, key_ND.T)
        wide_RN, maximum_R, total_R, mixed_RD = _weigh(scaled_RN, maximum_R, total_R, mixed_RD)
        weight_RN = wide_RN.to(kind)
    value_ND = _load_tile(values, _blocks(table, 0, index_N, BN, S, WORDS), index_N, block_stride, ROW, S, D, kind)
    return maximum_R, total_R, tl.dot(weight_RN, value_ND, mixed_RD)


@triton.jit(
    do_not_specialize=[
        "key_scale", "value_scale", "starts", "contexts", "table_stride", "num_sequences", "scale", "scale_stride",
    ]
)  # fmt: skip
def _prefill_kernel(
    query, keys, values, key_scale, value_scale, output, tables, starts, contexts,
    query_stride, query_head_stride, output_stride, output_head_stride, block_stride, head_stride,
    table_stride: tl.int32, num_sequences: tl.int32, scale: tl.float32, scale_stride: tl.int32,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr,
    SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr,
    SEARCHED: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of rows of one KV head; specialized on the strides of a model, never on what a step changes."""
    head = tl.program_id(0) % H
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // H
    sequence, start, first_row = _find_tile(starts, num_sequences, tile, G, BM, SEARCHED)
    query_len = tl.load(starts + sequence + 1) - start
    if first_row >= query_len * G:
        return
    first_position = tl.load(contexts + sequence) - query_len
    at_RD, is_row_R1 = _places(start, query_len, first_row, head, query_stride, query_head_stride, G, D, BM)
    query_RD = tl.load(query + at_RD, mask=is_row_R1, other=0.0)
    if keys.dtype.element_ty == tl.float8e4nv:
        # float8 becomes float16 by one instruction for two, bfloat16 by three more that are as slow as exponentials.
        query_RD = query_RD.to(tl.float16)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += head * head_stride
    values += head * head_stride
    factor = scale * _LOG2_E
    if SCALES:
        factor *= tl.load(key_scale + head * scale_stride)
    position_R = first_position + (first_row + tl.arange(0, BM)) // G
    last = first_position + (tl.minimum(first_row + BM, query_len * G) - 1) // G
    num_full = (first_position + first_row // G + 1) // BN  # tiles that all rows see to their ends
    maximum_R = tl.full([BM], float("-inf"), tl.float32)
    total_R = tl.zeros([BM], tl.float32)
    mixed_RD = tl.zeros([BM, D], tl.float32)
    plain: tl.constexpr = _INTERPRETED or not OVERLAP
    maximum_R, total_R, mixed_RD = _walk(
        query_RD, keys, values, table, block_stride, position_R, last, last // BN, num_full, factor,
        maximum_R, total_R, mixed_RD, BN, ROW, S, D, WORDS, True, plain,
    )  # fmt: skip
    if OVERLAP:
        if num_full > 0:
            maximum_R, total_R, mixed_RD = _walk_overlapped(
                query_RD, keys, values, table, block_stride, num_full - 1, factor,
                maximum_R, total_R, mixed_RD, BM, BN, ROW, S, D, WORDS, AHEAD, plain,
            )  # fmt: skip
    else:
        maximum_R, total_R, mixed_RD = _walk(
            query_RD, keys, values, table, block_stride, position_R, last, num_full - 1, 0, factor,
            maximum_R, total_R, mixed_RD, BN, ROW, S, D, WORDS, False, plain,
        )  # fmt: skip
    mixed_RD = mixed_RD / total_R[:, None]
    if SCALES:
        mixed_RD *= tl.load(value_scale + head * scale_stride)
    # Loaded again, for registers are short: what the places follow from need not be kept while the tiles are walked.
    start = tl.load(starts + sequence)
    query_len = tl.load(starts + sequence + 1) - start
    first_row = (tile - (start * G // BM + sequence)) * BM
    at_RD, is_row_R1 = _places(start, query_len, first_row, head, output_stride, output_head_stride, G, D, BM)
    tl.store(output + at_RD, mixed_RD.to(output.dtype.element_ty), mask=is_row_R1)


def rule(num_rows: int, head_dim: int, num_bytes: int) -> dict[str, Any]:
    """Options for what no table has; `num_rows` is the most that a sequence has for one KV head."""
    if num_rows <= 64 or (head_dim > 128 and num_bytes == 1):
        wide = head_dim > 128
        return {
            "BM": 64,
            "BN": 64,
            "OVERLAP": False,
            "AHEAD": False,
            "num_warps": 8 if wide else 4,
            "num_stages": 2 if wide else 3,
        }
    keys = 128 if head_dim <= 128 and num_bytes == 2 else 64
    return {"BM": 128, "BN": keys, "OVERLAP": True, "AHEAD": False, "num_warps": 8, "num_stages": 2}


def launch(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    output_TAD: torch.Tensor,
    *,
    scale: float,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """Write the output's rows; all arguments were checked. Grid and constants follow from shapes alone."""
    num_tokens, num_heads, head_dim = query_TAD.shape
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    group, num_sequences = num_heads // num_kv_heads, block_tables_BM.shape[0]
    with_scales = key_scale is not None
    tables = in_words(block_tables_BM)
    block_stride, head_stride, row_stride, _ = key_NHSD.stride()
    num_tiles = num_tokens * group // options["BM"] + num_sequences
    arguments = (
        query_TAD,
        key_NHSD,
        value_NHSD,
        key_scale if with_scales else context_lens_B,  # not read
        value_scale if with_scales else context_lens_B,
        output_TAD,
        tables,
        query_starts_E,
        context_lens_B,
        query_TAD.stride(0),
        query_TAD.stride(1),
        output_TAD.stride(0),
        output_TAD.stride(1),
        block_stride,
        head_stride,
        tables.stride(0),
        num_sequences,
        scale,
        int(with_scales and key_scale.shape[0] > 1),
    )
    shape = num_kv_heads, group, head_dim, block_size, row_stride, block_tables_BM.element_size() // 4, with_scales
    constants = _constants(*shape, *options.items())
    with torch.cuda.device_of(query_TAD):
        _launch_prefill((num_tiles * num_kv_heads,), arguments, constants)


@functools.lru_cache(maxsize=256)
def _constants(
    num_kv_heads: int, group: int, head_dim: int, block_size: int, row_stride: int, words: int, with_scales: bool,
    *options: tuple[str, Any],
) -> Constants:  # fmt: skip
    shape = {"H": num_kv_heads, "G": group, "D": head_dim, "S": block_size, "ROW": row_stride}
    return Constants(shape | {"WORDS": words, "SCALES": with_scales, "SEARCHED": SEARCHED, **dict(options)})


_launch_prefill = Launcher(_prefill_kernel)


# What serving launches: query heads, KV heads, head size, bytes of a stored value, positions of a block.
_SERVED = ((32, 8, 128, 2, 16), (32, 8, 128, 2, 64), (32, 4, 128, 2, 16), (16, 2, 256, 2, 16), (32, 8, 128, 1, 16))


def _variant(
    num_heads: int, num_kv_heads: int, head_dim: int, num_bytes: int, block_size: int, options: Mapping[str, Any]
) -> Variant:
    pool = "*bf16" if num_bytes == 2 else "*fp8e4nv"
    types = dict.fromkeys(("query", "output"), "*bf16") | dict.fromkeys(("keys", "values"), pool)
    types |= dict.fromkeys(("key_scale", "value_scale"), "*i32" if num_bytes == 2 else "*fp32")
    types |= {"tables": "*i32", "starts": "*i32", "contexts": "*i32", "scale": "fp32"}
    strides = (
        "query_stride",
        "query_head_stride",
        "output_stride",
        "output_head_stride",
        "block_stride",
        "head_stride",
    )
    types |= dict.fromkeys((*strides, "table_stride", "num_sequences", "scale_stride"), "i32")
    constants = {name: options[name] for name in ("BM", "BN", "OVERLAP", "AHEAD")}
    constants |= {
        "WORDS": 2,
        "H": num_kv_heads,
        "G": num_heads // num_kv_heads,
        "D": head_dim,
        "S": block_size,
        "ROW": head_dim,
    }
    words = [word for word in ("OVERLAP", "AHEAD") if options[word]]
    tile = " ".join([f"{options['BM']}x{options['BN']}", *words]).lower()
    kind = f"{'fp8 ' if num_bytes == 1 else ''}S={block_size}"
    return Variant(
        name=f"attention_prefill {num_heads}/{num_kv_heads}/{head_dim} {kind} {tile} w{options['num_warps']} "
        f"s{options['num_stages']}",
        kernel=_prefill_kernel,
        types=types,
        constants={**constants, "SCALES": num_bytes == 1, "SEARCHED": SEARCHED},
        # The lengths of a batch on the host come as views of one tensor, so not all that is there is aligned.
        aligned=("query", "keys", "values", "output", "tables", *strides),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        contains=("HGMMA", "LDGSTS"),
        lacks=("HMMA",),
        on_amd=not options["OVERLAP"],  # which is made of one instruction of PTX
    )


def variants() -> list[Variant]:
    """Of each served shape all options that the rule and the tuned table have, each once."""
    found: dict[str, Variant] = {}
    for num_heads, num_kv_heads, head_dim, num_bytes, block_size in _SERVED:
        tuned = tuning.table().get("attention_prefill", {})
        rows = tuned.get(f"{num_heads // num_kv_heads}x{head_dim}x{8 * num_bytes}", {}).values()
        rows = [options for options in rows if "OVERLAP" in options]  # the others are of the form for Hopper
        for options in rows or [rule(num_rows, head_dim, num_bytes) for num_rows in (64, 8192)]:
            variant = _variant(num_heads, num_kv_heads, head_dim, num_bytes, block_size, options)
            found[variant.name] = variant
    return list(found.values())
