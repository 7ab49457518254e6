"""Assembles the router: a port for clients, optionally one for workers and operators, and the periodic tick.

Among other things, the tick notices silent workers.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Coroutine
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.clock import Clock, MonotonicClock
from baton.core.errors import as_internal
from baton.core.files import share_of_clients
from baton.core.inside import DeploymentSecret
from baton.core.requests.request import GenerationRequest
from baton.core.telemetry.span import Tracer
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.proto.secure_channel import SecureChannels
from baton.router.access.listener import NUM_DOORS, Listener, why_not_bound
from baton.router.access.security import ClientLimits, RouterSecurity, SecurityMetrics
from baton.router.admin import AdminService
from baton.router.admission.admission import Admission, Settling
from baton.router.admission.admission_queue import AdmissionQueue
from baton.router.admission.fair_queue import AdmissionCollector, QueueLimits
from baton.router.attempt.attempts import AttemptsContext
from baton.router.attempt.channels import Channels
from baton.router.attempt.migration import Migration, MigrationConfig, RetryBudget, RetryLimits
from baton.router.desired_state import DesiredScale, DesiredSpeculation, DesiredState
from baton.router.inference import InferenceService
from baton.router.metrics import RouterMetrics
from baton.router.openai.app import make_app
from baton.router.openai.body_reader import BodyReader
from baton.router.openai.connection import ConnectionLimits, Connections, HttpServer
from baton.router.openai.front import Front, HttpConfig
from baton.router.placement.canaries import Canaries, CanaryCollector
from baton.router.placement.canary import CanaryConfig, CanaryWatch
from baton.router.placement.least_cost import LeastCost
from baton.router.placement.local_prefill import ALWAYS, NEVER, LocalPrefill, LocalPrefillCollector
from baton.router.placement.members import ALIVE_S, DECODE, PREFILL, Incarnation, Members
from baton.router.placement.membership import MembershipService
from baton.router.placement.prefix_index import FleetPrefixIndex, PrefixCollector, PrefixFeed
from baton.router.placement.refusals import Refusals
from baton.router.placement.routing import PREFIX, ROUND_ROBIN, make_policy
from baton.router.placement.starting import StartingWorkers
from baton.router.served_model import ServedModel
from baton.router.shutdown import Shutdown
from baton.router.worker_metrics import WorkerCollector

log = logging.getLogger(__name__)


class Background:
    """A set of background tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task; an error in it is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)


SERVICES: Final = {
    name: service.full_name
    for file in (inference_pb2, admin_pb2, worker_pb2)
    for name, service in file.DESCRIPTOR.services_by_name.items()
}
MEMBERSHIP: Final = SERVICES["Membership"]
MAX_RUNNING: Final = QueueLimits().max_running
TICK_S: Final = 0.05
STOP_GRACE_S: Final = 1.0
SETTLE_S: Final = 2.5  # upper bound
NOTICE_S: Final = 2.0  # how long new requests are told why they are refused, before connections are refused

