"""The hand-off over gRPC: packets, streams that break, strangers, certificates."""

import queue
import random
import threading
import time

import grpc
import pytest
import torch

from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid, PortInUse, ProtocolError
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.receiver.service import Completed
from baton.kvtransfer.transports import over_grpc
from baton.kvtransfer.transports.over_grpc import GrpcTransport
from baton.kvtransfer.transports.over_grpc_stream import (
    MAX_QUEUED,
    MAX_WAITING,
    METHOD,
    NAME_KEY,
    PART_BYTES,
    PASS_KEY,
    GrpcSendQueue,
    decode_packet,
    encode_control_packet,
    encode_frame_packet,
)
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import rows
from baton.tests.kvtransfer.transport_ends import Ends, make_certificates, make_header, threads_named

pytestmark = pytest.mark.fast

MIB = 1 << 20


@pytest.fixture
def ends(tmp_path):
    made = Ends("grpc", tmp_path, max_frame_bytes=4 * MIB)
    yield made.meet()
    made.close()


class Stranger:
    """A client that says what it likes."""

    def __init__(self, address, name="stranger"):
        self._channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        self._packets = queue.SimpleQueue()
        shown = ((PASS_KEY, connection_pass(bytes.fromhex(KVTransferConfig().key))),)
        metadata = shown if name is None else (*shown, (NAME_KEY, name))
        self._call = self._channel.stream_stream(METHOD)(iter(self._packets.get, None), metadata=metadata)
        self.heard = []
        self.error = None
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self):
        try:
            self.heard.extend(self._call)
        except grpc.RpcError as error:
            self.error = error.code(), error.details()

    def say(self, *packets):
        for packet in packets:
            self._packets.put(packet)

    def close(self):
        self._packets.put(None)
        self._call.cancel()
        self._thread.join(5)
        self._channel.close()


@pytest.fixture
def make_stranger(ends):
    made = []

    def make(**options):
        made.append(Stranger(ends.d.address, **options))
        return made[-1]

    yield make
    for stranger in made:
        stranger.close()


def test_packets_are_what_the_proto_says():
    header = make_header(300)
    for data, packet in (
        (encode_control_packet(b"c" * 200), kv_pb2.Packet(control=b"c" * 200)),
        (encode_frame_packet(header, [b"a" * 100, b"b"]), kv_pb2.Packet(header=header, payload=b"a" * 100 + b"b")),
        (encode_frame_packet(header, []), kv_pb2.Packet(header=header)),
        (encode_frame_packet(None, [b"z" * 100_000]), kv_pb2.Packet(payload=b"z" * 100_000)),
    ):
        assert kv_pb2.Packet.FromString(data) == packet
        assert packet.SerializeToString() == data
        found = decode_packet(data)
        assert bytes(found.control or b"") == packet.control
        assert (found.header or b"") == packet.header
        assert bytes(found.payload or b"") == packet.payload


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\xff\xff\xff\xff\xff\x01",
        b"\x08\x01",
        b"\x22\x01x",
        b"\x12\x01x",
        b"\x0a\x01x\x1a\x01y",
        b"\x1a\x01x\x0a\x01y",
        b"\x1a\x01x\x1a\x01y",
    ],
)
def test_other_bytes_are_no_packet(data):
    with pytest.raises(ProtocolError):
        decode_packet(data)


def test_damaged_packets_are_refused_or_read_and_nothing_else():
    dice = random.Random(1)
    good = [encode_control_packet(b"c" * 200), encode_frame_packet(make_header(10), [b"p" * 10])]
    for _ in range(2000):
        data = bytearray(dice.choice(good))
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        data = bytes(data[: dice.randrange(len(data) + 1)])
        try:
            packet = decode_packet(data)
        except ProtocolError:
            continue
        assert sum(len(part) for part in (packet.control, packet.header, packet.payload) if part) <= len(data)


