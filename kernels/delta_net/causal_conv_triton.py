# mypy: ignore-errors
"""The convolution in Triton, with all that a row of the recurrence takes but the state and u.

A program does the rows of one tile, 16 positions by absolute position, of one key head of one sequence, one after the
other, by code in which nothing depends on how many there are. It has the keys of the tile in registers, those of steps
before from the ring; so what a row meets of the rows before it is computed once, and not by every program of every
value head. Of few decode rows each is a program of its own, which makes the keys of those before it again, by the same
code and with the same bits: a step waits for memory once, and not once a row. What it makes of a row, for each value
head, are its factors: how much of each earlier u it takes away from v, how much of each u it sees, g, beta, and how
much of the state is left (e to the sum of the tile's g).

It is short of registers and of instructions, not of bandwidth: a program is one warp, and the more of them are under
way, the less each waits alone. So a tile's keys lie in it as its loads have them, in parts of 32 channels: 8 threads
have a part of a row, and a product of two rows is a sum over 8 threads, not over 32. A row's own key and query reach
all threads by way of `made`, which they are written to anyway. Programs of a step whose rows are apart write the keys
of those before their own there, too: the same bits. Taps of four channels are read by 16 bytes.

The first program of a sequence looks at the number behind the state, which says how many tiles are in it, tells the
recurrence by `begun` what it finds there, and writes the number that holds after the step. So the recurrence, where
many programs share that number, neither reads nor writes it. `begun` is STORED: the state is that of the tile the step
begins in; BEHIND: the tile before it is to be folded first; NONE: the sequence begins.

Where few sequences decode a row each, b and a may be left to the convolution (D is then the length of the rows that
they are products of). It computes them before it waits for the launch before, which is the GEMM of the other
projections and has waited for those rows itself. So b and a take neither a launch nor time. It then reads the keys of
earlier steps before it waits, too: the launch before writes none.

Rings: decode rows, 8 at most, write the convolution's ring and k and g of the other at once. Nothing that this launch
or the recurrence reads lies there: inputs of 4 positions before, in a ring of 16; the tile that the step begins in; and
the one before it if it is to be folded, which is so within 8 positions of its end alone: in a ring of 32 a step that
begins there ends before it comes round. Rows of a chunk may come round: they are kept by a launch of their own, behind
the recurrence.

Shapes: K and V sizes of heads, G value heads of a key head (GP padded), W taps, C rows of a tile, F factors of a row,
X channels, RING rows of a ring, Y elements of a row of the recurrence's, E pairs of a value head and a row of a tile.
A vector of K is in J parts of P; a tile's keys are R J parts [L, P], of which part r J + j has rows R l + r.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.rows import UNSPECIALIZED, StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, TILE, tail_len
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.pointwise.silu_mul_triton import silu
from baton.kernels.prefetch_triton import prefetch, prefetch_vector
from baton.kernels.variant import Variant

FACTORS = 2 * TILE + 4  # of a row and value head: TILE of u taken away, TILE of u seen, g, beta, what is left; padding
STORED, BEHIND, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CHANNELS = 512  # that a warp has room for; measured: more warps wait for each other, and fewer programs are under way
_REGISTERS = 168  # of a thread where a program is one warp: 12 are under way on a multiprocessor, and nothing spills
_MAX_APART = 64  # decode rows, each a program of its own; measured: with more, keys that are made again cost more
_GATE_STEP = tl.constexpr(256)  # columns of a row that a gate's products read at a time
_L2_EPS = tl.constexpr(1e-6)
_SOFTPLUS_LINEAR = tl.constexpr(20.0)  # from here on softplus is its argument


@triton.jit
def _mod(position, RING: tl.constexpr):
    """Of a number that is not negative, which the compiler does not know."""
    return (position.to(tl.uint32) % RING).to(tl.int32)


@triton.jit
def _seen(x, row_stride, ring, row, first, is_wanted, its_C, X: tl.constexpr, W: tl.constexpr, RING: tl.constexpr):
    """Channels C of row `row` and the W - 1 before it, of this step or from the ring; zeros before position 0."""
    seen = ()
    for tap in tl.static_range(W):
        at = row - (W - 1) + tap
        kept = ring + _mod(first + at + RING, RING) * X
        its = tl.where(at >= 0, x + at * row_stride, kept) + its_C
        is_C = is_wanted & (first + at >= 0) & (its_C >= 0)
        seen = seen + (tl.load(its, mask=is_C, other=0.0),)  # noqa: RUF005
    return seen


@triton.jit
def _values_seen(x, row_stride, ring, row, first, is_wanted, its_V, V: tl.constexpr, G: tl.constexpr, X: tl.constexpr,
                 W: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """The same of each value head."""
    found = ()
    for g in tl.static_range(G):
        found = found + (_seen(x, row_stride, ring, row, first, is_wanted, g * V + its_V, X, W, RING),)  # noqa: RUF005
    return found


@triton.jit
def _convolved(seen, weight, its_C, X: tl.constexpr, W: tl.constexpr, PTX: tl.constexpr):
    """Silu of the sum over the taps, in float32, of channels C of W rows."""
    sum_C = seen[0].to(tl.float32) * tl.load(weight + its_C)
    for tap in tl.static_range(1, W):
        sum_C += seen[tap].to(tl.float32) * tl.load(weight + tap * X + its_C)
    return silu(sum_C, PTX)


@triton.jit
def _values_convolved(seen, weight, its_V, V: tl.constexpr, G: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
                      PTX: tl.constexpr):  # fmt: skip
    found = ()
    for g in tl.static_range(G):
        found = found + (_convolved(seen[g], weight, g * V + its_V, X, W, PTX),)  # noqa: RUF005
    return found


@triton.jit
def _stored_keys(old, num_old, its_L, its_P, J: tl.constexpr, P: tl.constexpr, R: tl.constexpr, Y: tl.constexpr):
    """Keys of a tile's first `num_old` rows, of steps before, in parts; of others, any numbers."""
    keys = ()
    for r in tl.static_range(R):
        row_L = its_L * R + r
        for j in tl.static_range(J):
            at_LP = old + (its_L * (R * Y))[:, None] + its_P[None, :] + (r * Y + j * P)
            keys = keys + (tl.load(at_LP, mask=(row_L < num_old)[:, None]),)  # noqa: RUF005
    return keys


