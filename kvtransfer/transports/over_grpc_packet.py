"""The bytes of a `Packet` (proto/kv.proto), written and read without a copy of the payload by protobuf.

A packet is a Control; or a frame's header with the first part of its payload; or the next part of the payload of the
frame before. Parts of different frames never mix; a Control may come between two parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import ProtocolError
from baton.kvtransfer.protocol.frame import HEADER_BYTES, Bytes

PART_BYTES = 1 << 20  # of a payload in one packet; measured best
_CONTROL, _HEADER, _PAYLOAD = (number << 3 | 2 for number in (1, 2, 3))  # tags of length-delimited fields
_MAX_VARINT_BYTES = 5


@dataclass(frozen=True, slots=True)
class Packet:
    """What one packet holds."""

    control: Bytes | None = None
    header: Bytes | None = None
    payload: memoryview | None = None


def encode_control_packet(message: bytes) -> bytes:
    """A packet with a Control."""
    return _prefix(_CONTROL, len(message)) + message


def encode_frame_packet(header: bytes | None, part: Sequence[Bytes]) -> bytes:
    """A packet with a header, if it is the first of its frame, and the next part of the payload, gathered."""
    size = sum(map(len, part))
    head = b"" if header is None else _prefix(_HEADER, len(header)) + header
    return b"".join((head, _prefix(_PAYLOAD, size), *part) if size else (head,))


def decode_packet(data: bytes) -> Packet:
    """What a packet holds; its payload stays where it is.

    Raises:
        ProtocolError: it is none of the three kinds.
    """
    view = memoryview(data)
    found: dict[int, memoryview] = {}
    start = 0
    while start < len(view):
        tag = view[start]
        size, start = _varint(view, start + 1)
        is_in_order = all(tag > before for before in found)
        if tag not in (_CONTROL, _HEADER, _PAYLOAD) or not is_in_order or size > len(view) - start:
            raise ProtocolError("not a packet, or one with fields that do not go together")
        found[tag] = view[start : start + size]
        start += size
    control, header, payload = (found.get(tag) for tag in (_CONTROL, _HEADER, _PAYLOAD))
    if not found or (control is not None and len(found) > 1):
        raise ProtocolError("a packet holds a Control or a part of a frame")
    if header is not None and len(header) != HEADER_BYTES:
        raise ProtocolError(f"a frame header of {len(header)} bytes in a packet")
    return Packet(control, None if header is None else bytes(header), payload)


def _prefix(tag: int, size: int) -> bytes:
    prefix = bytearray([tag])
    while size >= 128:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def _varint(view: memoryview, start: int) -> tuple[int, int]:
    """The number at `start`, and where it ends."""
    value = 0
    for index, byte in enumerate(view[start : start + _MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, start + index + 1
    raise ProtocolError("a packet ends in a number")
