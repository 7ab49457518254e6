"""With the prefix cache on: the same tokens, the same accepted drafts, and nothing kept that is not free.

Prompts begin alike, end on and around block borders, and belong to two tenants. Tokens alone would not show a wrong
draft entry, because drafts are verified; so accepted drafts are compared too.
"""

import dataclasses
import time

import pytest
import torch

from baton.core.errors import RequestCancelled
from baton.core.numerics import Numerics
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology

MAX_TOKENS = 8
LONGEST = 7  # 120 tokens
WHOLE = 4096


@pytest.fixture(scope="module")
def prompts(tokenizer):
    base = token_prompts(tokenizer, 8, seed=3, max_len=120)[7]
    other = token_prompts(tokenizer, 8, seed=4, max_len=40)[7]
    ends = (1, 16, 17, 32, 33, 64, 97, 120)
    forks = (8, 16, 17, 47, 48, 64)
    return [base[:end] for end in ends] + [base[:fork] + other[:20] for fork in forks]


def requests_of(prompts, mode, num_drafts, tag, num_tenants=2):
    made = requests_for(prompts, sampled=mode == "coupled", num_drafts=num_drafts, max_tokens=MAX_TOKENS, tag=tag)
    return [dataclasses.replace(request, tenant="ab"[at % num_tenants]) for at, request in enumerate(made)]


def run(model, tokenizer, prompts, mode, *, num_drafts=2, rounds=2, **options):
    """Tokens and draft counts of every request, over `rounds` rounds of them, and the prefill workers' inventories."""
    with Topology(model, tokenizer, num_drafts=num_drafts, **options) as deployment:
        made = []
        for index in range(rounds):
            outcomes = deployment.generate(requests_of(prompts, mode, num_drafts, f"{index}-"))
            assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
            made += [(outcome.token_ids, counts(outcome)) for outcome in outcomes]
        deployment.wait_idle()
        return made, [side.worker.inventory() for side in deployment.prefill]


def counts(outcome):
    stats = outcome.decode_stats
    return stats and (stats.num_verify_steps, stats.num_draft_tokens, stats.num_accepted_tokens)


@pytest.fixture(scope="module")
def reference(load_tiny, tokenizer, prompts):
    made = {}

    def get(mode, dtype=torch.float64, numerics=Numerics.DEFAULT):
        if (mode, dtype) not in made:
            model = load_tiny(dtype, numerics)
            made[mode, dtype], inventories = run(
                model, tokenizer, prompts, mode, rounds=1, chunk_len=WHOLE, prefix_cache=False
            )
            assert inventories[0].num_blocks_cached == inventories[0].num_prefix_tokens == 0
        return made[mode, dtype]

    return get


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("greedy", {"chunk_len": 16}),
        ("coupled", {"chunk_len": 48, "num_prefill": 2}),
        ("greedy", {"chunk_len": WHOLE, "num_prefill_blocks": 10, "num_decode": 2}),
        pytest.param("coupled", {"chunk_len": 16, "num_prefill_blocks": 8}, marks=pytest.mark.slow),
        pytest.param("greedy", {"chunk_len": 48, "num_prefill": 2, "num_decode": 2}, marks=pytest.mark.slow),
    ],
)
def test_float64_tokens_and_accepted_drafts_are_those_without_a_cache(
    load_tiny, tokenizer, prompts, reference, mode, options
):
    made, inventories = run(load_tiny(torch.float64), tokenizer, prompts, mode, **options)
    assert made == reference(mode) * 2
    assert sum(inventory.num_prefix_hits for inventory in inventories) > len(prompts) / 2


@pytest.mark.parametrize("chunk_len", [48])
def test_invariant_float32_tokens_are_those_without_a_cache(load_tiny, tokenizer, prompts, reference, chunk_len):
    model = load_tiny(torch.float32, Numerics.INVARIANT)
    made, _ = run(model, tokenizer, prompts, "greedy", chunk_len=chunk_len)
    assert made == reference("greedy", torch.float32, Numerics.INVARIANT) * 2


def test_without_drafts_a_prompt_that_ends_on_a_border_still_computes_its_last_token(load_tiny, tokenizer, prompts):
    model = load_tiny(torch.float64, with_mtp=False)
    want, _ = run(model, tokenizer, prompts[:6], "greedy", num_drafts=0, rounds=1, prefix_cache=False)
    made, inventories = run(model, tokenizer, prompts[:6], "greedy", num_drafts=0, chunk_len=16)
    assert made == want * 2
    assert inventories[0].num_prefix_hits > 0


def test_what_a_request_found_is_reported_and_tenants_find_nothing_of_each_other(load_tiny, tokenizer, prompts):
    with Topology(load_tiny(torch.float32), tokenizer, num_drafts=2) as deployment:
        found = []
        for tenant in ("a", "b", "a"):
            (request,) = requests_of([prompts[LONGEST]], "greedy", 2, f"{len(found)}-", num_tenants=1)
            found += [o.num_cached_tokens for o in deployment.generate([dataclasses.replace(request, tenant=tenant)])]
        assert found == [0, 0, 112]
        inventory = deployment.prefill[0].worker.inventory()
        assert (inventory.num_prefix_tokens, inventory.num_prefix_hit_tokens) == (360, 112)
        deployment.wait_idle()


@pytest.mark.parametrize("num_looked_up", [1, 121, 218])
def test_a_cancel_at_any_point_leaves_only_blocks_that_are_right(
    load_tiny, tokenizer, prompts, reference, num_looked_up
):
    """Three cancelled requests under pressure, then all requests again over what they left."""
    with Topology(load_tiny(torch.float64), tokenizer, num_drafts=2, chunk_len=16, num_prefill_blocks=16) as deployment:
        doomed = requests_of([prompts[at] for at in (LONGEST, LONGEST - 1, -1)], "greedy", 2, "x", num_tenants=1)
        running = [deployment.start(request) for request in doomed]
        end_s = time.monotonic() + 20
        while deployment.prefill[0].worker.inventory().num_prefix_tokens < num_looked_up:
            assert time.monotonic() < end_s
            time.sleep(0.001)
        for each in running:
            deployment.cancel(each)
        for each in running:
            error = deployment.finish(each).error
            assert error is None or isinstance(error, RequestCancelled)
        outcomes = deployment.generate(requests_of(prompts, "greedy", 2, "after"))
        assert [(outcome.token_ids, counts(outcome)) for outcome in outcomes] == reference("greedy")
        deployment.wait_idle()
