"""What operators asked outlives the router: workers keep it, the next router goes on with it."""

import asyncio
import hmac
import itertools

import pytest

from baton.core.clock import VirtualClock
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.router.admission.admission import Admission
from baton.router.attempt.migration import Migration, MigrationConfig
from baton.router.desired_state import WAIT_S, DesiredScale, DesiredSpeculation, DesiredState
from baton.router.metrics import RouterMetrics
from baton.router.placement.members import Incarnation, Members
from baton.tests.router.fakes import cluster
from baton.worker.host import WorkerHost

pytestmark = pytest.mark.fast
INCARNATIONS = itertools.count(100)
KEY = b"of routers" * 3


class Worker:
    """Keeps wishes as `WorkerHost` does."""

    def __init__(self, worker_id="decode-0", role="decode", epoch=1):
        self.state = worker_pb2.WorkerState(worker_id=worker_id, role=role, epoch=epoch, address="a:1", model="m")
        self.state.inventory.num_blocks = 10
        self.state.block_size = 16
        self.state.max_model_len = 64
        self.state.kv_address = "b:1" if role == "decode" else ""
        self.kept = worker_pb2.DesiredState()
        self.is_asked = False

    def report(self, router):
        state = worker_pb2.WorkerState()
        state.CopyFrom(self.state)
        state.desired_state_version, state.desired_state_incarnation = self.kept.version, self.kept.incarnation
        router.members.heartbeat(self.state)
        if self.is_asked:
            router.desired_state.adopt(self.kept, self.state.worker_id)
        reply = worker_pb2.HeartbeatReply()
        router.desired_state.answer(state, reply)
        self.is_asked = reply.wants_desired_state
        if reply.HasField("desired_state"):
            self.kept = reply.desired_state


class Router:
    """Everything that wishes are about, without a port."""

    def __init__(self, clock, alive_s=1e9):
        self.members = Members(clock, alive_s=alive_s)
        self.migration = Migration(MigrationConfig(), self.members, clock, RouterMetrics())
        self.speculation, self.admission, self.scale = DesiredSpeculation(), Admission(64), DesiredScale()
        self.desired_state = DesiredState(
            self.migration, self.speculation, self.admission, self.scale, clock, next(INCARNATIONS), KEY
        )

    def blamed(self):
        return [(one.fingerprint, one.workers) for one in self.migration.poison_detector.blamed(0.0)]


def set_k(router, num):
    router.speculation.mode = worker_pb2.SpeculationMode(num_draft_tokens=num)


def exchange(router, *workers, times=3):
    for _ in range(times):
        for worker in workers:
            worker.report(router)
        router.desired_state.tick()


def live_for(router, clock, workers, seconds):
    for _ in range(round(seconds / 0.2)):
        clock.advance(0.2)
        for worker in workers:
            router.members.heartbeat(worker.state)
        router.members.expire(router.desired_state.ended())
        router.migration.drains.tick()


def known(router):
    return [member.state.worker_id for member in router.members.all()]


def test_who_left_a_smaller_deployment_is_not_shown_as_dead(clock):
    """A worker that was drained and ended by `scale`; but one that is to come back is missed, drained or not."""
    router = Router(clock, alive_s=1.5)
    zero, one, two = [Worker(f"decode-{at}", epoch=9 + at) for at in range(3)]
    live_for(router, clock, [zero, one, two], 1.0)
    router.migration.drains.begin("decode-2", 0.0)
    live_for(router, clock, [zero, one], 30.0)
    assert known(router) == ["decode-0", "decode-1", "decode-2"], "replaced, perhaps: fewer were not asked for"
    router.scale.request = admin_pb2.ScaleRequest(num_prefill=0, num_decode=3)
    live_for(router, clock, [zero, one], 30.0)
    assert len(known(router)) == 3, "three were asked for"
    router.scale.request = admin_pb2.ScaleRequest(num_prefill=0, num_decode=2)
    live_for(router, clock, [zero, one], 1.0)
    assert known(router) == ["decode-0", "decode-1"]
    live_for(router, clock, [zero], 30.0)
    assert known(router) == ["decode-0", "decode-1"], "lost, not drained"
    assert not router.migration.drains.incarnations()


