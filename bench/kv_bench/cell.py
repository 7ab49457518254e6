"""One measurement: a fresh sender and receiver, a warm-up, a burst, a paced phase, and a check of every byte.

A cell that fails, hangs or moves a wrong byte raises `CellFailed`; it never leaves a process behind.
"""

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.kv_bench.side import BenchPhase, SentPush, run_side, spin
from baton.bench.kv_systems.faces import TransferCell
from baton.bench.kv_systems.registry import SYSTEMS
from baton.bench.processes import system_calls, tree, tree_cpu_s
from baton.core.inside import ENVIRONMENT, DeploymentSecret

ANSWER_LIMIT_S = 150.0
_END_S = 10.0
_LOG_TAIL = 2000
_GIGA = 1e9


class CellFailed(Exception):
    """A measurement failed; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Duration of each phase."""

    warm_requests: int = 2
    burst_s: float = 1.0
    burst_requests: int = 8
    paced_s: float = 1.5
    paced_requests: int = 8
    max_requests: int = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Results of one cell."""

    gbps: float  # median over the burst's requests
    exposed_ms: list[float] = field(default_factory=list)  # one per paced request
    submit_us: float = 0.0  # median `submit` of the paced phase, or of the burst
    cpu_s_per_gb: float | None = None
    sender_cpu_s_per_gb: float | None = None
    num_requests: int = 0
    checked_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    data_path: str = ""


class SideProcess:
    """The harness's handle of one side's process."""

    def __init__(self, cell: TransferCell, roles: frozenset[str], log_path: Path) -> None:
        os.environ.setdefault(ENVIRONMENT, DeploymentSecret.of_process().text)  # both sides belong to one deployment
        context = multiprocessing.get_context("spawn")
        self._log_path = log_path
        self._name = "+".join(sorted(roles))
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=run_side, args=(theirs, cell, roles, str(log_path)))
        with _environment(SYSTEMS[cell.system].environment):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def answer(self) -> Any:
        """Wait for the side's next answer.

        Raises:
            CellFailed: the side failed, ended, or is silent.
        """
        try:
            if not self._pipe.poll(ANSWER_LIMIT_S):
                raise CellFailed(f"the {self._name} says nothing for {ANSWER_LIMIT_S:.0f} s{self._log()}")
            status, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise CellFailed(f"the {self._name} ended{self._log()}") from error
        if status != "ok":
            raise CellFailed(f"the {self._name} failed: {value}{self._log()}")
        return value

    def ask(self, command: str, argument: object = None) -> Any:
        """Send a command and wait for its answer."""
        self._pipe.send((command, argument))
        return self.answer()

    def close(self) -> None:
        """End the process and what it started."""
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)

    def _log(self) -> str:
        text = self._log_path.read_text(errors="replace")[-_LOG_TAIL:] if self._log_path.exists() else ""
        return f"\n{text}" if text.strip() else ""


@dataclass(slots=True)
class SidePair:
    """Both sides of one cell, and the number of requests so far."""

    cell: TransferCell
    sender: SideProcess
    receiver: SideProcess
    num_sent: int = 0

    def requests(
        self, effort: Effort, min_requests: int, min_s: float, pace_s: float = 0.0
    ) -> list[tuple[SentPush, float]]:
        """Send requests; return each with the time at which the receiver had it."""
        phase = BenchPhase(
            first=self.num_sent,
            min_requests=min_requests,
            max_requests=effort.max_requests,
            min_s=min_s,
            pace_s=pace_s,
        )
        sent: list[SentPush] = self.sender.ask("run", phase)
        self.num_sent += len(sent)
        done_s = self.receiver.ask("collect", [item.index for item in sent])
        return [(item, done_s[item.index]) for item in sent]

    def check(self) -> int:
        """Check every byte of the receiver's pool."""
        return int(self.receiver.ask("check", list(range(self.num_sent))))

    def pids(self) -> tuple[int, int]:
        """Process ids of sender and receiver."""
        return self.sender.pid, self.receiver.pid


