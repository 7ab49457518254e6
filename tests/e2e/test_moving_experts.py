"""Experts that move while streams run change no token: any maps, copies and all, in float64, of the bundled models."""

import itertools
from functools import cache, partial

import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.local import LocalEngine
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_async_equals_sync import PREEMPTIONS, generate, sizes_of
from baton.tests.e2e.test_bundled_families import MODEL, marked, path_of
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.engine.moving_experts import load_options, shuffling

NUM_PROMPTS = 8
NUM_LAYERS = {"tiny-mla": 5, "tiny-hybrid": 5}  # with experts, the MTP head's among them


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, NUM_PROMPTS, max_len=60)


@pytest.fixture(scope="module")
def plain(tokenizer, prompts):
    """Tokens and steps of one rank."""
    load = cache(lambda name: load_model(path_of(name), **MODEL))

    @cache
    def run_once(name, sampled, k):
        engine = LocalEngine(load(name), tokenizer, **sizes_of(k, 16, scheduling="sync"))
        with pytest.MonkeyPatch.context() as patch:
            results, steps = generate(patch, engine, requests_for(prompts, sampled=sampled, num_drafts=k))
        return [result.token_ids for result in results], steps

    return run_once


def served(size, name, tokenizer, prompts, *, sampled, k, num_redundant, balancer, **options):
    """Tokens, steps and the balancer of a group whose experts move."""

    def work(engine):
        with pytest.MonkeyPatch.context() as patch:
            results, steps = generate(patch, engine, requests_for(prompts, sampled=sampled, num_drafts=k))
        return [result.token_ids for result in results], steps, engine.runner.balancer

    model = MODEL | load_options(num_redundant)
    return run_over_ranks(
        size, path_of(name), tokenizer, work, model=model, balancer=balancer, **sizes_of(k, 16, **options)
    )


CELLS = list(itertools.product(NUM_LAYERS, (2, 4), (0, 4, 8), (False, True), (0, 1, 3), PREEMPTIONS))
DEFAULT = {
    ("tiny-mla", 2, 4, False, 1, "stays"),
    ("tiny-mla", 4, 0, True, 3, "to host memory"),
    ("tiny-hybrid", 2, 0, True, 1, "computed again"),
    ("tiny-hybrid", 2, 8, False, 3, "stays"),
}
CELLS = [cell for cell in CELLS if cell[:2] != ("tiny-hybrid", 4)]  # it has key heads for two ranks


@pytest.mark.parametrize(("name", "size", "num_redundant", "sampled", "k", "preemption"), marked(CELLS, DEFAULT))
def test_moves_in_mid_stream_change_no_token(
    name, size, num_redundant, sampled, k, preemption, tokenizer, prompts, plain
):
    """Ahead of nearly every step a round of an exchange, to maps drawn at random."""
    tokens, accepted = plain(name, sampled, k)
    for scheduling in ("sync", "async"):
        options = {"scheduling": scheduling, **PREEMPTIONS[preemption]}
        made, steps, balancer = served(
            size, name, tokenizer, prompts,
            sampled=sampled, k=k, num_redundant=num_redundant, balancer=shuffling(k), **options,
        )  # fmt: skip
        assert made == tokens
        if preemption == "stays":
            assert steps == accepted
        print(balancer.num_moved, balancer._num_steps)
        assert balancer.num_moved >= 2
