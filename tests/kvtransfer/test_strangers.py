"""Who does not know the deployment's secret sends nothing that is kept, and ends nobody's connection."""

import contextlib
import re
import socket
import struct
import time

import grpc
import pytest
import zmq

from baton.core.config import KVTransferConfig
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.transports import endless_messages
from baton.kvtransfer.transports.over_grpc_stream import METHOD, NAME_KEY, PASS_KEY, encode_control_packet
from baton.kvtransfer.transports.zmq_sockets import PlainAdmission
from baton.tests.kvtransfer.transport_ends import Ends

MIB = 1 << 20
PATIENCE_S = 20.0
ANOTHER_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # than other channels of this process
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"%b" + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
INITIATE = b"\x08INITIATE\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
HELLO = b"\x05HELLO\x05baton\x20" + b"0" * 32
MORE = b"\x03" + struct.pack(">Q", MIB) + bytes(MIB)  # the first MiB of a message that never ends


@pytest.mark.fast
@pytest.mark.parametrize(("mechanism", "command"), [(b"NULL", READY), (b"PLAIN", HELLO), (b"PLAIN", READY)])
def test_a_message_without_end_is_not_collected(tmp_path, mechanism, command):
    """libzmq keeps the parts of a message until the last one has come, however many there are."""
    ends = Ends("zmq", tmp_path).meet()
    try:
        host, _, port = ends.d.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            stranger.sendall(GREETING % mechanism.ljust(20, b"\0") + b"\x04" + bytes([len(command)]) + command)
            num_sent = 0
            with pytest.raises(OSError, match=r"(?i)reset|broken pipe"):
                while num_sent < 256:
                    ends.d.receive(0.0)  # which answers libzmq's question whom to admit
                    stranger.sendall(MORE)
                    num_sent += 1
        assert num_sent < 64, "more than what lies in the kernel's buffers was taken"
        ends.say(b"still there")
    finally:
        ends.close()


