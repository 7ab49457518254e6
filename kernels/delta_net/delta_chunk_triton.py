# mypy: ignore-errors
"""The gated delta net over chunks of prompts, by blocks of 64 positions, in matmuls.

Four launches. The first convolves the rows and sums the gates. The second makes of each block, for each value head, all
that needs no state: with A = tril(beta k k^T e^(s_i - s_j)), s the sums of g, and T the inverse of I + A, what u is
without a state, T (beta v), what a state takes away from it, w = T (beta e^s k), and how much of each u a row sees,
tril(q k^T e^(s_i - s_j)). The third walks over the blocks with BV columns of a value head's state in registers, two
matmuls each that wait for one another: u = T (beta v) - w S, and S = e^(s_last) S + k^T (e^(s_last - s) u). It leaves
each block's u and the state before it, of which the fourth makes outputs, e^s q S and what is seen of u, and their
gated norm. The walk holds the state transposed, so that state and u go from registers into matmuls.

T is that of single rows at first, the identity, and blocks on its diagonal are merged by twos: T - T A T, where A has
what is between two. All of these are bounded as the state's own transitions are, where the powers of A may be large
when keys are alike.

Blocks begin where the first row's tile of 16 does, or a tile before if that is behind; rows of steps before have u from
the ring, and rows of T that are the identity's. The state is kept at multiples of 16, so rows of the open tile have no
part in it. Operands are of half precision, unless the model is of float32: nearer than bfloat16, and as fast; keys, T
and w are at most 1, and values and states past 65,504 would be infinite. Sums, gates and the state are in float32. Bits
depend on where a prompt is cut: batch-invariant numerics take the walk row by row. The first launch alone reads rings
and what the number behind a state says, and the third alone writes them.

Source: Yang et al. 2024 (Gated DeltaNet), its chunk form.

Shapes: H key heads, K and V sizes of heads, G value heads of a key head, W taps, C rows of a block, TILE rows of a
tile, BV columns of a program, N blocks of a sequence, X channels, RING rows of a ring, Y elements of a row of the
recurrence's, Z elements that are made of a block and key head.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels.delta_net.causal_conv_triton import keep, softplus
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.rows import UNSPECIALIZED, StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, TILE, tail_len
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.pointwise.silu_mul_triton import silu
from baton.kernels.variant import Variant

BLOCK = 64  # positions
_GATES = tl.constexpr(6)  # of a block's rows: g, e^s, e^(s_last - s), e^(s_last), s, beta
_NUM_WARPS = 4, 4, 4, 4  # of programs of the four launches
_COLUMNS, _NUM_STAGES = 32, 3  # of a program of the walk
_STAGES_BYTES = 200_000  # that all stages may take of shared memory
_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _exp(x, PTX: tl.constexpr):
    """Of float32; without what Triton does for results below 2^-126."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.exp(x)


@triton.jit
def _seen(x, row_stride, row, count, its_I, its_X, step: tl.constexpr, W: tl.constexpr):
    """Inputs of rows 4 I + `step` - (W - 1); zeros, where they are not of this chunk or no row sees them."""
    row_I = row + 4 * its_I + (step - (W - 1))
    its_IX = x + (row + step - (W - 1)) * row_stride + (its_I[:, None] * (4 * row_stride) + its_X[None, :])
    is_own_I = (row_I >= 0) & (row_I < count) & (step < W + 3)
    return tl.load(its_IX, mask=is_own_I[:, None], other=0.0)


@triton.jit
def _kept(ring, row, first, its_I, its_X, step: tl.constexpr, X: tl.constexpr, W: tl.constexpr, RING: tl.constexpr):
    """The same of rows before this chunk, from the ring."""
    row_I = row + 4 * its_I + (step - (W - 1))
    is_kept_I = (row_I < 0) & (row_I >= -(W - 1)) & (first + row_I >= 0) & (step < W + 3)
    kept_I = ring + (first + row_I + RING) % RING * X
    return tl.load(kept_I[:, None] + its_X[None, :], mask=is_kept_I[:, None], other=0.0)


@triton.jit
def _tap(weight, its_X, tap: tl.constexpr, X: tl.constexpr, W: tl.constexpr):
    return tl.load(weight + tap * X + its_X, mask=(tap < W) & (its_X >= 0), other=0.0)[None, :]


