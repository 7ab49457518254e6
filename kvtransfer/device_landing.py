"""The engine's part in landings whose pool is on a GPU: kernels that fill it from staging memory and verify it.

Runs in the decode worker, on the loop's thread; nothing waits for the device. Launches go to one stream of their own,
on few multiprocessors: a decode step goes on meanwhile. The memory that it shares with the landing's process - staging
blocks, and the flags by which its kernels answer - is page-locked here.
"""

import logging
import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.config import KVTransferConfig
from baton.core.request import AttemptKey
from baton.kernels.kv_digest import kv_digest
from baton.kernels.kv_scatter import Completion, Piece, PoolAddress, Tuning, kv_scatter
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.kvtransfer.cuda_ipc import CudaFailed, PinnedMemory, device_uuid, export
from baton.kvtransfer.device_jobs import FLAGS_POOL, SCRATCH_SLOT, SLOT_WORDS, flag_bytes
from baton.kvtransfer.device_stream import DeviceStream
from baton.kvtransfer.landing_actions import DigestWanted
from baton.kvtransfer.landing_link import LandingLink
from baton.kvtransfer.landing_setup import DeviceSetup
from baton.kvtransfer.shared_region import DIRECTORY, SharedRegion, sweep

log = logging.getLogger(__name__)

_NOBODY = AttemptKey("", 0)
MIN_STAGING_BLOCKS = 1

# Measured beside the decode step of an 8B model: four multiprocessors verify 165 GB/s and slow it by less than 1 %.
VERIFY = Tuning(num_programs=4)
FILL = Tuning(num_programs=8)  # PCIe is the limit


@dataclass(frozen=True, slots=True)
class LandingMemory:
    """What engine and landing share beside the link.

    Attributes:
        staging: a pool's bytes.
        flags: a flag page's.
    """

    staging: memoryview
    flags: memoryview


class DeviceLanding:
    """See `landing.LandingDevice`.

    Args:
        pool: on a GPU; the whole layout's, of one rank.
        num_staging_blocks: of the staging memory.
        memory: shared with the landing.

    Raises:
        CudaFailed: it cannot be page-locked.
    """

    def __init__(self, pool: KVPool, num_staging_blocks: int, memory: LandingMemory) -> None:
        assert pool.device.type == "cuda"
        assert pool.geometry.size == 1, "a landing over the GPUs of several ranks is not built"
        self._device = pool.device
        self._layers = pool.geometry.layers
        self._pool = PoolAddress(pool.data_bytes.data_ptr(), self._layers)
        staging = PoolGeometry(pool.layout, num_staging_blocks)
        assert len(memory.staging) == staging.num_bytes
        assert len(memory.flags) == flag_bytes()
        with torch.cuda.device(self._device):
            self._pinned = [
                PinnedMemory(np.frombuffer(part, dtype=np.uint8)) for part in (memory.staging, memory.flags)
            ]
            self._stream = torch.cuda.Stream(self._device)
        self._staging = PoolAddress(self._pinned[0].address, staging.layers)
        self._flags_address = self._pinned[1].address
        self._launches = DeviceStream(self._device)
        self._warm_up()

    def launch(self, wanted: DigestWanted, table: BlockTable) -> None:
        """One launch, or two where layers come from staging memory."""
        piece = self._piece(wanted)
        end = piece.first + piece.count
        answer = self._completion(wanted.flag, wanted.sequence)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            ids = self._launches.ids(table.blocks)
            workspace = self._launches.workspace(end)
            if wanted.staging.blocks:
                done = self._completion(SCRATCH_SLOT, wanted.sequence) if wanted.has_digest else answer
                source = self._launches.ids(wanted.staging.blocks)
                kv_scatter(self._staging, source, self._pool, ids, piece, workspace, done, FILL, with_digest=False)
            if wanted.has_digest:
                kv_digest(self._pool, ids, piece, workspace, answer, VERIFY)

    def drain(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def close(self) -> None:
        """Wait, and unlock the memory."""
        self.drain()
        for pinned in self._pinned:
            pinned.close()

    def _piece(self, wanted: DigestWanted) -> Piece:
        layer = self._layers[wanted.layer]
        return Piece(
            layer=wanted.layer,
            first=0,
            count=wanted.count,
            head_first=layer.head_first,
            head_count=layer.num_heads,
            num_layers=wanted.num_layers,
        )

    def _completion(self, slot: int, sequence: int) -> Completion:
        return Completion(self._flags_address + slot * SLOT_WORDS * 8, sequence)

    def _warm_up(self) -> None:
        """Have kernels compiled before the first landing, by launches that move nothing."""
        shapes = set()
        for index, layer in enumerate(self._layers):
            shape = (layer.num_heads, layer.num_parts, layer.rows_per_block, layer.row_bytes)
            if shape in shapes:
                continue
            shapes.add(shape)
            block = BlockTable((0,), 16)
            for has_digest in (True, False):
                self.launch(
                    DigestWanted(
                        attempt=_NOBODY,
                        flag=SCRATCH_SLOT,
                        sequence=0,
                        layer=index,
                        num_layers=1,
                        count=0,
                        staging=block,
                        has_digest=has_digest,
                    ),
                    block,
                )
        self.drain()


def num_staging_blocks(pool: KVPool, config: KVTransferConfig) -> int:
    """As many as are configured, but no more than the pool has, or than half of what /dev/shm has free."""
    free = os.statvfs(DIRECTORY)
    limit_bytes = min(config.staging_mib << 20, free.f_bavail * free.f_frsize // 2)
    num_blocks = limit_bytes // pool.layout.bytes_per_block - 1
    return max(MIN_STAGING_BLOCKS, min(pool.num_blocks, num_blocks))


def private_memory(pool: KVPool, num_blocks: int) -> LandingMemory:
    """Memory for a landing on a thread of this process."""
    sizes = (PoolGeometry(pool.layout, num_blocks).num_bytes, flag_bytes())
    staging, flags = (memoryview(mmap.mmap(-1, size)) for size in sizes)
    return LandingMemory(staging, flags)


def device_region(pool: KVPool, num_blocks: int, config: KVTransferConfig) -> SharedRegion:
    """Shared memory for a landing in a process of its own, before a pool on a GPU; dead owners' are removed first.

    Raises:
        ConfigInvalid: there is no room for it.
    """
    sweep()
    sizes = [PoolGeometry(pool.layout, num_blocks).num_bytes, flag_bytes()]
    link_bytes = LandingLink.num_bytes(config.ring_slots, pool.num_blocks)
    return SharedRegion.create(link_bytes=link_bytes, pool_bytes=sizes, key="staging_mib")


def memory_of(region: SharedRegion) -> LandingMemory:
    """The parts of a `device_region`."""
    return LandingMemory(region.pool(0), region.pool(FLAGS_POOL))


def device_setup(pool: KVPool, num_blocks: int) -> DeviceSetup:
    """What the landing has to know of the pool. One that cannot be shared is reached by sockets only."""
    try:
        place = export(pool.data_bytes.data_ptr(), pool.device)
    except CudaFailed as error:
        log.warning("no nvlink: %s", error)
        return DeviceSetup(num_blocks)
    return DeviceSetup(num_blocks, place.handle.hex(), place.offset_bytes, device_uuid(pool.device))
