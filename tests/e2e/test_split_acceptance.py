"""Drafts are accepted as often as in one process, step by step: what speculation needs crosses the hand-off whole.

A first draft or a hidden state that is lost on the way changes no token, only the acceptance of a sequence's first
step: no comparison of tokens can see it.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch

from baton.engine.local import LocalEngine
from baton.engine.step.runner import Runner
from baton.tests.e2e.conftest import TINY_EAGLE3
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology

NUM_PROMPTS = 12
MAX_TOKENS = 12
CELLS = list(itertools.product([False, True], [1, 2, 4]))


@dataclass
class Speculated:
    """What one request's speculation was: tokens of each decode step, and the counts."""

    steps: list
    counts: tuple


@pytest.fixture
def starts(monkeypatch):
    """By prompt: first token, its draft and the hidden state that made it, where a sequence begins to decode."""
    seen = {}
    finish, execute = Runner._finish, Runner.execute

    def finished(self, work):
        finish(self, work)
        ended = [chunk.token_ids for chunk in work.chunks if chunk.is_last]
        if work.push is None and ended:
            tokens, start = work.sampled[1].verified.token_ids_BQ[:, 0], work.extended[1]
            for row, token_ids in enumerate(ended):
                draft, hidden_D = int(start.draft_token[row]), start.hidden_D[row].clone()
                seen[tuple(token_ids.tolist())] = int(tokens[row]), draft, hidden_D

    def executed(self, operation):
        resume = getattr(operation, "resume", None)
        if resume is not None:
            *prompt, first = operation.token_ids
            hidden_D = torch.frombuffer(bytearray(resume.hidden), dtype=self.hidden_dtype)
            seen[tuple(prompt)] = first, resume.draft_token, hidden_D
        return execute(self, operation)

    monkeypatch.setattr(Runner, "_finish", finished)
    monkeypatch.setattr(Runner, "execute", executed)
    return seen


def counts_of(counts):
    return counts.num_verify_steps, counts.num_draft_tokens, counts.num_accepted_tokens


def locally(model, tokenizer, requests, num_drafts, **options):
    """As one process runs them."""
    options |= {"num_blocks": 512, "block_size": 16, "chunk_len": 1024, "max_num_sequences": NUM_PROMPTS}
    engine = LocalEngine(model, tokenizer, num_draft_tokens=num_drafts, **options)
    rounds = itertools.zip_longest(*map(engine.run, requests))
    answers = []
    for events in zip(*rounds, strict=True):
        _, *decoded = [event for event in events if event is not None]  # the first token is prefill's
        answers.append(Speculated([list(event.token_ids) for event in decoded], counts_of(decoded[-1].result.counts)))
    return answers


def split(model, tokenizer, requests, num_drafts):
    """The same requests, all at once, over a prefill and a decode worker."""
    with Topology(model, tokenizer, num_drafts=num_drafts, chunk_len=48) as topology:
        outcomes = topology.generate(requests)
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    return [Speculated(outcome.decode_steps, counts_of(outcome.decode_stats)) for outcome in outcomes]


@pytest.mark.parametrize(
    ("drafter", "sampled", "num_drafts"),
    [
        *(("mtp", *cell) for cell in CELLS),
        ("eagle3", False, 3),
        ("eagle3", True, 2),
        ("mtp", True, 6),
        ("eagle3", False, 6),
    ],
)
def test_acceptance_is_that_of_one_process(drafter, sampled, num_drafts, load_tiny, tokenizer, starts):
    options = {"with_mtp": False, "draft_path": TINY_EAGLE3} if drafter == "eagle3" else {}
    model = load_tiny(torch.float64, **options)
    prompts = token_prompts(tokenizer, NUM_PROMPTS)
    requests = requests_for(prompts, sampled=sampled, num_drafts=num_drafts, max_tokens=MAX_TOKENS)
    expected = locally(model, tokenizer, requests, num_drafts)
    expected_starts = dict(starts)
    starts.clear()
    actual = split(model, tokenizer, requests, num_drafts)
    assert [answer.steps for answer in actual] == [answer.steps for answer in expected]
    assert [answer.counts for answer in actual] == [answer.counts for answer in expected]
    assert sum(answer.counts[2] for answer in actual) > 0, "no draft was accepted at all"
    assert starts.keys() == expected_starts.keys()
    for prompt, start in starts.items():
        wanted = expected_starts[prompt]
        assert start[:2] == wanted[:2]
        torch.testing.assert_close(start[2], wanted[2], rtol=0, atol=1e-9)
