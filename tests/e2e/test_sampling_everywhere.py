"""Every sampling parameter on the bundled model: the same answers with any number of drafts, split or not."""

import dataclasses

import pytest

from baton.core.requests.request import AttemptKey, GenerationRequest, choices_of
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.topology import Topology

MAX_TOKENS = 15
KINDS = {
    "plain": {},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "repetition": {"repetition_penalty": 3.0},
    "added": {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "allowed": {"allowed_token_ids": tuple(range(0, 600, 3))},
    "logprobs": {"logprobs": 4, "prompt_logprobs": 2},
    "everything": {
        "min_p": 0.02,
        "top_k": 40,
        "top_p": 0.95,
        "logit_bias": ((5, 3.0),),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 8,
        "logprobs": 3,
        "prompt_logprobs": 0,
    },
}


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return token_prompts(tokenizer, 9)[8][:40] or (1, 2, 3)


@pytest.fixture(scope="module")
def kinds(load_tiny, tokenizer, prompt):
    """KINDS, with bad words and early ends that really occur in the plain answers."""
    engine = engine_of(load_tiny(), tokenizer, 0)
    found = dict(KINDS)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=3, ignore_eos=True)
        [plain] = engine.generate([request_of(prompt, params, 0, f"plain{temperature}")])
        found[f"bias-{temperature:g}"] = {"temperature": temperature, "logit_bias": ((plain.token_ids[3], -100.0),)}
        words = ((plain.token_ids[4],), plain.token_ids[8:10], plain.token_ids[11:14])
        found[f"bad_words-{temperature:g}"] = {"temperature": temperature, "bad_words": words}
        stops = {"temperature": temperature, "min_tokens": 9, "stop_token_ids": plain.token_ids[2:5]}
        found[f"min_tokens-{temperature:g}"] = stops
    return found


def engine_of(model, tokenizer, k, **arrangement):
    values = {"num_blocks": 512, "block_size": 16, "chunk_len": 4096, "max_num_sequences": 8} | arrangement
    return LocalEngine(model, tokenizer, num_draft_tokens=k, **values)


def request_of(prompt, params, k, name):
    return GenerationRequest(
        key=AttemptKey(name, 1), prompt_token_ids=prompt, sampling=params, deadline_s=1e12, num_draft_tokens=k
    )


def requests_of(prompt, kinds, k):
    """Every kind, greedy and sampled."""
    requests = []
    for temperature in (0.0, 1.0):
        for kind, values in kinds.items():
            values = {"temperature": temperature, "max_tokens": MAX_TOKENS, "seed": 3, "ignore_eos": True} | values
            requests.append(request_of(prompt, SamplingParams(**values), k, f"{kind}/{temperature}"))
    return requests


def check_reports(got, expected):
    assert (got is None) == (expected is None)
    for one, other in zip(got or (), expected or (), strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [one.logprob, *(logprob for _, logprob in one.top)]
        assert values == pytest.approx([other.logprob, *(logprob for _, logprob in other.top)], abs=1e-9)


@pytest.fixture(scope="module")
def expected(load_tiny, tokenizer, prompt, kinds):
    return engine_of(load_tiny(), tokenizer, 0).generate(requests_of(prompt, kinds, 0))


def test_parameters_change_the_answer(expected):
    answers = {result.key.request_id: result.token_ids for result in expected}
    for name, tokens in answers.items():
        kind, _, temperature = name.partition("/")
        plain = answers[f"plain/{temperature}"]
        if "logprobs" in kind or kind == "plain" or kind.endswith("-0" if temperature == "1.0" else "-1"):
            continue
        assert tokens != plain, name


@pytest.mark.parametrize("k", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_with_drafts(k, load_tiny, tokenizer, prompt, kinds, expected):
    engine = engine_of(load_tiny(), tokenizer, k, chunk_len=16, max_num_sequences=5)
    for result, other in zip(engine.generate(requests_of(prompt, kinds, k)), expected, strict=True):
        assert result.token_ids == other.token_ids, result.key
        check_reports(result.logprobs, other.logprobs)
        check_reports(result.prompt_logprobs, other.prompt_logprobs)


def test_the_same_when_split(load_tiny, tokenizer, prompt, kinds, expected):
    requests = requests_of(prompt, kinds, 2)
    with Topology(load_tiny(), tokenizer, num_drafts=2, chunk_len=16) as deployment:
        outcomes = deployment.generate(requests)
        several = dataclasses.replace(requests[-1].sampling, temperature=1.0, n=3)
        split = deployment.generate(
            [
                dataclasses.replace(one, key=AttemptKey(f"choice{one.choice}", 1))
                for one in choices_of(request_of(prompt, several, 2, "several"))
            ]
        )
        # A prompt whose log-probabilities are asked is computed whole, whatever the cache holds.
        cached, computed = (
            deployment.generate([request_of(prompt, SamplingParams(max_tokens=2), 2, "cached")]),
            outcomes,
        )
        deployment.wait_idle()
    for outcome, other in zip(outcomes, expected, strict=True):
        assert outcome.error is None
        assert tuple(outcome.token_ids) == other.token_ids, other.key
        check_reports(outcome.logprobs, other.logprobs or ())
        check_reports(outcome.prompt_logprobs, other.prompt_logprobs or ())
    assert cached[0].num_cached_tokens == (len(prompt) - 1) // 16 * 16
    for outcome, request in zip(computed, requests, strict=True):
        assert request.sampling.prompt_logprobs is None or outcome.num_cached_tokens == 0
    engine = engine_of(load_tiny(), tokenizer, 0)
    alone = engine.generate([request_of(prompt, several, 0, "alone")])
    assert [tuple(outcome.token_ids) for outcome in split] == [result.token_ids for result in alone]
    assert len({result.token_ids for result in alone}) == 3


@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 26], ids=["recompute", "offload"])
def test_the_same_when_preempted_on_a_decode_worker(host_kv_bytes, load_tiny, tokenizer, prompt, kinds, expected):
    """Penalties, bad words, minimal lengths and reports go on after the token that was known; none is said twice."""
    options = {"preempt_at": (5,), "host_kv_bytes": host_kv_bytes}
    with Topology(load_tiny(), tokenizer, num_drafts=2, **options) as deployment:
        outcomes = deployment.generate(requests_of(prompt, kinds, 2))
        deployment.wait_idle()
        counts = deployment.inventories()[-1]
    assert counts.num_preemptions > len(outcomes) * 2 / 3
    assert (counts.num_recomputed_tokens > 0) == (host_kv_bytes == 0)
    for outcome, other in zip(outcomes, expected, strict=True):
        assert outcome.error is None
        assert tuple(outcome.token_ids) == other.token_ids, other.key
        check_reports(outcome.logprobs, other.logprobs or ())
        check_reports(outcome.prompt_logprobs, other.prompt_logprobs or ())
