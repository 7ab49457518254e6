"""A complete decode worker in this process: model, KV receiver, loop, gRPC, heartbeats. The Ray actor wraps it."""

import json
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import grpc.aio
import torch

from baton.core.build import build_id
from baton.core.clock import MonotonicClock
from baton.core.config import WorkerConfig
from baton.core.errors import InvalidRequest
from baton.core.kv_transports import control_channel, one_sided_data_paths
from baton.core.start_phase import RANKS, OnPhase
from baton.core.telemetry.logs import know
from baton.core.telemetry.telemetry import Telemetry
from baton.core.verification import VerificationMode
from baton.decode_worker.service import DecodeService
from baton.decode_worker.worker import DecodeWorker
from baton.engine.speculation.speculation import Speculation
from baton.engine.tp.plan import plan_codec
from baton.engine.tp.rank_runners import RankRunner
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.receiver.service import ReceiverService, receiver_region
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.shared_region import SharedRegion
from baton.kvtransfer.transports.registry import bind_address
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.worker.host import WorkerHost, worker_identity
from baton.worker.inventory import worker_state
from baton.worker.loading import LoadedWorker, load_worker, request_limits
from baton.worker.rank import RankPlace, RankStarter
from baton.worker.start_report import StartReport
from baton.worker.tp_group import (
    closed_if_it_fails,
    decode_runner,
    follow,
    lead_worker,
    rank0_runner,
    watch_tp_group,
)


