# mypy: ignore-errors
"""The gated delta net's recurrence in Triton, row by row, and the gated norm behind it.

A program has BV columns of one value head's state in registers, in float32, and goes through the rows of its sequence.
Of a row it needs q, k, v and the factors that `causal_conv_triton` made; u of the tile's rows it has in registers.
Where a row begins another tile, the tile before it is folded into the state. There is one place in the code that folds
and one that computes a row, in a loop whose length is no constant, and a tile's arrays have a fixed shape with zeros
for what is absent: so a row has the same bits in a chunk of any length, alone and beside drafts.

A program asks for its state and its u before it waits for the launch before, the convolution, which writes neither:
that waited for all launches that do, those of steps before, before it let this one begin.

A state's columns, and u's in the ring, belong to one program. k and g of tiles that are folded are read from the ring,
of rows before the step, and from what the launch before made, of its own; none is written here.

Shapes: H key heads, K and V sizes of heads, G value heads of a key head, C rows of a tile, BV columns of a program, F
factors of a row, RING rows of the ring, Y elements of one.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net.causal_conv_triton import BEHIND, FACTORS, STORED
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.rows import UNSPECIALIZED, StateRows
from baton.kernels.delta_net.sizes import RING, TILE, tail_len
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_COLUMNS, _NUM_WARPS = 32, 1  # of a program; measured: more warps wait for each other, more columns spill
_NORM_ROWS = 8  # of a program of the norm


@triton.jit
def _stored(tail_u, tile, first, its_C, its_B, C: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr):
    """U [C, BV] of a tile's rows before `first`; of others, zeros."""
    position_C = tile * C + its_C
    at_C = tail_u + (position_C + RING) % RING * Y
    is_there_C = (position_C < first) & (position_C >= 0)
    return tl.load(at_C[:, None] + its_B[None, :], mask=is_there_C[:, None], other=0.0)


