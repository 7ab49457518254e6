"""The prefill worker's RPCs: bytes in, events out; every decision is the worker's."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.kvtransfer.push import DecodePeer
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.wire import abort_with, request_from_prefill
from baton.worker.stream import EventStream


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """`baton.v1.Prefill` over one PrefillWorker."""

    def __init__(self, worker: PrefillWorker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    async def Run(self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Prefill one attempt. A stream that the router drops cancels it."""
        stream: EventStream[worker_pb2.PrefillEvent] = EventStream(asyncio.get_running_loop())
        try:
            attempt = request_from_prefill(request, self._clock.now_s())
            peer = DecodePeer(request.decode.worker_id, request.decode.kv_address, request.decode.epoch)
            if attempt.sampling.grammar is not None:
                await asyncio.to_thread(self._worker.check, attempt)  # other streams go on while it compiles
            self._worker.submit(attempt, peer, stream)
        except BatonError as error:
            await abort_with(context, error)
        try:
            async for event in stream.events():
                await context.write(event)
        except BatonError as error:
            await abort_with(context, error)
        finally:
            if not stream.ended:
                self._worker.cancel(attempt.key, stream)
