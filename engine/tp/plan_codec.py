"""Encodes messages between the ranks of a TP group: versioned, numbered, checked; any dataclass of plain values.

A frame is a header (magic, version, kind, count, schema, payload length), the crc32c of header and payload, and the
payload. `schema` is a checksum of the fields' names and types, so that two builds whose messages differ reject each
other instead of misreading the bytes. Within a payload everything is little endian and self-delimiting; anything
missing, left over or out of range is a `ProtocolError`. The codec does not know what the messages mean (`step.plan`),
and pickles nothing.
"""

import array
import dataclasses
import enum
import struct
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from crc32c import crc32c

from baton.core.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Join:
    """First message of a rank on its connection.

    Attributes:
        rank: its rank.
        token: the TP group's token; a process that does not know it cannot join.
    """

    rank: int
    token: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat.

    Attributes:
        num_operations: number of collectives that the rank has begun.
    """

    num_operations: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank is loaded and follows plans from now on."""


@dataclass(frozen=True, slots=True)
class RankFarewell:
    """Last message of a rank that ends.

    Attributes:
        error: `BatonError.to_wire` of the reason; empty: it was told to end.
        is_victim: it could not continue without another rank, which is the one at fault.
    """

    error: str
    is_victim: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Rank 0 ends; no message follows."""


CONTROL_KINDS: dict[int, type] = {1: Join, 2: Beat, 3: Ready, 4: RankFarewell, 5: Stop}


VERSION: Final = 1
MAGIC: Final = b"BPLN"
MAX_PAYLOAD_BYTES: Final = 1 << 30
_HEADER = struct.Struct("<4sHHQII")  # magic, version, kind, count, schema, bytes of the payload
_CRC = struct.Struct("<I")
FRAME_HEADER_BYTES: Final = _HEADER.size + _CRC.size
MAX_INT_BYTES: Final = 16  # of an integer outside of a tuple of integers
_COUNT, _FLOAT = struct.Struct("<I"), struct.Struct("<d")
_NARROW, _WIDE = "i", "q"  # item types of a packed tuple of integers; the narrowest that fits all of them
_WIDTHS = {array.array(code).itemsize: code for code in (_NARROW, _WIDE)}
assert sorted(_WIDTHS) == [4, 8]
assert sys.byteorder == "little"

Write = Callable[[bytearray, Any], None]
Read = Callable[["_Reader"], Any]
Message = TypeVar("Message")


class _Reader:
    """Reads the rest of a payload."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, num_bytes: int) -> memoryview:
        """The next `num_bytes` bytes.

        Raises:
            ProtocolError: there are fewer.
        """
        end = self._at + num_bytes
        if end > len(self._data):
            raise ProtocolError(f"a plan ends at byte {len(self._data)} where byte {end} is needed")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def count(self) -> int:
        """Read a number of items or bytes, each of which takes at least one byte."""
        count = int(_COUNT.unpack(self.take(_COUNT.size))[0])
        if count > len(self._data) - self._at:
            raise ProtocolError(f"a plan speaks of {count} items and has {len(self._data) - self._at} bytes left")
        return count

    def flag(self) -> bool:
        """Read one byte, 0 or 1."""
        value = self.take(1)[0]
        if value > 1:
            raise ProtocolError(f"a plan has the flag {value}")
        return value == 1

    def end(self) -> None:
        """Check that nothing is left over.

        Raises:
            ProtocolError: something is.
        """
        if self._at != len(self._data):
            raise ProtocolError(f"a plan has {len(self._data) - self._at} bytes that belong to no field")


@dataclasses.dataclass(frozen=True, slots=True)
class _Coder:
    """How one type is written, read, and named in a schema."""

    schema: str
    write: Write
    read: Read


