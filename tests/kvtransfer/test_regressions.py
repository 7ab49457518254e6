"""What went wrong in the field, in other engines, as fixed examples (research/kv-transfer.md, section 3)."""

import dataclasses

import pytest

from baton.core.errors import ProtocolError
from baton.kvtransfer.protocol.frame import decode_header, encode_header
from baton.kvtransfer.protocol.messages import parse_control
from baton.kvtransfer.receiver.table import IncomingState
from baton.tests.kvtransfer.simulation import CONFIG, LAYOUT, NUM_BLOCKS, NUM_LAYERS, Message, Options, World

pytestmark = pytest.mark.fast
KINDS = [
    Options(),
    Options(data_path="shm"),
    Options(prefill_tp=2, decode_tp=2),
    Options(prefill_tp=2, data_path="shm"),
]


@pytest.fixture
def world():
    return World()


@pytest.fixture(params=KINDS, ids=lambda options: f"{options.data_path}-{options.prefill_tp}-{options.decode_tp}")
def any_world(request):
    """One of every kind."""
    return World(request.param)


def granted(world, prompt_len=5, request_id="r", prefill="p0", decode="d0"):
    attempt = world.reserve(prefill, decode, request_id, prompt_len)
    world.deliver_all()
    world.decodes[decode].grant(world.decodes[decode].wanted[0])
    world.deliver_all()
    world.prefills[prefill].share()
    world.deliver_all()
    return attempt


def push_all(world, attempt, prefill="p0", layers=range(NUM_LAYERS)):
    """Everything that the window lets out."""
    for layer in layers:
        world.prefills[prefill].push(attempt, layer, 1 << 10)
    for rank in world.ranks():
        rank.finish_writes()


def take(world, wanted):
    """Take messages out of the network."""
    taken = [message for message in world.in_flight if wanted(message)]
    world.in_flight = [message for message in world.in_flight if not wanted(message)]
    return taken


def frames(message):
    return message.payload is not None


def control(name):
    return lambda message: not frames(message) and parse_control(message.data).WhichOneof("message") == name


def contents(node):
    """What all pools hold."""
    return [dict(rank) for rank in node.pool.ranks]


# vllm #52234: a reference to KV that is another's by now. Five ways to have one.


def test_a_frame_for_an_unknown_incoming(any_world):
    world = any_world
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    node = world.decodes["d0"]
    held = contents(node)
    for message in take(world, frames):
        header = dataclasses.replace(decode_header(message.data), incoming_id=99)
        node.on_message(Message(message.sender, "d0", encode_header(header), message.payload))
        node.finish_all()
    assert contents(node) == held
    assert node.protocol.counts.frames_late_dropped
    assert not node.writes


def test_a_frame_for_a_incoming_that_was_consumed(any_world):
    world = any_world
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    old = [message for message in world.in_flight if frames(message)]
    world.work()
    world.deliver_all()
    node = world.decodes["d0"]
    assert attempt in node.complete
    held = contents(node)
    for is_released in (False, True):
        world.in_flight += old
        world.deliver_all()
        assert contents(node) == held
        if not is_released:
            node.release(attempt)
    assert node.protocol.counts.frames_late_dropped == 2 * len(old)
    world.settle()


@pytest.mark.parametrize(
    "change",
    [
        {"first": 1 << 20},
        {"first": 4, "count": 2},
        {"layer": NUM_LAYERS},
        {"head_first": 2},
        {"head_count": 3},
        {"count": 0},
        {"order_block_size": 3},
        {"payload_bytes": 1 << 31},
    ],
    ids=str,
)
def test_a_frame_out_of_range(world, change):
    attempt = granted(world, prompt_len=5)
    push_all(world, attempt)
    node = world.decodes["d0"]
    message = take(world, frames)[0]
    header = decode_header(message.data)
    header = dataclasses.replace(header, **change)
    if change.get("count") == 2:
        header = dataclasses.replace(header, payload_bytes=2 * LAYOUT.layers[0].head_bytes * LAYOUT.num_kv_heads)
    with pytest.raises(ProtocolError):
        node.protocol.on_frame(message.sender, header, node.now())
    assert not node.writes
    assert node.protocol.incoming(1).coverage.overlaps(0, 0, 5, 0, 2) is False


