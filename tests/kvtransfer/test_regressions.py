"""What went wrong in the field, in other engines, as fixed examples (research/kv-transfer.md, section 3)."""

import pytest

from baton.kvtransfer.frame import is_frame
from baton.kvtransfer.landing_table import LandingState
from baton.kvtransfer.messages import parse_control
from baton.tests.kvtransfer.simulation import CONFIG, NUM_BLOCKS, NUM_LAYERS, World

pytestmark = pytest.mark.fast


@pytest.fixture
def world():
    return World()


def granted(world, prompt_len=5, request_id="r", prefill="p0", decode="d0"):
    attempt = world.reserve(prefill, decode, request_id, prompt_len)
    world.deliver_all()
    world.decodes[decode].grant(world.decodes[decode].wanted[0])
    world.deliver_all()
    return attempt


def take(world, wanted):
    """Take messages out of the network."""
    taken = [message for message in world.in_flight if wanted(message)]
    world.in_flight = [message for message in world.in_flight if not wanted(message)]
    return taken


def frames(message):
    return is_frame(message[2][0])


def control(name):
    return lambda message: not frames(message) and parse_control(message[2][0]).WhichOneof("message") == name


def test_a_stale_frame_after_its_blocks_were_reused(world):
    """vllm #52234: a late write reached blocks that were another request's by then."""
    first = granted(world, prompt_len=7)
    world.prefills["p0"].push(first, 0, 7)
    stale = take(world, frames)
    assert stale
    world.decodes["d0"].abort(first)
    second = granted(world, prompt_len=7, request_id="other", prefill="p1")
    held = dict(world.decodes["d0"].pool)
    world.in_flight += stale
    world.deliver_all()
    assert world.decodes["d0"].pool == held
    assert world.decodes["d0"].protocol.counts.frames_late_dropped == len(stale)
    world.settle()
    assert (second, "sealed") in world.log
    assert (first, "sealed") not in world.log


def test_both_sides_abort_at_once(world):
    """vllm #46283: a decode abort that met a prefill abort leaked blocks."""
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 3)
    world.prefills["p0"].abort(attempt)
    world.decodes["d0"].abort(attempt)
    world.settle(limit_s=1.0)


def test_the_prefill_worker_dies_while_its_request_waits_for_blocks(world):
    """vllm #21570: one side freed by timeout while the other queued."""
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
    assert hog in node.tables or (hog, "sealed") in world.log


def test_a_failed_post_is_reported_and_nobody_counts_to_a_number_that_will_not_come(world):
    """vllm #50754: a write that was never posted left the decode side waiting for ever."""
    attempt = granted(world)
    node = world.prefills["p0"]
    post = world.post
    world.post = lambda *message: None if frames(message) else post(*message)  # everything else arrives
    for _ in range(60):
        world.work()
        world.deliver_all()
        world.advance(0.1)
    assert node.ended[attempt] == "PushDrained"
    assert world.decodes["d0"].tables == {}
    assert (attempt, "sealed") not in world.log


def test_an_abort_with_a_write_in_flight_drains_only_after_it(world):
    """sglang #35360: blocks were freed while a write into them was in flight."""
    attempt = granted(world)
    world.prefills["p0"].push(attempt, 0, 2)
    node = world.decodes["d0"]
    message = take(world, frames)[0]
    node.on_message("p0", message[2])
    assert node.write is not None
    node.abort(attempt)
    landing = next(iter(node.protocol.landings()))
    assert landing.state is LandingState.QUARANTINED
    world.advance(60.0)  # no timer ends quarantine
    assert attempt in node.tables
    node.finish_write()
    assert attempt not in node.tables


def test_success_is_said_only_after_the_data_is_in_the_pool(world):
    """Mooncake TCP v1 reported success for data in the sender's kernel buffer."""
    attempt = granted(world, prompt_len=2)
    node = world.prefills["p0"]
    for layer in range(NUM_LAYERS):
        node.push(attempt, layer, 2)
    held_back = take(world, frames)
    node.commit(attempt)
    world.deliver_all()  # COMMIT overtakes all data
    assert attempt in node.sources
    assert (attempt, "sealed") not in world.log
    world.in_flight += held_back
    world.deliver_all()
    assert node.ended[attempt] == "Acked"
    world.settle()