class DecodeNode:
    """A decode worker, built and serving when the constructor returns.

    Args:
        config: what to load and where to report.
        on_fatal: called when the loop or a rank failed; an actor then ends its process, so that Ray starts a new
            incarnation.
        starter: starts the other ranks, if there are any.

    Raises:
        StartupError: see `load_worker`.
        ConfigInvalid: the verification mode is only for benchmarks.
    """

    def __init__(
        self,
        config: WorkerConfig,
        on_fatal: Callable[[BaseException], None],
        starter: RankStarter | None = None,
    ) -> None:
        self.config = config
        self._build = build_id()
        config.verification.require_servable()
        self.epoch = secrets.randbits(64) or 1
        know(role="decode", epoch=f"{self.epoch:016x}")
        with StartReport(config, "decode", self.epoch) as on_phase:
            if config.tp_size > 1:
                on_phase(RANKS, 0, 0)
            self._channel, self._on_fatal = lead_worker(config, self.epoch, plan_codec(), starter, on_fatal)
            with closed_if_it_fails(self._channel):
                self._start(on_phase)

    def _start(self, on_phase: OnPhase) -> None:
        with ExitStack() as undo:  # undoes what was started if a later part fails
            loaded, self._incoming = self._load(on_phase)
            self.config = loaded.applied(self.config)
            undo.callback(self._incoming.close)
            self._loaded = loaded
            self.worker = self._make_worker(loaded, on_phase)
            undo.pop_all()  # the worker owns the KV receiver now
            undo.callback(self.worker.close)
            watch_tp_group(self._channel, self._on_fatal)
            self.worker.start()
            self.host = self._make_host()
            self.host.start()
            undo.pop_all()

    def _make_worker(self, loaded: LoadedWorker, on_phase: OnPhase) -> DecodeWorker:
        config, clock, channel = self.config, MonotonicClock(), self._channel
        runner = decode_runner(config, loaded, None if channel is None else channel.communicator, on_phase)
        self._lead = None if channel is None else rank0_runner(config, runner, channel)
        about = {"worker_id": config.worker_id, "epoch": f"{self.epoch:016x}"}
        self._telemetry = Telemetry(config.telemetry, "decode", clock, about)
        return DecodeWorker(
            tracer=self._telemetry.tracer,
            runner=self._lead or runner,
            pool=loaded.pool,
            tokenizer=loaded.tokenizer,
            limits=request_limits(
                loaded.model, max_model_len=config.max_model_len, num_draft_tokens=config.num_draft_tokens
            ),
            incoming=self._incoming,
            max_num_batched_tokens=config.chunk_len,
            max_queue_len=config.max_queue_len,
            clock=clock,
            on_fatal=self._on_fatal,
            scheduling=config.scheduling,
            overcommit=config.overcommit,
            prefix_cache=config.prefix_cache,
            state_checkpoint_interval=config.state_checkpoint_interval,
            speculation=Speculation(
                config.num_draft_tokens,
                None if config.auto_drafts else config.num_draft_tokens,
                clock,
                methods=runner.methods,
                chooses_method=config.auto_method,
                keeps=config.verification.mode is VerificationMode.REJECTION,
            ),
        )

    def _make_host(self) -> WorkerHost:
        config = self.config
        service = DecodeService(self.worker, self.epoch, MonotonicClock())

        def register(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_DecodeServicer_to_server(service, server)

        return WorkerHost(
            config.host,
            register,
            self.state,
            config.router_address,
            self._on_fatal,
            self.set_speculation,
            tls=config.tls,
            identity=worker_identity(config, "decode", self.epoch),
        )

    def _load(self, on_phase: OnPhase) -> tuple[LoadedWorker, ReceiverService]:
        """Load the model, and start the KV receiver in its own process.

        On CPUs the pools of all ranks are in memory that the receiver writes. On GPUs rank 0's kernels fill them from
        what has arrived in host memory.
        """
        config = self.config
        regions: list[SharedRegion] = []

        def pool_memory(geometry: PoolGeometry) -> memoryview:
            regions.append(receiver_region(geometry.of_all_ranks, config.transfer))
            if self._channel is not None:
                self._channel.communicator.broadcast_bytes(_region_name(regions[0]))
            return regions[0].pool(geometry.rank)

        try:
            group = None if self._channel is None else self._channel.communicator
            loaded = load_worker(config, on_phase, pool_memory=pool_memory, communicator=group)
            kind = control_channel(config.transfer.transport).name
            data_paths = tuple(declared.data_path for declared in one_sided_data_paths(config.transfer.transport))
            setup = ReceiverSetup(
                epoch=self.epoch,
                layout=loaded.layout,
                num_blocks=loaded.pool.num_blocks,
                num_state_slots=loaded.pool.num_state_slots,
                tp_size=loaded.pool.geometry.size,
                num_pools=loaded.model.num_pools,
                listen=Listen(kind, bind_address(kind, config.host), data_paths),
                config=config.transfer,
            )
            if loaded.pool.device.type == "cuda":
                return loaded, ReceiverService.over_device(
                    loaded.pool, setup, None if group is None else group.gather_bytes
                )
            return loaded, ReceiverService.in_process(regions[0], setup)
        except BaseException:
            for region in regions:
                region.close()
            raise

    def state(self) -> worker_pb2.WorkerState:
        """Return the content of a heartbeat."""
        state = worker_state(
            "decode",
            self.config,
            self._loaded,
            self.worker.inventory(),
            epoch=self.epoch,
            address=self.host.address,
            build=self._build,
            naming=self.worker.names.naming,
            rank_pids=self.rank_pids(),
        )
        state.kv_address, state.kv_epoch = self._incoming.address, self._incoming.epoch
        state.speculation.CopyFrom(self._speculation())
        state.can_prefill = True
        return state

    def rank_pids(self) -> list[int]:
        """Return the process ids, in rank order."""
        return [os.getpid(), *([] if self._channel is None else self._channel.link.pids.values())]

    def set_speculation(self, mode: worker_pb2.SpeculationMode) -> worker_pb2.Speculation:
        """Change how many drafts the steps make. Any thread may call this.

        Raises:
            InvalidRequest: it names no mode, or more drafts than this worker can make.
        """
        match mode.WhichOneof("mode"):
            case "num_draft_tokens":
                self.worker.speculation.set_mode(mode.num_draft_tokens)
            case "auto" if mode.auto:
                self.worker.speculation.set_mode(None)
            case _:
                raise InvalidRequest("neither a number of draft tokens nor auto", field="mode")
        return self._speculation()

    def _speculation(self) -> worker_pb2.Speculation:
        now = self.worker.speculation
        method = "none" if now.method is None else now.method.value
        return worker_pb2.Speculation(
            auto=now.is_auto,
            num_draft_tokens=now.num_drafts,
            limit=now.limit,
            method=method,
            auto_method=now.chooses_method,
        )

    def about(self) -> dict[str, object]:
        """Return the worker's identity, for the process that started it."""
        return {
            "worker_id": self.config.worker_id,
            "address": self.host.address,
            "kv_address": self._incoming.address,
            "epoch": self.epoch,
            "pid": os.getpid(),
        }

    def close(self) -> None:
        """Stop serving and release everything."""
        self.host.close()
        self.worker.close()
        self._telemetry.close()
        if self._lead is not None and self._channel is not None:
            self._lead.close()
            self._channel.close()


class DecodeRank:
    """Another rank of a decode worker: loaded when the constructor returns, then `run`.

    Args:
        config: the worker's configuration.
        rank_place: place of this rank in the group.

    Raises:
        StartupError: see `load_worker`.
    """

    def __init__(self, config: WorkerConfig, rank_place: RankPlace) -> None:
        self.channel = follow(rank_place, plan_codec(), torch.device(config.device))
        with closed_if_it_fails(self.channel):
            loaded = load_worker(config, pool_memory=self._pool_memory, communicator=self.channel.communicator)
            if loaded.pool.device.type == "cuda":
                from baton.kvtransfer.rank_pools import share_pool  # needs CUDA bindings, which CPUs do not

                share_pool(loaded.pool, self.channel.communicator.gather_bytes)
            runner = decode_runner(loaded.applied(config), loaded, self.channel.communicator)
            self._follow = RankRunner(runner, self.channel)
            self.channel.follow()

    def run(self) -> None:
        """Follow rank 0 until it says stop.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
        """
        self._follow.run()
        self.channel.close()

    def _pool_memory(self, geometry: PoolGeometry) -> memoryview:
        path, nonce = json.loads(self.channel.communicator.broadcast_bytes(b""))
        return SharedRegion.attach(Path(path), nonce).pool(geometry.rank)


def _region_name(region: SharedRegion) -> bytes:
    """Return what another rank needs to map the region."""
    return json.dumps([str(region.path), region.nonce]).encode()
