"""Prompts that the decode worker computes itself: the tokens of the split path, and of one process; in float64.

What the two paths may differ in is where the KV comes from. So each feature of a request runs over both at one decode
worker, side by side with streams of the other kind.
"""

import dataclasses
import time

import pytest

from baton.core.errors import RequestCancelled, RequestDeadlineExceeded
from baton.core.requests.request import AttemptKey, FinishReason
from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.features import FEATURES, PROMPT_LENS, requests_for
from baton.tests.e2e.prompts import requests_for as plain_requests
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.test_forced_prefix import going_on
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_groups import TPGroupTopology

K = 2
SLOW = pytest.mark.slow


def few_of(features, *quick):
    """All but some are for the long suite."""
    return [feature if feature in quick else pytest.param(feature, marks=SLOW) for feature in features]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    long = token_prompts(tokenizer, 9, max_len=300)[7]
    return [long[:prompt_len] for prompt_len in PROMPT_LENS]


@pytest.fixture(scope="module")
def deployment(load_tiny, tokenizer):
    with Topology(load_tiny(), tokenizer, num_drafts=K, chunk_len=16) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def plain(deployment, prompts):
    return [outcome.token_ids for outcome in deployment.generate(requests_for("plain", prompts, K, None))]


def renamed(requests, tag):
    return [
        dataclasses.replace(request, key=AttemptKey(f"{request.key.request_id} {tag}", request.key.attempt))
        for request in requests
    ]


def check_same(got, wanted):
    assert got.error is None
    assert wanted.error is None
    assert got.token_ids == wanted.token_ids
    assert got.finish_reason == wanted.finish_reason
    for ours, theirs in ((got.logprobs, wanted.logprobs), (got.prompt_logprobs, wanted.prompt_logprobs)):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9)


@pytest.mark.parametrize("feature", few_of(FEATURES, "plain", "logprobs", "schema, logprobs, penalty"))
def test_both_paths_give_the_same_answer(deployment, prompts, plain, feature):
    split = renamed(requests_for(feature, prompts, K, plain), f"{feature} split")
    local = renamed(split, "local")
    started = [start(item) for pair in zip(split, local, strict=True) for start, item in _ways(deployment, pair)]
    outcomes = [deployment.finish(running) for running in started]
    for wanted, got in zip(outcomes[::2], outcomes[1::2], strict=True):
        check_same(got, wanted)
        assert got.decode_stats is None or got.decode_stats.kv_bytes_landed == 0
    deployment.wait_idle()


def _ways(deployment, pair):
    return zip((deployment.start, deployment.start_local), pair, strict=True)


@pytest.mark.parametrize(
    ("k", "sampled"),
    [
        pytest.param(0, False, marks=SLOW),
        pytest.param(0, True, marks=SLOW),
        pytest.param(2, False, marks=SLOW),
        (2, True),
    ],
)
def test_tokens_are_those_of_one_process(load_tiny, tokenizer, k, sampled):
    requests = plain_requests(token_prompts(tokenizer, 6), sampled=sampled, num_drafts=k, max_tokens=16)
    wanted = local_tokens(load_tiny(), tokenizer, requests)
    for scheduling in ("sync", "async") if k == 0 else ("async",):
        with Topology(load_tiny(), tokenizer, num_drafts=k, chunk_len=64, scheduling=scheduling) as running:
            outcomes = running.generate(renamed(requests, scheduling), local=True)
            running.wait_idle()
            held = running.decode[0].worker.inventory()
        assert [outcome.token_ids for outcome in outcomes] == wanted
        assert held.num_local_prefills == len(requests)
        assert held.num_local_prefill_tokens == sum(request.prompt_len for request in requests)
        assert held.num_prefill_tokens_queued == held.num_kv_receives == 0


def test_each_answer_of_several_has_its_own_draws(deployment, prompts):
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=2, ignore_eos=True)
    request = dataclasses.replace(requests_for("plain", prompts, K, None)[2], sampling=sampling)
    both = [dataclasses.replace(request, key=AttemptKey(f"choice {choice}", 1), choice=choice) for choice in range(2)]
    split = deployment.generate(renamed(both, "split"))
    local = deployment.generate(renamed(both, "local"), local=True)
    assert [outcome.token_ids for outcome in local] == [outcome.token_ids for outcome in split]
    assert local[0].token_ids != local[1].token_ids


@pytest.mark.parametrize("feature", few_of(["plain", "schema, logprobs, penalty", "repetition penalty"], "plain"))
def test_an_answer_goes_on_here_from_tokens_made_elsewhere(deployment, prompts, plain, feature):
    requests = renamed(requests_for(feature, prompts, K, plain), f"{feature} forced")
    whole = deployment.generate(requests)
    attempts = [going_on(request, outcome, 4, 2) for request, outcome in zip(requests, whole, strict=True)]
    for got, outcome in zip(deployment.generate(attempts, local=True), whole, strict=True):
        assert got.error is None
        assert got.token_ids == outcome.token_ids[4:]
        assert got.finish_reason == outcome.finish_reason
        assert [one.token_id for one in got.logprobs] == [one.token_id for one in outcome.logprobs[4:]]
    deployment.wait_idle()


