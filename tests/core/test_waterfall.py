"""The arithmetic of the waterfall: parts of made-up timelines, with one clock and with several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.telemetry.waterfall import (
    DecodeTimes,
    PrefillTimes,
    RouterTimes,
    first_token,
    gap,
    parts_of,
    second_token,
)

pytestmark = pytest.mark.fast

TIMES = st.floats(0.0, 100.0)
PARTS = (
    "router",
    "call",
    "queue",
    "incoming",
    "prefill",
    "retry",
    "draft",
    "transfer",
    "verify",
    "admit",
    "step",
    "back",
)


def timeline(durations, shift_p=0.0, shift_d=0.0, publish=0.25):
    """Readings that processes with clocks this far from the router's would take of these durations."""
    (router, call, queue, incoming, prefill, retry, draft, transfer, verify, admit, step, back) = durations
    known = router + call + queue + incoming + prefill
    landed = known + retry + draft + transfer
    here = verify + admit + step
    routers = RouterTimes(
        received_s=5.0, asked_s=5.0 + router, first_s=5.0 + known + publish, second_s=5.0 + landed + here + back
    )
    prefills = PrefillTimes(
        received_s=5.0 + router + call + shift_p,
        queue_s=queue,
        incoming_s=incoming,
        prefill_s=prefill,
        first_s=5.0 + known + shift_p,
    )
    decodes = DecodeTimes(
        first_s=5.0 + known + retry + shift_p,
        draft_s=draft,
        transfer_s=transfer,
        landed_s=5.0 + landed + shift_d,
        verification_s=verify,
        admission_s=admit,
        step_s=step,
    )
    return routers, prefills, decodes


@given(st.tuples(*[TIMES] * len(PARTS)))
def test_with_one_clock_every_part_is_what_it_was(durations):
    router, prefill, decode = timeline(durations)
    first = first_token(router, prefill, shared_clock=True)
    second = second_token(router, prefill, decode, shared_clock=True)
    assert list(parts_of(first).values()) == pytest.approx([sum(durations[:2]), *durations[2:5], 0.25], abs=1e-9)
    assert list(parts_of(second).values()) == pytest.approx(durations[5:], abs=1e-9)


@given(st.tuples(*[TIMES] * len(PARTS)), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_with_several_clocks_the_sums_are_right_and_the_network_is_in_the_last_parts(durations, shift_p, shift_d):
    router, prefill, decode = timeline(durations, shift_p, shift_d)
    first = first_token(router, prefill, shared_clock=False)
    second = second_token(router, prefill, decode, shared_clock=False)
    assert sum(parts_of(first).values()) == pytest.approx(router.first_s - router.received_s)
    assert first.before_s + sum(parts_of(second).values()) == pytest.approx(router.second_s - router.received_s)
    assert (first.router_s, first.queue_s) == pytest.approx((durations[0], durations[2]), abs=1e-9)
    assert first.publish_s == pytest.approx(durations[1] + 0.25, abs=1e-6)
    assert second.publish_s == pytest.approx(durations[1] + durations[5] + durations[-1], abs=1e-6)


def test_a_stamp_that_is_wrong_shows_in_a_part_or_a_sum():
    durations = tuple(float(at + 1) for at in range(len(PARTS)))
    router, prefill, _ = timeline(durations, shift_p=3.0)
    first = first_token(router, prefill, shared_clock=True)
    assert first.router_s == pytest.approx(sum(durations[:2]) + 3.0)
    router, prefill, _ = timeline(durations)
    short = PrefillTimes(
        received_s=prefill.received_s, queue_s=0.0, incoming_s=4.0, prefill_s=5.0, first_s=prefill.first_s
    )
    parts = parts_of(first_token(router, short, shared_clock=True))
    assert gap(sum(parts.values()), router.first_s - router.received_s) > 0.01


def test_without_a_second_token_there_are_no_parts_of_it():
    router, prefill, decode = timeline((1.0,) * len(PARTS))
    router = RouterTimes(received_s=router.received_s, asked_s=router.asked_s, first_s=router.first_s, second_s=None)
    assert second_token(router, prefill, decode, shared_clock=True) is None


def test_a_gap_is_relative_and_a_whole_of_nothing_has_one_if_there_are_parts():
    assert gap(99.0, 100.0) == pytest.approx(0.01)
    assert gap(0.0, 0.0) == 0.0
    assert gap(1.0, 0.0) == 1.0
