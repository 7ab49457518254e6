# mypy: ignore-errors
"""The gated delta net over a chunk of one prompt, by tiles of 16 absolute positions and products of matrices.

Two launches. The first has a program for each tile and key head, at once: it convolves the rows, and makes of a tile,
for each value head, factors in the form of `causal_conv_triton`, but that what takes u of earlier rows away from v is
solved already: u = T (beta (v - e^s S^T k)), T the inverse of I + tril(beta k k^T e^(s_i - s_j)), row by row, as the
powers of that matrix may be large where keys are alike. The second walks over the tiles with BV columns of a value
head's state in registers; of a tile it has no more than four products to wait for.

Rows of steps before have u from the ring, and rows of T that are the identity's. Bits depend on where a prompt is cut:
batch-invariant numerics take the walk row by row. The counter, the rings and what `begun` says are as in
`causal_conv_triton`; nothing that the second launch reads is written by it but u of its own columns, whose ring's rows
it has read in an earlier tile.

Source: Yang et al. 2024 (Gated DeltaNet), its chunk form.

Shapes: H key heads, K and V sizes of heads, G value heads of a key head, W taps, C rows of a tile, BV columns of a
program, F factors of a row, X channels, RING rows of a ring, Y elements of a row of the recurrence's.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net import causal_conv_triton, delta_net_triton
from baton.kernels.delta_net.causal_conv_triton import BEHIND, NONE, STORED, softplus
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.rows import UNSPECIALIZED, StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, TILE, tail_len
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_COLUMNS, _NUM_WARPS = 32, 4  # of a program of the walk
_TILE_NUM_WARPS = 2  # measured: more wait for each other in each row of T
_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _convolved(x, row_stride, ring, weight, row_C, first, is_C, its_X, X: tl.constexpr, W: tl.constexpr,
               RING: tl.constexpr):  # fmt: skip
    """Silu of the sum over the taps, [C, channels], in float32; zeros where a row is not of this chunk."""
    sum_CX = tl.zeros([row_C.shape[0], its_X.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        at_C = row_C - (W - 1) + tap
        is_own_C = is_C & (at_C >= 0)
        is_kept_C = is_C & (at_C < 0) & (first + at_C >= 0)
        own_CX = tl.load(x + at_C[:, None] * row_stride + its_X[None, :], mask=is_own_C[:, None], other=0.0)
        ring_C = (first + at_C + RING) % RING * X
        kept_CX = tl.load(ring + ring_C[:, None] + its_X[None, :], mask=is_kept_C[:, None], other=0.0)
        seen_CX = tl.where(is_own_C[:, None], own_CX, kept_CX).to(tl.float32)
        sum_CX += seen_CX * tl.load(weight + its_X * W + tap)[None, :]
    return sum_CX / (1.0 + tl.exp(-sum_CX))


@triton.jit
def _l2_normed(x_CK):
    return x_CK * tl.rsqrt(tl.sum(x_CK * x_CK, axis=1) + _L2_EPS)[:, None]


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "is_chunk"])
def _tile_kernel(
    query, key, value, b, a,
    weight, a_log, dt_bias,
    ring, tail, state,
    positions, counts, slots,
    made, factors, begun,
    query_row, query_head, key_row, key_head, value_row, value_head, b_row, b_head, a_row, a_head,
    ring_slot, ring_head, tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32,
    num_rows: tl.int32, is_chunk: tl.int32,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    X: tl.constexpr = 2 * K + G * V
    its_K, its_V, its_C = tl.arange(0, K), tl.arange(0, V), tl.arange(0, C)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    row0 = sequence.to(tl.int64) * num_rows
    query += row0 * query_row + head * query_head
    key += row0 * key_row + head * key_head
    value += row0 * value_row + head * value_head
    b += row0 * b_row + head * b_head
    a += row0 * a_row + head * a_head
    ring += slot * ring_slot + head * ring_head
    tail += slot * tail_slot + head * tail_head
    weight += head * X * W
    position_C = (first // C + part) * C + its_C
    row_C = position_C - first
    is_new_C = (row_C >= 0) & (row_C < count)
    is_old_C = (row_C < 0) & (count > 0)
    old_C = tail + position_C % RING * Y
    to_C = made + ((row0 + row_C) * num_heads + head) * X
    query_CK = _convolved(query, query_row, ring, weight, row_C, first, is_new_C, its_K, X, W, CONV_RING)
    query_CK = _l2_normed(query_CK) * (1.0 / K**0.5)
    tl.store(to_C[:, None] + its_K[None, :], query_CK, mask=is_new_C[:, None])
    key_CK = _convolved(key, key_row, ring + K, weight + K * W, row_C, first, is_new_C, its_K, X, W, CONV_RING)
    key_CK = _l2_normed(key_CK)
    tl.store(to_C[:, None] + K + its_K[None, :], key_CK, mask=is_new_C[:, None])
    old_CK = tl.load(old_C[:, None] + its_K[None, :], mask=is_old_C[:, None], other=0.0)
    key_CK = tl.where(is_old_C[:, None], old_CK, key_CK)
    met_CC = tl.dot(key_CK, tl.trans(key_CK), input_precision=PRECISION)
    seen_CC = tl.dot(query_CK, tl.trans(key_CK), input_precision=PRECISION)
    for g in tl.static_range(G):
        of = 2 * K + g * V
        value_CV = _convolved(
            value + g * V, value_row, ring + of, weight + of * W, row_C, first, is_new_C, its_V, X, W, CONV_RING
        )
        tl.store(to_C[:, None] + of + its_V[None, :], value_CV, mask=is_new_C[:, None])
        b_C = tl.load(b + row_C * b_row + g, mask=is_new_C, other=0.0).to(tl.float32)
        a_C = tl.load(a + row_C * a_row + g, mask=is_new_C, other=0.0).to(tl.float32)
        a_C += tl.load(dt_bias + head * G + g)
        decay_C = -tl.exp(tl.load(a_log + head * G + g)) * softplus(a_C)
        old_decay_C = tl.load(old_C + (K + G * V) + g, mask=is_old_C, other=0.0)
        decay_C = tl.where(is_new_C, decay_C, old_decay_C)
        beta_C = 1.0 / (1.0 + tl.exp(-b_C))
        sum_C = tl.cumsum(decay_C, 0)
        apart_CC = tl.exp(tl.minimum(sum_C[:, None] - sum_C[None, :], 0.0))
        is_below_CC = (its_C[:, None] > its_C[None, :]) & is_new_C[:, None]
        taken_CC = tl.where(is_below_CC, met_CC * apart_CC * beta_C[:, None], 0.0)
        solved_CC = tl.where(its_C[:, None] == its_C[None, :], 1.0, 0.0)
        by_CC = tl.trans(taken_CC)
        for at in range(1, C):
            # the row is of the identity yet; those above are solved
            taken_C = tl.sum(tl.where((its_C == at)[None, :], by_CC, 0.0), axis=1)
            row_solved_C = tl.sum(taken_C[:, None] * solved_CC, axis=0)
            solved_CC = tl.where((its_C == at)[:, None], solved_CC - row_solved_C[None, :], solved_CC)
        to_factors_C = factors + (((row0 + row_C) * num_heads + head) * G + g) * F
        to_CC = to_factors_C[:, None] + its_C[None, :]
        tl.store(to_CC, solved_CC, mask=is_new_C[:, None])
        seen_by_CC = tl.where(its_C[:, None] >= its_C[None, :], seen_CC * apart_CC, 0.0)
        tl.store(to_CC + C, seen_by_CC, mask=is_new_C[:, None])
        tl.store(to_factors_C + 2 * C, decay_C, mask=is_new_C)
        tl.store(to_factors_C + (2 * C + 1), beta_C, mask=is_new_C)
        tl.store(to_factors_C + (2 * C + 2), tl.exp(sum_C), mask=is_new_C)
    if part == 0:
        folded = state + slot * state_slot + head * state_head + G * K * V
        num_folded = tl.load(folded)
        found = tl.where(first == 0, NONE, tl.where(num_folded < (first // C).to(tl.float32), BEHIND, STORED))
        tl.store(begun + sequence * num_heads + head, found.to(tl.int32))
        # every thread reads, and one may be ahead of another: none writes before all have read
        tl.debug_barrier()
        if count > 0:
            tl.store(folded, ((first + count) // C).to(tl.float32))


@triton.jit
def _walked(
    made, factors, tail, tail_u, tail_g, out, state_KB, tile, first, count, its_C, its_K, its_B, of_value,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    RING: tl.constexpr, Y: tl.constexpr, PRECISION: tl.constexpr, OLD: tl.constexpr,
):  # fmt: skip
    """The state behind a tile, if it is whole, or before it; writes outputs, and u of a tile that is not whole."""
    X: tl.constexpr = 2 * K + G * V
    position_C = tile * C + its_C
    row_C = position_C - first
    is_new_C = (row_C >= 0) & (row_C < count)
    at_CK = made + (row_C * (H * X))[:, None] + its_K[None, :]
    query_CK = tl.load(at_CK, mask=is_new_C[:, None], other=0.0)
    key_CK = tl.load(at_CK + K, mask=is_new_C[:, None], other=0.0)
    value_CB = tl.load(made + (row_C * (H * X) + of_value)[:, None] + its_B[None, :], mask=is_new_C[:, None], other=0.0)
    of_C = factors + row_C * (H * G * F)
    solved_CC = tl.load(of_C[:, None] + its_C[None, :], mask=is_new_C[:, None], other=0.0)
    seen_CC = tl.load(of_C[:, None] + C + its_C[None, :], mask=is_new_C[:, None], other=0.0)
    decay_C = tl.load(of_C + 2 * C, mask=is_new_C, other=0.0)
    beta_C = tl.load(of_C + (2 * C + 1), mask=is_new_C, other=0.0)
    since_C = tl.load(of_C + (2 * C + 2), mask=is_new_C, other=0.0)
    ring_C = position_C % RING * Y
    is_old_C = row_C < 0
    if OLD:
        old_CK = tl.load(tail + ring_C[:, None] + its_K[None, :], mask=is_old_C[:, None], other=0.0)
        key_CK = tl.where(is_old_C[:, None], old_CK, key_CK)
        decay_C = tl.where(is_old_C, tl.load(tail_g + ring_C, mask=is_old_C, other=0.0), decay_C)
    left_CB = tl.dot(key_CK, state_KB, input_precision=PRECISION)
    left_CB = beta_C[:, None] * (value_CB - since_C[:, None] * left_CB)
    if OLD:
        old_CB = tl.load(tail_u + ring_C[:, None] + its_B[None, :], mask=is_old_C[:, None], other=0.0)
        left_CB = tl.where(is_old_C[:, None], old_CB, left_CB)
    u_CB = tl.dot(solved_CC, left_CB, input_precision=PRECISION)
    if OLD:
        u_CB = tl.where(is_old_C[:, None], old_CB, u_CB)
    out_CB = since_C[:, None] * tl.dot(query_CK, state_KB, input_precision=PRECISION)
    out_CB += tl.dot(seen_CC, u_CB, input_precision=PRECISION)
    tl.store(out + (row_C * (H * G * V))[:, None] + its_B[None, :], out_CB, mask=is_new_C[:, None])
    is_whole = (tile + 1) * C <= first + count
    tl.store(tail_u + ring_C[:, None] + its_B[None, :], u_CB, mask=is_new_C[:, None] & (is_whole == 0))
    sum_C = tl.cumsum(decay_C, 0)
    last = tl.sum(decay_C, axis=0)
    weighted_CK = key_CK * tl.exp(tl.minimum(last - sum_C, 0.0))[:, None]
    added_KB = tl.dot(tl.trans(weighted_CK), u_CB, input_precision=PRECISION)
    return tl.where(is_whole, state_KB * tl.exp(last) + added_KB, state_KB)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "is_chunk"])
def _walk_kernel(
    made, factors, begun, tail, state, positions, counts, slots, out,
    tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32,
    num_rows: tl.int32, is_chunk: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
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
    factors += (row0 * H * G + value_head) * F
    out += (row0 * H * G + value_head) * V
    tail += slot * tail_slot + head * tail_head
    tail_u = tail + (K + g * V)
    tail_g = tail + (K + G * V) + g
    # strides are told in fours, so that it is known that states can be read by 16 bytes
    state += (slot * state_slot + head * state_head) * 4 + g * K * V
    at_KB = state + its_K[:, None] * V + its_B[None, :]
    # at position 0 the state is 0; rows that are not real read nothing
    is_read_KB = (first > 0) & (count > 0) & (its_K[:, None] >= 0) & (its_B[None, :] >= 0)
    state_KB = tl.load(at_KB, mask=is_read_KB, other=0.0)
    begin = (first // C).to(tl.int32)
    stop = tl.where(count > 0, ((first + count + C - 1) // C).to(tl.int32), begin)
    # tiles that have rows of steps before: one that is behind, and the one that the chunk begins in
    old_begin = tl.where(how == BEHIND, begin - 1, begin)
    old_stop = tl.where(first % C == 0, begin, begin + 1)
    for tile in range(old_begin, tl.minimum(old_stop, stop)):
        state_KB = _walked(
            made, factors, tail, tail_u, tail_g, out, state_KB, tile, first, count, its_C, its_K, its_B, 2 * K + g * V,
            H, K, V, G, C, F, RING, Y, PRECISION, True,
        )  # fmt: skip
    for tile in range(old_stop, stop):
        state_KB = _walked(
            made, factors, tail, tail_u, tail_g, out, state_KB, tile, first, count, its_C, its_K, its_B, 2 * K + g * V,
            H, K, V, G, C, F, RING, Y, PRECISION, False,
        )  # fmt: skip
    if count > 0:
        tl.store(at_KB, state_KB)
    for row in range(count, num_rows):
        tl.store(out + row * (H * G * V) + its_B, tl.zeros([BV], tl.float32))


_launch_tiles = Launcher(_tile_kernel)
_launch_walk = Launcher(_walk_kernel)


@functools.lru_cache(maxsize=256)
def _constants(
    sizes: tuple[int, ...], num_heads: int, device: torch.device, precision: str, columns: int, num_warps: int
) -> tuple[Constants, Constants]:
    """Of both kernels."""
    key_dim, value_dim, num_values, _, _, ring, row = sizes
    common = dependent_launch(device) | {"PRECISION": precision}
    tiles = causal_conv_triton.constants_of(*sizes) | {"num_warps": _TILE_NUM_WARPS}
    walk = delta_net_triton.constants_of(num_heads, key_dim, value_dim, num_values, ring, row)
    walk |= {"BV": min(columns, value_dim), "num_warps": num_warps}
    return Constants(tiles | common), Constants(walk | common)


def _precision(dtype: torch.dtype) -> str:
    """Of the products: what a model's dtype is worth."""
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def launch(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    conv_NHRX: torch.Tensor,
    kept: DeltaState,
    rows: StateRows,
    outputs: tuple[torch.Tensor, torch.Tensor],
    out_THGV: torch.Tensor,
    *,
    columns: int = _COLUMNS,
    num_warps: int = _NUM_WARPS,
) -> None:
    """Outputs of a chunk's rows, float32, and its state; `launch_keep` of `causal_conv_triton` keeps its rings.

    Args:
        inputs: of `causal_conv_triton.launch`; also `weights`, `conv_NHRX`, `kept`, `rows` and `outputs`.
        weights: the same.
        conv_NHRX: read.
        kept: the state is written, and u of the tile that stays open.
        rows: of a chunk.
        outputs: what the launches tell each other; factors have T in place of what is taken away.
        out_THGV: written, all of it.
        columns: of a program of the walk.
        num_warps: of a program of the walk.
    """
    assert rows.start is not None
    _, num_heads, num_values, value_dim = out_THGV.shape
    num_sequences = len(rows.positions_B)
    begun_BH = torch.empty(num_sequences, num_heads, dtype=torch.int32, device=conv_NHRX.device)
    tail_NHRY, state_NHZ = kept.tail_NHRY, kept.state_NHZ
    sizes = (
        inputs[0].shape[2], value_dim, num_values, weights[0].shape[2], conv_NHRX.shape[2], *tail_NHRY.shape[2:]
    )  # fmt: skip
    of_tiles, of_walk = _constants(
        sizes, num_heads, out_THGV.device, _precision(inputs[0].dtype), columns, num_warps
    )  # fmt: skip
    where = rows.positions_B, rows.counts_B, rows.slots_B
    strides = tuple(x.stride(0) for x in where)
    arguments = (
        *inputs, *weights, conv_NHRX, tail_NHRY, state_NHZ, *where, *outputs, begun_BH,
        *(stride for x in inputs for stride in x.stride()[:2]),
        *conv_NHRX.stride()[:2], *tail_NHRY.stride()[:2], *state_NHZ.stride()[:2], *strides, rows.num_rows, 1,
    )  # fmt: skip
    num_tiles = -(-(rows.start % TILE + rows.num_rows) // TILE)
    _launch_tiles((num_sequences, num_heads, num_tiles), arguments, of_tiles)
    arguments = (
        *outputs, begun_BH, tail_NHRY, state_NHZ, *where, out_THGV,
        *tail_NHRY.stride()[:2], *(stride // 4 for stride in state_NHZ.stride()[:2]), *strides, rows.num_rows, 1,
    )  # fmt: skip
    num_programs = num_heads * num_values * (value_dim // of_walk.by_name["BV"])
    _launch_walk((num_programs, num_sequences), arguments, of_walk)


def variants() -> list[Variant]:
    """Of the models that are measured, in bfloat16: one, two or four value heads of a key head; and in float32."""
    types = dict.fromkeys(("query", "key", "value", "b", "a", "ring"), "*bf16")
    types |= dict.fromkeys(("weight", "a_log", "dt_bias", "tail", "state", "made", "factors", "out"), "*fp32")
    types |= dict.fromkeys(("positions", "counts", "slots"), "*i64") | {"begun": "*i32"}
    aligned = ("query", "key", "value", "ring", "tail", "made", "factors", "query_row", "query_head", "key_row")
    aligned += ("key_head", "value_row", "value_head", "ring_slot", "ring_head", "tail_slot", "tail_head", "weight")
    found = []
    for num_values, early, precision in (
        (1, True, "tf32"), (2, True, "tf32"), (4, True, "tf32"), (2, False, "ieee"), (2, True, "tf32x3")
    ):  # fmt: skip
        row = tail_len(128, 128, num_values)
        common = {"EARLY": early, "PRECISION": precision}
        tiles = causal_conv_triton.constants_of(128, 128, num_values, 4, CONV_RING, RING, row)
        walk = delta_net_triton.constants_of(16, 128, 128, num_values, RING, row) | {"BV": _COLUMNS}
        for name, kernel, constants, its_aligned, num_warps in (
            ("delta_tiles", _tile_kernel, tiles, (*aligned, "state"), _TILE_NUM_WARPS),
            (
                "delta_walk",
                _walk_kernel,
                walk,
                ("made", "factors", "tail", "state", "out", "tail_slot", "tail_head"),
                _NUM_WARPS,
            ),
        ):
            its_types = {arg: types.get(arg, "i32") for arg in kernel.arg_names if arg not in constants | common}
            if precision == "tf32x3":
                its_types |= {arg: "*fp32" for arg, kind in its_types.items() if kind == "*bf16"}
            variant = Variant(
                name=f"{name} G={num_values}{'' if early else ' late'} {precision}",
                kernel=kernel,
                types=its_types,
                constants=constants | common,
                aligned=its_aligned,
                num_warps=num_warps,
                max_registers=255,
                max_shared_bytes=131_072,
                may_spill=True,
                on_amd=not early,
            )
            found.append(variant)
    return found
