"""`baton.v1.Membership`: workers' heartbeats into the table of members; every decision is the table's."""

from typing import Any

import grpc
import grpc.aio

from baton.core.errors import BatonError, ModelNotFound
from baton.proto import wire, worker_pb2, worker_pb2_grpc
from baton.router.members import DECODE, Members
from baton.router.speculation import SpeculationWish
from baton.router.wishes import Wishes


class MembershipService(worker_pb2_grpc.MembershipServicer):
    """Takes reports of workers that serve this model; refuses others."""

    def __init__(self, members: Members, model: str, speculation: SpeculationWish, wishes: Wishes) -> None:
        self._wishes = wishes
        self._members = members
        self._speculation = speculation
        self._model = model

    async def Heartbeat(
        self, request: worker_pb2.WorkerState, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.HeartbeatReply:
        """Take one report."""
        try:
            if request.model != self._model:
                message = f"{request.worker_id} serves {request.model!r}, this router {self._model!r}"
                raise ModelNotFound(message, model=request.model)
            kept = request.wishes if request.HasField("wishes") else None
            request.ClearField("wishes")
            known = self._members.heartbeat(request)
            if kept is not None:
                self._wishes.adopt(kept)
            wish = self._speculation.mode if request.role == DECODE else None
            reply = worker_pb2.HeartbeatReply(known=known, speculation=wish)
            self._wishes.answer(request, reply)
            return reply
        except BatonError as error:
            await wire.abort_with(context, error)
