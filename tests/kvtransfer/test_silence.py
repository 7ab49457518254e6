"""Who is blamed for silence, and for how long: pauses of this process, seals, late answers, lives gone by."""

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.messages import control_of, layout_message
from baton.kvtransfer.receiver.actions import AnswerControl, Drained, IncomingFailed
from baton.kvtransfer.receiver.peers import MAX_RETIRED_EPOCHS
from baton.kvtransfer.receiver.protocol import ReceiverProtocol
from baton.kvtransfer.sender.actions import DecodePeer, DropPeer, PushFailed
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.table import TransferState
from baton.proto import kv_pb2
from baton.tests.kvtransfer.proving import prove
from baton.tests.kvtransfer.simulation import CONFIG, LAYOUT, NUM_LAYERS, World
from baton.tests.kvtransfer.test_regressions import control, frames, granted, take

pytestmark = pytest.mark.fast
KEY = AttemptKey("a", 1)


@pytest.fixture
def world():
    return World()


def hello(epoch):
    said = kv_pb2.Hello(version=2, epoch=epoch, layout=layout_message(LAYOUT), tp_size=1, head_count=2)
    return control_of(prove(said, 1, "p"))


@pytest.fixture
def filling():
    """An incoming transfer protocol with one granted incoming transfer, at time 0."""
    protocol = ReceiverProtocol(epoch=1, layout=LAYOUT, config=CONFIG, max_capacity_len=1024)
    protocol.on_control("p", hello(5), 0.0)
    attempt = kv_pb2.Attempt(request_id="a", attempt=1)
    reserve = kv_pb2.Reserve(attempt=attempt, epoch=5, peer_epoch=1, prompt_len=3, capacity_len=9, wait_ms=1000)
    protocol.on_control("p", control_of(reserve), 0.0)
    protocol.grant(KEY, 0.0)
    return protocol


def ended_s(protocol, turn_s, kind, until_s=60.0):
    now_s = 0.0
    while now_s < until_s:
        now_s += turn_s
        protocol.forgive(turn_s, now_s)
        if any(isinstance(action, kind) for action in protocol.tick(now_s)):
            return now_s
    raise AssertionError(f"turns of {turn_s} s hide a peer that is gone")


@pytest.mark.parametrize("turn_s", [0.02, 0.3, 0.9, 1.1, 1.9])
def test_slow_turns_do_not_hide_a_prefill_worker_that_is_gone(filling, turn_s):
    assert ended_s(filling, turn_s, Drained) <= 2 * CONFIG.lease_s + 2 * turn_s


@pytest.mark.parametrize("turn_s", [0.02, 0.3, 0.9, 1.1, 1.9])
def test_slow_turns_do_not_hide_a_decode_worker_that_is_gone(turn_s):
    protocol = PushProtocol(identity=PushIdentity(5), layout=LAYOUT, config=CONFIG)
    protocol.reserve(KEY, DecodePeer("d", "d", 1), prompt_len=3, capacity_len=9, wait_s=100.0, now_s=0.0)
    assert ended_s(protocol, turn_s, PushFailed) <= 2 * CONFIG.lease_s + 2 * turn_s


def test_one_long_pause_is_forgiven(filling):
    filling.forgive(2.5, 2.5)
    assert not any(isinstance(action, IncomingFailed) for action in filling.tick(2.6))
    filling.on_control("p", control_of(kv_pb2.Lease(epoch=5, incoming_ids=[1])), 2.7)
    filling.forgive(1.9, 4.6)  # a sign of life renews what may be forgiven
    assert not any(isinstance(action, IncomingFailed) for action in filling.tick(4.65))


def test_a_sign_never_moves_into_the_future():
    sign = LastSign(10.0)
    sign.forgive(5.0, 2.0, 10.5)
    assert sign.silence_s(10.5) == 0.0
    sign.forgive(5.0, 2.0, 20.0)
    assert sign.silence_s(20.0) == pytest.approx(8.0)  # one limit in all


