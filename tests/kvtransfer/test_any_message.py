"""Every message that parses, in every state: refused or taken, but never a way into an assert."""

import random

import pytest

from baton.core.errors import BatonError
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.kvtransfer.protocol.messages import control_of, encode_control, layout_message, parse_control
from baton.kvtransfer.receiver.actions import Completed, IncomingFailed, ReserveWanted, WriteFrame
from baton.kvtransfer.receiver.protocol import ReceiverProtocol
from baton.kvtransfer.sender.actions import DecodePeer, Granted, OpenDataPath, SendControl, SendFrame
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.proto import kv_pb2
from baton.tests.kvtransfer.proving import prove, prove_reply
from baton.tests.kvtransfer.simulation import CONFIG, LAYOUT, NUM_LAYERS, POSITION_BYTES

pytestmark = pytest.mark.fast
KINDS = [field.name for field in kv_pb2.Control.DESCRIPTOR.oneofs[0].fields]
P_EPOCH, D_EPOCH = 5, 6
NUMBERS = [0, 1, 2, 3, 4, 9, 16, 2**31 - 1]
MAXIMA = {
    "TYPE_INT64": 2**63 - 1,
    "TYPE_FIXED64": 2**64 - 1,
    "TYPE_UINT32": 2**32 - 1,
    "TYPE_UINT64": 2**64 - 1,
    "TYPE_FIXED32": 2**32 - 1,
    "TYPE_ENUM": 99,
}


def value_of(field, rng):
    if field.name == "data_path":
        return rng.choice(["", "inline", "shm", "raw"])
    if field.type == field.TYPE_STRING:
        return rng.choice(["r0", "r1", "r2", "", "x"])
    if field.type == field.TYPE_BYTES:
        return LAYOUT.hash if rng.random() < 0.7 else rng.randbytes(8)
    if field.type == field.TYPE_DOUBLE:
        return rng.choice([0.0, 7.5, -1.0, 1e308, float("nan"), float("inf")])
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.name in ("epoch", "peer_epoch", "sender_epoch") and rng.random() < 0.95:
        is_theirs = field.containing_type.name in ("Hello", "Reserve", "Lease")
        return P_EPOCH if is_theirs == (field.name == "epoch") else D_EPOCH
    if field.name in ("tp_size", "tp_rank") and rng.random() < 0.9:
        return int(field.name == "tp_size")
    if field.name == "version":
        return 1
    return rng.choice([*NUMBERS, next(MAXIMA[name] for name in MAXIMA if getattr(field, name) == field.type)])


def fill(message, rng):
    """Values close to what is live, and extreme ones."""
    for field in message.DESCRIPTOR.fields:
        is_repeated = field.label == field.LABEL_REPEATED
        for _ in range(rng.randrange(4) if is_repeated else rng.random() < 0.9):
            part = getattr(message, field.name)
            if field.message_type is not None:
                fill(part.add() if is_repeated else part, rng)
            elif is_repeated:
                part.append(value_of(field, rng))
            else:
                setattr(message, field.name, value_of(field, rng))
    return message


def any_control(rng):
    while True:
        control = kv_pb2.Control()
        part = getattr(control, rng.choice(KINDS))
        part.SetInParent()
        fill(part, rng)
        try:
            return parse_control(encode_control(control))
        except BatonError:
            pass


def any_header(rng, incoming_transfers):
    """A frame header that is right but for one field, or wrong altogether."""
    fields = {"d_epoch": D_EPOCH, "incoming_id": rng.randrange(5), "attempt": 1, "seq": rng.randrange(9)}
    fields |= {"layer": rng.randrange(NUM_LAYERS), "head_first": 0, "head_count": 2, "order_block_size": 2}
    first, count = rng.randrange(4), rng.randint(1, 3)
    fields |= {
        "first": first,
        "count": count,
        "payload_bytes": count * POSITION_BYTES,
    }
    fields |= {"is_written": rng.random() < 0.5, "payload_digest": rng.choice([None, 7])}
    if incoming_transfers and rng.random() < 0.8:
        incoming = rng.choice(incoming_transfers)
        fields |= {"incoming_id": incoming.incoming_id, "attempt": incoming.attempt.attempt}
    if rng.random() < 0.5:
        name = rng.choice([name for name in fields if name not in ("is_written", "payload_digest")])
        fields[name] = rng.choice([0, 1, 3, (1 << 16) - 1])
    return FrameHeader(**fields)


