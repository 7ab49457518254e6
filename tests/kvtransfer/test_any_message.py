"""Every message that parses, in every state: refused or taken, but never a way into an assert."""

import random

import pytest

from baton.core.errors import BatonError
from baton.core.request import AttemptKey
from baton.kvtransfer.landing_actions import LandingFailed, ReserveWanted, Sealed
from baton.kvtransfer.landing_protocol import LandingProtocol
from baton.kvtransfer.messages import control_of, layout_message, parse_control
from baton.kvtransfer.push_actions import DecodePeer, Granted, SendControl
from baton.kvtransfer.push_protocol import PushProtocol
from baton.proto import kv_pb2
from baton.tests.kvtransfer.simulation import CONFIG, LAYOUT, NUM_LAYERS

pytestmark = pytest.mark.fast
KINDS = [field.name for field in kv_pb2.Control.DESCRIPTOR.fields]
P_EPOCH, D_EPOCH = 5, 6
NUMBERS = [0, 1, 2, 3, 4, 9, 16, 2**31 - 1]
MAXIMA = {"TYPE_INT64": 2**63 - 1, "TYPE_FIXED64": 2**64 - 1, "TYPE_UINT32": 2**32 - 1, "TYPE_ENUM": 99}


def value_of(field, rng):
    if field.type == field.TYPE_STRING:
        return rng.choice(["r0", "r1", "r2", "", "x"])
    if field.type == field.TYPE_BYTES:
        return LAYOUT.hash if rng.random() < 0.7 else rng.randbytes(8)
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.name in ("epoch", "peer_epoch") and rng.random() < 0.95:
        return P_EPOCH if field.containing_type.name in ("Hello", "Reserve", "Lease") else D_EPOCH
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
            return parse_control(control.SerializeToString())
        except BatonError:
            pass


@pytest.mark.parametrize("seed", range(20))
def test_a_decode_worker_survives_any_message(seed):
    rng = random.Random(seed)
    protocol = LandingProtocol(epoch=D_EPOCH, layout=LAYOUT, config=CONFIG, max_capacity_len=16)
    hello = kv_pb2.Hello(version=1, epoch=P_EPOCH, layout=layout_message(LAYOUT))
    protocol.on_control("p", control_of(hello), 0.0)
    now_s, wanted, sealed = 0.0, [], set()
    for _ in range(300):
        now_s += rng.choice([0.0, 0.01, 0.3])
        actions = protocol.tick(now_s)
        try:
            actions += protocol.on_control(rng.choice("pq"), any_control(rng), now_s)
        except BatonError:
            continue
        wanted += [action.attempt for action in actions if isinstance(action, ReserveWanted)]
        sealed |= {action.attempt for action in actions if isinstance(action, Sealed)}
        for action in actions:
            if isinstance(action, LandingFailed) and action.attempt in sealed:
                sealed.discard(action.attempt)
                protocol.release(action.attempt, now_s)
        if wanted and rng.random() < 0.5:
            protocol.grant(wanted.pop(), now_s)
        for landing in tuple(protocol.landings()):
            if landing.landing_id and rng.random() < 0.2:
                for layer in range(NUM_LAYERS):
                    protocol.digested(landing.landing_id, layer, rng.choice(NUMBERS), now_s)


@pytest.mark.parametrize("seed", range(20))
def test_a_prefill_worker_survives_any_message(seed):
    rng = random.Random(seed)
    protocol = PushProtocol(epoch=P_EPOCH, layout=LAYOUT, config=CONFIG)
    now_s, pushed, number = 0.0, set(), 0
    for _ in range(300):
        now_s += rng.choice([0.0, 0.01, 0.3])
        if len(tuple(protocol.transfers())) < 3:
            number += 1
            key = AttemptKey(f"r{number % 3}", number)
            protocol.reserve(key, DecodePeer("d", "d", D_EPOCH), prompt_len=7, capacity_len=9, wait_s=9.0, now_s=now_s)
        actions = protocol.tick(now_s)
        control = any_control(rng)
        hellos = [action.control for action in actions if isinstance(action, SendControl)]
        for asked in (action for action in hellos if action.WhichOneof("message") == "hello"):
            reply = kv_pb2.HelloReply(version=1, epoch=D_EPOCH, peer_epoch=P_EPOCH, layout=layout_message(LAYOUT))
            reply.echo_sent_ns, reply.receiver_ns = asked.hello.sent_ns, rng.choice([0, 2**63 - 1, -(2**63)])
            protocol.on_control("d", control_of(reply), now_s)
        if rng.random() < 0.5 and control.WhichOneof("message") in ("grant", "deny"):
            key = rng.choice([transfer.attempt for transfer in protocol.transfers()])
            part = getattr(control, str(control.WhichOneof("message")))
            part.attempt.request_id, part.attempt.attempt = key.request_id, key.attempt
        try:
            actions = protocol.on_control("d", control, now_s)
        except BatonError:
            continue
        for action in actions:
            if isinstance(action, Granted) and action.attempt not in pushed:
                pushed.add(action.attempt)
                for layer in range(NUM_LAYERS):
                    protocol.pushed(action.attempt, layer, 0, 7, 1, now_s)
                protocol.commit(action.attempt, kv_pb2.SequenceState(first_token=1), now_s, now_s)
