"""Messages that no client would send, drawn from the descriptors of our own protocol.

Three kinds of bytes: any message of a type with any of its fields; a good message with a few fields replaced; and the
bytes of either, damaged. Hypothesis draws all of it, so a seed gives the same bytes again.
"""

import math

from google.protobuf import message_factory
from hypothesis import strategies as st

MAX_DEPTH = 3
TEXTS = [
    "",
    "a",
    "tiny",
    "prefill-0",
    "decode-0",
    "baton-0",
    "\0",
    "é" * 300,
    "\N{SNOWMAN}" * 40,
    "x" * 5000,
    "../..",
    "-1",
]
ADDRESSES = [
    "tcp://",
    "tcp://127.0.0.1:1",
    "grpc://127.0.0.1:1",
    "grpc://[::1]:70000",
    "tcp://127.0.0.1:x",
    "inproc://a",
]
GRAMMARS = [
    "{",
    "(",
    "a|b",
    '{"type": "object"}',
    '{"$ref": "#"}',
    "start: start",
    "start: /a/",
    "[0-9]{1,9}",
    "a{99999}",
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 100.0, 1e-320, 1e308, math.nan, math.inf, -math.inf]
WIDTHS = {"uint32": (0, (1 << 32) - 1), "uint64": (0, (1 << 64) - 1), "fixed64": (0, (1 << 64) - 1)}
WIDTHS |= {"fixed32": (0, (1 << 32) - 1), "int32": (-(1 << 31), (1 << 31) - 1), "int64": (-(1 << 63), (1 << 63) - 1)}
KINDS = {3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 13: "uint32"}
DOUBLE, BOOL, STRING, MESSAGE, BYTES, ENUM = 1, 8, 9, 11, 12, 14
UNKNOWN = [b"", b"\xf8\x3f\x05", b"\xfa\x7f\x03abc", b"\xa2\x06\x00", b"\xfd\xff\xff\xff\x0f\x00\x00\x00\x00"]


def scalars(field, known=()):
    """Values of one field; `known` are integers and texts that mean something to who is asked."""
    if field.type == DOUBLE:
        return st.sampled_from(FLOATS) | st.floats()
    if field.type == BOOL:
        return st.booleans()
    if field.type == STRING:
        texts = [value for value in known if isinstance(value, str)]
        return st.sampled_from([*TEXTS, *ADDRESSES, *GRAMMARS, *texts]) | st.text(max_size=20)
    if field.type == BYTES:
        return st.binary(max_size=64) | st.sampled_from([b"", b"\0" * 32, b"\xff" * 4096])
    if field.type == ENUM:
        return st.sampled_from([*field.enum_type.values_by_number, 99, -1])
    low, high = WIDTHS[KINDS[field.type]]
    numbers = [value for value in known if isinstance(value, int) and low <= value <= high]
    edges = [low, high, low + 1, high - 1, 0, 1, 2, 3, 16, 17, 128, 4095, 4096, 1 << 20, *numbers]
    return st.sampled_from([value for value in edges if low <= value <= high]) | st.integers(low, high)


def is_repeated(field):
    return field.label == field.LABEL_REPEATED


def is_map(field):
    return field.type == MESSAGE and field.message_type.GetOptions().map_entry


@st.composite
def messages(draw, descriptor, known=(), depth=0, limit=6):
    """Any message of a type. Of a oneof the field that is set last stays, as on the wire."""
    message = message_factory.GetMessageClass(descriptor)()
    if not descriptor.fields:
        return message
    fields = draw(
        st.lists(st.sampled_from(list(descriptor.fields)), max_size=limit, unique_by=lambda field: field.number)
    )
    for field in fields:
        put(draw, message, field, known, depth)
    return message


def put(draw, message, field, known=(), depth=0):
    """Set one field to a drawn value."""
    if is_map(field):
        return
    if field.type == MESSAGE:
        if depth >= MAX_DEPTH:
            return
        inner = messages(field.message_type, known, depth + 1, 3)
        if is_repeated(field):
            getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
        else:
            getattr(message, field.name).SetInParent()
            getattr(message, field.name).CopyFrom(draw(inner))
    elif is_repeated(field):
        values = draw(st.lists(scalars(field, known), max_size=8))
        if draw(st.integers(0, 9)) == 0 and values:
            values = values * draw(st.sampled_from([20, 300, 5000]))
        getattr(message, field.name)[:] = values
    else:
        setattr(message, field.name, draw(scalars(field, known)))


@st.composite
def nearly(draw, good, known=()):
    """A good message with up to three fields replaced, on any level."""
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(draw(st.integers(0, 3))):
        at, depth = message, 0
        while True:
            field = draw(st.sampled_from(list(at.DESCRIPTOR.fields)))
            if field.type != MESSAGE or is_repeated(field) or not at.HasField(field.name) or draw(st.booleans()):
                break
            at, depth = getattr(at, field.name), depth + 1
        if draw(st.integers(0, 5)) == 0:
            at.ClearField(field.name)
        else:
            put(draw, at, field, known, depth)
    return message


@st.composite
def damaged(draw, data):
    """Bytes with a few of them changed, lost, doubled or added."""
    data = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = draw(st.binary(min_size=1, max_size=12))
            case 3:
                data += data[at : at + 64]
            case _:
                data[at:at] = draw(st.sampled_from(UNKNOWN))
    return bytes(data)


@st.composite
def payloads(draw, descriptor, good=None, known=()):
    """What is sent as a message of a type: mostly it parses."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=200))
    message = draw(messages(descriptor, known) if good is None or kind < 4 else nearly(good, known))
    data = message.SerializeToString()
    if kind in (1, 4):
        return draw(damaged(data))
    return data + draw(st.sampled_from(UNKNOWN)) if kind == 5 else data