@triton.jit
def _silu_of_sum(a_IX, b_IX, c_IX, d_IX, e_IX, a_X, b_X, c_X, d_X, e_X, W: tl.constexpr, PTX: tl.constexpr):
    sum_IX = a_IX.to(tl.float32) * a_X + b_IX.to(tl.float32) * b_X
    if W > 2:
        sum_IX += c_IX.to(tl.float32) * c_X
    if W > 3:
        sum_IX += d_IX.to(tl.float32) * d_X
    if W > 4:
        sum_IX += e_IX.to(tl.float32) * e_X
    return silu(sum_IX, PTX)


@triton.jit
def _put(x_IX, to, old, row, first, its_I, its_X, is_first, at: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr,
         NORM: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """Rows 4 I + `at` of a block, whose rows lie side by side; in place of rows of steps before, what `old` has."""
    if NORM:
        x_IX = x_IX * (tl.rsqrt(tl.sum(x_IX * x_IX, axis=1) + _L2_EPS) * SCALE)[:, None]
    row_I = row + 4 * its_I + at
    if is_first:
        old_I = old + (first + row_I) % RING * Y
        old_IX = tl.load(old_I[:, None] + its_X[None, :], mask=(row_I < 0)[:, None], other=0.0)
        x_IX = tl.where((row_I < 0)[:, None], old_IX, x_IX)
    tl.store(to + (4 * its_I + at)[:, None] * its_X.shape[0] + its_X[None, :], x_IX.to(to.dtype.element_ty))


@triton.jit
def _convolve(x, row_stride, ring, weight, old, to, row, first, count, its_I, its_X, is_first, X: tl.constexpr,
              W: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr,
              NORM: tl.constexpr, SCALE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Silu of the sum over the taps, L2-normed if NORM; channels X of a block's rows from `row` on.

    A thread has rows 4 I, 4 I + 1, 4 I + 2 and 4 I + 3, for which it reads an input once. Inputs of rows that are not
    of this chunk are zeros, and what is made of such rows any numbers.
    """
    # all is on its way before anything is waited for
    a_X, b_X, c_X = _tap(weight, its_X, 0, X, W), _tap(weight, its_X, 1, X, W), _tap(weight, its_X, 2, X, W)
    d_X, e_X = _tap(weight, its_X, 3, X, W), _tap(weight, its_X, 4, X, W)
    a_IX = _seen(x, row_stride, row, count, its_I, its_X, 0, W)
    b_IX = _seen(x, row_stride, row, count, its_I, its_X, 1, W)
    c_IX = _seen(x, row_stride, row, count, its_I, its_X, 2, W)
    d_IX = _seen(x, row_stride, row, count, its_I, its_X, 3, W)
    e_IX = _seen(x, row_stride, row, count, its_I, its_X, 4, W)
    f_IX = _seen(x, row_stride, row, count, its_I, its_X, 5, W)
    g_IX = _seen(x, row_stride, row, count, its_I, its_X, 6, W)
    h_IX = _seen(x, row_stride, row, count, its_I, its_X, 7, W)
    if is_first:
        a_IX += _kept(ring, row, first, its_I, its_X, 0, X, W, CONV_RING)
        b_IX += _kept(ring, row, first, its_I, its_X, 1, X, W, CONV_RING)
        c_IX += _kept(ring, row, first, its_I, its_X, 2, X, W, CONV_RING)
        d_IX += _kept(ring, row, first, its_I, its_X, 3, X, W, CONV_RING)
        e_IX += _kept(ring, row, first, its_I, its_X, 4, X, W, CONV_RING)
        f_IX += _kept(ring, row, first, its_I, its_X, 5, X, W, CONV_RING)
        g_IX += _kept(ring, row, first, its_I, its_X, 6, X, W, CONV_RING)
        h_IX += _kept(ring, row, first, its_I, its_X, 7, X, W, CONV_RING)
    out_IX = _silu_of_sum(a_IX, b_IX, c_IX, d_IX, e_IX, a_X, b_X, c_X, d_X, e_X, W, PTX)
    _put(out_IX, to, old, row, first, its_I, its_X, is_first, 0, RING, Y, NORM, SCALE)
    out_IX = _silu_of_sum(b_IX, c_IX, d_IX, e_IX, f_IX, a_X, b_X, c_X, d_X, e_X, W, PTX)
    _put(out_IX, to, old, row, first, its_I, its_X, is_first, 1, RING, Y, NORM, SCALE)
    out_IX = _silu_of_sum(c_IX, d_IX, e_IX, f_IX, g_IX, a_X, b_X, c_X, d_X, e_X, W, PTX)
    _put(out_IX, to, old, row, first, its_I, its_X, is_first, 2, RING, Y, NORM, SCALE)
    out_IX = _silu_of_sum(d_IX, e_IX, f_IX, g_IX, h_IX, a_X, b_X, c_X, d_X, e_X, W, PTX)
    _put(out_IX, to, old, row, first, its_I, its_X, is_first, 3, RING, Y, NORM, SCALE)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "num_blocks"])
def _convolve_kernel(
    query, key, value, b, a,
    weight, a_log, dt_bias,
    ring, tail, state,
    positions, counts, slots,
    made, gates, begun,
    query_row, query_head, key_row, key_head, value_row, value_head, b_row, b_head, a_row, a_head,
    ring_slot, ring_head, tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32,
    num_rows: tl.int32, num_blocks: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, TILE: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has the queries, the keys or the values of one head; that of the keys has the gates of all."""
    head, what = tl.program_id(0) // (2 + G), tl.program_id(0) % (2 + G)
    part, sequence = tl.program_id(1), tl.program_id(2)
    X: tl.constexpr = 2 * K + G * V
    OWN: tl.constexpr = C * K + V * C + C * C
    its_K, its_V, its_C = tl.arange(0, K), tl.arange(0, V), tl.arange(0, C)
    its_G, its_I = tl.arange(0, GP), tl.arange(0, C // 4)
    is_G, is_first = its_G < G, part == 0
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    num_folded = tl.load(state + slot * state_slot + head * state_head + G * K * V, mask=first > 0, other=0.0)
    # what was never written may be no number, and is behind nothing
    is_behind = (first > 0) & (num_folded < (first // TILE).to(tl.float32))
    old = (first % TILE).to(tl.int32) + tl.where(is_behind, TILE, 0)  # rows of steps before
    if is_first & (what == 1):
        tl.store(begun + sequence * H + head, old)
    if (count > 0) & (part * C - old < count):
        row0 = sequence.to(tl.int64) * num_rows
        row = first * 0 + (part * C - old)
        ring += slot * ring_slot + head * ring_head
        tail += slot * tail_slot + head * tail_head
        weight += head * X * W
        block = (sequence.to(tl.int64) * num_blocks + part) * H + head
        made += block * (2 * C * K + G * OWN)
        if what == 0:
            _convolve(
                query + row0 * query_row + head * query_head, query_row, ring, weight, tail, made,
                row, first, count, its_I, its_K, is_first, X, W, CONV_RING, RING, Y, True, 1.0 / K**0.5, PTX,
            )  # fmt: skip
        elif what == 1:
            _convolve(
                key + row0 * key_row + head * key_head, key_row, ring + K, weight + K, tail, made + C * K,
                row, first, count, its_I, its_K, is_first, X, W, CONV_RING, RING, Y, True, 1.0, PTX,
            )  # fmt: skip
            b += (row0 + row) * b_row + head * b_head
            a += (row0 + row) * a_row + head * a_head
            row_C = row + its_C
            is_new_GC, is_GC = is_G[:, None] & ((row_C >= 0) & (row_C < count))[None, :], is_G[:, None]
            b_GC = tl.load(b + its_C[None, :] * b_row + its_G[:, None], mask=is_new_GC, other=0.0).to(tl.float32)
            a_GC = tl.load(a + its_C[None, :] * a_row + its_G[:, None], mask=is_new_GC, other=0.0).to(tl.float32)
            a_GC += tl.load(dt_bias + head * G + its_G, mask=is_G, other=0.0)[:, None]
            rate_G = -tl.exp(tl.load(a_log + head * G + its_G, mask=is_G, other=0.0))
            old_GC = tail + ((first + row_C) % RING * Y)[None, :] + (K + G * V) + its_G[:, None]
            old_decay_GC = tl.load(old_GC, mask=is_GC & (row_C < 0)[None, :], other=0.0)
            decay_GC = tl.where(is_new_GC, rate_G[:, None] * softplus(a_GC), old_decay_GC)
            sum_GC = tl.cumsum(decay_GC, 1)
            # rows of the open tile are not in the state
            is_whole_GC = (row_C < (first + count) // TILE * TILE - first)[None, :]
            last_G = tl.sum(tl.where(is_whole_GC, decay_GC, 0.0), axis=1)
            folded_GC = tl.where(is_whole_GC, tl.exp(tl.minimum(last_G[:, None] - sum_GC, 0.0)), 0.0)
            to_GC = gates + (block * G + its_G)[:, None] * (_GATES * C) + its_C[None, :]
            tl.store(to_GC, decay_GC, mask=is_GC)
            tl.store(to_GC + C, tl.exp(sum_GC), mask=is_GC)
            tl.store(to_GC + 2 * C, folded_GC, mask=is_GC)
            tl.store(to_GC + 3 * C, tl.exp(last_G)[:, None] + tl.zeros_like(sum_GC), mask=is_GC)
            tl.store(to_GC + 4 * C, sum_GC, mask=is_GC)
            tl.store(to_GC + 5 * C, tl.where(is_new_GC, 1.0 / (1.0 + tl.exp(-b_GC)), 0.0), mask=is_GC)
        else:
            g = what - 2
            of = 2 * K + g * V
            _convolve(
                value + row0 * value_row + head * value_head + g * V, value_row, ring + of, weight + of,
                tail + K + g * V, made + (2 * C * K + g * OWN + C * K),
                row, first, count, its_I, its_V, is_first, X, W, CONV_RING, RING, Y, False, 1.0, PTX,
            )  # fmt: skip


@triton.jit(do_not_specialize=["counts", "count_stride", "num_blocks"])
def _solve_kernel(
    made, gates, begun, counts, count_stride: tl.int32, num_blocks: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has one block of a value head; u takes the place of v."""
    head, g, part, sequence = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1), tl.program_id(2)
    OWN: tl.constexpr = C * K + V * C + C * C
    KIND: tl.constexpr = made.dtype.element_ty
    its_K, its_V, its_C = tl.arange(0, K), tl.arange(0, V), tl.arange(0, C)
    its_CC = its_C[:, None] * C + its_C[None, :]
    its_CK = its_C[:, None] * K + its_K[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    row = part * C - tl.load(begun + sequence * H + head)
    if (count > 0) & (row < count):
        block = (sequence.to(tl.int64) * num_blocks + part) * H + head
        made += block * (2 * C * K + G * OWN)
        own = made + (2 * C * K + g * OWN)
        at_C = gates + (block * G + g) * (_GATES * C) + its_C
        sum_C, beta_C, since_C = tl.load(at_C + 4 * C), tl.load(at_C + 5 * C), tl.load(at_C + C)
        key_CK = tl.load(made + C * K + its_CK)
        met_CC = tl.dot(key_CK, tl.trans(key_CK), input_precision=PRECISION)
        seen_CC = tl.dot(tl.load(made + its_CK), tl.trans(key_CK), input_precision=PRECISION)
        apart_CC = _exp(tl.minimum(sum_C[:, None] - sum_C[None, :], 0.0), PTX)
        seen_CC = tl.where(its_C[:, None] >= its_C[None, :], seen_CC * apart_CC, 0.0)
        tl.store(own + (C * K + V * C) + its_CC, seen_CC.to(KIND))
        taken_CC = tl.where(its_C[:, None] > its_C[None, :], met_CC * apart_CC * beta_C[:, None], 0.0)
        # (I + A)^-1: blocks on the diagonal of 2^level rows are solved, and merged by twos
        solved_CC = tl.where(its_C[:, None] == its_C[None, :], 1.0, 0.0)
        apart_CC = its_C[:, None] ^ its_C[None, :]
        for level in tl.static_range(LEVELS):
            below_CC = tl.where((apart_CC >> level) == 1, taken_CC, 0.0)
            if level > 0:
                by_CC = solved_CC.to(KIND)
                below_CC = tl.dot(below_CC.to(KIND), by_CC, input_precision=PRECISION)
                below_CC = tl.dot(by_CC, below_CC.to(KIND), input_precision=PRECISION)
            solved_CC -= below_CC
        by_CC = (solved_CC * (-beta_C * since_C)[None, :]).to(KIND)
        tl.store(own + its_CK, tl.dot(by_CC, key_CK, input_precision=PRECISION).to(KIND))
        # what rows of steps before have in place of v is u
        by_CC = (solved_CC * tl.where(row + its_C < 0, 1.0, beta_C)[None, :]).to(KIND)
        value_CV = tl.load(own + C * K + its_C[:, None] * V + its_V[None, :])
        u_VC = tl.dot(tl.trans(value_CV), tl.trans(by_CC), input_precision=PRECISION)
        tl.debug_barrier()  # all have read v
        tl.store(own + C * K + its_V[:, None] * C + its_C[None, :], u_VC.to(KIND))


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "num_blocks"])
def _walk_kernel(
    query, key, value, rows, columns, made, gates, begun, states, ring, tail, state, positions, counts, slots,
    query_row, query_head, key_row, key_head, value_row, value_head,
    ring_slot, ring_head, tail_slot, tail_head, state_slot, state_head,
    position_stride: tl.int32, count_stride: tl.int32, slot_stride: tl.int32,
    num_rows: tl.int32, num_blocks: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, CONV_RING: tl.constexpr, RING: tl.constexpr, Y: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has BV columns of a value head's state, and goes through the blocks of its sequence."""
    CUTS: tl.constexpr = V // BV
    X: tl.constexpr = 2 * K + G * V
    OWN: tl.constexpr = C * K + V * C + C * C
    Z: tl.constexpr = 2 * C * K + G * OWN
    KIND: tl.constexpr = made.dtype.element_ty
    sequence = tl.program_id(1)
    of_head, cut = tl.program_id(0) // CUTS, tl.program_id(0) % CUTS
    head, g = of_head // G, of_head % G
    its_C, its_K, its_B = tl.arange(0, C), tl.arange(0, K), cut * BV + tl.arange(0, BV)
    its_BC = its_B[:, None] * C + its_C[None, :]
    its_BK = its_B[:, None] * K + its_K[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(positions + sequence * position_stride)
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    slot = tl.load(slots + sequence * slot_stride)
    old = tl.load(begun + sequence * H + head)
    row0 = sequence.to(tl.int64) * num_rows
    block0 = sequence.to(tl.int64) * num_blocks
    made += head * Z
    gates += of_head * (_GATES * C)
    states += of_head * (V * K)
    ring += slot * ring_slot + head * ring_head
    tail += slot * tail_slot + head * tail_head
    # strides are told in fours, so that it is known that states can be read by 16 bytes
    state += (slot * state_slot + head * state_head) * 4
    at_BK = state + g * K * V + its_K[None, :] * V + its_B[:, None]
    # at position 0 the state is 0; rows that are not real read nothing
    is_read_BK = (first > 0) & (count > 0) & (its_K[None, :] >= 0) & (its_B[:, None] >= 0)
    state_BK = tl.load(at_BK, mask=is_read_BK, other=0.0)
    u_BC = tl.zeros([BV, C], tl.float32)
    num_walked = tl.where(count > 0, (old + count + C - 1) // C, 0)
    for part in tl.range(0, num_walked, num_stages=STAGES):
        block = (sequence * num_blocks + part) * H + head
        taken_CK = rows.load([block * (Z // K) + 2 * C + g * (OWN // K), 0])
        u_BC = columns.load([block * (Z // C) + 3 * K + g * (OWN // C) + cut * BV, 0]).to(tl.float32)
        key_CK = rows.load([block * (Z // K) + C, 0])
        its_gates = gates + (block0 + part) * (H * G * _GATES * C)
        folded_C, left = tl.load(its_gates + 2 * C + its_C), tl.load(its_gates + 3 * C)
        by_BK = state_BK.to(KIND)
        u_BC = tl.dot(by_BK, tl.trans(taken_CK), u_BC, input_precision=PRECISION)
        folded_BC = (u_BC * folded_C[None, :]).to(KIND)
        state_BK = tl.dot(folded_BC, key_CK, state_BK * left, input_precision=PRECISION)
        tl.store(states + (block0 + part) * (H * G * V * K) + its_BK, by_BK)
        tl.store(made + (block0 + part) * (H * Z) + (3 * C * K + g * OWN) + its_BC, u_BC.to(KIND))
    if count > 0:
        tl.store(at_BK, state_BK)
        # the open tile's rows, all in the last block
        last = num_walked - 1
        row_C = last * C - old + its_C
        whole = ((first + count) // TILE * TILE - first).to(tl.int32)
        is_open_C = (row_C >= 0) & (row_C >= whole) & (row_C < count)
        to_C = tail + (first + row_C) % RING * Y
        tl.store(to_C[None, :] + (K + g * V) + its_B[:, None], u_BC, mask=is_open_C[None, :])
        of_value = value + row0 * value_row + head * value_head + g * V
        of_key, of_query = key + row0 * key_row + head * key_head, query + row0 * query_row + head * query_head
        for row in range(tl.maximum(count - (W - 1), 0), count):
            keep(of_value, value_row, ring + (2 * K + g * V), row, first, its_B, X, CONV_RING)
            if (cut == 0) & (g == 0):
                keep(of_query, query_row, ring, row, first, its_K, X, CONV_RING)
                keep(of_key, key_row, ring + K, row, first, its_K, X, CONV_RING)
        if cut == 0:
            decay_C = tl.load(gates + (block0 + last) * (H * G * _GATES * C) + its_C)
            tl.store(to_C + (K + G * V) + g, decay_C, mask=is_open_C)
            if g == 0:
                at_CK = made + (block0 + last) * (H * Z) + C * K + its_C[:, None] * K + its_K[None, :]
                key_CK = tl.load(at_CK).to(tl.float32)
                tl.store(to_C[:, None] + its_K[None, :], key_CK, mask=is_open_C[:, None])
                tl.store(state + G * K * V, ((first + count) // TILE).to(tl.float32))


@triton.jit(do_not_specialize=["counts", "count_stride", "num_rows", "num_blocks"])
def _output_kernel(
    made, gates, begun, states, counts, z, norm, out, z_row, z_head, z_value, eps,
    count_stride: tl.int32, num_rows: tl.int32, num_blocks: tl.int32,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has one block of a value head: outputs, and their gated norm. Rows that are not real are 0."""
    of_head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, g = of_head // G, of_head % G
    OWN: tl.constexpr = C * K + V * C + C * C
    its_K, its_V, its_C = tl.arange(0, K), tl.arange(0, V), tl.arange(0, C)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts + sequence * count_stride).to(tl.int32)
    row_C = part * C - tl.load(begun + sequence * H + head) + its_C
    block = (sequence.to(tl.int64) * num_blocks + part) * H + head
    made += block * (2 * C * K + G * OWN)
    states += (block * G + g) * (V * K)
    query_CK = tl.load(made + its_C[:, None] * K + its_K[None, :])
    state_VK = tl.load(states + its_V[:, None] * K + its_K[None, :])
    seen_CC = tl.load(made + (3 * C * K + V * C + g * OWN) + its_C[:, None] * C + its_C[None, :])
    u_VC = tl.load(made + (3 * C * K + g * OWN) + its_V[:, None] * C + its_C[None, :])
    since_C = tl.load(gates + (block * G + g) * (_GATES * C) + C + its_C)
    is_real_CV = ((row_C >= 0) & (row_C < count))[:, None] & (its_V >= 0)[None, :]
    row0 = sequence.to(tl.int64) * num_rows
    z_CV = z + (row0 + row_C)[:, None] * z_row + (head * z_head + g * z_value) + its_V[None, :]
    z_CV = tl.load(z_CV, mask=is_real_CV, other=0.0).to(tl.float32)
    out_CV = tl.dot(query_CK, tl.trans(state_VK), input_precision=PRECISION) * since_C[:, None]
    out_CV = tl.dot(seen_CC, tl.trans(u_VC), out_CV, input_precision=PRECISION)
    out_CV = tl.where(is_real_CV, out_CV, 0.0)
    out_CV *= tl.rsqrt(tl.sum(out_CV * out_CV, axis=1) / V + eps)[:, None] * tl.load(norm + its_V)[None, :]
    out_CV *= silu(z_CV, PTX)
    to_C = out + ((row0 + row_C) * (H * G) + of_head) * V
    is_kept_C = (row_C >= 0) & (row_C < num_rows)
    tl.store(to_C[:, None] + its_V[None, :], out_CV.to(out.dtype.element_ty), mask=is_kept_C[:, None])


_launch_convolve = Launcher(_convolve_kernel)
_launch_solve = Launcher(_solve_kernel)
_launch_walk = Launcher(_walk_kernel)
_launch_output = Launcher(_output_kernel)


def constants_of(
    num_heads: int, key_dim: int, value_dim: int, num_values: int, num_taps: int, conv_ring: int, ring: int, row: int,
    early: bool, dtype: torch.dtype,
) -> tuple[dict[str, Any], ...]:  # fmt: skip
    """The constants of the four launches, but what tells of an early start."""
    # of matmuls whose operands are float32: what a model's dtype is worth
    precision = "ieee" if torch.version.hip is not None else "tf32x3" if dtype == torch.float32 else "tf32"
    sizes = {"H": num_heads, "K": key_dim, "V": value_dim, "G": num_values, "C": BLOCK}
    rings = {"W": num_taps, "TILE": TILE, "CONV_RING": conv_ring, "RING": ring, "Y": row}
    columns = min(_COLUMNS, value_dim)
    stage_bytes = BLOCK * (2 * key_dim + columns) * (4 if dtype == torch.float32 else 2)
    num_stages = min(max(_STAGES_BYTES // stage_bytes, 1), _NUM_STAGES) if early else 1
    return (
        sizes | rings | {"GP": triton.next_power_of_2(num_values), "PTX": early},
        sizes | {"LEVELS": BLOCK.bit_length() - 1, "PRECISION": precision, "PTX": early},
        sizes | rings | {"BV": columns, "STAGES": num_stages, "PRECISION": precision},
        sizes | {"PRECISION": precision, "PTX": early},
    )


@functools.lru_cache(maxsize=256)
def _constants(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Constants, ...]:
    """Of the four kernels."""
    common = dependent_launch(device) | {"num_stages": 1}
    found = constants_of(*sizes, common["EARLY"], dtype)
    return tuple(Constants(own | common | {"num_warps": n}) for own, n in zip(found, _NUM_WARPS, strict=True))


def launch(
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    conv_NHRX: torch.Tensor,
    kept: DeltaState,
    rows: StateRows,
    gated: tuple[torch.Tensor, torch.Tensor, float],
    out_TX: torch.Tensor,
) -> None:
    """Outputs of chunks' rows behind the gated norm, their states and what their rings keep.

    Args:
        inputs: of `causal_conv_triton.launch`; also `weights`, `conv_NHRX`, `kept` and `rows`.
        weights: the same.
        conv_NHRX: read and written.
        kept: read and written.
        rows: of chunks.
        gated: z [T, H, G, V], the norm's weight [V] and eps.
        out_TX: [T, H G V], written, all of it.
    """
    assert rows.start is not None
    z_THGV, norm_V, eps = gated
    _, num_heads, num_values, value_dim = z_THGV.shape
    num_sequences, key_dim, dtype = len(rows.positions_B), inputs[0].shape[2], inputs[0].dtype
    num_old = rows.start % TILE + (TILE if rows.start >= TILE else 0)  # at most
    num_blocks = -(-(num_old + rows.num_rows) // BLOCK)
    num_made = BLOCK * (2 * key_dim + num_values * (key_dim + value_dim + BLOCK))
    device = out_TX.device
    made_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    blocks = num_sequences, num_blocks, num_heads
    made_BNHZ = torch.empty(*blocks, num_made, dtype=made_dtype, device=device)
    states_BNHX = torch.empty(*blocks, num_values * value_dim * key_dim, dtype=made_dtype, device=device)
    gates_BNHX = torch.empty(*blocks, num_values * _GATES.value * BLOCK, dtype=torch.float32, device=device)
    begun_BH = torch.empty(num_sequences, num_heads, dtype=torch.int32, device=device)
    tail_NHRY, state_NHZ = kept.tail_NHRY, kept.state_NHZ
    sizes = (
        num_heads, key_dim, value_dim, num_values, weights[0].shape[1], conv_NHRX.shape[2], *tail_NHRY.shape[2:]
    )  # fmt: skip
    of_convolve, of_solve, of_walk, of_output = _constants(sizes, device, dtype)
    where = rows.positions_B, rows.counts_B, rows.slots_B
    ends = *(x.stride(0) for x in where), rows.num_rows, num_blocks
    passed = made_BNHZ, gates_BNHX, begun_BH
    arguments: tuple[Any, ...] = (
        *inputs, *weights, conv_NHRX, tail_NHRY, state_NHZ, *where, *passed,
        *(stride for x in inputs for stride in x.stride()[:2]),
        *conv_NHRX.stride()[:2], *tail_NHRY.stride()[:2], *state_NHZ.stride()[:2], *ends,
    )  # fmt: skip
    _launch_convolve((num_heads * (2 + num_values), num_blocks, num_sequences), arguments, of_convolve)
    arguments = *passed, rows.counts_B, rows.counts_B.stride(0), num_blocks
    _launch_solve((num_heads * num_values, num_blocks, num_sequences), arguments, of_solve)
    columns = of_walk.by_name["BV"]
    arguments = (
        *inputs[:3], _boxes(made_BNHZ, BLOCK, key_dim), _boxes(made_BNHZ, columns, BLOCK), *passed, states_BNHX,
        conv_NHRX, tail_NHRY, state_NHZ, *where,
        *(stride for x in inputs[:3] for stride in x.stride()[:2]),
        *conv_NHRX.stride()[:2], *tail_NHRY.stride()[:2], *(stride // 4 for stride in state_NHZ.stride()[:2]), *ends,
    )  # fmt: skip
    _launch_walk((num_heads * num_values * (value_dim // columns), num_sequences), arguments, of_walk)
    arguments = (
        *passed, states_BNHX, rows.counts_B, z_THGV, norm_V, out_TX, *z_THGV.stride()[:3], eps,
        rows.counts_B.stride(0), rows.num_rows, num_blocks,
    )  # fmt: skip
    _launch_output((num_heads * num_values, num_blocks, num_sequences), arguments, of_output)


def _boxes(made_BNHZ: torch.Tensor, num_rows: int, length: int) -> TensorDescriptor:
    """All that is made as rows of a length, read by so many of them."""
    return TensorDescriptor(made_BNHZ, [made_BNHZ.numel() // length, length], [length, 1], [num_rows, length])


def variants() -> list[Variant]:
    """Of the models that are measured, in bfloat16: one, two or four value heads of a key head; and in float32."""
    types = dict.fromkeys(("query", "key", "value", "b", "a", "ring", "z"), "*bf16")
    types |= dict.fromkeys(("weight", "a_log", "dt_bias", "tail", "state", "gates", "norm"), "*fp32")
    types |= dict.fromkeys(("positions", "counts", "slots"), "*i64") | dict.fromkeys(("made", "states"), "*fp16")
    types |= {"begun": "*i32", "out": "*bf16", "eps": "fp32"}
    aligned = ("query", "key", "value", "ring", "tail", "made", "gates", "query_row", "query_head", "key_row")
    aligned += ("key_head", "value_row", "value_head", "ring_slot", "ring_head", "tail_slot", "tail_head", "state")
    aligned += ("weight", "out", "states", "z", "z_row", "z_head", "z_value", "norm")
    found = []
    for num_values, early, dtype in (
        (1, True, torch.bfloat16), (2, True, torch.bfloat16), (4, True, torch.bfloat16), (2, False, torch.bfloat16),
        (2, True, torch.float32),
    ):  # fmt: skip
        row = tail_len(128, 128, num_values)
        all_constants = constants_of(16, 128, 128, num_values, 4, CONV_RING, RING, row, early, dtype)
        kernels = _convolve_kernel, _solve_kernel, _walk_kernel, _output_kernel
        names = "delta_convolve", "delta_solve", "delta_walk", "delta_output"
        # three of the first and the last are to be on a multiprocessor, and two of the others
        promises: tuple[dict[str, Any], ...] = (
            {"max_registers": 168},
            {"contains": ("HGMMA",), "max_shared_bytes": 113_000},
            {"contains": ("UTMALDG",), "max_shared_bytes": 113_000},
            {"contains": ("HGMMA",), "max_registers": 168},
        )
        for name, kernel, its_constants, num_warps, its_promises in zip(
            names, kernels, all_constants, _NUM_WARPS, promises, strict=True
        ):
            constants = its_constants | {"EARLY": early}
            its_types = {arg: types.get(arg, "i32") for arg in kernel.arg_names if arg not in constants}
            kind = "fp32" if dtype == torch.float32 else "fp16"
            if name == "delta_walk":
                its_types["rows"] = f"tensordesc<{kind}[{BLOCK}, 128]>"
                its_types["columns"] = f"tensordesc<{kind}[{constants['BV']}, {BLOCK}]>"
            if dtype == torch.float32:
                its_types |= {arg: "*fp32" for arg, its in its_types.items() if its in ("*bf16", "*fp16")}
            variant = Variant(
                name=f"{name} G={num_values}{'' if early else ' late'}{' float32' if dtype == torch.float32 else ''}",
                kernel=kernel,
                types=its_types,
                constants=constants,
                aligned=tuple(arg for arg in aligned if arg in its_types),
                num_warps=num_warps,
                num_stages=1,
                may_spill=dtype == torch.float32,
                on_amd=not early,
                **(its_promises if early and dtype != torch.float32 else {}),
            )
            found.append(variant)
    return found
