# mypy: ignore-errors
"""The convolution in Triton, with what `delta_rows` makes of it, and how a step finds the states that it begins from.

A program does ROWS rows of one key head of one sequence. Only the first of a sequence reads the ring, since ROWS is at
least the taps before a row, so it alone writes the ring, when it has read all that it reads: no launch writes what
another of its programs may still read.

The same program looks at the number behind the state, which says how many tiles are in it, tells the recurrence by
`begun` what it finds there, and writes the number that holds after the step. So the recurrence, where many programs
share that number, neither reads nor writes it. `begun` is STORED: the state is that of the tile the step begins in;
BEHIND: the tile before it is to be folded first; NONE: the sequence begins.

A row is computed by itself, one after the other, by code in which nothing depends on how many there are.

Shapes: K and V sizes of heads, G value heads of a key head (GP padded), W taps, RING rows of the ring.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import TILE
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

ROWS = 4  # of a program; at least MAX_TAPS - 1
STORED, BEHIND, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_L2_EPS = tl.constexpr(1e-6)
_SOFTPLUS_LINEAR = tl.constexpr(20.0)  # from here on softplus is its argument


@triton.jit
def _convolved(x, row_stride, ring, weight, row, first, its_C, X: tl.constexpr, W: tl.constexpr, RING: tl.constexpr):
    """silu of the sum over the taps, in float32, of the channels C that the pointers begin at."""
    sum_C = tl.zeros(its_C.shape, tl.float32)
    for tap in tl.static_range(W):
        at = row - (W - 1) + tap
        position = first + at
        is_own_C = (at >= 0) & (its_C >= 0)
        is_kept_C = (at < 0) & (position >= 0) & (its_C >= 0)
        own_C = tl.load(x + at * row_stride + its_C, mask=is_own_C, other=0.0)
        kept_C = tl.load(ring + (position + RING) % RING * X + its_C, mask=is_kept_C, other=0.0)
        seen_C = tl.where(is_own_C, own_C, kept_C).to(tl.float32)
        sum_C += seen_C * tl.load(weight + its_C * W + tap)
    return sum_C / (1.0 + tl.exp(-sum_C))


@triton.jit
def _keep(x, row_stride, ring, row, first, its_C, X: tl.constexpr, RING: tl.constexpr):
    tl.store(ring + (first + row) % RING * X + its_C, tl.load(x + row * row_stride + its_C))


@triton.jit
def _l2_normed(x_K):
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, axis=0) + _L2_EPS)


@triton.jit(do_not_specialize=["num_rows", "is_chunk"])
def _conv_kernel(
    query, key, value, b, a,
    weight, a_log, dt_bias,
    ring, state,
    positions, counts, slots,
    made, gates, begun,
    query_row, query_head, key_row, key_head, value_row, value_head, b_row, b_head, a_row, a_head,
    ring_slot, ring_head, state_slot, state_head,
    position_stride, count_stride, slot_stride,
    num_rows: tl.int32, is_chunk: tl.int32,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    X: tl.constexpr = 2 * K + G * V
    its_K, its_V, its_G = tl.arange(0, K), tl.arange(0, V), tl.arange(0, GP)
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
    weight += head * X * W
    is_G = its_G < G
    rate_G = -tl.exp(tl.load(a_log + head * G + its_G, mask=is_G, other=0.0))
    bias_G = tl.load(dt_bias + head * G + its_G, mask=is_G, other=0.0)
    for row in range(part * ROWS, tl.minimum(part * ROWS + ROWS, count)):
        to = made + ((row0 + row) * num_heads + head) * X
        query_K = _convolved(query, query_row, ring, weight, row, first, its_K, X, W, RING)
        tl.store(to + its_K, _l2_normed(query_K) * (1.0 / K**0.5))
        key_K = _convolved(key, key_row, ring + K, weight + K * W, row, first, its_K, X, W, RING)
        tl.store(to + K + its_K, _l2_normed(key_K))
        for g in tl.static_range(G):
            at = 2 * K + g * V
            value_V = _convolved(value + g * V, value_row, ring + at, weight + at * W, row, first, its_V, X, W, RING)
            tl.store(to + at + its_V, value_V)
        b_G = tl.load(b + row * b_row + its_G, mask=is_G, other=0.0).to(tl.float32)
        a_G = tl.load(a + row * a_row + its_G, mask=is_G, other=0.0).to(tl.float32) + bias_G
        small_G = tl.exp(tl.minimum(a_G, _SOFTPLUS_LINEAR))
        more_G = 1.0 + small_G
        # log(1 + x) without losing x: the quotient undoes what rounding 1 + x did
        over_G = tl.where(more_G == 1.0, 1.0, more_G - 1.0)
        soft_G = tl.where(more_G == 1.0, small_G, tl.log(more_G) * (small_G / over_G))
        soft_G = tl.where(a_G > _SOFTPLUS_LINEAR, a_G, soft_G)
        to_gates = gates + ((row0 + row) * num_heads + head) * 2 * G
        tl.store(to_gates + its_G, rate_G * soft_G, mask=is_G)
        tl.store(to_gates + G + its_G, 1.0 / (1.0 + tl.exp(-b_G)), mask=is_G)
    if part == 0:
        folded = state + slot * state_slot + head * state_head + G * K * V
        num_folded = tl.load(folded)
        wanted = first // TILE
        # what was never written may be no number, and is behind nothing
        found = tl.where(first == 0, NONE, tl.where(num_folded < wanted.to(tl.float32), BEHIND, STORED))
        tl.store(begun + sequence * num_heads + head, found.to(tl.int32))
        # every thread reads, and one may be ahead of another: none writes before all have read
        tl.debug_barrier()
        if count > 0:
            after = tl.where(is_chunk != 0, (first + count) // TILE, wanted)
            tl.store(folded, after.to(tl.float32))
        # of a chunk, whose rows all stay, those that the next row sees
        begin = tl.where(is_chunk != 0, tl.maximum(count - (W - 1), 0), 0)
        for row in range(begin, count):
            _keep(query, query_row, ring, row, first, its_K, X, RING)
            _keep(key, key_row, ring + K, row, first, its_K, X, RING)
            for g in tl.static_range(G):
                _keep(value + g * V, value_row, ring + 2 * K + g * V, row, first, its_V, X, RING)


_launch_conv = Launcher(_conv_kernel)


@functools.lru_cache(maxsize=256)
def _constants(sizes: tuple[int, int, int, int, int], device: torch.device) -> Constants:
    return Constants(constants_of(*sizes) | {"num_warps": 4} | dependent_launch(device))


def constants_of(key_dim: int, value_dim: int, num_values: int, num_taps: int, ring: int) -> dict[str, Any]:
    """The constants of a launch but `EARLY`."""
    return {
        "K": key_dim,
        "V": value_dim,
        "G": num_values,
        "GP": triton.next_power_of_2(num_values),
        "W": num_taps,
        "RING": ring,
        "TILE": TILE,
        "ROWS": ROWS,
    }


def launch(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    conv_NHRX: torch.Tensor,
    state_NHZ: torch.Tensor,
    rows: StateRows,
    outputs: tuple[torch.Tensor, torch.Tensor],
    value_dim: int,
) -> torch.Tensor:
    """How each state is begun, int32 [B, H]; see `delta_layer`, which has checked the arguments.

    Args:
        inputs: query [T, H, K], key [T, H, K], value [T, H, G V], b and a [T, H, G].
        weights: the convolution's [H, X, W], a_log and dt_bias [H, G].
        conv_NHRX: the ring.
        state_NHZ: of which the number behind a state is read and written.
        rows: where they stand.
        outputs: q, k and v side by side, [T, H, X], and g and beta, [T, H, 2, G], float32; of real rows.
        value_dim: V.
    """
    num_heads, num_values = weights[1].shape
    num_sequences = len(rows.positions_B)
    begun_BH = torch.empty(num_sequences, num_heads, dtype=torch.int32, device=conv_NHRX.device)
    sizes = inputs[0].shape[2], value_dim, num_values, weights[0].shape[2], conv_NHRX.shape[2]
    where = rows.positions_B, rows.counts_B, rows.slots_B
    arguments = (
        *inputs, *weights, conv_NHRX, state_NHZ, *where, *outputs, begun_BH,
        *(stride for x in inputs for stride in x.stride()[:2]),
        *conv_NHRX.stride()[:2], *state_NHZ.stride()[:2], *(x.stride(0) for x in where),
        rows.num_rows, int(rows.start is not None),
    )  # fmt: skip
    grid = num_sequences, num_heads, -(-rows.num_rows // ROWS)
    _launch_conv(grid, arguments, _constants(sizes, conv_NHRX.device))
    return begun_BH


def variants() -> list[Variant]:
    """Of the models that are measured, whose value heads are one, two or four of a key head."""
    pointers = dict.fromkeys(("query", "key", "value", "b", "a"), "*bf16")
    pointers |= dict.fromkeys(("weight", "a_log", "dt_bias"), "*fp32") | {"ring": "*bf16", "state": "*fp32"}
    pointers |= dict.fromkeys(("positions", "counts", "slots"), "*i64")
    pointers |= {"made": "*fp32", "gates": "*fp32", "begun": "*i32"}
    strides = [f"{name}_{way}" for name in ("query", "key", "value", "b", "a") for way in ("row", "head")]
    strides += ["ring_slot", "ring_head", "state_slot", "state_head"]
    others = ["position_stride", "count_stride", "slot_stride", "num_rows", "is_chunk"]
    types = pointers | dict.fromkeys([*strides, *others], "i32")
    aligned = ("query", "key", "value", "weight", "ring", "state", "made", "query_row", "query_head", "key_row")
    aligned += ("key_head", "value_row", "value_head", "ring_slot", "ring_head")
    return [
        Variant(
            name=f"causal_conv G={num_values}{'' if early else ' late'}",
            kernel=_conv_kernel,
            types=types,
            constants=constants_of(128, 128, num_values, 4, 16) | {"EARLY": early},
            aligned=aligned,
            num_warps=4,
            max_registers=128,
            max_shared_bytes=16_384,
            on_amd=not early,
        )
        for num_values, early in ((1, True), (2, True), (4, True), (2, False))
    ]
