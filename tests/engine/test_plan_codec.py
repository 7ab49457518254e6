"""The codec of a group's messages: what comes out is what went in, and any damage is an error, never garbage."""

import dataclasses
import enum
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ProtocolError
from baton.core.requests.request import AttemptKey
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.plan import PLAN_KINDS, Chunk, Place, Release, Resume, Step
from baton.engine.tp.plan import plan_codec
from baton.engine.tp.plan_codec import CONTROL_KINDS, FRAME_HEADER_BYTES, Beat, PlanCodec, payload_len
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.sender.service import DecodePeer, GrantInfo
from baton.prefill_worker.tp_group import REPORTED, TOLD, Adopt, prefill_codec

pytestmark = pytest.mark.fast
KINDS = {**CONTROL_KINDS, **PLAN_KINDS, **TOLD, **REPORTED}
CODEC = prefill_codec()
HEADER = struct.Struct("<4sHHQIII")  # the form on the wire, written down once more: magic ... payload length, crc


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclasses.dataclass(frozen=True)
class Inner:
    name: str
    number: int


@dataclasses.dataclass(frozen=True)
class Everything:
    number: int
    real: float
    flag: bool
    text: str
    data: bytes
    ids: tuple[int, ...]
    maybe: int | None
    inner: Inner
    pairs: tuple[tuple[int, float], ...]
    lists: tuple[tuple[int, ...], ...]
    maybe_inner: Inner | None
    colour: Colour


INTS = st.integers(-(1 << 64), 1 << 64)
IDS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=8).map(tuple)
INNER = st.builds(Inner, st.text(), INTS)
EVERYTHING = st.builds(
    Everything,
    number=INTS,
    real=st.floats(allow_nan=False),
    flag=st.booleans(),
    text=st.text(),
    data=st.binary(),
    ids=IDS,
    maybe=st.none() | INTS,
    inner=INNER,
    pairs=st.lists(st.tuples(INTS, st.floats(allow_nan=False)), max_size=3).map(tuple),
    lists=st.lists(IDS, max_size=3).map(tuple),
    maybe_inner=st.none() | INNER,
    colour=st.sampled_from(Colour),
)
ALL = PlanCodec({9: Everything, 10: Inner})
st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 63) - 1))  # what a tuple of integers may hold
MESSAGES = st.one_of(*[st.from_type(kind) for kind in KINDS.values()])


def reseal(frame, **changes):
    """The same frame with other header fields or another payload, and a checksum that is right for them."""
    names = ("magic", "version", "kind", "count", "schema", "length")
    fields = dict(zip(names, HEADER.unpack_from(frame), strict=False))
    payload = changes.pop("payload", frame[HEADER.size :])
    fields |= {"length": len(payload)} | changes
    head = struct.pack("<4sHHQII", *fields.values())
    return head + struct.pack("<I", crc32c(payload, crc32c(head))) + payload


@pytest.mark.long
@given(EVERYTHING, st.integers(0, (1 << 64) - 1))
def test_what_comes_out_is_what_went_in(message, count):
    frame = ALL.encode(message, count)
    assert len(frame) == FRAME_HEADER_BYTES + payload_len(frame[:FRAME_HEADER_BYTES])
    assert ALL.decode(frame, count) == message


@given(MESSAGES, st.integers(0, 1000))
@pytest.mark.long
def test_every_message_of_a_tp_group(message, count):
    same = CODEC.decode(CODEC.encode(message, count), count)
    assert type(same) is type(message)
    assert repr(same) == repr(message)  # NaN is not equal to itself


@given(EVERYTHING, st.data())
@pytest.mark.long
def test_a_frame_cut_anywhere_is_an_error(message, data):
    frame = ALL.encode(message, 1)
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    with pytest.raises(ProtocolError):
        ALL.decode(cut, 1)
    with pytest.raises(ProtocolError):
        ALL.decode(frame + b"\0", 1)


