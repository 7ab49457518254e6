"""What operators change at the router: which life of a worker ends, how many requests are held."""

import asyncio

import grpc
import pytest

from baton.core.errors import InternalError, InvalidRequest, Overloaded, WorkerLost
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from baton.proto.wire import error_from_rpc
from baton.router import admin as router_admin
from baton.tests.inside import worker_channel
from baton.tests.router import fakes
from baton.tests.router.fakes import cluster
from baton.worker.host import WorkerHost

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_nobody_of_the_name_is_an_error():
    async with cluster() as running:
        admin = admin_pb2_grpc.AdminStub(running.channel)
        for call in (admin.Restart(admin_pb2.RestartRequest(worker_id="nobody", epoch=1)),):
            assert type(await error_of(call)) is InvalidRequest


async def test_only_the_life_that_is_meant_is_told_to_end():
    async with cluster() as running:
        admin, worker = admin_pb2_grpc.AdminStub(running.channel), running.of("decode")[0]
        request = admin_pb2.RestartRequest(worker_id="decode-0", epoch=worker.epoch)
        assert (await admin.Restart(request)).ending
        assert worker.restarts == [worker.epoch]
        request.epoch += 1
        assert not (await admin.Restart(request)).ending
        assert worker.restarts == [worker.epoch]


CALLS = {
    "Inventory": admin_pb2.InventoryRequest(),
    "SetSpeculation": admin_pb2.SetSpeculationRequest(mode=worker_pb2.SpeculationMode(auto=True)),
    "Restart": None,
}


@pytest.mark.parametrize("method", CALLS)
async def test_a_worker_that_begins_anew_while_it_is_asked_leaves_no_caller_waiting(method, monkeypatch):
    """Its channel is closed, by which gRPC cancels the call: once the router's own caller got no status at all."""
    asked = asyncio.Event()

    answer = getattr(fakes.Admin, method)

    async def hang(self, request, context):
        if self.worker.role == "prefill":
            return await answer(self, request, context)
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fakes.Admin, method, hang)
    monkeypatch.setattr(router_admin, "INVENTORY_TIMEOUT_S", None)  # else that ends it as well
    async with cluster() as running:
        worker = running.of("decode")[0]
        request = CALLS[method]
        if method == "Restart":
            request = admin_pb2.RestartRequest(worker_id="decode-0", epoch=worker.epoch)
        call = getattr(admin_pb2_grpc.AdminStub(running.channel), method)(request, timeout=60.0)
        await asked.wait()
        worker.epoch += 1
        running.router.members.heartbeat(worker.state())
        if method == "Restart":
            assert type(await error_of(call)) is WorkerLost
        elif method == "Inventory":
            alive = {one.state.worker_id: one.alive for one in (await call).workers}
            assert alive == {"prefill-0": True, "decode-0": False}
        else:
            assert [one.error for one in (await call).workers] == ["the connection was closed"]


async def test_whatever_a_method_raises_is_a_typed_error(monkeypatch):
    for raised in (ZeroDivisionError("odd"), asyncio.CancelledError()):

        def broken(self, raised=raised):
            raise raised

        async with cluster() as running:
            with monkeypatch.context() as patch:
                patch.setattr(router_admin.AdminService, "quarantined", broken)
                error = await error_of(
                    admin_pb2_grpc.AdminStub(running.channel).Status(admin_pb2.StatusRequest(), timeout=60.0)
                )
            assert type(error) is InternalError
            assert error.fields["cause_type"] == type(raised).__name__


@pytest.mark.long
async def test_a_silent_worker_cannot_be_told():
    async with cluster(alive_s=0.3) as running:
        running.silent.add("decode-0")
        worker = running.of("decode")[0]
        while running.router.members.live("decode"):
            await asyncio.sleep(0.05)
        admin = admin_pb2_grpc.AdminStub(running.channel)
        error = await error_of(admin.Restart(admin_pb2.RestartRequest(worker_id="decode-0", epoch=worker.epoch)))
        assert isinstance(error, WorkerLost)


@pytest.mark.long
async def test_a_worker_ends_the_life_that_is_meant_and_says_so_before():
    ended = []
    state = worker_pb2.WorkerState(epoch=7)
    host = WorkerHost("127.0.0.1", lambda server: None, lambda: state, "", ended.append)
    host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            admin = admin_pb2_grpc.AdminStub(worker_channel(channel, "", "", 7))
            assert not (await admin.Restart(admin_pb2.RestartRequest(epoch=8))).ending
            await asyncio.sleep(0.3)
            assert not ended
            assert (await admin.Restart(admin_pb2.RestartRequest(epoch=7))).ending
            async with asyncio.timeout(5):
                while not ended:
                    await asyncio.sleep(0.01)
            assert isinstance(ended[0], WorkerLost)
    finally:
        host.close()


async def test_the_router_holds_as_many_requests_as_it_is_told():
    async with cluster() as running:
        running.script.decode_hangs_after = 3
        stub, admin = inference_pb2_grpc.InferenceStub(running.channel), admin_pb2_grpc.AdminStub(running.channel)
        calls = [stub.Generate(inference_pb2.GenerateRequest(text="hi")) for _ in range(2)]
        for call in calls:
            await call.read()
        reply = await admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=1))
        assert (reply.max_queue_len, reply.previous, reply.num_in_flight) == (1, 64, 2)
        assert (await admin.Status(admin_pb2.StatusRequest())).max_queue_len == 1
        assert isinstance(await error_of(stub.Generate(inference_pb2.GenerateRequest(text="hi")).read()), Overloaded)
        await admin.SetAdmission(admin_pb2.SetAdmissionRequest(max_queue_len=3))
        third = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
        assert (await third.read()).token_ids, "those held before were not ended"
