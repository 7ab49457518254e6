"""`python -m baton.bench.router_bench.echo_worker`: a worker without a model, a plain process.

It reports heartbeats, queues, blocks and rates like a real worker, and answers at a given pace. It moves no KV: a
prefill worker tells the decode worker over a TCP connection that a prompt has arrived. It prints `{"address": ...}` on
stdout once it serves, and ends when its stdin closes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from baton.core.clock import MonotonicClock, clock_id
from baton.core.errors import Overloaded, RequestCancelled
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.telemetry.logs import configure_logging
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.stream_mux_wire import decode_frame, prefill_frame
from baton.proto.wire import request_from_attend, request_from_prefill
from baton.worker.host import WorkerHost
from baton.worker.stream_mux import EventSink, StreamMux, WriteCoalescer

TOKEN: Final = 300  # the first token of an answer
NUM_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class EchoPace:
    """Capacity of a prefill worker.

    Attributes:
        tokens_per_s: prompt tokens per second; 0: no limit.
        first_delay_s: further delay of each first token.
        max_queue_len: queued requests; further ones are refused.
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
    """The prefill service, which is also the `StreamRole` of its stream multiplexers."""

    def __init__(self, pace: EchoPace, epoch: int) -> None:
        self._pace = pace
        self._epoch = epoch
        self._clock = MonotonicClock()
        self._write_coalescer = WriteCoalescer()
        self._jobs: dict[AttemptKey, _Job] = {}  # queued or computing
        self._queue: deque[_Job] = deque()
        self._queued_len = 0
        self._computing: _Job | None = None
        self._free_s = 0.0
        self._num_finished = 0
        self._incoming_transfers: dict[str, asyncio.Task[asyncio.StreamWriter]] = {}

    async def RunAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serve all streams of a router."""
        await StreamMux(self, prefill_frame, self._write_coalescer, self._epoch).serve(context)

    def read(self, message: worker_pb2.PrefillRequest) -> GenerationRequest:
        """See `worker.stream_mux.StreamRole`."""
        return request_from_prefill(message, self._clock.now_s())

    def check(self, attempt: GenerationRequest) -> None:
        """Accept every request."""

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
        """Stop a request that the router no longer waits for."""
        job = self._jobs.get(key)
        if job is not None and job.stream is stream:
            job.given_up = True
            if job is not self._computing:
                self._forget(job)
            stream.end(RequestCancelled("cancelled"))

    def inventory(self, num_blocks: int) -> worker_pb2.Inventory:
        """Report what it holds; from any thread."""
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
            # Count from when it could have begun, so that a late timer costs no capacity.
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


STEP_BOUNDS: Final = (0.001, 0.01, 0.1, 1.0)
MAX_LANDED: Final = 8192  # prompts that arrived before the router subscribed


@dataclass(frozen=True, slots=True)
class DecodePace:
    """Capacity of a decode worker.

    Attributes:
        step_s: time between two tokens of a stream.
        max_num_seqs: streams that run at once.
        num_blocks: blocks that they share; a stream takes what its prompt and answer need.
        block_size: positions of a block.
        max_queue_len: queued streams; further ones are refused.
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
    """The decode service, which is also the `StreamRole` of its stream multiplexers."""

    def __init__(self, pace: DecodePace, epoch: int) -> None:
        self._pace = pace
        self._epoch = epoch
        self._clock = MonotonicClock()
        self._write_coalescer = WriteCoalescer()
        self._sequences: dict[AttemptKey, _Sequence] = {}
        self._landed: dict[AttemptKey, None] = {}  # prompts that arrived before they were subscribed to
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
        """Address at which prefill workers report arrived prompts."""
        return f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def listen(self) -> None:
        """Listen for these reports; call it on the event loop."""
        self._server = asyncio.create_task(asyncio.start_server(self._hear, sock=self._socket))

    async def AttendAll(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serve all streams of a router."""
        await StreamMux(self, decode_frame, self._write_coalescer, self._epoch).serve(context)

    def read(self, message: worker_pb2.AttendRequest) -> GenerationRequest:
        """See `worker.stream_mux.StreamRole`."""
        return request_from_attend(message, self._clock.now_s())

    def check(self, attempt: GenerationRequest) -> None:
        """Accept every request."""

    def begin(
        self, message: worker_pb2.AttendRequest, attempt: GenerationRequest, stream: EventSink[worker_pb2.DecodeEvent]
    ) -> None:
        """Wait for an incoming transfer.

        Raises:
            Overloaded: there are too many streams.
        """
        if len(self._sequences) >= self._pace.max_queue_len:
            raise Overloaded("the echo worker is full", limit=self._pace.max_queue_len)
        self._sequences[attempt.key] = _Sequence(attempt, stream)
        if attempt.key in self._landed:
            del self._landed[attempt.key]
            self._land(attempt.key)

    def cancel(self, key: AttemptKey, stream: EventSink[worker_pb2.DecodeEvent]) -> None:
        """Stop a stream that the router no longer reads."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.stream is stream:
            self._forget(sequence)
            stream.end(RequestCancelled("cancelled"))

    def inventory(self, num_blocks: int) -> worker_pb2.Inventory:
        """Report what it holds; from any thread."""
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


BLOCK_SIZE = 16


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.router_bench.echo_worker", description="A worker without a model."
    )
    add = parser.add_argument
    add("--role", choices=("prefill", "decode"), required=True)
    add("--worker-id", required=True)
    add("--router", required=True, help="address of the router's port for workers")
    add("--model-name", default="echo")
    add("--max-model-len", type=int, default=4096)
    add("--max-queue-len", type=int, default=8192)
    add("--max-num-seqs", type=int, default=8192, help="sequences it decodes at once")
    add("--num-blocks", type=int, default=1 << 20, help=f"of {BLOCK_SIZE} positions")
    add("--tokens-per-s", type=float, default=0.0, help="prompt tokens computed; 0: without delay, and not reported")
    add("--first-delay-s", type=float, default=0.0, help="of each first token, beside the computing")
    add("--step-s", type=float, default=0.02, help="between two tokens of a stream")
    return parser.parse_args(arguments)


