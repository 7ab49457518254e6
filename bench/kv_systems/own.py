"""Baton's own hand-off, as its workers run it: a push service and its writer here, a landing service there.

The decode side grants the blocks that the harness expects, polls as a decode loop does, and releases what was sealed.
When the last byte was there is what its landing says: the moment at which the completion word was set.
"""

import os
import secrets
import threading
import time

import numpy as np
import torch

from baton.bench.kv_memory import Blocks
from baton.bench.kv_systems.faces import REQUEST_LIMIT_S, Address, Cell, OnDone, SystemFailed
from baton.bench.kv_systems.nixl_tcp import UCX_OPTIONS
from baton.bench.kv_workloads import POOL_BLOCKS, Workload
from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig, TransportName
from baton.core.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.async_writer import PushPart
from baton.kvtransfer.landing import LandingEvent, LandingFailed, LandingService, ReserveWanted, Sealed, landing_region
from baton.kvtransfer.landing_setup import LandingSetup, Listen
from baton.kvtransfer.nixl_lane import NixlOpener
from baton.kvtransfer.over_zmq import ZmqTransport
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.push import Acked, DecodePeer, Denied, Granted, PushEvent, PushFailed, PushService
from baton.kvtransfer.push_lane import LaneOpener
from baton.proto import kv_pb2

# The control channel, the policy of the prefill side, and the lanes that the decode side serves.
_WAYS: dict[str, tuple[str, TransportName, tuple[str, ...]]] = {
    "shm": ("zmq", "shm", ("shm",)),
    "zmq": ("zmq", "zmq", ("raw",)),
    "zmq-inline": ("zmq", "zmq", ()),
    "grpc": ("grpc", "grpc", ()),
    "nixl": ("zmq", "nixl", ("nixl",)),
}


def layout_of(workload: Workload) -> KVLayout:
    """The layout whose blocks have the workload's size."""
    return KVLayout(
        model_hash="bench",
        num_layers=workload.num_layers,
        num_kv_heads=workload.num_kv_heads,
        head_dim=workload.head_dim,
        block_size=workload.block_size,
        dtype=workload.dtype,
    )


def config_of(cell: Cell) -> KVTransferConfig:
    """What workers would be started with."""
    return KVTransferConfig(transport=_WAYS[cell.system][1], digest=bool(cell.digest))


def blocks_of(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], workload: Workload) -> Blocks:
    """A pool's memory without its scratch blocks."""
    layers, blocks, size = workload.pool_shape
    return memory.reshape(layers, blocks + 1, size)[:, :blocks]


class OwnReceiver:
    """A decode worker without a model."""

    def __init__(self, cell: Cell, on_done: OnDone) -> None:
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._on_done = on_done
        self._woken = threading.Event()
        config, layout = config_of(cell), layout_of(cell.workload)
        transport, _, lanes = _WAYS[cell.system]
        if cell.system == "nixl":
            os.environ.update(UCX_OPTIONS)  # the landing process inherits them
        bind = "tcp://127.0.0.1:0" if transport == "zmq" else "127.0.0.1:0"
        setup = LandingSetup(
            epoch=secrets.randbits(63) | 1,
            layout=layout,
            num_blocks=POOL_BLOCKS,
            tp_size=1,
            listen=Listen(transport, bind, lanes),
            config=config,
        )
        region = landing_region([PoolGeometry(layout, POOL_BLOCKS)], config)
        self.blocks = blocks_of(np.frombuffer(region.pool(0), dtype=np.uint8), cell.workload)
        self._service = LandingService.in_process(region, setup)
        self._service.wakeup = self._woken.set

    def address(self) -> Address:
        """Where the landing listens, and its life."""
        return {"kv_address": self._service.address, "epoch": self._service.epoch}

    def turn(self, timeout_s: float) -> None:
        """What a decode loop does between two steps."""
        self._woken.wait(timeout_s)
        self._woken.clear()
        for event in self._service.poll():
            self._take(event)

    def close(self) -> None:
        """End the landing."""
        self._service.close()

    def _take(self, event: LandingEvent) -> None:
        workload = self._cell.workload
        match event:
            case ReserveWanted():
                targets = workload.target_blocks(self._cell.seed, int(event.attempt.request_id))
                self._service.grant(event.attempt, BlockTable(targets, workload.block_size))
            case Sealed():
                self._on_done(int(event.attempt.request_id), event.sealed_s)
                self._service.release(event.attempt)
                self.counts = self._service.inventory()
            case LandingFailed():
                raise SystemFailed(f"the landing of {event.attempt} failed: {event.reason}")


class OwnSender:
    """A prefill worker without a model."""

    def __init__(self, cell: Cell) -> None:
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._woken = threading.Event()
        layout = layout_of(cell.workload)
        pool = KVPool(layout, POOL_BLOCKS, torch.device("cpu"))
        self.blocks = blocks_of(pool.bytes_view, cell.workload)
        config, epoch = config_of(cell), secrets.randbits(63) | 1
        openers: list[LaneOpener] = []
        if cell.system == "nixl":
            os.environ.update(UCX_OPTIONS)
            openers.append(NixlOpener(epoch, PoolIO(pool.bytes_view, pool.geometry), pool.bytes_view))
        self._push = PushService(
            pool=pool,
            layout=layout,
            epoch=epoch,
            transport=ZmqTransport(config=config),
            config=config,
            clock=MonotonicClock(),
            openers=openers,
        )
        self._push.wakeup = self._woken.set
        self._peer: DecodePeer
        self._attempt = AttemptKey("", 0)
        self._push.start()

    def connect(self, address: Address) -> None:
        """Remember the peer; the service connects with the first RESERVE."""
        self._peer = DecodePeer("bench", address["kv_address"], address["epoch"])

    def prepare(self, index: int) -> None:
        """Reserve, and begin a step once there is a grant."""
        workload = self._cell.workload
        self._attempt = AttemptKey(str(index), 0)
        table = BlockTable(workload.source_blocks(self._cell.seed, index), workload.block_size)
        prompt_len = workload.prompt_len
        self._push.reserve(self._attempt, self._peer, table, prompt_len, prompt_len, REQUEST_LIMIT_S)
        self._await(Granted)
        self._push.writer.begin([PushPart(self._attempt, 0, prompt_len)])

    def submit(self, layer: int) -> None:
        """As a forward does."""
        self._push.writer.submit(layer)

    def finish(self) -> None:
        """End the step and commit."""
        self._push.writer.wait_all()
        self._push.commit(self._attempt, kv_pb2.SequenceState(first_token=1), time.monotonic())

    def wait(self) -> None:
        """For the acknowledgement."""
        self._await(Acked)
        self.counts = {name: count for name, count in self._push.inventory().items() if isinstance(count, int)}

    def close(self) -> None:
        """End the service."""
        self._push.close()

    def _await(self, kind: type[PushEvent]) -> None:
        end_s = time.monotonic() + REQUEST_LIMIT_S
        while time.monotonic() < end_s:
            for event in self._push.poll():
                if isinstance(event, kind):
                    return
                if isinstance(event, Denied | PushFailed):
                    raise SystemFailed(f"the push of {event.attempt} failed: {event}")
            self._woken.wait(1.0)
            self._woken.clear()
        raise SystemFailed(f"no {kind.__name__} for {self._attempt}")
