"""A prefill worker that computes nothing: one prompt after the other, at so many tokens a second.

All of it runs on the event loop of the worker's gRPC host.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from baton.core.clock import MonotonicClock
from baton.core.errors import Overloaded, RequestCancelled
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.stream_mux_wire import prefill_frame
from baton.proto.wire import request_from_prefill
from baton.worker.stream import EventSink
from baton.worker.stream_mux import StreamMux
from baton.worker.write_coalescer import WriteCoalescer

TOKEN: Final = 300  # the first of those that an answer consists of
NUM_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """What it can do.

    Attributes:
        tokens_per_s: of prompts; 0 is no limit.
        first_delay_s: of each first token, beside that.
        max_queue_len: requests; more are refused.
    """

    tokens_per_s: float
    first_delay_s: float
    max_queue_len: int


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerationRequest
    kv_address: str
    stream: EventSink[worker_pb2.PrefillEvent]
    received_s: float
    begun_s: float = 0.0
    given_up: bool = False
    keys: list[AttemptKey] = field(default_factory=list)


class EchoPrefill(worker_pb2_grpc.PrefillServicer):
    """Also the `Role` of its stream muxes."""

    def __init__(self, pace: PrefillPace, epoch: int) -> None:
        self._pace = pace
        self._epoch = epoch
        self._clock = MonotonicClock()
        self._write_coalescer = WriteCoalescer()
        self._jobs: dict[AttemptKey, _Job] = {}  # queued, or computing
        self._queue: deque[_Job] = deque()
        self._queued_len = 0
        self._computing: _Job | None = None
        self._free_s = 0.0
        self._num_finished = 0
        self._incoming_transfers: dict[str, asyncio.Task[asyncio.StreamWriter]] = {}

    async def RunAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """All streams of a router."""
        await StreamMux(self, prefill_frame, self._write_coalescer, self._epoch).serve(context)

    def read(self, message: worker_pb2.PrefillRequest) -> GenerationRequest:
        """See `worker.stream_mux.Role`."""
        return request_from_prefill(message, self._clock.now_s())

    def check(self, attempt: GenerationRequest) -> None:
        """Nothing is wrong with anything."""

    def begin(
        self,
        message: worker_pb2.PrefillRequest,
        attempt: GenerationRequest,
        stream: EventSink[worker_pb2.PrefillEvent],
    ) -> None:
        """Queue a prompt.

        Raises:
            Overloaded: the queue is full.
        """
        if len(self._jobs) >= self._pace.max_queue_len:
            raise Overloaded("the echo worker is full", limit=self._pace.max_queue_len)
        job = _Job(attempt, message.decode.kv_address, stream, self._clock.now_s())
        self._jobs[attempt.key] = job
        self._queue.append(job)
        self._queued_len += attempt.prompt_len
        self._incoming(job.kv_address)
        self._next()

    def cancel(self, key: AttemptKey, stream: EventSink[worker_pb2.PrefillEvent]) -> None:
        """Nobody waits for it."""
        job = self._jobs.get(key)
        if job is not None and job.stream is stream:
            job.given_up = True
            if job is not self._computing:
                self._forget(job)
            stream.end(RequestCancelled("cancelled"))

    def inventory(self, num_blocks: int) -> worker_pb2.Inventory:
        """What it holds. Any thread."""
        return worker_pb2.Inventory(
            num_requests_waiting=max(0, len(self._jobs) - 1),
            num_requests_running=min(1, len(self._jobs)),
            num_blocks=num_blocks,
            num_blocks_free=num_blocks,
            num_requests_finished=self._num_finished,
            num_prefill_tokens_queued=self._queued_len,
            prefill_tokens_per_s=self._pace.tokens_per_s,
            full_prefill_tokens_per_s=self._pace.tokens_per_s,
        )

    def _next(self) -> None:
        while self._computing is None and self._queue:
            job = self._queue.popleft()
            if job.given_up:
                continue
            self._computing = job
            job.begun_s = now_s = self._clock.now_s()
            if not self._pace.tokens_per_s:
                self._computed()
                continue
            # From when it could have begun, so that a late timer costs no capacity.
            begin_s = max(self._free_s, job.received_s)
            self._free_s = begin_s + job.request.prompt_len / self._pace.tokens_per_s
            asyncio.get_running_loop().call_later(max(0.0, self._free_s - now_s), self._timer)

    def _timer(self) -> None:
        self._computed()
        self._next()

    def _computed(self) -> None:
        job, self._computing = self._computing, None
        assert job is not None
        self._forget(job)
        if job.given_up:
            return
        if self._pace.first_delay_s:
            asyncio.get_running_loop().call_later(self._pace.first_delay_s, self._answer, job)
        else:
            self._answer(job)

    def _forget(self, job: _Job) -> None:
        if self._jobs.pop(job.request.key, None) is not None:
            self._queued_len -= job.request.prompt_len

    def _answer(self, job: _Job) -> None:
        now_s, request = self._clock.now_s(), job.request
        is_last = request.num_forced + 1 >= request.sampling.max_tokens
        event = worker_pb2.PrefillEvent()
        first = event.first_token
        first.token = TOKEN + request.num_forced % NUM_TOKENS
        first.index = request.num_forced
        first.finish_reason = "length" if is_last else ""
        first.queue_ms = 1e3 * (job.begun_s - job.received_s)
        first.prefill_ms = 1e3 * (now_s - job.begun_s)
        first.sent_ns, first.received_ns = int(1e9 * now_s), int(1e9 * job.received_s)
        if not is_last:
            self._land(job)
        job.stream.emit(event)
        job.stream.emit(worker_pb2.PrefillEvent(done=worker_pb2.PrefillDone(handed_off=not is_last)))
        job.stream.end()
        self._num_finished += 1

    def _incoming(self, kv_address: str) -> "asyncio.Task[asyncio.StreamWriter]":
        found = self._incoming_transfers.get(kv_address)
        if found is None or (found.done() and (found.exception() is not None or found.result().is_closing())):
            found = self._incoming_transfers[kv_address] = asyncio.create_task(_connect(kv_address))
        return found

    def _land(self, job: _Job) -> None:
        line = f"{job.request.key.request_id} {job.request.key.attempt}\n".encode()

        def send(connecting: "asyncio.Task[asyncio.StreamWriter]") -> None:
            if not connecting.cancelled() and connecting.exception() is None:
                connecting.result().write(line)

        connecting = self._incoming(job.kv_address)
        if connecting.done():
            send(connecting)
        else:
            connecting.add_done_callback(send)


async def _connect(kv_address: str) -> asyncio.StreamWriter:
    host, _, port = kv_address.removeprefix("tcp://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    return writer