@pytest.mark.parametrize("blocks", [(), (1,)])
def test_a_grant_of_too_few_blocks_is_refused_where_the_sender_writes(blocks):
    world = World(Options(data_path="shm"))
    attempt = world.reserve("p0", "d0", "r", 5)
    world.deliver_all()
    node = world.decodes["d0"]
    node.grant(node.wanted[0])
    message = take(world, control("grant"))[0]
    grant = parse_control(message.data)
    grant.grant.blocks[:] = blocks
    rank = world.prefills["p0"].ranks[0]
    rank.do(rank.protocol.on_control("d0", grant, rank.now()))
    assert rank.ended[attempt] == "PushDrained"
    world.settle()


def test_a_stale_frame_after_its_blocks_were_reused(any_world):
    world = any_world
    first = granted(world, prompt_len=7)
    push_all(world, first, layers=[0])
    stale = take(world, frames)
    assert stale
    world.decodes["d0"].abort(first)
    world.deliver_all()
    second = granted(world, prompt_len=7, request_id="other", prefill="p1")
    held = contents(world.decodes["d0"])
    world.in_flight += stale
    world.deliver_all()
    assert contents(world.decodes["d0"]) == held
    assert world.decodes["d0"].protocol.counts.frames_late_dropped == len(stale)
    world.settle()
    assert (second, "complete") in world.log
    assert (first, "complete") not in world.log


def test_a_frame_after_the_lease_expired(any_world):
    """A prefill worker that was stopped comes back and goes on as if nothing had happened."""
    world = any_world
    attempt = granted(world, prompt_len=3)
    push_all(world, attempt, layers=[0])
    late = take(world, frames)
    for rank in world.prefills["p0"].ranks:
        rank.is_stopped = True
    node = world.decodes["d0"]
    world.advance(2 * CONFIG.lease_s)
    held = contents(node)
    assert (attempt in node.tables) == (
        world.options.data_path != "inline"
    )  # where it may write, only evidence frees them
    for rank in world.prefills["p0"].ranks:
        rank.is_stopped = False
    world.in_flight += late
    world.deliver_all()
    assert contents(node) == held
    assert node.protocol.counts.frames_late_dropped == len(late)
    world.settle()
    assert (attempt, "complete") not in world.log


# Others


def test_both_sides_abort_at_once(any_world):
    """vllm #46283: a decode abort that met a prefill abort leaked blocks."""
    world = any_world
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 3)
    world.prefills["p0"].abort(attempt)
    world.decodes["d0"].abort(attempt)
    world.settle(limit_s=1.0)


def test_the_prefill_worker_dies_while_its_request_waits_for_blocks(any_world):
    """vllm #21570: one side freed by timeout while the other queued."""
    world = any_world
    hog = granted(world, prompt_len=2 * NUM_BLOCKS - 1, request_id="hog", prefill="p1")
    waiting = world.reserve("p0", "d0", "waits", 5)
    world.deliver_all()
    node = world.decodes["d0"]
    world.work()
    assert [wanted.attempt for wanted in node.wanted] == [waiting]
    world.cut.add(frozenset(("p0", "d0")))
    world.crash_prefill("p0")
    for _ in range(30):
        world.advance(0.1)
        world.deliver_all()
    assert node.wanted == []  # nobody grants blocks to the dead
    assert hog in node.tables or (hog, "complete") in world.log


def test_a_failed_post_is_reported_and_nobody_counts_to_a_number_that_will_not_come(world):
    """vllm #50754: a write that was never posted left the decode side waiting for ever."""
    attempt = granted(world)
    node = world.prefills["p0"]
    post = world.post
    world.post = lambda *message: None if len(message) > 3 else post(*message)  # everything but frames arrives
    for _ in range(80):
        world.work()
        world.deliver_all()
        world.advance(0.1)
    assert node.ended[attempt] == "PushDrained"
    assert world.decodes["d0"].tables == {}
    assert (attempt, "complete") not in world.log


def test_a_failed_write_is_reported_and_ends_the_incoming_on_all_ranks():
    """The same where the sender writes, on one rank of two."""
    world = World(Options(prefill_tp=2, data_path="shm"))
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 5)
    rank = world.prefills["p0"].ranks[1]
    rank.fail_write(rank.writes[0])
    world.settle(limit_s=2.0)
    assert {node.ended[attempt] for node in world.prefills["p0"].ranks} == {"PushDrained"}


def test_an_abort_with_a_write_in_flight_drains_only_after_it(world):
    """sglang #35360: blocks were freed while a write into them was in flight."""
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 2)
    node = world.decodes["d0"]
    node.on_message(take(world, frames)[0])
    assert node.writes
    node.begin_write(node.writes[0])
    node.abort(attempt)
    incoming = next(iter(node.protocol.incoming_transfers()))
    assert incoming.state is IncomingState.QUARANTINED
    assert node.writes[0].is_discarded
    world.advance(60.0)  # no timer ends quarantine
    assert attempt in node.tables
    node.finish_all()
    assert attempt not in node.tables


