"""Between a pool's blocks and a frame's payload, on either side, and the digests of both.

Owns the order of bytes inside a payload (see `frame`). Refuses to decide what may be read or written.

Shapes: N blocks, H heads of the range, S positions, D head_dim; payloads are flat uint8 on the CPU.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from baton.kernels.digest import MASK, Digester
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.frame import Bytes, FrameHeader


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks next to each other in a table of which the same rows are meant."""

    block_index: int  # in the table
    num_blocks: int
    offset: int  # first row in each block
    length: int  # rows in each block


def block_runs(first: int, count: int, block_size: int) -> Iterator[BlockRun]:
    """Positions [first, first + count) as at most three runs: a part of a block, whole blocks, a part of a block."""
    end = first + count
    while first < end:
        index, offset = divmod(first, block_size)
        num_whole = (end - first) // block_size
        if offset == 0 and num_whole:
            yield BlockRun(index, num_whole, 0, block_size)
            first += num_whole * block_size
        else:
            length = min(block_size - offset, end - first)
            yield BlockRun(index, 1, offset, length)
            first += length


class PoolIO:
    """Reads and writes payloads of one pool. Calls from several threads are fine; they touch different blocks."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._data_L2NHSD = pool.data_L2NHSD
        self._device = pool.data_L2NHSD.device
        layout = pool.layout
        self._size = layout.block_size
        # On a CPU, the same memory as integers for NumPy, which knows no bfloat16.
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[layout.dtype.itemsize]
        self._array_L2NHSD = self._data_L2NHSD.view(bits).numpy() if self._device.type == "cpu" else None
        self._digester = Digester(layout.num_kv_heads, layout.head_dim, self._device)

    def gather(self, table: BlockTable, layer: int, first: int, count: int) -> torch.Tensor:
        """Payload values of all heads of these positions, flat, in the pool's dtype and on its device."""
        layout = self._pool.layout
        flat = torch.empty(2 * count * layout.num_kv_heads * layout.head_dim, dtype=layout.dtype, device=self._device)
        for kv, run, values_NHSD in self._pieces(flat, first, count, layout.num_kv_heads):
            blocks_N = self._blocks(table, run)
            source_NHSD = self._data_L2NHSD[layer, kv]
            if run.length == self._size:
                torch.index_select(source_NHSD, 0, blocks_N, out=values_NHSD)
            else:
                values_NHSD.copy_(source_NHSD[blocks_N, :, run.offset : run.offset + run.length])
        return flat

    def scatter(self, table: BlockTable, header: FrameHeader, payload: Bytes) -> None:
        """Write a frame's payload; it lies in the pool, and is visible to the device, when this returns."""
        heads = slice(header.head_first, header.head_first + header.head_count)
        if self._array_L2NHSD is not None:
            self._scatter_on_cpu(table, header, heads, payload)
            return
        flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device).view(self._pool.layout.dtype)
        for kv, run, values_NHSD in self._pieces(flat, header.first, header.count, header.head_count):
            rows = slice(run.offset, run.offset + run.length)
            self._data_L2NHSD[header.layer, kv][self._blocks(table, run), heads, rows] = values_NHSD
        torch.cuda.current_stream(self._device).synchronize()

    def _scatter_on_cpu(self, table: BlockTable, header: FrameHeader, heads: slice, payload: Bytes) -> None:
        # NumPy reads the transport's memory as it is, read-only or not; no copy but the one into the pool.
        assert self._array_L2NHSD is not None
        flat = np.frombuffer(payload, dtype=self._array_L2NHSD.dtype)
        head_dim, start = self._pool.layout.head_dim, 0
        for kv in range(2):
            target_NHSD = self._array_L2NHSD[header.layer, kv]
            for run in block_runs(header.first, header.count, self._size):
                shape = (run.num_blocks, header.head_count, run.length, head_dim)
                stop = start + math.prod(shape)
                rows = slice(run.offset, run.offset + run.length)
                for block, values_HSD in zip(self._block_ids(table, run), flat[start:stop].reshape(shape), strict=True):
                    target_NHSD[block, heads, rows] = values_HSD
                start = stop

    def digest_payload(self, flat: torch.Tensor, layer: int, first: int, count: int) -> int:
        """Digest of what `gather` returned."""
        total = 0
        for kv, run, values_NHSD in self._pieces(flat, first, count, self._pool.layout.num_kv_heads):
            total += self._digest(values_NHSD, layer, kv, run)
        return total & MASK

    def digest_pool(self, table: BlockTable, layer: int, prompt_len: int) -> int:
        """Digest of what the pool holds for positions [0, prompt_len) of a layer, all heads."""
        total = 0
        for run in block_runs(0, prompt_len, self._size):
            rows = slice(run.offset, run.offset + run.length)
            for kv in range(2):
                source_NHSD = self._data_L2NHSD[layer, kv, :, :, rows]
                total += self._digest(source_NHSD, layer, kv, run, self._blocks(table, run))
        return total & MASK

    def _digest(
        self, values_NHSD: torch.Tensor, layer: int, kv: int, run: BlockRun, blocks_N: torch.Tensor | None = None
    ) -> int:
        first_N = torch.arange(run.num_blocks, dtype=torch.int64, device=self._device) + run.block_index
        return self._digester.of(
            values_NHSD,
            layer=layer,
            kv=kv,
            first_position_N=first_N * self._size + run.offset,
            blocks_N=blocks_N,
        )

    def _block_ids(self, table: BlockTable, run: BlockRun) -> tuple[int, ...]:
        return table.blocks[run.block_index : run.block_index + run.num_blocks]

    def _blocks(self, table: BlockTable, run: BlockRun) -> torch.Tensor:
        return torch.tensor(self._block_ids(table, run), dtype=torch.int64, device=self._device)

    def _pieces(
        self, flat: torch.Tensor, first: int, count: int, num_heads: int
    ) -> Iterator[tuple[int, BlockRun, torch.Tensor]]:
        """Views [N, H, S, D] of a flat payload: (K or V, run, view)."""
        start, head_dim = 0, self._pool.layout.head_dim
        for kv in range(2):
            for run in block_runs(first, count, self._size):
                shape = (run.num_blocks, num_heads, run.length, head_dim)
                stop = start + run.num_blocks * num_heads * run.length * head_dim
                yield kv, run, flat[start:stop].view(shape)
                start = stop


def to_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a flat tensor, without a copy if it is on the CPU."""
    return flat.cpu().view(torch.uint8).numpy().data
