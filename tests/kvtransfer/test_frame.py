"""Frames, coverage and the order of bytes in a payload."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import MalformedMessage, ProtocolError
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.coverage import Coverage, Gap
from baton.kvtransfer.frame import HEADER_BYTES, FrameHeader, FrameShape, decode, encode, is_frame, payload_crc
from baton.kvtransfer.messages import control_of, parse_control
from baton.kvtransfer.pool_io import PoolIO, block_runs, to_bytes
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout

pytestmark = pytest.mark.fast
U64, U32, U16 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)


def make_header(payload_bytes=64, **changes):
    fields = {
        "d_epoch": 2**63 + 5,
        "landing_id": 3,
        "attempt": 1,
        "seq": 9,
        "layer": 2,
        "head_first": 0,
        "head_count": 2,
        "first": 6,
        "count": 1,
        "payload_bytes": payload_bytes,
    }
    return FrameHeader(**{**fields, **changes})


@given(U64, U64, U32, U32, U16, U16, U16, U32, U32, st.binary(max_size=200))
def test_a_frame_survives_the_wire(epoch, landing_id, attempt, seq, layer, head, heads, first, count, payload):
    header = FrameHeader(
        d_epoch=epoch,
        landing_id=landing_id,
        attempt=attempt,
        seq=seq,
        layer=layer,
        head_first=head,
        head_count=heads,
        first=first,
        count=count,
        payload_bytes=len(payload),
    )
    wire = encode(header, payload_crc(payload))
    assert len(wire) == HEADER_BYTES == 56
    assert is_frame(wire)
    assert decode(wire, payload) == header


@given(st.integers(0, (HEADER_BYTES + 64) * 8 - 1))
def test_any_flipped_bit_is_seen(bit):
    payload = bytes(range(64))
    wire = bytearray(encode(make_header(), payload_crc(payload)) + payload)
    wire[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        decode(bytes(wire[:HEADER_BYTES]), bytes(wire[HEADER_BYTES:]))


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_arbitrary_bytes_are_refused(head, payload):
    with pytest.raises(ProtocolError):
        decode(head, payload)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_as_control_are_refused_or_parsed(data):
    try:
        parse_control(data)
    except MalformedMessage:
        pass


def test_a_control_never_looks_like_a_frame():
    for field in kv_pb2.Control.DESCRIPTOR.fields:
        control = kv_pb2.Control()
        getattr(control, field.name).SetInParent()
        assert not is_frame(control.SerializeToString())
        assert control_of(getattr(control, field.name)) == control


@pytest.mark.parametrize(
    "changes", [{"layer": 3}, {"head_first": 1}, {"head_count": 0}, {"head_count": 3}, {"count": 0}, {"count": 2}]
)
def test_headers_that_contradict_the_layout_are_refused(changes):
    shape = FrameShape(make_layout(), 1 << 20)
    right = make_header(shape.payload_bytes(1, 2))
    shape.check(right)
    with pytest.raises(ProtocolError):
        shape.check(make_header(right.payload_bytes, **changes))


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 4000))
def test_pieces_cover_a_range_once_and_fit(first, count, max_frame_bytes):
    layout = make_layout()
    pieces = list(FrameShape(layout, max_frame_bytes).split(first, count))
    assert [p for f, c in pieces for p in range(f, f + c)] == list(range(first, first + count))
    assert all(c == 1 or c * layout.bytes_per_position <= max_frame_bytes for _, c in pieces)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 8))
def test_runs_cover_a_range_in_order(first, count, size):
    positions = [
        (run.block_index + n) * size + run.offset + row
        for run in block_runs(first, count, size)
        for n in range(run.num_blocks)
        for row in range(run.length)
    ]
    assert positions == list(range(first, first + count))
    assert len(list(block_runs(first, count, size))) <= 3


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11), st.integers(1, 6), st.integers(0, 1)), max_size=8))
def test_coverage_is_a_set(ranges):
    coverage, model = Coverage(2, 2, 17), set()
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
    coverage.reset_layer(0)
    assert Gap(0, 0, 17) in coverage.gaps()


@given(st.integers(0, 20), st.integers(1, 20), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_what_is_gathered_lands_at_the_same_positions(first, count, dtype):
    layout = make_layout(dtype=dtype)
    source, target = KVPool(layout, 12, torch.device("cpu")), KVPool(layout, 12, torch.device("cpu"))
    source.data_L2NHSD.copy_(torch.randn(source.data_L2NHSD.shape))
    here, there = BlockTable((3, 1, 4, 0, 5, 9, 2, 6, 8, 7), 4), BlockTable((9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4)
    flat = PoolIO(source).gather(here, 1, first, count)
    payload = to_bytes(flat)
    header = make_header(len(payload), layer=1, first=first, count=count)
    PoolIO(target).scatter(there, header, payload)
    for position in range(40):
        mine = source.data_L2NHSD[1, :, here.blocks[position // 4], :, position % 4]
        theirs = target.data_L2NHSD[1, :, there.blocks[position // 4], :, position % 4]
        assert torch.equal(theirs, mine if first <= position < first + count else torch.zeros_like(mine))
    assert target.data_L2NHSD[0].count_nonzero() == target.data_L2NHSD[2].count_nonzero() == 0


def test_a_whole_block_of_a_head_range_is_one_contiguous_piece():
    layout = make_layout()
    source, target = KVPool(layout, 4, torch.device("cpu")), KVPool(layout, 4, torch.device("cpu"))
    source.data_L2NHSD.copy_(torch.randn(source.data_L2NHSD.shape))
    table = BlockTable((2, 0), 4)
    pieces = [source.data_L2NHSD[1, kv, block, 1:2] for kv in range(2) for block in table.blocks]
    payload = b"".join(piece.contiguous().numpy().tobytes() for piece in pieces)
    header = make_header(len(payload), layer=1, head_first=1, head_count=1, first=0, count=8)
    PoolIO(target).scatter(table, header, payload)
    for block in table.blocks:
        assert torch.equal(target.data_L2NHSD[1, :, block, 1], source.data_L2NHSD[1, :, block, 1])
        assert target.data_L2NHSD[1, :, block, 0].count_nonzero() == 0


def test_the_digest_of_frames_adds_up_to_that_of_the_pool():
    layout = make_layout()
    pool = KVPool(layout, 12, torch.device("cpu"))
    pool.data_L2NHSD.copy_(torch.randn(pool.data_L2NHSD.shape))
    io, table = PoolIO(pool), BlockTable((5, 2, 7, 0, 1, 11), 4)
    total = 0
    for first, count in [(0, 3), (3, 8), (11, 1), (12, 10)]:
        total += io.digest_payload(io.gather(table, 2, first, count), 2, first, count)
    assert total & (2**64 - 1) == io.digest_pool(table, 2, 22)
