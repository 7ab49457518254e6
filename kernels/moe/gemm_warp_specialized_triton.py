# mypy: ignore-errors
"""The grouped GEMM of float8 experts on Hopper: the device code of `kernels.moe.gemm_hopper_triton`.

What it computes and how is said there. It refuses to know tensors and launches.

Shapes: rows of a block are 128, of which each of two warpgroups has 64; a tile is two times 128 rows of an expert's
weight; K columns in groups of 128; P rows of all blocks; R rows of a warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.kernels.variant import Variant

_ANY = ["num_blocks", "scale_stride"]
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_ROWS = gl.constexpr(128)  # of a block
_CHUNK = gl.constexpr(4)  # groups whose scales are under way at once
_LARGEST = gl.constexpr(448.0)
_SMALLEST = gl.constexpr(1e-10)


@gluon.jit
def _weight_rows(expert, tile, N: gl.constexpr, GATED: gl.constexpr):
    """First rows of a tile's halves: of the gate and of the up projection, or two that follow each other."""
    if GATED:
        first = expert * N + tile * 128
        second = first + N // 2
    else:
        first = expert * N + tile * 256
        second = first + 128
    return first, second


@gluon.jit
def _produce(
    x, weight, block_expert, x_pieces, weight_pieces, full, empty, num_blocks,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The warp that copies tiles by TMA."""
    TILES: gl.constexpr = N // 256
    count = 0
    for work in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        block = work // TILES
        expert = gl.load(block_expert + block)
        if expert >= 0:
            first, second = _weight_rows(expert, work % TILES, N, GATED)
            for group in range(K // 128):
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), (_ROWS + 256) * 128)
                at = group * 128
                tma.async_copy_global_to_shared(
                    weight, [first, at], full.index(stage), weight_pieces.index(stage * 2)
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    weight, [second, at], full.index(stage), weight_pieces.index(stage * 2 + 1)
                )
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        x, [block * _ROWS + half * 64, at], full.index(stage), x_pieces.index(stage * 2 + half)
                    )
                count += 1


@gluon.jit
def _load_scales(x_scales, weight_scales, begin, scale_stride, apart, K: gl.constexpr):
    """Of a chunk of groups; past the end the last one's: of each half of the rows, and of each half of the tile."""
    of_x = ()
    of_weight = ()
    for i in gl.static_range(_CHUNK):
        group = gl.minimum(begin + i, K // 128 - 1)
        at_R = x_scales + group.to(gl.int64) * scale_stride
        of_x = of_x + (gl.load(at_R), gl.load(at_R + 64))  # noqa: RUF005
        at = weight_scales + group
        of_weight = of_weight + (gl.load(at), gl.load(at + apart))  # noqa: RUF005
    return of_x, of_weight


@gluon.jit
def _scale(
    x_scales, weight_scales, block_expert, scales, full, empty, num_blocks, scale_stride,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The warp that brings the products of both scales, of a row for each group, a chunk of groups ahead."""
    TILES: gl.constexpr = N // 256
    GROUPS: gl.constexpr = K // 128
    APART: gl.constexpr = (N // 256 if GATED else 1) * GROUPS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count = 0
    for work in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        block = work // TILES
        expert = gl.load(block_expert + block)
        if expert >= 0:
            first, _ = _weight_rows(expert, work % TILES, N, GATED)
            of_tile = weight_scales + first // 128 * GROUPS
            of_rows = x_scales + (block * _ROWS + gl.arange(0, 64, layout))
            of_x, of_weight = _load_scales(of_rows, of_tile, 0, scale_stride, APART, K)
            for start in range(0, GROUPS, _CHUNK):
                products = ()
                for i in gl.static_range(_CHUNK):
                    for part in gl.static_range(4):  # rows by halves of the tile
                        products = products + (of_x[i * 2 + part // 2] * of_weight[i * 2 + part % 2],)  # noqa: RUF005
                of_x, of_weight = _load_scales(of_rows, of_tile, start + _CHUNK, scale_stride, APART, K)
                for i in gl.static_range(_CHUNK):
                    if start + i < GROUPS:
                        stage = count % STAGES
                        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                        for part in gl.static_range(4):
                            scales.index(stage * 4 + part).store(products[i * 4 + part])
                        mbarrier.arrive(full.index(stage), count=1)
                        count += 1


@gluon.jit
def _add_product(sum_RN, x_piece, weight_piece, scale):
    """The sum with a group's product added, in float32, which the tensor cores' own sums are not."""
    zero_RN = gl.zeros([64, 128], gl.float32, _LAYOUT)
    product_RN = warpgroup_mma(x_piece, weight_piece.permute((1, 0)), zero_RN, use_acc=False, is_async=True)
    scale_R = scale.load(gl.SliceLayout(1, _LAYOUT))
    product_RN = warpgroup_mma_wait(0, deps=[product_RN])
    return sum_RN + product_RN * scale_R[:, None]


@gluon.jit
def _store_gated(
    gate_RN, up_RN, out, out_scales, first_row, tile, scale_stride, INNER: gl.constexpr, UE8M0: gl.constexpr
):  # fmt: skip
    """silu(gate) * up, quantized: 128 columns share a scale."""
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    inner_RN = gate_RN / (1.0 + gl.exp(-gate_RN)) * up_RN
    scale_R = gl.maximum(gl.max(gl.abs(inner_RN), axis=1), _SMALLEST) / _LARGEST
    if UE8M0:
        scale_R = ((scale_R.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    value_RN = (inner_RN / scale_R[:, None]).to(out.dtype.element_ty)
    row_R = first_row + gl.arange(0, 64, gl.SliceLayout(1, _LAYOUT))
    gl.store(out_scales + tile.to(gl.int64) * scale_stride + row_R, scale_R)
    row_R = (first_row + gl.arange(0, 64, gl.SliceLayout(1, wide))).to(gl.int64)
    column_N = tile * 128 + gl.arange(0, 128, gl.SliceLayout(0, wide))
    gl.store(out + row_R[:, None] * INNER + column_N[None, :], gl.convert_layout(value_RN, wide))


@gluon.jit
def _store_weighted(sum_RN, out, rows, weights, first_row, first_column, N: gl.constexpr):
    """The sums times the routing weight, to the places of the rows."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row_R = gl.load(rows + first_row + gl.arange(0, 64, gl.SliceLayout(1, _LAYOUT)))
    weight_R = gl.load(weights + gl.maximum(row_R, 0), mask=row_R >= 0, other=0.0)
    value_RN = gl.convert_layout((sum_RN * weight_R[:, None]).to(out.dtype.element_ty), wide)
    row_R = gl.load(rows + first_row + gl.arange(0, 64, gl.SliceLayout(1, wide)))
    column_N = first_column + gl.arange(0, 128, gl.SliceLayout(0, wide))
    at_RN = out + row_R.to(gl.int64)[:, None] * N + column_N[None, :]
    gl.store(at_RN, value_RN, mask=(row_R >= 0)[:, None])


@gluon.jit
def _consume(
    rows, block_expert, weights, out, out_scales, x_pieces, weight_pieces, scales, full, empty, num_blocks,
    scale_stride, WHICH: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    UE8M0: gl.constexpr,
):  # fmt: skip
    """A warpgroup that has 64 rows of each block. The second has nothing to do where a block has no more rows."""
    TILES: gl.constexpr = N // 256
    count = 0
    for work in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        block = work // TILES
        tile = work % TILES
        if gl.load(block_expert + block) >= 0:
            first_row = block * _ROWS + WHICH * 64
            if gl.load(rows + first_row) >= 0:
                first_RN = gl.zeros([64, 128], gl.float32, _LAYOUT)
                second_RN = gl.zeros([64, 128], gl.float32, _LAYOUT)
                for _ in range(K // 128):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    x_piece = x_pieces.index(stage * 2 + WHICH)
                    of_stage = stage * 4 + WHICH * 2
                    first_RN = _add_product(first_RN, x_piece, weight_pieces.index(stage * 2), scales.index(of_stage))
                    second_RN = _add_product(
                        second_RN, x_piece, weight_pieces.index(stage * 2 + 1), scales.index(of_stage + 1)
                    )
                    mbarrier.arrive(empty.index(stage), count=1)
                    count += 1
                if GATED:
                    _store_gated(first_RN, second_RN, out, out_scales, first_row, tile, scale_stride, N // 2, UE8M0)
                else:
                    _store_weighted(first_RN, out, rows, weights, first_row, tile * 256, N)
                    _store_weighted(second_RN, out, rows, weights, first_row, tile * 256 + 128, N)
            else:
                for _ in range(K // 128):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    count += 1


@gluon.jit(do_not_specialize=_ANY)
def grouped_kernel(
    x, x_scales, weight, weight_scales, rows, block_expert, weights, out, out_scales,
    num_blocks: gl.int32, scale_stride: gl.int32,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, UE8M0: gl.constexpr,
) -> None:  # fmt: skip
    """Blocks of rows times tiles of their experts' weights [N, K]; a program does one after another."""
    kind: gl.constexpr = x.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    x_pieces = gl.allocate_shared_memory(kind, [STAGES * 2, 64, 128], swizzled)
    weight_pieces = gl.allocate_shared_memory(kind, [STAGES * 2, 128, 128], swizzled)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES * 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                rows, block_expert, weights, out, out_scales, x_pieces, weight_pieces, scales, full, empty, num_blocks,
                scale_stride, gl.constexpr(0), N, K, STAGES, GATED, UE8M0,
            )),
            (_consume, (
                rows, block_expert, weights, out, out_scales, x_pieces, weight_pieces, scales, full, empty, num_blocks,
                scale_stride, gl.constexpr(1), N, K, STAGES, GATED, UE8M0,
            )),
            (_produce, (
                x, weight, block_expert, x_pieces, weight_pieces, full, empty, num_blocks, N, K, STAGES, GATED,
            )),
            (_scale, (
                x_scales, weight_scales, block_expert, scales, full, empty, num_blocks, scale_stride,
                N, K, STAGES, GATED,
            )),
        ],
        [4, 1, 1],
        [208, 80, 80],
    )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
