# mypy: ignore-errors
"""The gated delta net's recurrence in Triton, row by row, and the gated norm behind it.

A program has BV columns of one value head's state in registers, in float32, and goes through the rows of its sequence.
A row needs the state at the last multiple of 16 and the k, u and g of the tile's rows before it; where a row begins
another tile, the tile before it is folded into the state. There is one place in the code that folds and one that
computes a row, in a loop whose length is no constant, and a tile's arrays have a fixed shape with zeros for what is
absent: so a row has the same bits in a chunk of any length, alone and beside drafts. What a step begins from is found
out by the launch before (`causal_conv_triton`).

Who writes what another program reads: a state's columns and u's belong to one program. k and g of a row are read by all
programs of a key head, those of the tile that a step begins in and of the one before it. Decode rows are 8 at most, so
that a tile that ended is folded by a step that begins within the next 8 positions and ends before it would come round
the ring of 32 to the rows of that tile; their k and g are written at once. Rows of a chunk may come round: their k and
g are written by a launch of its own, behind this one.

Shapes: K and V sizes of heads, G value heads of a key head, C rows of a tile, BV columns of a program.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net.causal_conv_triton import BEHIND, NONE, STORED
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import TILE
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_COLUMNS = 32  # of a program
_NORM_ROWS = 8  # of a program of the norm


@triton.jit
def _stored(tail, tile, first, g, its_C, its_K, its_B, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
            C: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr):  # fmt: skip
    """k [C, K], u [C, BV] and g [C] of a tile's rows before `first`; of others, zeros."""
    position_C = tile * C + its_C
    is_there_C = (position_C < first) & (position_C >= 0)
    at_C = tail + (position_C + RING) % RING * Y
    key_CK = tl.load(at_C[:, None] + its_K[None, :], mask=is_there_C[:, None], other=0.0)
    u_CB = tl.load(at_C[:, None] + (K + g * V) + its_B[None, :], mask=is_there_C[:, None], other=0.0)
    decay_C = tl.load(at_C + (K + G * V) + g, mask=is_there_C, other=0.0)
    return key_CK, u_CB, decay_C


