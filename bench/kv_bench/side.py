"""One process of a measurement: it has a sender, a receiver, or both, and obeys the harness over a pipe.

Times are CLOCK_MONOTONIC, which all processes of a host share. Samples are returned unjudged.
"""

import dataclasses
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from baton.bench.kv_bench import memory as kv_memory
from baton.bench.kv_systems.faces import REQUEST_LIMIT_S, Address, Receiver, Sender, SystemFailed, TransferCell
from baton.bench.kv_systems.registry import SYSTEMS
from baton.kvtransfer.protocol.frame import decode_header, encode_header
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, Transport, TransportCounts
from baton.proto import kv_pb2


class FaultyTransport:
    """Wraps a transport and adds faults; see `Transport`.

    Attributes:
        num_faults: number of faults of each kind.
    """

    def __init__(self, inner: Transport, faults: Mapping[str, float], seed: int) -> None:
        self.num_faults = dict.fromkeys(faults, 0)
        self.address = inner.address
        self.counts: TransportCounts = inner.counts
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)

    def send_frame(self, peer: str, header: bytes, payload: Sequence[memoryview], data_path: str) -> None:
        """Send a frame, or drop it, or send it with a payload that does not match its check."""
        if self._strikes("drop"):
            return
        if self._strikes("corrupt"):
            header = _damaged(header)
        self._inner.send_frame(peer, header, payload, data_path)

    def _strikes(self, kind: str) -> bool:
        strikes = self._random.random() < self._faults.get(kind, 0.0)
        if strikes:
            self.num_faults[kind] += 1
        return strikes

    # The rest is the other one's.

    def send(self, peer: str, message: bytes) -> None:
        """As it does."""
        self._inner.send(peer, message)

    def unpin(self, peer: str, match: Callable[[bytes], bool]) -> None:
        """As it does."""
        self._inner.unpin(peer, match)

    def num_pinned(self, peer: str) -> int:
        """As it says."""
        return self._inner.num_pinned(peer)

    def offers(self) -> list[kv_pb2.DataPathOffer]:
        """As it says."""
        return self._inner.offers()

    def open_data_path(self, peer: str, offer: kv_pb2.DataPathOffer) -> str:
        """As it does."""
        return self._inner.open_data_path(peer, offer)

    def data_path_of(self, peer: str) -> str:
        """As it says."""
        return self._inner.data_path_of(peer)

    def problem(self, peer: str) -> str:
        """As it says."""
        return self._inner.problem(peer)

    def receive(self, timeout_s: float) -> list[Delivery | PayloadDone]:
        """As it does."""
        return self._inner.receive(timeout_s)

    def wake(self) -> None:
        """As it does."""
        self._inner.wake()

    def welcome(self, peer: str) -> None:
        """As it does."""
        self._inner.welcome(peer)

    def drop(self, peer: str) -> None:
        """As it does."""
        self._inner.drop(peer)

    def close(self) -> None:
        """As it does."""
        self._inner.close()


def _damaged(data: bytes) -> bytes:
    """Return a header whose check matches a payload that differs by a bit."""
    header = decode_header(data)
    if header.payload_digest is not None:
        return encode_header(dataclasses.replace(header, payload_digest=header.payload_digest ^ 1))
    if header.payload_crc is not None:
        return encode_header(dataclasses.replace(header, payload_crc=header.payload_crc ^ 1))
    return data


