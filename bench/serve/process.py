"""Client processes: each sends its part of every point, and returns its records.

The exchange for a point is: the job; "ready" once bodies are built and the steady streams decode; the time at which
arrivals begin; "arrived" once the process's arrivals have ended; "stop" once those of all processes have; the report.
The monotonic clock is the host's, so a time means the same in all processes.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from baton.bench.serve.drive import Driver, Record, beat
from baton.bench.serve.figures import percentile
from baton.bench.serve.http import CompletionsClient, ServedSystem, body_of
from baton.bench.serve.schedule import Key, Planned, schedule, steady, tokens_of
from baton.bench.serve.workload import OfferedLoad
from baton.core.clock import MonotonicClock
from baton.core.errors import StepFailed

_BEAT_S: Final = 0.01
_LEAD_S: Final = 0.05  # from the last "ready" to the begin
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ClientJob:
    """One process's part of one point at one system.

    Attributes:
        system: system that is measured.
        load: load of the workload.
        key: point and round.
        process: index of this process.
        num_processes: number of processes that share the point.
        vocab: range of token ids of prompts, both ends included.
        keys: API keys by environment variable.
        default_key: API key of requests whose tenant names none.
    """

    system: ServedSystem
    load: OfferedLoad
    key: Key
    process: int
    num_processes: int
    vocab: tuple[int, int]
    keys: Mapping[str, str]
    default_key: str | None


@dataclass(frozen=True, slots=True)
class ClientReport:
    """Observations of a process.

    Attributes:
        records: records of its requests.
        loop_lag_p99_ms: how late its event loop noticed a timer from the first arrival to the end of the last.
        cpu: share of one core used in the same time.
    """

    records: list[Record]
    loop_lag_p99_ms: float
    cpu: float


class ClientProcesses:
    """Spawned client processes; a context manager that ends them."""

    def __init__(self, num: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "ClientProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # its process ends with it
        for process in self._processes:
            if kind is not None:
                process.kill()
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()

    def __len__(self) -> int:
        return len(self._pipes)

    def run(self, jobs: Sequence[ClientJob]) -> tuple[list[ClientReport], float]:
        """Run one point with a job for each process; return the reports, and when arrivals began.

        Raises:
            StepFailed: a process ended or failed.
        """
        self._tell(jobs)
        self._hear("ready")
        begin_s = time.monotonic() + _LEAD_S
        self._tell([begin_s] * len(jobs))
        self._hear("arrived")
        self._tell(["stop"] * len(jobs))
        return self._hear("report"), begin_s

    def _tell(self, values: Sequence[Any]) -> None:
        for pipe, value in zip(self._pipes, values, strict=True):
            try:
                pipe.send(value)
            except OSError as error:
                raise StepFailed("a client process has ended") from error

    def _hear(self, wanted: str) -> list[Any]:
        found = []
        for pipe in self._pipes:
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError) as error:
                raise StepFailed("a client process has ended") from error
            if kind != wanted:
                raise StepFailed(f"a client process failed: {value}")
            found.append(value)
        return found


def serve(pipe: Connection) -> None:
    """Run a client process: do jobs until the pipe closes."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            uvloop.run(_run(job, pipe))
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:  # noqa: BLE001  the parent raises it
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


async def _run(job: ClientJob, pipe: Connection) -> None:
    place = (job.load, job.key, job.process, job.num_processes)
    requests, streams = schedule(*place), steady(*place)
    bodies = {planned.prompt: _body(job, planned) for planned in requests}  # bodies of streams are built when sent

    def body(planned: Planned) -> bytes:
        return bodies.pop(planned.prompt, None) or _body(job, planned)

    clock = MonotonicClock()
    lags_s: list[float] = []
    usage = [0.0, 0.0]
    beating: list[asyncio.Task[None]] = []

    async def ready() -> float:
        pipe.send(("ready", None))
        begin_s: float = await asyncio.to_thread(pipe.recv)
        beating.append(asyncio.create_task(beat(clock, _BEAT_S, lags_s)))
        usage[:] = [time.process_time(), time.monotonic()]
        return begin_s

    async def arrived() -> None:
        pipe.send(("arrived", None))
        await asyncio.to_thread(pipe.recv)  # processes with less to do wait, so that all measure the same time
        beating[0].cancel()
        usage[:] = [(time.process_time() - usage[0]) / (time.monotonic() - usage[1]), 0.0]

    gc.unfreeze()
    gc.collect()
    gc.freeze()  # exempts what exists by now from garbage collection during the measurement
    async with CompletionsClient(job.system, job.load, job.keys, job.default_key, clock, body) as client:
        records = await Driver(client.send, clock).run(requests, streams, ready, arrived)
    lag_ms = 1e3 * percentile(sorted(lags_s), 0.99) if lags_s else 0.0
    pipe.send(("report", ClientReport(records, lag_ms, usage[0])))


def _body(job: ClientJob, planned: Planned) -> bytes:
    tokens = tokens_of(planned.prompt, job.load, job.key.seed, job.key.load, job.vocab)
    return body_of(planned, tokens, job.load, job.system.model)
