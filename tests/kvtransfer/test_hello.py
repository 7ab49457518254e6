"""Who may talk to whom, by which data paths, and what is said to those who may not."""

import dataclasses
import itertools

import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import MalformedMessage
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import Keep
from baton.kvtransfer.protocol.messages import control_of, encode_control, layout_message, parse_control, wire_attempt
from baton.kvtransfer.receiver.actions import AnswerControl as Reply
from baton.kvtransfer.receiver.protocol import ReceiverProtocol
from baton.kvtransfer.sender.actions import (
    DecodePeer,
    Denied,
    DropPeer,
    Granted,
    GrantInfo,
    OpenDataPath,
    PushDrained,
    PushFailed,
    SendControl,
)
from baton.kvtransfer.sender.data_path import DataPathRefused
from baton.kvtransfer.sender.data_path_choice import DataPathChooser
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.route import PushRoutes
from baton.proto import kv_pb2
from baton.tests.kvtransfer.kept import latent
from baton.tests.kvtransfer.proving import prove, prove_reply
from baton.tests.kvtransfer.simulation import CONFIG, LAYOUT

pytestmark = pytest.mark.fast
KEY = AttemptKey("a", 1)
OFFERS = [
    kv_pb2.DataPathOffer(data_path="raw"),
    kv_pb2.DataPathOffer(data_path="shm"),
    kv_pb2.DataPathOffer(data_path="nixl"),
]


def incoming(layout=LAYOUT, **options):
    return ReceiverProtocol(epoch=1, layout=layout, config=CONFIG, max_capacity_len=16, offers=OFFERS, **options)


def hello(layout=LAYOUT, **changes):
    fields = {"version": 2, "epoch": 5, "tp_size": 1, "head_count": 2, "sent_ns": 7}
    return control_of(kv_pb2.Hello(layout=layout_message(layout), **{**fields, **changes}))


def answer(protocol, message, peer="p", now_s=0.0):
    """What a HELLO that is new and proved is answered with."""
    message = kv_pb2.Control.FromString(message.SerializeToString())
    message.hello.sent_ns = 0
    prove(message.hello, 1, peer, now_s)
    replies = [a.control.hello_reply for a in protocol.on_control(peer, message, now_s) if isinstance(a, Reply)]
    return replies[-1] if replies else None


def other_rows(**changes):
    return dataclasses.replace(LAYOUT, layers=tuple(dataclasses.replace(layer, **changes) for layer in LAYOUT.layers))