def measure(cell: TransferCell, effort: Effort) -> Sample:
    """Run one cell.

    Raises:
        CellFailed: it could not be measured, or bytes were wrong.
    """
    with open_cell(cell) as pair:
        pair.requests(effort, effort.warm_requests, 0.0)
        pair.check()
        with _gil_load(cell, pair):
            before = [tree_cpu_s(pid) for pid in pair.pids()]
            burst = pair.requests(effort, effort.burst_requests, effort.burst_s)
            used = [tree_cpu_s(pid) - start for pid, start in zip(pair.pids(), before, strict=True)]
            paced = []
            if cell.pace_s:
                paced = pair.requests(effort, effort.paced_requests, effort.paced_s, cell.pace_s)
        request_bytes = cell.workload.request_bytes
        rates = [request_bytes / (done_s - sent.first_submit_s) / _GIGA for sent, done_s in burst]
        total_gb = len(burst) * request_bytes / _GIGA
        is_shared = pair.sender is pair.receiver
        cpu_s = used[0] if is_shared else sum(used)
        is_idle = cell.gil_load == "none"
        return Sample(
            gbps=statistics.median(rates),
            exposed_ms=[(done_s - sent.last_submit_s) * 1e3 for sent, done_s in paced],
            submit_us=statistics.median(sent.submit_s for sent, _ in paced or burst) * 1e6,
            cpu_s_per_gb=cpu_s / total_gb if is_idle else None,
            sender_cpu_s_per_gb=used[0] / total_gb if is_idle and not is_shared else None,
            num_requests=len(burst) + len(paced),
            checked_bytes=pair.check(),
            data_path=pair.sender.ask("data_path"),
            counts={**pair.receiver.ask("counts"), **pair.sender.ask("counts")},
        )


def count_system_calls(cell: TransferCell, num_requests: int) -> dict[str, dict[str, float]]:
    """System calls per layer, by side and name, of back-to-back requests; no rate is measured meanwhile.

    Raises:
        CellFailed: it could not be measured.
    """
    with open_cell(cell) as pair:
        pair.requests(Effort(), 1, 0.0)
        per_layer: dict[str, dict[str, float]] = {}
        with contextlib.ExitStack() as stack:
            counts = [stack.enter_context(system_calls(tree(pid))) for pid in dict.fromkeys(pair.pids())]
            pair.requests(Effort(max_requests=num_requests), num_requests, 0.0)
        for side, calls in zip(("sender", "receiver"), counts, strict=False):
            num_layers = num_requests * cell.workload.num_layers
            per_layer[side] = {name: count / num_layers for name, count in calls.items()}
        return per_layer


@contextlib.contextmanager
def open_cell(cell: TransferCell) -> Iterator[SidePair]:
    """Start both sides, connect them, and end them after the block.

    Raises:
        CellFailed: one does not start.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def start(*roles: str) -> SideProcess:
            side = SideProcess(cell, frozenset(roles), Path(folder) / "-".join(roles))
            stack.callback(side.close)
            return side

        if SYSTEMS[cell.system].one_process:
            both = start("sender", "receiver")
            both.answer()
            both.ask("connect")
            yield SidePair(cell, both, both)
            return
        receiver, sender = start("receiver"), start("sender")
        address = receiver.answer()
        sender.answer()
        sender.ask("connect", dict(address))
        yield SidePair(cell, sender, receiver)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that processes started within the block inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _gil_load(cell: TransferCell, pair: SidePair) -> Iterator[None]:
    if cell.gil_load == "inside":
        pair.receiver.ask("busy")
    if cell.gil_load != "outside":
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    try:
        time.sleep(0.5)  # until its interpreter has started
        yield
    finally:
        process.kill()
        process.join()


def percentile(values: list[float], percent: float) -> float:
    """Percentile, linear between ranks."""
    return float(np.percentile(np.array(values), percent))
