"""The raw data path beside ZMQ: who gets in, what a connection may say, and how it ends."""

import contextlib
import logging
import random
import select
import socket
import struct
import time

import pytest

from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid
from baton.kvtransfer.protocol.frame import HEADER_BYTES
from baton.kvtransfer.protocol.preface import (
    ACCEPTANCE_BYTES,
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    LISTENER_ID_BYTES,
    READY,
    ConnectingPreface,
)
from baton.kvtransfer.protocol.proof import NUMBER_BYTES, connection_pass
from baton.kvtransfer.protocol.transport import PayloadDone
from baton.kvtransfer.sender.buffer_cursor import MAX_BUFFERS, BufferCursor
from baton.kvtransfer.transports import raw_receiver
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.kvtransfer.transports.raw import parse_place
from baton.proto import kv_pb2
from baton.tests.kvtransfer.proving import OTHER_PROOFS, PROOFS
from baton.tests.kvtransfer.transport_ends import PATIENCE_S, Ends, Pool, make_curve_key, make_header
from baton.tests.patience import STALLS_S

pytestmark = pytest.mark.fast

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def ends(tmp_path):
    made = Ends("raw", tmp_path, max_frame_bytes=4 * MIB)
    yield made.meet()
    made.close()


@pytest.fixture
def connect(ends):
    """Connections to the raw data path, by nobody in particular."""
    made = []

    def make():
        (offer,) = ends.d.offers()
        host, port = offer.raw.address.split(":")
        connection = socket.create_connection((host, int(port)))
        connection.settimeout(0.02)
        made.append(connection)
        return connection

    yield make
    for connection in made:
        connection.close()


def is_closed(ends, connection, timeout_s=5.0):
    """Whether the other side closes it, while that is driven."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        ends.pump()
        try:
            if connection.recv(100) == b"":
                return True
        except TimeoutError:
            pass
        except ConnectionResetError:
            return True
    return False


def hear(ends, connection, size):
    """The next bytes that the other side sends, while that is driven."""
    heard, end_s = b"", time.monotonic() + PATIENCE_S
    while len(heard) < size:
        assert time.monotonic() < end_s, heard
        ends.pump()
        try:
            heard += (new := connection.recv(size - len(heard)))
            assert new, "the connection was closed"
        except TimeoutError:
            pass
    return heard


def answered(ends, connection, *, proofs=PROOFS, listener_id=None, name=None):
    """The preface that would answer the challenge of a connection, and its answer; by default the peer's own."""
    preface = ConnectingPreface(
        proofs,
        ends.d.offers()[0].raw.listener_id if listener_id is None else listener_id,
        ends.p._routing_id(ends.d.address) if name is None else name,
        random.randbytes(NUMBER_BYTES),
    )
    return preface, preface.take(hear(ends, connection, CHALLENGE_BYTES))


def welcomed(ends, connect):
    """A connection that is let in, as the peer's own."""
    connection = connect()
    preface, answer = answered(ends, connection)
    connection.sendall(answer)
    preface.take(hear(ends, connection, ACCEPTANCE_BYTES))
    assert preface.is_accepted
    return connection


