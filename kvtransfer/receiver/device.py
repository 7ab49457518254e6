"""The engine's part in transfers to pools on GPUs: kernels that fill the pools from staging memory and verify them.

It runs in the decode worker, at rank 0, on the loop's thread; nothing waits for the device. One GPU launches the
kernels for the pools of all ranks, each on its own stream and on few multiprocessors, so that decode steps continue
meanwhile. The memory shared with the KV receiver process (staging blocks, and the flags that kernels set) is
page-locked here.
"""

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.config import KVTransferConfig
from baton.kernels.cuda_ipc import PinnedMemory
from baton.kernels.kv.scatter import PoolAddress
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool, num_blocks_for_memory
from baton.kvtransfer.rank_kernels import RankKernels
from baton.kvtransfer.rank_pools import RankPools
from baton.kvtransfer.receiver.actions import DigestWanted
from baton.kvtransfer.receiver.device_jobs import FLAGS_POOL, flag_bytes
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.shared_region import DIRECTORY, SharedRegion, sweep

MIN_STAGING_BLOCKS = 1
MIN_STAGING_STATE_SLOTS, MAX_STAGING_STATE_SLOTS = 1, 16


@dataclass(frozen=True, slots=True)
class ReceiverMemory:
    """What the engine and the KV receiver share besides the link.

    Attributes:
        staging: memory of the staging pool.
        flags: memory of the flag page.
    """

    staging: memoryview
    flags: memoryview


class DeviceReceiver:
    """An `service.ReceiverDevice`. Each rank's launches are in order, on a stream of this GPU.

    Args:
        pools: pools of all ranks; owned from here on.
        own: rank 0's pool, on this GPU.
        staging: geometry of the staging memory.
        memory: memory shared with the KV receiver.

    Raises:
        CudaFailed: the memory cannot be page-locked.
    """

    def __init__(self, pools: RankPools, own: KVPool, staging: PoolGeometry, memory: ReceiverMemory) -> None:
        self._device = own.device
        self._pools = pools
        assert len(memory.staging) == staging.num_bytes
        assert len(memory.flags) == flag_bytes()
        with torch.cuda.device(self._device):
            self._pinned = [
                PinnedMemory(np.frombuffer(part, dtype=np.uint8)) for part in (memory.staging, memory.flags)
            ]
            self._streams = [torch.cuda.Stream(self._device) for _ in pools.addresses]
        source = PoolAddress(self._pinned[0].address, staging.layers)
        flags_address = self._pinned[1].address
        self._ranks = [
            RankKernels(pool, geometry.layers, source, flags_address, self._device, len(pools.addresses))
            for pool, geometry in zip(pools.addresses, own.geometry.of_all_ranks, strict=True)
        ]
        for stream, kernels in zip(self._streams, self._ranks, strict=True):
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                kernels.warm_up()
        self.drain()

    def launch(self, wanted: DigestWanted, table: BlockTable) -> None:
        """Launch the kernels of one rank; see `RankKernels`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[wanted.rank]):
            self._ranks[wanted.rank].launch(wanted, table)

    def drain(self) -> None:
        """Wait for the streams."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Wait for the streams, and release the memory."""
        self.drain()
        for pinned in self._pinned:
            pinned.close()
        self._pools.close()


def staging_geometry(pool: KVPool, config: KVTransferConfig) -> PoolGeometry:
    """Return the geometry of the staging memory for a pool, with every head, as large as is configured.

    It has no more blocks than the pool, and takes at most half of the free space of /dev/shm. State slots, one per
    transfer in progress, take at most half of it, so that there is room for rows.
    """
    layout, free = pool.layout, os.statvfs(DIRECTORY)
    limit_bytes = min(config.staging_mib << 20, free.f_bavail * free.f_frsize // 2)
    num_state_slots = 0
    if layout.has_state:  # one more slot is scratch
        num_state_slots = limit_bytes // 2 // layout.bytes_per_state_slot - 1
        num_state_slots = max(MIN_STAGING_STATE_SLOTS, min(MAX_STAGING_STATE_SLOTS, num_state_slots))
    num_blocks = num_blocks_for_memory(layout, limit_bytes, num_state_slots)
    num_blocks = max(MIN_STAGING_BLOCKS, min(pool.num_blocks, num_blocks))
    return PoolGeometry(layout, num_blocks, num_state_slots=num_state_slots)


def private_memory(staging: PoolGeometry) -> ReceiverMemory:
    """Allocate the memory for a KV receiver on a thread of this process."""
    memory, flags = (memoryview(mmap.mmap(-1, size)) for size in (staging.num_bytes, flag_bytes()))
    return ReceiverMemory(memory, flags)


def device_region(pool: KVPool, staging: PoolGeometry, config: KVTransferConfig) -> SharedRegion:
    """Create the shared memory for a KV receiver process whose pool is on a GPU; first remove regions of dead owners.

    Raises:
        ConfigInvalid: there is not enough room for it.
    """
    sweep()
    sizes = [staging.num_bytes, flag_bytes()]
    link_bytes = ReceiverLink.num_bytes(config.ring_slots, pool.num_blocks)
    return SharedRegion.create(link_bytes=link_bytes, pool_bytes=sizes, key="staging_mib")


def memory_of(region: SharedRegion) -> ReceiverMemory:
    """Return the parts of a `device_region`."""
    return ReceiverMemory(region.pool(0), region.pool(FLAGS_POOL))
