import pytest

from baton.core.requests.request import FinishReason
from baton.core.requests.sampling import SamplingParams
from baton.engine.finish import FinishChecker
from baton.tests.engine.toy_engine import EOS, letters_tokenizer

pytestmark = pytest.mark.fast
A, B, C = 0, 1, 2


def checker(**sampling):
    tokenizer = letters_tokenizer()
    return FinishChecker(SamplingParams(**sampling), tokenizer.eos_token_ids, tokenizer)


def test_eos_is_kept_and_ends():
    assert checker().accept([A, EOS, B]) == ([A, EOS], FinishReason.STOP)


def test_eos_ignored():
    finish = checker(ignore_eos=True, max_tokens=4)
    assert finish.accept([EOS, EOS]) == ([EOS, EOS], None)
    assert finish.accept([A, B, C]) == ([A, B], FinishReason.LENGTH)


def test_stop_token_even_when_eos_is_ignored():
    assert checker(ignore_eos=True, stop_token_ids=(B,)).accept([EOS, B, A]) == ([EOS, B], FinishReason.STOP)


def test_max_tokens_over_several_steps():
    finish = checker(max_tokens=3)
    assert finish.accept([A]) == ([A], None)
    assert finish.accept([]) == ([], None)
    assert finish.accept([B, C, A]) == ([B, C], FinishReason.LENGTH)


def test_one_token():
    assert checker(max_tokens=1).accept([A, B]) == ([A], FinishReason.LENGTH)
    assert checker(max_tokens=1).accept([EOS]) == ([EOS], FinishReason.STOP)


def test_stop_string_over_token_and_step_borders():
    finish = checker(stop=("abc", "zzz"))
    assert finish.accept([A, A]) == ([A, A], None)
    assert finish.accept([B, C, A, A]) == ([B, C], FinishReason.STOP)


def test_stop_string_completed_by_the_last_token_counts_as_stop():
    assert checker(stop=("ab",), max_tokens=2).accept([A, B]) == ([A, B], FinishReason.STOP)


def test_no_tokens_after_the_end():
    finish = checker(max_tokens=1)
    finish.accept([A])
    with pytest.raises(AssertionError):
        finish.accept([B])


def test_a_stop_string_counts_only_behind_min_tokens():
    finish = checker(stop=("ab",), min_tokens=2)
    assert finish.accept([A, B]) == ([A, B], None)
    assert finish.accept([C, A, B]) == ([C, A, B], FinishReason.STOP)
