"""Product of bfloat16 activations with a float8 weight on Hopper: device code of `kernels.gemm_fp8_hopper_triton`.

The form of `kernels.gemm_fp8_trades_triton` for few rows, in which some warps quantize what others multiply: every
program quantizes all of its rows, so that no launch has to do it before. A warp of them has every QUANTIZERS-th group
of 128 columns, eight rows at a time, which are what shared memory swizzles together. It refuses to know plans, launches
and tensors.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from baton.kernels.gemm_fp8_trades_triton import consume, place, produce
from baton.kernels.variant import Variant

_ANY = ["num_rows", "w_scale_stride", "num_splits"]
QUANTIZERS = gl.constexpr(3)  # warps; with the one that copies they are as many as a warpgroup has
_AHEAD = gl.constexpr(3)  # parts of eight rows that a warp has under way


@gluon.jit
def _load(words_LK, w_scales, stride, row_L, num_rows, part, group, last):
    """Eight rows of a group, zeros past the last row, and the group's scale of the weight; past the end the last's."""
    group = gl.minimum(group, last - 1)
    at_LK = words_LK + (part.to(gl.int64) * 8 * stride + group * 64)
    return gl.load(at_LK, mask=(part * 8 + row_L < num_rows)[:, None], other=0), gl.load(w_scales + group)


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
    x, w_scales, atoms, scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
    WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    UE8M0: gl.constexpr,
):  # fmt: skip
    """A warp that quantizes: its groups' rows, and the products of their scales with the weight's."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    PARTS: gl.constexpr = BM // 8
    pm, pn, _, first, last = place(num_rows, K, num_splits, BM)
    num_groups = last - first
    w_scales += (pn * BN // 128).to(gl.int64) * w_scale_stride
    num_rows = gl.minimum(num_rows - pm * BM, BM)
    num_parts = (num_rows + 7) // 8
    for stage in range(WHICH, gl.minimum(num_groups, STAGES), QUANTIZERS):
        for part in range(num_parts, PARTS):  # nobody writes them again
            atoms.index(stage * PARTS + part).store(gl.zeros([8, 64], gl.int16, layout))
            scales.index(stage * PARTS + part).store(gl.zeros([8], gl.float32, gl.SliceLayout(1, layout)))
    row_L = gl.arange(0, 8, gl.SliceLayout(1, layout))
    column_K = gl.arange(0, 64, gl.SliceLayout(0, layout))
    stride = x_stride // 2
    words_LK = x.to(gl.pointer_type(gl.int32), bitcast=True)
    words_LK += ((pm * BM + row_L).to(gl.int64) * stride)[:, None] + column_K[None, :]
    num_items = (num_groups - WHICH + QUANTIZERS - 1) // QUANTIZERS * num_parts
    if EARLY:
        gdc_wait()
    group = first + WHICH  # that is loaded next
    part = gl.to_tensor(0)
    ahead = ()
    for _i in gl.static_range(_AHEAD):
        ahead = ahead + (_load(words_LK, w_scales, stride, row_L, num_rows, part, group, last),)  # noqa: RUF005
        part += 1
        group = gl.where(part == num_parts, group + QUANTIZERS, group)
        part = gl.where(part == num_parts, 0, part)
    stage = gl.to_tensor(WHICH)
    parity = 1
    done = 0  # parts of the group
    for start in range(0, num_items, _AHEAD):
        loaded = ()
        for i in gl.static_range(_AHEAD):
            q_LK, scale_L = _quantize_pairs(ahead[i][0], UE8M0)
            scale_L *= ahead[i][1]
            if start + i < num_items:
                mbarrier.wait(empty.index(stage), parity)
                atoms.index(stage * PARTS + done).store(q_LK)
                scales.index(stage * PARTS + done).store(scale_L)
                done += 1
                if done == num_parts:
                    fence_async_shared()  # what tensor cores read was not written by a copy
                    mbarrier.arrive(full.index(stage), count=1)
                    done = 0
                    stage += QUANTIZERS
                    parity = gl.where(stage >= STAGES, parity ^ 1, parity)
                    stage = gl.where(stage >= STAGES, stage - STAGES, stage)
            loaded = loaded + (_load(words_LK, w_scales, stride, row_L, num_rows, part, group, last),)  # noqa: RUF005
            part += 1
            group = gl.where(part == num_parts, group + QUANTIZERS, group)
            part = gl.where(part == num_parts, 0, part)
        ahead = loaded


@gluon.jit(do_not_specialize=_ANY)
def linear_kernel(
    x, w, w_scales, c, partials, counters, num_rows: gl.int32, N, K, x_stride, w_scale_stride: gl.int32, c_stride,
    num_splits: gl.int32, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    DEPTH: gl.constexpr, SPLIT: gl.constexpr, UE8M0: gl.constexpr, EARLY: gl.constexpr,
) -> None:  # fmt: skip
    """A split of a tile of BM tokens and BN rows of the weight, which are the rows of the tensor cores' tile."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    HALVES: gl.constexpr = BN // 64
    SHARED: gl.constexpr = HALVES < GROUPS
    a_pieces = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], swizzled)
    atoms = a_pieces._reinterpret(gl.int16, [STAGES * BM // 8, 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    w_pieces = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * HALVES, 64, 128], swizzled)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row)
    part_scales = scales._reinterpret(gl.float32, [STAGES * BM // 8, 8], row)
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
                    x, w_scales, atoms, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(0), BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, atoms, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(1), BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, atoms, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(2), BM, BN, STAGES, EARLY, UE8M0,
                )),
            ],
            [4, 1, 1, 1, 1],
            [168, 160, 160, 160, 160],
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
                    x, w_scales, atoms, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(0), BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, atoms, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(1), BM, BN, STAGES, EARLY, UE8M0,
                )),
                (_quantize, (
                    x, w_scales, atoms, part_scales, full, empty, num_rows, K, x_stride, w_scale_stride, num_splits,
                    gl.constexpr(2), BM, BN, STAGES, EARLY, UE8M0,
                )),
            ],
            [1, 1, 1, 1],
            [168, 168, 168, 168],
        )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
