"""Workers that start, as the router keeps them: for how long, and how much a hostile caller can store."""

import grpc
import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import InvalidRequest, Overloaded, PermissionDenied
from baton.proto import admin_pb2, admin_pb2_grpc, wire, worker_pb2, worker_pb2_grpc
from baton.router.placement import starting as module
from baton.router.placement.members import Members
from baton.router.placement.starting import MAX_TEXT_LEN, SILENT_S, StartingWorkers
from baton.tests.inside import router_channel
from baton.tests.router.fakes import cluster

pytestmark = pytest.mark.fast


def report(worker_id="decode-0", epoch=7, **changes):
    values = {"role": "decode", "phase": "weights", "num_done": 45, "num_total": 100} | changes
    return worker_pb2.StartingWorker(worker_id=worker_id, epoch=epoch, **values)


def heartbeat(worker_id="decode-0", epoch=7):
    return worker_pb2.WorkerState(
        worker_id=worker_id,
        role="decode",
        epoch=epoch,
        address="127.0.0.1:1",
        kv_address="tcp://127.0.0.1:2",
        max_model_len=200,
        block_size=16,
        inventory=worker_pb2.Inventory(num_blocks=10),
    )


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def members(clock):
    return Members(clock)


@pytest.fixture
def starting(members, clock):
    return StartingWorkers(members, clock)


def test_the_latest_report_of_each_worker_is_kept_until_it_is_silent(starting, clock):
    starting.report(report())
    clock.advance(SILENT_S / 2)
    starting.report(report("prefill-0", role="prefill"))
    starting.report(report(num_done=46))
    assert starting.all() == [report(num_done=46), report("prefill-0", role="prefill")]
    clock.advance(SILENT_S / 2)
    starting.report(report(num_done=47))
    clock.advance(SILENT_S / 2)
    assert starting.all() == [report(num_done=47)]
    clock.advance(SILENT_S / 2)
    assert starting.all() == []
    assert not starting._heard


def test_a_worker_that_has_joined_starts_no_more_until_its_next_incarnation(starting, members):
    starting.report(report())
    members.heartbeat(heartbeat())
    assert starting.all() == []
    starting.report(report())  # was under way
    assert starting.all() == []
    starting.report(report(epoch=8))
    assert starting.all() == [report(epoch=8)]
    members.heartbeat(heartbeat(epoch=8))
    starting.report(report(epoch=7))  # of an incarnation that was replaced
    assert starting.all() == []
    assert not starting._heard


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "w" * (MAX_TEXT_LEN + 1)}, "worker_id"),
        ({"worker_id": "decode-\x1b[2J"}, "worker_id"),
        ({"role": "router"}, "role"),
        ({"epoch": 0}, "epoch"),
        ({"phase": ""}, "phase"),
        ({"phase": "p" * (MAX_TEXT_LEN + 1)}, "phase"),
        ({"phase": "weights\n"}, "phase"),
        ({"num_done": 101}, "num_done"),
    ],
)
def test_a_report_that_nobody_should_read_is_refused(starting, changes, field):
    with pytest.raises(InvalidRequest) as refused:
        starting.report(report(**changes))
    assert refused.value.fields["field"] == field
    assert len(refused.value.fields["worker_id"]) <= MAX_TEXT_LEN
    assert not starting._heard


def test_what_can_be_stored_is_bounded(starting, clock, monkeypatch):
    monkeypatch.setattr(module, "MAX_WORKERS", 2)
    unknown = worker_pb2.WorkerState(kv_dtype="x" * 4096).SerializeToString()  # a field that a report does not have
    starting.report(worker_pb2.StartingWorker.FromString(report().SerializeToString() + unknown))
    assert starting.all()[0].ByteSize() == report().ByteSize()
    starting.report(report("decode-1"))
    with pytest.raises(Overloaded):
        starting.report(report("decode-2"))
    starting.report(report("decode-1", num_done=46))
    clock.advance(SILENT_S)
    starting.report(report("decode-2"))
    assert starting.all() == [report("decode-2")]


@pytest.mark.asyncio
async def test_only_a_worker_itself_reports_its_start():
    async with cluster() as running:
        callee, status = running.router.callee, admin_pb2_grpc.AdminStub(running.channel).Status

        def tell(worker, *, by):
            channel = router_channel(running.channel, "decode", by, callee)
            return worker_pb2_grpc.MembershipStub(channel).Starting(worker, timeout=10.0)

        await tell(report("decode-7"), by="decode-7")
        assert list((await status(admin_pb2.StatusRequest())).starting) == [report("decode-7")]
        for worker in (report("decode-8"), report("decode-7", role="prefill", num_done=46)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await tell(worker, by="decode-7")
            assert type(wire.error_from_rpc(refused.value)) is PermissionDenied
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tell(report("decode-7", num_done=101), by="decode-7")
        assert type(wire.error_from_rpc(refused.value)) is InvalidRequest
        assert list((await status(admin_pb2.StatusRequest())).starting) == [report("decode-7")]