def test_a_lost_ack_is_said_again_from_the_tombstone(world):
    attempt = granted(world, prompt_len=2)
    world.work()
    while attempt not in world.decodes["d0"].sealed:
        world.deliver()
        world.decodes["d0"].finish_write()
    take(world, control("commit_ack"))
    world.decodes["d0"].release(attempt)
    for _ in range(10):
        world.advance(0.1)
        world.deliver_all()
    assert world.prefills["p0"].ended[attempt] == "Acked"


def test_an_abort_that_overtakes_its_reserve_leaves_nothing(world):
    first = granted(world, prompt_len=1, request_id="to connect")
    attempt = world.reserve("p0", "d0", "r", 5)
    reserve = take(world, control("reserve"))
    world.prefills["p0"].abort(attempt)
    world.deliver_all()
    world.in_flight += reserve
    world.deliver_all()
    assert world.decodes["d0"].wanted == []
    assert first in world.decodes["d0"].tables


def test_a_higher_attempt_fences_the_lower_and_a_lower_is_stale(world):
    first = granted(world)
    world.prefills["p0"].push(first, 0, 5)
    late = take(world, frames)
    second = world.reserve("p1", "d0", "r", 5)
    world.deliver_all()
    assert first not in world.decodes["d0"].tables
    world.in_flight += late
    world.settle()
    assert {(second, "sealed")} == world.log
    assert world.prefills["p0"].ended[first] == "PushDrained"


def test_replaying_all_of_history_changes_nothing(world):
    for index in range(2):
        granted(world, request_id=f"r{index}")
    world.work()
    world.deliver_all()
    node = world.decodes["d0"]
    assert len(node.sealed) == 2
    before = (dict(node.pool), dict(node.tables), node.protocol.counts.frames_landed, set(world.prefills["p0"].sources))
    world.in_flight += world.history
    world.deliver_all()
    world.check()
    after = (dict(node.pool), dict(node.tables), node.protocol.counts.frames_landed, set(world.prefills["p0"].sources))
    assert after == before
    world.settle()
    world.in_flight += world.history
    world.deliver_all()
    assert world.decodes["d0"].tables == {}


def test_source_blocks_wait_for_the_writer(world):
    attempt = granted(world)
    node = world.prefills["p0"]
    node.protocol.hold(attempt)
    node.abort(attempt)
    world.deliver_all()
    world.advance(10.0)
    assert attempt in node.sources
    node.do(node.protocol.unhold(attempt))
    assert node.ended[attempt] == "PushDrained"


def test_prefill_end_is_told_in_the_other_sides_clock(world):
    """Clocks of two hosts have nothing in common but their pace."""
    node = world.prefills["p0"]
    attempt = world.reserve("p0", "d0", "r", 1)
    hello = world.in_flight.pop()
    control_message = parse_control(hello[2][0])
    assert control_message.hello.sent_ns == int(world.now_s * 1e9)
    node.do([])
    world.now_s += 0.010
    reply = world.decodes["d0"].protocol.on_control("p0", control_message, world.now_s + 5000.0)[0]
    world.now_s += 0.010
    node.do(node.protocol.on_control("d0", reply.control, world.now_s))
    assert node.protocol.clock_offset_s("d0") == pytest.approx(5000.0, abs=1e-6)
    assert attempt in node.sources


def test_a_window_smaller_than_the_prompt_is_never_exceeded_and_refills(world):
    attempt = granted(world, prompt_len=15)
    node = world.prefills["p0"]
    for layer in range(NUM_LAYERS):
        node.push(attempt, layer, 15)
    posted = len(take(world, frames))
    assert posted == 2  # of sixteen; the rest waits for credit
    transfer = next(iter(node.protocol.transfers()))
    assert transfer.in_flight_bytes <= CONFIG.window_bytes
    world.settle()  # the two were lost: RESUME and HAVE find out
    assert node.ended[attempt] == "Acked"
