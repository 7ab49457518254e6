"""A complete prefill worker in this process: model, hand-off, loop, gRPC, heartbeats. The Ray actor wraps it."""

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack

import grpc
import grpc.aio
import torch

from baton.core.build import build_id
from baton.core.clock import MonotonicClock
from baton.core.config import WorkerConfig
from baton.core.errors import ConfigInvalid
from baton.core.start_phase import RANKS, OnPhase
from baton.core.telemetry.logs import know
from baton.core.telemetry.telemetry import Telemetry
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import RankRunner
from baton.kvtransfer.protocol.incarnation_file import sweep_incarnations
from baton.kvtransfer.sender.service import PushService
from baton.kvtransfer.transports.registry import connecting_transport
from baton.prefill_worker.service import PrefillService
from baton.prefill_worker.tp_group import PrefillRankPush, TPGroupPush, prefill_codec
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.worker.host import WorkerHost, worker_identity
from baton.worker.inventory import worker_state
from baton.worker.loading import LoadedWorker, load_worker, request_limits
from baton.worker.rank import RankPlace, RankStarter
from baton.worker.start_report import StartReport
from baton.worker.tp_group import (
    closed_if_it_fails,
    follow,
    lead_worker,
    prefill_runner,
    rank0_runner,
    watch_tp_group,
)


class PrefillNode:
    """A prefill worker, built and serving when the constructor returns.

    Args:
        config: what to load and where to report.
        on_fatal: called when the loop or a rank failed; an actor then ends its process, so that Ray starts a new
            incarnation.
        starter: starts the other ranks, if there are any.

    Raises:
        ConfigInvalid: its ranks would have sequences of their own.
        StartupError: see `load_worker`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        on_fatal: Callable[[BaseException], None],
        starter: RankStarter | None = None,
    ) -> None:
        if config.enable_dp_attention:
            message = "enable_dp_attention: ranks push what all of them have, and this is a prefill worker"
            raise ConfigInvalid(message, keys=["enable_dp_attention", "prefill"])
        self.config = config
        self._build = build_id()
        self.epoch = secrets.randbits(64) or 1
        know(role="prefill", epoch=f"{self.epoch:016x}")
        with StartReport(config, "prefill", self.epoch) as on_phase:
            if config.tp_size > 1:
                on_phase(RANKS, 0, 0)
            self._channel, self._on_fatal = lead_worker(config, self.epoch, prefill_codec(), starter, on_fatal)
            with closed_if_it_fails(self._channel):
                self._start(on_phase)

    def _start(self, on_phase: OnPhase) -> None:
        group = None if self._channel is None else self._channel.communicator
        loaded = load_worker(self.config, on_phase, communicator=group)
        self.config = loaded.applied(self.config)
        self._loaded = loaded
        with ExitStack() as undo:  # undoes what was started if a later part fails
            push = _push(self.config, loaded, self.epoch)
            undo.callback(push.close)
            runner = prefill_runner(self.config, loaded, group, push.open_step, on_phase)
            self.worker = self._make_worker(loaded, runner, push)
            undo.pop_all()  # the worker owns it now
            undo.callback(self.worker.close)
            watch_tp_group(self._channel, self._on_fatal)
            self.worker.start()
            self.host = self._make_host()
            self.host.start()
            undo.pop_all()

    def _make_worker(self, loaded: LoadedWorker, runner: Runner, push: PushService) -> PrefillWorker:
        config, clock, channel = self.config, MonotonicClock(), self._channel
        about = {"worker_id": config.worker_id, "epoch": f"{self.epoch:016x}"}
        self._telemetry = Telemetry(config.telemetry, "prefill", clock, about)
        return PrefillWorker(
            tracer=self._telemetry.tracer,
            runner=runner if channel is None else rank0_runner(config, runner, channel),
            pool=loaded.pool,
            tokenizer=loaded.tokenizer,
            limits=request_limits(
                loaded.model, max_model_len=config.max_model_len, num_draft_tokens=config.num_draft_tokens
            ),
            push=push if channel is None else TPGroupPush(push, channel),
            max_num_batched_tokens=config.chunk_len,
            scheduling=config.scheduling,
            max_queue_len=config.max_queue_len,
            prefix_cache=config.prefix_cache,
            state_checkpoint_interval=config.state_checkpoint_interval,
            clock=clock,
            on_fatal=self._on_fatal,
        )

    def _make_host(self) -> WorkerHost:
        config = self.config
        service = PrefillService(self.worker, MonotonicClock(), self.epoch)

        def register(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_PrefillServicer_to_server(service, server)

        return WorkerHost(
            config.host,
            register,
            self.state,
            config.router_address,
            self._on_fatal,
            tls=config.tls,
            identity=worker_identity(config, "prefill", self.epoch),
        )

    def state(self) -> worker_pb2.WorkerState:
        """Return the content of a heartbeat."""
        state = worker_state(
            "prefill",
            self.config,
            self._loaded,
            self.worker.inventory(),
            epoch=self.epoch,
            address=self.host.address,
            build=self._build,
            naming=self.worker.names.naming,
            rank_pids=self.rank_pids(),
        )
        state.kv_bytes_per_position = self._loaded.layout.bytes_per_block / self._loaded.layout.block_size
        return state

    def rank_pids(self) -> list[int]:
        """Return the process ids, in rank order."""
        return [os.getpid(), *([] if self._channel is None else self._channel.link.pids.values())]

    def about(self) -> dict[str, object]:
        """Return the worker's identity, for the process that started it."""
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
        self._telemetry.close()
        if self._channel is not None:
            self._channel.close()


class PrefillRank:
    """Another rank of a prefill worker: loaded when the constructor returns, then `run`.

    Args:
        config: the worker's configuration.
        rank_place: place of this rank in the group.

    Raises:
        StartupError: see `load_worker`.
    """

    def __init__(self, config: WorkerConfig, rank_place: RankPlace) -> None:
        channel = self.channel = follow(rank_place, prefill_codec(), torch.device(config.device))
        with closed_if_it_fails(channel):
            loaded = load_worker(config, communicator=channel.communicator)
            config = loaded.applied(config)
            push = _push(config, loaded, rank_place.epoch)
            runner = prefill_runner(config, loaded, channel.communicator, push.open_step)
            self._follower = PrefillRankPush(RankRunner(runner, channel), push, channel)
            channel.follow()

    def run(self) -> None:
        """Follow rank 0 until it says stop.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
            TransferFailed: this rank cannot push any more.
        """
        self._follower.run()
        self.channel.close()


def _push(config: WorkerConfig, loaded: LoadedWorker, epoch: int) -> PushService:
    sweep_incarnations()  # of workers that were killed
    return PushService(
        pool=loaded.pool,
        layout=loaded.layout,
        epoch=epoch,
        transport=connecting_transport(config.transfer),
        config=config.transfer,
        clock=MonotonicClock(),
    )
