"""Rejection inside the engine: what requests ask holds with drafts of any kind, and greedy ones get the same tokens."""

import pytest

from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine

pytestmark = pytest.mark.fast
METHODS = list(DraftSampleMethod)
PRUNED = [0, 1, 2, 3, 5, 8, 13, 21]


def rejection(method):
    return VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=method)


def generate(requests, *, k=3, verification=None, model=None):
    engine = toy_engine(model or ToyModel(), k=k, num_blocks=200, verification=verification)
    return engine.generate(requests)


@pytest.mark.long
@pytest.mark.parametrize("d2t", [None, PRUNED])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_beside_sampled_ones_get_the_tokens_of_no_drafts(method, d2t):
    def requests(k):
        kinds = [{"temperature": 0.0}, {"seed": 3}, {"temperature": 0.0, "repetition_penalty": 1.7}]
        return [request_of([at, 7], k=k, max_tokens=24, ignore_eos=True, **kinds[at % 3]) for at in range(9)]

    plain = generate(requests(0), k=0)
    drafted = generate(requests(3), verification=rejection(method), model=ToyModel(d2t=d2t))
    for at, (wanted, got) in enumerate(zip(plain, drafted, strict=True)):
        assert len(got.token_ids) == 24
        assert at % 3 == 1 or got.token_ids == wanted.token_ids


@pytest.mark.long
@pytest.mark.parametrize("d2t", [None, PRUNED])
@pytest.mark.parametrize("method", METHODS)
def test_what_requests_forbid_is_never_emitted(method, d2t):
    allowed = (4, 5, 6, 9)
    requests = [
        request_of([at, 3], k=3, max_tokens=20, ignore_eos=True, temperature=1.5, seed=at, **asked)
        for at in range(4)
        for asked in ({"allowed_token_ids": allowed}, {"top_k": 1}, {"bad_words": ((5,), (8,))})
    ]
    results = generate(requests, verification=rejection(method), model=ToyModel(d2t=d2t))
    for at in range(4):
        free, top, bad = results[3 * at : 3 * at + 3]
        assert set(free.token_ids) <= set(allowed)
        assert not {5, 8} & set(bad.token_ids)
        greedy = generate([request_of([at, 3], k=0, max_tokens=20, ignore_eos=True, temperature=0.0)], k=0)
        assert top.token_ids == greedy[0].token_ids


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_perfect_head_that_is_sampled_is_always_right(k, temperature):
    requests = [
        request_of(
            range(1, 2 + 4 * at), k=k, max_tokens=1 + 5 * (k + 1), temperature=temperature, seed=at, ignore_eos=True
        )
        for at in range(5)
    ]
    verification = rejection(DraftSampleMethod.PROBABILISTIC)
    for result in generate(requests, k=k, verification=verification, model=PerfectToyModel()):
        assert result.counts.num_accepted_tokens == result.counts.num_draft_tokens == 5 * k


def accepted_share(verification, k=3, d2t=None):
    requests = [
        request_of([at % 20, 7], k=k, max_tokens=60, seed=at, ignore_eos=True, temperature=1.0) for at in range(24)
    ]
    model = ToyModel(sharpness=6.0, surprise=0.3, d2t=d2t)
    results = generate(requests, k=k, verification=verification, model=model)
    num_drafts = sum(result.counts.num_draft_tokens for result in results)
    return sum(result.counts.num_accepted_tokens for result in results) / num_drafts


@pytest.mark.long
def test_drawn_drafts_stand_more_often_than_the_likeliest_and_blocks_more_often_than_tokens():
    drawn, likeliest = (accepted_share(rejection(method)) for method in METHODS)
    by_token = accepted_share(VerificationConfig(mode=VerificationMode.REJECTION, block=False))
    print(
        f"accepted at temperature 1: {drawn:.3f} as blocks, {by_token:.3f} by token, {likeliest:.3f} of the likeliest"
    )
    assert drawn > 1.3 * likeliest
    assert drawn > by_token - 0.02


@pytest.mark.long
def test_forced_and_synthetic_lengths():
    requests = [request_of([at], k=3, max_tokens=1 + 3 * 8, seed=at, ignore_eos=True) for at in range(4)]
    for result in generate(requests, verification=VerificationConfig.force(2)):
        assert result.counts.num_accepted_tokens == 2 * result.counts.num_verify_steps
    share = accepted_share(VerificationConfig.synthetic_mean(1.5, 3))
    assert share == pytest.approx(0.5, abs=0.05)


@pytest.mark.long
def test_seeds_decide():
    def once(seed):
        requests = [request_of([1, 2], max_tokens=30, k=3, seed=seed, ignore_eos=True)]
        return generate(requests, verification=rejection(DraftSampleMethod.PROBABILISTIC))[0].token_ids

    assert once(4) == once(4) != once(5)
