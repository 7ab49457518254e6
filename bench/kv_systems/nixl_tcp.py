"""NIXL over UCX's TCP: one WRITE of all blocks for each layer, with a notification; both pools registered once.

Descriptors of every (layer, block) are prepared once; each layer is a `make_prepped_xfer` of indices. The receiver
counts notifications, which NIXL delivers after the data.
"""

import os
import time
from typing import Any

import numpy as np

from baton.bench.kv_bench.memory import Blocks, allocate
from baton.bench.kv_systems.faces import REQUEST_LIMIT_S, Address, OnDone, SystemFailed, TransferCell

UCX_OPTIONS = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
_POLL_S = 20e-6


def make_agent(name: str) -> Any:
    """Make a NIXL agent that uses only TCP on the loopback interface."""
    os.environ.update(UCX_OPTIONS)
    from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def descriptors(base: int, shape: tuple[int, ...]) -> Any:
    """(address, bytes, device) of every block of a pool, layer by layer."""
    layers, blocks, size = shape
    table = np.zeros((layers * blocks, 3), dtype=np.uint64)
    table[:, 0] = base + np.arange(layers * blocks, dtype=np.uint64) * np.uint64(size)
    table[:, 1] = size
    return table


def register(agent: Any, blocks: Blocks) -> Any:
    """Register a pool."""
    return agent.register_memory([(blocks.ctypes.data, blocks.nbytes, 0, "")], "DRAM")


class NixlTcpReceiver:
    """Polls for notifications."""

    def __init__(self, cell: TransferCell, on_done: OnDone) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=False)
        self.counts: dict[str, int] = {}
        self._num_layers = cell.workload.num_layers
        self._on_done = on_done
        self._agent = make_agent("bench-decode")
        self._registered = register(self._agent, self.blocks)
        self._num_landed: dict[int, int] = {}

    def address(self) -> Address:
        """Metadata of the agent, and address of the pool."""
        return {"metadata": self._agent.get_agent_metadata(), "base": self.blocks.ctypes.data}

    def turn(self, timeout_s: float) -> None:
        """Take notifications until the time is over."""
        end_s = time.monotonic() + timeout_s
        while (now_s := time.monotonic()) < end_s:
            for messages in self._agent.get_new_notifs().values():
                for message in messages:
                    self._count(int(message), now_s)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Release the registration."""
        self._agent.deregister_memory(self._registered)

    def _count(self, index: int, now_s: float) -> None:
        self._num_landed[index] = self._num_landed.get(index, 0) + 1
        if self._num_landed[index] == self._num_layers:
            self._on_done(index, now_s)


class NixlTcpSender:
    """Posts WRITEs and polls for their end."""

    def __init__(self, cell: TransferCell) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=False)
        self.data_path = ""
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._agent = make_agent("bench-prefill")
        self._registered = register(self._agent, self.blocks)
        self._local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", descriptors(self.blocks.ctypes.data, self.blocks.shape), "DRAM"
        )
        self._remote: Any = None
        self._index = 0
        self._rows: tuple[Any, Any] = ((), ())
        self._posted: list[Any] = []

    def connect(self, address: Address) -> None:
        """Load the receiver's metadata and prepare its descriptors."""
        name = self._agent.add_remote_agent(address["metadata"])
        name = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(name)
        table = descriptors(address["base"], self.blocks.shape)
        self._remote = self._agent.prep_xfer_dlist(name, table, "DRAM")

    def prepare(self, index: int) -> None:
        """Draw the blocks."""
        workload, seed = self._cell.workload, self._cell.seed
        self._index = index
        self._rows = (
            np.array(workload.source_blocks(seed, index), dtype=np.int32),
            np.array(workload.target_blocks(seed, index), dtype=np.int32),
        )

    def submit(self, layer: int) -> None:
        """Post the layer's WRITE."""
        first = layer * self.blocks.shape[1]
        source, target = self._rows
        handle = self._agent.make_prepped_xfer(
            "WRITE", self._local, source + first, self._remote, target + first, str(self._index).encode()
        )
        self._posted.append(handle)
        if self._agent.transfer(handle) == "ERR":
            raise SystemFailed("NIXL refused a transfer")

    def finish(self) -> None:
        """Do nothing, since everything is posted."""

    def wait(self) -> None:
        """Poll each WRITE until it completes."""
        end_s = time.monotonic() + REQUEST_LIMIT_S
        for handle in self._posted:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                if time.monotonic() > end_s:
                    raise SystemFailed("a NIXL transfer does not end")
                time.sleep(_POLL_S)
            if state != "DONE":
                raise SystemFailed("a NIXL transfer failed")
            self._agent.release_xfer_handle(handle)
        self._posted.clear()

    def close(self) -> None:
        """Release handles and registration."""
        self._agent.release_dlist_handle(self._local)
        if self._remote is not None:
            self._agent.release_dlist_handle(self._remote)
        self._agent.deregister_memory(self._registered)