@triton.jit
def _spread(x, its_L, its_P, J: tl.constexpr, P: tl.constexpr):
    """A vector that this program wrote, in parts, all of them for each of L; behind a barrier."""
    found = ()
    for j in tl.static_range(J):
        found = found + (tl.load(x + (its_P + j * P)[None, :] + (its_L * 0)[:, None]),)  # noqa: RUF005
    return found


@triton.jit
def _with_key(keys, own, at, its_L, J: tl.constexpr, R: tl.constexpr):
    """A tile's keys with its row `at`, which is `own`."""
    found = ()
    for r in tl.static_range(R):
        for j in tl.static_range(J):
            found = found + (tl.where((its_L * R + r == at)[:, None], own[j], keys[r * J + j]),)  # noqa: RUF005
    return found


@triton.jit
def _products(keys, x, C: tl.constexpr, J: tl.constexpr, R: tl.constexpr):
    """Of each of a tile's keys with a vector, both in parts, [C]."""
    tl.static_assert(R == 4)
    found = ()
    for r in tl.static_range(R):
        sum_LP = keys[r * J] * x[0]
        for j in tl.static_range(1, J):
            sum_LP += keys[r * J + j] * x[j]
        found = found + (tl.sum(sum_LP, axis=1),)  # noqa: RUF005
    return tl.join(tl.join(found[0], found[2]), tl.join(found[1], found[3])).reshape(C)


@triton.jit
def keep(x, row_stride, ring, row, first, its_C, X: tl.constexpr, RING: tl.constexpr):
    """Channels C of a row to the ring."""
    tl.store(ring + (first + row) % RING * X + its_C, tl.load(x + row * row_stride + its_C))


