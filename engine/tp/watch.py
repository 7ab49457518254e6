"""Determines which rank of a TP group is at fault: one that died, reported a failure, fell silent, or delays a step.

The watch is pure bookkeeping: it is told what happened and when, and asked for a verdict. Rank 0 watches all others;
each of them watches rank 0. A rank that ends because it lost another is a victim: it is blamed only if no other rank
is.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.core.errors import BatonError, MalformedMessage, WorkerLost, from_wire

_RUNNABLE: Final = ("R", "D")  # running, waiting for a CPU, or waiting for a disk
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_STARVED_SHARE: Final = 0.5


def is_runnable(pid: int) -> bool:
    """Whether any thread of a process would run if it got a CPU; a stopped or sleeping one would not."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        fields = _fields(path)
        if fields and fields[0] in _RUNNABLE:
            return True
    return False


class CpuWatch:
    """Measures a process's CPU use from its creation on.

    Args:
        pid: the process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start_s = time.monotonic()
        self._used_s = _cpu_s(pid)
        self._waited_s = _waited_s(pid)

    def has_waited(self) -> bool:
        """Whether its threads together waited half of the time for a CPU; ranks waiting for it are not at fault."""
        share_s = _STARVED_SHARE * (time.monotonic() - self._start_s)
        return _waited_s(self._pid) - self._waited_s > share_s

    def is_starved(self) -> bool:
        """Whether it would run but got less than half a CPU; one that spins gets more, one that waits would not run."""
        share_s = _STARVED_SHARE * (time.monotonic() - self._start_s)
        return is_runnable(self._pid) and _cpu_s(self._pid) - self._used_s < share_s


def _cpu_s(pid: int) -> float:
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def _waited_s(pid: int) -> float:
    """Time in which its threads were ready to run but did not; 0 if the kernel does not count it."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return total_ns * 1e-9


