"""Clients of a benchmark, in a process of their own: each answer's times, as its client saw them.

An open loop keeps to its timetable: a request's times count from when it should have been sent, so a client that falls
behind makes them longer and hides nothing (no coordinated omission). How far it fell behind is reported, too.
"""

import asyncio
import gc
import random
import resource
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from baton.proto import inference_pb2
from baton.proto.wire import DETAILS_KEY

METHOD: Final = "/baton.v1.Inference/Generate"
STREAMS_PER_CHANNEL: Final = 500
OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class LoadOutcome:
    """Outcome of one request.

    Attributes:
        due_s: monotonic time when it should have been sent.
        sent_s: when it was sent.
        first_s: time of its first token; 0: none.
        end_s: end of its stream.
        num_tokens: number of tokens received.
        num_chunks: number of chunks received.
        code: gRPC's name of its final status.
        has_retry_info: whether a refusal said when to retry.
        publish_ms: by the router's own stats: from the worker's first token to where it leaves the router.
        router_ms: likewise, from arrival at the router to arrival at the worker.
    """

    due_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0
    num_chunks: int = 0
    code: str = ""
    has_retry_info: bool = False
    publish_ms: float = 0.0
    router_ms: float = 0.0


@dataclass(slots=True)
class EchoLoad:
    """Observations of one client process."""

    outcomes: list[LoadOutcome] = field(default_factory=list)
    token_times: list[tuple[float, int]] = field(default_factory=list)  # (second of the clock, tokens in it)
    cpu_s: float = 0.0
    seconds: float = 0.0
    behind_p99_ms: float = 0.0


class LoadClient:
    """The client, constructed in its own process (`bench.actor.SpawnedRemote`)."""

    def __init__(self, address: str, num_channels: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="load", daemon=True).start()
        self._address = address
        self._channels: list[Any] = []
        self._held: list[Any] = []
        self._token_times: dict[int, int] = {}
        self._run(self._open(num_channels))

    def closed(self, request: bytes, concurrency: int, seconds: float) -> EchoLoad:
        """Closed loop: each of `concurrency` clients sends its next request as soon as its last has ended."""
        return self._measured(self._closed(request, concurrency, seconds))

    def timetable(self, request: bytes, rate: float, seconds: float, seed: int) -> EchoLoad:
        """Open loop: Poisson arrivals; waits for every answer."""
        rng, due_s, dues = random.Random(seed), 0.0, []
        while (due_s := due_s + rng.expovariate(rate)) < seconds:
            dues.append(due_s)
        return self._measured(self._timetable(request, dues))

    def hold(self, request: bytes, number: int) -> int:
        """Open streams and read each up to its first token; return how many are open."""
        return int(self._run(self._hold(request, number)))

    def release(self) -> None:
        """Cancel the held streams."""
        self._run(self._release())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _measured(self, work: Coroutine[Any, Any, list[LoadOutcome]]) -> EchoLoad:
        self._token_times = {}
        # A garbage collection in the client would count as the server's time; a refusal makes some 60 objects.
        gc.collect()
        gc.disable()
        before_s, begin_s = _cpu_s(), time.monotonic()
        try:
            outcomes = self._run(work)
        finally:
            gc.enable()
        behind = sorted(1e3 * (outcome.sent_s - outcome.due_s) for outcome in outcomes) or [0.0]
        return EchoLoad(
            outcomes=outcomes,
            token_times=sorted((second / 10, number) for second, number in self._token_times.items()),
            cpu_s=_cpu_s() - before_s,
            seconds=time.monotonic() - begin_s,
            behind_p99_ms=behind[min(len(behind) - 1, int(0.99 * len(behind)))],
        )

    async def _open(self, num_channels: int) -> None:
        self._channels = [grpc.aio.insecure_channel(self._address, options=OPTIONS) for _ in range(num_channels)]
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    def _call(self, request: bytes, at: int) -> Any:
        # Bytes in, bytes out: a client that parses little leaves the processors to the measured processes.
        return self._channels[at % len(self._channels)].unary_stream(METHOD)(request, timeout=self._timeout_s)

    async def _one(self, request: bytes, outcome: LoadOutcome, at: int) -> LoadOutcome:
        outcome.sent_s = time.monotonic()
        call = self._call(request, at)
        last = b""
        try:
            while (data := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                now_s = time.monotonic()
                chunk = inference_pb2.GenerateChunk.FromString(data)
                number = len(chunk.token_ids)
                if not outcome.num_tokens:
                    outcome.first_s = now_s
                outcome.num_tokens += number
                outcome.num_chunks += 1
                tenth = int(10 * now_s)
                self._token_times[tenth] = self._token_times.get(tenth, 0) + number
                last = data
            outcome.code = (await call.code()).name
        except grpc.aio.AioRpcError as error:
            outcome.code = error.code().name
            metadata: Any = error.trailing_metadata()  # the type stubs know only one of its two types
            outcome.has_retry_info = any(key == DETAILS_KEY for key, _ in metadata or ())
        outcome.end_s = time.monotonic()
        if last:
            stats = inference_pb2.GenerateChunk.FromString(last).finish.stats
            outcome.publish_ms, outcome.router_ms = stats.publish_ms, stats.router_ms
        return outcome

    async def _closed(self, request: bytes, concurrency: int, seconds: float) -> list[LoadOutcome]:
        end_s = time.monotonic() + seconds
        found: list[LoadOutcome] = []

        async def turns(at: int) -> None:
            while (now_s := time.monotonic()) < end_s:
                outcome = await self._one(request, LoadOutcome(now_s), at)
                found.append(outcome)
                if outcome.code != "OK":
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(turns(at) for at in range(concurrency)))
        return found

    async def _timetable(self, request: bytes, dues: Sequence[float]) -> list[LoadOutcome]:
        begin_s = time.monotonic()
        tasks = []
        for at, due_s in enumerate(dues):
            wait_s = begin_s + due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._one(request, LoadOutcome(begin_s + due_s), at)))
        return list(await asyncio.gather(*tasks))

    async def _hold(self, request: bytes, number: int) -> int:
        calls = [self._call(request, at) for at in range(len(self._held), len(self._held) + number)]
        firsts = await asyncio.gather(*(call.read() for call in calls))
        self._held += calls
        return sum(isinstance(first, bytes) for first in firsts)

    async def _release(self) -> None:
        for call in self._held:
            call.cancel()
        self._held.clear()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
