"""Drawn bytes for every RPC of a router with scripted workers: each end has a type, and no worker keeps anything.

The same against real workers, and for longer, is `tests/e2e/test_fuzz_grpc.py`.
"""

import asyncio

import pytest

from baton.client import AsyncBatonClient
from baton.tests.e2e.rpc_fuzz import QUIET, ROUTER, calls, run_round, send_all
from baton.tests.router.fakes import cluster
from baton.tests.router.openai.test_chat import report

pytestmark = [pytest.mark.fast, QUIET]


@pytest.mark.long
@pytest.mark.asyncio
async def test_no_bytes_are_a_servers_error():
    async with cluster(alive_s=60.0) as running:
        running.script.logprobs = report
        methods = {path: given for path, given in ROUTER.items() if not path.endswith(("/Drain", "/SetAdmission"))}
        known = tuple(worker.epoch ^ 1 for worker in running.workers)

        def send(drawn, disconnects):
            send_all({"router": running.address}, drawn, disconnects)

        await asyncio.to_thread(run_round, 7, calls("router", methods, known), send)
        await running.idle(20.0)
        async with AsyncBatonClient(running.address) as client:
            assert await client.generate_text("hi") == "hello world"
