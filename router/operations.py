"""The part of `baton.v1.Admin` that empties workers and pardons requests; every decision is `migration`'s."""

from typing import Any

import grpc
import grpc.aio

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.proto import admin_pb2, admin_pb2_grpc, wire
from baton.router.attempt.migration import Migration
from baton.router.placement.members import Member, Members

Context = grpc.aio.ServicerContext[Any, Any]


class Operations(admin_pb2_grpc.AdminServicer):
    """Drain and ClearQuarantine."""

    def __init__(self, members: Members, migration: Migration, clock: Clock) -> None:
        self._roster = members
        self._migration = migration
        self._now_s = clock.now_s

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        """Give a worker nothing new; after the grace its streams move on. Asked again: how far that is."""
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
        """Take a request that was blamed for deaths again, or all of them."""
        return admin_pb2.ClearQuarantineReply(num_cleared=self._migration.poison_detector.clear(request.fingerprint))

    def describe(self, member: Member, status: admin_pb2.WorkerStatus) -> admin_pb2.WorkerStatus:
        """A worker's status, with what is known here."""
        status.draining = member.incarnation in self._migration.drains.incarnations()
        status.num_streams = self._migration.in_flight_requests.num_at(member.incarnation)
        canary = self._migration.in_flight_tracker.canary
        status.unfit = member.alive and canary.is_unfit(member.incarnation)
        status.unfit_reason = canary.why_unfit(member.incarnation) if status.unfit else ""
        return status

    def quarantined(self) -> list[admin_pb2.Quarantined]:
        """Requests that are refused."""
        now_s = self._now_s()
        return [
            admin_pb2.Quarantined(fingerprint=one.fingerprint, workers=one.workers, left_s=one.until_s - now_s)
            for one in self._migration.poison_detector.blamed(now_s)
        ]

    def _is_draining(self, worker_id: str) -> bool:
        return any(incarnation.worker_id == worker_id for incarnation in self._migration.drains.incarnations())
