"""What operators change at the router: which life of a worker ends, how many requests are held."""

import asyncio

import grpc
import pytest

from baton.core.errors import InvalidRequest, Overloaded, WorkerLost
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from baton.proto.wire import error_from_rpc
from baton.tests.inside import worker_channel
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