def main() -> int:
    """Serve until stdin closes."""
    configure_logging("text", {"role": "echo"})
    options = parse()
    epoch = secrets.randbits(63) or 1
    served: EchoPrefill | EchoDecode
    if options.role == "prefill":
        pace = EchoPace(options.tokens_per_s, options.first_delay_s, options.max_queue_len)
        served = EchoPrefill(pace, epoch)
    else:
        served = EchoDecode(
            DecodePace(options.step_s, options.max_num_seqs, options.num_blocks, BLOCK_SIZE, options.max_queue_len),
            epoch,
        )
    host = WorkerHost(
        "127.0.0.1", _register(served), _state(options, served, epoch, lambda: host), options.router, _die
    )
    host.start()
    print(json.dumps({"address": host.address}), flush=True)
    while os.read(0, 4096):
        pass
    return 0


def _register(served: EchoPrefill | EchoDecode) -> Callable[[grpc.aio.Server], None]:
    def register(server: grpc.aio.Server) -> None:
        if isinstance(served, EchoPrefill):
            worker_pb2_grpc.add_PrefillServicer_to_server(served, server)
        else:
            worker_pb2_grpc.add_DecodeServicer_to_server(served, server)
            served.listen()

    return register


def _state(
    options: argparse.Namespace, served: EchoPrefill | EchoDecode, epoch: int, host: Callable[[], WorkerHost]
) -> Callable[[], worker_pb2.WorkerState]:
    def state() -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState(
            worker_id=options.worker_id,
            role=options.role,
            epoch=epoch,
            address=host().address,
            kv_address=served.kv_address if isinstance(served, EchoDecode) else "",
            model=options.model_name,
            max_model_len=options.max_model_len,
            block_size=BLOCK_SIZE,
            numerics="default",
            dtype="float32",
            kv_dtype="float32",
            max_num_seqs=options.max_num_seqs,
            inventory=served.inventory(options.num_blocks),
            clock_id=clock_id(),
        )

    return state


def _die(error: BaseException) -> None:
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