class PlanCodec:
    """Encodes and decodes messages of the given kinds.

    Args:
        kinds: number of each message type, 1 ... 65535. Their fields are int, float, bool, str, bytes, tuples, enums,
            dataclasses, or one of these or None.
    """

    def __init__(self, kinds: Mapping[int, type]) -> None:
        self._coders = {number: _dataclass_coder(kind) for number, kind in kinds.items()}
        self._schemas = {number: crc32c(coder.schema.encode()) for number, coder in self._coders.items()}
        self._numbers = {kind: number for number, kind in kinds.items()}
        assert len(self._numbers) == len(kinds)

    def encode(self, message: object, count: int) -> bytes:
        """The frame of a message, the `count`-th in its direction."""
        number = self._numbers[type(message)]
        payload = bytearray()
        self._coders[number].write(payload, message)
        assert len(payload) <= MAX_PAYLOAD_BYTES
        header = _HEADER.pack(MAGIC, VERSION, number, count, self._schemas[number], len(payload))
        return b"".join((header, _CRC.pack(crc32c(payload, crc32c(header))), payload))

    def decode(self, frame: bytes | bytearray | memoryview, count: int) -> Any:
        """Decode the message of a whole frame.

        Raises:
            ProtocolError: it is not the `count`-th, or of another version or an unknown kind, or damaged.
        """
        data = memoryview(frame)
        num_bytes = payload_len(data)
        if len(data) != FRAME_HEADER_BYTES + num_bytes:
            raise ProtocolError(f"a plan of {len(data)} bytes says that its payload has {num_bytes}")
        _, _, number, found, schema, _ = _HEADER.unpack_from(data)
        payload = data[FRAME_HEADER_BYTES:]
        (crc,) = _CRC.unpack_from(data, _HEADER.size)
        if crc32c(payload, crc32c(data[: _HEADER.size])) != crc:
            raise ProtocolError("crc32c of a plan differs")
        coder = self._coders.get(number)
        if coder is None:
            raise ProtocolError(f"a plan is of the unknown kind {number}", kind=number)
        if schema != self._schemas[number]:
            raise ProtocolError(f"a plan of kind {number} has other fields than here", kind=number)
        if found != count:
            raise ProtocolError(f"plan {found} came where {count} is next", found=found, wanted=count)
        reader = _Reader(payload)
        message = coder.read(reader)
        reader.end()
        return message


def payload_len(header: bytes | bytearray | memoryview) -> int:
    """Number of bytes after the `FRAME_HEADER_BYTES` of a frame that begins with these bytes.

    Raises:
        ProtocolError: no frame of this version begins like this.
    """
    if len(header) < FRAME_HEADER_BYTES:
        raise ProtocolError(f"a plan has {len(header)} of the {FRAME_HEADER_BYTES} bytes of its header")
    magic, version, _, _, _, num_bytes = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ProtocolError(f"a plan begins with {magic!r}")
    if version != VERSION:
        raise ProtocolError(f"a plan is of version {version}; this is version {VERSION}", version=version)
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a plan says that its payload has {num_bytes} bytes")
    return int(num_bytes)


def _dataclass_coder(kind: Any) -> _Coder:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    coders = [_coder(hints[name]) for name in names]
    writes = [(name, coder.write) for name, coder in zip(names, coders, strict=True)]
    reads = [(name, coder.read) for name, coder in zip(names, coders, strict=True)]

    def write(out: bytearray, value: Any) -> None:
        for name, write_field in writes:
            write_field(out, getattr(value, name))

    def read(reader: _Reader) -> Any:
        return kind(**{name: read_field(reader) for name, read_field in reads})

    fields = ",".join(f"{name}:{coder.schema}" for name, coder in zip(names, coders, strict=True))
    return _Coder(f"{kind.__name__}({fields})", write, read)


