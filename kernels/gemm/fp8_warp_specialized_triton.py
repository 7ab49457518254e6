# mypy: ignore-errors
"""The float8 GEMM with scales on Hopper: the device code of `kernels.gemm.fp8_hopper_triton`.

What it computes and how is said there. It refuses to know plans, launches and tensors.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.variant import Variant

_ANY = ["num_rows", "a_scale_stride", "w_scale_stride", "num_splits"]
_CHUNK = gl.constexpr(4)  # groups whose scales are under way at once
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # one name or the other, by Triton's version


@gluon.jit
def _place(num_rows, K, num_splits, BM: gl.constexpr):
    """Tile and split of this program, and its groups of 128 columns; tiles of the same weights are neighbours."""
    work = gl.program_id(0)
    num_m = (num_rows + BM - 1) // BM
    rest = work // num_m
    split = rest % num_splits
    num_groups = K // 128
    return (
        work % num_m,
        rest // num_splits,
        split,
        split * num_groups // num_splits,
        (split + 1) * num_groups // num_splits,
    )


@gluon.jit
def _boxes(pieces, ROWS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr):
    """The memory of all stages, a tile of so many rows in each, as what TMA copies at once."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    return pieces._reinterpret(pieces.dtype, [STAGES * (ROWS // BOX), BOX, 128], layout)


