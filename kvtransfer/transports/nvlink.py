"""The sender's side of the `nvlink` data path: a kernel on this GPU writes blocks straight into a decode worker's pool.

The pool is opened by CUDA IPC on this rank's own device; it may be on the same GPU. A write is one launch per rank that
holds some of its heads, on the writer thread's stream, behind the layer's event; nothing waits for it. The kernel
reports its end through words of host memory, which it writes after all bytes, with the digest of what it read.

Nothing in an offer is trusted: sizes are computed from the layout and compared with the allocation, and the decode
worker's shared region must belong to the incarnation that was met. The KV sender decides whether a write is allowed.
"""

import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton.core.errors import ProtocolError
from baton.kernels.cuda_ipc import CudaFailed, IpcPlace, PeerMemory, PinnedMemory, can_reach
from baton.kernels.kv.scatter import PoolAddress, ScatterRange, WriteCompletion, kv_scatter
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.pool import KVPool
from baton.kvtransfer.device_stream import DeviceStream, tuning_for
from baton.kvtransfer.flag_page import Flag, FlagPage
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused, SenderSide
from baton.kvtransfer.shared_region import DIRECTORY, PREFIX, SharedRegion
from baton.kvtransfer.transports.nvlink_write import NvlinkWrite
from baton.kvtransfer.transports.shm import geometries_of
from baton.proto import kv_pb2

SLOT_WORDS = 8
NUM_SLOTS = 8192  # maximum number of writes in progress
CLAIM_LIMIT_S = 10.0
POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class _OwnMemory:
    """A pool of this process in place of a peer's."""

    address: int

    def close(self) -> None:
        """Do nothing: there is nothing to unmap."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The pool of one rank of the decode worker."""

    memory: "PeerMemory | _OwnMemory"
    geometry: PoolGeometry

    @property
    def address(self) -> PoolAddress:
        """The pool's address as this device reaches it."""
        return PoolAddress(self.memory.address, self.geometry.layers)


@dataclass(frozen=True, slots=True)
class _Route:
    """Heads [first, stop) of a layer go to a target; if several targets hold the same heads, one digest counts."""

    first: int
    stop: int
    target: int
    counts: bool