def test_an_abort_with_a_write_in_flight_by_the_sender_drains_only_after_it():
    """The same where the sender writes, late, and its process is believed dead."""
    world = World(Options(prefill_tp=2, data_path="shm"))
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 5)
    slow = world.prefills["p0"].ranks[1]
    slow.begin_write(slow.writes[0])
    node = world.decodes["d0"]
    world.cut.add(frozenset(("p0", "d0")))
    world.replace_prefill("p0")
    world.advance(60.0)
    world.cut.clear()
    world.reserve("p0", "d0", "of the successor", 1)
    world.deliver_all()
    world.look_for_dead()
    assert attempt in node.tables  # neither time nor a successor is evidence
    slow.finish_write(slow.writes[0])
    world.deliver_all()
    world.end_zombies()
    world.look_for_dead()
    assert attempt not in node.tables
    world.settle()


def test_one_rank_that_still_writes_keeps_the_blocks_of_all():
    world = World(Options(prefill_tp=2, data_path="shm"))
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 5)
    fast, slow = world.prefills["p0"].ranks
    fast.finish_writes()
    slow.begin_write(slow.writes[0])
    node = world.decodes["d0"]
    node.abort(attempt)
    world.deliver_all()
    assert attempt not in fast.sources
    assert attempt in slow.sources
    assert attempt in node.tables
    while slow.writes:
        slow.finish_write(slow.writes[0])
    world.deliver_all()
    assert attempt not in slow.sources
    assert attempt not in node.tables


def test_a_receiver_process_that_restarts_asks_for_what_its_past_left_behind():
    world = World(Options(prefill_tp=2, data_path="shm"))
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 5)
    slow = world.prefills["p0"].ranks[1]
    slow.begin_write(slow.writes[0])
    node = world.decodes["d0"]
    world.crash_receiver("d0")
    for _ in range(50):
        world.advance(0.1)
        world.deliver_all()
    assert attempt in node.tables
    assert [incarnation.rank for incarnation in node.protocol.suspects()] == [1]
    slow.finish_write(slow.writes[0])
    for _ in range(10):
        world.advance(0.1)
        world.deliver_all()
    assert attempt not in node.tables


def test_success_is_said_only_after_the_data_is_in_the_pool(any_world):
    """Mooncake TCP v1 reported success for data in the sender's kernel buffer."""
    world = any_world
    attempt = granted(world, prompt_len=2)
    node = world.prefills["p0"]
    push_all(world, attempt)
    held_back = take(world, frames)
    node.commit(attempt)
    world.deliver_all()  # COMMIT overtakes all data
    assert attempt in node.sources
    assert (attempt, "complete") not in world.log
    world.in_flight += held_back
    world.deliver_all()
    assert node.ended[attempt] == "Acked"
    world.settle()


def test_a_commit_waits_for_the_writes():
    world = World(Options(data_path="shm"))
    attempt = granted(world, prompt_len=2)
    node = world.prefills["p0"]
    for layer in range(NUM_LAYERS):
        node.push(attempt, layer, 2)
    rank = node.ranks[0]
    node.commit(attempt)
    rank.finish_write(rank.writes[0])
    assert not any(control("commit")(message) for message in world.in_flight)
    rank.finish_write(rank.writes[0])
    assert any(control("commit")(message) for message in world.in_flight)
    world.settle()
    assert node.ended[attempt] == "Acked"


def test_a_stopped_sender_writes_nothing_before_it_hears_that_the_incoming_is_its_own():
    """It fences itself at three quarters of a lease; what it did not hear in its sleep is not forgiven here."""
    world = World(Options(data_path="shm"))
    attempt = granted(world, prompt_len=4)
    rank = world.prefills["p0"].ranks[0]
    rank.is_stopped = True
    world.advance(0.8 * CONFIG.lease_s)
    rank.is_stopped = False
    rank.turn_s -= 0.0
    now_s = rank.now()
    rank.protocol.forgive(0.8 * CONFIG.lease_s, now_s)
    rank.push(attempt, 0, 4)
    assert rank.writes == []
    world.deliver_all()  # the decode worker's leases
    rank.tick()
    assert rank.writes
    world.settle()
    assert rank.ended[attempt] == "Acked"


