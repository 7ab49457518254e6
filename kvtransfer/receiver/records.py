"""Encoding of the transfer's events and commands in a ring: plain bytes, so that the two sides may be two processes.

A record is a kind, a slot, and the fields of one dataclass in their order. Both sides run the same version.
"""

import struct
from dataclasses import dataclass, fields

from google.protobuf.message import DecodeError

from baton.core.errors import ProtocolError
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.receiver.actions import (
    Completed,
    DigestWanted,
    Drained,
    IncomingFailed,
    ReceiverEvent,
    ReserveWanted,
)
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class GrantCommand:
    """Grant blocks to an attempt."""

    attempt: AttemptKey
    table: BlockTable


@dataclass(frozen=True, slots=True)
class DenyCommand:
    """Refuse blocks to an attempt."""

    attempt: AttemptKey
    reason: kv_pb2.Deny.Reason
    detail: str


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """Give an attempt up."""

    attempt: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseCommand:
    """The sequence of a complete incoming transfer has ended."""

    attempt: AttemptKey


Command = GrantCommand | DenyCommand | AbortCommand | ReleaseCommand
Record = ReceiverEvent | DigestWanted | Command
NO_SLOT = 0xFFFFFFFF
_NO_STATE = 0xFFFFFFFF
_KINDS: tuple[type[Record], ...] = (
    ReserveWanted,
    Completed,
    IncomingFailed,
    Drained,
    GrantCommand,
    DenyCommand,
    AbortCommand,
    ReleaseCommand,
    DigestWanted,
)
_HEAD = struct.Struct("<BI")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")


def encode_record(record: Record, slot: int = NO_SLOT) -> bytes:
    """Encode an event or a command."""
    parts = [_HEAD.pack(_KINDS.index(type(record)), slot)]
    for field in fields(record):
        parts.append(_encode(getattr(record, field.name)))
    return b"".join(parts)


def decode_record(data: bytes) -> tuple[Record, int]:
    """Decode a record; return the event or command, and its slot.

    Raises:
        ProtocolError: the record is invalid: the other side is corrupt, and must be ended.
    """
    try:
        kind, slot = _HEAD.unpack_from(data)
        cls = _KINDS[kind]
        reader = _Reader(data, _HEAD.size)
        record = cls(*(reader.read(field.type) for field in fields(cls)))
    except (struct.error, IndexError, ValueError, DecodeError) as error:
        raise ProtocolError(f"a ring holds a record that is none: {error!r}") from error
    if not reader.is_at_end:
        raise ProtocolError(f"a ring holds a {cls.__name__} and more in one record")
    return record, slot


def _encode(value: object) -> bytes:
    match value:
        case AttemptKey():
            return _encode(value.request_id) + _U32.pack(value.attempt)
        case BlockTable():
            count = len(value.blocks)
            slot = _NO_STATE if value.state_slot is None else value.state_slot
            return struct.pack(f"<III{count}I", value.block_size, slot, count, *value.blocks)
        case tuple():
            return struct.pack(f"<I{len(value)}I", len(value), *value)
        case str():
            return _sized(value.encode())
        case kv_pb2.SequenceState():
            return _sized(value.SerializeToString())
        case float():
            return _F64.pack(value)
        case int():
            return _U64.pack(value)
    raise AssertionError(f"no encoding for {type(value).__name__}")


def _sized(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


class _Reader:
    """Reads one value after the other from a record."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._start = start

    def read(self, kind: object) -> object:
        """Read the next value, of a field annotated as `kind`."""
        if kind is AttemptKey:
            return AttemptKey(self._sized().decode(), self._number(_U32))
        if kind is BlockTable:
            block_size, slot, count = (self._number(_U32) for _ in range(3))
            blocks = struct.unpack_from(f"<{count}I", self._data, self._start)
            self._start += 4 * count
            return BlockTable(blocks, block_size, None if slot == _NO_STATE else slot)
        if kind == tuple[int, ...]:
            count = self._number(_U32)
            numbers = struct.unpack_from(f"<{count}I", self._data, self._start)
            self._start += 4 * count
            return numbers
        if kind is str:
            return self._sized().decode()
        if kind is kv_pb2.SequenceState:
            return kv_pb2.SequenceState.FromString(self._sized())
        if kind is bool:
            return bool(self._number(_U64))
        if kind is float:
            (value,) = _F64.unpack_from(self._data, self._start)
            self._start += _F64.size
            return value
        return self._number(_U64)

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        return self._start == len(self._data)

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._start)
        self._start += form.size
        return int(value)

    def _sized(self) -> bytes:
        size = self._number(_U32)
        start, self._start = self._start, self._start + size
        if self._start > len(self._data):
            raise IndexError(f"{size} bytes at {start} of {len(self._data)}")
        return self._data[start : self._start]
