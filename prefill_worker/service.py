"""The prefill worker's RPCs: bytes in, events out; the worker makes every decision."""

from typing import Any

import grpc.aio

from baton.core.clock import Clock
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.kvtransfer.sender.service import DecodePeer
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.stream_mux_wire import prefill_frame
from baton.proto.wire import request_from_prefill
from baton.worker.prefixes import serve_watch
from baton.worker.stream_mux import MuxedStream, StreamMux, WriteCoalescer


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """`baton.v1.Prefill` over one PrefillWorker."""

    def __init__(self, worker: PrefillWorker, clock: Clock, epoch: int) -> None:
        self._worker = worker
        self._clock = clock
        self._epoch = epoch

    async def RunAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Prefill all attempts of one router. The end of the call cancels them."""
        await StreamMux(_Runs(self._worker, self._clock), prefill_frame, WriteCoalescer(), self._epoch).serve(context)

    async def WatchPrefixes(
        self, request: worker_pb2.WatchPrefixesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Report to a router which prefixes are cached here, and how that changes."""
        await serve_watch(self._worker.block_log, self._epoch, request, context)


class _Runs:
    """Handles the streams of a stream multiplexer (`worker.stream_mux.StreamRole`)."""

    def __init__(self, worker: PrefillWorker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock

    def read(self, message: worker_pb2.PrefillRequest) -> GenerationRequest:
        return request_from_prefill(message, self._clock.now_s())

    def check(self, attempt: GenerationRequest) -> None:
        self._worker.check(attempt)

    def begin(
        self,
        message: worker_pb2.PrefillRequest,
        attempt: GenerationRequest,
        stream: MuxedStream[worker_pb2.PrefillEvent],
    ) -> None:
        self._worker.submit(attempt, _peer(message), stream)

    def cancel(self, key: AttemptKey, stream: MuxedStream[worker_pb2.PrefillEvent]) -> None:
        self._worker.cancel(key, stream)


def _peer(message: worker_pb2.PrefillRequest) -> DecodePeer:
    return DecodePeer(message.decode.worker_id, message.decode.kv_address, message.decode.epoch)
