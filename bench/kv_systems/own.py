"""Baton's own hand-off, as its workers run it: a KV sender here, a KV receiver there.

The decode side grants the blocks that the harness expects, polls as a decode loop does, and releases complete
transfers. The time of the last byte is that of the incoming transfer: the moment at which the completion word was set.
"""

import secrets
import threading
import time
from collections import deque

import numpy as np
import torch

from baton.bench.kv_bench.memory import Blocks
from baton.bench.kv_bench.side import FaultyTransport
from baton.bench.kv_bench.workloads import POOL_BLOCKS, KVWorkload
from baton.bench.kv_systems.faces import REQUEST_LIMIT_S, Address, OnDone, SystemFailed, TransferCell
from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.kv_transports import RAW, control_channel, one_sided_data_paths
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import (
    Completed,
    Drained,
    IncomingFailed,
    ReceiverEvent,
    ReceiverService,
    ReserveWanted,
    receiver_region,
)
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.async_writer import PushRange, WriterStep
from baton.kvtransfer.sender.service import (
    Acked,
    DecodePeer,
    Denied,
    Granted,
    PushDrained,
    PushEvent,
    PushFailed,
    PushService,
)
from baton.kvtransfer.transports.registry import bind_address, connecting_transport
from baton.proto import kv_pb2


def layout_of(workload: KVWorkload) -> KVLayout:
    """Layout whose blocks have the workload's size."""
    return KVLayout.of_attention(
        model_hash="bench",
        num_layers=workload.num_layers,
        num_kv_heads=workload.num_kv_heads,
        head_dim=workload.head_dim,
        block_size=workload.block_size,
        dtype=workload.dtype,
    )


def config_of(cell: TransferCell) -> KVTransferConfig:
    """Configuration that workers would be started with."""
    return KVTransferConfig(transport=cell.system, digest=bool(cell.digest))


def blocks_of(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], workload: KVWorkload) -> Blocks:
    """Memory of a pool without its scratch blocks."""
    layers, blocks, size = workload.pool_shape
    return memory.reshape(layers, blocks + 1, size)[:, :blocks]


class OwnReceiver:
    """A decode worker without a model."""

    def __init__(self, cell: TransferCell, on_done: OnDone) -> None:
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._on_done = on_done
        self._wanted: deque[AttemptKey] = deque()
        self._granted: AttemptKey | None = None
        self._woken = threading.Event()
        config, layout = config_of(cell), layout_of(cell.workload)
        kind = control_channel(config.transport).name
        data_paths = tuple(declared.data_path for declared in one_sided_data_paths(config.transport))
        setup = ReceiverSetup(
            epoch=secrets.randbits(63) | 1,
            layout=layout,
            num_blocks=POOL_BLOCKS,
            tp_size=1,
            listen=Listen(kind, bind_address(kind, "127.0.0.1"), data_paths),
            config=config,
        )
        region = receiver_region([PoolGeometry(layout, POOL_BLOCKS)], config)
        self.blocks = blocks_of(np.frombuffer(region.pool(0), dtype=np.uint8), cell.workload)
        self._service = ReceiverService.in_process(region, setup)
        self._service.wakeup = self._woken.set

    def address(self) -> Address:
        """Address of the KV receiver, and its epoch."""
        return {"kv_address": self._service.address, "epoch": self._service.epoch}

    def turn(self, timeout_s: float) -> None:
        """Do what a decode loop does between two steps."""
        self._woken.wait(timeout_s)
        self._woken.clear()
        for event in self._service.poll():
            self._take(event)

    def close(self) -> None:
        """Close the KV receiver."""
        self._service.close()

    def _take(self, event: ReceiverEvent) -> None:
        match event:
            case ReserveWanted():
                self._wanted.append(event.attempt)
            case Completed():
                self._on_done(int(event.attempt.request_id), event.completed_s)
                self._service.release(event.attempt)
                self._granted = None
                self.counts = self._service.inventory()
            case IncomingFailed():
                if not self._cell.faults:
                    raise SystemFailed(f"the incoming transfer of {event.attempt} failed: {event.reason}")
                if event.attempt in self._wanted:
                    self._wanted.remove(event.attempt)
            case Drained():
                self._granted = None
        if self._wanted and self._granted is None:  # the previous request may use the same blocks
            self._granted = self._wanted.popleft()
            targets = self._cell.workload.target_blocks(self._cell.seed, int(self._granted.request_id))
            self._service.grant(self._granted, BlockTable(targets, self._cell.workload.block_size))


