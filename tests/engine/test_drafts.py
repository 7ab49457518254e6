"""That drafts are as good as the MTP head makes them: nothing on their way is shifted, stale or from another row."""

import pytest

from baton.engine.sampling import sampler
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine


@pytest.mark.parametrize("chunk_len", [1, 5, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_a_perfect_head_is_always_right(k, temperature, chunk_len):
    # max_tokens = 1 + 5 * (k + 1): the last step ends exactly with its bonus token.
    requests = [
        request_of(
            range(1, 2 + 4 * at),
            k=k,
            max_tokens=1 + 5 * (k + 1),
            temperature=temperature,
            seed=at,
            top_p=0.9,
            ignore_eos=True,
        )
        for at in range(5)
    ]
    engine = toy_engine(PerfectToyModel(), k=k, chunk_len=chunk_len, max_num_sequences=3)
    for result in engine.generate(requests):
        assert result.counts.num_verify_steps == 5
        assert result.counts.num_accepted_tokens == result.counts.num_draft_tokens == 5 * k


@pytest.mark.fast
@pytest.mark.long
def test_a_perfect_head_stays_right_after_drafts_that_a_cap_refused():
    requests = [request_of([3, at], k=at % 5, max_tokens=31, temperature=0.5, ignore_eos=True) for at in range(10)]
    for request, result in zip(requests, toy_engine(PerfectToyModel(), k=4).generate(requests), strict=True):
        counts = result.counts
        # Every step but the last, which max_tokens may cut short, accepts all it was allowed.
        assert counts.num_draft_tokens - counts.num_accepted_tokens < max(request.num_draft_tokens, 1)


def accepted_share(k=2, num_requests=24, **sampling):
    requests = [
        request_of([at % 20, 7], k=k, max_tokens=60, seed=at, ignore_eos=True, **sampling) for at in range(num_requests)
    ]
    model = ToyModel(sharpness=6.0, surprise=0.3)
    results = toy_engine(model, k=k, num_blocks=400, max_num_sequences=8).generate(requests)
    num_drafts = sum(result.counts.num_draft_tokens for result in results)
    num_accepted = sum(result.counts.num_accepted_tokens for result in results)
    return num_accepted / num_drafts, [result.token_ids for result in results]


@pytest.mark.long
@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.fast)])
def test_drafts_that_share_the_targets_noise_are_accepted_more_often(k, monkeypatch):
    coupled, tokens = accepted_share(k, temperature=1.0)

    def likeliest(logits_BQV, *_):
        return sampler.choose(logits_BQV, None, None)

    monkeypatch.setattr("baton.engine.speculation.drafting.choose", likeliest)
    argmax, same_tokens = accepted_share(k, temperature=1.0)
    assert same_tokens == tokens  # what is drafted never decides what is emitted
    print(f"accepted at temperature 1, k = {k}: {coupled:.3f} coupled, {argmax:.3f} argmax")
    assert coupled > 1.3 * argmax