class Relay:
    """A place on the way, where everything is read; it passes on what it reads."""

    def __init__(self, address):
        host, port = address.split(":")
        self._far = socket.create_connection((host, int(port)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._near = None
        self.from_near = self.from_far = b""

    def carry(self):
        if self._near is None:
            self._near, _ = self._listener.accept()
        for one in (self._near, self._far):
            one.settimeout(0.002)
        with contextlib.suppress(TimeoutError):
            self.from_far += (new := self._far.recv(1 << 16))
            self._near.sendall(new)
        with contextlib.suppress(TimeoutError):
            self.from_near += (new := self._near.recv(1 << 16))
            self._far.sendall(new)

    def close(self):
        for one in (self._near, self._far, self._listener):
            one.close()


@pytest.fixture
def relayed(ends):
    """What is read on the way of a connection that the peer opens and sends a frame on."""
    (offer,) = ends.d.offers()
    relay = Relay(offer.raw.address)
    offer.raw.address = relay.address
    assert ends.p.open_data_path(ends.d.address, offer) == ""
    end_s = time.monotonic() + PATIENCE_S
    while ends.p.data_path_of(ends.d.address) != "raw":
        assert time.monotonic() < end_s
        ends.pump()
        relay.carry()
    ends.send_frame([memoryview(b"content!")])
    while not ends.frames():
        assert time.monotonic() < end_s
        ends.pump()
        relay.carry()
    assert ends.read(ends.frames()[0]) == b"content!"
    ends.at_d.clear()
    yield relay
    relay.close()


@pytest.mark.parametrize("num_bytes", [None, ANSWER_BYTES, ANSWER_BYTES - 1])
def test_what_was_read_on_the_way_lets_nobody_in_again(ends, connect, relayed, num_bytes):
    """Whole, without the frame that followed, and cut, with a frame of the reader's own behind."""
    assert relayed.from_near.endswith(b"content!") and len(relayed.from_far) == CHALLENGE_BYTES + ACCEPTANCE_BYTES
    connection = connect()
    connection.sendall(relayed.from_near[:num_bytes] + make_header(8) + b"not mine")
    assert is_closed(ends, connection)
    assert not ends.frames() and ends.d.counts.connections_refused == 1
    relayed.carry()
    ends.say(b"still there")


def test_nothing_that_a_peer_sends_shows_a_secret(ends, relayed):
    (offer,) = ends.d.offers()
    assert not offer.raw.token, "which a peer of an earlier version would send in clear"
    said = relayed.from_near + relayed.from_far
    for secret in (bytes.fromhex(ends.config.key), connection_pass(bytes.fromhex(ends.config.key)).encode()):
        assert secret not in said and secret not in offer.SerializeToString()


@pytest.mark.parametrize("change", ["proof", "replay", "old", "garbage", "more"])
def test_a_listener_that_proves_nothing_gets_no_frame(ends, relayed, change, caplog):
    """It may have taken the port of a receiver that has died, and have read all that was said to it.

    It is logged, though another fault of that connection was logged before.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (offer,) = ends.d.offers()
        offer.raw.address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert ends.p.open_data_path(ends.d.address, offer) == ""
        listener.accept()[0].close()
        ends.pump_until(lambda: ends.p.counts.data_paths_failed == 1)
        ends.pump_until(lambda: select.select([listener], [], [], 0.0)[0])
        connection, _ = listener.accept()
        connection.settimeout(0.02)
        acceptance = {
            "proof": READY + bytes(ACCEPTANCE_BYTES - len(READY)),
            "replay": relayed.from_far[CHALLENGE_BYTES:],
            "old": b"KVR1 ok\n",
            "garbage": b"220 smtp.example ESMTP\r\n",
            "more": READY + bytes(ACCEPTANCE_BYTES - len(READY)) + b"more",
        }[change]
        heard = b""
        if change not in ("old", "garbage"):
            connection.sendall(relayed.from_far[:CHALLENGE_BYTES])
            heard = hear(ends, connection, ANSWER_BYTES)
        connection.sendall(acceptance)
        ends.pump_until(lambda: ends.p.counts.data_paths_failed == 2)
        ends.send_frame([memoryview(b"content!")])
        ends.pump_until(ends.frames)
        assert ends.p.data_path_of(ends.d.address) == "inline" and ends.p.counts.frames_fallen_back == 1
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            heard += connection.recv(1 << 16)
        assert len(heard) in (0, ANSWER_BYTES) and b"content!" not in heard
        connection.close()
    why = "prove the deployment's secret" if heard else "does not speak KVR2"
    assert sum(why in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.2:80", (socket.AF_INET, "127.0.0.2", 80)),
        (":80", (socket.AF_INET, "127.0.0.1", 80)),
        ("0.0.0.0:80", (socket.AF_INET, "127.0.0.1", 80)),
        ("[::1]:80", (socket.AF_INET6, "::1", 80)),
        ("[::]:80", (socket.AF_INET, "127.0.0.1", 80)),
    ],
)
def test_an_offer_names_a_place(address, place):
    assert parse_place(address, "tcp://127.0.0.1:5555") == place


@pytest.mark.parametrize("address", ["", "80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "host.example:80", "a:٣"])
def test_an_offer_that_names_none_is_refused(ends, address):
    with pytest.raises(ValueError):
        parse_place(address, "tcp://127.0.0.1:5555")
    listener_id = bytes(LISTENER_ID_BYTES)
    offer = kv_pb2.DataPathOffer(data_path="raw", raw=kv_pb2.RawOffer(address=address, listener_id=listener_id))
    assert "the offer of the raw data path" in ends.p.open_data_path(ends.d.address, offer)
    assert ends.p.data_path_of(ends.d.address) == "raw"  # what was open stays open


def test_other_offers_are_refused_by_name(ends):
    assert "'shm'" in ends.p.open_data_path(ends.d.address, kv_pb2.DataPathOffer(data_path="shm"))
    (offer,) = ends.d.offers()
    old = kv_pb2.DataPathOffer(data_path="raw", raw=kv_pb2.RawOffer(address=offer.raw.address, token=bytes(16)))
    assert "not of this version" in ends.p.open_data_path(ends.d.address, old)
    assert ends.p.data_path_of(ends.d.address) == "raw", "what was open stays open"
    assert "no connection" in ends.p.open_data_path("tcp://127.0.0.1:1", offer)
    assert "no connection" in ends.d.open_data_path(ends.d.address, offer)


@pytest.mark.long
@pytest.mark.parametrize("change", ["secret", "incarnation", "name", "old", "garbage", "silence", "half"])
def test_strangers_are_closed_and_counted(ends, connect, change, caplog):
    """At once, or when a lease is over: the same for one that says nothing and one that stalls in its answer."""
    connection = connect()
    changes = {
        "secret": {"proofs": OTHER_PROOFS},
        "incarnation": {"listener_id": b"?" * LISTENER_ID_BYTES},
        "name": {"name": b"somebody else"},
    }
    _, answer = answered(ends, connection, **changes.get(change, {}))
    said = {
        "old": b"KVR1" + bytes(272),
        "garbage": b"GET / HTTP/1.1\r\n" * 100,
        "silence": b"KV",
        "half": answer[: ANSWER_BYTES - 1],
    }
    connection.sendall(said.get(change, answer))
    assert is_closed(ends, connection)
    assert ends.d.counts.connections_refused == 1
    assert any("a raw connection from a stranger is closed" in record.message for record in caplog.records)
    ends.send_frame([memoryview(b"content!")])
    ends.pump_until(ends.frames)
    assert ends.read(ends.frames()[0]) == b"content!"


def broken_header():
    header = bytearray(make_header(64))
    header[30] ^= 4
    return bytes(header)


@pytest.mark.parametrize(
    "data",
    [broken_header(), make_header(4 * MIB + 8), make_header((1 << 32) - 8), b"\0" * HEADER_BYTES, b"KVP2" * 100],
)
def test_a_header_that_is_none_ends_its_connection_only(ends, connect, data):
    connection = welcomed(ends, connect)
    connection.sendall(make_header(8) + b"12345678" + data)
    ends.pump_until(ends.frames)
    assert ends.read(ends.frames()[0]) == b"12345678"  # what came before counts
    assert is_closed(ends, connection)
    assert ends.d.counts.connections_refused == 1
    ends.send_frame([memoryview(b"content!")])
    ends.pump_until(lambda: len(ends.frames()) == 2)
    assert ends.read(ends.frames()[1]) == b"content!"


@pytest.mark.long
def test_whatever_a_connection_says_nothing_else_happens(ends, connect):
    dice = random.Random(3)
    good = make_header(64) + bytes(64)
    for _ in range(30):
        connection = welcomed(ends, connect) if dice.random() < 0.7 else connect()
        data = bytearray(good * dice.randrange(1, 4))
        for _ in range(dice.randrange(4)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        connection.sendall(data[: dice.randrange(len(data))])
        ends.pump()
        connection.close()
        ends.pump()
        for frame in ends.frames():
            if frame.payload is not None and dice.random() < 0.5:
                frame.payload.discard()
            elif frame.payload is not None:
                frame.payload.read_into([memoryview(bytearray(frame.payload.num_bytes))])
        ends.at_d.clear()
    ends.say(b"still there")


@pytest.mark.parametrize("num_sent", [0, 1, 100_000, 300_000])
@pytest.mark.long
def test_a_payload_that_stops_blocks_nobody(ends, connect, num_sent):
    connection = welcomed(ends, connect)
    payload = random.Random(1).randbytes(500_000)
    connection.sendall(make_header(len(payload), seq=7) + payload[:num_sent])
    ends.pump_until(ends.frames)
    stuck = ends.frames()[0]
    target = bytearray(len(payload))
    start_s = time.monotonic()
    assert not stuck.payload.read_into([memoryview(target)])
    assert time.monotonic() - start_s < STALLS_S, "the rest has not even been sent"
    source = Pool(2 * MIB)
    start_s = time.monotonic()
    for seq in range(20):
        ends.send_frame(source.pieces([50_000] * 10, seq), seq)
        ends.pump_until(lambda num=seq: len(ends.frames()) == num + 2)
        assert ends.read(ends.frames()[-1]) == b"".join(source.pieces([50_000] * 10, seq))
    assert time.monotonic() - start_s < STALLS_S
    assert target[:num_sent] == payload[:num_sent]
    connection.settimeout(5)
    connection.sendall(payload[num_sent:])
    ends.pump_until(lambda: id(stuck.payload) in ends.done)
    assert ends.done[id(stuck.payload)]
    assert target == payload


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_connection_that_ends_in_a_payload_says_so(ends, connect, is_decided):
    connection = welcomed(ends, connect)
    connection.sendall(make_header(100_000) + b"x" * 60_000)
    ends.pump_until(ends.frames)
    payload = ends.frames()[0].payload
    target = bytearray(100_000)
    if is_decided:
        assert not payload.read_into([memoryview(target)])
        ends.pump()
        assert id(payload) not in ends.done
    connection.close()
    time.sleep(0.01)
    if not is_decided:
        ends.pump()
        assert not payload.read_into([memoryview(target)])
    ends.pump_until(lambda: id(payload) in ends.done)
    assert not ends.done[id(payload)]
    assert ends.d.counts.payloads_cut == 1
    assert target[60_000:] == bytes(40_000)


def test_a_payload_discarded_in_the_middle_goes_nowhere_and_the_next_one_arrives(ends, connect):
    connection = welcomed(ends, connect)
    connection.sendall(make_header(1_000_000) + b"x" * 300_000)
    ends.pump_until(ends.frames)
    payload = ends.frames()[0].payload
    target = bytearray(1_000_000)
    assert not payload.read_into([memoryview(target)])
    ends.pump()
    payload.discard()
    target[:] = bytes(len(target))
    connection.settimeout(5)
    connection.sendall(b"y" * 700_000 + make_header(8, seq=1) + b"content!")
    ends.pump_until(lambda: len(ends.frames()) == 2)
    assert ends.read(ends.frames()[1]) == b"content!"
    assert target == bytes(len(target))
    assert id(payload) not in ends.done


def test_a_discarded_payload_that_never_comes_is_not_reported(ends, connect):
    connection = welcomed(ends, connect)
    connection.sendall(make_header(1_000_000) + b"x" * 300_000)
    ends.pump_until(ends.frames)
    payload = ends.frames()[0].payload
    payload.read_into([memoryview(bytearray(1_000_000))])
    payload.discard()
    connection.close()
    for _ in range(20):
        ends.pump()
    assert not ends.done
    ends.say(b"still there")


def test_a_peer_has_only_so_many_connections(ends, connect, monkeypatch):
    monkeypatch.setattr(raw_receiver, "MAX_STREAMS_PER_PEER", 3)
    connections = [welcomed(ends, connect) for _ in range(4)]  # beside the one that is open
    assert is_closed(ends, connections[0])
    connections[-1].sendall(make_header(8) + b"content!")
    ends.pump_until(ends.frames)
    assert ends.read(ends.frames()[0]) == b"content!"


def test_there_are_only_so_many_connections_in_all(ends, connect, monkeypatch):
    """Beside the one that is open. Those of strangers, who prove nothing, keep no peer out."""
    monkeypatch.setattr(raw_receiver, "MAX_CONNECTIONS", 3)
    strangers = [connect() for _ in range(2)]
    strangers[0].sendall(b"K")
    hear(ends, strangers[1], CHALLENGE_BYTES)
    own = welcomed(ends, connect)
    assert is_closed(ends, strangers[0]) and ends.d.counts.connections_refused == 1
    welcomed(ends, connect)
    assert is_closed(ends, strangers[1]) and ends.d.counts.connections_refused == 2
    assert is_closed(ends, connect()) and ends.d.counts.connections_refused == 3, "all have proved themselves"
    own.sendall(make_header(8) + b"content!")
    ends.pump_until(ends.frames)
    assert ends.read(ends.frames()[0]) == b"content!"


def test_a_data_path_that_breaks_falls_back_and_comes_again(ends, caplog):
    caplog.set_level(logging.WARNING)
    for connection in list(ends.d._receiver._connections.values()):
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends.d._receiver._close(connection)
    ends.pump_until(lambda: ends.p.data_path_of(ends.d.address) == "inline")
    ends.send_frame([memoryview(b"content!")], seq=1)
    ends.pump_until(ends.frames)
    assert ends.read(ends.frames()[0]) == b"content!"
    assert (ends.p.counts.frames_fallen_back, ends.p.counts.data_paths_failed) == (1, 1)
    ends.pump_until(lambda: ends.p.data_path_of(ends.d.address) == "raw")
    ends.send_frame([memoryview(b"contents")], seq=2)
    ends.pump_until(lambda: len(ends.frames()) == 2)
    assert ends.read(ends.frames()[1]) == b"contents"
    assert ends.p.counts.frames_fallen_back == 1
    assert sum("payloads go inline" in record.message for record in caplog.records) == 1


@pytest.mark.long
def test_a_data_path_nobody_answers_at_leaves_payloads_inline(tmp_path, caplog):
    ends = Ends("zmq", tmp_path).meet()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        raw = kv_pb2.RawOffer(address=address, listener_id=bytes(LISTENER_ID_BYTES))
        offer = kv_pb2.DataPathOffer(data_path="raw", raw=raw)
        assert ends.p.open_data_path(ends.d.address, offer) == ""
        ends.data_path = "raw"
        for seq in range(5):
            ends.send_frame([memoryview(b"content!")], seq)
        ends.pump_until(lambda: len(ends.frames()) == 5)
        assert ends.p.data_path_of(ends.d.address) == "inline"
        ends.pump_until(lambda: ends.p.counts.data_paths_failed > 0)
    ends.pump_until(lambda: ends.p.counts.data_paths_failed > 3)
    assert ends.p.counts.frames_fallen_back == 5
    assert sum("payloads go inline" in record.message for record in caplog.records) == 1
    ends.close()


@pytest.mark.parametrize(("transport", "data_paths"), [("tcp", ["raw"]), ("auto", ["raw"]), ("zmq", []), ("shm", [])])
def test_only_a_worker_that_may_use_raw_sockets_offers_them(transport, data_paths, tmp_path):
    ends = Ends("zmq", tmp_path, transport=transport)
    assert [offer.data_path for offer in ends.d.offers()] == data_paths
    ends.close()


def test_encryption_and_the_raw_data_path_exclude_each_other(tmp_path, ends):
    curve = Ends("zmq-curve", tmp_path).meet()
    assert curve.d.offers() == []
    (offer,) = ends.d.offers()
    assert "not encrypted" in curve.p.open_data_path(curve.d.address, offer)
    curve.close()


@pytest.mark.long
def test_only_holders_of_the_key_get_in(tmp_path):
    curve = Ends("zmq-curve", tmp_path).meet()
    config = KVTransferConfig(**make_curve_key(tmp_path, "other"))
    strangers = [ZmqTransport(config=config), ZmqTransport()]
    for stranger in strangers:
        stranger.send(curve.d.address, b"let me in")
    curve.say(b"hello")
    end_s = time.monotonic() + 0.7
    while time.monotonic() < end_s:
        curve.pump()
    assert [bytes(item.control) for item in curve.at_d] == [b"hello"]
    for stranger in strangers:
        stranger.close()
    curve.close()


def test_a_key_file_that_holds_none_is_refused_at_start(tmp_path):
    for name, content in (("missing", None), ("text", "not a key"), ("public", 'public-key = "x"\n')):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigInvalid, match="curve_key_file"):
            ZmqTransport(config=KVTransferConfig(curve_key_file=str(path)))


def test_a_cursor_goes_through_pieces():
    data = bytes(range(200))
    target = [bytearray(size) for size in (0, 3, 50, 0, 7, 140)]
    cursor = BufferCursor(map(memoryview, target))
    dice = random.Random(1)
    start = 0
    while cursor.num_left:
        taken = cursor.fill(memoryview(data)[start : start + dice.randrange(1, 30)])
        start += taken
        assert cursor.num_left == 200 - start
    assert b"".join(target) == data
    cursor = BufferCursor([memoryview(target[2]), memoryview(target[5])])
    cursor.advance(10)
    cursor.keep()
    cursor.keep()
    left = bytes(target[2][10:] + target[5])
    for piece in target:
        piece[:] = bytes(len(piece))
    assert b"".join(cursor.buffers()) == left
    assert len(BufferCursor([b"x"] * 3000).buffers()) == MAX_BUFFERS


@pytest.mark.long
def test_small_frames_and_many_pieces_share_system_calls(ends):
    source = Pool(6 * MIB)
    sizes = [8] * (2 * MAX_BUFFERS + 5)
    pieces = source.pieces(sizes)
    for seq in range(200):
        ends.send_frame(pieces if seq == 100 else pieces[seq : seq + 2], seq)
    seen = 0
    while seen < 200:
        ends.pump_until(lambda num=seen: len(ends.frames()) > num)
        for frame in ends.frames()[seen:]:
            wanted = pieces if seen == 100 else pieces[seen : seen + 2]
            assert ends.read(frame) == b"".join(wanted)
            seen += 1
    assert not any(isinstance(item, PayloadDone) for item in ends.at_d)


def test_without_file_numbers_new_connections_wait_and_the_poller_rests(ends, connect, monkeypatch, caplog):
    """A listener that stays readable would else wake the KV receiver process at every turn, with a line of log each."""
    receiver = ends.d._receiver
    monkeypatch.setattr(raw_receiver, "REST_S", 0.0)
    listener, full = receiver._listener, True
    num_accepts = 0

    class Full:
        def accept(self):
            nonlocal num_accepts
            num_accepts += 1
            if full:
                raise OSError(24, "Too many open files")
            return listener.accept()

        def __getattr__(self, name):
            return getattr(listener, name)

    monkeypatch.setattr(receiver, "_listener", Full())
    connect()
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            receiver.ready(receiver._listener_file)
            assert receiver._listener_file not in dict(receiver._poller.sockets)
            receiver.tick()
            assert receiver._listener_file in dict(receiver._poller.sockets)
    assert num_accepts == 50 and len([one for one in caplog.records if "cannot take" in one.message]) == 1
    full, before = False, len(receiver._connections)
    receiver.ready(receiver._listener_file)
    assert len(receiver._connections) > before