class OwnSender:
    """A prefill worker without a model."""

    def __init__(self, cell: TransferCell) -> None:
        self.data_path = ""
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._woken = threading.Event()
        layout = layout_of(cell.workload)
        pool = KVPool(layout, POOL_BLOCKS, torch.device("cpu"))
        self.blocks = blocks_of(pool.bytes_view, cell.workload)
        config, epoch = config_of(cell), secrets.randbits(63) | 1
        transport = connecting_transport(config)
        self._transport = transport
        self._faulty = FaultyTransport(transport, cell.faults, cell.seed) if cell.faults else None
        self._push = PushService(
            pool=pool,
            layout=layout,
            epoch=epoch,
            transport=self._faulty or transport,
            config=config,
            clock=MonotonicClock(),
        )
        self._push.wakeup = self._woken.set
        self._peer: DecodePeer
        self._attempt = AttemptKey("", 0)
        self._step: WriterStep | None = None
        self._events: deque[PushEvent] = deque()
        self._push.start()

    def connect(self, address: Address) -> None:
        """Remember the peer; the service connects with the first RESERVE."""
        self._peer = DecodePeer("bench", address["kv_address"], address["epoch"])

    def prepare(self, index: int) -> None:
        """Reserve, and begin a step once there is a grant."""
        self._begin(AttemptKey(str(index), 0))

    def submit(self, layer: int) -> None:
        """Submit a layer as a forward pass does."""
        assert self._step is not None
        self._step.submit(layer)

    def finish(self) -> None:
        """End the step and commit."""
        assert self._step is not None
        self._step.wait()
        self._push.commit(self._attempt, kv_pb2.SequenceState(first_token=1), time.monotonic())

    def wait(self) -> None:
        """Wait for the acknowledgement. If faults end an attempt, start another one, as a router would."""
        while not isinstance(self._next(Acked, PushDrained), Acked):
            self.counts["attempts_lost"] = self.counts.get("attempts_lost", 0) + 1
            self._begin(AttemptKey(self._attempt.request_id, self._attempt.attempt + 1))
            for layer in range(self._cell.workload.num_layers):
                self.submit(layer)
            self.finish()
        self.counts |= self._push.inventory()
        choice = self._push.data_path_of(self._peer.kv_address)
        self.data_path = choice.data_path if choice is not None else ""
        if self.data_path == RAW:  # it may have been opened, and broken since
            self.data_path = self._transport.data_path_of(self._peer.kv_address)
        if self._faulty is not None:
            self.counts |= {f"faults_{kind}": number for kind, number in self._faulty.num_faults.items()}

    def close(self) -> None:
        """End the service."""
        self._push.close()

    def _begin(self, attempt: AttemptKey) -> None:
        workload = self._cell.workload
        self._attempt = attempt
        table = BlockTable(workload.source_blocks(self._cell.seed, int(attempt.request_id)), workload.block_size)
        prompt_len = workload.prompt_len
        self._push.reserve(attempt, self._peer, table, prompt_len, prompt_len, REQUEST_LIMIT_S)
        self._next(Granted)
        self._step = self._push.writer.open([PushRange(attempt, 0, prompt_len)])

    def _next(self, *kinds: type[PushEvent]) -> PushEvent:
        """The next event of these kinds for the present attempt."""
        end_s = time.monotonic() + REQUEST_LIMIT_S
        while time.monotonic() < end_s:
            while self._events:
                event = self._events.popleft()
                if event.attempt == self._attempt:
                    if isinstance(event, kinds):
                        return event
                    if isinstance(event, Denied) or (isinstance(event, PushFailed) and not self._cell.faults):
                        raise SystemFailed(f"the push failed: {event}")
            self._events.extend(self._push.poll())
            if not self._events:
                self._woken.wait(1.0)
                self._woken.clear()
        raise SystemFailed(f"nothing is heard of {self._attempt}")
