import math

import pytest

from baton.core.errors import InvalidSampling
from baton.core.sampling import MAX_STOP_STRING_LEN, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SEED_LIMIT, SamplingParams

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
    ],
)
def test_values_outside_are_named(field, value):
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**{field: value}).validate(VOCAB)
    assert caught.value.fields["field"] == field
    assert len(caught.value.message) < 300
