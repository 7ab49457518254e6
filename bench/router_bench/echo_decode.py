"""A decode worker that computes nothing: a token of each running stream at each step, in slots and blocks.

All of it runs on the event loop of the worker's gRPC host.
"""

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from baton.bench.router_bench.echo_prefill import NUM_TOKENS, TOKEN
from baton.core.clock import MonotonicClock
from baton.core.errors import Overloaded, RequestCancelled
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.stream_mux_wire import decode_frame
from baton.proto.wire import request_from_attend
from baton.worker.stream import EventSink
from baton.worker.stream_mux import StreamMux
from baton.worker.write_coalescer import WriteCoalescer

STEP_BOUNDS: Final = (0.001, 0.01, 0.1, 1.0)
MAX_LANDED: Final = 8192  # prompts that landed and nobody has attended yet


@dataclass(frozen=True, slots=True)
class DecodePace:
    """What it can do.

    Attributes:
        step_s: between two tokens of a stream.
        max_num_seqs: streams that run at once.
        num_blocks: that they share; a stream takes what its prompt and answer need.
        block_size: positions.
        max_queue_len: streams; more are refused.
    """

    step_s: float
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_queue_len: int


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GenerationRequest
    stream: EventSink[worker_pb2.DecodeEvent]
    landed_s: float = 0.0
    num_blocks: int = 0
    num_emitted: int = 0


class EchoDecode(worker_pb2_grpc.DecodeServicer):
    """Also the `Role` of its stream muxes."""

    def __init__(self, pace: DecodePace, epoch: int) -> None:
        self._pace = pace
        self._epoch = epoch
        self._clock = MonotonicClock()
        self._write_coalescer = WriteCoalescer()
        self._sequences: dict[AttemptKey, _Sequence] = {}
        self._landed: dict[AttemptKey, None] = {}  # before they were attended
        self._ready: deque[_Sequence] = deque()
        self._running: dict[_Sequence, None] = {}
        self._num_blocks_free = pace.num_blocks
        self._next_s = 0.0
        self._stepping = False
        self._step_counts = [0] * (len(STEP_BOUNDS) + 1)
        self._num_finished = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._server: asyncio.Task[asyncio.Server] | None = None

    @property
    def kv_address(self) -> str:
        """Where prefill workers say what has landed."""
        return f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def listen(self) -> None:
        """Hear them; on the event loop."""
        self._server = asyncio.create_task(asyncio.start_server(self._hear, sock=self._socket))

    async def AttendAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """All streams of a router."""
        await StreamMux(self, decode_frame, self._write_coalescer, self._epoch).serve(context)

    def read(self, message: worker_pb2.AttendRequest) -> GenerationRequest:
        """See `worker.stream_mux.Role`."""
        return request_from_attend(message, self._clock.now_s())

    def check(self, attempt: GenerationRequest) -> None:
        """Nothing is wrong with anything."""

    def begin(
        self, message: worker_pb2.AttendRequest, attempt: GenerationRequest, stream: EventSink[worker_pb2.DecodeEvent]
    ) -> None:
        """Wait for an incoming transfer.

        Raises:
            Overloaded: too many streams are here.
        """
        if len(self._sequences) >= self._pace.max_queue_len:
            raise Overloaded("the echo worker is full", limit=self._pace.max_queue_len)
        self._sequences[attempt.key] = _Sequence(attempt, stream)
        if attempt.key in self._landed:
            del self._landed[attempt.key]
            self._land(attempt.key)

    def cancel(self, key: AttemptKey, stream: EventSink[worker_pb2.DecodeEvent]) -> None:
        """Nobody reads it."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.stream is stream:
            self._forget(sequence)
            stream.end(RequestCancelled("cancelled"))

    def inventory(self, num_blocks: int) -> worker_pb2.Inventory:
        """What it holds. Any thread."""
        num_steps = sum(self._step_counts)
        steps = worker_pb2.StepCounts(num_steps=num_steps)
        steps.step_seconds.bounds.extend(STEP_BOUNDS)
        steps.step_seconds.counts.extend(self._step_counts)
        steps.step_seconds.total = num_steps * self._pace.step_s
        for unknown in (steps.host_gap_seconds, steps.step_tokens, steps.step_sequences):
            unknown.counts.append(0)
        return worker_pb2.Inventory(
            num_requests_waiting=len(self._sequences) - len(self._running),
            num_requests_running=len(self._running),
            num_blocks=num_blocks,
            num_blocks_free=self._num_blocks_free,
            num_blocks_reserved=num_blocks - self._num_blocks_free,
            num_slots_in_use=len(self._running),
            num_requests_held=len(self._sequences),
            num_requests_finished=self._num_finished,
            steps=steps,
        )

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                request_id, attempt = line.decode().split()
                self._land(AttemptKey(request_id, int(attempt)))
        writer.close()

    def _land(self, key: AttemptKey) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            self._landed[key] = None
            if len(self._landed) > MAX_LANDED:
                del self._landed[next(iter(self._landed))]
            return
        sequence.landed_s = self._clock.now_s()
        self._ready.append(sequence)
        self._admit()

    def _admit(self) -> None:
        while self._ready and len(self._running) < self._pace.max_num_seqs:
            sequence = self._ready[0]
            request = sequence.request
            if self._sequences.get(request.key) is not sequence:
                self._ready.popleft()  # it was cancelled
                continue
            num_blocks = -(-(request.prompt_len + request.sampling.max_tokens) // self._pace.block_size)
            if num_blocks > self._num_blocks_free:
                break
            self._ready.popleft()
            sequence.num_blocks = num_blocks
            self._num_blocks_free -= num_blocks
            self._running[sequence] = None
        if self._running and not self._stepping:
            self._stepping = True
            self._schedule()

    def _schedule(self) -> None:
        now_s = self._clock.now_s()
        self._next_s = max(self._next_s + self._pace.step_s, now_s)
        asyncio.get_running_loop().call_later(self._next_s - now_s, self._step)

    def _step(self) -> None:
        self._step_counts[sum(bound < self._pace.step_s for bound in STEP_BOUNDS)] += 1
        with self._write_coalescer.hold():
            for sequence in tuple(self._running):
                self._emit(sequence)
        self._stepping = False
        self._admit()

    def _emit(self, sequence: _Sequence) -> None:
        request = sequence.request
        event = worker_pb2.DecodeEvent()
        tokens = event.tokens
        tokens.index = index = request.num_forced + 1 + sequence.num_emitted
        tokens.token_ids.append(TOKEN + index % NUM_TOKENS)
        if not sequence.num_emitted:
            tokens.start.landed_ns = int(1e9 * sequence.landed_s)
            tokens.start.step_ms = 1e3 * (self._clock.now_s() - sequence.landed_s)
        sequence.num_emitted += 1
        is_last = index + 1 >= request.sampling.max_tokens
        if is_last:
            tokens.finish_reason = "length"
            tokens.stats.num_emitted_tokens = tokens.stats.num_verify_steps = sequence.num_emitted
        sequence.stream.emit(event)
        if is_last:
            sequence.stream.end()
            self._num_finished += 1
            self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        self._sequences.pop(sequence.request.key, None)
        if self._running.pop(sequence, False) is None:
            self._num_blocks_free += sequence.num_blocks
