"""The upper bound: one thread copies each block between two pools of one process."""

import time

from baton.bench.kv_bench.memory import allocate
from baton.bench.kv_systems.faces import Address, OnDone, TransferCell


class MemcpyReceiver:
    """Memory only: shared pages, like a pool that a peer maps."""

    def __init__(self, cell: TransferCell, on_done: OnDone) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=True)
        self.counts: dict[str, int] = {}
        self.on_done = on_done

    def address(self) -> Address:
        """Return this object itself."""
        return {"receiver": self}

    def turn(self, timeout_s: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class MemcpySender:
    """Copies in `submit`."""

    def __init__(self, cell: TransferCell) -> None:
        self.blocks = allocate(cell.workload.pool_shape, shared=False)
        self.data_path = ""
        self.counts: dict[str, int] = {}
        self._cell = cell
        self._receiver: MemcpyReceiver
        self._index = 0
        self._pairs: tuple[tuple[int, int], ...] = ()

    def connect(self, address: Address) -> None:
        """Store the other pool."""
        self._receiver = address["receiver"]

    def prepare(self, index: int) -> None:
        """Draw the blocks."""
        workload, seed = self._cell.workload, self._cell.seed
        source, target = workload.source_blocks(seed, index), workload.target_blocks(seed, index)
        self._index, self._pairs = index, tuple(zip(source, target, strict=True))

    def submit(self, layer: int) -> None:
        """Copy block by block."""
        source_NB, target_NB = self.blocks[layer], self._receiver.blocks[layer]
        for source, target in self._pairs:
            target_NB[target] = source_NB[source]

    def finish(self) -> None:
        """Report completion, since everything was copied."""
        self._receiver.on_done(self._index, time.monotonic())

    def wait(self) -> None:
        """Do nothing, since everything was copied."""

    def close(self) -> None:
        """Do nothing."""