@triton.jit
def _wait(EARLY: tl.constexpr):
    """For the launch before."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _gates(gate, gate_row, gate_head, x, row0, head, its_G, G: tl.constexpr, GP: tl.constexpr, C: tl.constexpr,
           D: tl.constexpr):  # fmt: skip
    """Where a gate's rows are; with D, what it is: [E], products of a row with a weight that has a row a value head.

    They are rounded as a GEMM rounds them.
    """
    if D == 0:
        found = gate + (row0 * gate_row + head * gate_head)
    else:
        its_N = tl.arange(0, _GATE_STEP)
        sum_GN = tl.zeros([GP, _GATE_STEP], tl.float32)
        for begin in tl.static_range(0, D, _GATE_STEP):
            at_N = begin + its_N
            x_N = tl.load(x + at_N, mask=at_N < D, other=0.0).to(tl.float32)
            is_GN = (its_G < G)[:, None] & (at_N < D)[None, :]
            at_GN = head * gate_row + (its_G * gate_head)[:, None] + at_N[None, :]
            sum_GN += tl.load(gate + at_GN, mask=is_GN, other=0.0) * x_N[None, :]
        gate_G1 = tl.sum(sum_GN, axis=1).to(x.dtype.element_ty)[:, None]
        found = tl.reshape(tl.broadcast_to(gate_G1, [GP, C]), [GP * C])
    return found


@triton.jit
def _gates_of_row(gates, at, g_E, is_E, D: tl.constexpr):
    """What `_gates` found, of the row that is `at` elements behind the first."""
    if D == 0:
        gates = tl.load(gates + at + g_E, mask=is_E, other=0.0)
    return gates


@triton.jit
def softplus(a_G):
    """With torch's threshold."""
    small_G = tl.exp(tl.minimum(a_G, _SOFTPLUS_LINEAR))
    more_G = 1.0 + small_G
    # log(1 + x) without losing x: the quotient undoes what rounding 1 + x did
    over_G = tl.where(more_G == 1.0, 1.0, more_G - 1.0)
    soft_G = tl.where(more_G == 1.0, small_G, tl.log(more_G) * (small_G / over_G))
    return tl.where(a_G > _SOFTPLUS_LINEAR, a_G, soft_G)


