"""What comes over the wire, or names a peer, can be anything; it costs one message or one push, never a worker."""

import errno
import socket
import struct
import threading
import time

import pytest
import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import MalformedMessage
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.messages import (
    MAX_DRAFT_TOKENS,
    MAX_REQUEST_ID_BYTES,
    MAX_STATE_BYTES,
    MAX_TEXT_BYTES,
    control_of,
    encode_control,
    layout_message,
    parse_control,
    shorten,
)
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.receiver.records import decode_record, encode_record
from baton.kvtransfer.receiver.service import Completed, IncomingFailed, ReserveWanted
from baton.kvtransfer.sender.service import Acked, DecodePeer, Denied, Granted, PushDrained, PushFailed
from baton.kvtransfer.transports.zmq_sockets import PlainAdmission
from baton.proto import kv_pb2
from baton.tests.kvtransfer.proving import PROOFS, prove_challenge
from baton.tests.patience import STALLS_S

MIB = 1 << 20


def parse(message):
    return parse_control(encode_control(control_of(message)))


class Stranger:
    """A prefill worker of the deployment that says what it likes."""

    def __init__(self, pair):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        password = connection_pass(bytes.fromhex(KVTransferConfig().key))
        PlainAdmission(password).arm(self._socket, is_server=False)
        self._socket.connect(pair.incoming.address)
        hello = kv_pb2.Hello(
            version=2,
            epoch=77,
            layout=layout_message(pair.layout),
            tp_size=1,
            head_count=pair.layout.num_kv_heads,
            sent_ns=1,
        )
        self.say(hello)
        self.say(prove_challenge(hello, self.hear("hello_reply").challenge))
        self._epoch = pair.peer.epoch
        assert self.hear("hello_reply").refused == ""

    def say(self, message):
        self._socket.send(encode_control(control_of(message)))

    def reserve(self, request_id, prompt_len, capacity_len):
        attempt = kv_pb2.Attempt(request_id=request_id, attempt=1)
        wait_ms = 2**32 - 1
        sizes = {"prompt_len": prompt_len, "capacity_len": capacity_len}
        self.say(kv_pb2.Reserve(attempt=attempt, epoch=77, peer_epoch=self._epoch, wait_ms=wait_ms, **sizes))

    def hear(self, kind, timeout_s=5.0):
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if self._socket.poll(50):
                control = parse_control(self._socket.recv())
                if control.WhichOneof("message") == kind:
                    return getattr(control, kind)
        raise AssertionError(f"no {kind}")

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def make_stranger():
    strangers = []

    def make(pair):
        strangers.append(Stranger(pair))
        return strangers[-1]

    yield make
    for stranger in strangers:
        stranger.close()


@pytest.mark.fast
def test_a_message_has_bounds():
    attempt = kv_pb2.Attempt(request_id="x" * (MAX_REQUEST_ID_BYTES + 1), attempt=1)
    for message in (kv_pb2.Reserve(attempt=attempt), kv_pb2.Abort(attempt=attempt), kv_pb2.Grant(attempt=attempt)):
        with pytest.raises(MalformedMessage, match="request id"):
            parse(message)
    unknown = kv_pb2.SequenceState.FromString(b"\xfa\x7f\x80\x80\x20" + bytes(512 << 10))  # a field of a later version
    for state in (
        kv_pb2.SequenceState(hidden=bytes(MAX_STATE_BYTES)),
        kv_pb2.SequenceState(draft_tokens=range(MAX_DRAFT_TOKENS + 1)),
        unknown,
    ):
        with pytest.raises(MalformedMessage, match="state"):
            parse(kv_pb2.Commit(attempt=kv_pb2.Attempt(request_id="r"), state=state))
    long = "ä" * MIB
    assert len(parse(kv_pb2.Abort(reason=long)).abort.reason.encode()) == MAX_TEXT_BYTES
    assert len(parse(kv_pb2.Deny(detail=long)).deny.detail.encode()) == MAX_TEXT_BYTES
    assert len(parse(kv_pb2.HelloReply(refused=long)).hello_reply.refused.encode()) == MAX_TEXT_BYTES
    assert shorten("short") == "short"


