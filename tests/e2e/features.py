"""What a request may ask, one feature at a time: the requests of the matrix in `test_async_equals_sync`.

Requests of a feature differ in prompt and in how tokens are chosen. What depends on answers (bad words, ends
and biases that matter) is taken from the plain ones.
"""

import json

import pytest

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams

MAX_TOKENS = 12
MAX_MODEL_LEN = 96
PROMPT_LENS = (1, 17, 40)
WAYS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9})
SCHEMA = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["request", "attempt"]},
                "retry": {"type": "boolean"},
                "codes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
            },
            "required": ["kind", "retry", "codes"],
            "additionalProperties": False,
        }
    ),
)
FEATURES = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 2.0},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.5},
    "min-p": {"min_p": 0.1},
    "top-a": {"top_a": 0.3},
    "bias": {},
    "bad words": {},
    "allowed tokens": {"allowed_token_ids": tuple(range(0, 600, 3))},
    "min tokens": {"min_tokens": 8},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "schema": {"grammar": SCHEMA, "max_tokens": 30, "ignore_eos": False},
    "schema, logprobs, penalty": {
        "grammar": SCHEMA,
        "max_tokens": 30,
        "ignore_eos": False,
        "logprobs": 2,
        "frequency_penalty": 0.5,
    },
    "max length": {"max_tokens": MAX_MODEL_LEN},
}


def requests_for(feature, prompts, k, plain):
    """One request for each prompt.

    Args:
        feature: of FEATURES.
        prompts: token ids.
        k: drafts.
        plain: what "plain" answers to the same prompts; None for that itself.
    """
    requests = []
    for at, (prompt, way) in enumerate(zip(prompts, WAYS, strict=True)):
        values = {"max_tokens": MAX_TOKENS, "seed": at, "ignore_eos": True, **way, **FEATURES[feature]}
        if feature == "bad words":
            tokens = plain[at]
            values["bad_words"] = ((tokens[2],), tuple(tokens[5:7]), tuple(tokens[8:11]))
        if feature == "bias":
            banned = plain[at][3]
            liked = next(
                token for token in (*plain[at][4:], banned + 1) if token != banned
            )  # answers repeat themselves
            values["logit_bias"] = ((banned, -100.0), (liked, 2.0))
        if feature == "min tokens":
            values["stop_token_ids"] = tuple(plain[at][2:5])
        if feature == "max length":
            prompt = (prompt * MAX_MODEL_LEN)[: MAX_MODEL_LEN - 9 - at]
            values["max_tokens"] = MAX_MODEL_LEN - len(prompt)
        requests.append(
            GenerationRequest(
                key=AttemptKey(f"{feature} {at}", 1),
                prompt_token_ids=prompt,
                sampling=SamplingParams(**values),
                deadline_s=float("inf"),
                num_draft_tokens=k,
            )
        )
    return requests


def check_same(result, other):
    """Tokens, the reason of the end, and what is reported of tokens are those of the other."""
    assert result.error is None
    assert result.token_ids == other.token_ids, result.key
    assert result.finish_reason == other.finish_reason
    for got, expected in ((result.logprobs, other.logprobs), (result.prompt_logprobs, other.prompt_logprobs)):
        assert (got is None) == (expected is None)
        for one, wanted in zip(got or (), expected or (), strict=True):
            assert (one.token_id, one.rank) == (wanted.token_id, wanted.rank)
            assert [token for token, _ in one.top] == [token for token, _ in wanted.top]
            values = [one.logprob, *(logprob for _, logprob in one.top)]
            assert values == pytest.approx([wanted.logprob, *(logprob for _, logprob in wanted.top)], abs=1e-9)
