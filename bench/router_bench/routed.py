"""A deployment whose router is in this process, and whose real workers are in processes of their own."""

import asyncio
import os
from pathlib import Path
from typing import Any

from baton.bench.actor import SpawnedRemote
from baton.core.config import WorkerConfig
from baton.core.errors import WorkerStartFailed
from baton.core.numerics import Numerics
from baton.router.placement.members import DECODE, PREFILL
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer

START_LIMIT_S = 120.0
LOOK_S = 0.05


class RoutedWorker:
    """One worker, served by `bench.actor.SpawnedRemote`."""

    def __init__(self, role: str, config: WorkerConfig) -> None:
        from baton.decode_worker.node import DecodeNode
        from baton.prefill_worker.node import PrefillNode

        kind = PrefillNode if role == PREFILL else DecodeNode
        self._node = kind(config, lambda error: os._exit(1))

    def close(self) -> None:
        """Release everything."""
        self._node.close()


class RoutedDeployment:
    """Start it with `start`, in the event loop that later uses it; call `close` in any case.

    Args:
        routing: policy of the router.
        model_path: model that workers load.
        num_prefill: number of prefill workers; there is one decode worker.
        prefill_kv_mib: size of each prefill worker's pool.
        decode_kv_mib: size of the decode worker's pool.
        chunk_len: prompt tokens per prefill step.
        max_model_len: maximum length of prompt and answer.
    """

    def __init__(
        self,
        routing: str,
        model_path: Path,
        *,
        num_prefill: int,
        prefill_kv_mib: int,
        decode_kv_mib: int,
        chunk_len: int,
        max_model_len: int,
    ) -> None:
        self.routing = routing
        self._model_path = model_path
        self._ids = {f"prefill-{at}": PREFILL for at in range(num_prefill)} | {"decode-0": DECODE}
        self._kv_mib = {PREFILL: prefill_kv_mib, DECODE: decode_kv_mib}
        self._chunk_len, self._max_model_len = chunk_len, max_model_len
        self._remotes: list[SpawnedRemote] = []
        self._router: RouterServer | None = None
        self.address = ""

    async def start(self) -> None:
        """Start the router and begin to start the workers; `ready` waits for them."""
        config = RouterConfig(
            host="127.0.0.1", port=0, max_queue_len=1024, request_timeout_s=60.0, routing=self.routing
        )
        model = ServedModel.from_directory("bench", self._model_path, weights="checkpoint")
        self._router = RouterServer(config, model)
        await self._router.start()
        self.address = f"127.0.0.1:{self._router.port}"
        for worker_id, role in self._ids.items():
            remote = await asyncio.to_thread(SpawnedRemote, RoutedWorker, role, self._worker(worker_id, role))
            self._remotes.append(remote)

    async def ready(self) -> None:
        """Wait for every worker's heartbeat.

        Raises:
            WorkerStartFailed: a heartbeat did not come in time.
        """
        assert self._router is not None
        members = self._router.members
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while len(members.live(PREFILL)) + len(members.live(DECODE)) < len(self._ids):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise WorkerStartFailed("a worker of the bench did not report in time", timed_out=True) from None

    def set_local_prefill(self, mode: str) -> None:
        """Set whether decode workers compute prompts (`router.placement.local_prefill`), from the next request on."""
        assert self._router is not None
        self._router.local.mode = mode

    async def heard(self) -> None:
        """Wait until every worker has reported again."""
        assert self._router is not None
        members = self._router.members
        before = {member.incarnation: member.heartbeat_s for role in (PREFILL, DECODE) for member in members.live(role)}
        async with asyncio.timeout(START_LIMIT_S):
            while not all(members.heard_since(incarnation, moment_s) for incarnation, moment_s in before.items()):
                await asyncio.sleep(LOOK_S / 5)

    async def close(self) -> None:
        """End the workers, then the router."""
        for remote in self._remotes:
            await asyncio.to_thread(_end, remote)
        if self._router is not None:
            await self._router.stop(0.0)

    def prefill_blocks(self) -> tuple[int, int]:
        """Blocks of one prefill worker's pool, and positions of a block."""
        assert self._router is not None
        state = self._router.members.live(PREFILL)[0].state
        return state.inventory.num_blocks, state.block_size

    def _worker(self, worker_id: str, role: str) -> WorkerConfig:
        return WorkerConfig(
            worker_id=worker_id,
            model_path=str(self._model_path),
            model_name="bench",
            num_draft_tokens=1,
            numerics=Numerics.DEFAULT,
            dtype="float32",
            device="cpu",
            block_size=16,
            kv_memory_mib=self._kv_mib[role],
            gpu_memory_utilization=0.5,
            max_num_seqs=16,
            max_queue_len=1024,
            chunk_len=self._chunk_len,
            max_model_len=self._max_model_len,
            host="127.0.0.1",
            router_address=self.address,
            num_threads=1,
        )


def _end(remote: Any) -> None:
    try:
        remote.call("close")
    finally:
        remote.end()
