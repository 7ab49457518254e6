"""One whole prefill worker in this process: model, hand-off, loop, gRPC, heartbeats. No Ray: the actor wraps it."""

import os
import secrets
from collections.abc import Callable

import grpc
import grpc.aio

from baton.core.clock import MonotonicClock
from baton.core.config import WorkerConfig
from baton.engine.prefill import PrefillRunner
from baton.kvcache.pool import KVPool
from baton.kvtransfer.evidence import host_id
from baton.kvtransfer.lanes import NIXL
from baton.kvtransfer.push import PushService
from baton.kvtransfer.push_lane import LaneOpener
from baton.kvtransfer.transports import connecting_transport
from baton.prefill_worker.service import PrefillService
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.worker.host import WorkerHost
from baton.worker.loading import load_worker, request_limits


class PrefillNode:
    """Built and serving when the constructor returns.

    Args:
        config: what to load and where to report.
        on_fatal: told when the loop broke; an actor ends its process then, so that Ray starts a new life.

    Raises:
        StartupError: see `load_worker`.
    """

    def __init__(self, config: WorkerConfig, on_fatal: Callable[[BaseException], None]) -> None:
        self.config = config
        self.epoch = secrets.randbits(64) or 1
        clock = MonotonicClock()
        loaded = load_worker(config)
        self._layout = loaded.layout
        push = PushService(
            pool=loaded.pool,
            layout=loaded.layout,
            epoch=self.epoch,
            transport=connecting_transport(config.transfer),
            config=config.transfer,
            clock=clock,
            openers=_openers(loaded.pool, config.transfer.transport, self.epoch),
        )
        self.worker = PrefillWorker(
            runner=PrefillRunner(loaded.model, loaded.pool, grammars=loaded.grammars),
            pool=loaded.pool,
            tokenizer=loaded.tokenizer,
            limits=request_limits(
                loaded.model, max_model_len=config.max_model_len, num_draft_tokens=config.num_draft_tokens
            ),
            push=push,
            chunk_len=config.chunk_len,
            max_num_seqs=config.max_num_seqs,
            max_queue_len=config.max_queue_len,
            prefix_cache=config.prefix_cache,
            clock=clock,
            on_fatal=on_fatal,
        )
        service = PrefillService(self.worker, clock)

        def register(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_PrefillServicer_to_server(service, server)

        self.worker.start()
        self.host = WorkerHost(config.host, register, self.state, config.router_address, on_fatal)
        self.host.start()

    def state(self) -> worker_pb2.WorkerState:
        """What a heartbeat says."""
        return worker_pb2.WorkerState(
            worker_id=self.config.worker_id,
            role="prefill",
            epoch=self.epoch,
            address=self.host.address,
            model=self.config.model_name,
            layout_hash=self._layout.hash,
            max_model_len=self.config.max_model_len,
            num_draft_tokens=self.config.num_draft_tokens,
            block_size=self.config.block_size,
            numerics=self.config.numerics.value,
            dtype=self.config.dtype,
            inventory=self.worker.inventory(),
        )

    def about(self) -> dict[str, object]:
        """Identity for whoever started it."""
        return {
            "worker_id": self.config.worker_id,
            "address": self.host.address,
            "kv_address": "",
            "epoch": self.epoch,
            "pid": os.getpid(),
        }

    def close(self) -> None:
        """Stop serving and release everything."""
        self.host.close()
        self.worker.close()


def _openers(pool: KVPool, transport: str, epoch: int) -> list[LaneOpener]:
    """One-sided lanes beside shm; what each needs is imported only where it is used."""
    if pool.device.type == "cuda":
        from baton.kvtransfer.nvlink_lane import NvlinkOpener  # with it comes Triton, which CPUs have no use for

        return [NvlinkOpener(pool, host_id())]
    if transport == NIXL:
        from baton.kvtransfer.nixl_lane import nixl_openers

        return nixl_openers(transport, epoch, pool)
    return []
