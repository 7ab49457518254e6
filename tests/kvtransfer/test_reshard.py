"""Every pair of groups hands every kind of payload over, byte for byte: sizes, KV heads, blocks, dtypes, and paths.

What must be there is said by plain loops (`reshard`); whole pools are compared, so a stray byte shows too.
"""

import itertools
import random

import pytest

from baton.kernels.kv.digest import MASK, layer_weight, weight
from baton.kvcache.layout import Range
from baton.kvtransfer.protocol.frame import FrameHeader, FrameShape, KVRange, decode_header, encode_header
from baton.tests.kvtransfer.reshard import (
    BLOCK_SIZES,
    DTYPES,
    HEADS,
    SIZES,
    Group,
    kept,
    layout_of,
    payload_of,
    truth_of,
)

PROMPT_LENS = (83, 64, 1, 130)
PATHS = ("write", "pieces", "copy")


def frames_of(group, cuts):
    """(rank, header) of everything the ranks of a prefill worker push, a prompt computed in chunks between `cuts`."""
    layout, size = group.layout, group.size
    shape = FrameShape(layout, max_frame_bytes=3000)
    for rank, layer in itertools.product(range(size), range(layout.num_layers)):
        heads = layout.pushed_heads(layer, rank, size)
        if heads.count == 0:
            continue
        spec = layout.layers[layer]
        its = kept(spec, group.prompt_len)
        if spec.keep.value == "rows":
            pieces = itertools.pairwise(cuts)
        else:  # only what decode goes on from, once all is computed
            pieces = [(its[0], its[-1] + 1)] if its else []
        for own in (
            own for start, stop in pieces for own in layout.pushed_positions(layer, start, stop - start, rank, size)
        ):
            for first, count in shape.split(layer, own.first, own.count, heads.count):
                span = KVRange(layer, first, count, heads.first, heads.count)
                header = FrameHeader(
                    d_epoch=1,
                    incoming_id=2,
                    attempt=3,
                    seq=0,
                    layer=layer,
                    head_first=heads.first,
                    head_count=heads.count,
                    order_block_size=layout.rows_per_block(layer),
                    first=first,
                    count=count,
                    payload_bytes=shape.payload_bytes(layer, count, heads.count),
                    payload_digest=group.ios[rank].digest(group.blocks_of(span), span),
                )
                shape.check(header)
                yield rank, header


def land(path, source, target, rank, header):
    """One frame on its way, as a data path of each kind takes it."""
    span, order = header.span, header.order_block_size
    sender = source.ios[rank]
    if path == "write":  # gathered, sent in one piece, scattered
        target.ranked.write(target.blocks_of(span), span, sender.read(source.blocks_of(span), span, order), order)
    elif path == "pieces":  # scatter lists on both sides
        wire = b"".join(sender.pieces(source.blocks_of(span), span, order))
        start = 0
        for piece in target.ranked.pieces(target.blocks_of(span), span, order):
            piece[:] = wire[start : start + len(piece)]
            start += len(piece)
        assert start == len(wire)
        target.ranked.spread(target.blocks_of(span), span)
    else:  # from pool to pool, to every rank that holds some of the heads
        digest = 0
        seen = set()
        for io in target.ios:
            theirs = io.geometry.layer(span.layer).heads
            first, stop = max(theirs.first, span.head_first), min(theirs.stop, span.head_first + span.head_count)
            if first < stop:
                part = KVRange(span.layer, span.first, span.count, first, stop - first)
                copied = sender.copy(source.blocks_of(part), io, target.blocks_of(part), part, with_digest=True)
                digest += 0 if first in seen else copied
                seen.add(first)
        assert digest & MASK == header.payload_digest


