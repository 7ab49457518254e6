"""A commit or a RESERVE that cannot be costs its own request, never the worker."""

import dataclasses

import pytest

from baton.core.errors import TransferFailed
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.decode_worker.worker import check_reserve, resume_of
from baton.engine.step.plan import Resume
from baton.kvtransfer.receiver.service import Completed, ReserveWanted
from baton.proto import kv_pb2

pytestmark = pytest.mark.fast

KEY = AttemptKey("r", 1)
REQUEST = GenerationRequest(
    key=KEY,
    prompt_token_ids=tuple(range(16)),
    sampling=SamplingParams(max_tokens=8),
    deadline_s=1e9,
    num_draft_tokens=2,
)
HIDDEN = bytes(range(16))
GOOD = {"first_token": 5, "draft_tokens": [7], "hidden": HIDDEN}


def start(request=REQUEST, prompt_len=16, **changes):
    complete = Completed(
        attempt=KEY,
        incoming_id=1,
        prompt_len=prompt_len,
        state=kv_pb2.SequenceState(**{**GOOD, **changes}),
        bytes_landed=0,
        bytes_landed_before_prefill_end=0,
        prefill_end_s=0.0,
    )
    return resume_of(complete, request, vocab_size=100, hidden_bytes=len(HIDDEN))


def test_a_good_commit_starts_the_sequence():
    assert start() == (5, Resume(7, HIDDEN))


def test_without_drafts_nothing_else_is_needed():
    request = dataclasses.replace(REQUEST, num_draft_tokens=0)
    assert start(request, draft_tokens=[], hidden=b"") == (5, Resume())


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token": 100},
        {"draft_tokens": [1 << 31]},
        {"draft_tokens": [1, 2]},
        {"draft_tokens": []},
        {"hidden": b"abc"},
        {"hidden": HIDDEN[:8]},
        {"hidden": b""},
        {"prompt_len": 15},
    ],
    ids=str,
)
def test_a_commit_that_cannot_be_is_refused(changes):
    with pytest.raises(TransferFailed, match="cannot be"):
        start(**changes)


@pytest.mark.parametrize(("prompt_len", "capacity_len"), [(15, 26), (16, 20), (16, 27)])
def test_a_reserve_must_say_what_the_router_said(prompt_len, capacity_len):
    check_reserve(ReserveWanted(KEY, 16, 26, 1.0), REQUEST)
    with pytest.raises(TransferFailed, match="the router said"):
        check_reserve(ReserveWanted(KEY, prompt_len, capacity_len, 1.0), REQUEST)
