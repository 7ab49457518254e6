"""What a decode worker says of its way to the first tokens."""

import math

import pytest

from baton.core.requests.request import AttemptKey
from baton.decode_worker.request import RequestTimes, decode_start
from baton.kvtransfer.receiver.service import Completed
from baton.proto import kv_pb2

pytestmark = pytest.mark.fast

TIMES = RequestTimes(attended_s=1.0, granted_s=1.1, admitted_s=2.5, first_s=2.75)


def complete(draft_ms=20.0, complete_s=2.25):
    return Completed(
        attempt=AttemptKey("r", 1),
        incoming_id=1,
        prompt_len=4,
        state=kv_pb2.SequenceState(draft_ms=draft_ms),
        bytes_landed=0,
        bytes_landed_before_prefill_end=0,
        prefill_end_s=2.0,
        completed_s=2.375,
        complete_s=complete_s,
    )


def test_the_parts_follow_one_another_from_the_first_token_to_the_first_step():
    said = decode_start(TIMES, complete())
    assert said.landed_ns == 2_250_000_000
    parts = [said.draft_ms, said.transfer_ms, said.verification_ms, said.admission_ms, said.step_ms]
    assert parts == pytest.approx([20, 230, 125, 125, 250])
    assert sum(parts) == pytest.approx(1e3 * (TIMES.first_s - 2.0))


def test_a_incoming_that_does_not_say_when_all_was_there_has_verified_in_no_time():
    said = decode_start(TIMES, complete(complete_s=0.0))
    assert (said.landed_ns, said.verification_ms) == (2_375_000_000, 0.0)


@pytest.mark.parametrize("draft_ms", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_what_is_no_duration_counts_as_none(draft_ms):
    said = decode_start(TIMES, complete(draft_ms))
    assert (said.draft_ms, said.transfer_ms) == pytest.approx((0.0, 250.0))