TURN_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPhase:
    """How requests are sent: one after the other until both minimums are reached.

    Attributes:
        first: index of the first request.
        min_requests: minimum number of requests.
        max_requests: maximum number of requests.
        min_s: minimum duration.
        pace_s: pause between layers; 0 sends them back to back.
    """

    first: int
    min_requests: int
    max_requests: int
    min_s: float
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Pairs of steps (`bench.kv_bench.step`), with requests from `first` on."""

    first: int
    num_pairs: int


@dataclass(frozen=True, slots=True)
class SentPush:
    """One request as its sender saw it."""

    index: int
    first_submit_s: float
    last_submit_s: float
    submit_s: float  # median duration of a `submit` call


@dataclass(slots=True)
class Side:
    """Sender, receiver or both of a process."""

    cell: TransferCell
    sender: Sender | None = None
    receiver: Receiver | None = None
    done_s: dict[int, float] = field(default_factory=dict)

    def run(self, phase: BenchPhase) -> list[SentPush]:
        """Send requests."""
        end_s = time.monotonic() + phase.min_s
        sent: list[SentPush] = []
        while len(sent) < phase.max_requests and (len(sent) < phase.min_requests or time.monotonic() < end_s):
            sent.append(self._send(phase.first + len(sent), phase.pace_s))
        return sent

    def _send(self, index: int, pace_s: float) -> SentPush:
        sender = self.sender
        assert sender is not None
        sender.prepare(index)
        took: list[float] = []
        last_s = first_s = due_s = time.monotonic()
        for layer in range(self.cell.workload.num_layers):
            if pace_s:
                due_s += pace_s
                time.sleep(max(0.0, due_s - time.monotonic()))
            last_s = time.monotonic()
            if layer == 0:
                first_s = last_s
            sender.submit(layer)
            took.append(time.monotonic() - last_s)
        sender.finish()
        sender.wait()
        return SentPush(index, first_s, last_s, sorted(took)[len(took) // 2])

    def collect(self, indices: list[int]) -> dict[int, float]:
        """Times at which the receiver had each of these requests."""
        receiver = self.receiver
        assert receiver is not None
        end_s = time.monotonic() + REQUEST_LIMIT_S
        while not all(index in self.done_s for index in indices):
            if time.monotonic() > end_s:
                raise SystemFailed(f"{sum(i not in self.done_s for i in indices)} requests never arrived")
            receiver.turn(TURN_S)
        return {index: self.done_s[index] for index in indices}

    def check(self, indices: list[int]) -> int:
        """Compare the receiver's whole pool with what these requests, in order, must have left there."""
        assert self.receiver is not None
        workload, seed = self.cell.workload, self.cell.seed
        requests = ((workload.source_blocks(seed, i), workload.target_blocks(seed, i)) for i in indices)
        return kv_memory.check(self.receiver.blocks, seed, requests)

    def counts(self) -> dict[str, int]:
        """Counters of sender and receiver."""
        return {
            **(self.sender.counts if self.sender is not None else {}),
            **(self.receiver.counts if self.receiver is not None else {}),
        }

    def busy(self) -> None:
        """Start a Python thread that keeps the interpreter busy from now on."""
        threading.Thread(target=spin, name="busy", daemon=True).start()

    def obey(self, request: tuple[str, Any]) -> object:
        """Execute one command of the harness."""
        match request:
            case ("connect", dict() as address):
                assert self.sender is not None
                self.sender.connect(address)
            case ("connect", None):
                assert self.sender is not None
                assert self.receiver is not None
                self.sender.connect(self.receiver.address())
            case ("run", BenchPhase() as phase):
                return self.run(phase)
            case ("steps", StepPlan() as plan):
                from baton.bench.kv_bench.step import run_steps  # with it comes torch

                return run_steps(self, plan)  # pyright: ignore[reportArgumentType]
            case ("collect", list() as indices):
                return self.collect(indices)
            case ("check", list() as indices):
                return self.check(indices)
            case ("counts", None):
                return self.counts()
            case ("data_path", None):
                return self.sender.data_path if self.sender is not None else ""
            case ("busy", None):
                self.busy()
            case _:
                raise AssertionError(f"no command {request!r}")
        return None

    def close(self) -> None:
        """End both."""
        if self.sender is not None:
            self.sender.close()
        if self.receiver is not None:
            self.receiver.close()


def spin() -> None:
    """Run an endless pure Python loop, like a scheduler that never sleeps."""
    number = 0
    while True:
        number = (number * 31 + 7) & 0xFFFF


def run_side(pipe: Connection, cell: TransferCell, roles: frozenset[str], log_path: str) -> None:
    """Main function of the process; ends when the pipe closes."""
    log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    side = Side(cell)
    try:
        pipe.send(("ok", _start(side, roles)))
        while True:
            if side.receiver is not None and not pipe.poll():
                side.receiver.turn(TURN_S)
                continue
            pipe.send(("ok", side.obey(pipe.recv())))
    except EOFError:
        side.close()
    # The boundary of the process: the harness reports whatever went wrong here as a failed cell.
    except BaseException:  # noqa: BLE001
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)


def _start(side: Side, roles: frozenset[str]) -> Address | None:
    system, cell = SYSTEMS[side.cell.system], side.cell
    if "receiver" in roles:
        side.receiver = system.make_receiver(cell, side.done_s.__setitem__)
        kv_memory.poison(side.receiver.blocks)
    if "sender" in roles:
        side.sender = system.make_sender(cell)
        kv_memory.fill(side.sender.blocks, cell.seed)
    return None if side.receiver is None or side.sender is not None else side.receiver.address()