@pytest.mark.fast
def test_nothing_a_stranger_says_ends_the_incoming(make_pair, make_stranger):
    pair = make_pair("zmq")
    stranger = make_stranger(pair)
    stranger.reserve("x" * MIB, 3, 9)
    stranger.reserve("y", 3, 9)
    stranger.say(
        kv_pb2.Abort(attempt=kv_pb2.Attempt(request_id="y", attempt=1), epoch=pair.peer.epoch, reason="z" * (3 * MIB))
    )
    pair.is_granting = False
    failed = pair.wait_for(IncomingFailed, AttemptKey("y", 1))
    assert failed.by_peer
    assert len(failed.reason) < 2 * MAX_TEXT_BYTES
    stranger.say(kv_pb2.Abort(reason="z" * (pair.config.max_frame_bytes + MIB)))  # the connection is closed for that
    pair.is_granting = True
    pair.wait_for(Completed, pair.hand_over(9))
    assert pair.find(ReserveWanted, AttemptKey("x" * MIB, 1)) is None


@pytest.mark.fast
@pytest.mark.parametrize(
    ("prompt_len", "capacity_len", "reason"),
    [
        (0, 9, 0),
        (0, 0, 0),
        (9, 8, 0),
        (3, 2**32 - 1, kv_pb2.Deny.TOO_LONG),
        (2**32 - 1, 2**32 - 1, kv_pb2.Deny.TOO_LONG),
    ],
)
def test_sizes_that_make_no_sense_are_denied(make_pair, make_stranger, prompt_len, capacity_len, reason):
    pair = make_pair("zmq")
    stranger = make_stranger(pair)
    stranger.reserve("r", prompt_len, capacity_len)
    assert stranger.hear("deny").reason == reason
    pair.wait_for(Completed, pair.hand_over(9))


@pytest.mark.fast
def test_the_largest_state_and_the_longest_reasons_fit(make_pair):
    pair = make_pair("zmq")
    key = pair.reserve(9, "i" * MAX_REQUEST_ID_BYTES)
    pair.wait_for(Granted, key)
    pair.compute(key)
    pair.commit(key, hidden=bytes(MAX_STATE_BYTES - 100))
    assert len(pair.wait_for(Completed, key).state.hidden) == MAX_STATE_BYTES - 100
    other = pair.reserve(9, "other")
    pair.wait_for(Granted, other)
    pair.incoming.abort(other, "r" * (3 * MIB))
    assert len(pair.wait_for(PushFailed, other).reason) < 2 * MAX_TEXT_BYTES


@pytest.mark.fast
def test_a_request_that_no_message_can_carry_is_denied_here(make_pair):
    pair = make_pair()
    assert "request id" in pair.wait_for(Denied, pair.reserve(9, "x" * (MAX_REQUEST_ID_BYTES + 1))).detail
    assert pair.wait_for(Denied, pair.reserve(9, "r", capacity_len=1 << 40)).reason == kv_pb2.Deny.TOO_LONG
    pair.wait_for(Completed, pair.hand_over(9, request_id="long", wait_s=1e9))


@pytest.mark.fast
@pytest.mark.parametrize("receiver_ns", [2**63 - 1, -(2**63)])
def test_a_clock_beyond_all_bounds_hurts_nobody(make_pair, receiver_ns):
    pair = make_pair()

    def shift(_sender, _receiver, parts):
        if len(parts) == 1:
            control = parse_control(parts[0])
            if control.WhichOneof("message") == "hello_reply" and control.hello_reply.proof:
                reply = control.hello_reply
                reply.receiver_ns, control.checksum = receiver_ns, 0
                number = PROOFS.number(pair.peer.kv_address, reply.peer_epoch, reply.echo_sent_ns)
                PROOFS.prove_reply(reply, number)  # it is a decode worker's own clock
                return [[encode_control(control)]]
        return [parts]

    pair.hub.on_message = shift
    pair.wait_for(Completed, pair.hand_over(9))