@triton.jit(do_not_specialize=["num_rows", "is_chunk"])
def _delta_kernel(
    made, gates, begun, tail, state, positions, counts, slots, out,
    tail_slot, tail_head, state_slot, state_head, position_stride, count_stride, slot_stride,
    num_rows: tl.int32, is_chunk: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    RING: tl.constexpr, Y: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    CUTS: tl.constexpr = V // BV
    X: tl.constexpr = 2 * K + G * V
    sequence = tl.program_id(1)
    value_head, cut = tl.program_id(0) // CUTS, tl.program_id(0) % CUTS
    head, g = value_head // G, value_head % G
    its_C, its_K, its_B = tl.arange(0, C), tl.arange(0, K), cut * BV + tl.arange(0, BV)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    how = tl.load(begun + sequence * H + head)
    row0 = sequence.to(tl.int64) * num_rows
    made += (row0 * H + head) * X
    gates += (row0 * H + head) * 2 * G + g
    out += (row0 * H * G + value_head) * V
    tail += slot * tail_slot + head * tail_head
    state += slot * state_slot + head * state_head + g * K * V
    at_KB = state + its_K[:, None] * V + its_B[None, :]
    is_read_KB = (how != NONE) & (its_K[:, None] >= 0) & (its_B[None, :] >= 0)
    # rows that are not real read nothing
    state_KB = tl.load(at_KB, mask=is_read_KB & (count > 0), other=0.0)
    tile = first // C - (how == BEHIND).to(tl.int64)
    known = tl.where(count > 0, first, 0)
    key_CK, u_CB, decay_C = _stored(tail, tile, known, g, its_C, its_K, its_B, K, V, G, C, RING, Y)
    # a chunk's last turn has no row: it folds the tile that may have ended with it
    for row in range(0, tl.where((is_chunk != 0) & (count > 0), count + 1, count)):
        position = first + row
        if position // C != tile:
            sum_C = tl.cumsum(decay_C, 0)
            last = tl.sum(tl.where(its_C == C - 1, sum_C, 0.0), axis=0)
            weight_C = tl.exp(tl.minimum(last - sum_C, 0.0))
            added_KB = tl.dot(tl.trans(key_CK * weight_C[:, None]), u_CB, input_precision="ieee")
            state_KB = state_KB * tl.exp(last) + added_KB
            tile += 1
            key_CK, u_CB, decay_C = _stored(tail, tile, first, g, its_C, its_K, its_B, K, V, G, C, RING, Y)
        # of decode rows, it is not known yet which stay: the state is kept where the first stands
        if (row == 0) & (how != STORED) & (is_chunk == 0):
            tl.store(at_KB, state_KB)
        if row < count:
            at = (position % C).to(tl.int32)
            query_K = tl.load(made + row * H * X + its_K)
            key_K = tl.load(made + row * H * X + K + its_K)
            value_B = tl.load(made + row * H * X + 2 * K + g * V + its_B)
            decay = tl.load(gates + row * H * 2 * G)
            beta = tl.load(gates + row * H * 2 * G + G)
            is_row_C1 = (its_C == at)[:, None]
            key_CK = tl.where(is_row_C1, key_K[None, :], key_CK)
            decay_C = tl.where(its_C == at, decay, decay_C)
            sum_C = tl.cumsum(decay_C, 0)
            total = tl.sum(tl.where(its_C == at, sum_C, 0.0), axis=0)
            since = tl.exp(total)
            apart_C = tl.exp(tl.minimum(total - sum_C, 0.0))
            met_C = tl.where(its_C < at, tl.sum(key_CK * key_K[None, :], axis=1) * apart_C, 0.0)
            seen_C = tl.where(its_C <= at, tl.sum(key_CK * query_K[None, :], axis=1) * apart_C, 0.0)
            found_B = tl.sum(state_KB * key_K[:, None], axis=0) * since + tl.sum(u_CB * met_C[:, None], axis=0)
            u_B = beta * (value_B - found_B)
            u_CB = tl.where(is_row_C1, u_B[None, :], u_CB)
            out_B = tl.sum(state_KB * query_K[:, None], axis=0) * since + tl.sum(u_CB * seen_C[:, None], axis=0)
            tl.store(out + row * (H * G * V) + its_B, out_B)
            # of a chunk, what is in the state is not read again
            if (is_chunk == 0) | (position >= (first + count) // C * C):
                to = tail + position % RING * Y
                tl.store(to + (K + g * V) + its_B, u_B)
                if (cut == 0) & (is_chunk == 0):
                    tl.store(to + (K + G * V) + g, decay)
                    if g == 0:
                        tl.store(to + its_K, key_K)
    if (is_chunk != 0) & (count > 0):
        tl.store(at_KB, state_KB)
    for row in range(count, num_rows):
        tl.store(out + row * (H * G * V) + its_B, tl.zeros([BV], tl.float32))


@triton.jit(do_not_specialize=["num_rows"])
def _keep_kernel(
    made, gates, tail, positions, counts, slots,
    tail_slot, tail_head, position_stride, count_stride, slot_stride, num_rows: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, C: tl.constexpr,
    RING: tl.constexpr, Y: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """k and g of the rows of a chunk's open tile to the ring."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    X: tl.constexpr = 2 * K + G * V
    its_K, its_G = tl.arange(0, K), tl.arange(0, GP)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    row0 = sequence.to(tl.int64) * num_rows
    tail += slot * tail_slot + head * tail_head
    begin = tl.maximum((first + count) // C * C - first, 0).to(tl.int32)
    for row in range(begin, count):
        to = tail + (first + row) % RING * Y
        at = (row0 + row) * H + head
        tl.store(to + its_K, tl.load(made + at * X + K + its_K))
        decay_G = tl.load(gates + at * 2 * G + its_G, mask=its_G < G)
        tl.store(to + (K + G * V) + its_G, decay_G, mask=its_G < G)


@triton.jit(do_not_specialize=["num_all"])
def _norm_kernel(
    x, z, weight, out, z_row, z_head, z_value, eps, num_all: tl.int32,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """N rows of x / rms(x) * w * silu(z), rounded once; rows are value heads of tokens."""
    its_N, its_V = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, V)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_NV = (its_N < num_all)[:, None] & (its_V >= 0)[None, :]
    at_N = its_N // (H * G) * z_row + its_N // G % H * z_head + its_N % G * z_value
    x_NV = tl.load(x + its_N[:, None] * V + its_V[None, :], mask=is_NV, other=0.0)
    z_NV = tl.load(z + at_N[:, None] + its_V[None, :], mask=is_NV, other=0.0).to(tl.float32)
    scale_N = tl.rsqrt(tl.sum(x_NV * x_NV, axis=1) / V + eps)
    x_NV = x_NV * scale_N[:, None] * tl.load(weight + its_V)[None, :]
    x_NV = x_NV * (z_NV / (1.0 + tl.exp(-z_NV)))
    tl.store(out + its_N[:, None] * V + its_V[None, :], x_NV.to(out.dtype.element_ty), mask=is_NV)


_launch_delta = Launcher(_delta_kernel)
_launch_keep = Launcher(_keep_kernel)
_launch_norm = Launcher(_norm_kernel)


def constants_of(num_heads: int, key_dim: int, value_dim: int, num_values: int, ring: int, row: int) -> dict[str, Any]:
    """What the kernels that read and write the ring have in common."""
    return {
        "H": num_heads,
        "K": key_dim,
        "V": value_dim,
        "G": num_values,
        "C": TILE,
        "RING": ring,
        "Y": row,
    }


@functools.lru_cache(maxsize=256)
def _constants(sizes: tuple[int, ...], device: torch.device) -> tuple[Constants, Constants]:
    """Of the recurrence, and of the launch that keeps k and g of chunks."""
    common = constants_of(*sizes) | dependent_launch(device)
    delta = common | {"BV": min(_COLUMNS, sizes[2]), "num_warps": 4}
    return Constants(delta), Constants(common | {"GP": triton.next_power_of_2(sizes[3]), "num_warps": 1})


@functools.lru_cache(maxsize=256)
def _norm_constants(sizes: tuple[int, int, int], device: torch.device) -> Constants:
    by_name = dict(zip("HGV", sizes, strict=True)) | {"N": _NORM_ROWS, "num_warps": 4}
    return Constants(by_name | dependent_launch(device))


def launch(
    made: tuple[torch.Tensor, torch.Tensor],
    begun_BH: torch.Tensor,
    kept: DeltaState,
    rows: StateRows,
    out_THGV: torch.Tensor,
    key_dim: int,
) -> None:
    """Outputs of the rows, float32; see `delta_layer`, which has checked the arguments.

    Args:
        made: q, k and v side by side, [T, H, X], and g and beta, [T, H, 2, G], float32.
        begun_BH: how each state is begun, as `causal_conv_triton` says.
        kept: read and written, but for the number behind a state.
        rows: where they stand.
        out_THGV: written, all of it.
        key_dim: K.
    """
    tail_NHRY, state_NHZ = kept.tail_NHRY, kept.state_NHZ
    _, num_heads, num_values, value_dim = out_THGV.shape
    sizes = num_heads, key_dim, value_dim, num_values, *tail_NHRY.shape[2:]
    delta, keep = _constants(sizes, out_THGV.device)
    where = rows.positions_B, rows.counts_B, rows.slots_B
    strides = tuple(x.stride(0) for x in where)
    is_chunk = rows.start is not None
    arguments = (
        *made, begun_BH, tail_NHRY, state_NHZ, *where, out_THGV,
        *tail_NHRY.stride()[:2], *state_NHZ.stride()[:2], *strides, rows.num_rows, int(is_chunk),
    )  # fmt: skip
    num_programs = num_heads * num_values * (value_dim // delta.by_name["BV"])
    _launch_delta((num_programs, len(rows.positions_B)), arguments, delta)
    if is_chunk:
        arguments = (*made, tail_NHRY, *where, *tail_NHRY.stride()[:2], *strides, rows.num_rows)
        _launch_keep((len(rows.positions_B), num_heads), arguments, keep)


def launch_norm(out_THGV: torch.Tensor, z_THGV: torch.Tensor, norm_V: torch.Tensor, eps: float) -> torch.Tensor:
    """The gated norm, [T, H G V] in the dtype of `z`; of float32 outputs, contiguous."""
    num_tokens, num_heads, num_values, value_dim = out_THGV.shape
    length = num_heads * num_values * value_dim
    rows_TX = torch.empty(num_tokens, length, dtype=z_THGV.dtype, device=z_THGV.device)
    num_all = num_tokens * num_heads * num_values
    arguments = (out_THGV, z_THGV, norm_V, rows_TX, *z_THGV.stride()[:3], eps, num_all)
    constants = _norm_constants((num_heads, num_values, value_dim), z_THGV.device)
    _launch_norm((-(-num_all // _NORM_ROWS),), arguments, constants)
    return rows_TX


def variants() -> list[Variant]:
    """Of the models that are measured, at one rank: 16 key heads of 128, with one, two or four value heads each."""
    found = []
    types = {"made": "*fp32", "gates": "*fp32", "begun": "*i32", "tail": "*fp32", "state": "*fp32"}
    types |= dict.fromkeys(("positions", "counts", "slots"), "*i64") | {"out": "*fp32"}
    strides = ["tail_slot", "tail_head", "state_slot", "state_head", "position_stride", "count_stride", "slot_stride"]
    delta_types = types | dict.fromkeys([*strides, "num_rows", "is_chunk"], "i32")
    names = ["made", "gates", "tail", "positions", "counts", "slots", *strides, "num_rows"]
    keep_types = {name: delta_types[name] for name in names if not name.startswith("state")}
    norm_types = {"x": "*fp32", "z": "*bf16", "weight": "*fp32", "out": "*bf16", "eps": "fp32", "num_all": "i32"}
    norm_types |= dict.fromkeys(("z_row", "z_head", "z_value"), "i32")
    for num_values, early in ((1, True), (2, True), (4, True), (2, False)):
        name = f"G={num_values}{'' if early else ' late'}"
        row = -(-(128 + num_values * 129) // 4) * 4
        common = constants_of(16, 128, 128, num_values, 2 * TILE, row) | {"EARLY": early}
        norm = {"H": 16, "G": num_values, "V": 128, "N": _NORM_ROWS, "EARLY": early}
        tail = ("made", "tail", "tail_slot", "tail_head")
        for kernel, its_types, constants, aligned, num_warps in (
            (_delta_kernel, delta_types, common | {"BV": _COLUMNS}, (*tail, "state", "out"), 4),
            (_keep_kernel, keep_types, common | {"GP": triton.next_power_of_2(num_values)}, tail, 1),
            (_norm_kernel, norm_types, norm, ("x", "z", "weight", "out", "z_row", "z_head", "z_value"), 4),
        ):
            what = {_delta_kernel: "delta_net", _keep_kernel: "delta_keep", _norm_kernel: "delta_norm"}[kernel]
            variant = Variant(
                name=f"{what} {name}",
                kernel=kernel,
                types=its_types,
                constants=constants,
                aligned=aligned,
                num_warps=num_warps,
                max_registers=200,
                max_shared_bytes=65_536,
                on_amd=not early,
            )
            found.append(variant)
    return found