class NvlinkDataPath:
    """The pools of all ranks of one incarnation of a decode worker.

    Args:
        pool: this rank's pool.
        region: shared region of the decode worker, mapped; without one nothing is written.
        epoch: the decode worker's incarnation.
        targets: the decode worker's pools, by rank.
        flags: flag page where kernels report.
        flags_address: address of the flag page for the device.
    """

    name = "nvlink"

    def __init__(
        self,
        *,
        pool: KVPool,
        region: SharedRegion | None,
        epoch: int,
        targets: Sequence[_Target],
        flags: FlagPage,
        flags_address: int,
    ) -> None:
        self.num_blocks = targets[0].geometry.num_blocks
        self.num_state_slots = targets[0].geometry.num_state_slots
        self.block_size = targets[0].geometry.layout.block_size
        self._device = pool.device
        self._source = PoolAddress(pool.data_bytes.data_ptr(), pool.geometry.layers)
        self._layers = pool.geometry.layers
        self._region = region
        self._epoch = epoch
        self._targets = targets
        self._addresses = [target.address for target in targets]
        self._flags = flags
        self._flags_address = flags_address
        self._routes = [_routes(pool.geometry, targets, layer) for layer in range(len(pool.geometry.layers))]
        self._local = threading.local()
        self._open: set[NvlinkWrite] = set()
        self._is_closed = False

    def write(
        self, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange, *, with_digest: bool
    ) -> NvlinkWrite:
        """Launch a write on the current stream."""
        if self._is_closed or self._region is None or self._region.epoch != self._epoch:
            raise DataPathFailed("the decode worker's memory belongs to another incarnation")
        pieces = self._pieces(span)
        flags = self._claim(len(pieces))
        try:
            self._launch(tuple(blocks), tuple(target_blocks), pieces, flags, with_digest)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        except RuntimeError as error:
            raise DataPathFailed(f"a launch failed: {error}") from error
        launches = [(flag, route.counts) for flag, (_, route) in zip(flags, pieces, strict=True)]
        write = NvlinkWrite(self._flags, launches, event, with_digest, self._open.discard)
        self._open.add(write)
        return write

    def drain(self, timeout_s: float) -> bool:
        """Wait for the words of all writes."""
        until_s = time.monotonic() + timeout_s
        while not all(_is_over(write) for write in tuple(self._open)):
            if time.monotonic() >= until_s:
                return False
            time.sleep(POLL_S)
        return True

    def outlived(self) -> None:
        """Do nothing: the peer applied no writes itself, only kernels here do."""

    def close(self) -> None:
        """Unmap the pools."""
        self._is_closed = True
        for target in self._targets:
            target.memory.close()
        if self._region is not None:
            self._region.close()

    def warm_up(self) -> None:
        """Compile the kernels that writes will need, by moving nothing; waits for them."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            shapes = set()
            for layer, geometry in enumerate(self._layers):
                shape = (geometry.num_heads, geometry.num_parts, geometry.rows_per_block, geometry.row_bytes)
                if shape in shapes:
                    continue
                shapes.add(shape)
                pieces = self._pieces(KVRange(layer, 0, 0, geometry.head_first, geometry.num_heads))
                for with_digest in (True, False):
                    flags = self._claim(len(pieces))
                    self._launch((0,), (0,), pieces, flags, with_digest)
                    torch.cuda.current_stream(self._device).synchronize()
                    for flag in flags:
                        self._flags.release(flag)

    def _pieces(self, span: KVRange) -> list[tuple[ScatterRange, _Route]]:
        pieces = []
        for route in self._routes[span.layer]:
            low, high = max(route.first, span.head_first), min(route.stop, span.head_first + span.head_count)
            if low < high:
                piece = ScatterRange(
                    layers=(span.layer,), first=span.first, count=span.count, head_first=low, head_count=high - low
                )
                pieces.append((piece, route))
        return pieces

    def _claim(self, count: int) -> list[Flag]:
        until_s = time.monotonic() + CLAIM_LIMIT_S
        while (flags := self._flags.claim(count)) is None:
            if time.monotonic() > until_s:
                raise DataPathFailed(f"{NUM_SLOTS} writes are under way")
            time.sleep(POLL_S)
        return flags

    def _launch(
        self,
        blocks: tuple[int, ...],
        target_blocks: tuple[int, ...],
        pieces: Sequence[tuple[ScatterRange, _Route]],
        flags: Sequence[Flag],
        with_digest: bool,
    ) -> None:
        stream = self._stream()
        source_ids, target_ids = stream.ids(blocks), stream.ids(target_blocks)
        for (piece, route), flag in zip(pieces, flags, strict=True):
            geometry = self._layers[piece.layers[0]]
            row_bytes = geometry.num_parts * geometry.row_bytes
            kv_scatter(
                self._source,
                source_ids,
                self._addresses[route.target],
                target_ids,
                piece,
                stream.workspace(piece.first + piece.count),
                WriteCompletion(self._flags_address + self._flags.offset_bytes(flag.slot), flag.sequence),
                tuning_for(piece.count * piece.head_count * row_bytes),
                with_digest=with_digest and route.counts,
            )

    def _stream(self) -> DeviceStream:
        """Return the state of this thread's current stream."""
        streams: dict[int, DeviceStream] = self._local.__dict__.setdefault("streams", {})
        current = torch.cuda.current_stream(self._device).cuda_stream
        if current not in streams:
            streams[current] = DeviceStream(self._device)
        return streams[current]