def test_who_ends_while_a_deployment_gets_smaller_is_shown_for_a_while(clock):
    """A report of its that comes late must find it dead, not make it a new worker."""
    router, zero, one = Router(clock, alive_s=1.5), Worker(), Worker("decode-1", epoch=2)
    router.scale.request = admin_pb2.ScaleRequest(num_prefill=0, num_decode=1)
    live_for(router, clock, [zero, one], 1.0)
    router.migration.drains.begin("decode-1", 0.0)
    live_for(router, clock, [zero], 9.0)
    assert len(known(router)) == 2
    live_for(router, clock, [zero], 2.0)
    assert len(known(router)) == 1


@pytest.fixture
def clock():
    return VirtualClock()


def test_a_router_that_was_asked_nothing_leaves_nothing(clock):
    router, worker = Router(clock), Worker()
    exchange(router, worker)
    assert (router.desired_state.version, worker.kept.version) == (0, 0)


def test_the_next_router_goes_on_with_everything(clock):
    old, workers = Router(clock), [Worker(), Worker("decode-1", epoch=2)]
    exchange(old, *workers)
    set_k(old, 1)
    old.admission.limit = 7
    old.scale.request = admin_pb2.ScaleRequest(num_prefill=2, num_decode=3)
    old.migration.drains.begin("decode-1", 5.0)
    old.migration.poison_detector.resume("f" * 64, ("d0", "d1"), clock.now_s())
    exchange(old, *workers)

    new = Router(clock)
    exchange(new, *workers)
    assert new.speculation.mode.num_draft_tokens == 1
    assert new.admission.limit == 7
    assert (new.scale.request.num_prefill, new.scale.request.num_decode) == (2, 3)
    assert new.migration.drains.incarnations() == {Incarnation("decode-1", 2)}
    assert new.blamed() == [("f" * 64, ("d0", "d1"))]
    assert {worker.kept.version for worker in workers} == {new.desired_state.version}
    assert {worker.kept.incarnation for worker in workers} == {workers[0].kept.incarnation} != {0}


def test_a_size_without_prefill_workers_is_a_desired_too(clock):
    old, worker = Router(clock), Worker()
    old.scale.request = admin_pb2.ScaleRequest(num_prefill=0, num_decode=3)
    exchange(old, worker)
    new = Router(clock)
    exchange(new, worker)
    assert (new.scale.request.num_prefill, new.scale.request.num_decode) == (0, 3)


def test_what_this_router_was_asked_wins_whatever_the_versions(clock):
    """Operators may be faster than the first worker."""
    for num_changes in (1, 2, 9):
        old, worker = Router(clock), Worker()
        old.admission.limit = 5
        exchange(old, worker)
        set_k(old, 3)
        exchange(old, worker)
        new = Router(clock)
        for k in range(num_changes):
            set_k(new, k % 3)
            new.desired_state.tick()
        exchange(new, worker)
        assert new.speculation.mode.num_draft_tokens == (num_changes - 1) % 3
        assert new.admission.limit == 5
        third = Router(clock)
        exchange(third, worker)
        assert (third.speculation.mode.num_draft_tokens, third.admission.limit) == ((num_changes - 1) % 3, 5)


def test_an_undone_desired_stays_undone(clock):
    old, worker = Router(clock), Worker()
    exchange(old, worker)
    old.migration.drains.begin("decode-0", 5.0)
    exchange(old, worker)
    old.migration.drains.end("decode-0")
    exchange(old, worker)
    new = Router(clock)
    exchange(new, worker)
    assert not new.migration.drains.incarnations()


def test_a_worker_that_was_away_does_not_bring_the_past_back(clock):
    first, away, near = Router(clock), Worker("decode-0"), Worker("decode-1", epoch=2)
    set_k(first, 4)
    exchange(first, away, near)
    set_k(first, 2)
    exchange(first, near)
    second = Router(clock)
    exchange(second, near)
    exchange(second, near, away)
    assert second.speculation.mode.num_draft_tokens == 2
    assert away.kept == near.kept
    third = Router(clock)
    exchange(third, away, near)
    assert third.speculation.mode.num_draft_tokens == 2


def test_the_newer_of_two_memories_counts_in_either_order(clock):
    for order in ((0, 1), (1, 0)):
        old, workers = Router(clock), [Worker("decode-0"), Worker("decode-1", epoch=2)]
        set_k(old, 4)
        exchange(old, *workers)
        set_k(old, 1)
        exchange(old, workers[1])
        new = Router(clock)
        for at in order:
            exchange(new, workers[at])
        assert new.speculation.mode.num_draft_tokens == 1, order