__all__ = ["RouterConfig", "RouterServer", "why_not_bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Configuration of a router. Port 0 picks a free one."""

    host: str
    port: int
    max_queue_len: int | None
    request_timeout_s: float
    alive_s: float = ALIVE_S
    migration: MigrationConfig = MigrationConfig()  # noqa: RUF009
    retries: RetryLimits = RetryLimits()  # noqa: RUF009
    routing: str = ROUND_ROBIN
    log_requests: bool = False
    local_prefill: str = NEVER
    canary: CanaryConfig = CanaryConfig()  # noqa: RUF009
    max_wait_s: float | None = 0.0  # in the queue; None: up to each request's deadline; 0: no request waits here
    security: RouterSecurity = field(default_factory=RouterSecurity)
    http: HttpConfig | None = None
    follows_workers: int = 0  # workers of the previous router; requests wait until that many are heard (`Settling`)
    secret: DeploymentSecret = field(default_factory=DeploymentSecret.of_process, repr=False)


class RouterServer:
    """The router's servers and state; serves from `start` to `stop`, on the running event loop."""

    def __init__(
        self, config: RouterConfig, model: ServedModel, clock: Clock | None = None, tracer: Tracer | None = None
    ) -> None:
        self._tracer = tracer
        self.config = config
        self._model = model
        self._clock = clock or MonotonicClock()
        self._background = Background()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._serving: bool | None = None
        self.shutdown = Shutdown()
        self._settling: Settling | None = None
        self._http: HttpServer | None = None
        self._reader: BodyReader | None = None
        self.metrics = RouterMetrics()
        self.members = Members(self._clock, config.alive_s)
        self.metrics.registry.register(WorkerCollector(self.members))
        self.refusals = Refusals(self.members)
        self.local = LocalPrefill(config.local_prefill, lambda: bool(self.migration.drains.live(PREFILL)))
        self.metrics.registry.register(LocalPrefillCollector(self.local))
        watch = CanaryWatch(config.canary, _log_fitness)
        self.migration = Migration(config.migration, self.members, self._clock, self.metrics, self.local, watch)
        self.retries = RetryBudget(config.retries, self._clock.now_s())
        secure = SecureChannels(config.security.tls)
        self._channels = Channels(self.members, self._background.spawn, secure, config.secret)
        self.prefixes = FleetPrefixIndex()
        self.metrics.registry.register(PrefixCollector(self.prefixes))
        self._policy = make_policy(config.routing, self._clock, random.Random(), self.prefixes, self.local)
        self.canaries = self._make_canaries()
        roles = (PREFILL,) if config.local_prefill == NEVER else (PREFILL, DECODE)
        self._feed = PrefixFeed(self.prefixes, self.members, self._channels, self._background.spawn, roles)
        self._admission_queue = self._make_admission_queue()
        security = config.security
        self.security_metrics = SecurityMetrics(self.metrics.registry)
        verifier = config.secret.router_verifier(secrets.randbits(64), time.time)
        self.callee = verifier.callee  # workers' name for this incarnation of the router
        for_operators = security.admin_port is None
        # All services for clients use its authenticator, and HTTP is served with its `http_context`.
        self.public = Listener(
            "public",
            tls=security.public_tls,
            keys=security.keys_path(),
            limits=security.limits,
            metrics=self.security_metrics,
            verifier=verifier,
            outside=(SERVICES["Inference"], *((SERVICES["Admin"],) if for_operators else ())),
        )
        self._admin = self.public
        if security.admin_port is not None:
            self._admin = Listener(
                "admin",
                tls=security.tls,
                keys=security.keys_path(admin=True),
                limits=ClientLimits(),
                metrics=self.security_metrics,
                open_services=(MEMBERSHIP,),
                extra_keys=security.operator_keys,
                verifier=verifier,
                outside=(SERVICES["Admin"],),
            )
        self._listeners = tuple({id(item): item for item in (self.public, self._admin)}.values())
        self.port = 0
        self.admin_port = 0  # equals `port` unless the admin port is separate
        self.http_port: int | None = None

    def _make_canaries(self) -> Canaries:
        in_flight_tracker, spawn = self.migration.in_flight_tracker, self._background.spawn
        vocab_size = self._model.vocab_size
        canaries = Canaries(in_flight_tracker, self.refusals, self._channels, self._clock, spawn, vocab_size)
        self.metrics.registry.register(CanaryCollector(canaries, in_flight_tracker.canary, self.members))
        return canaries

    def _make_admission_queue(self) -> AdmissionQueue | None:
        if self.config.max_wait_s == 0.0:
            return None
        policy, drains = self._policy, self.migration.drains

        def cached_len(request: GenerationRequest) -> int:
            if not isinstance(policy, LeastCost):
                return 0
            return policy.cached_len(drains.live(PREFILL), drains.live(DECODE), request)

        num = self.config.max_queue_len
        most = MAX_RUNNING if num is None else max(num, MAX_RUNNING)
        limits = QueueLimits(max_wait_s=self.config.max_wait_s, max_waiting=num, max_running=most)
        role = DECODE if self.config.local_prefill == ALWAYS else PREFILL
        admission_queue = AdmissionQueue(limits, drains, self._clock, cached_len, role)
        self.metrics.registry.register(AdmissionCollector(admission_queue.queue))
        return admission_queue

    async def start(self) -> None:
        """Start listening.

        Raises:
            PortInUse: the port is taken.
            ConfigInvalid: the address cannot be bound.
        """
        for listener in self._listeners:
            listener.open()
        if self.config.follows_workers:
            self._settling = Settling(self._clock.now_s() + SETTLE_S, self._is_whole)
        self.inference = inference = self._register(self.public.server, self._admin.server)
        self.public.listen(self.config.host, self.config.port)
        if self.config.security.admin_port is not None:
            self._admin.listen(self.config.host, self.config.security.admin_port)
        self.port, self.admin_port = self.public.port, self._admin.port
        if self.config.http is not None:
            await self._start_http(self.config.http, inference)
        await self._set_health()
        for listener in self._listeners:
            await listener.server.start()
        self._background.spawn(self._tick())

    def warm_up(self) -> None:
        """Start in the background what the first requests would otherwise wait for."""
        if self._reader is not None:
            self._background.spawn(self._reader.warm_up())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests with `Draining`, and end open ones with it after a grace period; `stop` follows.

        Clients receive GOAWAY as soon as the port is no longer needed. Workers' heartbeats need their port while
        streams run, so a port shared by clients and workers stays open until the end.
        """
        self.shutdown.begin()
        await self._health.enter_graceful_shutdown()
        log.warning("shutting down: %d calls may finish within %g s", self.shutdown.num_open, grace_s)
        has_own_port = self._admin is not self.public
        if has_own_port and not await self.shutdown.wait_empty(min(NOTICE_S, grace_s)):
            grace_s = max(0.0, grace_s - NOTICE_S)
            self._background.spawn(self.public.server.stop(grace_s + STOP_GRACE_S))
        if not await self.shutdown.wait_empty(grace_s):
            log.warning("%d calls have not finished, and are ended", self.shutdown.num_open)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new requests, end open ones with `Draining`, and allow that error a grace period to arrive."""
        if self.shutdown.cut():
            await self.shutdown.wait_empty(grace_s)
        await self._health.enter_graceful_shutdown()
        stopping = [listener.server.stop(grace_s) for listener in self._listeners]
        if self._http is not None:
            stopping.append(self._http.stop(grace_s))
        await asyncio.gather(*stopping)
        await self._background.close()
        if self._reader is not None:
            await self._reader.close()
        await self._channels.close()

    def _is_whole(self) -> bool:
        num_live = len(self.members.live(PREFILL)) + len(self.members.live(DECODE))
        return num_live >= self.config.follows_workers and self._feed.is_caught_up

    async def _start_http(self, config: HttpConfig, inference: InferenceService) -> None:
        limits = self.config.security.limits
        config = replace(config, max_body_bytes=min(config.max_body_bytes, limits.max_message_bytes))
        self._reader = BodyReader(inference, self._model, config)
        front = Front(
            inference=inference,
            model=self._model,
            metrics=self.metrics,
            config=config,
            reader=self._reader,
            is_serving=lambda: self.migration.serving,
            authenticator=self.public.authenticator,
            operators=self._admin.authenticator,
        )
        most = share_of_clients(NUM_DOORS)
        most = most if limits.max_connections is None else min(most, limits.max_connections)
        connections = Connections(
            ConnectionLimits(max_connections=most), self.metrics.registry, self.public.authenticator.connections
        )
        self._http = HttpServer(make_app(front), connections, self.public.http_context())
        try:
            await self._http.start(self.config.host, config.port)
        except OSError as error:
            raise why_not_bound(self.config.host, config.port, "http_port") from error
        self.http_port = self._http.port

    def _register(self, server: Any, admin_server: Any) -> InferenceService:
        admission = Admission(self.config.max_queue_len)
        speculation, scale = DesiredSpeculation(), DesiredScale()
        self.desired_state = DesiredState(
            self.migration,
            speculation,
            admission,
            scale,
            self._clock,
            secrets.randbits(64) or 1,
            self.config.secret.desired_state_key(),
        )
        inference = InferenceService(
            model=self._model,
            host=self.config.host,
            request_timeout_s=self.config.request_timeout_s,
            admission=admission,
            members=self.members,
            attempts=self._attempts(),
            metrics=self.metrics,
            clock=self._clock,
            admission_queue=self._admission_queue,
            max_prompt_len=self.config.security.limits.max_prompt_tokens,
            tracer=self._tracer,
            log_requests=self.config.log_requests,
            shutdown=self.shutdown,
            settling=self._settling,
        )
        starting = StartingWorkers(self.members, self._clock)
        admin = AdminService(
            model=self._model.name,
            members=self.members,
            starting=starting,
            refusals=self.refusals,
            channels=self._channels,
            metrics=self.metrics,
            admission=admission,
            speculation=speculation,
            scale=scale,
            migration=self.migration,
            retries=self.retries,
            clock=self._clock,
        )
        self.public.check_num_bytes = inference.check_num_bytes
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, admin_server)
        on_other = self.security_metrics.refused.labels("worker_name").inc
        membership = MembershipService(
            self.members, starting, self._model.name, speculation, self.desired_state, on_other
        )
        worker_pb2_grpc.add_MembershipServicer_to_server(membership, admin_server)
        for listener in self._listeners:
            names = [SERVICES["Inference"]] if listener is self.public else []
            names += [SERVICES["Admin"], MEMBERSHIP] if listener is self._admin else []
            health_pb2_grpc.add_HealthServicer_to_server(self._health, listener.server)
            reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), listener.server)
        return inference

    def _attempts(self) -> AttemptsContext:
        migration, admission_queue = self.migration, self._admission_queue
        return AttemptsContext(
            policy=self._policy,
            in_flight_tracker=migration.in_flight_tracker,
            refusals=self.refusals,
            channels=self._channels,
            clock=self._clock,
            spawn=self._background.spawn,
            limits=migration.limits,
            budget=self.retries,
            on_retry=self.metrics.handoff_retries.inc,
            on_retry_refused=self.metrics.retries_refused.inc,
            on_migration=migration.migrated,
            on_finished=migration.finished,
            admit=migration.admit,
            num_queued_tokens=(lambda: 0) if admission_queue is None else admission_queue.num_queued_tokens,
        )

    async def _tick(self) -> None:
        migration = self.migration
        parts = [self._expire, migration.drains.tick, migration.in_flight_requests.tick]
        parts += [self.desired_state.tick, self.canaries.tick]
        if self._admission_queue is not None:
            parts.append(self._admission_queue.look)
        if self._policy.name == PREFIX:
            parts.append(self._feed.follow)
        if self._settling is not None:
            settling = self._settling
            parts.append(lambda: settling.look(self._clock.now_s()))
        parts += [listener.tick for listener in self._listeners]
        due_s = 0.0
        parts.insert(0, lambda: self.metrics.event_loop_lag.observe(max(0.0, self._clock.now_s() - due_s)))
        while True:
            due_s = self._clock.now_s() + TICK_S
            await asyncio.sleep(TICK_S)
            for part in parts:
                try:
                    part()
                except Exception as error:  # noqa: BLE001  the next tick may succeed, and other parts go on
                    as_internal("a part of the router's tick", error)
            try:
                await self._set_health()
            except Exception as error:  # noqa: BLE001  likewise
                as_internal("the router's health", error)

    def _expire(self) -> None:
        for incarnation in self.members.expire(self.desired_state.ended()):
            about = {"worker_id": incarnation.worker_id, "epoch": f"{incarnation.epoch:016x}"}
            log.warning("worker %s (epoch %016x) is lost: silent too long", *astuple(incarnation), extra=about)

    async def _set_health(self) -> None:
        serving = self.migration.serving
        if serving == self._serving:
            return
        self._serving = serving
        state = health_pb2.HealthCheckResponse
        for service in ("", inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name):
            await self._health.set(service, state.SERVING if serving else state.NOT_SERVING)


def _log_fitness(incarnation: Incarnation, why: str) -> None:
    about = {"worker_id": incarnation.worker_id, "epoch": f"{incarnation.epoch:016x}"}
    if why:
        log.warning(
            "worker %s (epoch %016x) is unfit: it reports and answers nothing; %s",
            *astuple(incarnation),
            why,
            extra=about,
        )
    else:
        log.warning("worker %s (epoch %016x) is fit again", *astuple(incarnation), extra=about)