class NvlinkOpener:
    """The `nvlink` data path of one prefill rank.

    Args:
        pool: the rank's pool.
        host_id: this host.
    """

    name = "nvlink"

    def __init__(self, pool: KVPool, host_id: str) -> None:
        self._pool = pool
        self._host_id = host_id
        self._flags: FlagPage | None = None
        self._pinned: PinnedMemory | None = None
        if not self.problem:
            # So that no peer waits for a compiler: what is compiled for this pool serves those of its shape.
            self._data_path(None, 0, [_Target(_OwnMemory(pool.data_bytes.data_ptr()), pool.geometry)]).warm_up()

    @property
    def problem(self) -> str:
        """Why this pool cannot be pushed from: it is not on a GPU; empty if it is."""
        return "" if self._pool.device.type == "cuda" else "the pool is not on a GPU"

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> NvlinkDataPath:
        """Map the offered pools.

        Raises:
            DataPathRefused: they are not of this host or that incarnation, cannot be reached, or are not what the
                layout says.
        """
        if self.problem:
            raise DataPathRefused(self.problem)
        if host_id != self._host_id:
            raise DataPathRefused("the peer is on another host")
        geometries = geometries_of(self._pool.layout, [pool.place for pool in offer.nvlink.pools])
        for pool in offer.nvlink.pools:
            if not can_reach(self._pool.device, pool.device_uuid):
                raise DataPathRefused(f"no peer access to GPU {pool.device_uuid[:64]!r}")
        region = _attach(offer.nvlink, epoch)
        targets: list[_Target] = []
        try:
            for pool, geometry in zip(offer.nvlink.pools, geometries, strict=True):
                memory = PeerMemory(_place(pool), self._pool.device)
                targets.append(_Target(memory, geometry))
                if not memory.check(geometry.num_bytes):
                    raise DataPathRefused(f"its pool of rank {geometry.rank} reaches beyond its memory")
            data_path = self._data_path(region, epoch, targets)
            data_path.warm_up()
            return data_path
        except CudaFailed as error:
            _undo(region, targets)
            raise DataPathRefused(str(error)) from error
        except BaseException:
            _undo(region, targets)
            raise

    def _data_path(self, region: SharedRegion | None, epoch: int, targets: Sequence[_Target]) -> NvlinkDataPath:
        if self._flags is None or self._pinned is None:
            memory = np.frombuffer(mmap.mmap(-1, FlagPage.num_bytes(NUM_SLOTS, SLOT_WORDS)), dtype=np.uint8)
            self._pinned = PinnedMemory(memory)
            self._flags = FlagPage(memory.data, SLOT_WORDS)
        return NvlinkDataPath(
            pool=self._pool,
            region=region,
            epoch=epoch,
            targets=targets,
            flags=self._flags,
            flags_address=self._pinned.address,
        )


def sender_data_path(side: SenderSide) -> NvlinkOpener:
    """Make the opener of a prefill rank whose pool is on a GPU."""
    return NvlinkOpener(side.pool, side.host_id)


def _attach(offer: kv_pb2.NvlinkOffer, epoch: int) -> SharedRegion:
    path = Path(offer.flags_path)
    if path.parent != DIRECTORY or not path.name.startswith(PREFIX):
        raise DataPathRefused(f"{offer.flags_path[:100]!r} is no shared region")
    try:
        region = SharedRegion.attach(path, int.from_bytes(offer.nonce, "little"), is_touched=False)
    except ProtocolError as error:
        raise DataPathRefused(error.message) from error
    if region.epoch != epoch:
        region.close()
        raise DataPathRefused("the shared region belongs to another incarnation of the peer")
    return region


def _place(pool: kv_pb2.NvlinkPool) -> IpcPlace:
    return IpcPlace(pool.ipc_handle, pool.place.offset_bytes)


def _undo(region: SharedRegion, targets: Sequence[_Target]) -> None:
    for target in targets:
        target.memory.close()
    region.close()


def _is_over(write: NvlinkWrite) -> bool:
    try:
        return write.done
    except DataPathFailed:
        return True


def _routes(source: PoolGeometry, targets: Sequence[_Target], layer: int) -> list[_Route]:
    """Return all heads of a layer that this rank could push, and where they go."""
    mine = source.layer(layer).heads
    routes = []
    previous_first = -1
    for index, target in enumerate(targets):
        theirs = target.geometry.layer(layer).heads
        first, stop = max(mine.first, theirs.first), min(mine.stop, theirs.stop)
        if first < stop:
            routes.append(_Route(first, stop, index, theirs.first != previous_first))
        previous_first = theirs.first
    return routes
