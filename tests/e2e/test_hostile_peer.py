"""A prefill worker of another build, or a broken one, costs its own request and never the decode worker."""

import pytest
import torch

from baton.core.errors import InvalidRequest, TransferFailed
from baton.proto import kv_pb2
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology


@pytest.fixture(scope="module")
def deployment(load_tiny, tokenizer):
    with Topology(load_tiny(torch.float32), tokenizer, num_drafts=2, chunk_len=64, num_blocks=128) as running:
        yield running


@pytest.fixture(scope="module")
def want(deployment, tokenizer):
    return deployment.generate([good(tokenizer, "want")])[0].token_ids


def good(tokenizer, tag, **changes):
    return requests_for([token_prompts(tokenizer, 8)[5]], sampled=False, num_drafts=2, tag=tag, **changes)[0]


def altered(state, change):
    made = kv_pb2.SequenceState()
    made.CopyFrom(state)
    change(made)
    return made


CHANGES = {
    "short-hidden": lambda state: setattr(state, "hidden", b"abc"),
    "half-hidden": lambda state: setattr(state, "hidden", state.hidden[: len(state.hidden) // 2]),
    "no-draft": lambda state: state.ClearField("draft_tokens"),
    "token-out-of-vocab": lambda state: setattr(state, "first_token", 1 << 31),
    "draft-out-of-vocab": lambda state: state.draft_tokens.__setitem__(0, 1 << 31),
    "first-token-is-eos": lambda state: setattr(state, "first_token", 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_commit_that_cannot_be_fails_its_request_only(deployment, tokenizer, want, monkeypatch, name):
    push = deployment.prefill[0].push
    commit = push.commit
    monkeypatch.setattr(
        push, "commit", lambda attempt, state, end_s: commit(attempt, altered(state, CHANGES[name]), end_s)
    )
    outcome = deployment.generate([good(tokenizer, name)])[0]
    assert isinstance(outcome.error, TransferFailed)
    assert len(outcome.token_ids) == 1
    monkeypatch.undo()
    deployment.wait_idle()
    assert deployment.generate([good(tokenizer, f"after-{name}")])[0].token_ids == want


@pytest.mark.parametrize("shrink", [lambda prompt, whole: whole - 1, lambda prompt, whole: prompt])
def test_a_incoming_smaller_than_the_sequence_is_refused(deployment, tokenizer, want, monkeypatch, shrink):
    push = deployment.prefill[0].push
    reserve = push.reserve

    def smaller(attempt, peer, table, *, prompt_len, capacity_len, wait_s):
        reserve(attempt, peer, table, prompt_len, shrink(prompt_len, capacity_len), wait_s)

    monkeypatch.setattr(push, "reserve", smaller)
    outcome = deployment.generate([good(tokenizer, f"small{id(shrink)}-")])[0]
    assert isinstance(outcome.error, TransferFailed)
    monkeypatch.undo()
    deployment.wait_idle()
    assert deployment.generate([good(tokenizer, f"after-small{id(shrink)}-")])[0].token_ids == want


def test_what_can_never_be_served_is_refused_at_the_workers_door(deployment, tokenizer):
    with pytest.raises(InvalidRequest):
        deployment.start(good(tokenizer, "negative", max_tokens=-5))
    with pytest.raises(InvalidRequest):
        deployment.start(requests_for([(1 << 31,)], sampled=False, num_drafts=2)[0])
    with pytest.raises(InvalidRequest):
        deployment.start(requests_for([(5,)], sampled=False, num_drafts=3)[0])
    deployment.wait_idle()