@pytest.mark.fast
@pytest.mark.parametrize(
    "address", ["ipc:///tmp/" + "a" * 200, "udp://127.0.0.1:5", "inproc://nobody", "tcp://nobody", "tcp://", ""]
)
def test_an_address_that_is_none_fails_its_pushes_at_once(make_pair, caplog, address):
    pair = make_pair("zmq")
    good = pair.peer
    pair.peer = DecodePeer("d9", address, 5)
    for name in ("one", "two"):
        key = pair.reserve(9, name)
        assert "address" in pair.wait_for(PushFailed, key, 1.0).reason or address.startswith("tcp")
        pair.wait_for(PushDrained, key)
    pair.peer = good
    pair.wait_for(Completed, pair.hand_over(9, request_id="good"))
    assert sum("tcp" in record.message for record in caplog.records) == 1


@pytest.mark.fast
def test_no_socket_left_fails_the_push_and_nothing_else(make_pair, monkeypatch):
    pair = make_pair("zmq")
    pair.wait_for(Completed, pair.hand_over(9, request_id="connected"))
    good = pair.peer

    def no_socket(_kind, **_):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(pair.at_p._sockets, "network_socket", no_socket)
    pair.peer = DecodePeer("d9", "tcp://127.0.0.1:9", 5)
    assert "open files" in pair.wait_for(PushFailed, pair.reserve(9, "new"), 1.0).reason
    pair.peer = good
    pair.wait_for(Completed, pair.hand_over(9, request_id="again"))


@pytest.mark.fast
def test_who_gave_up_survives_the_rings():
    for by_peer in (False, True):
        event = IncomingFailed(AttemptKey("r", 1), "why", by_peer)
        assert decode_record(encode_record(event, 3)) == (event, 3)
        assert repr(decode_record(encode_record(event))[0]) == repr(event)  # a bool again, not a number


class Proxy:
    """A middlebox on the way to a decode worker that forgets its connections."""

    def __init__(self, address):
        self._target = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._live = []  # (near, far, forgotten)
        self._all = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        try:
            while True:
                near, _ = self._listener.accept()
                self._all.append(near)
                far = socket.create_connection(self._target)
                self._all.append(far)
                link = (near, far, threading.Event())
                self._live.append(link)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pipe, args=(one, other, link[2]), daemon=True).start()
        except OSError:
            pass

    def _pipe(self, one, other, forgotten):
        try:
            while data := one.recv(65536):
                if not forgotten.is_set():
                    other.sendall(data)
        except OSError:
            pass  # no end is ever told of the other's

    def forget(self, is_near_told):
        links, self._live = self._live, []
        for near, _, forgotten in links:
            forgotten.set()
            if is_near_told:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                near.shutdown(socket.SHUT_RDWR)
                near.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)  # what waits in `accept` goes on
        self._thread.join()
        for one in (self._listener, *self._all):
            one.close()


@pytest.mark.parametrize("is_near_told", [True, False])
def test_a_connection_that_is_dead_at_one_end_is_replaced_within_two_leases(make_pair, is_near_told):
    pair = make_pair("zmq", heartbeat_s=0.1, lease_s=0.6)
    proxy = Proxy(pair.incoming.address)
    pair.peer = DecodePeer("d0", proxy.address, pair.peer.epoch)

    def has_landed(name):
        key = pair.reserve(9, name)
        while not (pair.find(Granted, key) or pair.find(PushFailed, key)):
            pair.turn()
            time.sleep(0.001)
        if pair.find(Granted, key):
            pair.compute(key)
            pair.commit(key)
        while not (pair.find(Acked, key) or pair.find(PushFailed, key)):
            pair.turn()
            time.sleep(0.001)
        return pair.find(Acked, key) is not None

    try:
        assert has_landed("before")
        proxy.forget(is_near_told)
        start_s = time.monotonic()
        index = 0
        while not has_landed(f"r{index}"):
            index += 1
            assert time.monotonic() - start_s < 1.2 + STALLS_S
        assert time.monotonic() - start_s < 1.2 + STALLS_S
        assert all(has_landed(f"after{index}") for index in range(3))
    finally:
        proxy.close()
