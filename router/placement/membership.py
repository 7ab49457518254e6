"""Implements `baton.v1.Membership`: passes workers' reports to the tables of workers, which make every decision."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import BatonError, ModelNotFound, PermissionDenied
from baton.core.inside import worker_name
from baton.proto import wire, worker_pb2, worker_pb2_grpc
from baton.proto.inside import caller_name
from baton.proto.roles import roles_of
from baton.router.desired_state import DesiredSpeculation, DesiredState
from baton.router.placement.members import DECODE, Members
from baton.router.placement.starting import StartingWorkers

log = logging.getLogger(__name__)


class MembershipService(worker_pb2_grpc.MembershipServicer):
    """Accepts reports of workers, each under its own name only; heartbeats of those that serve this model.

    Args:
        members: the table of workers.
        starting: the table of those that start.
        model: name of the served model.
        speculation, desired_state: what workers are told in replies.
        on_other: called when a worker reports under another's name.
    """

    def __init__(
        self,
        members: Members,
        starting: StartingWorkers,
        model: str,
        speculation: DesiredSpeculation,
        desired_state: DesiredState,
        on_other: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_other = on_other
        self._desired_state = desired_state
        self._members = members
        self._starting = starting
        self._speculation = speculation
        self._model = model

    async def Heartbeat(
        self, request: worker_pb2.WorkerState, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.HeartbeatReply:
        """Take in one heartbeat."""
        try:
            self._check_name(request, roles_of(context))
            if request.model != self._model:
                message = f"{request.worker_id} serves {request.model!r}, this router {self._model!r}"
                raise ModelNotFound(message, model=request.model)
            kept = request.desired_state if request.HasField("desired_state") else None
            request.ClearField("desired_state")
            known = self._members.heartbeat(request)
            if kept is not None:
                self._desired_state.adopt(kept, request.worker_id)
            desired = self._speculation.mode if request.role == DECODE else None
            reply = worker_pb2.HeartbeatReply(known=known, speculation=desired)
            self._desired_state.answer(request, reply)
            return reply
        except BatonError as error:
            await wire.abort_with(context, error)

    async def Starting(
        self, request: worker_pb2.StartingWorker, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.StartingReply:
        """Take in what a worker's start does."""
        try:
            self._check_name(request, roles_of(context))
            self._starting.report(request)
            return worker_pb2.StartingReply()
        except BatonError as error:
            await wire.abort_with(context, error)

    def _check_name(self, state: worker_pb2.WorkerState | worker_pb2.StartingWorker, certified: frozenset[str]) -> None:
        named, caller = worker_name(state.role, state.worker_id), caller_name()
        if certified and state.role not in certified:
            caller = f"{caller}, whose certificate is one of {', '.join(sorted(certified))[:200]},"
        if named != caller:
            self._on_other()
            log.warning("refused (worker_name): %s reports as %s", caller or "a caller without a name", named[:200])
            raise PermissionDenied(f"{caller} reports as {named[:200]}", worker_id=state.worker_id, role=state.role)
