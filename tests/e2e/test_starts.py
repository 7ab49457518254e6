"""A worker whose load is held shows as starting at the router, and joins once it is released."""

import asyncio
import threading

import pytest

from baton.cluster.admin import as_data
from baton.cluster.commands.status import format_status
from baton.core.start_phase import WEIGHTS
from baton.decode_worker.node import DecodeNode
from baton.prefill_worker.node import PrefillNode
from baton.proto import admin_pb2, admin_pb2_grpc
from baton.tests.router.fakes import MODEL, cluster
from baton.tests.worker.test_nodes import worker_config
from baton.worker import loading

pytestmark = pytest.mark.asyncio
WAIT_S = 120.0


@pytest.mark.parametrize(("role", "kind"), [("decode", DecodeNode), ("prefill", PrefillNode)])
async def test_a_worker_that_loads_shows_as_starting_and_then_joins(role, kind, monkeypatch):
    may_load, load_model = threading.Event(), loading.load_model
    worker_id, fatal = f"{role}-0", []

    def held(*arguments, on_progress, **options):
        on_progress(45, 100)
        assert may_load.wait(WAIT_S)
        return load_model(*arguments, on_progress=on_progress, **options)

    monkeypatch.setattr(loading, "load_model", held)
    async with cluster(num_prefill=0, num_decode=0) as running, asyncio.timeout(WAIT_S):
        admin = admin_pb2_grpc.AdminStub(running.channel)

        async def status_when(holds):
            while not holds(status := await admin.Status(admin_pb2.StatusRequest())):
                await asyncio.sleep(0.01)
            return status

        address = f"127.0.0.1:{running.router.admin_port}"
        config = worker_config(worker_id, address, model_name=MODEL)
        loading_node = asyncio.create_task(asyncio.to_thread(kind, config, fatal.append))
        try:
            status = await status_when(lambda status: any(one.phase == WEIGHTS for one in status.starting))
            assert [(one.worker_id, one.role) for one in status.starting] == [(worker_id, role)]
            assert not status.workers
            shown = format_status(as_data(status) | {"address": address, "decode": []})
            assert f"{worker_id} starts: weights 45 %" in shown.splitlines()
        finally:
            may_load.set()
            node = await loading_node
        try:
            status = await status_when(lambda status: any(worker.alive for worker in status.workers))
            assert [worker.state.epoch for worker in status.workers] == [node.epoch]
            assert not status.starting
        finally:
            await asyncio.to_thread(node.close)
    assert not fatal