def _coder(hint: Any) -> _Coder:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in inner if kind is not type(None)]
        assert len(kinds) == 1, f"{hint}: one type, or None"
        return _optional_coder(_coder(kinds[0]))
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return _INTS if inner[0] is int else _sequence_coder(_coder(inner[0]))
        return _product_coder([_coder(kind) for kind in inner])
    if dataclasses.is_dataclass(hint):
        return _dataclass_coder(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_coder(hint)
    assert hint in _PLAIN, f"{hint} has no form as bytes"
    return _PLAIN[hint]


def _optional_coder(of: _Coder) -> _Coder:
    def write(out: bytearray, value: Any) -> None:
        out.append(value is not None)
        if value is not None:
            of.write(out, value)

    return _Coder(f"{of.schema}?", write, lambda reader: of.read(reader) if reader.flag() else None)


def _sequence_coder(of: _Coder) -> _Coder:
    def write(out: bytearray, value: Any) -> None:
        out += _COUNT.pack(len(value))
        for item in value:
            of.write(out, item)

    return _Coder(f"{of.schema}*", write, lambda reader: tuple(of.read(reader) for _ in range(reader.count())))


def _product_coder(parts: list[_Coder]) -> _Coder:
    def write(out: bytearray, value: Any) -> None:
        for part, item in zip(parts, value, strict=True):
            part.write(out, item)

    schema = f"({','.join(part.schema for part in parts)})"
    return _Coder(schema, write, lambda reader: tuple(part.read(reader) for part in parts))


def _enum_coder(kind: type[enum.Enum]) -> _Coder:
    members = list(kind)

    def read(reader: _Reader) -> enum.Enum:
        place = reader.take(1)[0]
        if place >= len(members):
            raise ProtocolError(f"a plan has member {place} of {kind.__name__}")
        return members[place]

    names = "|".join(member.name for member in members)
    return _Coder(f"{kind.__name__}<{names}>", lambda out, value: out.append(members.index(value)), read)


def _write_ints(out: bytearray, value: Any) -> None:
    try:
        packed = array.array(_NARROW, value)
    except OverflowError:
        packed = array.array(_WIDE, value)
    out += _COUNT.pack(len(packed))
    out.append(packed.itemsize)
    out += packed.tobytes()


def _read_ints(reader: _Reader) -> tuple[int, ...]:
    count = int(_COUNT.unpack(reader.take(_COUNT.size))[0])
    width = reader.take(1)[0]
    if width not in _WIDTHS:
        raise ProtocolError(f"a plan has integers of {width} bytes")
    return tuple(array.array(_WIDTHS[width], reader.take(count * width).tobytes()))


def _write_bytes(out: bytearray, value: Any) -> None:
    out += _COUNT.pack(len(value))
    out += value


def _write_text(out: bytearray, value: Any) -> None:
    _write_bytes(out, value.encode("utf-8", "surrogatepass"))


def _read_text(reader: _Reader) -> str:
    try:
        return reader.take(reader.count()).tobytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a plan has text that is not UTF-8: {error.reason}") from error


def _write_int(out: bytearray, value: Any) -> None:
    num_bytes = value.bit_length() // 8 + 1
    assert num_bytes <= MAX_INT_BYTES
    out.append(num_bytes)
    out += value.to_bytes(num_bytes, "little", signed=True)


def _read_int(reader: _Reader) -> int:
    num_bytes = reader.take(1)[0]
    value = int.from_bytes(reader.take(num_bytes), "little", signed=True)
    if not 0 < num_bytes <= MAX_INT_BYTES or value.bit_length() // 8 + 1 != num_bytes:
        raise ProtocolError(f"a plan has an integer of {num_bytes} bytes")
    return value


def _write_float(out: bytearray, value: Any) -> None:
    out += _FLOAT.pack(value)


_INTS = _Coder("int*", _write_ints, _read_ints)
_PLAIN: Final[dict[Any, _Coder]] = {
    int: _Coder("int", _write_int, _read_int),
    float: _Coder("float", _write_float, lambda reader: float(_FLOAT.unpack(reader.take(_FLOAT.size))[0])),
    bool: _Coder("bool", lambda out, value: out.append(value), lambda reader: reader.flag()),
    str: _Coder("str", _write_text, _read_text),
    bytes: _Coder("bytes", _write_bytes, lambda reader: reader.take(reader.count()).tobytes()),
}
