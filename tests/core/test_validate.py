import pytest

from baton.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong, from_wire
from baton.core.sampling import SamplingParams
from baton.core.validate import RequestLimits, validate_request

pytestmark = pytest.mark.fast
LIMITS = RequestLimits(
    max_model_len=100, vocab_size=50, num_draft_tokens=2, prefill_capacity_len=60, decode_capacity_len=80
)


def check(prompt_len, max_tokens):
    validate_request([1] * prompt_len, SamplingParams(max_tokens=max_tokens), LIMITS)


def test_lengths_at_their_limits():
    check(1, 1)
    check(60, 18)
    check(1, 77)
    for prompt_len, max_tokens in [(61, 1), (60, 19), (1, 78), (99, 2), (100, 1), (1, 10**12)]:
        with pytest.raises(PromptTooLong) as caught:
            check(prompt_len, max_tokens)
        assert caught.value.fields["length"] > caught.value.fields["limit"]


def test_each_limit_is_the_one_named():
    wide = RequestLimits(
        max_model_len=100, vocab_size=50, num_draft_tokens=2, prefill_capacity_len=500, decode_capacity_len=500
    )
    validate_request([1] * 99, SamplingParams(max_tokens=1), wide)
    with pytest.raises(PromptTooLong, match="prompt and max_tokens"):
        validate_request([1] * 99, SamplingParams(max_tokens=2), wide)
    with pytest.raises(PromptTooLong, match="the prompt"):
        validate_request([1] * 100, SamplingParams(max_tokens=1), wide)


def test_empty():
    with pytest.raises(EmptyPrompt):
        check(0, 5)


@pytest.mark.parametrize("token", [-1, 50, 2**40])
def test_tokens_outside_the_vocabulary_are_named(token):
    with pytest.raises(InvalidRequest) as caught:
        validate_request([0, 49, token], SamplingParams(max_tokens=1), LIMITS)
    assert caught.value.fields == {"field": "prompt_token_ids", "at": 2, "value": token}
    assert type(from_wire(caught.value.to_wire())) is InvalidRequest