class AnyIncoming:
    """A decode worker's protocol, and a driver that obeys it."""

    def __init__(self, rng, digests_layers):
        self.rng = rng
        offers = [kv_pb2.DataPathOffer(data_path="shm")]
        self.protocol = ReceiverProtocol(
            epoch=D_EPOCH,
            layout=LAYOUT,
            config=CONFIG,
            max_capacity_len=16,
            offers=offers,
            digests_layers=digests_layers,
        )
        self.wanted, self.complete, self.writes, self.num_granted, self.number = [], set(), [], 0, 0

    def hello(self, now_s):
        hello = kv_pb2.Hello(version=2, epoch=P_EPOCH, layout=layout_message(LAYOUT), tp_size=1, head_count=2)
        hello.capabilities.append("digest")
        self.protocol.on_control("p", control_of(prove(hello, D_EPOCH, "p", now_s)), now_s)

    def reserve(self):
        self.number += 1
        reserve = kv_pb2.Reserve(
            epoch=P_EPOCH, peer_epoch=D_EPOCH, prompt_len=7, capacity_len=9, wait_ms=9000, tp_size=1
        )
        reserve.attempt.request_id, reserve.attempt.attempt = f"r{self.number % 3}", self.number // 3
        reserve.data_path = self.rng.choice(["", "shm"])
        return control_of(reserve)

    def hear(self, now_s):
        peer = self.rng.choice("ppq")
        try:
            if self.rng.random() < 0.1:
                return self.protocol.on_control("p", self.reserve(), now_s)
            if self.rng.random() < 0.5:
                return self.protocol.on_control(peer, any_control(self.rng), now_s)
            live = [incoming for incoming in self.protocol.incoming_transfers() if incoming.incoming_id]
            return self.protocol.on_frame(peer, any_header(self.rng, live), now_s)
        except BatonError:
            return []

    def write(self, now_s):
        header = self.writes.pop(self.rng.randrange(len(self.writes)))
        if self.rng.random() < 0.3:
            return self.protocol.write_failed(header, now_s, is_corrupt=self.rng.random() < 0.5)
        return self.protocol.landed(header, self.rng.choice([None, 7, 8]), now_s)

    def obey(self, actions, now_s):
        for action in actions:
            match action:
                case WriteFrame(header=header):
                    self.writes.append(header)
                case ReserveWanted(attempt=attempt):
                    self.wanted.append(attempt)
                case Completed(attempt=attempt):
                    self.complete.add(attempt)
                case IncomingFailed(attempt=attempt) if attempt in self.complete:
                    self.complete.discard(attempt)
                    self.protocol.release(attempt, now_s)

    def decide(self, now_s):
        if self.wanted and self.rng.random() < 0.5:
            self.obey(self.protocol.grant(self.wanted.pop(), now_s, blocks=range(8)), now_s)
            self.num_granted += 1
        for incoming in tuple(self.protocol.incoming_transfers()):
            if incoming.incoming_id and self.rng.random() < 0.2:
                for layer in range(NUM_LAYERS):
                    number = self.rng.choice(NUMBERS)
                    self.obey(self.protocol.digested(incoming.incoming_id, layer, number, now_s), now_s)
        if self.rng.random() < 0.02:
            self.obey(self.protocol.peer_is_dead(P_EPOCH, now_s), now_s)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("digests_layers", [False, True])