def _fields(path: Path) -> list[str]:
    """Fields of a `stat` file, from the state on; empty if the process is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


SILENCE_S: Final = 1.8  # with a heartbeat every 0.1 s, a stopped process is named within 2 s
STARVED_S: Final = 15.0  # of a rank that would run if it got a CPU
GRACE_S: Final = 0.3  # what a rank's end causes elsewhere is often reported first


@dataclass(slots=True)
class _Peer:
    """What is known about another rank."""

    heard_s: float
    num_operations: int = 0
    closed_s: float | None = None
    farewell: BatonError | None = None
    is_victim: bool = False
    said_s: float = 0.0


class TPGroupWatch:
    """One rank's view of the ranks it watches.

    Args:
        rank: this rank.
        size: size of the TP group.
        peers: ranks it watches.
        now_s: the time, on the clock used in every other call.
        silence_s: a rank counts as hung after this long without a sign of life.
        pids: process ids of the ranks, including this one: a rank that only waits for a CPU gets more time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: Iterable[int],
        now_s: float,
        silence_s: float = SILENCE_S,
        pids: Mapping[int, int] | None = None,
    ) -> None:
        self.silence_s = silence_s
        self._pids = pids or {}
        self._sampled: tuple[int, dict[int, CpuWatch]] = (0, {})  # CPU use during the oldest open step
        self._rank = rank
        self._size = size
        self._peers = {peer: _Peer(now_s) for peer in peers}
        self._looked_s = now_s
        self._deadlines: dict[int, float] = {}  # of open steps of this rank
        self._num_steps = 0

    def heard(self, rank: int, now_s: float) -> None:
        """Record that something arrived from a rank."""
        self._peers[rank].heard_s = now_s

    def beat(self, rank: int, num_operations: int) -> None:
        """Record how many collectives a rank has begun."""
        self._peers[rank].num_operations = num_operations

    def closed(self, rank: int, now_s: float) -> None:
        """Record that a rank's connection has ended."""
        peer = self._peers[rank]
        if peer.closed_s is None:
            peer.closed_s = now_s

    def farewell(self, rank: int, error: str, is_victim: bool, now_s: float) -> None:
        """Record why a rank said that it ends (`BatonError.to_wire`)."""
        peer = self._peers[rank]
        try:
            peer.farewell = from_wire(error)
        except MalformedMessage as malformed:
            peer.farewell = malformed
        peer.is_victim = is_victim
        peer.said_s = now_s

    def begin(self, limit_s: float, now_s: float) -> int:
        """Record that a step of this rank begins, which must end within `limit_s`; returns its number."""
        self._num_steps += 1
        self._deadlines[self._num_steps] = now_s + limit_s
        return self._num_steps

    def end(self, step: int) -> None:
        """Record that a step has ended."""
        self._deadlines.pop(step, None)

    def verdict(self, num_operations: int, now_s: float) -> WorkerLost | None:
        """The rank at fault, if any; to be called several times a second.

        Args:
            num_operations: number of collectives that this rank has begun.
            now_s: the time.
        """
        self._look(now_s)
        for rank, peer in self._peers.items():
            if peer.farewell is not None and not peer.is_victim:
                return self._failed(rank, peer.farewell)
        for rank, peer in self._peers.items():
            if peer.closed_s is not None and peer.farewell is None:
                return self._lost(rank, "died", f"rank {rank} of {self._size} has died")
        for rank, peer in self._peers.items():
            if peer.closed_s is None and self._is_silent(rank, peer, now_s):
                silence_s = now_s - peer.heard_s
                return self._lost(rank, "hangs", f"rank {rank} of {self._size} hangs: silent for {silence_s:.1f} s")
        late = self._late(num_operations, now_s) if self._deadlines else None
        if late is not None:
            return late
        for rank, peer in self._peers.items():
            if peer.farewell is not None and now_s - peer.said_s > GRACE_S:
                return self._failed(rank, peer.farewell)
        return None

    def _look(self, now_s: float) -> None:
        """Excuse the peers' silence if this process itself got no CPU for a while; they may judge this rank."""
        if now_s - self._looked_s > self.silence_s / 2:
            for peer in self._peers.values():
                peer.heard_s = now_s
        self._looked_s = now_s

    def _is_silent(self, rank: int, peer: _Peer, now_s: float) -> bool:
        silence_s = now_s - peer.heard_s
        if silence_s <= self.silence_s:
            return False
        return silence_s > max(STARVED_S, self.silence_s) or not is_runnable(self._pids.get(rank, 0))

    def _late(self, num_operations: int, now_s: float) -> WorkerLost | None:
        """The rank at fault if a step is overdue: all others wait for the one that has begun the fewest collectives."""
        step = min(self._deadlines)
        if self._sampled[0] != step:
            self._sampled = (step, {rank: CpuWatch(pid) for rank, pid in self._pids.items()})
        over_s = now_s - min(self._deadlines.values())
        if over_s <= 0:
            return None
        counts = {rank: peer.num_operations for rank, peer in self._peers.items()} | {self._rank: num_operations}
        fewest = min(counts.values())
        late = [rank for rank, count in sorted(counts.items()) if count == fewest]
        # The late rank may be waiting for data from another rank that is starved of CPU.
        watched = self._sampled[1].items()
        if over_s < STARVED_S and any(cpu.has_waited() or (rank in late and cpu.is_starved()) for rank, cpu in watched):
            return None
        if len(late) == len(counts):
            message = f"all {self._size} ranks hang in collective {fewest}"
            return WorkerLost(message, size=self._size, how="hangs")
        message = f"rank {late[0]} of {self._size} hangs: others wait for it in collective {max(counts.values())}"
        return self._lost(late[0], "hangs", message)

    def _failed(self, rank: int, error: BatonError) -> WorkerLost:
        if isinstance(error, WorkerLost):
            return error  # it names the rank itself
        kind = type(error).__name__
        return WorkerLost(
            f"rank {rank} of {self._size} failed: {kind}: {error.message}",
            rank=rank,
            size=self._size,
            how="failed",
            cause=error.to_wire(),
        )

    def _lost(self, rank: int, how: str, message: str) -> WorkerLost:
        return WorkerLost(message, rank=rank, size=self._size, how=how)
