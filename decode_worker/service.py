"""The decode worker's RPCs: bytes in, tokens out; the worker makes every decision."""

from typing import Any

import grpc.aio

from baton.core.clock import Clock
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.decode_worker.worker import DecodeWorker
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.stream_mux_wire import decode_frame
from baton.proto.wire import request_from_attend
from baton.worker.prefixes import serve_watch
from baton.worker.stream_mux import MuxedStream, StreamMux


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """`baton.v1.Decode` over one DecodeWorker."""

    def __init__(self, worker: DecodeWorker, epoch: int, clock: Clock) -> None:
        self._worker = worker
        self._epoch = epoch
        self._clock = clock

    async def AttendAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Stream all attempts of one router, one frame per step. The end of the call cancels them."""
        await StreamMux(
            _Attends(self._worker, self._clock), decode_frame, self._worker.write_coalescer, self._epoch
        ).serve(context)

    async def WatchPrefixes(
        self, request: worker_pb2.WatchPrefixesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Report to a router which prefixes are cached here, and how that changes."""
        await serve_watch(self._worker.block_log, self._epoch, request, context)


class _Attends:
    """Handles the streams of a stream multiplexer (`worker.stream_mux.StreamRole`)."""

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
        stream: MuxedStream[worker_pb2.DecodeEvent],
    ) -> None:
        self._worker.attend(
            attempt, stream, prefill_here=message.prefill_here, num_queued_tokens=message.num_queued_tokens
        )

    def cancel(self, key: AttemptKey, stream: MuxedStream[worker_pb2.DecodeEvent]) -> None:
        self._worker.cancel(key, stream)
