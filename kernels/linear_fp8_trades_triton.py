"""Product of bfloat16 activations with a float8 weight on Hopper: device code of `kernels.gemm_fp8_hopper_triton`.

The form of `kernels.gemm_fp8_trades_triton` for few rows, in which some warps quantize what others multiply: every
program quantizes all of its rows, so that no launch has to do it before. They are QUANTIZERS teams of WARPS, each of
which has every QUANTIZERS-th group of 128 columns, and of it eight rows for a warp at a time, which are what shared
memory swizzles together. It refuses to know plans, launches and tensors.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from baton.kernels.gemm_fp8_trades_triton import consume, place, produce
from baton.kernels.variant import Variant

_ANY = ["num_rows", "w_scale_stride", "num_splits"]
QUANTIZERS = gl.constexpr(3)  # of one warp, and with the one that copies they are a warpgroup
_REGISTERS = gl.constexpr(128)  # what all have had from the launch where a program is alone


@gluon.jit
def _larger(first, second):
    """Of two pairs of bfloat16; the other where one is a NaN."""
    return gl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _quantize_pairs(pairs_LK, UE8M0: gl.constexpr):
    """Pairs of float8 and the scales of rows of one group: bit for bit `quantize_tile` of `quantize_fp8_triton`.

    Pairs stay in one register until they are multiplied: what is loaded ahead must not be touched before.
    """
    largest_L = gl.reduce(pairs_LK & 0x7FFF7FFF, 1, _larger)
    lower_L = (largest_L << 16).to(gl.float32, bitcast=True)
    upper_L = (largest_L & -65536).to(gl.float32, bitcast=True)
    scale_L = gl.maximum(gl.maximum(lower_L, upper_L), 1e-10) * (1.0 / 448.0)
    if UE8M0:
        raised_L = (scale_L.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale_L = raised_L.to(gl.float32, bitcast=True)
    inverse_L = gl.div_rn(gl.full_like(scale_L, 1.0), scale_L)
    q_LK = gl.inline_asm_elementwise(
        """{
        .reg .b32 lower, upper;
        .reg .b16 first, second;
        shl.b32 lower, $1, 16;
        and.b32 upper, $1, 0xffff0000;
        mul.rn.f32 lower, lower, $3;
        mul.rn.f32 upper, upper, $3;
        cvt.rn.satfinite.e4m3x2.f32 first, upper, lower;
        shl.b32 lower, $2, 16;
        and.b32 upper, $2, 0xffff0000;
        mul.rn.f32 lower, lower, $4;
        mul.rn.f32 upper, upper, $4;
        cvt.rn.satfinite.e4m3x2.f32 second, upper, lower;
        mov.b32 $0, {first, second};
        }""",
        "=r,r,r,r,r",
        [pairs_LK, inverse_L[:, None]],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )
    return q_LK, scale_L


@gluon.jit
def _quantize(
    x, w_scales, parts, scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
    WHICH: gl.constexpr, WARPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, UE8M0: gl.constexpr,
):  # fmt: skip
    """A team that quantizes: its groups' rows, and the products of their scales with the weight's."""
    ROWS: gl.constexpr = 8 * WARPS
    PARTS: gl.constexpr = BM // ROWS
    AHEAD: gl.constexpr = WARPS + 1  # parts under way; a program alone has registers for three
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    pm, pn, _, first, last = place(num_rows, K, num_splits, BM)
    num_groups = last - first
    w_scales += (pn * BN // 128).to(gl.int64) * w_scale_stride
    num_rows = gl.minimum(num_rows - pm * BM, BM)
    num_parts = (num_rows + ROWS - 1) // ROWS
    for stage in range(WHICH, gl.minimum(num_groups, STAGES), QUANTIZERS):
        for part in range(num_parts, PARTS):  # nobody writes them again
            parts.index(stage * PARTS + part).store(gl.zeros([ROWS, 64], gl.int16, layout))
            scales.index(stage * PARTS + part).store(gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout)))
    row_L = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column_K = gl.arange(0, 64, gl.SliceLayout(0, layout))
    stride = x_stride // 2
    words_LK = x.to(gl.pointer_type(gl.int32), bitcast=True)
    words_LK += ((pm * BM + row_L).to(gl.int64) * stride)[:, None] + column_K[None, :]
    num_items = (num_groups - WHICH + QUANTIZERS - 1) // QUANTIZERS * num_parts
    group = first + WHICH  # that is loaded next
    part = gl.to_tensor(0)
    to_part = ROWS * stride.to(gl.int64)
    to_group = 64 * QUANTIZERS - (num_parts - 1) * to_part
    at = group.to(gl.int64) * 64
    ahead = ()
    for _i in gl.static_range(AHEAD):
        ahead = ahead + ((gl.zeros([ROWS, 64], gl.int32, layout), gl.to_tensor(0.0)),)  # noqa: RUF005
    stage = gl.to_tensor(WHICH)
    parity = 1
    done = 0  # parts of the group
    # The first round is of zeros that nobody stores: it fetches the code while there is something to wait for.
    for start in range(-AHEAD, num_items, AHEAD):
        loaded = ()
        for i in gl.static_range(AHEAD):
            q_LK, scale_L = _quantize_pairs(ahead[i][0], UE8M0)
            scale_L *= ahead[i][1]
            if (start >= 0) & (start + i < num_items):
                mbarrier.wait(empty.index(stage), parity)
                parts.index(stage * PARTS + done).store(q_LK)
                scales.index(stage * PARTS + done).store(scale_L)
                done += 1
                if done == num_parts:
                    fence_async_shared()  # what tensor cores read was not written by a copy
                    mbarrier.arrive(full.index(stage), count=1)
                    done = 0
                    stage += QUANTIZERS
                    parity = gl.where(stage >= STAGES, parity ^ 1, parity)
                    stage = gl.where(stage >= STAGES, stage - STAGES, stage)
            if EARLY and i == 0:
                if start < 0:
                    gdc_wait()
            is_there = start + AHEAD + i < num_items
            is_row_L = (part * ROWS + row_L < num_rows) & is_there
            x_LK = gl.load(words_LK + gl.multiple_of(at, 4), mask=is_row_L[:, None], other=0)
            loaded = loaded + ((x_LK, gl.load(w_scales + group, mask=is_there, other=0.0)),)  # noqa: RUF005
            is_last = part + 1 == num_parts
            at += gl.where(is_last, to_group, to_part)
            group += gl.where(is_last, QUANTIZERS, 0)
            part = gl.where(is_last, 0, part + 1)
        ahead = loaded


@gluon.jit(do_not_specialize=_ANY)
def linear_kernel(
    x, w, w_scales, c, partials, counters, num_rows: gl.int32, N, K, x_stride, w_scale_stride: gl.int32, c_stride,
    num_splits: gl.int32, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr, UE8M0: gl.constexpr, EARLY: gl.constexpr,
) -> None:  # fmt: skip
    """A split of a tile of BM tokens and BN rows of the weight, which are the rows of the tensor cores' tile."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    HALVES: gl.constexpr = BN // 64
    ROWS: gl.constexpr = 8 * WARPS
    SHARED: gl.constexpr = HALVES < GROUPS
    a_pieces = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], swizzled)
    parts = a_pieces._reinterpret(gl.int16, [STAGES * BM // ROWS, ROWS, 64], gl.NVMMASharedLayout(128, 16, 2))
    w_pieces = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * HALVES, 64, 128], swizzled)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row)
    part_scales = scales._reinterpret(gl.float32, [STAGES * BM // ROWS, ROWS], row)
    other = gl.allocate_shared_memory(gl.float32, [64, BM] if SHARED else [1, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    joined = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=1 if SHARED else GROUPS)
    if SHARED:  # else its memory is anybody's, who must not find a barrier there
        mbarrier.init(joined, count=1)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    c, partials, counters, a_pieces, w_pieces, scales, other, full, empty, joined, num_rows, N, K,
                    c_stride, num_splits, gl.constexpr(0), BM, BN, STAGES, gl.constexpr(True), GROUPS, DEPTH, SPLIT,
                    EARLY,
                )),
                (consume, (
                    c, partials, counters, a_pieces, w_pieces, scales, other, full, empty, joined, num_rows, N, K,
                    c_stride, num_splits, gl.constexpr(1), BM, BN, STAGES, gl.constexpr(True), GROUPS, DEPTH, SPLIT,
                    EARLY,
                )),
                (produce, (
                    w, w, a_pieces, w_pieces, full, empty, num_rows, K, num_splits,
                    BM, BN, STAGES, EARLY, gl.constexpr(0), HALVES,
                )),
                (_quantize, (
                    x, w_scales, parts, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(0), WARPS, BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, parts, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(1), WARPS, BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, parts, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(2), WARPS, BM, BN, STAGES, EARLY, UE8M0,
                )),
            ],
            [4, 1, WARPS, WARPS, WARPS],
            [_REGISTERS, _REGISTERS, _REGISTERS, _REGISTERS, _REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    c, partials, counters, a_pieces, w_pieces, scales, other, full, empty, joined, num_rows, N, K,
                    c_stride, num_splits, gl.constexpr(0), BM, BN, STAGES, gl.constexpr(True), GROUPS, DEPTH, SPLIT,
                    EARLY,
                )),
                (produce, (
                    w, w, a_pieces, w_pieces, full, empty, num_rows, K, num_splits,
                    BM, BN, STAGES, EARLY, gl.constexpr(0), HALVES,
                )),
                (_quantize, (
                    x, w_scales, parts, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(0), WARPS, BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, parts, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(1), WARPS, BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, parts, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(2), WARPS, BM, BN, STAGES, EARLY, UE8M0,
                )),
            ],
            [1, WARPS, WARPS, WARPS],
            [_REGISTERS, _REGISTERS, _REGISTERS, _REGISTERS],
        )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
