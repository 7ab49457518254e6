import pytest

from baton.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong, from_wire
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.validate import RequestLimits, validate_attempt, validate_request

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
    with pytest.raises(PromptTooLong, match=r"`max_tokens` exceed context limit: 99 \+ 2 > 100; .* is 100 tokens$"):
        validate_request([1] * 99, SamplingParams(max_tokens=2), wide)
    with pytest.raises(
        PromptTooLong, match=r"prompt is too long: it has 100 tokens; .* is 100 tokens, with the answer$"
    ):
        validate_request([1] * 100, SamplingParams(max_tokens=1), wide)


def forced(prompt_len, num_forced, max_tokens):
    return GenerationRequest(
        key=AttemptKey("r", 2),
        prompt_token_ids=(1,) * prompt_len,
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_s=1.0,
        num_forced=num_forced,
    )


def test_forced_tokens_are_of_the_answer():
    request = forced(60, 40, 50)
    assert (request.forced_token_ids, request.capacity_len) == ((1,) * 40, 70)
    assert forced(60, 0, 9).forced_token_ids == ()
    for fits in (request, forced(60, 59, 77), forced(2, 1, 2)):
        validate_attempt(fits, LIMITS)
    with pytest.raises(PromptTooLong):
        validate_attempt(forced(60, 59, 78), LIMITS)
    with pytest.raises(PromptTooLong):
        validate_attempt(forced(61, 40, 50), LIMITS)


@pytest.mark.parametrize(
    ("prompt_len", "num_forced", "max_tokens"), [(5, 5, 9), (5, 6, 9), (9, 4, 4), (9, 5, 4), (5, -1, 9)]
)
def test_forced_tokens_need_a_prompt_before_and_something_to_do_after(prompt_len, num_forced, max_tokens):
    with pytest.raises(InvalidRequest) as caught:
        validate_attempt(forced(prompt_len, num_forced, max_tokens), LIMITS)
    assert caught.value.fields == {"field": "num_forced_tokens", "value": num_forced}


def test_empty():
    with pytest.raises(EmptyPrompt):
        check(0, 5)


@pytest.mark.parametrize("token", [-1, 50, 2**40])
def test_tokens_outside_the_vocabulary_are_named(token):
    with pytest.raises(InvalidRequest) as caught:
        validate_request([0, 49, token], SamplingParams(max_tokens=1), LIMITS)
    assert caught.value.fields == {"field": "prompt", "at": 2, "value": token}
    assert type(from_wire(caught.value.to_wire())) is InvalidRequest