EXTRA = dataclasses.replace(LAYOUT, layers=(*LAYOUT.layers, latent(8)))


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (hello(version=1), "version 1"),
        (hello(dataclasses.replace(LAYOUT, model_hash="other")), "model_hash 'other'"),
        (hello(dataclasses.replace(LAYOUT, layers=LAYOUT.layers[:1] * 3)), "num_layers 3"),
        (hello(other_rows(dtype="float32", row_len=2)), "layer 0: row_len 2 here"),
        (hello(other_rows(keep=Keep.TAIL, length=1, ring=1)), "keep 'tail' here 'rows'"),
        (hello(EXTRA), "num_layers 3 here 2"),
        (hello(tp_size=0), "rank 0 of 0"),
        (hello(tp_size=2, tp_rank=2), "rank 2 of 2"),
        (hello(tp_size=3, head_count=1), "size 3"),
        (hello(tp_size=2, head_count=2), "rank 0 of 2 holds 2 of 2 heads from 0, here 1 from 0"),
        (hello(tp_size=2, tp_rank=1, head_count=1), "rank 1 of 2 holds 1 of 2 heads from 0, here 1 from 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_does_not_fit_is_refused_by_name(message, named):
    protocol = incoming()
    reply = answer(protocol, message)
    assert named in reply.refused
    assert not reply.offers
    reserve = kv_pb2.Reserve(
        attempt=kv_pb2.Attempt(request_id="a"), epoch=5, peer_epoch=1, prompt_len=1, capacity_len=1
    )
    denied = protocol.on_control("p", control_of(reserve), 0.0)[0].control.deny
    assert denied.reason == kv_pb2.Deny.NO_HELLO


def test_block_size_and_ranks_may_differ():
    other = dataclasses.replace(LAYOUT, block_size=64)
    protocol = incoming()
    assert answer(protocol, hello(other, tp_size=2, tp_rank=1, head_first=1, head_count=1), "q").refused == ""
    assert answer(protocol, hello(other, tp_size=2, tp_rank=0, head_count=1)).refused == ""
    assert "another said otherwise" in answer(protocol, hello(other), "r").refused


def test_more_ranks_than_heads_share_them():
    protocol = incoming()
    for rank in range(4):
        message = hello(tp_size=4, tp_rank=rank, head_first=rank // 2, head_count=1)
        assert answer(protocol, message, f"p{rank}").refused == ""


def test_offers_are_what_the_peer_can_and_where_it_is():
    protocol = incoming(host_id="here")

    def offered(**changes):
        return [offer.data_path for offer in answer(protocol, hello(**changes)).offers]

    assert offered(data_paths=["shm", "raw", "inline"], host_id="here") == ["raw", "shm"]
    assert offered(data_paths=["shm", "raw", "inline"], host_id="there") == ["raw"]
    assert offered(data_paths=["nixl", "shm"], host_id="there") == ["nixl"]
    assert offered(data_paths=["inline"], host_id="here") == []
    nowhere = incoming()
    assert [o.data_path for o in answer(nowhere, hello(data_paths=["shm"], host_id="")).offers] == []


def test_a_late_hello_of_an_older_life_does_not_mute_the_living():
    protocol = incoming()
    answer(protocol, hello(epoch=6))
    answer(protocol, hello(epoch=5), now_s=0.1)  # late, of a process that is dead
    assert answer(protocol, hello(epoch=6), now_s=0.2) is None
    assert answer(protocol, hello(epoch=6), now_s=0.2 + 1.1 * CONFIG.lease_s).refused == ""


def test_a_rank_that_comes_again_over_another_connection_is_answered_there_and_over_it_alone():
    protocol = incoming()
    reserve = kv_pb2.Reserve(
        attempt=wire_attempt(KEY), epoch=5, peer_epoch=1, prompt_len=3, capacity_len=4, wait_ms=9000
    )
    answer(protocol, hello(), "p.1")
    protocol.on_control("p.1", control_of(reserve), 0.0)
    answer(protocol, hello(), "p.2")
    assert (protocol.is_met("p.1"), protocol.is_met("p.2")) == (False, True)
    protocol.on_control("p.2", control_of(reserve), 0.0)
    (granted,) = protocol.grant(KEY, 0.0)
    assert granted.peer == "p.2"


def test_a_hello_with_endless_lists_is_malformed():
    with pytest.raises(MalformedMessage):
        parse_control(encode_control(hello(data_paths=["x"] * 100)))
    with pytest.raises(MalformedMessage):
        parse_control(encode_control(hello(incarnation_file="x" * 5000)))


def test_a_message_is_only_believed_with_its_checksum():
    data = encode_control(hello())
    assert parse_control(data) == hello()
    assert kv_pb2.Control.FromString(data).hello == hello().hello  # protobuf's own readers take it too
    for index in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            with pytest.raises(MalformedMessage):
                parse_control(damaged)
        with pytest.raises(MalformedMessage):
            parse_control(data[:index])


class Pushing:
    """A prefill rank that has met a decode worker."""

    def __init__(self, **identity):
        fields = {"data_paths": ("shm", "inline"), "host_id": "here"}
        self.protocol = PushProtocol(identity=PushIdentity(5, **{**fields, **identity}), layout=LAYOUT, config=CONFIG)

    def reply_to(self, actions, now_s=0.0, **changes):
        asked = next(a.control.hello for a in actions if isinstance(a, SendControl))
        fields = {"version": 2, "epoch": 1, "peer_epoch": 5, "echo_sent_ns": asked.sent_ns, "host_id": "here"}
        reply = prove_reply(kv_pb2.HelloReply(layout=layout_message(LAYOUT), **{**fields, **changes}), asked)
        return self.protocol.on_control("d", control_of(reply), now_s)

    def reserve(self, now_s=0.0, key=KEY, epoch=1, wait_s=9.0):
        peer = DecodePeer("d", "d", epoch)
        return self.protocol.reserve(key, peer, prompt_len=3, capacity_len=4, wait_s=wait_s, now_s=now_s)

    def granted(self, key, epoch):
        """The first incoming transfer of an incarnation, as that counts."""
        fields = {"incoming_id": 1, "credit_bytes": 1 << 20, "lease_ms": 2000, "data_path": "shm", "blocks": [4, 5]}
        grant = kv_pb2.Grant(attempt=wire_attempt(key), epoch=epoch, **fields)
        actions = self.protocol.on_control("d", control_of(grant), 0.5)
        return any(isinstance(action, Granted) for action in actions)

    def meet(self):
        """The life 1, over shared memory, without any transfer that is left."""
        self.reply_to(self.reserve())
        self.protocol.data_path_opened("d", "shm", 0.0)
        self.protocol.abort(KEY, "met", 0.0)


def test_a_reserve_waits_for_the_data_path_and_names_it():
    push = Pushing()
    offer = kv_pb2.DataPathOffer(data_path="shm")
    actions = push.reply_to(push.reserve(), offers=[offer])
    assert actions == [OpenDataPath("d", 1, "here", (offer,))]
    (asked,) = push.protocol.data_path_opened("d", "shm", 0.0)
    assert asked.control.reserve.data_path == "shm"
    assert asked.control.reserve.peer_epoch == 1
    assert push.protocol.data_paths() == {"d": "shm"}


def test_a_refusal_denies_at_once_and_the_next_request_asks_again():
    push = Pushing()
    actions = push.reply_to(push.reserve(), refused="KVP version 9, here 1")
    assert actions == [Denied(KEY, kv_pb2.Deny.LAYOUT, "KVP version 9, here 1")]
    again = push.reserve(1.0, AttemptKey("b", 1))
    assert [action.control.WhichOneof("message") for action in again] == ["hello"]


def kinds(actions):
    return [action.control.WhichOneof("message") for action in actions if isinstance(action, SendControl)]


OTHER = AttemptKey("b", 1)


class FakeOpener:
    name, problem, refusal = "shm", "", "cannot open it: Too many open files"

    def open(self, offer, epoch, host_id):
        if self.refusal:
            raise DataPathRefused(self.refusal)
        return object()


def test_what_could_not_be_opened_is_opened_anew_by_a_later_request_and_the_pair_not_given_up():
    """No file number was left, for instance; LAYOUT would keep these two apart as long as both live."""
    push, opener, clock = Pushing(), FakeOpener(), VirtualClock()
    routes = PushRoutes(push.protocol, DataPathChooser("shm", [opener], None), clock)
    (wanted,) = push.reply_to(push.reserve(), offers=OFFERS)
    assert routes.open_data_path(wanted) == []
    (denied,) = routes.refusal(OTHER, "d", 1)
    assert denied.reason == kv_pb2.Deny.DATA_PATH
    assert "Too many open files" in denied.detail
    clock.advance(1.0)
    assert routes.refusal(OTHER, "d", 1) == []
    asked = push.reserve(1.0, OTHER)
    assert kinds(asked) == ["hello"], "at once, not with the next heartbeat"
    opener.refusal = ""
    (wanted,) = push.reply_to(asked, 1.0, offers=OFFERS)
    assert kinds(routes.open_data_path(wanted)) == ["reserve", "reserve"]
    assert routes.refusal(OTHER, "d", 1) == []


def test_a_connection_that_was_made_anew_proves_itself_again_and_the_request_waits_for_it():
    push = Pushing()
    push.reply_to(push.reserve())
    push.protocol.data_path_opened("d", "shm", 0.0)
    deny = control_of(kv_pb2.Deny(attempt=wire_attempt(KEY), epoch=1, reason=kv_pb2.Deny.NO_HELLO))
    asked = push.protocol.on_control("d", deny, 0.5)
    assert kinds(asked) == ["hello"]
    assert push.protocol.on_control("d", deny, 0.5) == [], "it is asked for once in a heartbeat"
    push.reply_to(asked, 0.5)
    assert "reserve" in kinds(push.protocol.tick(0.5 + CONFIG.heartbeat_s))


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_life_that_was_not_met_yet_is_asked_for_and_served(is_busy):
    """Whoever reserves heard of it before this side did."""
    push = Pushing()
    push.meet()
    if is_busy:
        push.reserve(0.0, AttemptKey("old", 1))
    asked = push.reserve(0.5, OTHER, epoch=2)
    assert kinds(asked) == ["hello"]
    actions = push.reply_to(asked, 0.5, epoch=2)
    failed = [(action.attempt.request_id, action.reason) for action in actions if isinstance(action, PushFailed)]
    assert failed == [("old", "the decode worker restarted")] * is_busy
    assert actions[-1] == OpenDataPath("d", 2, "here", ())
    (reserve,) = push.protocol.data_path_opened("d", "shm", 0.5)
    assert reserve.control.reserve.peer_epoch == 2
    assert [transfer.attempt for transfer in push.protocol.transfers()] == [OTHER]


def test_lives_count_their_incoming_transfers_alike():
    """A write into the first transfer of an incarnation that died goes on while the next grants its first."""
    push = Pushing()
    push.reply_to(push.reserve())
    push.protocol.data_path_opened("d", "shm", 0.0)
    assert push.granted(KEY, epoch=1)
    push.protocol.hold(KEY)
    actions = push.reply_to(push.reserve(0.5, OTHER, epoch=2), 0.5, epoch=2)
    assert PushFailed(KEY, "the decode worker restarted") in actions
    push.protocol.data_path_opened("d", "shm", 0.5)
    assert push.granted(OTHER, epoch=2)
    assert push.protocol.unhold(KEY) == [PushDrained(KEY)]
    deadline_s = push.protocol.write_deadline_s(OTHER)
    push.protocol.on_control("d", control_of(kv_pb2.Lease(epoch=2, incoming_ids=[1])), 1.5)
    assert push.protocol.write_deadline_s(OTHER) == pytest.approx(deadline_s + 1.0)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_life_gone_by_is_refused_by_the_one_that_answers(is_busy):
    push = Pushing()
    push.meet()
    if is_busy:
        push.reserve(0.0, AttemptKey("present", 1))
    actions = push.reply_to(push.reserve(0.5, OTHER, epoch=2), 0.5)
    assert PushFailed(OTHER, "the decode worker restarted") in actions
    assert [transfer.attempt.request_id for transfer in push.protocol.transfers()] == ["present"] * is_busy


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_life_that_does_not_answer_is_asked_again_with_every_heartbeat_and_given_up(is_busy):
    push = Pushing()
    push.meet()
    if is_busy:
        push.reserve(0.0, AttemptKey("old", 1))
    now_s, asked_s = CONFIG.lease_s / 2, []
    actions = push.reserve(now_s, OTHER, epoch=2, wait_s=100.0)
    start_s = now_s
    while PushFailed(OTHER, f"nothing heard from the decode worker for {CONFIG.lease_s} s") not in actions:
        if "hello" in kinds(actions):
            asked_s.append(now_s)
        assert "reserve" not in [a.control.WhichOneof("message") for a in actions if is_for(a, OTHER)]
        now_s += 0.05
        assert now_s < start_s + CONFIG.lease_s + 0.1
        actions = push.protocol.tick(now_s)
    assert DropPeer("d") in actions
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked_s)]
    assert max(gaps) < 2 * CONFIG.heartbeat_s


