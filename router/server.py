"""The router's process: one gRPC server with every service, and the clock tick that notices silent workers."""

import asyncio
import errno
import logging
import socket
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.clock import Clock, MonotonicClock
from baton.core.errors import BatonError, ConfigInvalid, PortInUse
from baton.core.metrics import RouterMetrics
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.proto.unreadable import RefuseUnreadable
from baton.router.admin import AdminService
from baton.router.admission import Admission
from baton.router.background import Background
from baton.router.channels import Channels
from baton.router.inference import InferenceService
from baton.router.members import ALIVE_S, Members
from baton.router.membership import MembershipService
from baton.router.policy import RoundRobin
from baton.router.refusals import Refusals
from baton.router.served_model import ServedModel
from baton.router.speculation import SpeculationWish

TICK_S: Final = 0.05
STOP_GRACE_S: Final = 1.0
MAX_REQUEST_BYTES: Final = 16 << 20
SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a second router on the port must fail, not share it
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What a router is started with. Port 0 picks a free one."""

    host: str
    port: int
    max_queue_len: int
    request_timeout_s: float
    alive_s: float = ALIVE_S


class RouterServer:
    """Serves from `start` to `stop`, on the running event loop."""

    def __init__(self, config: RouterConfig, model: ServedModel, clock: Clock | None = None) -> None:
        self._config = config
        self._model = model
        self._clock = clock or MonotonicClock()
        self._background = Background()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._serving: bool | None = None
        self._server: Any = None
        self.metrics = RouterMetrics()
        self.members = Members(self._clock, config.alive_s)
        self.metrics.watch_transfers(self.members.transfers)
        self.metrics.watch_workers(self.members.totals)
        self.refusals = Refusals(self.members)
        self._channels = Channels(self.members, self._background.spawn)
        self.port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            PortInUse: the port is taken.
            ConfigInvalid: the address cannot be bound.
        """
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(RefuseUnreadable(),))
        self._register(self._server)
        try:
            self.port = self._server.add_insecure_port(f"{self._config.host}:{self._config.port}")
        except RuntimeError as error:
            raise why_not_bound(self._config.host, self._config.port) from error
        await self._set_health()
        await self._server.start()
        self._background.spawn(self._tick())

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new requests, give open ones a grace, then end them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._background.close()
        await self._channels.close()

    def _register(self, server: Any) -> None:
        admission = Admission(self._config.max_queue_len)
        speculation = SpeculationWish()
        inference = InferenceService(
            model=self._model,
            host=self._config.host,
            request_timeout_s=self._config.request_timeout_s,
            admission=admission,
            policy=RoundRobin(),
            members=self.members,
            refusals=self.refusals,
            channels=self._channels,
            metrics=self.metrics,
            clock=self._clock,
            spawn=self._background.spawn,
        )
        admin = AdminService(
            model=self._model.name,
            members=self.members,
            refusals=self.refusals,
            channels=self._channels,
            metrics=self.metrics,
            num_running=lambda: admission.num_in_flight,
            speculation=speculation,
            clock=self._clock,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        membership = MembershipService(self.members, self._model.name, speculation)
        worker_pb2_grpc.add_MembershipServicer_to_server(membership, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        files = (inference_pb2, admin_pb2)
        names = [service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()]
        membership_name = worker_pb2.DESCRIPTOR.services_by_name["Membership"].full_name
        reflection.enable_server_reflection(
            (*names, membership_name, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for life in self.members.expire():
                log.warning("worker %s (epoch %016x) is lost: silent too long", life.worker_id, life.epoch)
            await self._set_health()

    async def _set_health(self) -> None:
        serving = self.members.serving
        if serving == self._serving:
            return
        self._serving = serving
        state = health_pb2.HealthCheckResponse
        for service in ("", inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name):
            await self._health.set(service, state.SERVING if serving else state.NOT_SERVING)


def why_not_bound(host: str, port: int) -> BatonError:
    """The reason that gRPC does not give."""
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:  # gaierror is one
        if error.errno != errno.EADDRINUSE:
            return ConfigInvalid(f"cannot listen on {host}:{port}: {error.strerror}", keys=["host", "grpc_port"])
    return PortInUse(f"port {port} on {host} is taken; choose another, or 0 for a free one", host=host, port=port)
