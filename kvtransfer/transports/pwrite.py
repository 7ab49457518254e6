"""The `pwrite` data path: a decode worker of this host, whose pools are written through their file, never mapped in.

As `shm`, but what lands goes through `pwrite` (POSIX): a prefill worker's page tables do not hold the peer's pools, and
a payload is copied once more. For hosts where mapping pools of many peers costs more than that copy. The offer is an
`ShmOffer` in `details`. Nothing in it is believed: the file must hold its nonce and the epoch of the transfer's life,
and where pools lie is computed from the layout. Whether a write is allowed is `push`'s to know.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from baton.core.errors import ProtocolError
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.pool_io import PoolIO, PoolMemory
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.data_path import ReceiverSide, ServedDataPath
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused, SenderSide, WrittenAtOnce
from baton.kvtransfer.shared_region import DIRECTORY, NONCE_AT, NONCE_BYTES, SharedRegion
from baton.kvtransfer.transports.shm import geometries_of
from baton.proto import kv_pb2

NAME = "pwrite"


class PwriteDataPath:
    """The pools of all ranks of one incarnation of a decode worker.

    Args:
        region: mapped, but only its header is ever touched.
        file: the same, open for writing; closed with this.
        epoch: of the incarnation.
        source: this rank's pool.
        geometries: of the decode worker's pools, by rank.
    """

    name = NAME

    def __init__(
        self, region: SharedRegion, file: int, epoch: int, source: PoolIO, geometries: Sequence[PoolGeometry]
    ) -> None:
        self.num_blocks = geometries[0].num_blocks
        self.num_state_slots = geometries[0].num_state_slots
        self._region = region
        self._file = file
        self._epoch = epoch
        self._source = source
        memories = [np.frombuffer(region.pool(rank), dtype=np.uint8) for rank in range(len(geometries))]
        self._targets = [
            (place.offset_bytes, memory, PoolIO(memory, geometry))
            for place, memory, geometry in zip(region.pools, memories, geometries, strict=True)
        ]

    def write(
        self, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange, *, with_digest: bool
    ) -> WrittenAtOnce:
        """Write a span to every rank that holds a head of it; over when this returns.

        Raises:
            DataPathFailed: the file belongs to another incarnation, or did not take all of it.
        """
        if self._file < 0 or self._region.epoch != self._epoch:
            raise DataPathFailed("the decode worker's memory belongs to another incarnation")
        order = self._source.geometry.layer(span.layer).rows_per_block
        for offset_bytes, memory, target in self._targets:
            heads = target.geometry.layer(span.layer).heads
            low, high = max(heads.first, span.head_first), min(heads.stop, span.head_first + span.head_count)
            if low >= high:
                continue
            part = dataclasses.replace(span, head_first=low, head_count=high - low)
            payload, done = self._source.read(blocks, part, order), 0
            for piece in target.pieces(target_blocks, part, order):
                place = offset_bytes + _address(piece) - memory.ctypes.data
                self._put(payload[done : done + len(piece)], place)
                done += len(piece)
        return WrittenAtOnce(self._source.digest(blocks, span) if with_digest else None)

    def drain(self, timeout_s: float) -> bool:
        """Nothing is ever under way after a write."""
        return True

    def outlived(self) -> None:
        """It applied nothing itself."""

    def close(self) -> None:
        """Write nothing any more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _put(self, payload: memoryview, place: int) -> None:
        try:
            written = os.pwrite(self._file, payload, place)
        except OSError as error:
            raise DataPathFailed(f"its file cannot be written: {error.strerror}") from error
        if written != len(payload):
            raise DataPathFailed(f"its file took {written} of {len(payload)} bytes")


class PwriteOpener:
    """The `pwrite` data path as one prefill rank has it.

    Args:
        source: its pool.
        host_id: of this host.
    """

    name = NAME

    def __init__(self, source: PoolIO, host_id: str) -> None:
        self._source = source
        self._host_id = host_id

    @property
    def problem(self) -> str:
        """Without the folder there is nothing to write."""
        return "" if DIRECTORY.is_dir() else f"there is no {DIRECTORY}"

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> PwriteDataPath:
        """Open the file that is offered.

        Raises:
            DataPathRefused: it is not here, not that incarnation's, or its pools are not what the layout says.
        """
        if host_id != self._host_id:
            raise DataPathRefused("the peer is on another host")
        try:
            told = kv_pb2.ShmOffer.FromString(offer.details)
        except DecodeError as error:
            raise DataPathRefused("its details are no message") from error
        geometries = geometries_of(self._source.geometry.layout, told.pools)
        path = Path(told.path)
        if path.parent != DIRECTORY:
            raise DataPathRefused(f"{told.path[:100]!r} is not in {DIRECTORY}")
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            raise DataPathRefused(f"{told.path[:100]!r} cannot be opened") from error
        try:
            region = SharedRegion.attach(path, int.from_bytes(told.nonce, "little"), is_touched=False)
            # The path was opened twice: by the nonce it is the same file.
            if os.pread(file, NONCE_BYTES, NONCE_AT) != told.nonce or region.epoch != epoch:
                raise DataPathRefused("the shared region belongs to another incarnation of the peer")
            if [(p.offset_bytes, p.num_bytes) for p in region.pools] != [
                (p.offset_bytes, p.num_bytes) for p in told.pools
            ]:
                raise DataPathRefused("the shared region has other pools than were offered")
            return PwriteDataPath(region, file, epoch, self._source, geometries)
        except ProtocolError as error:
            os.close(file)
            raise DataPathRefused(error.message) from error
        except BaseException:
            os.close(file)
            raise


def sender_data_path(side: SenderSide) -> PwriteOpener:
    """The data path of a prefill rank whose pool is in host memory."""
    assert side.io is not None
    return PwriteOpener(side.io, side.host_id)


def receiver_data_path(side: ReceiverSide) -> ServedDataPath:
    """The offer of a decode worker whose pools are in a shared region."""
    nonce = side.region.nonce.to_bytes(NONCE_BYTES, "little")
    told = kv_pb2.ShmOffer(path=str(side.region.path), nonce=nonce, nonce_offset_bytes=NONCE_AT, pools=side.places)
    return ServedDataPath(kv_pb2.DataPathOffer(data_path=NAME, details=told.SerializeToString()))


def _address(piece: memoryview | PoolMemory) -> int:
    return int(np.frombuffer(piece, dtype=np.uint8).ctypes.data)
