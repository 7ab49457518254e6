"""The decode worker's RPCs: bytes in, tokens out; every decision is the worker's."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from baton.core.clock import Clock
from baton.core.errors import as_internal
from baton.core.request import AttemptKey, GenerationRequest
from baton.decode_worker.worker import DecodeWorker
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.bundle_wire import decode_frame
from baton.proto.wire import abort_with, request_from_attend
from baton.worker.bundle import Bundle
from baton.worker.outbox import BundledStream
from baton.worker.prefix_watch import serve_watch
from baton.worker.stream import EventStream


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """`baton.v1.Decode` over one DecodeWorker."""

    def __init__(self, worker: DecodeWorker, epoch: int, clock: Clock) -> None:
        self._worker = worker
        self._epoch = epoch
        self._clock = clock

    async def Attend(self, request: worker_pb2.AttendRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Stream one attempt's tokens. A stream that the router drops cancels the attempt."""
        stream: EventStream[worker_pb2.DecodeEvent] = EventStream(asyncio.get_running_loop())
        try:
            attempt = request_from_attend(request, self._clock.now_s())
            if attempt.sampling.grammar is not None:
                await asyncio.to_thread(self._worker.check, attempt)  # other streams go on while it compiles
            self._worker.attend(attempt, stream, prefill_here=request.prefill_here)
        except Exception as error:  # noqa: BLE001  the request's boundary
            await abort_with(context, as_internal("a worker's stream", error))
        try:
            await context.write(worker_pb2.DecodeEvent(attending=worker_pb2.Attending(epoch=self._epoch)))
            async for event in stream.events():
                await context.write(event)
        except Exception as error:  # noqa: BLE001  the request's boundary
            await abort_with(context, as_internal("a worker's stream", error))
        finally:
            if not stream.ended:
                self._worker.cancel(attempt.key, stream)

    async def AttendAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Stream all attempts of one router, a frame for each step. A call that ends cancels them."""
        await Bundle(_Attends(self._worker, self._clock), decode_frame, self._worker.cork, self._epoch).serve(context)

    async def WatchPrefixes(
        self, request: worker_pb2.WatchPrefixesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Tell a router which prefixes are here, and what becomes of them."""
        await serve_watch(self._worker.block_log, self._epoch, request, context)


class _Attends:
    """What a bundle does with its streams (`worker.bundle.Role`)."""

    def __init__(self, worker: DecodeWorker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    def read(self, message: worker_pb2.AttendRequest) -> GenerationRequest:
        return request_from_attend(message, self._clock.now_s())

    def check(self, attempt: GenerationRequest) -> None:
        self._worker.check(attempt)

    def begin(
        self,
        message: worker_pb2.AttendRequest,
        attempt: GenerationRequest,
        stream: BundledStream[worker_pb2.DecodeEvent],
    ) -> None:
        self._worker.attend(attempt, stream, prefill_here=message.prefill_here)

    def cancel(self, key: AttemptKey, stream: BundledStream[worker_pb2.DecodeEvent]) -> None:
        self._worker.cancel(key, stream)
