"""The header of a data frame, and what a layout says about it. The payload's order of bytes is `pool_io`'s.

A frame is a header and the rows of consecutive positions of a head range of one layer. The payload follows the header,
or lies in the receiver's pool already (`is_written`). Every number is little endian. The header has a checksum of its
own, so that it can be believed before the payload is there; the payload has exactly one check: its digest
(`kernels.kv.digest`), or its crc32c where digests are off.

A length on the wire is never trusted: `FrameShape.check` compares all of them with the layout. This module refuses to
know about incoming transfers; fencing is `receiver_protocol`'s.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crc32c import crc32c

from baton.core.errors import ProtocolError
from baton.kvcache.layout import MAX_BLOCK_SIZE, KVLayout

# What a frame covers: some positions of some heads of one layer.


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
FRAME_OVERHEAD_BYTES = 32 << 10  # what a frame is charged beside its payload, so that a window bounds their number too
_HEADER = struct.Struct("<4sBBHQQIIHHHHIIIQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
_WRITTEN, _DIGEST, _PAYLOAD_CRC = 1, 2, 4
_MAX_U16 = (1 << 16) - 1

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """Where a payload belongs. (`d_epoch`, `incoming_id`, `attempt`) is its fence."""

    d_epoch: int
    incoming_id: int
    attempt: int
    seq: int  # counts the frames posted for an incoming transfer; for logs, never trusted
    layer: int
    head_first: int
    head_count: int
    order_block_size: int  # the sender's block size, which orders the payload
    first: int  # logical position
    count: int
    payload_bytes: int
    is_written: bool = False  # the payload is in the receiver's pool already
    payload_digest: int | None = None
    payload_crc: int | None = None

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count

    @property
    def span(self) -> KVRange:
        """What it covers."""
        return KVRange(self.layer, self.first, self.count, self.head_first, self.head_count)

    @property
    def charge_bytes(self) -> int:
        """What it takes of the window."""
        return self.payload_bytes + FRAME_OVERHEAD_BYTES


def is_frame(message: Bytes) -> bool:
    """Whether a message that begins like this claims to be a data frame. A Control never does."""
    return bytes(message[: len(MAGIC)]) == MAGIC


def crc_of(pieces: Iterable[Bytes]) -> int:
    """crc32c of a payload that lies in pieces."""
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return value


def encode_header(header: FrameHeader, payload_digest: int | None = None, payload_crc: int | None = None) -> bytes:
    """The bytes of a header, its checksum included; the payload's check may be given apart."""
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
    """The header that arrived whole and unchanged; nothing is said about its payload.

    Raises:
        ProtocolError: it did not, or is of another version. Nothing about it can be believed, not even whose it is.
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
    """What a layout, and the limit on a frame, say about frames."""

    def __init__(self, layout: KVLayout, max_frame_bytes: int) -> None:
        self.layout = layout
        self.max_frame_bytes = max_frame_bytes
        self._head_bytes = tuple(layer.head_bytes for layer in layout.layers)

    def payload_bytes(self, layer: int, count: int, head_count: int) -> int:
        """Bytes of `count` positions of `head_count` heads of a layer."""
        return count * head_count * self._head_bytes[layer]

    def split(self, layer: int, first: int, count: int, head_count: int) -> Iterator[tuple[int, int]]:
        """Cut positions into pieces (first, count) that fit a frame, at block boundaries if a block fits."""
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
        """Compare a header with the layout.

        Raises:
            ProtocolError: it names layers, heads or an order that are not there, or its payload has another size.
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
