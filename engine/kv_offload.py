"""KV of sequences that give way, copied to host memory and back, with the draft that each had in hand.

Copies are work of the lane, so they lie between the steps launched before and after them; a step that comes later may
write the blocks that were copied, and a range of host blocks may be used again as soon as its `load` was given. Only
others who write the pool (a transfer) must wait for the future of a copy: at rank 0 of a group it says that *every*
rank has copied. Which host blocks are whose is the caller's to say (`kvcache.host_ranges`).

Legend: N host blocks, n blocks of a sequence, D hidden size.
"""

from collections.abc import Callable, Sequence

import torch

from baton.core.errors import ConfigInvalid
from baton.engine.step.host_future import HostFuture
from baton.engine.step.lane import Lane
from baton.engine.step.slots import SlotTable
from baton.kernels.copies import copy_to_host, host_buffer, to_device
from baton.kvcache.pool import KVPool
from baton.model.parallel import Communicator


class KVOffload:
    """One rank's host memory for KV.

    Args:
        pool: whose blocks are copied, every layer of them.
        num_bytes: of host memory, at most; 0 is none. Taken at once, pinned for a pool on a GPU.
        lane: of the runner.
        table: of its slots.
        communicator: of its ranks.
        on_copy: called ahead of every copy: the device is about to have work that is no step.

    Raises:
        ConfigInvalid: the memory holds no block, or cannot be had.
    """

    def __init__(
        self,
        pool: KVPool,
        num_bytes: int,
        lane: Lane,
        table: SlotTable,
        communicator: Communicator,
        on_copy: Callable[[], None] = lambda: None,
    ) -> None:
        layers = pool.geometry.layers
        sizes = [layer.block_bytes for layer in layers]
        self.num_blocks = num_bytes // sum(sizes)
        if self.num_blocks == 0 and num_bytes > 0:
            message = f"kv_offloading_size: {num_bytes} bytes hold no KV block of {sum(sizes)}; raise it, or set 0"
            raise ConfigInvalid(message, keys=["kv_offloading_size"])
        self._pool = pool
        self._lane = lane
        self._table = table
        self._communicator = communicator
        self._on_copy = on_copy
        self._drafts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by first host block; belongs to the lane
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # uint8 [N, bytes] on the host, and of the pool
        if self.num_blocks == 0:
            return
        try:
            host = host_buffer(self.num_blocks * sum(sizes), torch.uint8, pool.device)
        except RuntimeError as error:  # what torch's allocators raise
            message = f"kv_offloading_size: {num_bytes >> 20} MiB of host memory cannot be had; lower it"
            raise ConfigInvalid(message, keys=["kv_offloading_size"]) from error
        hosts = host.split([self.num_blocks * size for size in sizes])
        for layer, size, part in zip(layers, sizes, hosts, strict=True):
            data = pool.data_bytes[layer.offset_bytes : layer.offset_bytes + layer.num_bytes]
            self._layers.append((part.view(-1, size), data.view(-1, size)))

    def save(self, blocks: Sequence[int], first: int, slot: int | None) -> HostFuture:
        """Copy blocks to host blocks `first` ..., and keep the draft of the sequence in `slot`, if it is in one.

        Returns:
            Done when every rank of the group has read the blocks.
        """
        blocks = tuple(blocks)
        assert 0 < len(blocks) <= self.num_blocks - first

        def copy() -> torch.Tensor:
            index_n = self._index(blocks)
            for host_NX, pool_NX in self._layers:
                copy_to_host(host_NX[first : first + len(blocks)], pool_NX.index_select(0, index_n))
            self._drafts.pop(first, None)
            if slot is not None:
                self._drafts[first] = self._table.draft_of(slot)
            return self._all_have_come()

        self._on_copy()
        return self._lane.submit(copy, host_buffer(1, torch.float32, self._pool.device))

    def load(self, blocks: Sequence[int], first: int, slot: int) -> HostFuture:
        """Copy them back, into blocks that nobody uses, and the draft to `slot`, where its sequence was admitted.

        Returns:
            Done when every rank of the group has written the blocks.
        """
        blocks = tuple(blocks)

        def copy() -> torch.Tensor:
            index_n = self._index(blocks)
            for host_NX, pool_NX in self._layers:
                pool_NX.index_copy_(0, index_n, to_device(host_NX[first : first + len(blocks)], self._pool.device))
            draft = self._drafts.pop(first, None)
            if draft is not None:
                self._table.put_draft(slot, draft)
            return self._all_have_come()

        self._on_copy()
        return self._lane.submit(copy, host_buffer(1, torch.float32, self._pool.device))

    def _all_have_come(self) -> torch.Tensor:
        """Nobody's sum is there before everybody's part of it."""
        return self._communicator.all_sum(torch.ones(1, dtype=torch.float32, device=self._pool.device))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(blocks, dtype=torch.int64), self._pool.device)