def test_content_that_is_corrupt_twice_ends_the_incoming(any_world):
    world = any_world
    attempt = granted(world, prompt_len=2)
    node = world.decodes["d0"]
    post = world.post
    world.post = lambda sender, receiver, data, payload=None, seq=None: post(
        sender, receiver, data, payload and (payload[0] ^ 1 << 60, *payload[1:]), seq
    )
    world.work()
    for _ in range(100):
        for rank in world.ranks():
            for write in tuple(rank.writes):
                rank.begin_write(write, damage=True)
                write.values = (write.values[0] ^ 1 << 60, *write.values[1:])
                rank.finish_write(write)
        world.deliver_all()
        world.advance(0.05)
        if attempt not in world.prefills["p0"].sources:
            break
    assert node.protocol.counts.frames_corrupt >= 2
    assert (attempt, "complete") not in world.log
    tombstone = node.protocol._rules.table.tombstone(attempt)
    assert "corrupt twice" in tombstone.reason
    world.settle()


def test_a_group_is_visible_when_its_last_rank_has_committed():
    world = World(Options(prefill_tp=2, decode_tp=2))
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    first, second = world.prefills["p0"].ranks
    first.commit(attempt)
    world.deliver_all()
    assert (attempt, "complete") not in world.log
    second.commit(attempt)
    world.deliver_all()
    assert (attempt, "complete") in world.log
    assert {rank.ended[attempt] for rank in (first, second)} == {"Acked"}


def test_a_rank_that_dies_ends_the_incoming_for_all():
    world = World(Options(prefill_tp=2, data_path="shm"))
    attempt = granted(world, prompt_len=2)
    push_all(world, attempt)
    first, second = world.prefills["p0"].ranks
    second.is_dead = True
    world.dead.add((second.epoch, 1))
    for _ in range(40):
        world.advance(0.1)
        world.deliver_all()
        world.prefills["p0"].share()
        world.look_for_dead()
    assert attempt not in world.decodes["d0"].tables
    assert first.ended[attempt] == "PushDrained"


def test_a_lost_ack_is_said_again_from_the_tombstone(world):
    attempt = granted(world, prompt_len=2)
    world.work()
    while attempt not in world.decodes["d0"].complete:
        world.deliver()
        world.decodes["d0"].finish_all()
    take(world, control("commit_ack"))
    world.decodes["d0"].release(attempt)
    for _ in range(10):
        world.advance(0.1)
        world.deliver_all()
    assert world.prefills["p0"].ended[attempt] == "Acked"


def test_an_abort_that_overtakes_its_reserve_leaves_nothing(any_world):
    world = any_world
    first = granted(world, prompt_len=1, request_id="to connect")
    attempt = world.reserve("p0", "d0", "r", 5)
    reserve = take(world, control("reserve"))
    world.prefills["p0"].abort(attempt)
    world.deliver_all()
    world.in_flight += reserve
    world.deliver_all()
    assert world.decodes["d0"].wanted == []
    assert first in world.decodes["d0"].tables


def test_an_abort_that_overtakes_its_grant_leaves_nothing(any_world):
    world = any_world
    granted(world, prompt_len=1, request_id="to connect")
    attempt = world.reserve("p0", "d0", "r", 5)
    world.deliver_all()
    node = world.decodes["d0"]
    node.grant(node.wanted[0])
    grant = take(world, control("grant"))
    node.abort(attempt)
    world.deliver_all()
    assert attempt not in node.tables
    world.in_flight += grant
    world.deliver_all()
    assert world.prefills["p0"].ended[attempt] == "PushDrained"
    assert take(world, frames) == []


def test_a_lost_grant_leaves_no_blocks_behind_with_ranks_that_were_never_told(any_world):
    """Ranks that never met the decode worker cannot be asked: rank 0 must say that they know nothing of it."""
    world = any_world
    granted(world, prompt_len=1, request_id="to connect", prefill="p1")
    attempt = world.reserve("p0", "d0", "r", 5)
    world.deliver_all()
    node = world.decodes["d0"]
    node.grant(node.wanted[0])
    take(world, control("grant"))
    node.abort(attempt)
    for _ in range(20):  # the RESERVE is repeated before the question arrives
        take(world, control("abort"))
        world.advance(0.1)
        reserves = take(world, control("reserve"))
        world.in_flight[:] = reserves or world.in_flight
        world.deliver_all()
        if reserves:
            break
    assert reserves
    world.settle()
    assert attempt not in node.tables