def test_an_send_queue_sends_controls_first_and_cuts_payloads():
    send_queue = GrpcSendQueue(4 * MIB)
    memory = bytearray(random.Random(2).randbytes(2 * PART_BYTES + 100))
    pieces = [memoryview(memory)[:70_000], memoryview(memory)[70_000:]]
    content = bytes(memory)
    packets = iter(send_queue)
    assert send_queue.put_frame(make_header(len(memory)), pieces)
    first = decode_packet(next(packets))
    assert first.header == make_header(len(memory))
    assert len(first.payload) == PART_BYTES
    assert send_queue.put(b"control")
    assert bytes(decode_packet(next(packets)).control) == b"control"
    assert send_queue.num_pinned == 1
    assert send_queue.put_frame(make_header(8, seq=1), [memoryview(b"12345678")])
    assert send_queue.unpin(lambda _: True) == 1
    assert send_queue.num_pinned == 0
    memory[:] = bytes(len(memory))
    rest = [decode_packet(next(packets)).payload for _ in range(2)]
    assert bytes(first.payload) + b"".join(rest) == content
    assert not send_queue.put_frame(make_header(5 * MIB), [memoryview(bytes(5 * MIB))])
    assert sum(send_queue.put(b"x") for _ in range(MAX_QUEUED + 5)) == MAX_QUEUED
    assert send_queue.close() == 0
    assert list(packets) == []
    assert not send_queue.put(b"x")
    assert not send_queue.put_frame(make_header(8), [memoryview(b"12345678")])


@pytest.mark.parametrize("name", [None, "", "with space", "x" * 65])
def test_a_stream_without_a_proper_name_is_refused(ends, make_stranger, name):
    stranger = make_stranger(name=name)
    ends.pump_until(lambda: stranger.error is not None)
    assert stranger.error[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert ends.d.counts.connections_refused == 1
    ends.say(b"still there")


def header_packet(payload_bytes, part=b"", **changes):
    return encode_frame_packet(make_header(payload_bytes, **changes), [part] if part else [])


def broken_header_packet():
    data = bytearray(header_packet(8, b"x" * 8))
    data[40] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    "packets",
    [
        [b"not a packet"],
        [encode_frame_packet(None, [b"a payload without a frame"])],
        [header_packet(8, b"too long for it")],
        [header_packet(100, b"1"), encode_frame_packet(None, [b"x" * 100])],
        [header_packet(100, b"1"), header_packet(8, b"12345678", seq=1)],
        [header_packet(100)],
        [header_packet(5 * MIB, b"1")],
        [header_packet((1 << 32) - 8, b"1")],
        [broken_header_packet()],
        [header_packet(8, b"12345678", is_written=True)],
    ],
)
@pytest.mark.long
def test_a_stream_that_breaks_the_rules_is_ended_and_no_other(ends, make_stranger, packets):
    stranger = make_stranger()
    stranger.say(encode_control_packet(b"hello"))
    ends.pump_until(lambda: len(ends.at_d) == 1)
    stranger.say(*packets)

    def turn():
        for frame in ends.frames():
            if frame.payload is not None and frame.payload.num_bytes == 100:
                frame.payload.discard()
        return stranger.error is not None

    ends.pump_until(turn)
    assert stranger.error[0] in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED)
    assert ends.d.counts.connections_refused == 1
    ends.send_frame([memoryview(b"content!")], seq=9)
    ends.pump_until(lambda: ends.at_d[-1].header == make_header(8, seq=9))
    assert ends.read(ends.at_d[-1]) == b"content!"


