"""Rings, completion words and the records in them."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ProtocolError
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.receiver.actions import Completed, Drained, IncomingFailed, ReserveWanted
from baton.kvtransfer.receiver.link import HEADER_BYTES, CompletionWords, Ring
from baton.kvtransfer.receiver.records import (
    NO_SLOT,
    AbortCommand,
    DenyCommand,
    GrantCommand,
    ReleaseCommand,
    decode_record,
    encode_record,
)
from baton.proto import kv_pb2

pytestmark = pytest.mark.fast
KEY = AttemptKey("réq", 3)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=60)), max_size=60))
def test_a_ring_is_a_bounded_queue(steps):
    ring, model = Ring(bytearray(HEADER_BYTES + 128)), []
    for record in steps:  # None pops
        if record is None:
            assert ring.pop() == (model.pop(0) if model else None)
            continue
        fits = sum(4 + len(r) for r in model) + 4 + len(record) <= 128
        assert ring.push(record) == fits
        if fits:
            model.append(record)
    while model:
        assert ring.pop() == model.pop(0)
    assert ring.pop() is None


def test_both_ends_see_each_other_through_the_buffer_alone():
    buffer = bytearray(HEADER_BYTES + 64)
    producer, consumer = Ring(buffer), Ring(memoryview(buffer))
    assert producer.push(b"one")
    assert consumer.pop() == b"one"
    assert consumer.pop() is None


def test_a_producer_and_a_consumer_thread_lose_nothing():
    ring, num = Ring(bytearray(HEADER_BYTES + 256)), 5000

    records = [index.to_bytes(4, "little") * (1 + index % 9) for index in range(num)]

    def produce():
        for record in records:
            while not ring.push(record):
                time.sleep(0)

    thread = threading.Thread(target=produce)
    thread.start()
    seen = []
    while len(seen) < num:
        record = ring.pop()
        if record is None:
            time.sleep(0)
        else:
            seen.append(record)
    thread.join()
    assert seen == records


def test_a_record_that_never_fits_is_a_bug():
    with pytest.raises(AssertionError):
        Ring(bytearray(HEADER_BYTES + 16)).push(bytes(13))


@given(st.binary(max_size=80), st.integers(0, 200), st.integers(0, 200))
def test_a_ring_that_holds_garbage_says_so_and_never_reads_beyond(garbage, head, tail):
    buffer = bytearray(HEADER_BYTES + 64)
    buffer[HEADER_BYTES : HEADER_BYTES + len(garbage)] = garbage[:64]
    words = memoryview(buffer)[:HEADER_BYTES].cast("Q")
    words[0], words[8] = head, tail
    ring = Ring(buffer)
    try:
        while (record := ring.pop()) is not None:
            assert len(record) <= 60
    except ProtocolError:
        pass
    ring.reset()
    assert ring.pop() is None
    assert ring.push(b"new")
    assert ring.pop() == b"new"


@given(st.binary(max_size=80))
def test_a_record_that_is_none_is_refused(data):
    try:
        record, slot = decode_record(data)
    except ProtocolError:
        return
    assert decode_record(encode_record(record, slot)) == (record, slot)


def test_a_record_that_was_cut_or_has_more_is_refused():
    whole = encode_record(GrantCommand(KEY, BlockTable((1, 2, 3), 16)))
    for data in (whole[:-1], whole + b"x", b"\xff" + whole[1:]):
        with pytest.raises(ProtocolError):
            decode_record(data)


def test_words():
    words = CompletionWords(bytearray(CompletionWords.num_bytes(4)))
    assert len(words) == 4
    words.set(3, 2**64 - 1)
    assert [words.get(slot) for slot in range(5)] == [0, 0, 0, 2**64 - 1, 0]


@pytest.mark.parametrize(
    "record",
    [
        ReserveWanted(KEY, 7, 12, 1234.5),
        Completed(KEY, 2**40, 7, kv_pb2.SequenceState(first_token=5, hidden=bytes(64)), 100, 60, 99.25),
        IncomingFailed(KEY, "because"),
        Drained(KEY),
        GrantCommand(KEY, BlockTable(tuple(range(3, 300)), 16)),
        DenyCommand(KEY, kv_pb2.Deny.BUSY, "no blocks"),
        AbortCommand(KEY, ""),
        ReleaseCommand(KEY),
    ],
)
def test_records_come_back_as_they_were(record):
    assert decode_record(encode_record(record)) == (record, NO_SLOT)
    assert decode_record(encode_record(record, 17)) == (record, 17)