def test_a_decode_worker_survives_any_message(seed, digests_layers):
    rng = random.Random(seed)
    node = AnyIncoming(rng, digests_layers)
    now_s = 0.0
    for _ in range(300):
        now_s += rng.choice([0.0, 0.01, 0.3])
        if rng.random() < 0.3:
            node.hello(now_s)
        node.obey(node.protocol.tick(now_s), now_s)
        node.obey(node.hear(now_s), now_s)
        while node.writes and rng.random() < 0.4:
            node.obey(node.write(now_s), now_s)
        node.decide(now_s)
    assert node.num_granted


class AnyPush:
    """A prefill worker's protocol, and a driver that obeys it."""

    def __init__(self, rng, data_path):
        self.rng, self.data_path = rng, data_path
        self.protocol = PushProtocol(identity=PushIdentity(P_EPOCH), layout=LAYOUT, config=CONFIG)
        self.pushed, self.writes, self.number = set(), [], 0

    def reserve(self, now_s):
        self.number += 1
        key, peer = AttemptKey(f"r{self.number % 3}", self.number), DecodePeer("d", "d", D_EPOCH)
        return self.protocol.reserve(key, peer, prompt_len=7, capacity_len=9, wait_s=9.0, now_s=now_s)

    def hear(self, now_s):
        control = any_control(self.rng)
        kind = str(control.WhichOneof("message"))
        keys = [transfer.attempt for transfer in self.protocol.transfers()]
        if keys and kind in ("grant", "deny", "abort") and self.rng.random() < 0.5:
            part, key = getattr(control, kind), self.rng.choice(keys)
            part.attempt.request_id, part.attempt.attempt = key.request_id, key.attempt
            if kind == "grant" and self.rng.random() < 0.8:
                part.data_path, part.lease_ms, part.blocks[:] = self.data_path, 2000, range(8)
        try:
            return self.protocol.on_control("d", control, now_s)
        except BatonError:
            return []

    def answer_hello(self, hello, now_s):
        layout = layout_message(LAYOUT)
        reply = kv_pb2.HelloReply(version=2, epoch=D_EPOCH, peer_epoch=P_EPOCH, layout=layout)
        reply.echo_sent_ns, reply.receiver_ns = hello.sent_ns, self.rng.choice([0, 2**63 - 1, -(2**63)])
        prove_reply(reply, hello)
        return self.protocol.on_control("d", control_of(reply), now_s)

    def obey(self, actions, now_s):
        for action in actions:
            match action:
                case OpenDataPath():
                    self.obey(self.protocol.data_path_opened("d", self.data_path, now_s), now_s)
                case SendFrame() if self.data_path == "shm":
                    self.writes.append(action)
                case SendControl(control=said) if said.WhichOneof("message") == "hello" and self.rng.random() < 0.9:
                    self.obey(self.answer_hello(said.hello, now_s), now_s)
                case Granted(attempt) if attempt not in self.pushed:
                    self.pushed.add(attempt)
                    for layer in range(NUM_LAYERS):
                        self.obey(self.protocol.pushed(attempt, layer, 0, 7, 1, now_s), now_s)
                    state = kv_pb2.SequenceState(first_token=1)
                    self.obey(self.protocol.commit(attempt, state, now_s, now_s), now_s)

    def write(self, now_s):
        write = self.writes.pop(self.rng.randrange(len(self.writes)))
        problem = "it failed" if self.rng.random() < 0.2 else ""
        return self.protocol.written(write.attempt, write.header, now_s, problem)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("data_path", ["inline", "shm"])
def test_a_prefill_worker_survives_any_message(seed, data_path):
    rng = random.Random(seed)
    node = AnyPush(rng, data_path)
    now_s = 0.0
    for _ in range(600):
        now_s += rng.choice([0.0, 0.01, 0.3])
        if len(tuple(node.protocol.transfers())) < 3:
            node.obey(node.reserve(now_s), now_s)
        node.obey(node.protocol.tick(now_s), now_s)
        node.obey(node.hear(now_s), now_s)
        while node.writes and rng.random() < 0.5:
            node.obey(node.write(now_s), now_s)
    assert node.pushed
