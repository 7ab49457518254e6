"""Admin.SetSpeculation at the router: every decode worker hears of it, at once or with a heartbeat."""

import grpc
import pytest

from baton.core.errors import InvalidRequest, NoWorker
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.proto.wire import error_from_rpc
from baton.tests.inside import worker_channel
from baton.tests.router.fakes import cluster
from baton.worker.host import WorkerHost

pytestmark = pytest.mark.asyncio


def desired(**mode):
    return admin_pb2.SetSpeculationRequest(mode=worker_pb2.SpeculationMode(**mode))


async def test_every_decode_worker_is_told():
    async with cluster(num_prefill=1, num_decode=2) as running:
        admin = admin_pb2_grpc.AdminStub(running.channel)
        reply = await admin.SetSpeculation(desired(num_draft_tokens=1))
        told = {worker.worker_id: worker.speculation.num_draft_tokens for worker in reply.workers}
        assert told == {"decode-0": 1, "decode-1": 1}
        assert [worker.speculation.num_draft_tokens for worker in running.of("decode")] == [1, 1]
        assert (await admin.SetSpeculation(desired(auto=True))).workers[0].speculation.auto


async def test_one_that_does_not_answer_is_named_and_hears_of_it_with_its_heartbeat():
    async with cluster(num_prefill=1, num_decode=2) as running:
        admin = admin_pb2_grpc.AdminStub(running.channel)
        state = running.of("decode")[0].state()
        await running.of("decode")[0].server.stop(None)
        reply = await admin.SetSpeculation(desired(num_draft_tokens=2))
        errors = {worker.worker_id: bool(worker.error) for worker in reply.workers}
        assert errors == {"decode-0": True, "decode-1": False}
        heard = await running.report(state)
        assert heard.speculation.num_draft_tokens == 2
        assert not (await running.report(running.of("prefill")[0].state())).HasField("speculation")


@pytest.mark.parametrize(
    ("mode", "num_decode", "error"),
    [
        ({"num_draft_tokens": 3}, 1, InvalidRequest),  # the fakes make at most 2
        ({}, 1, InvalidRequest),
        ({"auto": False}, 1, InvalidRequest),
        ({"num_draft_tokens": 1}, 0, NoWorker),
    ],
)
async def test_what_cannot_be_is_refused(mode, num_decode, error):
    async with cluster(num_prefill=1, num_decode=num_decode) as running:
        admin = admin_pb2_grpc.AdminStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SetSpeculation(desired(**mode))
        assert type(error_from_rpc(caught.value)) is error
        if num_decode:
            heard = await running.report(running.of("decode")[0].state())
            assert not heard.HasField("speculation")


async def test_a_worker_follows_its_heartbeats_replies_and_refuses_what_it_cannot_do(caplog):
    asked = []

    def set_speculation(mode):
        if mode.num_draft_tokens > 2:
            raise InvalidRequest("at most 2")
        asked.append(mode.num_draft_tokens)
        return worker_pb2.Speculation(num_draft_tokens=mode.num_draft_tokens)

    host = WorkerHost("127.0.0.1", lambda server: None, worker_pb2.WorkerState, "", print, set_speculation)
    host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            admin = admin_pb2_grpc.AdminStub(worker_channel(channel, "", "", 0))
            reply = await admin.SetSpeculation(desired(num_draft_tokens=1))
            assert reply.workers[0].speculation.num_draft_tokens == 1
            with pytest.raises(grpc.aio.AioRpcError):
                await admin.SetSpeculation(desired(num_draft_tokens=3))
        host._follow(worker_pb2.HeartbeatReply())
        host._follow(worker_pb2.HeartbeatReply(speculation=worker_pb2.SpeculationMode(num_draft_tokens=2)))
        host._follow(worker_pb2.HeartbeatReply(speculation=worker_pb2.SpeculationMode(num_draft_tokens=3)))
        assert asked == [1, 2]
        assert "at most 2" in caplog.text
    finally:
        host.close()
