"""An answer that goes on elsewhere from tokens made before is the answer of one attempt: tokens, reports, end.

What a router does after a death is done here by hand: prompt and the first tokens of the answer go to a pair of workers
as a new attempt, for every feature of a request and cuts at the first token, in the middle and before the last.
"""

import dataclasses

import pytest

from baton.core.errors import InvalidRequest
from baton.core.requests.request import AttemptKey
from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.features import FEATURES, PROMPT_LENS, requests_for
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.topology import Topology

K = 2
STOPPED = "stop string"


@pytest.fixture(scope="module")
def prompts(tokenizer):
    long = token_prompts(tokenizer, 9, max_len=300)[7]
    return [long[:prompt_len] for prompt_len in PROMPT_LENS]


@pytest.fixture(scope="module")
def deployment(load_tiny, tokenizer):
    with Topology(load_tiny(), tokenizer, num_prefill=2, num_decode=2, num_drafts=K, chunk_len=32) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def plain(deployment, prompts):
    return [outcome.token_ids for outcome in deployment.generate(requests_for("plain", prompts, K, None))]


def going_on(request, outcome, num_forced, attempt):
    """The next attempt, from the first tokens of an outcome."""
    sampling = dataclasses.replace(request.sampling, prompt_logprobs=None)
    tokens = (*request.prompt_token_ids, *outcome.token_ids[:num_forced])
    return dataclasses.replace(
        request,
        key=AttemptKey(request.key.request_id, attempt),
        prompt_token_ids=tokens,
        sampling=sampling,
        num_forced=num_forced,
    )


def requests_of(feature, prompts, plain, tokenizer):
    if feature != STOPPED:
        return requests_for(feature, prompts, K, plain)
    requests = requests_for("plain", prompts, K, plain)
    # Each stop string lies across several tokens of its answer, so that every cut below goes through it or before it.
    stops = [tokenizer.decode(tokens[4:9]) for tokens in plain]
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=(stop,), min_tokens=2))
        for request, stop in zip(requests, stops, strict=True)
    ]


@pytest.mark.parametrize("feature", [*FEATURES, STOPPED])
def test_an_answer_goes_on_from_any_cut(deployment, prompts, plain, tokenizer, feature):
    requests = requests_of(feature, prompts, plain, tokenizer)
    requests = [
        dataclasses.replace(request, key=AttemptKey(f"{request.key.request_id} {feature}", 1)) for request in requests
    ]
    whole = deployment.generate(requests)
    attempts, expected = [], []
    for request, outcome in zip(requests, whole, strict=True):
        assert outcome.error is None
        length = len(outcome.token_ids)
        for cut in sorted({1, 5, length // 2, length - 2, length - 1} & set(range(1, length))):
            # Side by side they need names of their own: an attempt ends those before it.
            named = dataclasses.replace(request, key=AttemptKey(f"{request.key.request_id} from {cut}", 1))
            attempts.append(going_on(named, outcome, cut, 2))
            expected.append((outcome, cut))
    assert attempts
    for got, (outcome, cut), request in zip(deployment.generate(attempts), expected, attempts, strict=True):
        assert got.error is None, (cut, got.error)
        assert got.token_ids == outcome.token_ids[cut:], (request.key, cut)
        assert got.finish_reason == outcome.finish_reason
        for one, wanted in zip(got.logprobs, outcome.logprobs[cut:] if got.logprobs else (), strict=True):
            assert (one.token_id, one.rank) == (wanted.token_id, wanted.rank)
            assert one.logprob == pytest.approx(wanted.logprob, abs=1e-9)
            assert [token for token, _ in one.top] == [token for token, _ in wanted.top]
        assert bool(got.logprobs) == bool(outcome.logprobs)
    deployment.wait_idle()


def test_each_answer_of_several_goes_on_by_its_own_draws(deployment, prompts):
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=2, ignore_eos=True)
    request = dataclasses.replace(requests_for("plain", prompts, K, None)[2], sampling=sampling)
    both = [dataclasses.replace(request, key=AttemptKey(f"choice {choice}", 1), choice=choice) for choice in range(2)]
    whole = deployment.generate(both)
    assert whole[0].token_ids != whole[1].token_ids
    again = deployment.generate([going_on(one, outcome, 3, 2) for one, outcome in zip(both, whole, strict=True)])
    assert [got.token_ids for got in again] == [outcome.token_ids[3:] for outcome in whole]
    mixed = dataclasses.replace(going_on(both[0], whole[0], 3, 3), choice=1)
    assert deployment.generate([mixed])[0].token_ids != whole[0].token_ids[3:], "the choice takes part in every draw"
    deployment.wait_idle()


def test_an_answer_goes_on_after_giving_way(load_tiny, tokenizer, prompts):
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=4, presence_penalty=1.0, ignore_eos=True)
    request = dataclasses.replace(requests_for("plain", prompts, K, None)[1], sampling=sampling)
    with Topology(load_tiny(), tokenizer, num_drafts=K, overcommit=True, preempt_at=(4, 7)) as running:
        whole = running.generate([request])[0]
        got = running.generate([going_on(request, whole, 6, 2)])[0]
        assert got.token_ids == whole.token_ids[6:]
        assert running.decode[0].worker.inventory().num_preemptions == 4
        running.wait_idle()