def test_a_message_beyond_the_bound_ends_its_stream(ends, make_stranger):
    stranger = make_stranger()
    stranger.say(encode_control_packet(b"x" * (2 * MIB)))
    ends.pump_until(lambda: stranger.error is not None)
    assert stranger.error[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    ends.say(b"still there")


@pytest.mark.long
def test_a_stream_keeps_only_so_much_waiting(ends, make_stranger):
    stranger = make_stranger()
    for seq in range(50):
        stranger.say(header_packet(1000, b"x" * 1000, seq=seq))
    time.sleep(0.3)
    assert len(ends.d.receive(0.0)) <= MAX_WAITING
    num_taken = MAX_WAITING
    end_s = time.monotonic() + 10
    while num_taken < 50 and time.monotonic() < end_s:
        num_taken += len(ends.d.receive(0.05))
    assert num_taken == 50


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_stream_that_ends_in_a_payload_says_so(ends, make_stranger, is_decided):
    stranger = make_stranger()
    stranger.say(header_packet(3 * MIB, b"x" * MIB))
    ends.pump_until(ends.frames)
    payload = ends.frames()[0].payload
    target = bytearray(3 * MIB)
    if is_decided:
        assert not payload.read_into([memoryview(target)])
    stranger.close()
    time.sleep(0.1)
    if not is_decided:
        assert not payload.read_into([memoryview(target)])
    ends.pump_until(lambda: id(payload) in ends.done)
    assert not ends.done[id(payload)]
    assert target[MIB:] == bytes(2 * MIB)
    assert ends.d.counts.payloads_cut == 1


def test_a_discarded_payload_is_written_nowhere(ends, make_stranger):
    stranger = make_stranger()
    stranger.say(header_packet(3 * MIB, b"x" * MIB))
    ends.pump_until(ends.frames)
    payload = ends.frames()[0].payload
    target = bytearray(3 * MIB)
    assert not payload.read_into([memoryview(target)])
    end_s = time.monotonic() + 5
    while not target[0] and time.monotonic() < end_s:
        time.sleep(0.001)
    payload.discard()
    target[:] = bytes(len(target))
    stranger.say(encode_frame_packet(None, [b"y" * MIB]), encode_frame_packet(None, [b"z" * MIB]))
    stranger.say(header_packet(8, b"content!", seq=1))
    ends.pump_until(lambda: len(ends.frames()) == 2)
    assert ends.read(ends.frames()[1]) == b"content!"
    assert target == bytes(len(target))
    assert id(payload) not in ends.done


def test_a_peer_that_comes_again_by_its_name_takes_over(ends, make_stranger):
    first = make_stranger(name="twice")
    first.say(encode_control_packet(b"one"))
    ends.pump_until(lambda: len(ends.at_d) == 1)
    second = make_stranger(name="twice")  # over the same connection: channels of one process share it
    second.say(encode_control_packet(b"two"))
    ends.pump_until(lambda: len(ends.at_d) == 2)
    ends.pump_until(lambda: not first._thread.is_alive())
    ends.d.send(ends.at_d[-1].peer, b"answer")
    ends.pump_until(lambda: second.heard)
    assert decode_packet(second.heard[0]).control == b"answer"


def test_a_stream_that_takes_long_to_end_is_refused_once(tmp_path, monkeypatch):
    ends = Ends("grpc", tmp_path)
    stranger = Stranger(ends.d.address, "idle")
    try:
        server, stopped = ends.d._server, []
        ends.pump_until(lambda: len(server._streams) == 1)
        with monkeypatch.context() as patch:
            patch.setattr(over_grpc._ServedStream, "stop", lambda stream: stopped.append(stream))
            patch.setattr(over_grpc._ServedStream, "is_late", lambda *_: True)
            for _ in range(3):
                server._look_s = 0.0
                server.tick()
        assert ends.d.counts.connections_refused == len(stopped) == 1
        stopped[0].stop()
    finally:
        stranger.close()
        ends.close()


def test_streams_whose_peer_proves_nothing_make_room_for_others(tmp_path):
    """They show the pass, which is in clear; there is room for MAX_STREAMS."""
    ends = Ends("grpc", tmp_path)
    strangers = [Stranger(ends.d.address, f"idle-{index}") for index in range(4)]
    try:
        ends.pump_until(lambda: len(ends.d._server._streams) == 4)
        ends.d.welcome(next(stream.name for stream in ends.d._server._streams.values()))
        ends.pump_until(lambda: len(ends.d._server._streams) == 1)
        assert ends.d.counts.connections_refused == 3
        ends.pump_until(lambda: sum(stranger._thread.is_alive() for stranger in strangers) == 1)
        ends.pump_until(lambda: len(ends.d._server._peers) == 1)
    finally:
        for stranger in strangers:
            stranger.close()
        ends.close()


def test_a_stream_that_breaks_is_made_again(ends):
    for stream in list(ends.d._server._streams.values()):
        stream.stop()
    end_s = time.monotonic() + 10
    ends.at_d.clear()
    while not ends.at_d and time.monotonic() < end_s:
        ends.p.send(ends.d.address, b"again")
        ends.pump(0.01)
    assert bytes(ends.at_d[0].control) == b"again"
    assert ends.p.counts.data_paths_failed >= 1


def test_threads_are_given_back(tmp_path):
    before = len(threads_named("kv-grpc"))
    for _ in range(3):
        ends = Ends("grpc", tmp_path).meet()
        ends.close()
    end_s = time.monotonic() + 5
    while len(threads_named("kv-grpc")) > before:
        assert time.monotonic() < end_s, threads_named("kv-grpc")
        time.sleep(0.01)


def test_a_port_that_is_taken_is_said_so(ends):
    with pytest.raises(PortInUse):
        GrpcTransport(ends.d.address)


def refused(tmp_path, config):
    """Why a client with this configuration cannot talk to one that demands certificates."""
    ends = Ends("grpc-mtls", tmp_path)
    stranger = GrpcTransport(config=config)
    stranger.send(ends.d.address, b"let me in")
    end_s = time.monotonic() + 10
    while not stranger.counts.data_paths_failed and time.monotonic() < end_s:
        stranger.receive(0.02)
        assert ends.d.receive(0.0) == []
    ends.say(b"hello")
    stranger.close()
    ends.close()
    return [bytes(item.control) for item in ends.at_d] == [b"hello"] and stranger.counts.data_paths_failed > 0


@pytest.mark.long
def test_without_a_certificate_of_the_same_authority_nobody_gets_in(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    files = make_certificates(other)
    assert refused(tmp_path, KVTransferConfig())
    assert refused(tmp_path, KVTransferConfig(**files))
    own_ca = str(tmp_path / "ca.pem")
    assert refused(tmp_path, KVTransferConfig(tls_ca_file=own_ca))  # it checks the other side, but shows nothing
    assert refused(tmp_path, KVTransferConfig(**{**files, "tls_ca_file": own_ca}))


def test_tls_without_certificates_of_clients(tmp_path):
    files = make_certificates(tmp_path)
    server = GrpcTransport("grpc://127.0.0.1:0", KVTransferConfig(**{**files, "tls_ca_file": ""}))
    client = GrpcTransport(config=KVTransferConfig(tls_ca_file=files["tls_ca_file"]))
    client.send(server.address, b"hello")
    assert bytes(server.receive(10.0)[0].control) == b"hello"
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("is_server", "files"),
    [
        (True, {"tls_cert_file": "missing", "tls_key_file": "missing"}),
        (True, {"tls_cert_file": "x"}),
        (True, {"tls_ca_file": "x"}),
        (False, {"tls_cert_file": "x", "tls_key_file": "x"}),
        (False, {"tls_ca_file": "missing"}),
    ],
)
def test_files_that_do_not_go_together_are_refused_at_start(is_server, files):
    with pytest.raises(ConfigInvalid, match="tls_"):
        GrpcTransport("grpc://127.0.0.1:0" if is_server else None, KVTransferConfig(**files))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["grpc", "grpc-process"])
def test_a_whole_hand_over(make_pair, kind):
    pair = make_pair(kind)
    keys = [pair.hand_over(prompt_len=22, chunk_len=7, request_id=f"r{index}") for index in range(3)]
    for key in keys:
        pair.wait_for(Completed, key)
        assert torch.equal(
            pair.rows(pair.target, pair.landed_tables[key], 22),
            rows(pair.source, pair.all_tables[key].blocks, 22),
        )
        pair.release(key)
    pair.assert_clean()
