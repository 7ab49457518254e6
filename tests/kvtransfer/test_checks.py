"""Each check of the hand-off by itself: one field of one message is forged, and that is what is refused."""

import dataclasses

import pytest

from baton.core.errors import ProtocolError
from baton.kvtransfer.protocol.frame import decode_header, encode_header
from baton.kvtransfer.protocol.messages import encode_control, parse_control
from baton.kvtransfer.receiver.table import IncomingState
from baton.kvtransfer.sender.table import TransferState
from baton.tests.kvtransfer.simulation import Message, Options, World, cell_digest
from baton.tests.kvtransfer.test_regressions import frames, granted, push_all, take

pytestmark = pytest.mark.fast
SHM = Options(data_path="shm")


def forge(world, kind, change, *, times=1):
    """Change the next messages of a kind on their way, each by what `change` does to its fields."""
    post, left = world.post, [times]

    def forged(sender, receiver, data, payload=None, seq=None):
        if payload is None and left[0]:
            control = parse_control(data)
            if control.WhichOneof("message") == kind:
                left[0] -= 1
                change(getattr(control, kind))
                data = encode_control(control)
        post(sender, receiver, data, payload, seq)

    world.post = forged


def set_to(**fields):
    def change(message):
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def one_digest_differs(commit):
    commit.layer_digests[1] ^= 1


def without_digests(commit):
    del commit.layer_digests[:]


def hand_over(world, attempt):
    push_all(world, attempt)
    hand_over_rest(world, attempt)


def hand_over_rest(world, attempt):
    world.deliver_all()
    for rank in world.prefills["p0"].ranks:
        rank.commit(attempt)
    world.deliver_all()


def is_complete(world, attempt):
    return (attempt, "complete") in world.log


@pytest.mark.parametrize(
    "change",
    [set_to(prompt_len=1), set_to(num_layers=1), set_to(tp_size=2), set_to(tp_rank=1), without_digests],
    ids=["prompt", "layers", "ranks", "rank", "no-digests"],
)
def test_a_commit_that_describes_another_incoming_ends_it(change):
    world = World()
    attempt = granted(world, prompt_len=2)
    forge(world, "commit", change)
    hand_over(world, attempt)
    assert not is_complete(world, attempt)
    assert "does not describe" in world.decodes["d0"].protocol._rules.table.tombstone(attempt).reason
    world.settle()


def test_a_commit_for_another_life_changes_nothing():
    world = World()
    attempt = granted(world, prompt_len=2)
    forge(world, "commit", lambda commit: set_to(epoch=commit.epoch + 1)(commit))
    hand_over(world, attempt)
    assert not is_complete(world, attempt)
    assert world.decodes["d0"].protocol.counts.messages_refused == 1
    world.advance(1.0)
    world.deliver_all()
    assert is_complete(world, attempt), "it is said again"


def exchange(world):
    """Put another content, with the digest of that content, into the next frame of layer 1."""
    (message,) = take(world, lambda message: frames(message) and decode_header(message.data).layer == 1)
    header, (value, *others) = decode_header(message.data), message.payload
    where = (header.layer, header.head_first, header.first)
    changed = cell_digest(value ^ 1, *where) - cell_digest(value, *where)
    header = dataclasses.replace(header, payload_digest=(header.payload_digest + changed) % 2**64)
    sent = Message(message.sender, message.receiver, encode_header(header), (value ^ 1, *others), message.seq)
    world.in_flight.append(sent)


def test_a_frame_that_was_exchanged_for_another_is_seen_by_the_commit_and_sent_again():
    world = World()
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    exchange(world)
    hand_over_rest(world, attempt)
    assert world.decodes["d0"].protocol.counts.layers_corrupt == 1
    assert is_complete(world, attempt), "the second time, by the digests of the second time alone"


def test_a_layer_whose_digest_differs_twice_ends_the_incoming():
    world = World()
    attempt = granted(world, prompt_len=2)
    forge(world, "commit", one_digest_differs, times=2)
    hand_over(world, attempt)
    assert not is_complete(world, attempt)
    assert "corrupt twice" in world.decodes["d0"].protocol._rules.table.tombstone(attempt).reason


def name_twice(message):
    message.missing.extend([message.missing[0]] * 1000)


def name_again(message):
    last = message.missing[-1]
    message.missing.add(layer=last.layer, first=last.first + last.count - 1, count=1)


def name_out_of_order(message):
    gaps = list(message.missing)[::-1]
    del message.missing[:]
    message.missing.extend(gaps)


