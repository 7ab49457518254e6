"""The bytes of a data frame: a fixed header, then K and V of consecutive positions of one layer and a head range.

Payload order: K, then V; of each, every block that the positions touch; of each block [heads, positions in it,
head_dim]. A whole block of a head range is one contiguous piece, as it is in the pool. Every number is little endian.

A length on the wire is never trusted: `decode` compares all of them with the bytes that came, and `FrameShape.check`
with the layout. This module refuses to know about landings; fencing is `landing_protocol`'s.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from crc32c import crc32c

from baton.core.errors import ProtocolError
from baton.kvcache.layout import KVLayout

MAGIC = b"KVP1"
VERSION = 1
FRAME_OVERHEAD_BYTES = 32 << 10  # what a frame is charged beside its payload, so that a window bounds their number too
_HEADER = struct.Struct("<4sBBHQQIIHHHHIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
_MAX_U16 = (1 << 16) - 1

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """Where a payload belongs. (`d_epoch`, `landing_id`, `attempt`) is its fence."""

    d_epoch: int
    landing_id: int
    attempt: int
    seq: int  # counts the frames posted for a landing; for logs, never trusted
    layer: int
    head_first: int
    head_count: int
    first: int  # logical position
    count: int
    payload_bytes: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count

    @property
    def charge_bytes(self) -> int:
        """What it takes of the window."""
        return self.payload_bytes + FRAME_OVERHEAD_BYTES


def is_frame(part: Bytes) -> bool:
    """Whether a message whose first part this is claims to be a data frame. A Control never begins like one."""
    return bytes(part[: len(MAGIC)]) == MAGIC


def payload_crc(payload: Bytes) -> int:
    """The part of a frame's checksum that can be computed before its header is known."""
    return crc32c(payload)


def encode(header: FrameHeader, crc_of_payload: int) -> bytes:
    """Header bytes. The checksum covers the payload, then the header."""
    assert header.layer <= _MAX_U16
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        0,
        0,
        header.d_epoch,
        header.landing_id,
        header.attempt,
        header.seq,
        header.layer,
        header.head_first,
        header.head_count,
        0,
        header.first,
        header.count,
        header.payload_bytes,
        0,
    )[: -_CRC.size]
    return packed + _CRC.pack(crc32c(packed, crc_of_payload))


def decode(head: Bytes, payload: Bytes) -> FrameHeader:
    """The header of a frame that arrived whole and unchanged.

    Raises:
        ProtocolError: it did not, or is of another version. Nothing about it can be believed, not even whose it is.
    """
    if len(head) != HEADER_BYTES:
        raise ProtocolError(f"a frame header has {HEADER_BYTES} bytes, not {len(head)}")
    magic, version, flags, reserved0, epoch, landing_id, attempt, seq, *rest = _HEADER.unpack(head)
    layer, head_first, head_count, reserved1, first, count, payload_bytes, crc = rest
    if magic != MAGIC or version != VERSION or flags or reserved0 or reserved1:
        raise ProtocolError(f"not a frame of KVP/1: magic {magic!r}, version {version}, flags {flags}")
    if payload_bytes != len(payload):
        raise ProtocolError(f"a frame announces {payload_bytes} payload bytes and carries {len(payload)}")
    if crc32c(bytes(head[: -_CRC.size]), crc32c(payload)) != crc:
        raise ProtocolError("crc32c of a frame differs")
    return FrameHeader(
        d_epoch=epoch,
        landing_id=landing_id,
        attempt=attempt,
        seq=seq,
        layer=layer,
        head_first=head_first,
        head_count=head_count,
        first=first,
        count=count,
        payload_bytes=payload_bytes,
    )


@dataclass(frozen=True, slots=True)
class FrameShape:
    """What a layout, and the limit on a frame, say about frames."""

    layout: KVLayout
    max_frame_bytes: int

    def payload_bytes(self, count: int, head_count: int) -> int:
        """Bytes of K and V of `count` positions of `head_count` heads in one layer."""
        return count * head_count * (self.layout.bytes_per_position // self.layout.num_kv_heads)

    def split(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Cut positions into pieces (first, count) that fit a frame, at block boundaries if a block fits."""
        size = self.layout.block_size
        limit = max(1, self.max_frame_bytes // self.layout.bytes_per_position)
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
            ProtocolError: it names layers or heads that are not there, or its payload has another size.
        """
        layout = self.layout
        if header.layer >= layout.num_layers:
            raise ProtocolError(f"a frame for layer {header.layer}, there are {layout.num_layers}", layer=header.layer)
        if not 0 < header.head_count <= layout.num_kv_heads - header.head_first:
            raise ProtocolError(f"a frame for {header.head_count} heads from {header.head_first}")
        if header.count == 0 or header.payload_bytes != self.payload_bytes(header.count, header.head_count):
            raise ProtocolError(f"{header.payload_bytes} payload bytes for {header.count} positions")
