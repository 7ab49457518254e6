"""Copies the KV of preempted sequences to host memory and back, with their state and each one's next draft.

Copies run on the executor, between the steps launched before and after them. So a later step may overwrite the copied
blocks, and a range of host blocks may be reused as soon as its `load` was submitted. Only writers outside the executor
(a transfer) must wait for a copy's future; on rank 0 of a TP group it says that *every* rank has copied. The caller
tracks which host blocks belong to which sequence (`kvcache.host_ranges`).

Legend: N host blocks, n blocks of a sequence, D hidden size.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from baton.core.errors import ConfigInvalid
from baton.engine.step.executor import StepExecutor
from baton.engine.step.host_future import HostFuture
from baton.engine.step.plan import Load, Save
from baton.engine.step.slots import SlotTable
from baton.kernels.copies import copy_to_host, host_buffer, to_device
from baton.kvcache.geometry import LayerGeometry
from baton.kvcache.pool import KVPool
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.parallel import Communicator

STATE_SHARE = 4  # one part in STATE_SHARE of the memory is for state


class _Arena(NamedTuple):
    """One layer on the host and in the pool, uint8 [N, bytes] each."""

    host_NX: torch.Tensor
    pool_NX: torch.Tensor


class KVOffload:
    """Host memory for KV on one rank.

    Args:
        pool: the pool; every layer of its blocks is copied.
        blocks: says which of the blocks in a plan are in this pool; none, for a sequence that another rank owns.
        num_bytes: maximum host memory; 0 disables offloading. Allocated at once, pinned for a pool on a GPU.
        executor: the runner's executor.
        table: the runner's slots.
        communicator: of the worker's ranks.
        on_copy: called before every copy, because the device is about to do work that is not a step.

    Raises:
        ConfigInvalid: the memory is too small for one block, or cannot be allocated.
    """

    def __init__(
        self,
        pool: KVPool,
        blocks: RankBlocks,
        num_bytes: int,
        executor: StepExecutor,
        table: SlotTable,
        communicator: Communicator,
        on_copy: Callable[[], None] = lambda: None,
    ) -> None:
        layers = [layer for layer in pool.geometry.layers if not layer.blocks_per_slot]
        states = [layer for layer in pool.geometry.layers if layer.blocks_per_slot]
        sizes = [layer.block_bytes for layer in layers]
        state_sizes = [layer.blocks_per_slot * layer.block_bytes for layer in states]
        # The best split between blocks and state depends on how long sequences get; neither is of use without the
        # other.
        self.num_state_images = num_bytes // (STATE_SHARE * sum(state_sizes)) if states else 0
        self.num_blocks = (num_bytes - self.num_state_images * sum(state_sizes)) // sum(sizes)
        if states and not self.num_state_images:
            self.num_blocks = 0
        if self.num_blocks == 0 and num_bytes > 0:
            what = f"no KV block of {sum(sizes)}" + (f" beside state of {sum(state_sizes)}" if states else "")
            message = f"kv_offloading_size: {num_bytes} bytes hold {what}; raise it, or set 0"
            raise ConfigInvalid(message, keys=["kv_offloading_size"])
        self._pool = pool
        self._blocks = blocks
        self._executor = executor
        self._table = table
        self._communicator = communicator
        self._on_copy = on_copy
        self._drafts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by first host block; belongs to the executor
        self._layers: list[_Arena] = []  # [N, bytes]
        self._states: list[_Arena] = []  # the same for state slots
        if self.num_blocks == 0:
            return
        try:
            self._layers = self._arenas(layers, sizes, self.num_blocks)
            self._states = self._arenas(states, state_sizes, self.num_state_images)
        except RuntimeError as error:  # what torch's allocators raise
            message = f"kv_offloading_size: {num_bytes >> 20} MiB of host memory cannot be had; lower it"
            raise ConfigInvalid(message, keys=["kv_offloading_size"]) from error

    def _arenas(self, layers: Sequence[LayerGeometry], sizes: Sequence[int], count: int) -> "list[_Arena]":
        """Allocate host memory for `count` items of each layer, paired with the layer in the pool."""
        pool, arenas = self._pool, []
        host = host_buffer(count * sum(sizes), torch.uint8, pool.device)
        for layer, size, part in zip(layers, sizes, host.split([count * size for size in sizes]), strict=True):
            data = pool.data_bytes[layer.offset_bytes : layer.offset_bytes + layer.num_bytes]
            arenas.append(_Arena(part.view(-1, size), data.view(-1, size)))
        return arenas

    def save(self, plan: Save) -> HostFuture:
        """Copy the blocks of a plan to host memory, and keep the draft in its slot, if it names one.

        Returns:
            Done when every rank of the group has read the blocks.
        """
        blocks, first, slot = self._blocks.own(plan.blocks), plan.first, plan.slot
        assert 0 < len(plan.blocks) <= self.num_blocks - first

        def copy() -> torch.Tensor:
            index_n = self._index(blocks)
            for arena in self._layers if blocks else ():
                copy_to_host(arena.host_NX[first : first + len(blocks)], arena.pool_NX.index_select(0, index_n))
            for arena in self._states:
                assert plan.state_slot is not None and plan.state_image is not None
                copy_to_host(arena.host_NX[plan.state_image], arena.pool_NX[plan.state_slot])
            self._drafts.pop(first, None)
            if slot is not None:
                self._drafts[first] = self._table.draft_of(slot)
            return self._all_have_come()

        self._on_copy()
        return self._executor.submit(copy, host_buffer(1, torch.float32, self._pool.device))

    def load(self, plan: Load) -> HostFuture:
        """Copy the blocks back, into blocks that nothing else uses, and the draft to the sequence's new slot.

        Returns:
            Done when every rank of the group has written the blocks.
        """
        blocks, first, slot = self._blocks.own(plan.blocks), plan.first, plan.slot

        def copy() -> torch.Tensor:
            index_n = self._index(blocks)
            for arena in self._layers if blocks else ():
                saved_nX = to_device(arena.host_NX[first : first + len(blocks)], self._pool.device)
                arena.pool_NX.index_copy_(0, index_n, saved_nX)
            for arena in self._states:
                assert plan.state_slot is not None and plan.state_image is not None
                arena.pool_NX[plan.state_slot] = to_device(arena.host_NX[plan.state_image], self._pool.device)
            draft = self._drafts.pop(first, None)
            if draft is not None:
                self._table.put_draft(slot, draft)
            return self._all_have_come()

        self._on_copy()
        return self._executor.submit(copy, host_buffer(1, torch.float32, self._pool.device))

    def _all_have_come(self) -> torch.Tensor:
        """Barrier: no rank gets the sum before every rank has contributed."""
        return self._communicator.all_sum(torch.ones(1, dtype=torch.float32, device=self._pool.device))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(blocks, dtype=torch.int64), self._pool.device)
