"""What every transport promises (`kvtransfer.protocol.transport`), over each of them."""

import random
import threading
import time

import pytest

from baton.core.kv_transports import INLINE
from baton.kvtransfer.protocol.frame import HEADER_BYTES, decode_header
from baton.kvtransfer.protocol.transport import deliveries_of
from baton.tests.kvtransfer.transport_ends import KINDS, PATIENCE_S, SOCKET_KINDS, Ends, Pool, make_header

pytestmark = pytest.mark.fast

KIB, MIB = 1 << 10, 1 << 20
OF_TIME_S = 4.0  # that calls which must not wait may take, on a machine that does other things too


@pytest.fixture
def make_ends(tmp_path):
    made = []

    def make(kind, **config):
        made.append(Ends(kind, tmp_path, **config))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_controls_arrive_in_order_and_can_be_answered(make_ends, kind):
    ends = make_ends(kind)
    messages = [b"x" * size for size in (1, 100, 70_000, 300_000)] * 5
    for message in messages:
        ends.p.send(ends.d.address, message)
    ends.pump_until(lambda: len(ends.at_d) == len(messages))
    assert [bytes(item.control) for item in ends.at_d] == messages
    assert all(item.header is None and item.payload is None for item in ends.at_d)
    for message in messages:
        ends.reply(message)
    assert ends.p.counts == ends.d.counts == type(ends.p.counts)()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_payloads_go_from_scattered_to_scattered_memory(make_ends, kind):
    ends = make_ends(kind).meet()
    dice = random.Random(1)
    shapes = [[8], [64 * KIB] * 5, [4096] * 16, [MIB, 8, 2 * MIB], [8] * 3000, [MIB], [MIB + 8], [2 * MIB]]
    shapes += [[dice.randrange(1, 5000) for _ in range(40)] for _ in range(10)]
    source, target = Pool(5 * MIB, 1), Pool(5 * MIB, 2)
    untouched = bytes(target.memory)
    for index, sizes in enumerate(shapes):
        pieces = source.pieces(sizes, index)
        header = ends.send_frame(pieces, index)
        ends.pump_until(lambda num=index: len(ends.frames()) == num + 1)
        delivery = ends.frames()[-1]
        assert bytes(delivery.header) == header
        assert delivery.payload.num_bytes == sum(sizes)
        other = [sum(sizes) // 3, sum(sizes) - sum(sizes) // 3]  # pieces of other sizes there
        places = target.pieces([size for size in other if size], index + 100)
        ends.read(delivery, places)
        assert b"".join(places) == b"".join(pieces)
        for place in places:  # and nothing but those
            start = memoryview(place)
            start[:] = bytes(len(place))
        before, target.memory[:] = bytes(target.memory), untouched
        del before
    assert ends.p.data_path_of(ends.d.address) == ends.data_path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_nothing_but_the_pieces_is_written(make_ends, kind):
    ends = make_ends(kind).meet()
    source, target = Pool(MIB, 1), Pool(2 * MIB, 2)
    before = bytes(target.memory)
    pieces = source.pieces([10_000] * 80)
    ends.send_frame(pieces)
    ends.pump_until(ends.frames)
    places = target.pieces([50_000] * 16)
    ends.read(ends.frames()[0], places)
    assert b"".join(places) == b"".join(pieces)
    for place, size in zip(places, [50_000] * 16, strict=True):
        assert len(place) == size
    clean = Pool(2 * MIB, 2)
    for place, again in zip(places, clean.pieces([50_000] * 16), strict=True):
        again[:] = place
    assert target.memory == clean.memory != before


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_frames_and_controls_at_once(make_ends, kind):
    ends = make_ends(kind).meet()
    source = Pool(4 * MIB, 3)
    sent, got, wanted = {}, {}, 60
    for seq in range(wanted):
        pieces = source.pieces([32 * KIB] * (1 + seq % 60), seq)
        sent[seq] = b"".join(pieces)
        ends.send_frame(pieces, seq)
        if seq % 7 == 0:
            ends.p.send(ends.d.address, b"between")
    reading = {}
    end_s = time.monotonic() + PATIENCE_S
    num_controls = 0
    while len(got) < wanted and time.monotonic() < end_s:
        ends.pump()
        for item in ends.at_d:
            if item.control is not None:
                num_controls += 1
                continue
            seq = decode_header(item.header).seq
            target = bytearray(item.payload.num_bytes)
            if item.payload.read_into([memoryview(target)]):
                got[seq] = target
            else:
                reading[id(item.payload)] = seq, target, item.payload
        ends.at_d.clear()
        for key in [key for key in reading if key in ends.done]:
            assert ends.done.pop(key)
            seq, target, _ = reading.pop(key)
            got[seq] = target
    assert {seq: bytes(data) for seq, data in got.items()} == sent
    assert num_controls == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_that_is_written_already_has_no_payload(make_ends, kind):
    ends = make_ends(kind).meet()
    header = make_header(64, is_written=True)
    ends.p.send_frame(ends.d.address, header, [], "shm")
    ends.send_frame([memoryview(bytes(64))], seq=1)
    ends.pump_until(lambda: len(ends.frames()) == 2)
    by_seq = {decode_header(frame.header).seq: frame for frame in ends.frames()}
    assert bytes(by_seq[0].header) == header
    assert by_seq[0].payload is None
    assert by_seq[1].payload.num_bytes == 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_discarded_payload_leaves_the_others_alone(make_ends, kind):
    ends = make_ends(kind).meet()
    source = Pool(3 * MIB)
    for seq in range(6):
        ends.send_frame(source.pieces([100_000] * 25, seq), seq)
    target = bytearray(2_500_000)
    for seq in range(6):
        ends.pump_until(lambda num=seq: len(ends.frames()) > num)
        frame = ends.frames()[seq]
        if seq % 2:
            frame.payload.discard()
        elif seq == 2:
            is_done = frame.payload.read_into([memoryview(target)])
            frame.payload.discard()  # in the middle, where reading takes time
            target[:] = b"u" * len(target)
            assert is_done or id(frame.payload) not in ends.done
        else:
            assert ends.read(frame) == b"".join(source.pieces([100_000] * 25, decode_header(frame.header).seq))
    time.sleep(0.02)
    ends.pump()
    assert target == b"u" * len(target)
    assert id(ends.frames()[2].payload) not in ends.done


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_was_unpinned_is_read_no_more(make_ends, kind):
    ends = make_ends(kind, window_bytes=32 * MIB).meet()
    source = Pool(4 * MIB, 5)
    pieces = source.pieces([60_000] * 60)
    content = b"".join(pieces)
    for seq in range(14):  # more than sockets hold; the other side does not read
        ends.send_frame(pieces, seq, incoming_id=2 + seq % 2)
    for _ in range(20):
        ends.p.receive(0.005)
    num_pinned = ends.p.num_pinned(ends.d.address)
    assert num_pinned > 2 or ends.data_path == INLINE
    ends.p.unpin(ends.d.address, lambda header: decode_header(header).incoming_id == 2)
    assert ends.p.num_pinned(ends.d.address) < max(1, num_pinned)
    ends.p.unpin(ends.d.address, lambda header: True)
    assert ends.p.num_pinned(ends.d.address) == 0
    source.memory[:] = bytes(len(source.memory))
    ends.p.send(ends.d.address, b"last")
    num_read = 0
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        for frame in ends.frames()[num_read:]:
            assert ends.read(frame) == content
            num_read += 1
        ends.pump()
        if num_read + ends.p.counts.frames_dropped >= 14:
            break
    assert num_read + ends.p.counts.frames_dropped == 14
    assert num_read < 14 or not num_pinned
    ends.send_frame(source.pieces([8]), 20)
    ends.pump_until(lambda: decode_header(ends.frames()[-1].header).seq == 20)


@pytest.mark.parametrize("kind", SOCKET_KINDS)
@pytest.mark.long
def test_a_peer_that_stops_reading_makes_nobody_wait(make_ends, kind):
    ends = make_ends(kind, window_bytes=8 * MIB).meet()
    pieces = Pool(5 * MIB).pieces([MIB] * 4)
    start_s = time.monotonic()
    for seq in range(40 if ends.data_path == "raw" or kind.startswith("grpc") else 10):
        ends.send_frame(pieces, seq)
        ends.p.receive(0.0)
    for _ in range(1000):
        ends.p.send(ends.d.address, b"x" * 1000)
    assert time.monotonic() - start_s < 3 * OF_TIME_S
    if ends.data_path == "raw" or kind.startswith("grpc"):
        assert ends.p.counts.frames_dropped > 10
        assert ends.p.num_pinned(ends.d.address) <= 6
    start_s = time.monotonic()
    ends.close()
    assert time.monotonic() - start_s < 6 * OF_TIME_S


@pytest.mark.parametrize("kind", SOCKET_KINDS)
@pytest.mark.long
def test_a_peer_that_is_gone_loses_messages_and_may_come_back(make_ends, kind):
    ends = make_ends(kind).meet()
    address = ends.d.address
    ends.d.close()
    start_s = time.monotonic()
    for seq in range(5):
        ends.p.send(address, b"lost")
        ends.send_frame([memoryview(bytes(100_000))], seq)
        ends.p.receive(0.01)
    assert time.monotonic() - start_s < OF_TIME_S
    ends.d = ends.listen(address)
    assert ends.d.address == address
    ends.at_d.clear()
    end_s = time.monotonic() + PATIENCE_S
    while not any(item.control == b"again" for item in ends.at_d):
        ends.p.send(address, b"again")
        ends.pump(0.02)
        assert time.monotonic() < end_s
    ends.meet()
    ends.send_frame([memoryview(b"content!")], 9)
    ends.pump_until(lambda: ends.frames() and decode_header(ends.frames()[-1].header).seq == 9)
    assert ends.read(ends.frames()[-1]) == b"content!"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_wakes_come_from_any_thread(make_ends, kind):
    ends = make_ends(kind)
    for end in (ends.p, ends.d):
        end.receive(0.0)
        end.wake()
        start_s = time.monotonic()
        end.receive(60.0)
        assert time.monotonic() - start_s < OF_TIME_S
        waker = threading.Timer(0.05, end.wake)
        waker.start()
        start_s = time.monotonic()
        end.receive(60.0)
        assert time.monotonic() - start_s < OF_TIME_S
        waker.join()
        start_s = time.monotonic()
        end.receive(0.05)
        assert time.monotonic() - start_s > 0.02
        wakers = [threading.Thread(target=lambda end=end: [end.wake() for _ in range(300)]) for _ in range(4)]
        for waker in wakers:
            waker.start()
        for waker in wakers:
            waker.join()
        for _ in range(100):
            end.receive(0.0)
    ends.say(b"still there")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_dropped_peer_is_met_again_when_it_is_needed(make_ends, kind):
    ends = make_ends(kind).meet()
    pieces = Pool(5 * MIB).pieces([MIB] * 4)
    for seq in range(3):
        ends.send_frame(pieces, seq)
    ends.p.drop(ends.d.address)
    assert ends.p.num_pinned(ends.d.address) == 0
    assert ends.p.data_path_of(ends.d.address) == INLINE
    ends.p.drop(ends.d.address)
    ends.p.unpin(ends.d.address, lambda header: True)
    end_s = time.monotonic() + PATIENCE_S
    while not any(item.control == b"again" for item in ends.at_d):
        ends.p.send(ends.d.address, b"again")
        ends.pump(0.02)
        for frame in ends.frames():
            if frame.payload is not None:
                frame.payload.discard()
        ends.at_d = [item for item in ends.at_d if item.header is None]
        assert time.monotonic() < end_s
    ends.d.drop(ends.at_d[-1].peer)
    ends.d.drop("nobody")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_after_close_nothing_is_written_and_the_port_is_free(make_ends, kind):
    ends = make_ends(kind).meet()
    address = ends.d.address
    ends.send_frame(Pool(4 * MIB).pieces([MIB] * 3))
    ends.pump_until(ends.frames)
    target = bytearray(3 * MIB)
    ends.frames()[0].payload.read_into([memoryview(target)])
    ends.d.close()
    content = bytes(target)
    ends.d = ends.listen(address)
    ends.p.receive(0.01)
    time.sleep(0.02)
    assert target == content
    assert ends.d.address == address


@pytest.mark.long
@pytest.mark.parametrize("kind", SOCKET_KINDS)
def test_what_is_too_large_is_not_taken_and_others_are(make_ends, kind):
    ends = make_ends(kind, max_frame_bytes=4096, window_bytes=64 * MIB).meet()
    huge = Pool(20 * MIB).pieces([10 * MIB])
    ends.send_frame(huge)
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        ends.pump()
    assert not ends.frames()
    ends.p.send(ends.d.address, b"y" * (8 * MIB))
    end_s = time.monotonic() + PATIENCE_S
    while not any(item.control == b"small" for item in ends.at_d):
        ends.p.send(ends.d.address, b"small")
        ends.pump(0.02)
        assert time.monotonic() < end_s
    assert all(len(item.control) < 100 for item in ends.at_d)


@pytest.mark.parametrize("kind", SOCKET_KINDS)
def test_an_address_that_is_none_is_a_problem_of_its_own(make_ends, kind):
    ends = make_ends(kind)
    addresses = ["", "tcp://", "udp://127.0.0.1:5", "grpc://", "grpc://a b:5", "x" * 10_000]
    for num_lost, address in enumerate(addresses):
        assert "address" in ends.p.problem(address) or "connect" in ends.p.problem(address)
        assert len(ends.p.problem(address)) < 300
        assert ends.p.counts.messages_lost == num_lost
        ends.p.send(address, b"lost")
    ends.say(b"still there")


def test_parts_that_are_no_message():
    header = bytes(HEADER_BYTES)
    assert deliveries_of("p", []) == []
    assert deliveries_of("p", [header, b"", b""]) == []
    assert deliveries_of("p", [header + b"x", b""]) == []
    assert deliveries_of("p", [b"", b""]) == []
    assert deliveries_of("p", [header * 2, b"payload"]) == []
    assert [delivery.payload for delivery in deliveries_of("p", [header, b""])] == [None]
    assert [bytes(delivery.header) for delivery in deliveries_of("p", [header * 2, b""])] == [header, header]
    assert [delivery.control for delivery in deliveries_of("p", [b""])] == [b""]


def test_headers_of_written_frames_share_a_message_and_keep_their_place(make_ends):
    ends = make_ends("zmq")
    headers = [make_header(0, seq, is_written=True) for seq in range(70)]
    for header in headers:
        ends.p.send_frame(ends.d.address, header, [], "shm")
    ends.p.send(ends.d.address, b"commit")
    ends.pump_until(lambda: len(ends.at_d) == 71)
    assert [bytes(item.control or item.header) for item in ends.at_d] == [*headers, b"commit"]
    ends.p.send_frame(ends.d.address, headers[0], [], "shm")
    ends.pump_until(lambda: len(ends.at_d) == 72)
    assert bytes(ends.at_d[-1].header) == headers[0]