def test_a_rank_that_was_told_of_a_grant_stays_until_it_was_asked():
    """It adopted while the decode worker could not be reached, gave up, and has nothing more to do there."""
    world = World(Options(prefill_tp=2, data_path="shm"))
    attempt = world.reserve("p0", "d0", "r", 5)
    world.deliver_all()
    node = world.decodes["d0"]
    node.grant(node.wanted[0])
    world.deliver_all()
    world.prefills["p0"].share()
    world.crash_receiver("d0")
    for _ in range(int(CONFIG.lease_s * 8 / 0.1)):
        world.advance(0.1)
        take(world, lambda message: True)  # nobody hears anybody
    world.settle()
    assert attempt not in node.tables


def test_a_grant_that_is_passed_on_too_late_is_not_used():
    """Rank 1 said that it writes nothing before it knew of the incoming transfer."""
    world = World(Options(prefill_tp=2, data_path="shm"))
    granted(world, prompt_len=1, request_id="to connect")
    attempt = world.reserve("p0", "d0", "r", 3)
    world.deliver_all()
    node, second = world.decodes["d0"], world.prefills["p0"].ranks[1]
    node.grant(node.wanted[0])
    world.deliver_all()
    node.abort(attempt)
    world.deliver_all()
    assert attempt not in node.tables
    world.prefills["p0"].share()  # only now
    world.work()
    assert not any(write.attempt == attempt for write in second.writes)
    world.settle()
    assert second.ended[attempt] == "PushDrained"


def test_a_higher_attempt_fences_the_lower_and_a_lower_is_stale(any_world):
    world = any_world
    first = granted(world)
    push_all(world, first, layers=[0])
    late = take(world, frames)
    second = world.reserve("p1", "d0", "r", 5)
    world.deliver_all()
    assert first not in world.decodes["d0"].tables
    world.in_flight += late
    world.settle()
    assert {(second, "complete")} == world.log
    assert world.prefills["p0"].ended[first] == "PushDrained"


def test_replaying_all_of_history_changes_nothing(any_world):
    world = any_world
    keys = [granted(world, request_id=f"r{index}", prompt_len=3) for index in range(2)]
    for _ in range(10):
        world.work()
        world.deliver_all()
    node = world.decodes["d0"]
    assert set(node.complete) == set(keys)
    assert len(world.history) < 128, "all of it is there"

    def state():
        counts = node.protocol.counts
        sources = {name: set(rank.sources) for name, prefill in world.prefills.items() for rank in prefill.ranks}
        return contents(node), dict(node.tables), counts.frames_landed, counts.bytes_landed, sources, set(world.log)

    before = state()
    for order in (1, -1):
        world.in_flight += world.history[::order]
        world.deliver_all()
        world.check()
        assert state() == before
    world.settle()
    for order in (1, -1):
        world.in_flight += world.history[::order]
        world.deliver_all()
        world.settle()
    assert world.log == before[-1]


def test_source_blocks_wait_for_the_writer(any_world):
    world = any_world
    attempt = granted(world)
    rank = world.prefills["p0"].ranks[0]
    rank.hold(attempt)
    rank.abort(attempt)
    world.deliver_all()
    world.advance(10.0)
    assert attempt in rank.sources
    rank.unhold()
    assert rank.ended[attempt] == "PushDrained"


def test_prefill_end_is_told_in_the_other_sides_clock(world):
    """Clocks of two hosts have nothing in common but their pace."""
    rank = world.prefills["p0"].ranks[0]
    attempt = world.reserve("p0", "d0", "r", 1)
    hello = parse_control(world.in_flight.pop().data)
    now_s = rank.now()
    assert hello.hello.sent_ns == int(now_s * 1e9)
    asked = world.decodes["d0"].protocol.on_control("p0/0", hello, now_s + 5000.0)[0]
    hello = rank.protocol.on_control("d0", asked.control, now_s)[0].control
    reply = world.decodes["d0"].protocol.on_control("p0/0", hello, now_s + 5000.01)[0]
    rank.protocol.on_control("d0", reply.control, now_s + 0.02)
    assert rank.protocol.clock_offset_s("d0") == pytest.approx(5000.0, abs=1e-5)
    assert attempt in rank.sources


def test_a_window_smaller_than_the_prompt_is_never_exceeded_and_refills(any_world):
    world = any_world
    attempt = granted(world, prompt_len=15)
    node = world.prefills["p0"]
    push_all(world, attempt)
    posted = len(take(world, frames))
    assert posted == 3 * len(node.ranks)  # the rest waits for credit
    for rank in node.ranks:
        transfer = next(iter(rank.protocol.transfers()))
        assert 0 < transfer.in_flight_bytes <= CONFIG.window_bytes
    world.settle()  # those were lost: RESUME and HAVE find out
    assert node.ended[attempt] == "Acked"
