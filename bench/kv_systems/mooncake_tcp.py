"""Mooncake's transfer engine over TCP: one batch of all blocks for each layer, and a doorbell to the receiver.

The engine reports completion to the sender only, so the sender rings a Unix socket after each layer.
"""

import os
import queue
import socket
import tempfile
import threading
import time
from typing import Any

import numpy as np

from baton.bench.kv_bench.memory import Blocks, allocate
from baton.bench.kv_systems.faces import REQUEST_LIMIT_S, Address, OnDone, SystemFailed, TransferCell

_BELL_BYTES = 8


def make_engine() -> Any:
    """Make an engine that finds its peers by address."""
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemFailed("Mooncake's engine did not start")
    return engine


def register(engine: Any, blocks: Blocks) -> None:
    """Register a pool."""
    if engine.register_memory(blocks.ctypes.data, blocks.nbytes) != 0:
        raise SystemFailed("Mooncake refused the pool")


class MooncakeTcpReceiver:
    """Waits for the doorbell."""

    def __init__(self, cell: TransferCell, on_done: OnDone) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=False)
        self.counts: dict[str, int] = {}
        self._num_layers = cell.workload.num_layers
        self._on_done = on_done
        self._engine = make_engine()
        register(self._engine, self.blocks)
        self._folder = tempfile.TemporaryDirectory()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = os.path.join(self._folder.name, "bell")
        self._bell.bind(self._path)
        self._num_landed: dict[int, int] = {}

    def address(self) -> Address:
        """Addresses of engine, pool and doorbell."""
        name = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return {"engine": name, "base": self.blocks.ctypes.data, "bell": self._path}

    def turn(self, timeout_s: float) -> None:
        """Wait for the doorbell and count one layer."""
        self._bell.settimeout(timeout_s)
        try:
            index = int.from_bytes(self._bell.recv(_BELL_BYTES), "little")
        except TimeoutError:
            return
        now_s = time.monotonic()
        self._num_landed[index] = self._num_landed.get(index, 0) + 1
        if self._num_landed[index] == self._num_layers:
            self._on_done(index, now_s)

    def close(self) -> None:
        """Release the registration."""
        self._bell.close()
        self._folder.cleanup()
        self._engine.unregister_memory(self.blocks.ctypes.data)


class MooncakeTcpSender:
    """Writes layer after layer on a thread of its own; the engine's calls block without holding the GIL."""

    def __init__(self, cell: TransferCell) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=False)
        self.data_path = ""
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._engine = make_engine()
        register(self._engine, self.blocks)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._peer: Address = {}
        self._index = 0
        self._offsets: tuple[Any, Any] = ((), ())
        self._layers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def connect(self, address: Address) -> None:
        """Remember the peer; the engine connects by itself."""
        self._peer = address
        self._bell.connect(address["bell"])
        self._thread.start()

    def prepare(self, index: int) -> None:
        """Draw the blocks."""
        workload, seed = self._cell.workload, self._cell.seed
        self._index = index
        source = np.array(workload.source_blocks(seed, index)) * workload.block_bytes
        target = np.array(workload.target_blocks(seed, index)) * workload.block_bytes
        self._offsets = (source + self.blocks.ctypes.data, target + self._peer["base"])

    def submit(self, layer: int) -> None:
        """Hand a layer to the thread."""
        self._layers.put(layer)

    def finish(self) -> None:
        """Request completion."""
        self._layers.put(None)

    def wait(self) -> None:
        """Wait for the thread."""
        problem = self._ended.get(timeout=REQUEST_LIMIT_S)
        if problem:
            raise SystemFailed(problem)

    def close(self) -> None:
        """Release the registration."""
        self._bell.close()
        self._engine.unregister_memory(self.blocks.ctypes.data)

    def _run(self) -> None:
        problem = ""
        while True:
            layer = self._layers.get()
            if layer is None:
                self._ended.put(problem)
                continue
            first = layer * self.blocks.shape[1] * self.blocks.shape[2]
            source, target = ((offsets + first).tolist() for offsets in self._offsets)
            sizes = [self._cell.workload.block_bytes] * len(source)
            if self._engine.batch_transfer_sync_write(self._peer["engine"], source, target, sizes) != 0:
                problem = "a Mooncake transfer failed"
            else:
                self._bell.send(self._index.to_bytes(_BELL_BYTES, "little"))
