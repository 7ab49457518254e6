"""k changed at random, step by step, on a decode worker: tokens are those of one process without speculation."""

import dataclasses
import time

import pytest

from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.verification import VerificationConfig
from baton.decode_worker.worker import DecodeWorker
from baton.engine.local import LocalEngine
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.topology import Topology
from baton.tests.engine.live_k import Methods, random_methods, script_everywhere

LIMIT = 6
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.2, "min_p": 0.05, "min_tokens": 9},
    {"temperature": 1.0, "grammar": GrammarSpec("regex", r"(def|class) [a-z_]{1,12}\([a-z, ]{0,20}\):")},
    {"temperature": 0.0, "grammar": GrammarSpec("json_object")},
)


def requests_for(prompts, k):
    return [
        GenerationRequest(
            key=AttemptKey(f"k{k}-{at}", 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=at, max_tokens=(20, 33)[at % 2], **KINDS[at % len(KINDS)]),
            deadline_s=1e12,
            num_draft_tokens=min(k, (LIMIT, LIMIT, 1, 2)[at // 2 % 4]),
        )
        for at, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("scheduling", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_decode_worker_whose_k_changes(scheduling, load_tiny, tokenizer, monkeypatch):
    prompts = token_prompts(tokenizer, 16, max_len=60)
    engine = LocalEngine(
        load_tiny(),
        tokenizer,
        num_blocks=512,
        block_size=16,
        num_draft_tokens=0,
        chunk_len=4096,
        max_num_sequences=16,
        verification=VerificationConfig(),
    )
    expected = engine.generate(requests_for(prompts, 0))
    seen = script_everywhere(monkeypatch, 11, LIMIT)
    make = DecodeWorker.__init__
    monkeypatch.setattr(
        DecodeWorker, "__init__", lambda self, **values: make(self, **values | {"scheduling": scheduling})
    )
    with Topology(load_tiny(), tokenizer, num_drafts=LIMIT, max_num_seqs=6) as deployment:
        outcomes = deployment.generate(requests_for(prompts, LIMIT))
        deployment.wait_idle()
        inventory = deployment.decode[0].worker.inventory()
    for outcome, result in zip(outcomes, expected, strict=True):
        assert outcome.error is None
        assert tuple(outcome.token_ids) == result.token_ids
        assert outcome.finish_reason == result.finish_reason.value
    assert set(seen) == set(range(LIMIT + 1))
    stats = [outcome.decode_stats for outcome in outcomes if outcome.decode_stats is not None]
    for name in ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert getattr(inventory, name) == sum(getattr(one, name) for one in stats)
    assert inventory.num_accepted_tokens > 0


def test_what_drafts_changes_on_a_decode_worker(load_tiny, tokenizer):
    """What a prefill worker hands over serves any method."""
    prompts = token_prompts(tokenizer, 8)
    options = {"num_blocks": 512, "block_size": 16, "chunk_len": 4096, "max_num_sequences": 16}
    expected = LocalEngine(load_tiny(), tokenizer, num_draft_tokens=0, **options).generate(requests_for(prompts, 0))
    speculation = Methods(LIMIT, random_methods(3, LIMIT))
    decode = {"lookup": PromptLookup(min_match_len=1, max_match_len=3), "speculation": speculation}
    with Topology(load_tiny(), tokenizer, num_drafts=LIMIT, max_num_seqs=6, **decode) as deployment:
        outcomes = deployment.generate(requests_for(prompts, LIMIT))
        deployment.wait_idle()
        by_method = deployment.decode[0].worker.engine.report().by_method
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert [tuple(outcome.token_ids) for outcome in outcomes] == [result.token_ids for result in expected]
    assert all(by_method[name].num_accepted_tokens > 0 for name in ("head", "ngram"))


def test_an_operator_changes_k_from_another_thread(load_tiny, tokenizer):
    prompts = token_prompts(tokenizer, 6, max_len=20)
    requests = [
        dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, max_tokens=60, min_tokens=0, ignore_eos=True)
        )
        for request in requests_for(prompts, LIMIT)
    ]
    answers = []
    for is_changed in (False, True):
        with Topology(load_tiny(), tokenizer, num_drafts=LIMIT) as deployment:
            running = [deployment.start(request) for request in requests]
            speculation = deployment.decode[0].worker.speculation
            for turn in range(2000 if is_changed else 0):
                speculation.set_mode((None, 0, 3, 1, 4)[turn % 5])
                if all(not stream.queue.empty() and stream.ended for *_, stream in running):
                    break
                time.sleep(1e-3)
            answers.append([deployment.finish(one).token_ids for one in running])
    assert answers[0] == answers[1]