@triton.jit
def _row_of(made, factors, of_value, row, count, its_C, its_K, its_B, H: tl.constexpr, K: tl.constexpr,
            G: tl.constexpr, C: tl.constexpr, F: tl.constexpr, X: tl.constexpr):  # fmt: skip
    """q, k, v, what is taken away and seen of each u, beta and what is left of the state; zeros behind the last."""
    its, of, is_row = made + row * (H * X), factors + row * (H * G * F), row < count
    query_K = tl.load(its + its_K, mask=is_row & (its_K >= 0), other=0.0)
    key_K = tl.load(its + K + its_K, mask=is_row & (its_K >= 0), other=0.0)
    value_B = tl.load(its + of_value + its_B, mask=is_row & (its_B >= 0), other=0.0)
    met_C = tl.load(of + its_C, mask=is_row & (its_C >= 0), other=0.0)
    seen_C = tl.load(of + C + its_C, mask=is_row & (its_C >= 0), other=0.0)
    beta = tl.load(of + (2 * C + 1), mask=is_row, other=0.0)
    since = tl.load(of + (2 * C + 2), mask=is_row, other=0.0)
    return query_K, key_K, value_B, met_C, seen_C, beta, since


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "is_chunk"])
def _delta_kernel(
    made, factors, begun, tail, state, positions, counts, slots, out,
    tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32,
    num_rows: tl.int32, is_chunk: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    CUTS: tl.constexpr = V // BV
    X: tl.constexpr = 2 * K + G * V
    sequence = tl.program_id(1)
    value_head, cut = tl.program_id(0) // CUTS, tl.program_id(0) % CUTS
    head, g = value_head // G, value_head % G
    its_C, its_K, its_B = tl.arange(0, C), tl.arange(0, K), cut * BV + tl.arange(0, BV)
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    row0 = sequence.to(tl.int64) * num_rows
    made += (row0 * H + head) * X
    factors += (row0 * H * G + value_head) * F
    out += (row0 * H * G + value_head) * V
    tail += slot * tail_slot + head * tail_head
    tail_u = tail + (K + g * V)
    # strides are told in fours, so that it is known that states can be read by 16 bytes
    state += (slot * state_slot + head * state_head) * 4 + g * K * V
    at_KB = state + its_K[:, None] * V + its_B[None, :]
    # at position 0 the state is 0; rows that are not real read nothing
    is_read_KB = (first > 0) & (count > 0) & (its_K[:, None] >= 0) & (its_B[None, :] >= 0)
    state_KB = tl.load(at_KB, mask=is_read_KB, other=0.0)
    tile = first // C
    u_CB = _stored(tail_u, tile, tl.where(count > 0, first, 0), its_C, its_B, C, RING, Y)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    how = tl.load(begun + sequence * H + head)
    query_K, key_K, value_B, met_C, seen_C, beta, since = _row_of(
        made, factors, 2 * K + g * V, 0, count, its_C, its_K, its_B, H, K, G, C, F, X
    )
    if how == BEHIND:
        tile -= 1
        u_CB = _stored(tail_u, tile, tl.where(count > 0, first, 0), its_C, its_B, C, RING, Y)
    # a chunk's last turn has no row: it folds the tile that may have ended with it
    for row in range(0, tl.where((is_chunk != 0) & (count > 0), count + 1, count)):
        position = first + row
        if position // C != tile:
            position_C = tile * C + its_C
            is_old_C = position_C < first
            old_C = tl.load(tail + position_C % RING * Y + (K + G * V) + g, mask=is_old_C, other=0.0)
            new_C = tl.load(factors + (position_C - first) * (H * G * F) + 2 * C, mask=~is_old_C, other=0.0)
            sum_C = tl.cumsum(tl.where(is_old_C, old_C, new_C), 0)
            last = tl.sum(tl.where(its_C == C - 1, sum_C, 0.0), axis=0)
            weight_C = tl.exp(tl.minimum(last - sum_C, 0.0))
            state_KB = state_KB * tl.exp(last)
            for at in range(C):
                of = tile * C + at
                is_old_K = (of < first) & (its_K >= 0)
                old_K = tl.load(tail + of % RING * Y + its_K, mask=is_old_K, other=0.0)
                new_K = tl.load(made + (of - first) * (H * X) + K + its_K, mask=~is_old_K, other=0.0)
                u_B = tl.sum(tl.where((its_C == at)[:, None], u_CB * weight_C[:, None], 0.0), axis=0)
                state_KB += tl.where(is_old_K, old_K, new_K)[:, None] * u_B[None, :]
            tile += 1
            u_CB = _stored(tail_u, tile, first, its_C, its_B, C, RING, Y)
        # of decode rows, it is not known yet which stay: the state is kept where the first stands
        if (row == 0) & (how != STORED) & (is_chunk == 0):
            tl.store(at_KB, state_KB)
        if row < count:
            met_B = tl.sum(u_CB * met_C[:, None], axis=0)
            u_B = beta * (value_B - tl.sum(state_KB * key_K[:, None], axis=0) * since) - met_B
            u_CB = tl.where((its_C == (position % C).to(tl.int32))[:, None], u_B[None, :], u_CB)
            out_B = tl.sum(state_KB * query_K[:, None], axis=0) * since + tl.sum(u_CB * seen_C[:, None], axis=0)
            tl.store(out + row * (H * G * V) + its_B, out_B)
            # of a chunk, what is in the state is not read again
            if (is_chunk == 0) | (position >= (first + count) // C * C):
                tl.store(tail_u + position % RING * Y + its_B, u_B)
            query_K, key_K, value_B, met_C, seen_C, beta, since = _row_of(
                made, factors, 2 * K + g * V, row + 1, count, its_C, its_K, its_B, H, K, G, C, F, X
            )
    if (is_chunk != 0) & (count > 0):
        tl.store(at_KB, state_KB)
    for row in range(count, num_rows):
        tl.store(out + row * (H * G * V) + its_B, tl.zeros([BV], tl.float32))


@triton.jit(do_not_specialize=["num_all"])
def _norm_kernel(
    x, z, weight, out, z_row, z_head, z_value, eps, num_all: tl.int32,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """N rows of x / rms(x) * w * silu(z), rounded once; rows are value heads of tokens.

    The weight, which a step has driven out of the cache, and z, which the projections made, are read before the wait.
    """
    its_N, its_V = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N), tl.arange(0, V)
    is_NV = (its_N < num_all)[:, None] & (its_V >= 0)[None, :]
    weight_V = tl.load(weight + its_V)
    at_N = its_N // (H * G) * z_row + its_N // G % H * z_head + its_N % G * z_value
    z_NV = tl.load(z + at_N[:, None] + its_V[None, :], mask=is_NV, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_NV = tl.load(x + its_N[:, None] * V + its_V[None, :], mask=is_NV, other=0.0)
    scale_N = tl.rsqrt(tl.sum(x_NV * x_NV, axis=1) / V + eps)
    x_NV = x_NV * scale_N[:, None] * weight_V[None, :]
    x_NV = x_NV * (z_NV / (1.0 + tl.exp(-z_NV)))
    tl.store(out + its_N[:, None] * V + its_V[None, :], x_NV.to(out.dtype.element_ty), mask=is_NV)


_launch_delta = Launcher(_delta_kernel)
_launch_norm = Launcher(_norm_kernel)


def constants_of(num_heads: int, key_dim: int, value_dim: int, num_values: int, ring: int, row: int) -> dict[str, Any]:
    """The constants of the recurrence but `BV` and `EARLY`."""
    return {
        "H": num_heads,
        "K": key_dim,
        "V": value_dim,
        "G": num_values,
        "C": TILE,
        "F": FACTORS,
        "RING": ring,
        "Y": row,
    }


@functools.lru_cache(maxsize=256)
def _constants(sizes: tuple[int, ...], device: torch.device, columns: int, num_warps: int) -> Constants:
    by_name = constants_of(*sizes) | {"BV": min(columns, sizes[2]), "num_warps": num_warps}
    return Constants(by_name | dependent_launch(device))


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
    *,
    columns: int = _COLUMNS,
    num_warps: int = _NUM_WARPS,
) -> None:
    """Outputs of the rows, float32; see `delta_layer`, which has checked the arguments.

    Args:
        made: q, k and v side by side, [T, H, X], and FACTORS, [T, H, G, F], float32.
        begun_BH: how each state is begun, as `causal_conv_triton` says.
        kept: read and written, but for the number behind a state.
        rows: where they stand.
        out_THGV: written, all of it.
        key_dim: K.
        columns: of a program; another number may give other bits.
        num_warps: of a program, the same.
    """
    tail_NHRY, state_NHZ = kept.tail_NHRY, kept.state_NHZ
    _, num_heads, num_values, value_dim = out_THGV.shape
    sizes = num_heads, key_dim, value_dim, num_values, *tail_NHRY.shape[2:]
    constants = _constants(sizes, out_THGV.device, columns, num_warps)
    where = rows.positions_B, rows.counts_B, rows.slots_B
    strides = tuple(x.stride(0) for x in where)
    arguments = (
        *made, begun_BH, tail_NHRY, state_NHZ, *where, out_THGV,
        *tail_NHRY.stride()[:2], *(stride // 4 for stride in state_NHZ.stride()[:2]), *strides,
        rows.num_rows, int(rows.start is not None),
    )  # fmt: skip
    num_programs = num_heads * num_values * (value_dim // constants.by_name["BV"])
    _launch_delta((num_programs, len(rows.positions_B)), arguments, constants)


def launch_norm(
    out_THGV: torch.Tensor, z_THGV: torch.Tensor, norm_V: torch.Tensor, eps: float, rows_TX: torch.Tensor
) -> None:
    """The gated norm, to rows [T, H G V] of the dtype of `z`; of float32 outputs, contiguous."""
    num_tokens, num_heads, num_values, value_dim = out_THGV.shape
    num_all = num_tokens * num_heads * num_values
    arguments = (out_THGV, z_THGV, norm_V, rows_TX, *z_THGV.stride()[:3], eps, num_all)
    constants = _norm_constants((num_heads, num_values, value_dim), z_THGV.device)
    _launch_norm((-(-num_all // _NORM_ROWS),), arguments, constants)


def variants() -> list[Variant]:
    """Of the models that are measured, at one rank: 16 key heads of 128, with one, two or four value heads each."""
    found = []
    types = {"made": "*fp32", "factors": "*fp32", "begun": "*i32", "tail": "*fp32", "state": "*fp32"}
    types |= dict.fromkeys(("positions", "counts", "slots"), "*i64") | {"out": "*fp32"}
    strides = ["tail_slot", "tail_head", "state_slot", "state_head", "position_stride", "count_stride", "slot_stride"]
    delta_types = types | dict.fromkeys([*strides, "num_rows", "is_chunk"], "i32")
    norm_types = {"x": "*fp32", "z": "*bf16", "weight": "*fp32", "out": "*bf16", "eps": "fp32", "num_all": "i32"}
    norm_types |= dict.fromkeys(("z_row", "z_head", "z_value"), "i32")
    for num_values, early in ((1, True), (2, True), (4, True), (2, False)):
        name = f"G={num_values}{'' if early else ' late'}"
        row = tail_len(128, 128, num_values)
        common = constants_of(16, 128, 128, num_values, RING, row) | {"EARLY": early}
        norm = {"H": 16, "G": num_values, "V": 128, "N": _NORM_ROWS, "EARLY": early}
        tail = ("made", "factors", "tail", "tail_slot", "tail_head")
        for kernel, its_types, constants, aligned, num_warps in (
            (_delta_kernel, delta_types, common | {"BV": _COLUMNS}, (*tail, "state", "out"), _NUM_WARPS),
            (_norm_kernel, norm_types, norm, ("x", "z", "weight", "out", "z_row", "z_head", "z_value"), 4),
        ):
            what = "delta_norm" if kernel is _norm_kernel else "delta_net"
            variant = Variant(
                name=f"{what} {name}",
                kernel=kernel,
                types=its_types,
                constants=constants,
                aligned=aligned,
                num_warps=num_warps,
                max_registers=240,
                max_shared_bytes=65_536,
                on_amd=not early,
            )
            found.append(variant)
    return found