@given(EVERYTHING, st.data())
@pytest.mark.long
def test_any_flipped_bits_are_an_error(message, data):
    frame = bytearray(ALL.encode(message, 1))
    for place in data.draw(st.sets(st.integers(0, 8 * len(frame) - 1), min_size=1, max_size=3)):
        frame[place // 8] ^= 1 << place % 8
    with pytest.raises(ProtocolError):
        ALL.decode(frame, 1)


@pytest.mark.long
@given(EVERYTHING, st.data())
def test_a_payload_that_lacks_a_field_is_an_error_even_if_its_checksum_is_right(message, data):
    frame = ALL.encode(message, 1)
    payload = frame[HEADER.size :]
    cut = payload[: data.draw(st.integers(0, len(payload) - 1))]
    with pytest.raises(ProtocolError):
        ALL.decode(reseal(frame, payload=cut), 1)
    with pytest.raises(ProtocolError, match="belong to no field"):
        ALL.decode(reseal(frame, payload=payload + b"\x01"), 1)


@given(st.binary(max_size=200), st.sampled_from([9, 10]))
def test_garbage_with_a_right_checksum_is_a_message_or_an_error(payload, kind):
    frame = reseal(ALL.encode(Inner("", 0), 1), kind=kind, payload=payload)
    if kind == 9:
        frame = reseal(frame, schema=HEADER.unpack_from(ALL.encode(SAMPLE, 1))[4])
    try:
        message = ALL.decode(frame, 1)
    except ProtocolError:
        return
    assert ALL.decode(ALL.encode(message, 1), 1) == message or message != message


@given(st.binary(max_size=100))
def test_noise_is_an_error(noise):
    with pytest.raises(ProtocolError):
        CODEC.decode(noise, 1)


SAMPLE = Everything(1, 0.5, True, "a", b"b", (1, 2), None, Inner("c", 3), ((4, 5.0),), ((6,), ()), None, Colour.BLUE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"magic": b"HTTP"}, "begins with"),
        ({"version": 2}, "version 2"),
        ({"version": 0}, "version 0"),
        ({"kind": 11}, "unknown kind 11"),
        ({"schema": 12345}, "other fields"),
        ({"count": 8}, "plan 8 came where 7 is next"),
        ({"length": 1 << 31}, "says that its payload has"),
    ],
)
def test_a_header_that_is_not_ours_is_refused_by_name(changes, said):
    with pytest.raises(ProtocolError, match=said):
        ALL.decode(reseal(ALL.encode(SAMPLE, 7), **changes), 7)


def test_a_field_more_less_or_of_another_type_is_another_schema():
    codecs = [
        PlanCodec({1: dataclasses.make_dataclass("Told", fields)})
        for fields in (
            [("slot", int)],
            [("slot", int), ("more", int)],
            [("slot", float)],
            [("place", int)],
            [("slot", int | None)],
            [("slot", tuple[int, ...])],
        )
    ]
    (told_kind,) = codecs[0]._numbers
    told = codecs[0].encode(told_kind(slot=3), 1)
    for codec in codecs[1:]:
        with pytest.raises(ProtocolError, match="other fields"):
            codec.decode(told, 1)


@pytest.mark.parametrize("resume", [None, Resume(), Resume(6, bytes(range(64)))])
def test_a_sequence_is_placed_with_all_that_it_resumes_from(resume):
    place = Place(
        slot=2,
        token_ids=(7, 8, 9),
        num_output=1,
        blocks=(3, 1),
        sampling=SamplingParams(stop=("x", "é")),
        draft_cap=2,
        resume=resume,
    )
    assert CODEC.decode(CODEC.encode(place, 1), 1) == place


def test_kinds_have_numbers_of_their_own():
    assert len(KINDS) == len(CONTROL_KINDS) + len(PLAN_KINDS) + len(TOLD) + len(REPORTED)
    assert plan_codec().decode(CODEC.encode(Release(3), 1), 1) == Release(3)
    with pytest.raises(ProtocolError, match="unknown kind 67"):
        plan_codec().decode(CODEC.encode(_adopt(), 1), 1)


def test_a_step_has_a_number_for_ever():
    frame = CODEC.encode(Step(slots=(3,)), 5)
    assert plan_codec().decode(frame, 5) == Step(slots=(3,))
    assert HEADER.unpack_from(frame)[2] == 32
    for changes in ({"payload": b""}, {"payload": frame[HEADER.size :] + b"\0"}, {"kind": 17}):
        with pytest.raises(ProtocolError):
            CODEC.decode(reseal(frame, **changes), 5)


def _adopt():
    grant = GrantInfo(1 << 63, (1 << 64) - 1, 0, 2.0, "raw", (1,), 16)
    return Adopt(AttemptKey("r", 1), DecodePeer("d", "tcp://a", 5), BlockTable((1,), 16), 3, grant)


def test_a_step_is_small():
    assert len(CODEC.encode(Beat(1000), 1)) < 40
    assert len(CODEC.encode(Step(slots=tuple(range(64)), num_drafts=2, max_context_len=99, limit_s=2.0), 1)) < 350
    push = AttemptKey("a" * 32, 1)
    chunks = tuple(Chunk(slot=slot, start=0, length=128, push=push) for slot in range(16))
    assert len(CODEC.encode(Step(chunks=chunks, limit_s=2.0), 1)) < 1800