def test_a_drain_waits_for_its_life_and_for_no_other(clock):
    old, worker, other = Router(clock), Worker(), Worker("decode-1", epoch=2)
    exchange(old, worker, other)
    old.migration.drains.begin("decode-0", 5.0)
    exchange(old, worker, other)
    new = Router(clock)
    exchange(new, other)
    assert not new.migration.drains.incarnations()
    assert [drain.worker_id for drain in other.kept.drains] == ["decode-0"], "it is not forgotten meanwhile"
    exchange(new, worker)
    assert new.migration.drains.incarnations() == {Incarnation("decode-0", 1)}
    again = Router(clock)
    exchange(again, other, Worker("decode-0", epoch=9))
    assert not again.migration.drains.incarnations(), "the life that was emptied is over"
    clock.advance(WAIT_S + 1.0)
    again.desired_state.tick()
    exchange(again, other)
    assert not other.kept.drains


def commands(**more):
    """What a worker that was broken into would have the router do."""
    drains = [worker_pb2.DrainedIncarnation(worker_id="decode-0", epoch=1)]
    blamed = [worker_pb2.BlamedRequest(fingerprint="ab" * 12, workers=["x"])]
    orders = {"version": 1 << 40, "incarnation": 99, "max_queue_len": 1, "scale_num_decode": 1}
    return worker_pb2.DesiredState(**{**orders, "drains": drains, "blamed": blamed, **more})


def tampered(clock):
    """A router's, of which a worker has changed one thing."""
    router, worker = Router(clock), Worker()
    router.admission.limit = 7
    exchange(router, worker)
    worker.kept.max_queue_len = 1
    return worker.kept


@pytest.mark.parametrize("version", [1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1])
def test_a_worker_gives_no_orders_to_the_router(clock, version, caplog):
    router, honest, evil = Router(clock), Worker(), Worker("decode-1", epoch=2)
    exchange(router, honest, evil)
    evil.kept = commands(version=version)
    router.desired_state.adopt(evil.kept, "decode-1")  # the router has not asked for it
    exchange(router, honest, evil)
    assert (router.admission.limit, router.scale.request, router.blamed()) == (64, None, [])
    assert not router.migration.drains.incarnations()
    assert router.desired_state.version == 0
    assert caplog.text.count("decode-1 keeps one that no router of this deployment wrote") == (version < 1 << 63)
    set_k(router, 1)
    exchange(router, honest, evil)
    assert (router.desired_state.version, honest.kept.speculation.num_draft_tokens) == (1, 1)
    assert (evil.kept.speculation.num_draft_tokens == 1) == (version < 1 << 63), "it is given the router's instead"


def test_what_a_worker_has_changed_or_another_deployment_wrote_is_nothing(clock):
    kept = tampered(clock)
    elsewhere = worker_pb2.DesiredState()
    elsewhere.CopyFrom(kept)
    elsewhere.mac = hmac.digest(b"elsewhere", b"", "sha256")
    for forged in (kept, elsewhere):
        router, worker = Router(clock), Worker()
        worker.kept = forged
        exchange(router, worker)
        assert router.admission.limit == 64
        assert worker.kept.incarnation == router.desired_state._incarnation


def test_one_that_lies_does_not_hide_what_the_others_keep(clock):
    old, honest, evil = Router(clock), Worker(), Worker("decode-1", epoch=2)
    old.admission.limit = 7
    exchange(old, honest, evil)
    evil.kept.max_queue_len = 1
    new = Router(clock)
    exchange(new, evil)
    exchange(new, honest, evil)
    assert new.admission.limit == 7
    assert evil.kept.max_queue_len == 7


@pytest.mark.long
@pytest.mark.asyncio
async def test_over_the_wire_a_host_keeps_it_for_the_next_router():
    async def until(condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.02)

    async with cluster() as first:
        port, state = first.router.port, first.of("decode")[0].state()
        state.worker_id, state.epoch = "decode-7", 77

        def report():
            copy = worker_pb2.WorkerState()
            copy.CopyFrom(state)
            return copy

        host = WorkerHost("127.0.0.1", lambda server: None, report, first.address, pytest.fail)
        host.start()
        admin = admin_pb2_grpc.AdminStub(first.channel)
        await admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=9))
        await until(lambda: host._desired_state.max_queue_len == 9)
    try:
        async with cluster(port=port) as second:
            await until(lambda: second.router.desired_state.version > 1)
            status = await admin_pb2_grpc.AdminStub(second.channel).Status(admin_pb2.StatusRequest())
            assert status.max_queue_len == 9
            assert not any(worker.state.HasField("desired_state") for worker in status.workers)
    finally:
        host.close()
