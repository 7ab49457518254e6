import json
import math

import pytest

from baton.core.errors import InvalidSampling
from baton.core.requests.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SCALAR_FIELDS,
    SEED_LIMIT,
    GrammarSpec,
    SamplingParams,
)

pytestmark = pytest.mark.fast
VOCAB = 50


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 10**9},
        {"temperature": 0.0},
        {"temperature": 1e-300},
        {"temperature": 100.0},
        {"temperature": -0.0},
        {"top_k": 10**9},
        {"top_p": 5e-324},
        {"top_p": 1.0},
        {"seed": SEED_LIMIT - 1},
        {"stop": ("x" * MAX_STOP_STRING_LEN,) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0, 49) * (MAX_STOP_TOKEN_IDS // 2)},
        {"min_p": 1.0},
        {"top_a": 1.0},
        {"min_tokens": 128},
        {"logit_bias": ((0, 100.0), (49, -100.0))},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"bad_words": ((0,), (49,) * MAX_BAD_WORD_LEN)},
        {"bad_words": ((1,),) * MAX_BAD_WORDS},
        {"allowed_token_ids": (3, 3)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"n": MAX_CHOICES},
        {"grammar": GrammarSpec("regex", "a*")},
    ],
)
def test_values_within_their_ranges(values):
    SamplingParams(**values).validate(VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -(2**31)),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("temperature", -1e-9),
        ("temperature", 100.1),
        ("top_k", -1),
        ("top_p", math.nan),
        ("top_p", math.inf),
        ("top_p", -math.inf),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0000001),
        ("seed", -1),
        ("seed", SEED_LIMIT),
        ("stop", ("",)),
        ("stop", ("ok", "")),
        ("stop", ("x" * (MAX_STOP_STRING_LEN + 1),)),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("top_a", -0.1),
        ("top_a", 1.1),
        ("top_a", math.nan),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, -math.inf),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(MAX_LOGIT_BIASES + 1))),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 101.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.inf),
        ("bad_words", ((),)),
        ("bad_words", ((VOCAB,),)),
        ("bad_words", ((1, -1),)),
        ("bad_words", ((1,) * (MAX_BAD_WORD_LEN + 1),)),
        ("bad_words", ((1,),) * (MAX_BAD_WORDS + 1)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (VOCAB,)),
        ("allowed_token_ids", (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
    ],
)
def test_values_outside_are_named(field, value):
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**{field: value}).validate(VOCAB)
    assert caught.value.fields["field"] == field
    assert len(caught.value.message) < 300


def test_a_way_through_json():
    params = SamplingParams(
        stop=("a",),
        logit_bias=((1, 2.0),),
        bad_words=((1, 2), (3,)),
        allowed_token_ids=(4,),
        grammar=GrammarSpec("regex", "a*"),
        logprobs=2,
    )
    assert SamplingParams.from_data(json.loads(json.dumps(params.as_data()))) == params
    assert SamplingParams.from_data(json.loads(json.dumps(SamplingParams().as_data()))) == SamplingParams()


def test_every_number_has_a_range_and_every_flag_has_none():
    numbers = {name for name in SCALAR_FIELDS if not isinstance(getattr(SamplingParams(), name), bool)}
    assert numbers == set(RANGES)


@pytest.mark.parametrize("name", RANGES)
def test_a_range_holds_its_ends_and_nothing_beyond(name):
    allowed = RANGES[name]
    assert (allowed.low in allowed) != allowed.above_low
    assert allowed.low - 0.001 not in allowed
    assert math.nan not in allowed
    assert math.inf not in allowed
    if allowed.high < math.inf:
        assert allowed.high in allowed
        assert allowed.high * 1.01 not in allowed
