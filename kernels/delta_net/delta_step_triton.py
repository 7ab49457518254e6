# mypy: ignore-errors
"""A decode step of a gated delta net in one launch: convolution, recurrence and gated norm of a value head.

A program has one value head of one sequence, and its whole state in registers. The state is on its way while rows are
convolved, so a step takes about as long as the states take to be read. Rows after the end of a tile are not told from
others: the state is that of the tile the step begins in, and what came since, 15 rows of the open tile and those of the
step, is added to what a row sees of it. So there is one pass over the state, whatever number of rows it is for.

Programs of a key head's value heads convolve the same query and key; the first of them keeps both. Each has a number
behind the state of its own, which no other program reads: where it is behind, the program folds the tile before.

Bits depend on how many rows a step has: batch-invariant numerics take the rows one after the other.

Shapes: H key heads, K and V sizes of heads, G value heads of a key head, W taps, C rows of a tile, T rows of a step
(padded), X channels, RING rows of a ring, Y elements of a row of the recurrence's.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net.causal_conv_triton import softplus
from baton.kernels.delta_net.delta_chunk_triton import _convolved, _l2_normed
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.rows import UNSPECIALIZED, StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, TILE, tail_len
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

MAX_STATE = 128 * 128  # elements of a value head's state: more are no program's registers
_NUM_WARPS, _TOGETHER = 8, True
_OPTIONS = (("num_warps", _NUM_WARPS), ("maxnreg", 128))


@triton.jit
def _row(x_TX, its_T, t: tl.constexpr):
    return tl.sum(tl.where((its_T == t)[:, None], x_TX, 0.0), axis=0)


@triton.jit
def _of_state(state_KV, u_CV, x_K, weight_C, since, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
              TOGETHER: tl.constexpr):  # fmt: skip
    """What a row sees of the state and of the open tile, [V]."""
    if TOGETHER:
        # rows of the state are added up to a tile's first, so that one sum goes through all warps
        some_CV = tl.sum(tl.reshape(state_KV * x_K[:, None], [K // C, C, V]), axis=0)
        return tl.sum(some_CV * since + u_CV * weight_C[:, None], axis=0)
    else:
        return tl.sum(state_KV * x_K[:, None], axis=0) * since + tl.sum(u_CV * weight_C[:, None], axis=0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _step_kernel(
    query, key, value, z, b, a,
    weight, a_log, dt_bias, norm,
    ring, tail, state,
    positions, counts, slots,
    out,
    query_row, query_head, key_row, key_head, value_row, value_head, z_row, z_head, z_value, b_row, b_head, a_row,
    a_head, ring_slot, ring_head, tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32, num_rows: tl.int32, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    T: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, TOGETHER: tl.constexpr,
    AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    head, g = tl.program_id(0) // G, tl.program_id(0) % G
    X: tl.constexpr = 2 * K + G * V
    its_K, its_V, its_C, its_T = tl.arange(0, K), tl.arange(0, V), tl.arange(0, C), tl.arange(0, T)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    # strides are told in fours, so that it is known that the states can be read by 16 bytes
    state += (slot * state_slot + head * state_head) * 4
    folded = state + (G * K * V + g)
    at_KV = state + g * (K * V) + its_K[:, None] * V + its_V[None, :]
    # at position 0 the state is 0; rows that are not real read nothing
    is_read_KV = (first > 0) & (count > 0) & (its_K[:, None] >= 0) & (its_V[None, :] >= 0)
    state_KV = tl.load(at_KV, mask=is_read_KV, other=0.0)
    num_folded = tl.load(folded)
    row0 = sequence.to(tl.int64) * num_rows
    query += row0 * query_row + head * query_head
    key += row0 * key_row + head * key_head
    value += row0 * value_row + head * value_head + g * V
    z += row0 * z_row + head * z_head + g * z_value
    b += row0 * b_row + head * b_head + g
    a += row0 * a_row + head * a_head + g
    ring += slot * ring_slot + head * ring_head
    tail += slot * tail_slot + head * tail_head
    weight += head * X * W
    of: tl.constexpr = 2 * K
    of_value = of + g * V
    tile = first // C
    position_C = tile * C + its_C
    is_old_C = (position_C < first) & (count > 0)
    old_C = tail + position_C % RING * Y
    key_CK = tl.load(old_C[:, None] + its_K[None, :], mask=is_old_C[:, None], other=0.0)
    u_CV = tl.load(old_C[:, None] + (K + g * V) + its_V[None, :], mask=is_old_C[:, None], other=0.0)
    sum_C = tl.load(old_C + (K + G * V) + g, mask=is_old_C, other=0.0)
    is_T = its_T < count
    b_T = tl.load(b + its_T * b_row, mask=is_T, other=0.0).to(tl.float32)
    a_T = tl.load(a + its_T * a_row, mask=is_T, other=0.0).to(tl.float32)
    a_T += tl.load(dt_bias + head * G + g)
    rate = -tl.exp(tl.load(a_log + head * G + g))
    z_TV = tl.load(z + its_T[:, None] * z_row + its_V[None, :], mask=is_T[:, None], other=0.0).to(tl.float32)
    query_TK = _convolved(query, query_row, ring, weight, its_T, first, is_T, its_K, X, W, CONV_RING)
    key_TK = _convolved(key, key_row, ring + K, weight + K * W, its_T, first, is_T, its_K, X, W, CONV_RING)
    value_TV = _convolved(
        value, value_row, ring + of_value, weight + of_value * W, its_T, first, is_T, its_V, X, W, CONV_RING
    )
    query_TK = _l2_normed(query_TK) * (1.0 / K**0.5)
    key_TK = _l2_normed(key_TK)
    decay_T = tl.where(is_T, rate * softplus(a_T), 0.0)
    beta_T = 1.0 / (1.0 + tl.exp(-b_T))
    old_sum = tl.sum(sum_C, axis=0)
    sum_C = tl.cumsum(sum_C, 0)
    sum_T = old_sum + tl.cumsum(decay_T, 0)
    # what was never written may be no number, and is behind nothing
    is_behind = (first > 0) & (count > 0) & (num_folded < tile.to(tl.float32))
    if is_behind:
        before_C = tail + (position_C - C) % RING * Y
        weight_C = tl.cumsum(tl.load(before_C + (K + G * V) + g), 0)
        last = tl.sum(tl.where(its_C == C - 1, weight_C, 0.0), axis=0)
        weight_C = tl.exp(tl.minimum(last - weight_C, 0.0))
        state_KV = state_KV * tl.exp(last)
        for at in range(C):
            one = tail + (tile * C - C + at) % RING * Y
            u_V = tl.load(one + (K + g * V) + its_V) * tl.sum(tl.where(its_C == at, weight_C, 0.0), axis=0)
            state_KV += tl.load(one + its_K)[:, None] * u_V[None, :]
    if is_behind | ((first == 0) & (count > 0)):
        tl.store(at_KV, state_KV)
    if AT_ONCE:
        # keys and queries at once; rows of the state are added up to a tile's first, so that one sum is of all warps
        both_TK2 = tl.join(key_TK, query_TK)
        found_TV, out_TV = tl.zeros([T, V], tl.float32), tl.zeros([T, V], tl.float32)
        met_TT, seen_TT = tl.zeros([T, T], tl.float32), tl.zeros([T, T], tl.float32)
        for t in range(count):
            is_T1 = (its_T == t)[:, None]
            total = tl.sum(tl.where(its_T == t, sum_T, 0.0), axis=0)
            since = tl.exp(total)
            apart_C = tl.exp(tl.minimum(total - sum_C, 0.0))
            key_K, query_K = tl.split(tl.sum(tl.where(is_T1[:, :, None], both_TK2, 0.0), axis=0))
            met_C = apart_C * tl.sum(key_CK * key_K[None, :], axis=1)
            seen_C = apart_C * tl.sum(key_CK * query_K[None, :], axis=1)
            met_T = tl.sum(key_TK * key_K[None, :], axis=1)
            seen_T = tl.sum(key_TK * query_K[None, :], axis=1)
            key_CV = tl.sum(tl.reshape(state_KV * key_K[:, None], [K // C, C, V]), axis=0)
            query_CV = tl.sum(tl.reshape(state_KV * query_K[:, None], [K // C, C, V]), axis=0)
            key_CV = key_CV * since + u_CV * met_C[:, None]
            query_CV = query_CV * since + u_CV * seen_C[:, None]
            found_V, out_V = tl.split(tl.sum(tl.join(key_CV, query_CV), axis=0))
            found_TV += tl.where(is_T1, found_V[None, :], 0.0)
            out_TV += tl.where(is_T1, out_V[None, :], 0.0)
            met_TT += tl.where(is_T1, met_T[None, :], 0.0)
            seen_TT += tl.where(is_T1, seen_T[None, :], 0.0)
        apart_TT = tl.exp(tl.minimum(sum_T[:, None] - sum_T[None, :], 0.0))
        met_TT = tl.where(its_T[:, None] > its_T[None, :], beta_T[:, None] * met_TT * apart_TT, 0.0)
        seen_TT = tl.where(its_T[:, None] >= its_T[None, :], seen_TT * apart_TT, 0.0)
        u_TV = beta_T[:, None] * (value_TV - found_TV)
        for t in range(count):
            # the row is solved: it is taken from those that follow
            u_V = tl.sum(tl.where((its_T == t)[:, None], u_TV, 0.0), axis=0)
            met_T = tl.sum(tl.where((its_T == t)[None, :], met_TT, 0.0), axis=1)
            seen_T = tl.sum(tl.where((its_T == t)[None, :], seen_TT, 0.0), axis=1)
            u_TV -= met_T[:, None] * u_V[None, :]
            out_TV += seen_T[:, None] * u_V[None, :]
    else:
        u_TV = tl.zeros([T, V], tl.float32)
        out_TV = tl.zeros([T, V], tl.float32)
        for t in tl.static_range(T):
            key_K, query_K = _row(key_TK, its_T, t), _row(query_TK, its_T, t)
            total = tl.sum(tl.where(its_T == t, sum_T, 0.0), axis=0)
            beta = tl.sum(tl.where(its_T == t, beta_T, 0.0), axis=0)
            since = tl.exp(total)
            apart_C = tl.exp(tl.minimum(total - sum_C, 0.0))
            apart_T = tl.exp(tl.minimum(total - sum_T, 0.0))
            met_C = apart_C * tl.sum(key_CK * key_K[None, :], axis=1)
            seen_C = apart_C * tl.sum(key_CK * query_K[None, :], axis=1)
            seen_T = tl.where(its_T <= t, apart_T * tl.sum(key_TK * query_K[None, :], axis=1), 0.0)
            found_V = _of_state(state_KV, u_CV, key_K, met_C, since, K, V, C, TOGETHER)
            out_V = _of_state(state_KV, u_CV, query_K, seen_C, since, K, V, C, TOGETHER)
            if t > 0:
                met_T = tl.where(its_T < t, apart_T * tl.sum(key_TK * key_K[None, :], axis=1), 0.0)
                found_V += tl.sum(u_TV * met_T[:, None], axis=0)
            u_V = beta * (_row(value_TV, its_T, t) - found_V)
            u_TV = tl.where((its_T == t)[:, None], u_V[None, :], u_TV)
            out_V += tl.sum(u_TV * seen_T[:, None], axis=0)
            out_TV = tl.where((its_T == t)[:, None], out_V[None, :], out_TV)
    out_TV = out_TV * tl.rsqrt(tl.sum(out_TV * out_TV, axis=1) / V + eps)[:, None] * tl.load(norm + its_V)[None, :]
    out_TV = out_TV * (z_TV / (1.0 + tl.exp(-z_TV)))
    out_TV = tl.where(is_T[:, None], out_TV, 0.0)
    out += ((row0 + its_T) * (H * G) + tl.program_id(0)) * V
    tl.store(out[:, None] + its_V[None, :], out_TV.to(out.dtype.element_ty), mask=(its_T < num_rows)[:, None])
    kept_T = tail + (first + its_T) % RING * Y
    tl.store(kept_T[:, None] + (K + g * V) + its_V[None, :], u_TV, mask=is_T[:, None])
    tl.store(kept_T + (K + G * V) + g, decay_T, mask=is_T)
    to_TX = ring + (first + its_T)[:, None] % CONV_RING * X
    own_TV = tl.load(value + its_T[:, None] * value_row + its_V[None, :], mask=is_T[:, None])
    tl.store(to_TX + of_value + its_V[None, :], own_TV, mask=is_T[:, None])
    is_first_T = is_T & (g == 0)
    tl.store(kept_T[:, None] + its_K[None, :], key_TK, mask=is_first_T[:, None])
    own_TK = tl.load(query + its_T[:, None] * query_row + its_K[None, :], mask=is_first_T[:, None])
    tl.store(to_TX + its_K[None, :], own_TK, mask=is_first_T[:, None])
    own_TK = tl.load(key + its_T[:, None] * key_row + its_K[None, :], mask=is_first_T[:, None])
    tl.store(to_TX + K + its_K[None, :], own_TK, mask=is_first_T[:, None])
    # every thread reads the number, and one may be ahead of another: none writes before all have read
    tl.debug_barrier()
    if count > 0:
        tl.store(folded, tile.to(tl.float32))


_launch_step = Launcher(_step_kernel)


def _constants_of(sizes: tuple[int, ...], num_rows: int, together: bool, at_once: bool) -> dict[str, object]:
    """The constants of a launch but `EARLY`; sizes are H, K, V, G, W, and of the rings."""
    names = ("H", "K", "V", "G", "W", "CONV_RING", "RING", "Y")
    padded = max(triton.next_power_of_2(num_rows), 2) if at_once else triton.next_power_of_2(num_rows)
    form = {"TOGETHER": together, "AT_ONCE": at_once}
    return dict(zip(names, sizes, strict=True)) | {"C": TILE, "T": padded} | form


@functools.lru_cache(maxsize=256)
def _constants(
    sizes: tuple[int, ...],
    num_rows: int,
    device: torch.device,
    options: tuple[tuple[str, int], ...],
    together: bool,
    at_once: bool,
) -> Constants:
    return Constants(_constants_of(sizes, num_rows, together, at_once) | dict(options) | dependent_launch(device))


def launch(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    conv_NHRX: torch.Tensor,
    kept: DeltaState,
    rows: StateRows,
    out_TX: torch.Tensor,
    eps: float,
    *,
    options: tuple[tuple[str, int], ...] = _OPTIONS,
    together: bool = _TOGETHER,
    at_once: bool | None = None,
) -> None:
    """Outputs of decode rows behind the gated norm; see `delta_layer`, which has checked the arguments.

    Args:
        inputs: query [T, H, K], key [T, H, K], value [T, H, G V], z [T, H, G, V], b and a [T, H, G].
        weights: the convolution's [H, X, W], a_log and dt_bias [H, G], the norm's [V].
        conv_NHRX: the ring; read and written.
        kept: read and written.
        rows: where they stand; of decode rows.
        out_TX: [T, H G V] in the dtype of the inputs, written, all of it.
        eps: of the norm.
        options: of the launch.
        together: see `_of_state`.
        at_once: rows are solved behind a loop over all of them; None: of more than one row.
    """
    num_heads, num_values = weights[1].shape
    key_dim, value_dim = inputs[0].shape[2], inputs[3].shape[3]
    tail_NHRY, state_NHZ = kept.tail_NHRY, kept.state_NHZ
    sizes = (
        num_heads, key_dim, value_dim, num_values, weights[0].shape[2], conv_NHRX.shape[2], *tail_NHRY.shape[2:]
    )  # fmt: skip
    where = rows.positions_B, rows.counts_B, rows.slots_B
    query, key, value, z, b, a = inputs
    strides = (*(x.stride()[:2] for x in (query, key, value)), z.stride()[:3], b.stride()[:2], a.stride()[:2])
    arguments = (
        *inputs, *weights, conv_NHRX, tail_NHRY, state_NHZ, *where, out_TX,
        *(stride for some in strides for stride in some),
        *conv_NHRX.stride()[:2], *tail_NHRY.stride()[:2], *(stride // 4 for stride in state_NHZ.stride()[:2]),
        *(x.stride(0) for x in where), rows.num_rows, eps,
    )  # fmt: skip
    at_once = rows.num_rows > 1 if at_once is None else at_once
    constants = _constants(sizes, rows.num_rows, out_TX.device, options, together, at_once)
    _launch_step((num_heads * num_values, len(rows.positions_B)), arguments, constants)


def variants() -> list[Variant]:
    """Of the models that are measured, at one rank: 16 key heads of 128, with one, two or four value heads each."""
    types = dict.fromkeys(("query", "key", "value", "z", "b", "a", "ring", "out"), "*bf16")
    types |= dict.fromkeys(("weight", "a_log", "dt_bias", "norm", "tail", "state"), "*fp32")
    types |= dict.fromkeys(("positions", "counts", "slots"), "*i64") | {"eps": "fp32"}
    aligned = (
        "query",
        "key",
        "value",
        "z",
        "weight",
        "norm",
        "ring",
        "tail",
        "state",
        "out",
        "query_row",
        "query_head",
    )
    aligned += (
        "key_row",
        "key_head",
        "value_row",
        "value_head",
        "z_row",
        "z_head",
        "z_value",
        "ring_slot",
        "ring_head",
    )
    aligned += ("tail_slot", "tail_head")
    found = []
    for num_values, num_rows, early in ((1, 1, True), (2, 1, True), (4, 1, True), (2, 8, True), (2, 1, False)):
        sizes = 16, 128, 128, num_values, 4, CONV_RING, RING, tail_len(128, 128, num_values)
        constants = _constants_of(sizes, num_rows, _TOGETHER, num_rows > 1) | {"EARLY": early}
        variant = Variant(
            name=f"delta_step G={num_values} T={num_rows}{'' if early else ' late'}",
            kernel=_step_kernel,
            types={name: types.get(name, "i32") for name in _step_kernel.arg_names if name not in constants},
            constants=constants,
            aligned=aligned,
            num_warps=_NUM_WARPS,
            max_registers=128,
            max_shared_bytes=65_536,
            on_amd=not early,
        )
        found.append(variant)
    return found