@triton.jit
def _l2_normed(x_K):
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, axis=0) + _L2_EPS)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "is_chunk", "is_apart"])
def _conv_kernel(
    query, key, value, b, a, x,
    weight, a_log, dt_bias,
    ring, tail, state,
    positions, counts, slots,
    made, factors, begun,
    query_row, query_head, key_row, key_head, value_row, value_head, b_row, b_head, a_row, a_head, x_row,
    ring_slot, ring_head, tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32,
    num_rows: tl.int32, is_chunk: tl.int32, is_apart: tl.int32,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    X: tl.constexpr = 2 * K + G * V
    P: tl.constexpr = 32 if K > 32 else K
    J: tl.constexpr = K // P
    R: tl.constexpr = 4
    its_K, its_V, its_G, its_C = tl.arange(0, K), tl.arange(0, V), tl.arange(0, GP), tl.arange(0, C)
    its_L, its_P, its_E = tl.arange(0, C // R), tl.arange(0, P), tl.arange(0, GP * C)
    g_E, c_E = its_E // C, its_E % C
    is_G, is_E = its_G < G, g_E < G
    weight += head * (W * X)
    if EARLY:
        prefetch_vector(weight, W * X)
    _wait(EARLY and D == 0)
    first = tl.load(positions + sequence * position_stride).to(tl.int32)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    row0 = (sequence * num_rows).to(tl.int64)
    query += row0 * query_row + head * query_head
    key += row0 * key_row + head * key_head
    value += row0 * value_row + head * value_head
    x += row0 * x_row
    of_b = _gates(b, b_row, b_head, x, row0, head, its_G, G, GP, C, D)
    of_a = _gates(a, a_row, a_head, x, row0, head, its_G, G, GP, C, D)
    ring += slot * ring_slot + head * ring_head
    tail += slot * tail_slot + head * tail_head
    # rows of a program: those of a tile, or one of a step, before which it makes the keys of the tile's others
    own_begin = part * is_apart
    tile = tl.where(is_apart != 0, (first + own_begin) // C, first // C + part)
    begin = tl.maximum(tile * C - first, 0)
    stop = tl.minimum(tile * C + C - first, count)
    stop = tl.where(is_apart != 0, tl.minimum(stop, own_begin + 1), stop)
    is_any = begin < stop
    if (part > 0) & (begin >= stop):
        return
    # no row of a tile looks at keys behind it, so that these may be any numbers
    old, num_old = tail + _mod(tile * C, RING) * Y, tl.where(is_any, first - tile * C, 0)
    keys = _stored_keys(old, num_old, its_L, its_P, J, P, R, Y)
    decay_E = tl.load(old + c_E * Y + (K + G * V) + g_E, mask=is_E & (c_E < num_old), other=0.0)
    folded = state + slot * state_slot + head * state_head + G * K * V
    num_folded = tl.load(folded, mask=part == 0, other=0.0)
    if EARLY and D > 0:
        # inputs of the steps before, which no other step has kept in the cache
        its_W = tl.minimum(tl.arange(0, triton.next_power_of_2(W)), W - 2)
        prefetch(
            ring + _mod(first - 1 - its_W + CONV_RING, CONV_RING) * X,
            X * (ring.dtype.element_ty.primitive_bitwidth // 8),
        )
    _wait(EARLY and D > 0)
    for row in range(begin, stop):
        is_own = row >= own_begin
        key_seen = _seen(key, key_row, ring + K, row, first, True, its_K, X, W, CONV_RING)
        query_seen = _seen(query, query_row, ring, row, first, is_own, its_K, X, W, CONV_RING)
        value_seen = _values_seen(
            value, value_row, ring + 2 * K, row, first, is_own, its_V, V, G, X, W, CONV_RING
        )  # fmt: skip
        b_E = _gates_of_row(of_b, row * b_row, g_E, is_E, D)
        a_E = _gates_of_row(of_a, row * a_row, g_E, is_E, D)
        rate_E = tl.load(a_log + head * G + g_E, mask=is_E, other=0.0)
        bias_E = tl.load(dt_bias + head * G + g_E, mask=is_E, other=0.0)
        # all that a row takes is on its way before anything is waited for: the compiler moves no load over this
        tl.debug_barrier()
        at = first + row - tile * C
        to = made + ((row0 + row) * num_heads + head) * X
        own_E = -tl.exp(rate_E) * softplus(a_E.to(tl.float32) + bias_E)
        decay_E = tl.where(c_E == at, own_E, decay_E)
        key_K = _l2_normed(_convolved(key_seen, weight + K, its_K, X, W, EARLY))
        # vectors reach the threads that multiply them by way of memory
        tl.store(to + K + its_K, key_K)
        if is_own:
            query_K = _l2_normed(_convolved(query_seen, weight, its_K, X, W, EARLY)) * (1.0 / K**0.5)
            values = _values_convolved(value_seen, weight + 2 * K, its_V, V, G, X, W, EARLY)
            tl.store(to + its_K, query_K)
            for g in tl.static_range(G):
                tl.store(to + (2 * K + g * V) + its_V, values[g])
            tl.debug_barrier()
            met_C = _products(keys, _spread(to + K, its_L, its_P, J, P), C, J, R)
            seen_C = _products(keys, _spread(to, its_L, its_P, J, P), C, J, R)
            met_C = tl.where(its_C < at, met_C, 0.0)
            seen_C = tl.where(its_C < at, seen_C, tl.where(its_C == at, tl.sum(key_K * query_K, axis=0), 0.0))
            sum_GC = tl.cumsum(tl.reshape(decay_E, [GP, C]), 1)
            total_G = tl.sum(tl.where((its_C == at)[None, :], sum_GC, 0.0), axis=1)
            apart_GC = tl.exp(tl.minimum(total_G[:, None] - sum_GC, 0.0))
            beta_GC, own_GC = tl.reshape(1.0 / (1.0 + tl.exp(-b_E.to(tl.float32))), [GP, C]), tl.reshape(own_E, [GP, C])
            rest_GC = tl.where((its_C == 1)[None, :], beta_GC, tl.exp(total_G)[:, None])
            rest_GC = tl.where((its_C == 0)[None, :], own_GC, rest_GC)
            to_GC = factors + ((row0 + row) * num_heads + head) * (G * F) + (its_G * F)[:, None] + its_C[None, :]
            tl.store(to_GC, apart_GC * beta_GC * met_C[None, :], mask=is_G[:, None])
            tl.store(to_GC + C, apart_GC * seen_C[None, :], mask=is_G[:, None])
            tl.store(to_GC + 2 * C, rest_GC, mask=is_G[:, None] & (its_C < 3)[None, :])
            if is_chunk == 0:
                keep = tail + _mod(first + row, RING) * Y
                tl.store(keep + its_K, key_K)
                tl.store(keep + (K + G * V) + g_E, own_E, mask=is_E & (c_E == 0))
                keep_in = ring + _mod(first + row, CONV_RING) * X
                tl.store(keep_in + its_K, query_seen[W - 1])
                tl.store(keep_in + K + its_K, key_seen[W - 1])
                for g in tl.static_range(G):
                    tl.store(keep_in + (2 * K + g * V) + its_V, value_seen[g][W - 1])
        if row + 1 < stop:
            tl.debug_barrier()
            keys = _with_key(keys, _spread(to + K, its_L, its_P, J, P), at, its_L, J, R)
    if part == 0:
        wanted = first // C
        # what was never written may be no number, and is behind nothing
        found = tl.where(first == 0, NONE, tl.where(num_folded < wanted.to(tl.float32), BEHIND, STORED))
        tl.store(begun + sequence * num_heads + head, found.to(tl.int32))
        # every thread reads, and one may be ahead of another: none writes before all have read
        tl.debug_barrier()
        if count > 0:
            after = tl.where(is_chunk != 0, (first + count) // C, wanted)
            tl.store(folded, after.to(tl.float32))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _keep_kernel(
    query, key, value, ring, tail, positions, counts, slots, made, factors,
    query_row, query_head, key_row, key_head, value_row, value_head, ring_slot, ring_head, tail_slot, tail_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32, num_rows: tl.int32,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    F: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a chunk, whose rows all stay, the inputs that the next row sees, and k and g of the open tile."""
    sequence, head = tl.program_id(0), tl.program_id(1)
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
    ring += slot * ring_slot + head * ring_head
    tail += slot * tail_slot + head * tail_head
    for row in range(tl.maximum(count - (W - 1), 0), count):
        keep(query, query_row, ring, row, first, its_K, X, CONV_RING)
        keep(key, key_row, ring + K, row, first, its_K, X, CONV_RING)
        for g in tl.static_range(G):
            keep(value + g * V, value_row, ring + (2 * K + g * V), row, first, its_V, X, CONV_RING)
    begin = tl.maximum((first + count) // C * C - first, 0).to(tl.int32)
    for row in range(begin, count):
        to = tail + (first + row) % RING * Y
        at = (row0 + row) * num_heads + head
        tl.store(to + its_K, tl.load(made + at * X + K + its_K))
        decay_G = tl.load(factors + (at * G + its_G) * F + 2 * C, mask=its_G < G)
        tl.store(to + (K + G * V) + its_G, decay_G, mask=its_G < G)


_launch_conv = Launcher(_conv_kernel)
_launch_keep = Launcher(_keep_kernel)


@functools.lru_cache(maxsize=256)
def _constants(
    sizes: tuple[int, ...], device: torch.device, itemsize: int, num_warps: int | None = None, row_len: int = 0
) -> tuple[Constants, Constants]:
    """Of both kernels."""
    common = constants_of(*sizes) | dependent_launch(device)
    num_warps = num_warps or _warps_of(*sizes[:3])
    limit = _limit_of(num_warps, itemsize) if common["EARLY"] else {}
    of_conv = {"D": row_len, "num_warps": num_warps}
    return Constants(common | limit | of_conv), Constants(common | {"num_warps": 1})


def _warps_of(key_dim: int, value_dim: int, num_values: int) -> int:
    """As few as have a row of a key head in registers, four at most."""
    num_channels = 2 * key_dim + triton.next_power_of_2(num_values) * value_dim
    return min(triton.next_power_of_2(triton.cdiv(num_channels, _CHANNELS)), 4)


def _limit_of(num_warps: int, itemsize: int) -> dict[str, int]:
    """Of a thread's registers, which rows of float32 would be past."""
    return {"maxnreg": _REGISTERS} if num_warps == 1 and itemsize == 2 else {}


def constants_of(
    key_dim: int, value_dim: int, num_values: int, num_taps: int, conv_ring: int, ring: int, row: int
) -> dict[str, Any]:
    """The constants of a launch but `EARLY`."""
    return {
        "K": key_dim,
        "V": value_dim,
        "G": num_values,
        "GP": triton.next_power_of_2(num_values),
        "W": num_taps,
        "C": TILE,
        "F": FACTORS,
        "CONV_RING": conv_ring,
        "RING": ring,
        "Y": row,
    }


def launch(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    conv_NHRX: torch.Tensor,
    kept: DeltaState,
    rows: StateRows,
    outputs: tuple[torch.Tensor, torch.Tensor],
    value_dim: int,
    x_TD: torch.Tensor | None = None,
    *,
    num_warps: int | None = None,
    is_apart: bool | None = None,
) -> torch.Tensor:
    """How each state is begun, int32 [B, H]; see `delta_layer`, which has checked the arguments.

    Args:
        inputs: query [T, H, K], key [T, H, K], value [T, H, G V], b and a [T, H, G], with `x_TD` weights [H, G, D].
        weights: the convolution's [H, W, X], a_log and dt_bias [H, G].
        conv_NHRX: the ring; read, and written if rows decode.
        kept: the recurrence's ring, the same; of states the number behind them is read and written.
        rows: where they stand.
        outputs: q, k and v side by side, [T, H, X], and FACTORS, [T, H, G, F], float32; of real rows.
        value_dim: V.
        x_TD: rows, one of each sequence that decodes, whose products with its weights b and a are; None: they are made.
        num_warps: of a program; another number may give other bits. None: as `_warps_of` says.
        is_apart: a decode row is a program of its own, which changes no bits; None: where they are few, or one each.
    """
    num_heads, num_values = weights[1].shape
    num_sequences = len(rows.positions_B)
    if is_apart is None:
        is_few = rows.num_rows == 1 or num_sequences * rows.num_rows <= _MAX_APART
        is_apart = rows.start is None and is_few
    begun_BH = torch.empty(num_sequences, num_heads, dtype=torch.int32, device=conv_NHRX.device)
    tail_NHRY, state_NHZ = kept.tail_NHRY, kept.state_NHZ
    sizes = (
        inputs[0].shape[2], value_dim, num_values, weights[0].shape[1], conv_NHRX.shape[2], *tail_NHRY.shape[2:]
    )  # fmt: skip
    where = rows.positions_B, rows.counts_B, rows.slots_B
    arguments = (
        *inputs, inputs[3] if x_TD is None else x_TD, *weights, conv_NHRX, tail_NHRY, state_NHZ, *where, *outputs,
        begun_BH, *(stride for x in inputs for stride in x.stride()[:2]), 0 if x_TD is None else x_TD.stride(0),
        *conv_NHRX.stride()[:2], *tail_NHRY.stride()[:2], *state_NHZ.stride()[:2], *(x.stride(0) for x in where),
        rows.num_rows, int(rows.start is not None), int(is_apart),
    )  # fmt: skip
    if rows.start is not None:
        num_tiles = -(-(rows.start % TILE + rows.num_rows) // TILE)
    else:
        num_tiles = rows.num_rows if is_apart else min(rows.num_rows, 2)
    row_len = 0 if x_TD is None else x_TD.shape[1]
    constants = _constants(sizes, conv_NHRX.device, conv_NHRX.element_size(), num_warps, row_len)[0]
    _launch_conv((num_sequences, num_heads, num_tiles), arguments, constants)
    return begun_BH


def launch_keep(
    inputs: tuple[torch.Tensor, ...],
    conv_NHRX: torch.Tensor,
    tail_NHRY: torch.Tensor,
    rows: StateRows,
    outputs: tuple[torch.Tensor, torch.Tensor],
    num_taps: int,
) -> None:
    """What rings keep of chunks, behind the recurrence; arguments as of `launch`."""
    made_THX, factors_THGF = outputs
    num_heads, num_values = factors_THGF.shape[1:3]
    key_dim, value_dim = inputs[0].shape[2], inputs[2].shape[2] // num_values
    sizes = key_dim, value_dim, num_values, num_taps, conv_NHRX.shape[2], *tail_NHRY.shape[2:]
    where = rows.positions_B, rows.counts_B, rows.slots_B
    arguments = (
        *inputs[:3], conv_NHRX, tail_NHRY, *where, made_THX, factors_THGF,
        *(stride for x in inputs[:3] for stride in x.stride()[:2]),
        *conv_NHRX.stride()[:2], *tail_NHRY.stride()[:2], *(x.stride(0) for x in where), rows.num_rows,
    )  # fmt: skip
    _launch_keep(
        (len(rows.positions_B), num_heads), arguments, _constants(sizes, conv_NHRX.device, conv_NHRX.element_size())[1]
    )


def variants() -> list[Variant]:
    """Of the models that are measured, whose value heads are one, two or four of a key head."""
    types = dict.fromkeys(("query", "key", "value", "b", "a", "x"), "*bf16")
    types |= dict.fromkeys(("weight", "a_log", "dt_bias"), "*fp32")
    types |= {"ring": "*bf16", "tail": "*fp32", "state": "*fp32"}
    types |= dict.fromkeys(("positions", "counts", "slots"), "*i64")
    types |= {"made": "*fp32", "factors": "*fp32", "begun": "*i32"}
    strides = [f"{name}_{way}" for name in ("query", "key", "value", "b", "a") for way in ("row", "head")]
    strides += [f"{name}_{way}" for name in ("ring", "tail", "state") for way in ("slot", "head")]
    others = ["position_stride", "count_stride", "slot_stride", "num_rows"]
    types |= dict.fromkeys([*strides, *others, "x_row", "is_chunk", "is_apart"], "i32")
    left_out = {"weight", "a_log", "dt_bias", "state", "begun", "is_chunk", "is_apart", "state_slot", "state_head"}
    left_out |= {"x", "x_row", "b", "a", "b_row", "b_head", "a_row", "a_head"}
    keep_types = {name: kind for name, kind in types.items() if name not in left_out}
    aligned = ("query", "key", "value", "ring", "tail", "made", "factors", "query_row", "query_head", "key_row")
    aligned += ("key_head", "value_row", "value_head", "ring_slot", "ring_head", "tail_slot", "tail_head")
    of_gates = ("b", "a", "x", "b_row", "b_head", "a_row", "a_head", "x_row")
    found = []
    for num_values, row_len, early in ((1, 0, True), (2, 0, True), (2, 2048, True), (4, 0, True), (2, 0, False)):
        row = tail_len(128, 128, num_values)
        constants = constants_of(128, 128, num_values, 4, CONV_RING, RING, row) | {"EARLY": early}
        for name, kernel, its_types, more, num_warps, max_registers in (
            (
                "delta_conv",
                _conv_kernel,
                types,
                ("weight", "state"),
                _warps_of(128, 128, num_values),
                _REGISTERS if early else 255,
            ),
            ("delta_keep", _keep_kernel, keep_types, (), 1, 168),
        ):
            if row_len and kernel is not _conv_kernel:
                continue
            variant = Variant(
                name=f"{name} G={num_values}{f' of rows of {row_len}' if row_len else ''}{'' if early else ' late'}",
                kernel=kernel,
                types=its_types,
                constants=constants | ({"D": row_len} if kernel is _conv_kernel else {}),
                aligned=(*aligned, *more, *(of_gates * bool(row_len))),
                num_warps=num_warps,
                max_registers=max_registers,
                options=_limit_of(num_warps, 2) if early and kernel is _conv_kernel else {},
                max_shared_bytes=16_384,
                on_amd=not early,
            )
            found.append(variant)
    return found
