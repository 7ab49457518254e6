"""Frames, coverage and the order of bytes in a payload."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import KVTransferConfig
from baton.core.errors import MalformedMessage, ProtocolError
from baton.kvcache.layout import Keep, KVLayout, LayerLayout, Range
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.kvtransfer.protocol.coverage import Coverage, LayerRange
from baton.kvtransfer.protocol.frame import (
    HEADER_BYTES,
    FrameHeader,
    FrameShape,
    KVRange,
    decode_header,
    encode_header,
    is_frame,
)
from baton.kvtransfer.protocol.messages import control_of, parse_control
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import fill, make_layout

pytestmark = pytest.mark.fast
U64, U32, U16 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)


def make_header(payload_bytes=64, **changes):
    fields = {
        "d_epoch": 2**63 + 5,
        "incoming_id": 3,
        "attempt": 1,
        "seq": 9,
        "layer": 2,
        "head_first": 0,
        "head_count": 2,
        "order_block_size": 4,
        "first": 6,
        "count": 1,
        "payload_bytes": payload_bytes,
    }
    return FrameHeader(**{**fields, **changes})


@given(U64, U64, U32, U32, U16, U16, U16, U16, U32, U32, U32, st.booleans(), st.none() | U64, st.none() | U32)
@pytest.mark.long
def test_a_header_survives_the_wire(
    epoch, incoming_id, attempt, seq, layer, head, heads, order, first, count, size, is_written, digest, crc
):
    header = FrameHeader(
        d_epoch=epoch,
        incoming_id=incoming_id,
        attempt=attempt,
        seq=seq,
        layer=layer,
        head_first=head,
        head_count=heads,
        order_block_size=order,
        first=first,
        count=count,
        payload_bytes=size,
        is_written=is_written,
        payload_digest=digest,
        payload_crc=crc,
    )
    wire = encode_header(header)
    assert len(wire) == HEADER_BYTES == 68
    assert is_frame(wire)
    assert decode_header(wire) == header


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_seen(bit):
    wire = bytearray(encode_header(make_header()))
    wire[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        decode_header(bytes(wire))


@given(st.binary(max_size=90))
def test_arbitrary_bytes_are_refused(head):
    with pytest.raises(ProtocolError):
        decode_header(head)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_as_control_are_refused_or_parsed(data):
    try:
        parse_control(data)
    except MalformedMessage:
        pass


def test_a_control_never_looks_like_a_frame():
    for field in kv_pb2.Control.DESCRIPTOR.oneofs[0].fields:
        control = kv_pb2.Control()
        getattr(control, field.name).SetInParent()
        assert not is_frame(control.SerializeToString())
        assert control_of(getattr(control, field.name)) == control


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 3},
        {"head_first": 1},
        {"head_count": 0},
        {"head_count": 3},
        {"count": 0},
        {"count": 2},
        {"order_block_size": 3},
    ],
)
def test_headers_that_contradict_the_layout_are_refused(changes):
    shape = FrameShape(make_layout(), 1 << 20)
    right = make_header(shape.payload_bytes(2, 1, 2))
    shape.check(right)
    with pytest.raises(ProtocolError):
        shape.check(make_header(right.payload_bytes, **changes))


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 4000))
def test_pieces_cover_a_range_once_and_fit(first, count, max_frame_bytes):
    layout = make_layout()
    pieces = list(FrameShape(layout, max_frame_bytes).split(0, first, count, 2))
    assert [p for f, c in pieces for p in range(f, f + c)] == list(range(first, first + count))
    assert all(c == 1 or c * layout.layers[0].head_bytes * layout.num_kv_heads <= max_frame_bytes for _, c in pieces)


@pytest.mark.parametrize(("size", "is_possible"), [(1, False), (2, True)])
def test_a_row_that_no_frame_holds_is_named_before_anything_is_pushed(size, is_possible):
    """A state of 2 heads of 8 MiB: one rank would send both at once, which every receiver refuses."""
    state = LayerLayout(
        num_heads=2, num_parts=1, row_len=2 << 20, dtype="float32", keep=Keep.SNAPSHOT, length=16, ring=1
    )
    layout = KVLayout(model_hash="model", block_size=16, layers=(*make_layout().layers, state))
    assert layout.problem == ""
    shape = FrameShape(layout, KVTransferConfig().max_frame_bytes)
    found = [shape.problem(rank, size) for rank in range(size)]
    named = "layer 3 keeps 16777216 bytes per row and rank, a frame holds 8388608"
    assert found == ([""] * size if is_possible else [named])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11), st.integers(1, 6), st.integers(0, 1)), max_size=8))
@pytest.mark.long
def test_coverage_is_a_set(ranges):
    coverage, model = Coverage([Range(0, 17), Range(0, 17)], [2, 2]), set()
    for layer, first, count, head in ranges:
        cells = {(layer, p, head) for p in range(first, first + count)}
        assert coverage.overlaps(layer, first, count, head, 1) == bool(cells & model)
        coverage.add(layer, first, count, head, 1)
        model |= cells
    missing = {(la, p) for la in range(2) for p in range(17) for h in range(2) if (la, p, h) not in model}
    gaps = list(coverage.gaps())
    assert {(g.layer, p) for g in gaps for p in range(g.first, g.first + g.count)} == missing
    assert sum(g.count for g in gaps) == len(missing)
    assert coverage.is_complete() == (not missing)
    for layer in range(2):
        present = {p for f, c in coverage.present(layer, 0, 17) for p in range(f, f + c)}
        assert present == {p for p in range(17) if (layer, p) not in missing}
    coverage.remove(0, 3, 5, 1, 1)
    model -= {(0, p, 1) for p in range(3, 8)}
    missing = {(la, p) for la in range(2) for p in range(17) for h in range(2) if (la, p, h) not in model}
    assert {(g.layer, p) for g in coverage.gaps() for p in range(g.first, g.first + g.count)} == missing
    coverage.remove(0, 0, 17, 0, 2)
    assert LayerRange(0, 0, 17) in coverage.gaps()


SIZES = st.sampled_from([4, 16, 64])
BLOCKS = {4: (30, 1, 4, 0, 5, 9, 2, 6, 8, 7), 16: (3, 1, 2), 64: (2,)}  # for up to 40 positions


def filled(block_size, seed, **where):
    pool = KVPool(
        make_layout(block_size=block_size, num_kv_heads=4, dtype="bfloat16"), 32, torch.device("cpu"), **where
    )
    fill(pool, torch.Generator().manual_seed(seed))
    return pool, PoolIO(pool.bytes_view, pool.geometry)


def row(pool, blocks, layer, head, position):
    """K and V [2, D] of one position."""
    size = pool.layout.block_size
    return pool.blocks(layer)[
        blocks[position // size], head - pool.geometry.layer(layer).head_first, :, position % size
    ]


@given(SIZES, SIZES, st.integers(0, 20), st.integers(1, 20), st.integers(0, 3), st.booleans(), st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.long
def test_what_is_read_lands_at_the_same_positions(here, there, first, count, head, is_copied, data):
    heads = data.draw(st.integers(1, 4 - head))
    source, source_io = filled(here, 1)
    target, target_io = filled(there, 2)
    before = target.data_bytes.clone()
    span = KVRange(1, first, count, head, heads)
    if is_copied:
        digest = source_io.copy(BLOCKS[here], target_io, BLOCKS[there], span, with_digest=True)
        assert digest == source_io.digest(BLOCKS[here], span)
    else:
        payload = source_io.read(BLOCKS[here], span, here)
        assert payload.tobytes() == b"".join(source_io.pieces(BLOCKS[here], span, here))
        target_io.write(BLOCKS[there], span, payload, here)
    assert target_io.digest(BLOCKS[there], span) == source_io.digest(BLOCKS[here], span)
    for position in range(40):
        for h in range(4):
            if first <= position < first + count and head <= h < head + heads:
                mine, theirs = row(source, BLOCKS[here], 1, h, position), row(target, BLOCKS[there], 1, h, position)
                assert torch.equal(mine, theirs)
                theirs.zero_()
    changed = (target.data_bytes != before).sum() - 2 * 16 * count * heads
    assert changed <= 0


def test_a_whole_block_of_a_head_range_is_one_contiguous_piece():
    pool, io = filled(16, 1)
    pieces = io.pieces((3, 1), KVRange(1, 0, 32, 1, 2), 16)
    assert [len(piece) for piece in pieces] == [2 * 2 * 16 * 16] * 2
    assert pieces[0].tobytes() == pool.blocks(1)[3, 1:3].view(torch.uint8).numpy().tobytes()
    assert len(io.pieces((3, 4), KVRange(1, 0, 32, 0, 4), 16)) == 1


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_together_are_one_pool(size):
    pools, ios = zip(*(filled(16, rank + 5, rank=rank, size=size) for rank in range(size)), strict=True)
    whole, whole_io = filled(16, 1)
    ranked, blocks = RankedPoolIO(ios), (3, 1)
    span = KVRange(1, 2, 25, 1, 3)
    payload = whole_io.read(blocks, span, 16)
    ranked.write(blocks, span, payload, 16)
    assert ranked.digest(blocks, span) == whole_io.digest(blocks, span)
    assert b"".join(ranked.pieces(blocks, span, 16)) == payload.tobytes()
    held = 0
    for pool in pools:
        heads = pool.geometry.layer(1).heads
        for head in range(max(1, heads.first), heads.stop):
            held += 1
            assert torch.equal(row(pool, blocks, 1, head, 20), row(whole, blocks, 1, head, 20))
    assert held == 3 * max(1, size // 4)
    pools[-1].blocks(1)[3, -1, 0, 5, 0] += 1
    assert ranked.digest(blocks, span) != whole_io.digest(blocks, span)
    ranked.spread(blocks, span)
    assert (ranked.digest(blocks, span) == whole_io.digest(blocks, span)) == (size == 8)


def test_the_digest_of_frames_adds_up_to_that_of_the_pool():
    _, io = filled(4, 3)
    total = sum(
        io.digest(BLOCKS[4], KVRange(2, first, count, 0, 4)) for first, count in [(0, 3), (3, 8), (11, 1), (12, 10)]
    )
    assert total & (2**64 - 1) == io.digest(BLOCKS[4], KVRange(2, 0, 22, 0, 4))
