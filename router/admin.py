"""Implements `baton.v1.Admin` at the router: status of the router and its workers, and operators' commands."""

import asyncio
import logging
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.build import installed_version
from baton.core.clock import Clock
from baton.core.errors import BatonError, InvalidRequest, WorkerLost
from baton.proto import admin_pb2, admin_pb2_grpc, wire
from baton.router.admission.admission import Admission
from baton.router.attempt.channels import Channels
from baton.router.attempt.migration import Migration, RetryBudget
from baton.router.desired_state import DesiredScale, DesiredSpeculation
from baton.router.metrics import RouterMetrics
from baton.router.placement.local_prefill import NEVER
from baton.router.placement.members import DECODE, MAX_WORKERS, Member, Members
from baton.router.placement.policy import require
from baton.router.placement.refusals import Refusals
from baton.router.placement.starting import StartingWorkers

Context = grpc.aio.ServicerContext[Any, Any]


class Operations(admin_pb2_grpc.AdminServicer):
    """Implements Drain and ClearQuarantine, and adds the router's own view to a worker's status."""

    def __init__(self, members: Members, migration: Migration, clock: Clock) -> None:
        self._roster = members
        self._migration = migration
        self._now_s = clock.now_s

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        """Stop placing requests on a worker and migrate its streams after the grace period; `undo` ends the drain.

        Called again without a grace period for a draining worker, it only reports progress.
        """
        migration = self._migration
        try:
            if request.undo:
                migration.drains.end(request.worker_id)
            elif request.HasField("grace_ms") or not self._is_draining(request.worker_id):
                grace_s = request.grace_ms / 1e3 if request.HasField("grace_ms") else migration.config.drain_grace_s
                migration.drains.begin(request.worker_id, grace_s)
        except BatonError as error:
            await wire.abort_with(context, error)
        (member,) = [one for one in self._roster.all() if one.state.worker_id == request.worker_id]
        return admin_pb2.DrainReply(
            draining=self._is_draining(request.worker_id),
            num_streams=migration.in_flight_requests.num_at(member.incarnation),
        )

    async def ClearQuarantine(
        self, request: admin_pb2.ClearQuarantineRequest, context: Context
    ) -> admin_pb2.ClearQuarantineReply:
        """Accept again a request that was blamed for workers' deaths, or all such requests."""
        return admin_pb2.ClearQuarantineReply(num_cleared=self._migration.poison_detector.clear(request.fingerprint))

    def describe(self, member: Member, status: admin_pb2.WorkerStatus) -> admin_pb2.WorkerStatus:
        """Add to a worker's status what the router knows: drain, open streams, fitness."""
        status.draining = member.incarnation in self._migration.drains.incarnations()
        status.num_streams = self._migration.in_flight_requests.num_at(member.incarnation)
        canary = self._migration.in_flight_tracker.canary
        status.unfit = member.alive and canary.is_unfit(member.incarnation)
        status.unfit_reason = canary.why_unfit(member.incarnation) if status.unfit else ""
        return status

    def quarantined(self) -> list[admin_pb2.Quarantined]:
        """Return the requests that the router refuses because workers died of them."""
        now_s = self._now_s()
        return [
            admin_pb2.Quarantined(fingerprint=one.fingerprint, workers=one.workers, left_s=one.until_s - now_s)
            for one in self._migration.poison_detector.blamed(now_s)
        ]

    def _is_draining(self, worker_id: str) -> bool:
        return any(incarnation.worker_id == worker_id for incarnation in self._migration.drains.incarnations())


INVENTORY_TIMEOUT_S: Final = 1.0

log = logging.getLogger(__name__)