def is_for(action, key):
    return isinstance(action, SendControl) and action.control.reserve.attempt.request_id == key.request_id


def test_a_rank_that_gives_up_before_it_met_the_decode_worker_says_so_when_it_has():
    """Nothing else would end the transfer but the lease of the rank that gave up."""
    push = Pushing(rank=1, size=2)
    grant = GrantInfo(
        d_epoch=1, incoming_id=3, credit_bytes=1 << 20, lease_s=2.0, data_path="shm", blocks=(4, 5), block_size=2
    )
    asked = push.protocol.adopt(KEY, DecodePeer("d", "d", 1), prompt_len=3, grant=grant, now_s=0.0)
    assert push.protocol.abort(KEY, "out of memory", 0.0) == [PushDrained(KEY)]
    assert kinds(push.protocol.tick(2 * CONFIG.heartbeat_s)) == ["hello"], "it would refuse an ABORT of one unknown"
    push.reply_to(asked, 2 * CONFIG.heartbeat_s)
    said = [action.control.abort for action in push.protocol.tick(2 * CONFIG.heartbeat_s) if "abort" in kinds([action])]
    assert [(abort.epoch, abort.incoming_id, abort.reason) for abort in said] == [(1, 3, "out of memory")]


def test_other_ranks_ask_for_a_life_that_granted_and_was_not_met_yet():
    push = Pushing(rank=1, size=2)
    grant = GrantInfo(
        d_epoch=1, incoming_id=3, credit_bytes=1 << 20, lease_s=2.0, data_path="shm", blocks=(4, 5), block_size=2
    )
    asked = push.protocol.adopt(KEY, DecodePeer("d", "d", 1), prompt_len=3, grant=grant, now_s=0.0)
    push.reply_to(asked)
    push.protocol.data_path_opened("d", "shm", 0.0)
    later = dataclasses.replace(grant, d_epoch=2)
    asked = push.protocol.adopt(OTHER, DecodePeer("d", "d", 2), prompt_len=3, grant=later, now_s=0.5)
    assert kinds(asked) == ["hello"]
    actions = push.reply_to(asked, 0.5, epoch=2)
    assert [action.attempt for action in actions if isinstance(action, PushFailed)] == [KEY]
    (resume,) = push.protocol.data_path_opened("d", "shm", 0.5)
    assert (resume.control.resume.epoch, resume.control.resume.incoming_id) == (2, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_path": "inline"}, "data path shm was asked for"),
        ({"blocks": [1]}, "granted 1 blocks of 2 for 3 positions"),
        ({"incoming_id": 0}, "granted incoming transfer 0"),
        ({"lease_ms": 0}, "a lease of 0"),
    ],
)
def test_a_grant_that_makes_no_sense_ends_the_transfer(change, reason):
    push = Pushing()
    push.reply_to(push.reserve())
    push.protocol.data_path_opened("d", "shm", 0.0)
    fields = {
        "epoch": 1,
        "incoming_id": 3,
        "credit_bytes": 1 << 20,
        "lease_ms": 2000,
        "data_path": "shm",
        "blocks": [4, 5],
    }
    grant = kv_pb2.Grant(attempt=kv_pb2.Attempt(request_id="a", attempt=1), **{**fields, **change})
    actions = push.protocol.on_control("d", control_of(grant), 0.0)
    assert reason in next(a.reason for a in actions if isinstance(a, PushFailed))
    assert not any(isinstance(action, Granted) for action in actions)
    assert tuple(push.protocol.transfers()) == ()


@pytest.mark.parametrize(("mine", "theirs", "agreed"), [(True, True, True), (True, False, False), (False, True, False)])
def test_digests_are_used_if_both_sides_can(mine, theirs, agreed):
    push = Pushing(has_digest=mine)
    push.reply_to(push.reserve(), capabilities=["digest"] if theirs else [])
    assert push.protocol._rules.peers["d"].has_digest is agreed
    at_d = incoming(has_digest=theirs)
    assert answer(at_d, hello(capabilities=["digest"] if mine else [])).capabilities == (["digest"] if theirs else [])
    assert at_d._rules.peers.get("p").has_digest is agreed
