"""One whole decode worker in this process: model, landing, loop, gRPC, heartbeats. No Ray: the actor wraps it."""

import os
import secrets
from collections.abc import Callable

import grpc
import grpc.aio

from baton.core.clock import MonotonicClock
from baton.core.config import WorkerConfig
from baton.decode_worker.service import DecodeService
from baton.decode_worker.worker import DecodeWorker
from baton.engine.decode import DecodeRunner
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.landing import LandingService, landing_region
from baton.kvtransfer.landing_setup import LandingSetup, Listen
from baton.kvtransfer.lanes import NIXL, NVLINK, SHM
from baton.kvtransfer.shared_region import SharedRegion
from baton.kvtransfer.transports import bind_address, control_channel
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.worker.host import WorkerHost
from baton.worker.loading import LoadedWorker, load_worker, request_limits


class DecodeNode:
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
        loaded, self._landing = self._load()
        self._layout = loaded.layout
        self.worker = DecodeWorker(
            runner=DecodeRunner(
                loaded.model,
                loaded.pool,
                config.max_num_seqs,
                config.num_draft_tokens,
                grammars=loaded.grammars,
            ),
            pool=loaded.pool,
            tokenizer=loaded.tokenizer,
            limits=request_limits(
                loaded.model, max_model_len=config.max_model_len, num_draft_tokens=config.num_draft_tokens
            ),
            landing=self._landing,
            max_num_seqs=config.max_num_seqs,
            max_queue_len=config.max_queue_len,
            clock=clock,
            on_fatal=on_fatal,
        )
        service = DecodeService(self.worker, self.epoch, clock)

        def register(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_DecodeServicer_to_server(service, server)

        self.worker.start()
        self.host = WorkerHost(config.host, register, self.state, config.router_address, on_fatal)
        self.host.start()

    def _load(self) -> tuple[LoadedWorker, LandingService]:
        """The model over a pool in shared memory, and the landing in a process of its own that writes there."""
        config = self.config
        regions: list[SharedRegion] = []

        def pool_memory(geometry: PoolGeometry) -> memoryview:
            regions.append(landing_region(geometry.of_all_ranks, config.transfer))
            return regions[0].pool(geometry.rank)

        try:
            loaded = load_worker(config, pool_memory=pool_memory)
            kind = control_channel(config.transfer)
            lanes = tuple(lane for lane in (NVLINK, SHM) if config.transfer.transport in ("auto", lane))
            if config.transfer.transport == NIXL:
                lanes = (NIXL,)
            setup = LandingSetup(
                epoch=self.epoch,
                layout=loaded.layout,
                num_blocks=loaded.pool.num_blocks,
                tp_size=loaded.pool.geometry.size,
                listen=Listen(kind, bind_address(kind, config.host), lanes),
                config=config.transfer,
            )
            if loaded.pool.device.type == "cuda":
                return loaded, LandingService.over_device(loaded.pool, setup)
            return loaded, LandingService.in_process(regions[0], setup)
        except BaseException:
            for region in regions:
                region.close()
            raise

    def state(self) -> worker_pb2.WorkerState:
        """What a heartbeat says."""
        return worker_pb2.WorkerState(
            worker_id=self.config.worker_id,
            role="decode",
            epoch=self.epoch,
            address=self.host.address,
            kv_address=self._landing.address,
            kv_epoch=self._landing.epoch,
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
            "kv_address": self._landing.address,
            "epoch": self.epoch,
            "pid": os.getpid(),
        }

    def close(self) -> None:
        """Stop serving and release everything."""
        self.host.close()
        self.worker.close()