@pytest.mark.fast
@pytest.mark.parametrize("part", [MORE, b"\x01\x00" * (MIB // 2)], ids=["large", "empty"])
def test_a_message_without_end_of_one_who_shows_the_password_is_not_collected(tmp_path, part):
    """The password is in clear, and no part is shown before the last: the bound of each part bounds nothing."""
    ends = Ends("zmq", tmp_path, max_frame_bytes=MIB, lease_s=PATIENCE_S).meet()
    password = connection_pass(bytes.fromhex(ends.config.key)).encode()
    try:
        host, _, port = ends.d.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            stranger.sendall(GREETING % b"PLAIN".ljust(20, b"\0"))
            hello = b"\x05HELLO\x05baton" + bytes([len(password)]) + password
            stranger.sendall(b"\x04" + bytes([len(hello)]) + hello)
            heard = b""
            stranger.setblocking(False)
            while b"WELCOME" not in heard:
                ends.d.receive(0.0)  # which answers libzmq's question whom to admit
                with contextlib.suppress(BlockingIOError):
                    heard += (new := stranger.recv(1024))
                    assert new, "the connection was closed"
            stranger.settimeout(PATIENCE_S)
            stranger.sendall(b"\x04" + bytes([len(INITIATE)]) + INITIATE)
            num_sent = 0
            with pytest.raises(OSError, match=r"(?i)reset|broken pipe"):
                while num_sent < 1024:
                    ends.d.receive(0.001)
                    stranger.sendall(part)
                    num_sent += 1
        assert num_sent < 64, "more than what lies in the kernel's buffers was taken"
        ends.pump_until(lambda: ends.d.counts.connections_refused == 1)
        ends.say(b"still there")
    finally:
        ends.close()


def test_large_messages_that_wait_are_no_message_without_end(tmp_path, monkeypatch):
    """Many of them lie in libzmq while their receiver is at others; it looks as often as it can."""
    monkeypatch.setattr(endless_messages, "LOOK_S", 0.0)
    ends = Ends("zmq", tmp_path, max_frame_bytes=MIB).meet()
    payload = [memoryview(bytes(MIB))]
    try:
        for turn in range(6):
            for seq in range(24):
                ends.send_frame(payload, seq)
            ends.pump_until(lambda: len(ends.at_d) == 24 * (turn + 1))  # noqa: B023
        for _ in range(8):
            ends.pump()  # and nothing comes
        assert ends.d.counts.connections_refused == 0
    finally:
        ends.close()


@pytest.mark.fast
def test_a_stranger_with_a_peers_name_takes_nobodys_place(tmp_path):
    """A connection with a known name replaces the one before, once it is admitted."""
    ends = Ends("zmq", tmp_path).meet()
    context, dealers = zmq.Context(), []
    try:
        known = ends.p._routing_id(ends.d.address)
        for arm in (lambda dealer: None, lambda dealer: PlainAdmission("0" * 64).arm(dealer, is_server=False)):
            dealers.append(dealer := context.socket(zmq.DEALER))
            dealer.set(zmq.ROUTING_ID, known)
            arm(dealer)
            dealer.connect(ends.d.address)
            dealer.send(b"let me in")
        ends.pump_until(lambda: ends.d.counts.connections_refused)
        ends.say(b"still there")
        ends.reply(b"and heard")
        assert b"let me in" not in [bytes(item.control) for item in ends.at_d if item.control is not None]
    finally:
        for dealer in dealers:
            dealer.close(linger=0)
        context.term()
        ends.close()


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["zmq", "raw", "grpc"])
def test_who_shows_a_peers_password_and_name_is_another_peer(tmp_path, kind):
    """Both are in clear. A connection has proved what was proved: under its name no other one speaks, or is heard."""
    ends = Ends(kind, tmp_path).meet()
    context, channel = zmq.Context(), None
    password = connection_pass(bytes.fromhex(ends.config.key))
    try:
        ends.say(b"proved")
        proved = ends.at_d[-1].peer
        if kind == "grpc":
            channel = grpc.insecure_channel(ends.d.address.removeprefix("grpc://"), ANOTHER_CONNECTION)
            shown = ((PASS_KEY, password), (NAME_KEY, ends.p._name))
            call = channel.stream_stream(METHOD)(iter([encode_control_packet(b"let me in")]), metadata=shown)
        else:
            dealer = context.socket(zmq.DEALER)
            dealer.set(zmq.ROUTING_ID, ends.p._routing_id(ends.d.address))
            PlainAdmission(password).arm(dealer, is_server=False)
            dealer.connect(ends.d.address)
            dealer.send(b"let me in")
        ends.pump_until(lambda: b"let me in" in [bytes(item.control) for item in ends.at_d if item.control])
        (stranger,) = {item.peer for item in ends.at_d if item.control == b"let me in"}
        assert stranger != proved
        if kind == "grpc":
            ends.say(b"still there")
            assert ends.at_d[-1].peer == proved, "its streams were not ended"
            call.cancel()
        else:
            ends.d.send(proved, b"for the peer alone")
            assert not dealer.poll(200), "what is for the peer went to who has its routing id"
            dealer.close(linger=0)
            end_s = time.monotonic() + PATIENCE_S
            while ends.at_d[-1].control != b"here again":  # what goes into the connection that has ended is lost
                assert time.monotonic() < end_s
                ends.p.send(ends.d.address, b"here again")
                ends.pump(0.02)
            assert ends.at_d[-1].peer not in (proved, stranger), "and has to prove it again"
    finally:
        if channel is not None:
            channel.close()
        context.destroy(linger=0)
        ends.close()


@pytest.mark.fast
@pytest.mark.parametrize("shown", [None, "", "0" * 64])
def test_over_grpc_too(tmp_path, shown):
    ends = Ends("grpc", tmp_path).meet()
    try:
        known = ends.p._name
        metadata = ((NAME_KEY, known), *(() if shown is None else ((PASS_KEY, shown),)))
        with grpc.insecure_channel(ends.d.address.removeprefix("grpc://")) as channel:
            call = channel.stream_stream(METHOD)(iter([b"x"]), metadata=metadata, timeout=PATIENCE_S)
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        ends.say(b"still there")
        ends.reply(b"and heard")
        assert ends.p.counts.data_paths_failed == 0
    finally:
        ends.close()


@pytest.mark.fast
def test_the_pass_is_neither_the_key_nor_another_deployments():
    ours = connection_pass(bytes.fromhex(KVTransferConfig().key))
    assert re.fullmatch("[0-9a-f]{64}", ours)
    assert ours != KVTransferConfig().key and ours != connection_pass(b"another")