@pytest.mark.parametrize("kind", ["have", "commit_nack"])
@pytest.mark.parametrize("change", [name_twice, name_again, name_out_of_order])
def test_a_decode_worker_that_lacks_a_position_twice_is_given_up(kind, change):
    """Else a few bytes of its message would make the prefill worker queue a whole layer again, without end."""
    world = World()
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    take(world, frames)
    forge(world, kind, change)
    rank = world.prefills["p0"].ranks[0]
    if kind == "commit_nack":
        rank.commit(attempt)
    for _ in range(20):
        world.advance(0.1)
        world.deliver_all()
    assert rank.protocol.transfer(attempt) is None
    assert "twice, or out of order" in world.decodes["d0"].protocol._rules.table.tombstone(attempt).reason


@pytest.mark.parametrize("data_path", ["inline", "shm"])
@pytest.mark.parametrize("name", ["d_epoch", "attempt"])
def test_a_frame_of_another_life_or_attempt_is_late(name, data_path):
    world = World(Options(data_path=data_path))
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    node = world.decodes["d0"]
    message = take(world, frames)[0]
    header = decode_header(message.data)
    header = dataclasses.replace(header, **{name: getattr(header, name) + 1})
    assert node.protocol.on_frame(message.sender, header, node.now()) == []
    assert node.protocol.counts.frames_late_dropped == 1
    assert not node.protocol.incoming(header.incoming_id).writes


def test_a_frame_without_the_digest_that_was_agreed_on_is_refused():
    world = World()
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    node = world.decodes["d0"]
    message = take(world, frames)[0]
    header = decode_header(message.data)
    assert header.payload_digest is not None
    with pytest.raises(ProtocolError, match="digest"):
        node.protocol.on_frame(message.sender, dataclasses.replace(header, payload_digest=None), node.now())
    assert not node.protocol.incoming(header.incoming_id).writes


def test_a_frame_of_another_ranks_heads_is_refused():
    world = World(Options(prefill_tp=2, decode_tp=2))
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    node = world.decodes["d0"]
    first, second = (
        next(message for message in world.in_flight if frames(message) and message.sender == rank.name)
        for rank in world.prefills["p0"].ranks
    )
    header = decode_header(first.data)
    with pytest.raises(ProtocolError, match="heads"):
        node.protocol.on_frame(second.sender, header, node.now())
    assert not node.protocol.incoming(header.incoming_id).writes


def test_a_grant_of_another_life_is_not_used():
    world = World()
    attempt = world.reserve("p0", "d0", "r", 2)
    world.deliver_all()
    forge(world, "grant", lambda grant: set_to(epoch=grant.epoch + 1)(grant))
    world.decodes["d0"].grant(world.decodes["d0"].wanted[0])
    world.deliver_all()
    assert world.prefills["p0"].protocol.transfer(attempt).state is TransferState.RESERVING


def test_an_ack_before_the_commit_is_not_taken():
    world = World()
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt, layers=[0])
    rank = world.prefills["p0"].ranks[0]
    incoming = world.decodes["d0"].protocol._rules.table.get(attempt)
    ack = world.decodes["d0"].protocol._rules.replies.ack(rank.name, incoming.epoch, incoming.incoming_id)
    rank.protocol.on_control("d0", ack.control, rank.now())
    assert rank.protocol.transfer(attempt).state is TransferState.PUSHING


@pytest.mark.parametrize(
    "change",
    [
        lambda ack: set_to(incoming_id=ack.incoming_id + 1)(ack),
        lambda ack: set_to(epoch=ack.epoch + 1)(ack),
        set_to(drained=False),
        lambda ack: set_to(peer_epoch=ack.peer_epoch + 1)(ack),
    ],
    ids=["incoming", "incarnation", "not-drained", "peer"],
)
def test_what_is_said_of_another_incoming_frees_no_blocks(change):
    world = World(SHM)
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    node = world.decodes["d0"]
    forge(world, "abort_ack", change)
    node.abort(attempt)
    world.deliver_all()
    assert node.protocol._rules.table.get(attempt).state is IncomingState.QUARANTINED
    assert node.protocol.counts.messages_refused == 1
    world.settle()


def test_a_commit_from_before_the_question_what_is_missing_does_not_count():
    """One-sided: the sender may be writing again; only its next COMMIT says that it has stopped."""
    world = World(SHM)
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    lost = take(world, frames)[0]
    sender = world.prefills["p0"].ranks[0]
    sender.commit(attempt)
    world.deliver_all()
    assert not is_complete(world, attempt)
    held = []
    post = world.post
    world.post = lambda source, receiver, data, payload=None, seq=None: (
        held.append((source, receiver, data, payload, seq))
        if payload is None and parse_control(data).WhichOneof("message") == "commit"
        else post(source, receiver, data, payload, seq)
    )
    world.advance(0.2)
    world.deliver_all()
    sender.finish_writes()
    world.deliver_all()
    assert decode_header(lost.data).layer == 0
    assert world.decodes["d0"].protocol._rules.table.get(attempt).coverage.is_complete()
    assert not is_complete(world, attempt), "all is there, and its sender has not said so"
    world.post = post
    for message in held:
        post(*message)
    world.deliver_all()
    assert is_complete(world, attempt)