def test_the_tokens_before_the_cut_are_taken_from_the_prefix_cache(deployment, prompts):
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    request = dataclasses.replace(
        requests_for("plain", prompts, K, None)[2], sampling=sampling, key=AttemptKey("cached", 1)
    )
    whole = deployment.generate([request])[0]
    attempts = [going_on(request, whole, cut, attempt) for attempt, cut in enumerate((30, 30, 35, 35), 2)]
    outcomes = [deployment.generate([attempt])[0] for attempt in attempts]
    assert [got.token_ids for got in outcomes] == [whole.token_ids[cut:] for cut in (30, 30, 35, 35)]
    num_prompt_blocks = (request.prompt_len - 1) // 16
    assert outcomes[-1].num_cached_tokens > 16 * num_prompt_blocks, "forced tokens too"
    deployment.wait_idle()


@pytest.mark.parametrize("num_forced", [12, 13, 40, 1 << 20])
def test_forced_tokens_that_leave_nothing_to_do_are_refused(deployment, prompts, plain, num_forced):
    request = requests_for("plain", prompts, K, None)[1]
    forced = dataclasses.replace(request, key=AttemptKey(f"refused {num_forced}", 1), num_forced=num_forced)
    for check in (deployment.prefill[0].worker.check, deployment.decode[0].worker.check):
        with pytest.raises(InvalidRequest) as caught:
            check(forced)
        assert caught.value.fields["field"] == "num_forced_tokens"


def test_forced_tokens_that_end_the_answer_are_refused(deployment, prompts, plain):
    request = requests_for("plain", prompts, K, None)[0]
    sampling = dataclasses.replace(request.sampling, stop_token_ids=(plain[0][3],))
    ended = dataclasses.replace(
        request,
        key=AttemptKey("ended", 1),
        prompt_token_ids=(*request.prompt_token_ids, *plain[0][:6]),
        sampling=sampling,
        num_forced=6,
    )
    with pytest.raises(InvalidRequest, match="ends at token"):
        deployment.prefill[0].worker.check(ended)
    with pytest.raises(InvalidRequest, match="ends at token"):
        deployment.decode[0].worker.attend(ended, None)
    deployment.wait_idle()


def test_forced_tokens_that_do_not_fit_the_grammar_are_refused(deployment, prompts, plain):
    request = requests_for("schema", prompts, K, None)[0]
    forced = dataclasses.replace(
        request,
        key=AttemptKey("ungrammatical", 1),
        prompt_token_ids=(*request.prompt_token_ids, *plain[0][:6]),
        num_forced=6,
    )
    for check in (deployment.prefill[0].worker.check, deployment.decode[0].worker.check):
        with pytest.raises(InvalidRequest, match="forbids token"):
            check(forced)
