"""Blocks that become float8 on the way: in the interpreter beside the reference, and beside a table of all values."""

import numpy as np
import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.float8_kv import in_float8
from baton.kernels.kv_reference import kv_digest_reference, kv_scatter_fp8_reference
from baton.kernels.kv_scatter import Completion, Piece, PoolAddress, Tuning, Workspace, kv_scatter
from baton.kvtransfer.span import Span
from baton.tests.kernels.test_kv_scatter import CPU, Pool, layout

ONES = torch.ones(2, 2, 1)
NAN = 0x7F
EVERY_BFLOAT16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def nearest(values, scale=1.0):
    """The bytes of e4m3 that are nearest, by search among all of them in float64: the even one of two, saturating."""
    grid = torch.arange(NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    wide = (values.float() * (1 / torch.tensor(scale))).double()
    size = wide.abs().clamp(max=448.0).nan_to_num(0.0)
    upper = torch.searchsorted(grid, size).clamp(max=NAN - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = size - grid[lower], grid[upper] - size
    is_lower = (below < above) | ((below == above) & (lower % 2 == 0) & (size != grid[upper]))
    code = torch.where(is_lower, lower, upper) + 128 * wide.signbit()
    return torch.where(wide.isnan(), NAN, code).to(torch.uint8)


def layer_of(pool, dtype, layer, memory=None):
    shape = pool.geometry.layer(layer)
    memory = pool.memory if memory is None else memory
    flat = torch.from_numpy(memory[shape.offset_bytes : shape.offset_bytes + shape.num_bytes]).view(dtype)
    return flat.view(shape.num_blocks, shape.num_heads, shape.num_parts, shape.rows_per_block, -1)


def pools(from_size=16, to_size=16, *, row_len=8, ranks=((0, 1), (0, 1)), heads=4):
    """A source of finite numbers, some of them too large for float8, and a poisoned target."""
    source, target = (
        Pool(layout(size, heads=heads, row_len=row_len, dtype=dtype), seed, rank=rank, size=num_ranks)
        for seed, (size, dtype, (rank, num_ranks)) in enumerate(
            [(from_size, "bfloat16", ranks[0]), (to_size, "float8_e4m3fn", ranks[1])], start=1
        )
    )
    generator = torch.Generator().manual_seed(7)
    for layer in range(2):
        values = layer_of(source, torch.bfloat16, layer)
        values.copy_(torch.randn(values.shape, generator=generator) * 100)
    return source, target


def run(source, target, piece, scales=ONES, *, num_programs=3, with_digest=True, launches=1):
    workspace = Workspace(CPU, 256)
    words = np.zeros(1 + piece.num_layers, dtype=np.uint64)
    for launch in range(launches):
        kv_scatter(
            source.address, source.blocks_N, target.address, target.blocks_N, piece, workspace,
            Completion(words.ctypes.data, 7 + launch), Tuning(num_programs), with_digest=with_digest,
            scales_LPH=scales,
        )  # fmt: skip
    assert int(words[0]) == 7 + launches - 1
    assert not workspace.sums.any()
    return [int(word) for word in words[1:]]


def wanted_of(source, target, piece, scales=ONES):
    """What the whole target holds afterwards, by the reference."""
    memory = target.memory.copy()
    for layer in range(piece.layer, piece.layer + piece.num_layers):
        heads = tuple(pool.geometry.layer(layer).head_first for pool in (source, target))
        kv_scatter_fp8_reference(
            layer_of(source, torch.bfloat16, layer), source.blocks,
            layer_of(target, torch.float8_e4m3fn, layer, memory), target.blocks, piece, scales[layer], heads,
        )  # fmt: skip
    return memory


def digests_of(pool, piece):
    layers = range(piece.layer, piece.layer + piece.num_layers)
    return [
        pool.io.digest(pool.blocks, Span(layer, piece.first, piece.count, piece.head_first, piece.head_count))
        for layer in layers
    ]


def check(source, target, piece, scales=ONES, **options):
    wanted = wanted_of(source, target, piece, scales)
    found = run(source, target, piece, scales, **options)
    assert np.array_equal(target.memory, wanted)
    assert found == digests_of(target, piece)  # of what is there now, not of what was read


@pytest.mark.fast
@pytest.mark.parametrize("scale", [1.0, 0.37, 4.0])
def test_what_is_stored_is_the_nearest_of_all_values(scale):
    found = in_float8(EVERY_BFLOAT16.view(-1, 1, 8), torch.tensor([scale])).view(torch.uint8).flatten()
    wanted = nearest(EVERY_BFLOAT16, scale)
    is_nan = EVERY_BFLOAT16.isnan()
    assert torch.equal(found[~is_nan], wanted[~is_nan])
    assert ((found[is_nan] & NAN) == NAN).all()


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_number_that_bfloat16_has(scale):
    """Subnormals of both, infinities, what is no number, and ties."""
    heads, row_len = 8, 256
    source = Pool(layout(16, heads=heads, row_len=row_len), 1, num_positions=16)
    target = Pool(layout(16, heads=heads, row_len=row_len, dtype="float8_e4m3fn"), 2, num_positions=16)
    layer_of(source, torch.bfloat16, 0)[source.blocks[0]] = EVERY_BFLOAT16.view(heads, 2, 16, row_len)
    piece = Piece(layer=0, first=0, count=16, head_first=0, head_count=heads)
    [digest] = run(source, target, piece, ONES * scale, num_programs=1)
    assert [digest] == digests_of(target, piece)
    found = layer_of(target, torch.uint8, 0)[target.blocks[0]].flatten()
    is_nan = EVERY_BFLOAT16.isnan()
    assert torch.equal(found[~is_nan], nearest(EVERY_BFLOAT16, scale)[~is_nan])
    assert ((found[is_nan] & NAN) == NAN).all()  # the interpreter keeps a sign, hardware does not
    by_reference = layer_of(target, torch.uint8, 0, wanted_of(source, target, piece, ONES * scale))
    assert torch.equal(by_reference[target.blocks[0]].flatten(), nearest(EVERY_BFLOAT16, scale))


@pytest.mark.parametrize(("from_size", "to_size"), [(16, 64), (64, 16)])
def test_between_blocks_of_any_sizes(from_size, to_size):
    check(*pools(from_size, to_size), Piece(layer=1, first=5, count=62, head_first=0, head_count=4))


@pytest.mark.fast
@pytest.mark.parametrize(("first", "count"), [(0, 1), (15, 2), (33, 37)])
def test_spans_of_any_edges(first, count):
    check(*pools(), Piece(layer=0, first=first, count=count, head_first=1, head_count=2), num_programs=2)


@pytest.mark.parametrize("row_len", [16, 24, 40, 128])
def test_rows_of_odd_lengths(row_len):
    check(*pools(row_len=row_len), Piece(layer=1, first=2, count=19, head_first=0, head_count=3))


@pytest.mark.parametrize("ranks", [((0, 1), (1, 2)), ((1, 2), (0, 1)), ((3, 4), (1, 2))])
def test_heads_go_to_pools_that_hold_others_each_with_its_scale(ranks):
    source, target = pools(ranks=ranks)
    mine, theirs = source.geometry.layer(0), target.geometry.layer(0)
    low = max(mine.head_first, theirs.head_first)
    count = min(mine.heads.stop, theirs.heads.stop) - low
    scales = torch.rand(2, 2, theirs.num_heads, generator=torch.Generator().manual_seed(3)) + 0.5
    check(source, target, Piece(layer=1, first=0, count=20, head_first=low, head_count=count), scales)


@pytest.mark.fast
def test_layers_of_one_launch_have_scales_and_digests_of_their_own():
    source, target = pools()
    scales = torch.tensor([[[1.0], [2.0]], [[0.25], [8.0]]])
    piece = Piece(layer=0, first=0, count=30, head_first=0, head_count=4, num_layers=2)
    check(source, target, piece, scales, launches=2)
    before = target.memory.copy()
    assert run(source, target, piece, scales, with_digest=False) == [0, 0]
    assert np.array_equal(target.memory, before)
    words_NHPSW = layer_of(target, torch.int64, 1)
    reference = kv_digest_reference(words_NHPSW, target.blocks, piece, layer=1)
    assert reference == digests_of(target, piece)[1]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("scales", "argument"),
    [
        (torch.ones(2, 2), "scales_LPH"),
        (torch.ones(2, 3, 1), "scales_LPH"),
        (torch.ones(2, 2, 3), "scales_LPH"),
        (torch.ones(1, 2, 1), "scales_LPH"),
        (torch.ones(2, 2, 1, dtype=torch.float64), "scales_LPH"),
        (torch.ones(2, 2, 8)[:, :, ::2], "scales_LPH"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales, argument):
    source, target = pools()
    with pytest.raises(KernelArgumentInvalid) as refused:
        run(source, target, Piece(layer=1, first=0, count=8, head_first=0, head_count=4), scales)
    assert refused.value.fields["argument"] == argument


@pytest.mark.fast
def test_pools_that_do_not_fit_are_refused_before_anything_is_written():
    source, target = pools()
    before = target.memory.copy()
    piece = Piece(layer=0, first=0, count=8, head_first=0, head_count=4)
    with pytest.raises(KernelArgumentInvalid, match="half"):
        run(source, source, piece)
    for name, pool in (("source", source), ("target", target)):
        aligned = pool.address
        pool.address = PoolAddress(aligned.address + 8, aligned.layers)
        with pytest.raises(KernelArgumentInvalid, match=f"{name}: begins"):
            run(source, target, piece)
        pool.address = aligned
    assert np.array_equal(target.memory, before)
