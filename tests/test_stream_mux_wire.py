"""Frames of stream muxes: what goes in comes out, each stream's in order, and what does not fit together is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import MalformedMessage, ProtocolError, TransferFailed
from baton.proto import worker_pb2
from baton.proto.stream_mux_wire import (
    End,
    StreamTokens,
    decode_frame,
    prefill_frame,
    read_decode_frame,
    read_prefill_frame,
)

pytestmark = pytest.mark.fast


def event_of(index, token_ids, **more):
    return worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(index=index, token_ids=token_ids, **more))


def as_event(said):
    return event_of(said.index, said.token_ids) if isinstance(said, StreamTokens) else said


SAID = st.one_of(
    st.builds(event_of, st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 20), max_size=4)),
    st.builds(event_of, st.integers(0, 9), st.just([7]), finish_reason=st.just("stop")),
    st.builds(event_of, st.integers(0, 9), st.just([7]), start=st.just(worker_pb2.DecodeStart(step_ms=1.0))),
    st.just(worker_pb2.DecodeEvent(first_token=worker_pb2.FirstToken(token=9))),
    st.just(End()),
)


@pytest.mark.long
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), SAID), max_size=60))
def test_each_stream_says_the_same_in_the_same_order(items):
    frame = worker_pb2.DecodeFrame.FromString(decode_frame(items).SerializeToString())
    found = list(read_decode_frame(frame))
    assert len(found) == len(items)
    for stream in range(1, 6):
        want = [said for number, said in items if number == stream]
        assert [as_event(said) for number, said in found if number == stream] == want


def test_a_step_of_one_token_each_takes_a_few_bytes_a_stream():
    items = [(stream, event_of(900, [3000])) for stream in range(1, 257)]
    frame = decode_frame(items)
    assert not frame.items
    assert not frame.lens
    assert frame.ByteSize() < 8 * len(items)


def test_prefill_events_and_ends():
    first = worker_pb2.PrefillEvent(first_token=worker_pb2.FirstToken(token=3))
    items = [(4, first), (4, End()), (2, End(TransferFailed("corrupt", layer=3)))]
    found = list(read_prefill_frame(prefill_frame(items)))
    assert found[:2] == items[:2]
    assert found[2][0] == 2
    error = found[2][1].error
    assert (type(error), error.message, error.fields) == (TransferFailed, "corrupt", {"layer": 3})


@pytest.mark.parametrize(
    "fields",
    [
        {"streams": [1], "indices": [0, 1], "token_ids": [5]},
        {"streams": [1, 2], "indices": [0, 0], "token_ids": [5]},
        {"streams": [1, 2], "indices": [0, 0], "lens": [1], "token_ids": [5, 6]},
        {"streams": [1, 2], "indices": [0, 0], "lens": [1, 2], "token_ids": [5, 6]},
        {"lens": [1], "token_ids": [5]},
        {"token_ids": [5]},
    ],
)
def test_packed_fields_that_do_not_fit_together_are_refused(fields):
    with pytest.raises(ProtocolError, match="frame"):
        list(read_decode_frame(worker_pb2.DecodeFrame(**fields)))


def test_an_end_that_cannot_be_read_is_an_end_with_an_error():
    item = worker_pb2.DecodeItem(stream=1, end=worker_pb2.StreamEnd(error="{"))
    ((_, end),) = read_decode_frame(worker_pb2.DecodeFrame(items=[item]))
    assert isinstance(end.error, MalformedMessage)
