"""W3C trace context: what is one, and what follows from it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.telemetry.span import attempt_of, from_metadata, new_trace, of_attempt, parse, parse_sampled

pytestmark = pytest.mark.fast

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{PARENT}-01"
FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        "00",
        GOOD[:-3],
        GOOD[:-1],
        GOOD.upper(),
        GOOD + "-more",
        GOOD + "x",
        f"01-{TRACE}-{PARENT}-01x",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0g",
        f"00_{TRACE}-{PARENT}-01",
        f"00-{TRACE[:15]} {TRACE[16:]}-{PARENT}-01",
        f"00-{TRACE[:15]}-{TRACE[16:]}-{PARENT}-01",
        f"00-+{TRACE[1:]}-{PARENT}-01",
        f"0\u0966-{TRACE}-{PARENT}-01",
    ],
)
def test_what_is_no_traceparent(header):
    assert parse(header) is None
    assert parse_sampled(header) is None


@given(st.data())
def test_it_agrees_with_a_regular_expression(data):
    begin = (GOOD, GOOD + "-more", f"cc-{TRACE}-{PARENT}-00-x", f"00-{'0' * 32}-{PARENT}-01")
    text = list(data.draw(st.sampled_from(begin)))
    for _ in range(data.draw(st.integers(0, 2))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from("0fgF- \n"))
    header = "".join(text)
    found = FORM.fullmatch(header)
    valid = found is not None and found[1] != "ff" and not (found[1] == "00" and found[5])
    valid = valid and bool(found[2].strip("0") and found[3].strip("0"))
    context = parse(header)
    assert (context is not None) == valid
    if valid:
        assert tuple(context)[:3] == (found[2], found[3], bool(int(found[4], 16) & 1))


def test_a_traceparent_is_read_and_written():
    context = parse(GOOD)
    assert str(context) == GOOD
    assert context.is_sampled
    assert not parse(GOOD[:-1] + "0").is_sampled
    assert parse_sampled(GOOD[:-1] + "0") is None
    assert parse(f"01-{TRACE}-{PARENT}-01-later").trace_id == TRACE, "later versions may say more"
    child = context.child()
    assert (child.trace_id, child.parent_id) == (TRACE, PARENT)
    assert child.span_id not in (PARENT, context.child().span_id)


def test_an_attempt_has_the_same_span_whenever_it_is_asked_and_another_than_others():
    for root in (parse(GOOD), new_trace()):
        spans = {attempt_of(root, f"r.{choice}", attempt).span_id for choice in range(20) for attempt in range(20)}
        assert len(spans) == 400
        assert root.span_id not in spans
        assert all(re.fullmatch("[0-9a-f]{16}", span) for span in spans)
        assert parse(of_attempt(root, "r.3", 7)).span_id == attempt_of(root, "r.3", 7).span_id
        assert attempt_of(root, "r.3", 7).parent_id == root.span_id
    assert of_attempt(None, "r", 1) == ""


def test_the_header_is_found_among_others():
    assert from_metadata((("a", "b"), ("traceparent", GOOD))) == GOOD
    assert from_metadata((("traceparent", GOOD.encode()),)) == GOOD
    assert from_metadata(None) == from_metadata((("tracestate", "x"),)) == ""