class AdminService(Operations):
    """Serves status from heartbeats, a fresh inventory from the workers, and operators' changes."""

    def __init__(
        self,
        *,
        model: str,
        members: Members,
        starting: StartingWorkers,
        refusals: Refusals,
        channels: Channels,
        metrics: RouterMetrics,
        admission: Admission,
        speculation: DesiredSpeculation,
        scale: DesiredScale,
        migration: Migration,
        retries: RetryBudget,
        clock: Clock,
    ) -> None:
        super().__init__(members, migration, clock)
        self._model = model
        self._members = members
        self._starting = starting
        self._refusals = refusals
        self._channels = channels
        self._metrics = metrics
        self._retries = retries
        self._admission = admission
        self._speculation = speculation
        self._clock = clock
        self._local = migration.in_flight_tracker.local
        self._start_s = clock.now_s()
        self._version = installed_version()  # read now: an upgrade replaces the files meanwhile
        self._scale = scale

    async def Status(
        self, request: admin_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.StatusReply:
        """Report everything the router has heard, dead workers included."""
        num_failed, num_clients = self._metrics.ended_with_errors()
        return admin_pb2.StatusReply(
            model=self._model,
            version=self._version,
            uptime_s=self._clock.now_s() - self._start_s,
            num_requests_running=self._admission.num_in_flight,
            num_requests_finished=self._metrics.total("requests_finished"),
            num_requests_failed=num_failed,
            num_requests_refused=num_clients,
            num_tokens_streamed=self._metrics.total("generation_tokens"),
            workers=[self._status(member) for member in (*self._members.all(), *self._members.gone())],
            starting=self._starting.all(),
            refused_pairs=[
                admin_pb2.RefusedPair(
                    prefill_worker=refusal.prefill.worker_id,
                    decode_worker=refusal.decode.worker_id,
                    reason=refusal.reason,
                )
                for refusal in self._refusals.all()
            ],
            num_handoff_retries=self._metrics.total("handoff_retries"),
            num_retries_refused=self._retries.num_refused,
            retry_tokens=self._retries.tokens(self._clock.now_s()),
            num_migrations=self._metrics.total("migrations"),
            quarantined=self.quarantined(),
            max_queue_len=self._admission.limit or 0,
            scale=self._scale.request,
            local_prefill=admin_pb2.LocalPrefill(
                mode=self._local.mode,
                num_choices={f"{path}: {why}": num for (path, why), num in self._local.choices.items()},
                only_way=not self._local.has_prefill() and self._local.suffices(self._migration.drains.live(DECODE)),
            ),
        )

    async def Inventory(
        self, request: admin_pb2.InventoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.InventoryReply:
        """Report what every live worker holds right now.

        A live worker that does not answer is shown as it was last heard, and as not alive. A dead worker is left out:
        its process holds nothing.
        """
        live = [member for member in self._members.all() if member.alive]
        asking = [self._ask(member, self._channels.to(member)) for member in live]
        return admin_pb2.InventoryReply(workers=await asyncio.gather(*asking))

    async def SetSpeculation(
        self, request: admin_pb2.SetSpeculationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.SetSpeculationReply:
        """Set the speculation mode at every live decode worker, now if it answers, else with its heartbeats."""
        live = self._members.live(DECODE)
        try:
            require(live, DECODE)
            self._speculation.set_mode(request.mode, [member.state.num_draft_tokens for member in live])
        except BatonError as error:
            await wire.abort_with(context, error)
        telling = [self._tell(member, self._channels.to(member), request) for member in live]
        return admin_pb2.SetSpeculationReply(workers=await asyncio.gather(*telling))

    async def Restart(
        self, request: admin_pb2.RestartRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.RestartReply:
        """Forward the restart to the worker."""
        try:
            return await self._restart(request)
        except BatonError as error:
            await wire.abort_with(context, error)

    async def SetAdmission(
        self, request: admin_pb2.SetAdmissionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.SetAdmissionReply:
        """Set how many requests the router holds from now on."""
        admission = self._admission
        previous, admission.limit = admission.limit, request.max_queue_len or admission.default
        log.warning("the router holds at most %s requests, not %s", admission.limit or "any", previous or "any")
        return admin_pb2.SetAdmissionReply(
            max_queue_len=admission.limit or 0, previous=previous or 0, num_in_flight=admission.num_in_flight
        )

    async def Scale(
        self, request: admin_pb2.ScaleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ScaleReply:
        """Store the requested number of workers, for the process that starts workers to read."""
        if not request.num_decode or request.num_prefill + request.num_decode > MAX_WORKERS:
            message = f"at least one decode worker, and at most {MAX_WORKERS} workers in all"
            await wire.abort_with(context, InvalidRequest(message, field="num_decode"))
        if not request.num_prefill and self._local.mode == NEVER:
            message = "a prefill worker is needed: with --local-prefill never decode workers compute no prompts"
            await wire.abort_with(context, InvalidRequest(message, field="num_prefill"))
        log.warning("there should be %d prefill and %d decode workers", request.num_prefill, request.num_decode)
        self._scale.request = request
        self._members.dismiss_gone()
        return admin_pb2.ScaleReply()

    async def _restart(self, request: admin_pb2.RestartRequest) -> admin_pb2.RestartReply:
        worker_id = request.worker_id
        member = next((member for member in self._members.all() if member.state.worker_id == worker_id), None)
        if member is None:
            raise InvalidRequest(f"no worker {worker_id[:200]!r} is known", field="worker_id")
        if member.state.epoch != request.epoch:
            return admin_pb2.RestartReply(ending=False)
        if not member.alive:
            message = f"{worker_id} is silent and hears nothing; end its process on its node"
            raise WorkerLost(message, worker_id=worker_id)
        stub = admin_pb2_grpc.AdminStub(self._channels.to(member))
        reply: admin_pb2.RestartReply = await wire.reply_of(stub.Restart(request, timeout=INVENTORY_TIMEOUT_S))
        return reply

    async def _tell(
        self, member: Member, channel: grpc.aio.Channel, request: admin_pb2.SetSpeculationRequest
    ) -> admin_pb2.WorkerSpeculation:
        worker_id = member.state.worker_id
        stub = admin_pb2_grpc.AdminStub(channel)
        try:
            reply = await wire.reply_of(stub.SetSpeculation(request, timeout=INVENTORY_TIMEOUT_S))
        except BatonError as error:
            return admin_pb2.WorkerSpeculation(
                worker_id=worker_id, speculation=member.state.speculation, error=error.message
            )
        speculation = reply.workers[0].speculation if reply.workers else member.state.speculation
        return admin_pb2.WorkerSpeculation(worker_id=worker_id, speculation=speculation)

    async def _ask(self, member: Member, channel: grpc.aio.Channel) -> admin_pb2.WorkerStatus:
        stub = admin_pb2_grpc.AdminStub(channel)
        try:
            reply = await wire.reply_of(stub.Inventory(admin_pb2.InventoryRequest(), timeout=INVENTORY_TIMEOUT_S))
        except BatonError:
            status = self._status(member)
            status.alive = False
            return status
        status = self._status(member)
        if reply.workers:
            status.state.CopyFrom(reply.workers[0].state)
        return status

    def _status(self, member: Member) -> admin_pb2.WorkerStatus:
        status = admin_pb2.WorkerStatus(
            state=member.state,
            alive=member.alive,
            heartbeat_age_s=self._members.heartbeat_age_s(member),
            num_epochs=member.num_epochs,
        )
        return self.describe(member, status)