def check(path, tp_prefill, tp_decode, num_heads, sizes, dtype, prompt_len):
    """One cell of the matrix."""
    source_layout, target_layout = (layout_of(num_heads, dtype, size) for size in sizes)
    assert source_layout.hash == target_layout.hash
    truth = truth_of(source_layout, prompt_len)
    source, target = (
        Group(source_layout, tp_prefill, prompt_len, seed=1),
        Group(target_layout, tp_decode, prompt_len, seed=2),
    )
    source.place(truth)
    expected = target.expected(truth)
    cuts = sorted({0, prompt_len // 3, prompt_len // 3 + 1, prompt_len})
    frames = list(frames_of(source, cuts))
    random.Random(prompt_len).shuffle(frames)
    totals = [0] * source_layout.num_layers
    for rank, sent in frames:
        header = decode_header(encode_header(sent))
        assert header == sent
        land(path, source, target, rank, header)
        assert target.ranked.digest(target.blocks_of(header.span), header.span) == header.payload_digest
        totals[header.layer] = (totals[header.layer] + header.payload_digest) & MASK
    for pool, wanted in zip(target.pools, expected, strict=True):
        assert (pool.bytes_view == wanted).all()
    for layer, spec in enumerate(target_layout.layers):
        its = kept(spec, prompt_len)
        assert target_layout.layers[layer].span(prompt_len).count == len(its)
        if not its:
            continue
        whole = KVRange(layer, its[0], len(its), 0, spec.num_heads)
        assert target.ranked.digest(target.blocks_of(whole), whole) == totals[layer]
        assert source.ranked.digest(source.blocks_of(whole), whole) == totals[layer]
    assert sum(header.payload_bytes for _, header in frames) == source_layout.payload_bytes(prompt_len)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tp_decode", SIZES)
@pytest.mark.parametrize("tp_prefill", SIZES)
def test_every_pair_byte_for_byte(tp_prefill, tp_decode, path):
    lengths = itertools.cycle(PROMPT_LENS)
    dtypes = DTYPES if path == "write" else ("float64", "float8_e4m3fn")  # rows of 64 bytes, and of 8
    for num_heads, sizes, dtype in itertools.product(HEADS, itertools.product(BLOCK_SIZES, repeat=2), dtypes):
        check(path, tp_prefill, tp_decode, num_heads, sizes, dtype, next(lengths))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sizes", [(1, 16), (16, 1), (4, 64), (64, 2), (8, 8), (1, 1)])
def test_other_block_sizes(sizes, path):
    for tp_prefill, tp_decode in ((1, 1), (2, 4), (4, 1)):
        check(path, tp_prefill, tp_decode, 2, sizes, "float32", 11)


@pytest.mark.fast
@pytest.mark.parametrize("path", PATHS)
def test_one_cell_of_each_kind(path):
    for tp_prefill, tp_decode, num_heads in ((1, 2, 4), (2, 1, 1), (4, 2, 2)):
        check(path, tp_prefill, tp_decode, num_heads, (16, 64), "float8_e4m3fn", 83)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_a_payload(dtype):
    """The bytes on the wire are those the format promises."""
    for tp_prefill, block_size, num_heads in itertools.product(SIZES, BLOCK_SIZES, HEADS):
        layout = layout_of(num_heads, dtype, block_size)
        truth = truth_of(layout, 83)
        source = Group(layout, tp_prefill, 83, seed=3)
        source.place(truth)
        for rank, header in frames_of(source, [0, 20, 83]):
            wanted = payload_of(layout, truth, header.span, block_size)
            order = header.order_block_size
            assert source.ios[rank].read(source.blocks_of(header.span), header.span, order) == wanted


def test_digests_are_what_the_definition_says():
    """Word by word, in Python integers."""
    layout = layout_of(4, "bfloat16", 16)
    truth = truth_of(layout, 70)
    source = Group(layout, 4, 70, seed=4)
    source.place(truth)
    for layer, content in enumerate(truth):
        total = 0
        spec = layout.layers[layer]
        for position, head, part in itertools.product(content, range(spec.num_heads), range(spec.num_parts)):
            words = content[position][head, part].view("<u8").tolist()
            where = weight((2 << 60) + position // 64) * weight((3 << 60) + position % 64)
            for word, value in enumerate(words):
                total += (value + 1) * where * weight((4 << 60) + (head << 32) + (part << 24) + word)
        whole = KVRange(layer, min(content), len(content), 0, spec.num_heads)
        assert source.ranked.digest(source.blocks_of(whole), whole) == total * layer_weight(layer) & MASK


@pytest.mark.fast
@pytest.mark.parametrize("tp_decode", [2, 4])
def test_a_replicated_head_that_differs_on_one_rank_is_noticed(tp_decode):
    layout = layout_of(1, "float16", 16)
    target = Group(layout, tp_decode, 40, seed=5)
    truth = truth_of(layout, 40)
    target.place(truth)
    span = KVRange(5, 0, 40, 0, 1)
    assert layout.layers[5].keep.value == "rows"
    wanted = target.ios[0].digest(target.blocks_of(span), span)
    assert target.ranked.digest(target.blocks_of(span), span) == wanted
    for rank in range(tp_decode):
        piece = target.ios[rank].pieces(target.blocks_of(span), span, 16)[0]
        piece[3] ^= 1
        assert target.ranked.digest(target.blocks_of(span), span) != wanted
        piece[3] ^= 1
    assert target.ranked.digest(target.blocks_of(span), span) == wanted


@pytest.mark.fast
@pytest.mark.parametrize("tp", [(1, 2), (4, 1)])
def test_any_flipped_bit_changes_a_digest(tp):
    """One bit of one row of every layer, in the pool that was filled."""
    layout = layout_of(2, "bfloat16", 16)
    truth = truth_of(layout, 45)
    target = Group(layout, tp[1], 45, seed=6)
    target.place(truth)
    rng = random.Random(tp[0])
    for layer, spec in enumerate(layout.layers):
        its = kept(spec, 45)
        span = KVRange(layer, its[0], len(its), 0, spec.num_heads)
        wanted = target.ranked.digest(target.blocks_of(span), span)
        for _ in range(20):
            piece = rng.choice(target.ranked.pieces(target.blocks_of(span), span, layout.rows_per_block(layer)))
            at, bit = rng.randrange(len(piece)), 1 << rng.randrange(8)
            piece[at] ^= bit
            assert target.ranked.digest(target.blocks_of(span), span) != wanted
            piece[at] ^= bit


@pytest.mark.fast
def test_a_state_of_another_boundary_has_another_digest():
    """The same bytes, as the state after 2 and after 3 tiles; and a frame of it is none of this prompt."""
    layout = layout_of(2, "float32", 16)
    layer = next(index for index, spec in enumerate(layout.layers) if spec.keep.value == "snapshot")
    group = Group(layout, 1, 50, seed=7)
    spans = [KVRange(layer, index, 1, 0, layout.layers[layer].num_heads) for index in (2, 3)]
    digests = {group.ranked.digest(group.blocks_of(span), span) for span in spans}
    assert len(digests) == 2
    assert [layout.layers[layer].span(length) for length in (47, 48, 63)] == [Range(2, 1), Range(3, 1), Range(3, 1)]


def drawn_cells(seed, num_cells):
    rng = random.Random(seed)
    for _ in range(num_cells):
        sizes = rng.choice(BLOCK_SIZES), rng.choice(BLOCK_SIZES)
        tp_prefill, tp_decode = rng.choice(SIZES), rng.choice(SIZES)
        yield (
            rng.choice(PATHS), tp_prefill, tp_decode, rng.choice(HEADS), sizes, rng.choice(DTYPES), rng.randint(1, 300)
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_drawn_cells_byte_for_byte(seed):
    for cell in drawn_cells(seed, 100):
        check(*cell)
