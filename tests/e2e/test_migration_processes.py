"""Workers as processes that are killed and stopped under sixteen streams: all end with the tokens of no fault."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from baton.client import AsyncBatonClient
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.router.attempt.migration import MigrationConfig
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import token_prompts

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]
NUM_STREAMS = 16
NUM_TOKENS = 60
START_S = 90.0
ROUNDS = (
    (signal.SIGKILL, "decode-0"),
    (signal.SIGSTOP, "decode-1"),
    (signal.SIGKILL, "prefill-0"),
    (signal.SIGSTOP, "prefill-1"),
)


class Workers:
    """Two of each role, as processes that report to a router in this one."""

    def __init__(self, router):
        self.router = router
        self.processes = {}

    def start(self, name):
        role = name.partition("-")[0]
        address = f"127.0.0.1:{self.router.port}"
        command = [sys.executable, "-P", "-m", "baton.tests.e2e.worker_process", role, name, address]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    async def ready(self):
        async with asyncio.timeout(START_S):
            while len(self.router.members.live("prefill")) + len(self.router.members.live("decode")) < 4:
                assert all(process.poll() is None for process in self.processes.values()), "a worker did not start"
                await asyncio.sleep(0.1)

    async def hit(self, number, name):
        """A signal; what is only stopped goes on after its fence."""
        process = self.processes[name]
        process.send_signal(number)
        if number == signal.SIGSTOP:
            await asyncio.sleep(3.0)
            process.send_signal(signal.SIGCONT)
        else:
            process.wait(5.0)
            process.stdin.close()
            self.start(name)

    def close(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def stream(address, prompt, sampling, started=None):
    """(tokens, longest pause in s, migrations)."""
    token_ids, pause_s, last_s = [], 0.0, None
    async with AsyncBatonClient(address, timeout_s=120.0) as client:
        async for chunk in client.generate(token_ids=prompt, sampling=sampling):
            assert chunk.index == len(token_ids)
            token_ids += chunk.token_ids
            now_s = time.monotonic()
            pause_s = max(pause_s, now_s - last_s if last_s is not None else 0.0)
            last_s = now_s
            if started is not None and len(token_ids) >= 8:
                started.set()
    return token_ids, pause_s, chunk.finish.stats.num_migrations


async def is_idle(client):
    inventory = await client.inventory()
    held = [worker.state.inventory for worker in inventory.workers]
    return all(
        one.num_blocks_free == one.num_blocks and not one.num_requests_held and not one.num_kv_receives for one in held
    ) and all(worker.alive for worker in inventory.workers)


async def test_killed_and_stopped_workers_end_no_stream():
    tokenizer = Tokenizer.from_directory(TINY)
    prompts = token_prompts(tokenizer, 8 + NUM_STREAMS, seed=9, max_len=100)[-NUM_STREAMS:]
    samplings = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=float(at % 2), seed=at, ignore_eos=True)
        for at in range(NUM_STREAMS)
    ]
    asked = list(zip(prompts, samplings, strict=True))
    config = RouterConfig(
        host="127.0.0.1",
        port=0,
        max_queue_len=256,
        request_timeout_s=120.0,
        migration=MigrationConfig(quarantine_deaths=0),
    )
    router = RouterServer(config, ServedModel.from_directory("tiny", TINY, weights="checkpoint"))
    await router.start()
    address = f"127.0.0.1:{router.port}"
    workers = Workers(router)
    pauses_s, num_moved = [], []
    try:
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            workers.start(name)
        await workers.ready()
        whole = await asyncio.gather(*(stream(address, *one) for one in asked))
        assert all(len(tokens) == NUM_TOKENS for tokens, _, _ in whole)
        for number, name in ROUNDS:
            started = asyncio.Event()
            tasks = [asyncio.create_task(stream(address, *one, started)) for one in asked]
            if name.startswith("decode"):
                await started.wait()
            else:
                await asyncio.sleep(0.02)
            await workers.hit(number, name)
            got = await asyncio.gather(*tasks)
            assert [tokens for tokens, _, _ in got] == [tokens for tokens, _, _ in whole], (number, name)
            pauses_s += [pause_s for _, pause_s, moved in got if moved]
            num_moved.append(sum(moved for _, _, moved in got))
            await workers.ready()
            async with AsyncBatonClient(address) as client, asyncio.timeout(10.0):
                while not await is_idle(client):
                    await asyncio.sleep(0.1)
        print(f"moved {num_moved}, longest pauses {sorted(round(pause_s, 2) for pause_s in pauses_s)[-8:]} s")
        assert num_moved[0] > 0 < num_moved[1]
        assert max(pauses_s) < 10.0, pauses_s  # 1.6 s on a machine with nothing else to do
    finally:
        workers.close()
        await router.stop(0.0)
