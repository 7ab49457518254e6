"""The sender's side of the `shm` data path: maps the pools of a decode worker on this host and writes them in place.

Opening proves that both sides see the same memory: the file must hold the offer's nonce and the epoch of the decode
worker's incarnation. Nothing in an offer is trusted: offsets and sizes of pools are computed from the layout and
compared. The KV sender decides whether a write is allowed; this module checks that it stays inside the pools.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.core.errors import ProtocolError
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import MAX_BLOCK_SIZE, KVLayout
from baton.kvcache.rank_blocks import RankBlocks
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.data_path import ReceiverSide, ServedDataPath
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused, SenderSide, WrittenAtOnce
from baton.kvtransfer.shared_region import DIRECTORY, NONCE_AT, NONCE_BYTES, PREFIX, SharedRegion
from baton.proto import kv_pb2

MASK = (1 << 64) - 1
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-zA-Z_.-]{1,100}")


class ShmDataPath:
    """The pools of all ranks of one incarnation of a decode worker.

    Args:
        region: shared region, mapped.
        epoch: the decode worker's incarnation.
        source: this rank's pool.
        targets: the decode worker's pools, one per rank.
        numbers: numbering of their blocks.
    """

    name = "shm"

    def __init__(
        self, region: SharedRegion, epoch: int, source: PoolIO, targets: Sequence[PoolIO], numbers: RankBlocks
    ) -> None:
        self.num_blocks = numbers.null_block
        self.num_state_slots = targets[0].geometry.num_state_slots
        self.block_size = targets[0].geometry.layout.block_size
        self._region = region
        self._epoch = epoch
        self._source = source
        self._is_closed = False
        self._numbers = numbers
        # Per pool that holds sequences, and per layer: heads, their target, and whether their digest counts. If several
        # targets hold the same heads, it counts once.
        layers = range(len(source.geometry.layers))
        holders = [targets] if numbers.num_pools == 1 else [[target] for target in targets]
        self._routes = tuple(tuple(tuple(_route(source, its, layer)) for layer in layers) for its in holders)

    def write(
        self, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange, *, with_digest: bool
    ) -> WrittenAtOnce:
        """Copy a span to every rank that holds a head of it, or to its owner; over when this returns."""
        if self._is_closed or self._region.epoch != self._epoch:
            raise DataPathFailed("the decode worker's memory belongs to another incarnation")
        owner, digest = 0, 0
        if self._numbers.num_pools > 1:
            if not self._numbers.are_of_one(target_blocks):
                raise DataPathFailed("the decode worker granted blocks of several ranks' pools")
            owner, target_blocks = self._numbers.at_owner(target_blocks)
        for first, stop, target, counts in self._routes[owner][span.layer]:
            low, high = max(first, span.head_first), min(stop, span.head_first + span.head_count)
            if low >= high:
                continue
            part = (
                span
                if high - low == span.head_count
                else dataclasses.replace(span, head_first=low, head_count=high - low)
            )
            digest += self._source.copy(blocks, target, target_blocks, part, with_digest=with_digest and counts)
        return WrittenAtOnce(digest & MASK if with_digest else None)

    def drain(self, timeout_s: float) -> bool:
        """Return True: no write is ever in progress after `write`."""
        return True

    def outlived(self) -> None:
        """Do nothing: the peer applied no writes itself."""

    def close(self) -> None:
        """Write nothing any more. The mapping ends with the last reference to it."""
        self._is_closed = True


class ShmOpener:
    """The `shm` data path of one prefill rank.

    Args:
        source: the rank's pool.
        host_id: this host.
    """

    name = "shm"

    def __init__(self, source: PoolIO, host_id: str) -> None:
        self._source = source
        self._host_id = host_id

    @property
    def problem(self) -> str:
        """Why nothing can be mapped: the directory does not exist; empty if it does."""
        return "" if DIRECTORY.is_dir() else f"there is no {DIRECTORY}"

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> ShmDataPath:
        """Map the offered file.

        Raises:
            DataPathRefused: it is not here, not that incarnation's, or its pools are not what the layout says.
        """
        if host_id != self._host_id:
            raise DataPathRefused("the peer is on another host")
        layout = self._source.geometry.layout
        geometries, numbers = pools_of(layout, offer.shm.pools)
        path = Path(offer.shm.path)
        if path.parent != DIRECTORY or not _NAME.fullmatch(path.name):
            raise DataPathRefused(f"{offer.shm.path[:100]!r} is no shared region")
        try:
            region = SharedRegion.attach(path, int.from_bytes(offer.shm.nonce, "little"))
        except ProtocolError as error:
            raise DataPathRefused(error.message) from error
        try:
            targets = _map(region, epoch, offer.shm.pools, geometries)
            return ShmDataPath(region, epoch, self._source, targets, numbers)
        except BaseException:
            region.close()
            raise


def sender_data_path(side: SenderSide) -> ShmOpener:
    """Make the opener of a prefill rank whose pool is in host memory."""
    assert side.io is not None
    return ShmOpener(side.io, side.host_id)


def receiver_data_path(side: ReceiverSide) -> ServedDataPath:
    """Make the offer of a decode worker whose pools are in a shared region."""
    nonce = side.region.nonce.to_bytes(NONCE_BYTES, "little")
    shm = kv_pb2.ShmOffer(path=str(side.region.path), nonce=nonce, nonce_offset_bytes=NONCE_AT, pools=side.places)
    return ServedDataPath(kv_pb2.DataPathOffer(data_path="shm", shm=shm))


def pools_of(layout: KVLayout, places: Sequence[kv_pb2.PoolPlace]) -> tuple[list[PoolGeometry], RankBlocks]:
    """Return the pools of a peer of this layout and the numbering of their blocks, if the offer makes sense.

    Several pools that are each rank 0 of 1 have sequences of their own; their blocks are numbered one pool after the
    other.
    """
    has_owners = len(places) > 1 and all((place.tp_rank, place.tp_size) == (0, 1) for place in places)
    if not has_owners:
        geometries = geometries_of(layout, places)
        return geometries, RankBlocks(num_blocks=geometries[0].num_blocks)
    if layout.has_state or not all(layer.whole for layer in layout.layers):
        raise DataPathRefused("ranks that have sequences of their own keep latents alone")
    if len({_sizes(place) for place in places}) > 1:
        raise DataPathRefused("its ranks have pools of different sizes")
    geometries = [geometry for place in places for geometry in geometries_of(layout, [place])]
    return geometries, RankBlocks(num_blocks=geometries[0].num_blocks, num_pools=len(geometries))


def geometries_of(layout: KVLayout, places: Sequence[kv_pb2.PoolPlace]) -> list[PoolGeometry]:
    """Return the geometries of the pools of a peer of this layout, if the offer makes sense."""
    size = len(places)
    found = []
    for rank, place in enumerate(places):
        if (place.tp_rank, place.tp_size) != (rank, size):
            raise DataPathRefused(f"pool {rank} of {size} is said to be rank {place.tp_rank} of {place.tp_size}")
        if not place.block_size or MAX_BLOCK_SIZE % place.block_size or not place.num_blocks:
            raise DataPathRefused(f"a pool of {place.num_blocks} blocks of {place.block_size} positions")
        if bool(place.num_state_slots) != layout.has_state:
            raise DataPathRefused(f"a pool of {place.num_state_slots} state slots")
        if _sizes(place) != _sizes(places[0]):
            raise DataPathRefused("its ranks have pools of different sizes")
        if any(not layer.whole and layer.num_heads % size and size % layer.num_heads for layer in layout.layers):
            raise DataPathRefused(f"the heads do not divide by {size} ranks")
        theirs = layout.in_blocks_of(place.block_size)
        geometry = PoolGeometry(theirs, place.num_blocks, rank, size, num_state_slots=place.num_state_slots)
        if geometry.num_bytes != place.num_bytes:
            raise DataPathRefused(f"its pool of rank {rank} has {place.num_bytes} bytes, not {geometry.num_bytes}")
        found.append(geometry)
    if not found:
        raise DataPathRefused("it offers no pools")
    return found


def _sizes(place: kv_pb2.PoolPlace) -> tuple[int, int, int]:
    return place.num_blocks, place.block_size, place.num_state_slots


def _map(
    region: SharedRegion, epoch: int, places: Sequence[kv_pb2.PoolPlace], geometries: Sequence[PoolGeometry]
) -> list[PoolIO]:
    if region.epoch != epoch:
        raise DataPathRefused("the shared region belongs to another incarnation of the peer")
    if [(p.offset_bytes, p.num_bytes) for p in region.pools] != [(p.offset_bytes, p.num_bytes) for p in places]:
        raise DataPathRefused("the shared region has other pools than were offered")
    return [
        PoolIO(np.frombuffer(region.pool(rank), dtype=np.uint8), geometry) for rank, geometry in enumerate(geometries)
    ]


def _route(source: PoolIO, targets: Sequence[PoolIO], layer: int) -> list[tuple[int, int, PoolIO, bool]]:
    """Return (first head, one past the last, target, is the first holder) of all heads that this rank could push."""
    mine = source.geometry.layer(layer).heads
    routes = []
    previous_first = -1
    for target in targets:
        theirs = target.geometry.layer(layer).heads
        first, stop = max(mine.first, theirs.first), min(mine.stop, theirs.stop)
        if first < stop:
            routes.append((first, stop, target, theirs.first != previous_first))
        previous_first = theirs.first
    return routes