@gluon.jit
def _copy(source, boxes, full, stage, row, num_rows, group, ROWS: gl.constexpr, BOX: gl.constexpr):
    """A tile's 128 columns, box by box; in the place of a box that is past the last row comes the first of all.

    TMA seems to take several times as long to fill a row with zeros as to copy one. Nothing is stored of such rows.
    """
    for i in gl.static_range(ROWS // BOX):
        box = boxes.index(stage * (ROWS // BOX) + i)
        at = gl.where(row + i * BOX < num_rows, row + i * BOX, 0)
        tma.async_copy_global_to_shared(source, [at, group * 128], full.index(stage), box)


@gluon.jit
def _copy_weight(
    w, w_boxes, rest_boxes, full, stage, row, N, group,
    WIDE: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Both parts of a tile of the weight."""
    _copy(w, w_boxes, full, stage, row, N, group, WIDE, BOX)
    if REST > 0:
        _copy(w, rest_boxes, full, stage, row + WIDE, N, group, REST, BOX)


@gluon.jit
def _produce(
    a, w, a_pieces, w_pieces, rest_pieces, full, empty, num_rows, N, K, num_splits,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    A_BOX: gl.constexpr, W_BOX: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """The warp that copies tiles. The weight depends on nothing: as much of it as there is place for comes first."""
    pm, pn, _, first, last = _place(num_rows, K, num_splits, BM)
    num_groups = last - first
    num_first = gl.minimum(num_groups, STAGES)
    a_boxes = _boxes(a_pieces, BM, A_BOX, STAGES)
    w_boxes = _boxes(w_pieces, BN - REST, W_BOX, STAGES)
    rest_boxes = _boxes(rest_pieces, REST, W_BOX, STAGES) if REST > 0 else w_boxes
    for stage in range(num_first):
        mbarrier.expect(full.index(stage), (BM + BN) * 128)
        _copy_weight(w, w_boxes, rest_boxes, full, stage, pn * BN, N, first + stage, BN - REST, REST, W_BOX)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for stage in range(num_first):
        _copy(a, a_boxes, full, stage, pm * BM, num_rows, first + stage, BM, A_BOX)
    stage = 0
    parity = 0
    for step in range(STAGES, num_groups):
        mbarrier.wait(empty.index(stage), parity)
        mbarrier.expect(full.index(stage), (BM + BN) * 128)
        _copy_weight(w, w_boxes, rest_boxes, full, stage, pn * BN, N, first + step, BN - REST, REST, W_BOX)
        _copy(a, a_boxes, full, stage, pm * BM, num_rows, first + step, BM, A_BOX)
        stage += 1
        parity = gl.where(stage == STAGES, parity ^ 1, parity)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _weight_scales(w_scales, begin, last):
    """Of a chunk of groups; past the end the last one's."""
    found = ()
    for i in gl.static_range(_CHUNK):
        found = found + (gl.load(w_scales + gl.minimum(begin + i, last - 1)),)  # noqa: RUF005
    return found


@gluon.jit
def _row_scales(a_scales, begin, last, stride, row_M, num_rows, PARTS: gl.constexpr):
    """Of a chunk of groups, and in each of PARTS times 64 rows if there are several."""
    found = ()
    for i in gl.static_range(_CHUNK):
        at_M = a_scales + gl.minimum(begin + i, last - 1) * stride + row_M
        for part in gl.static_range(PARTS):
            is_row_M = row_M + part * 64 < num_rows
            found = found + (gl.load(at_M + part * 64, mask=is_row_M, other=0.0),)  # noqa: RUF005
    return found


@gluon.jit
def _scale(
    a_scales, w_scales, scales, full, empty, num_rows, N, K, a_scale_stride, w_scale_stride, num_splits,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, PARTS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """The warp that brings the products of both scales, of a row for each group, several groups ahead.

    A tile has rows of one block of 128 rows of the weight, or of two: it then has the products with both.
    """
    warp_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pm, pn, _, first, last = _place(num_rows, K, num_splits, BM)
    num_groups = last - first
    block = pn * BN // 128
    next_scales = w_scales + gl.minimum(block + 1, (N - 1) // 128).to(gl.int64) * w_scale_stride
    w_scales += block.to(gl.int64) * w_scale_stride
    row_M = pm * BM + gl.arange(0, BM // PARTS, warp_layout)
    of_w = _weight_scales(w_scales, first, last)
    if BLOCKS == 2:
        of_next = _weight_scales(next_scales, first, last)
    else:
        of_next = of_w
    if EARLY:
        gdc_wait()
    of_a = _row_scales(a_scales, first, last, a_scale_stride, row_M, num_rows, PARTS)
    stage = 0
    parity = 1
    for start in range(0, num_groups, _CHUNK):
        products = ()
        for i in gl.static_range(_CHUNK * PARTS):
            products = products + (of_w[i // PARTS] * of_a[i],)  # noqa: RUF005
            if BLOCKS == 2:
                products = products + (of_next[i // PARTS] * of_a[i],)  # noqa: RUF005
        begin = first + start + _CHUNK
        of_w = _weight_scales(w_scales, begin, last)
        if BLOCKS == 2:
            of_next = _weight_scales(next_scales, begin, last)
        of_a = _row_scales(a_scales, begin, last, a_scale_stride, row_M, num_rows, PARTS)
        for i in gl.static_range(_CHUNK):
            if start + i < num_groups:
                mbarrier.wait(empty.index(stage), parity)
                for part in gl.static_range(PARTS * BLOCKS):
                    scales.index(stage * (PARTS * BLOCKS) + part).store(products[i * (PARTS * BLOCKS) + part])
                mbarrier.arrive(full.index(stage), count=1)
                stage += 1
                parity = gl.where(stage == STAGES, parity ^ 1, parity)
                stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _multiply(x_pieces, y_pieces, stage, HALF: gl.constexpr, HALVES: gl.constexpr, WIDE: gl.constexpr):
    """A group's wgmma begun; not waited for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    zero = gl.zeros([64, WIDE], gl.float32, layout)
    x = x_pieces.index(stage * HALVES + HALF)
    return warpgroup_mma(x, y_pieces.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _promote(
    acc, part, scales, stage, border, SWAP: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr, HALVES: gl.constexpr,
    BLOCKS: gl.constexpr, FROM: gl.constexpr,
):  # fmt: skip
    """The sum with a group's added, in float32, which the tensor cores' own sums are not.

    With two blocks, columns from `border` of the tile on have the scales of the second; these begin at column FROM.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    if SWAP:
        acc += part * scales.index(stage).load(gl.SliceLayout(0, layout))[None, :]
    elif BLOCKS == 1:
        acc += part * scales.index(stage * HALVES + HALF).load(gl.SliceLayout(1, layout))[:, None]
    else:
        at = (stage * HALVES + HALF) * 2
        first = scales.index(at).load(gl.SliceLayout(1, layout))
        second = scales.index(at + 1).load(gl.SliceLayout(1, layout))
        # Blocks end at multiples of eight: so told, a thread's neighbours share a choice.
        is_first = (((FROM + gl.arange(0, WIDE, gl.SliceLayout(0, layout))) >> 3) < (border >> 3))[None, :]
        acc += part * gl.where(is_first, first[:, None], second[:, None])
    return acc


@gluon.jit
def _sum(
    x_pieces, y_pieces, rest_pieces, scales, full, empty, num_groups, border, SWAP: gl.constexpr, WIDE: gl.constexpr,
    REST: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, TURN: gl.constexpr, TURNS: gl.constexpr,
    HALF: gl.constexpr, HALVES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's sums over every TURNS-th group, DEPTH of them in the tensor cores at once.

    One of WIDE columns, and one of REST columns beside them, if any.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    acc = gl.zeros([64, WIDE], gl.float32, layout)
    rest = num_groups
    if REST > 0:
        rest = gl.zeros([64, REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 32]))
    num_own = (num_groups - TURN + TURNS - 1) // TURNS
    stage = TURN
    parity = 0
    for _ in range(num_own // DEPTH):
        parts = ()
        rest_parts = ()
        stages = ()
        for _i in gl.static_range(DEPTH):
            stages = stages + (stage,)  # noqa: RUF005
            mbarrier.wait(full.index(stage), parity)
            parts = parts + (_multiply(x_pieces, y_pieces, stage, HALF, HALVES, WIDE),)  # noqa: RUF005
            if REST > 0:
                rest_parts = rest_parts + (_multiply(x_pieces, rest_pieces, stage, HALF, HALVES, REST),)  # noqa: RUF005
            stage += TURNS
            parity = gl.where(stage >= STAGES, parity ^ 1, parity)
            stage = gl.where(stage >= STAGES, stage - STAGES, stage)
        for i in gl.static_range(DEPTH):
            if REST > 0:
                part, rest_part = warpgroup_mma_wait(2 * (DEPTH - 1 - i), deps=[parts[i], rest_parts[i]])
                rest = _promote(rest, rest_part, scales, stages[i], border, SWAP, REST, HALF, HALVES, BLOCKS, WIDE)
            else:
                part = warpgroup_mma_wait(DEPTH - 1 - i, deps=[parts[i]])
            acc = _promote(acc, part, scales, stages[i], border, SWAP, WIDE, HALF, HALVES, BLOCKS, 0)
            mbarrier.arrive(empty.index(stages[i]), count=1)
    if DEPTH > 1:
        for _ in range(num_own % DEPTH):
            mbarrier.wait(full.index(stage), parity)
            part = _multiply(x_pieces, y_pieces, stage, HALF, HALVES, WIDE)
            if REST > 0:
                rest_part = _multiply(x_pieces, rest_pieces, stage, HALF, HALVES, REST)
                part, rest_part = warpgroup_mma_wait(0, deps=[part, rest_part])
                rest = _promote(rest, rest_part, scales, stage, border, SWAP, REST, HALF, HALVES, BLOCKS, WIDE)
            else:
                part = warpgroup_mma_wait(0, deps=[part])
            acc = _promote(acc, part, scales, stage, border, SWAP, WIDE, HALF, HALVES, BLOCKS, 0)
            mbarrier.arrive(empty.index(stage), count=1)
            stage += TURNS
            parity = gl.where(stage >= STAGES, parity ^ 1, parity)
            stage = gl.where(stage >= STAGES, stage - STAGES, stage)
    return acc, rest


@gluon.jit
def _store(c, acc, num_rows, N, c_stride, m, n, SWAP: gl.constexpr, WIDE: gl.constexpr):
    """[64, WIDE], or that turned round, from row m and column n of the result."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))
    j = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    value = acc.to(c.dtype.element_ty)
    if SWAP:
        at = c + (m + j).to(gl.int64)[None, :] * c_stride + (n + i)[:, None]
        gl.store(at, value, mask=((m + j) < num_rows)[None, :] & ((n + i) < N)[:, None])
    else:
        at = c + (m + i).to(gl.int64)[:, None] * c_stride + (n + j)[None, :]
        gl.store(at, value, mask=((m + i) < num_rows)[:, None] & ((n + j) < N)[None, :])


@gluon.jit
def _finish(
    c, acc, partials, counters, num_rows, N, c_stride, num_splits, split, tile, m, n,
    SWAP: gl.constexpr, WIDE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Store the sum; with splits whichever comes last adds all of them in their own order."""
    if SPLIT:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
        SIZE: gl.constexpr = 64 * WIDE
        i = gl.arange(0, 64, gl.SliceLayout(1, layout))
        j = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
        at = partials + tile.to(gl.int64) * num_splits * SIZE + (i[:, None] * WIDE + j[None, :])
        gl.store(at + split * SIZE, acc)
        # All threads' parts are stored before one thread counts, and counted before the last program loads them.
        _barrier()
        num_done = gl.atomic_add(counters + tile, 1, sem="acq_rel")
        if num_done == num_splits - 1:
            total = gl.load(at, cache_modifier=".cg")
            for part in range(1, num_splits):
                total += gl.load(at + part * SIZE, cache_modifier=".cg")
            gl.store(counters + tile, 0)
            _store(c, total, num_rows, N, c_stride, m, n, SWAP, WIDE)
    else:
        _store(c, acc, num_rows, N, c_stride, m, n, SWAP, WIDE)


@gluon.jit
def _consume(
    c, partials, counters, a_pieces, w_pieces, rest_pieces, scales, other, other_rest, full, empty, joined, num_rows, N,
    K, c_stride, num_splits, WHICH: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    SWAP: gl.constexpr, GROUPS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr, EARLY: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: it has 64 rows of the tile, or all of them and every other group of columns."""
    ROWS: gl.constexpr = BN if SWAP else BM
    WIDE: gl.constexpr = BM if SWAP else BN - REST
    HALVES: gl.constexpr = ROWS // 64
    SHARED: gl.constexpr = HALVES < GROUPS  # the warpgroups take turns with the same rows
    HALF: gl.constexpr = 0 if SHARED else WHICH
    TURN: gl.constexpr = WHICH if SHARED else 0
    TURNS: gl.constexpr = GROUPS if SHARED else 1
    BLOCKS: gl.constexpr = 1 if REST == 0 else 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    pm, pn, split, first, last = _place(num_rows, K, num_splits, BM)
    if EARLY:
        gdc_wait()  # nothing may be written before
    x_pieces = w_pieces if SWAP else a_pieces
    y_pieces = a_pieces if SWAP else w_pieces
    border = 128 - pn * BN % 128
    acc, rest = _sum(
        x_pieces, y_pieces, rest_pieces, scales, full, empty, last - first, border, SWAP, WIDE, REST, STAGES, DEPTH,
        TURN, TURNS, HALF, HALVES, BLOCKS,
    )  # fmt: skip
    m = pm * BM + (0 if SWAP else HALF * 64)
    n = pn * BN + (HALF * 64 if SWAP else 0)
    tile = (pn * ((num_rows + BM - 1) // BM) + pm) * HALVES + HALF
    if SHARED and WHICH == 1:
        other.store(acc)
        if REST > 0:
            other_rest.store(rest)
        mbarrier.arrive(joined, count=1)
    else:
        if SHARED:
            mbarrier.wait(joined, 0)
            acc += other.load(layout)
            if REST > 0:
                rest += other_rest.load(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 32]))
        _finish(c, acc, partials, counters, num_rows, N, c_stride, num_splits, split, tile, m, n, SWAP, WIDE, SPLIT)
        if REST > 0:
            _store(c, rest, num_rows, N, c_stride, m, n + WIDE, SWAP, REST)


@gluon.jit(do_not_specialize=_ANY)
def gemm_kernel(
    a, a_scales, w, w_scales, c, partials, counters, num_rows: gl.int32, N, K, a_scale_stride: gl.int32,
    w_scale_stride: gl.int32, c_stride, num_splits: gl.int32, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, GROUPS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr,
    EARLY: gl.constexpr, REST: gl.constexpr, A_BOX: gl.constexpr, W_BOX: gl.constexpr,
) -> None:  # fmt: skip
    """A split of a tile of BM tokens and BN rows of the weight.

    REST of these rows have products of their own, so that BN need not be a power of two: tensors' sizes are.
    """
    kind: gl.constexpr = a.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    WIDE: gl.constexpr = BM if SWAP else BN - REST
    HALVES: gl.constexpr = (BN if SWAP else BM) // 64
    SHARED: gl.constexpr = HALVES < GROUPS
    A_PIECES: gl.constexpr = 1 if SWAP else HALVES
    W_PIECES: gl.constexpr = HALVES if SWAP else 1
    BLOCKS: gl.constexpr = 1 if REST == 0 else 2
    a_pieces = gl.allocate_shared_memory(kind, [STAGES * A_PIECES, BM // A_PIECES, 128], swizzled)
    w_pieces = gl.allocate_shared_memory(kind, [STAGES * W_PIECES, (BN - REST) // W_PIECES, 128], swizzled)
    rest_pieces = gl.allocate_shared_memory(kind, [STAGES, REST, 128], swizzled) if REST > 0 else w_pieces
    scales = gl.allocate_shared_memory(
        gl.float32, [STAGES * A_PIECES * BLOCKS, BM // A_PIECES], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    other = gl.allocate_shared_memory(gl.float32, [64, WIDE] if SHARED else [1, 1], plain)
    other_rest = gl.allocate_shared_memory(gl.float32, [64, REST], plain) if SHARED and REST > 0 else other
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    joined = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=1 if SHARED else GROUPS)
    if SHARED:  # else its memory has other uses, which must not find a barrier there
        mbarrier.init(joined, count=1)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    c, partials, counters, a_pieces, w_pieces, rest_pieces, scales, other, other_rest, full, empty,
                    joined, num_rows, N, K, c_stride, num_splits, gl.constexpr(0), BM, BN, STAGES, SWAP, GROUPS,
                    DEPTH, SPLIT, EARLY, REST,
                )),
                (_consume, (
                    c, partials, counters, a_pieces, w_pieces, rest_pieces, scales, other, other_rest, full, empty,
                    joined, num_rows, N, K, c_stride, num_splits, gl.constexpr(1), BM, BN, STAGES, SWAP, GROUPS,
                    DEPTH, SPLIT, EARLY, REST,
                )),
                (_produce, (
                    a, w, a_pieces, w_pieces, rest_pieces, full, empty, num_rows, N, K, num_splits,
                    BM, BN, STAGES, EARLY, A_BOX, W_BOX, REST,
                )),
                (_scale, (
                    a_scales, w_scales, scales, full, empty, num_rows, N, K, a_scale_stride, w_scale_stride, num_splits,
                    BM, BN, STAGES, EARLY, A_PIECES, BLOCKS,
                )),
            ],
            [4, 1, 1],
            [208, 80, 80],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    c, partials, counters, a_pieces, w_pieces, rest_pieces, scales, other, other_rest, full, empty,
                    joined, num_rows, N, K, c_stride, num_splits, gl.constexpr(0), BM, BN, STAGES, SWAP, GROUPS,
                    DEPTH, SPLIT, EARLY, REST,
                )),
                (_produce, (
                    a, w, a_pieces, w_pieces, rest_pieces, full, empty, num_rows, N, K, num_splits,
                    BM, BN, STAGES, EARLY, A_BOX, W_BOX, REST,
                )),
                (_scale, (
                    a_scales, w_scales, scales, full, empty, num_rows, N, K, a_scale_stride, w_scale_stride, num_splits,
                    BM, BN, STAGES, EARLY, A_PIECES, BLOCKS,
                )),
            ],
            [1, 1],
            [80, 80],
        )  # fmt: skip


def variants() -> list[Variant]:
    """None of its own: they are those of the launches."""
    return []