def test_a_request_that_ends_at_its_first_token_holds_nothing(deployment, prompts):
    requests = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_tokens=1))
        for request in renamed(requests_for("plain", prompts, K, None), "one token")
    ]
    for got in deployment.generate(requests, local=True):
        assert len(got.token_ids) == 1
        assert got.finish_reason == FinishReason.LENGTH.value
        assert got.decode_stats is None
    deployment.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("overcommit", [False, True])
def test_more_prompts_than_blocks_wait_and_give_way(load_tiny, tokenizer, overcommit):
    prompts = token_prompts(tokenizer, 14)
    requests = plain_requests(prompts, sampled=True, num_drafts=K, max_tokens=40)
    wanted = local_tokens(load_tiny(), tokenizer, requests)
    with Topology(
        load_tiny(), tokenizer, num_drafts=K, num_blocks=20, num_prefill_blocks=1024, overcommit=overcommit
    ) as running:
        started = [(running.start_local if at % 3 else running.start)(request) for at, request in enumerate(requests)]
        outcomes = [running.finish(one) for one in started]
        running.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    assert [outcome.token_ids for outcome in outcomes] == wanted


@pytest.mark.slow
def test_a_prompt_that_gave_way_reports_on_its_tokens_once(load_tiny, tokenizer, prompts):
    """The pool is full when the answers before it grow, so the prompt behind them is dropped half computed."""
    long = (prompts[2] * 20)[:250]
    values = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    front = requests_for("plain", [prompts[0]] * 3, K, None)
    front = [
        dataclasses.replace(request, sampling=SamplingParams(max_tokens=90, **values))
        for request in renamed(front, "front")
    ]
    last = dataclasses.replace(
        front[0],
        key=AttemptKey("last", 1),
        prompt_token_ids=tuple(long),
        sampling=SamplingParams(max_tokens=8, prompt_logprobs=1, **values),
    )
    with Topology(load_tiny(), tokenizer, num_drafts=K, chunk_len=16, max_num_seqs=4) as wide:
        wanted = wide.generate([*front, last])
    # Three answers of one block each to begin with, which want six; seventeen are the prompt's.
    with Topology(
        load_tiny(), tokenizer, num_drafts=K, chunk_len=16, max_num_seqs=4, num_blocks=22, overcommit=True
    ) as running:
        got = running.generate([*front, last], local=True)
        running.wait_idle()
    for one, other in zip(got, wanted, strict=True):
        check_same(one, other)
    assert len(got[-1].prompt_logprobs) == last.prompt_len - 1


def long_request(prompts, name, **values):
    request = requests_for("plain", prompts, K, None)[2]
    return dataclasses.replace(
        request, key=AttemptKey(name, 1), prompt_token_ids=tuple((prompts[2] * 12)[:400]), **values
    )


def test_a_prompt_that_is_cancelled_on_its_way_frees_everything(deployment, prompts):
    for at in range(6):
        running = deployment.start_local(long_request(prompts, f"cancelled {at}"))
        while at and deployment.decode[0].worker.inventory().num_slots_in_use == 0 and not running[4].ended:
            time.sleep(0.001)
        deployment.cancel(running)
        with pytest.raises(RequestCancelled):
            list(running[4].events())
        deployment.wait_idle()


def test_a_prompt_whose_deadline_passes_frees_everything(deployment, prompts):
    deadline_s = time.monotonic() + 0.005
    got = deployment.generate([long_request(prompts, "late", deadline_s=deadline_s)], local=True)[0]
    assert isinstance(got.error, RequestDeadlineExceeded)
    deployment.wait_idle()


def test_a_worker_that_closes_ends_prompts_on_their_way(load_tiny, tokenizer, prompts):
    with Topology(load_tiny(), tokenizer, num_drafts=K) as running:
        worker = running.decode[0].worker
        started = [running.start_local(long_request(prompts, f"closing {at}")) for at in range(12)]
        until_s = time.monotonic() + 60.0
        while worker.inventory().num_requests_held + worker.inventory().num_requests_finished < len(started):
            assert time.monotonic() < until_s
            time.sleep(0.001)
        worker.close()
        outcomes = [running.finish(one) for one in started]
    assert all(outcome.finish_reason or isinstance(outcome.error, RequestCancelled) for outcome in outcomes)


@pytest.mark.slow
def test_two_ranks_compute_prompts(processes, tokenizer, load_tiny, prompts):
    few = token_prompts(tokenizer, 9)
    requests = plain_requests(few, sampled=True, num_drafts=K, max_tokens=16)
    wanted = local_tokens(load_tiny(), tokenizer, requests)
    grammar = renamed(requests_for("schema", prompts, K, None), "tp_group")
    with Topology(load_tiny(), tokenizer, num_drafts=K) as alone:
        wanted += [outcome.token_ids for outcome in alone.generate(grammar)]
    with TPGroupTopology(processes, TINY, 1, 2, preempt_at=(7,)) as topology:
        started = [topology.start(request, local=at % 3 > 0) for at, request in enumerate([*requests, *grammar])]
        outcomes = [topology.finish(one) for one in started]
        topology.wait_idle()
        held = topology.inventories()[1]
    assert [outcome.error for outcome in outcomes] == [None] * len(wanted)
    assert [outcome.token_ids for outcome in outcomes] == wanted
    assert held.num_local_prefills == sum(at % 3 > 0 for at in range(len(wanted)))
