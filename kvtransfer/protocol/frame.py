"""The header of a data frame, and its checks against a KV layout. `pool_io` defines the byte order of payloads.

A frame is a header and the rows of consecutive positions of a head range of one layer. The payload follows the header,
or is already in the receiver's pool (`is_written`). All numbers are little endian. The header has its own checksum, so
that the receiver can trust it before the payload arrives. The payload has exactly one check: its digest
(`kernels.kv.digest`), or its crc32c where digests are off.

A length on the wire is never trusted: `FrameShape.check` compares all of them with the layout. This module does not
know about incoming transfers; fencing is `receiver.protocol`'s job.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crc32c import crc32c

from baton.core.errors import ProtocolError
from baton.kvcache.layout import MAX_BLOCK_SIZE, KVLayout

# What a frame covers: a range of positions and heads of one layer.


@dataclass(frozen=True, slots=True)
class KVRange:
    """Logical positions [first, first + count) of heads [head_first, head_first + head_count) of a layer."""

    layer: int
    first: int
    count: int
    head_first: int
    head_count: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count


MAGIC = b"KVP2"
VERSION = 2
FRAME_OVERHEAD_BYTES = 32 << 10  # charged per frame beside its payload: so a window also bounds the number of frames
_HEADER = struct.Struct("<4sBBHQQIIHHHHIIIQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
_WRITTEN, _DIGEST, _PAYLOAD_CRC = 1, 2, 4
_MAX_U16 = (1 << 16) - 1

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """The destination of a payload. (`d_epoch`, `incoming_id`, `attempt`) is its fence."""

    d_epoch: int
    incoming_id: int
    attempt: int
    seq: int  # number of the frame within its incoming transfer; for logs, never trusted
    layer: int
    head_first: int
    head_count: int
    order_block_size: int  # the sender's block size, which determines the order of the payload
    first: int  # logical position
    count: int
    payload_bytes: int
    is_written: bool = False  # the payload is already in the receiver's pool
    payload_digest: int | None = None
    payload_crc: int | None = None

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count

    @property
    def span(self) -> KVRange:
        """The positions and heads that the frame covers."""
        return KVRange(self.layer, self.first, self.count, self.head_first, self.head_count)

    @property
    def charge_bytes(self) -> int:
        """Bytes of the window that the frame uses."""
        return self.payload_bytes + FRAME_OVERHEAD_BYTES


def is_frame(message: Bytes) -> bool:
    """Return whether the message starts with the magic of a data frame. A Control never does."""
    return bytes(message[: len(MAGIC)]) == MAGIC


def crc_of(pieces: Iterable[Bytes]) -> int:
    """Return the crc32c of a payload given in pieces."""
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return value


def encode_header(header: FrameHeader, payload_digest: int | None = None, payload_crc: int | None = None) -> bytes:
    """Encode a header with its checksum. `payload_digest` and `payload_crc` override those in `header`."""
    assert header.layer <= _MAX_U16
    digest = header.payload_digest if payload_digest is None else payload_digest
    payload_crc = header.payload_crc if payload_crc is None else payload_crc
    flags = _WRITTEN if header.is_written else 0
    flags |= _DIGEST if digest is not None else 0
    flags |= _PAYLOAD_CRC if payload_crc is not None else 0
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        flags,
        header.order_block_size,
        header.d_epoch,
        header.incoming_id,
        header.attempt,
        header.seq,
        header.layer,
        header.head_first,
        header.head_count,
        0,
        header.first,
        header.count,
        header.payload_bytes,
        digest or 0,
        payload_crc or 0,
        0,
    )[: -_CRC.size]
    return packed + _CRC.pack(crc32c(packed))


def decode_header(data: Bytes) -> FrameHeader:
    """Decode a header and verify its checksum. The payload is not checked here.

    Raises:
        ProtocolError: the header is damaged or of another version. None of its fields can be trusted, not even those
            that identify the transfer.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, flags, order, epoch, incoming_id, attempt, seq, *rest = _HEADER.unpack(data)
    layer, head_first, head_count, reserved, first, count, payload_bytes, digest, payload_crc, crc = rest
    if magic != MAGIC or version != VERSION or flags & ~(_WRITTEN | _DIGEST | _PAYLOAD_CRC) or reserved:
        raise ProtocolError(f"not a frame of KVP/2: magic {magic!r}, version {version}, flags {flags}")
    if crc32c(bytes(data[: -_CRC.size])) != crc:
        raise ProtocolError("crc32c of a frame header differs")
    return FrameHeader(
        d_epoch=epoch,
        incoming_id=incoming_id,
        attempt=attempt,
        seq=seq,
        layer=layer,
        head_first=head_first,
        head_count=head_count,
        order_block_size=order,
        first=first,
        count=count,
        payload_bytes=payload_bytes,
        is_written=bool(flags & _WRITTEN),
        payload_digest=digest if flags & _DIGEST else None,
        payload_crc=payload_crc if flags & _PAYLOAD_CRC else None,
    )


class FrameShape:
    """The constraints on frames that follow from a layout and the maximum frame size."""

    def __init__(self, layout: KVLayout, max_frame_bytes: int) -> None:
        self.layout = layout
        self.max_frame_bytes = max_frame_bytes
        self._head_bytes = tuple(layer.head_bytes for layer in layout.layers)

    def payload_bytes(self, layer: int, count: int, head_count: int) -> int:
        """Return the payload size of `count` positions of `head_count` heads of a layer."""
        return count * head_count * self._head_bytes[layer]

    def problem(self, rank: int, size: int) -> str:
        """Why this rank of `size` cannot push such layers; empty if it can. A frame has all its heads of a position."""
        for index in range(self.layout.num_layers):
            num_bytes = self.payload_bytes(index, 1, self.layout.heads_of(index, rank, size).count)
            if num_bytes > self.max_frame_bytes:
                return f"layer {index} keeps {num_bytes} bytes per row and rank, a frame holds {self.max_frame_bytes}"
        return ""

    def split(self, layer: int, first: int, count: int, head_count: int) -> Iterator[tuple[int, int]]:
        """Split positions into ranges (first, count) that fit a frame, at block boundaries if a block fits."""
        size = self.layout.rows_per_block(layer)
        limit = max(1, self.max_frame_bytes // self.payload_bytes(layer, 1, head_count))
        end = first + count
        while first < end:
            stop = min(first + limit, end)
            if stop < end and stop // size * size > first:
                stop = stop // size * size
            yield first, stop - first
            first = stop

    def check(self, header: FrameHeader) -> None:
        """Check a header against the layout.

        Raises:
            ProtocolError: the header names layers, heads or a block order that do not exist, or its payload has another
                size.
        """
        layout = self.layout
        if header.layer >= layout.num_layers:
            num_layers = layout.num_layers
            raise ProtocolError(f"a frame for layer {header.layer}, there are {num_layers}", layer=header.layer)
        if not 0 < header.head_count <= layout.layers[header.layer].num_heads - header.head_first:
            raise ProtocolError(f"a frame for {header.head_count} heads from {header.head_first}")
        if not header.order_block_size or MAX_BLOCK_SIZE % header.order_block_size:
            raise ProtocolError(f"a frame in the order of blocks of {header.order_block_size}")
        size = self.payload_bytes(header.layer, header.count, header.head_count)
        if header.count == 0 or header.payload_bytes != size:
            raise ProtocolError(f"{header.payload_bytes} payload bytes for {header.count} positions")
