"""HELLO proves the deployment's secret, both ways, before anything is kept or said; on every transport."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ProtocolError
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.messages import control_of, layout_message
from baton.kvtransfer.protocol.proof import CHALLENGE_S, KvProofs
from baton.kvtransfer.receiver.actions import AnswerControl as Reply
from baton.kvtransfer.receiver.protocol import ReceiverProtocol
from baton.kvtransfer.sender.actions import DecodePeer, OpenDataPath, PushDrained, SendControl
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import Pair, make_layout
from baton.tests.kvtransfer.proving import OTHER_PROOFS, PROOFS, prove, prove_challenge, prove_reply
from baton.tests.kvtransfer.simulation import CONFIG, LAYOUT
from baton.worker.inventory import receiver_counts

pytestmark = pytest.mark.fast

KEY = AttemptKey("a", 1)
P_EPOCH, D_EPOCH = 5, 1
OFFERS = [kv_pb2.DataPathOffer(data_path="raw", raw=kv_pb2.RawOffer(address="127.0.0.1:1", listener_id=b"l" * 16))]


def incoming():
    return ReceiverProtocol(epoch=D_EPOCH, layout=LAYOUT, config=CONFIG, max_capacity_len=16, offers=OFFERS)


def hello(**changes):
    fields = {"version": 2, "epoch": P_EPOCH, "tp_size": 1, "head_count": 2, "data_paths": ["raw"]}
    return kv_pb2.Hello(layout=layout_message(LAYOUT), **{**fields, **changes})


def say(protocol, message, peer="p", now_s=0.0):
    """The answers of a decode worker."""
    actions = protocol.on_control(peer, control_of(message), now_s)
    assert all(isinstance(action, Reply) for action in actions)
    return [action.control.hello_reply for action in actions]


def is_met(protocol, peer="p"):
    reserve = kv_pb2.Reserve(
        attempt=kv_pb2.Attempt(request_id="a"), epoch=P_EPOCH, peer_epoch=D_EPOCH, prompt_len=1, capacity_len=1
    )
    actions = protocol.on_control(peer, control_of(reserve), 0.0)
    denied = [action.control.deny for action in actions if isinstance(action, Reply)]
    return not denied or denied[0].reason != kv_pb2.Deny.NO_HELLO


def is_silent(replies):
    """Nothing is told that a stranger could use."""
    return all(not reply.offers and not reply.epoch and not reply.HasField("layout") for reply in replies)


def test_the_first_hello_gets_a_challenge_and_leaves_nothing():
    protocol = incoming()
    (reply,) = say(protocol, hello(sent_ns=1))
    assert reply.challenge and is_silent([reply])
    assert protocol._rules.peers.get("p") is None and not is_met(protocol)
    (reply,) = say(protocol, prove_challenge(hello(sent_ns=2), reply.challenge))
    assert [offer.data_path for offer in reply.offers] == ["raw"]
    assert is_met(protocol)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hello(sent_ns=2),
        lambda: prove(hello(sent_ns=2), D_EPOCH, "p", proofs=OTHER_PROOFS),
        lambda: prove_challenge(hello(sent_ns=2), PROOFS.challenge(D_EPOCH, "p", 0.0), OTHER_PROOFS),
        lambda: prove(hello(sent_ns=2), D_EPOCH, "q"),  # heard of another connection
        lambda: prove(hello(sent_ns=2), D_EPOCH + 1, "p"),  # or of another incarnation
        lambda: prove(hello(sent_ns=2), D_EPOCH, "p", -2 * CHALLENGE_S),  # too long ago
    ],
    ids=["nothing", "secret", "proof", "connection", "incarnation", "stale"],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_the_epoch_of_a_real_prefill_worker_lets_nobody_in(make, is_known):
    """Nor does it change what is known of the real one."""
    protocol = incoming()
    if is_known:
        say(protocol, prove(hello(sent_ns=1), D_EPOCH, "p"))
    before = protocol._rules.peers.get("p")
    assert is_silent(say(protocol, make()))
    message = make()
    message.epoch += 1  # which would end the life before, were it believed
    assert is_silent(say(protocol, message))
    assert protocol._rules.peers.get("p") is before
    assert is_met(protocol) is is_known


def test_a_hello_is_taken_once_and_in_order():
    protocol = incoming()
    messages = [prove(hello(sent_ns=at), D_EPOCH, "p") for at in (1, 2, 3)]
    assert say(protocol, messages[1])[0].offers
    assert say(protocol, messages[1]) == [] and say(protocol, messages[0]) == []
    assert protocol.counts.hellos_unproved == 1, "what overtook is none"
    assert say(protocol, messages[2])[0].offers


FIELDS = [field.name for field in kv_pb2.Hello.DESCRIPTOR.fields]


@given(st.sampled_from(FIELDS), st.integers(0, 1 << 30), st.binary(max_size=40))
def test_nothing_of_a_hello_may_be_touched(name, number, data):
    message = prove(hello(sent_ns=7), D_EPOCH, "p")
    before = message.SerializeToString()
    field = kv_pb2.Hello.DESCRIPTOR.fields_by_name[name]
    if field.type == field.TYPE_BYTES:
        setattr(message, name, data)
    elif field.message_type is not None:
        message.layout.layers.add(row_len=number + 1)
    elif isinstance(getattr(message, name), int):
        setattr(message, name, number)
    elif isinstance(getattr(message, name), str):
        setattr(message, name, data.hex())
    else:
        getattr(message, name).append(data.hex())
    protocol = incoming()
    is_same = message.SerializeToString() == before
    assert is_silent(say(protocol, message)) is not is_same
    assert (protocol._rules.peers.get("p") is not None) is is_same


@given(st.binary(max_size=200), st.binary(max_size=64))
def test_any_proof_of_a_stranger_is_refused(data, proof):
    message = hello(sent_ns=7, number=data[:16], challenge=PROOFS.challenge(D_EPOCH, "p", 0.0), proof=proof)
    assert is_silent(say(incoming(), message))


class Pushing:
    """A prefill rank that wants to reach a decode worker."""

    def __init__(self):
        self.protocol = PushProtocol(identity=PushIdentity(P_EPOCH, data_paths=("raw",)), layout=LAYOUT, config=CONFIG)
        peer = DecodePeer("d", "d", D_EPOCH)
        actions = self.protocol.reserve(KEY, peer, prompt_len=3, capacity_len=4, wait_s=9.0, now_s=0.0)
        self.asked = actions[0].control.hello

    def hear(self, reply, now_s=0.0):
        return self.protocol.on_control("d", control_of(reply), now_s)

    @property
    def is_met(self):
        return self.protocol._rules.peers["d"].epoch != 0


def good_reply(asked, **changes):
    fields = {"version": 2, "epoch": D_EPOCH, "peer_epoch": P_EPOCH, "echo_sent_ns": asked.sent_ns}
    return kv_pb2.HelloReply(layout=layout_message(LAYOUT), **{**fields, **changes})


def test_the_two_sides_meet():
    push, protocol = Pushing(), incoming()
    message, rounds = push.asked, 0
    while not push.is_met:
        (reply,) = say(protocol, message)
        actions = push.hear(reply)
        rounds += 1
        message = next((action.control.hello for action in actions if isinstance(action, SendControl)), None)
    assert rounds == 2
    assert isinstance(actions[0], OpenDataPath) and actions[0].offers == tuple(OFFERS)


def test_an_answer_without_the_secret_moves_nothing():
    push = Pushing()
    asked = push.asked
    reflected = KvProofs(bytes.fromhex(CONFIG.key))._of_hello(asked)  # its own proof, given back
    wrong = [good_reply(asked), good_reply(asked, proof=reflected), good_reply(asked, refused="go away")]
    wrong += [prove_reply(good_reply(asked), asked, OTHER_PROOFS), prove_reply(good_reply(asked), hello(number=b"x"))]
    said = 0
    for reply in wrong:
        try:
            assert push.hear(reply) == []
        except ProtocolError as error:
            said += 1
            assert "does not prove" in error.message
        assert not push.is_met
    assert said == 1, "it is said once"
    assert push.protocol.num_messages_refused == len(wrong)
    assert [transfer.attempt for transfer in push.protocol.transfers()] == [KEY]
    assert isinstance(push.hear(prove_reply(good_reply(asked), asked))[0], OpenDataPath)


@given(st.binary(max_size=40), st.integers(0, 1 << 30))
def test_an_answer_that_was_touched_is_none(proof, number):
    push = Pushing()
    reply = prove_reply(good_reply(push.asked), push.asked)
    if proof != reply.proof:
        bad = good_reply(push.asked, proof=proof)
        with pytest.raises(ProtocolError):
            push.hear(bad)
    changed = kv_pb2.HelloReply()
    changed.CopyFrom(reply)
    changed.epoch, changed.receiver_ns = D_EPOCH + 1 + number, number
    try:
        push.hear(changed)
    except ProtocolError:
        pass
    assert not push.is_met


def test_an_impostor_cannot_make_it_talk_without_end():
    push, num_said = Pushing(), 0
    message = push.asked
    for at in range(100):
        reply = kv_pb2.HelloReply(
            version=2, peer_epoch=P_EPOCH, echo_sent_ns=message.sent_ns, challenge=at.to_bytes(16, "big")
        )
        actions = push.hear(reply, now_s=at * 1e-4)
        num_said += len(actions)
        message = actions[0].control.hello if actions else message
    assert num_said == 1
    assert not push.is_met


@pytest.mark.long
@pytest.mark.parametrize("kind", ["loopback", "zmq", "grpc", "process", "grpc-process"])
def test_over_every_transport_a_stranger_with_the_real_epoch_gets_nothing(kind, caplog):
    """`process`: the transfer is one of its own; this channel offers the data paths raw, shm, nvlink and nixl."""
    caplog.set_level(logging.WARNING)
    pair = Pair(kind, make_layout(), push_key="ab" * 32)
    try:
        key = pair.reserve(9, wait_s=1.0)
        pair.wait_for(PushDrained, key, timeout_s=60.0)
        assert not [event for _, event in pair.events if type(event).__module__.endswith("receiver_actions")]
        counts = pair.incoming.inventory()
        assert (counts["num_kv_receives"], counts["num_reserves_waiting"], counts["frames_landed"]) == (0, 0, 0)
        assert counts["hellos_unproved"] > 0
        assert receiver_counts(counts, 0).refused > 0, "what operators see of it"
        assert pair.push.data_paths() == {}
    finally:
        pair.close()
