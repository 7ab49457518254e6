"""The pools of all ranks of a decode worker on GPUs, as rank 0's transfers reach them: opened by CUDA IPC.

Every rank announces where its pool is, and every rank learns of all, so that one whose pool cannot be shared stops them
all with the same error. Rank 0 opens the others' pools on its own GPU, and its kernels write and read them over NVLink.
A worker of one rank has only its own pool, and announces it only for prefill workers.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from baton.core.errors import WorkerStartFailed
from baton.kernels.cuda_ipc import CudaFailed, IpcPlace, PeerMemory, can_reach, device_uuid, export
from baton.kernels.kv.scatter import PoolAddress
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.setup import DevicePool

log = logging.getLogger(__name__)

Gather = Callable[[bytes], list[bytes]]  # returns every rank's bytes, in rank order, at every rank


def own_place(pool: KVPool) -> DevicePool:
    """Return where this rank's pool is.

    Raises:
        CudaFailed: it cannot be shared; memory of torch's expandable segments cannot.
    """
    place = export(pool.data_bytes.data_ptr(), pool.device)
    return DevicePool(place.handle.hex(), place.offset_bytes, device_uuid(pool.device))


def share_pool(pool: KVPool, gather: Gather) -> tuple[DevicePool, ...]:
    """Return the pools of all ranks; every rank calls it at the same time.

    Args:
        pool: pool of this rank; nothing that was launched before writes it after this.
        gather: gathers bytes from every rank.

    Raises:
        WorkerStartFailed: the pool of one rank cannot be shared.
    """
    torch.cuda.synchronize(pool.device)
    said: dict[str, Any]
    try:
        said = {"pool": asdict(own_place(pool))}
    except CudaFailed as error:
        said = {"problem": str(error)}
    found = []
    for rank, data in enumerate(gather(json.dumps(said).encode())):
        said = json.loads(data)
        if "problem" in said:
            message = f"the KV pool of rank {rank} cannot be shared with rank 0, which writes it: {said['problem']}"
            raise WorkerStartFailed(message, rank=rank)
        found.append(DevicePool(**said["pool"]))
    return tuple(found)


class RankPools:
    """The pools of one worker, at rank 0.

    Args:
        own: rank 0's pool.
        places: places of all ranks' pools, from `share_pool`; empty for a worker of one rank.

    Attributes:
        places: the same; also of a single rank, if its pool can be shared.
        addresses: address of each rank's pool, for kernels of rank 0's GPU.

    Raises:
        WorkerStartFailed: rank 0's GPU cannot reach another rank's.
    """

    def __init__(self, own: KVPool, places: Sequence[DevicePool] = ()) -> None:
        assert own.geometry.rank == 0
        assert own.geometry.size == max(1, len(places))
        self.places = tuple(places) or _alone(own)
        self.addresses = [PoolAddress(own.data_bytes.data_ptr(), own.geometry.layers)]
        self._memories: list[PeerMemory] = []
        try:
            for geometry, place in list(zip(own.geometry.of_all_ranks, self.places, strict=False))[1:]:
                memory = self._open(place, own.device, geometry.rank, geometry.num_bytes)
                self.addresses.append(PoolAddress(memory.address, geometry.layers))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the others' pools; nothing that was launched uses them any more."""
        for memory in self._memories:
            try:
                memory.close()
            except CudaFailed as error:  # its owner may already be gone; then this process is about to end, too
                log.warning("the pool of another rank is not unmapped: %s", error)
        self._memories.clear()

    def _open(self, place: DevicePool, device: torch.device, rank: int, num_bytes: int) -> PeerMemory:
        what = f"the GPU of rank 0 ({device_uuid(device)}) does not reach the KV pool of rank {rank}"
        if not can_reach(device, place.device_uuid):
            message = f"{what}: it has no peer access to GPU {place.device_uuid}; use GPUs that have, or fewer ranks"
            raise WorkerStartFailed(message, rank=rank)
        try:
            memory = PeerMemory(IpcPlace(bytes.fromhex(place.ipc_handle), place.ipc_offset_bytes), device)
            self._memories.append(memory)
            reaches = memory.check(num_bytes)
        except CudaFailed as error:
            raise WorkerStartFailed(f"{what}: {error}", rank=rank) from error
        if not reaches:
            raise WorkerStartFailed(f"{what}: it reaches beyond its memory", rank=rank)
        return memory


def _alone(pool: KVPool) -> tuple[DevicePool, ...]:
    """Return the place of the only rank's pool. If it cannot be shared, only sockets reach it."""
    try:
        return (own_place(pool),)
    except CudaFailed as error:
        log.warning("no nvlink: %s", error)
        return ()