def test_a_silent_peer_gets_a_new_connection_even_if_requests_keep_coming():
    protocol = PushProtocol(identity=PushIdentity(5), layout=LAYOUT, config=CONFIG)
    peer = DecodePeer("d", "d", 1)
    actions, now_s, index = [], 0.0, 0
    while now_s < 2 * CONFIG.lease_s:
        if index == 0 or now_s >= index * 0.5:
            key = AttemptKey(f"r{index}", 1)
            # Waits shorter than a lease must not hide the silence either.
            actions += protocol.reserve(key, peer, prompt_len=3, capacity_len=9, wait_s=0.4, now_s=now_s)
            index += 1
        now_s += 0.05
        actions += protocol.tick(now_s)
    assert DropPeer("d") in actions
    assert all(action.peer == "d" for action in actions if isinstance(action, AnswerControl))


def test_what_is_sealed_outlives_its_prefill_worker(world):
    """A decode stream that runs must not end because the source gave up, fell silent or restarted."""
    attempt = granted(world, prompt_len=2)
    node, source = world.decodes["d0"], world.prefills["p0"]
    world.work()
    while attempt not in node.complete:
        world.deliver()
        node.finish_all()
    take(world, control("commit_ack"))  # so that the prefill worker still believes it has to wait
    source.abort(attempt)
    world.deliver_all()
    assert source.protocol._rules.peers["d0"].farewells == {}, "the ABORT was acknowledged"
    assert attempt in node.complete
    for step in (lambda: world.advance(10.0), lambda: world.crash_prefill("p0")):
        step()
        world.deliver_all()
    granted(world, request_id="of the next incarnation")
    assert attempt in node.complete
    world.reserve("p1", "d0", "r", 2)  # a higher attempt
    world.deliver_all()
    assert attempt not in node.complete


def test_a_incoming_that_is_not_sealed_says_who_gave_it_up(world):
    told = []
    node = world.decodes["d0"]
    do = node.do
    node.do = lambda actions, payload=(): (
        told.extend(a for a in actions if isinstance(a, IncomingFailed)),
        do(actions, payload),
    )
    one, other = granted(world, request_id="one"), granted(world, request_id="other")
    world.prefills["p0"].abort(one)
    world.deliver_all()
    world.crash_prefill("p0")
    world.advance(3.0)
    world.deliver_all()
    assert {event.attempt: event.by_peer for event in told} == {one: True, other: False}


@pytest.mark.long
def test_the_lives_of_a_peer_are_not_remembered_for_ever(filling):
    for epoch in range(6, 1000):
        filling.on_control("p", hello(epoch), 0.0)
    known = filling._rules.peers.get("p")
    assert len(known.retired) == MAX_RETIRED_EPOCHS
    assert filling.on_control("p", hello(998), 0.0) == []  # overtaken
    assert known.epoch == 999


def test_a_late_have_does_not_answer_a_newer_resume(world):
    attempt = granted(world, prompt_len=15)
    node = world.prefills["p0"]
    for layer in range(NUM_LAYERS):
        node.push(attempt, layer, 15)
    transfer = next(iter(node.protocol.transfers()))

    def lose_and_ask():
        take(world, frames)
        while not (asked := [m for m in world.in_flight if control("resume")(m)]):
            world.advance(0.1)
        return asked[0]

    lose_and_ask()
    world.deliver_all()  # asked, answered, sent again, credited
    answers = [message for message in world.history if control("have")(message)]
    assert answers
    before = transfer.num_resends
    transfer.is_resume_posted = True  # a newer question is open
    world.in_flight += answers
    world.deliver_all()
    assert transfer.num_resends == before
    assert transfer.is_resume_posted


def test_a_transfer_that_is_still_held_does_not_pass_its_silence_on():
    protocol = PushProtocol(identity=PushIdentity(5), layout=LAYOUT, config=CONFIG)
    peer = DecodePeer("d", "d", 1)
    protocol.reserve(KEY, peer, prompt_len=3, capacity_len=9, wait_s=100.0, now_s=0.0)
    protocol.hold(KEY)
    protocol.abort(KEY, "test", 0.1)
    later_s = 5 * CONFIG.lease_s
    protocol.tick(later_s)
    protocol.reserve(AttemptKey("b", 1), peer, prompt_len=3, capacity_len=9, wait_s=100.0, now_s=later_s)
    assert not any(isinstance(action, PushFailed) for action in protocol.tick(later_s + 0.1))
    assert {transfer.state for transfer in protocol.transfers()} == {TransferState.ABORTING, TransferState.RESERVING}
