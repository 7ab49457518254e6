"""Experts that move while streams run change no token: any maps, copies and all, in float64, of the bundled models."""

import itertools
from functools import cache

import pytest
import torch

from baton.engine.local import LocalEngine
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.kernels.moe.expert_map import balance, first_map, rank_loads
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_async_equals_sync import PREEMPTIONS, generate, sizes_of
from baton.tests.e2e.test_bundled_families import MODEL, RANKS, SIZES, marked, path_of
from baton.tests.e2e.test_tensor_parallel import check, reference
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.e2e.tp_groups import TPGroupTopology
from baton.tests.engine.graphs import assert_all_replayed
from baton.tests.engine.moving_experts import load_options, shuffling

NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, NUM_PROMPTS, max_len=60)


@pytest.fixture(scope="module")
def model_of():
    return cache(lambda name: load_model(path_of(name), **MODEL))


@pytest.fixture(scope="module")
def plain(tokenizer, prompts, model_of):
    """Tokens and steps of one rank."""

    @cache
    def run_once(name, sampled, k):
        engine = LocalEngine(model_of(name), tokenizer, **sizes_of(k, 16, scheduling="sync"))
        with pytest.MonkeyPatch.context() as patch:
            results, steps = generate(patch, engine, requests_for(prompts, sampled=sampled, num_drafts=k))
        return [result.token_ids for result in results], steps

    return run_once


def served(size, name, tokenizer, prompts, *, sampled, k, num_redundant, balancer, dp_attention=False, **options):
    """Tokens, steps and the balancer of a group whose experts move."""

    def work(engine):
        with pytest.MonkeyPatch.context() as patch:
            results, steps = generate(patch, engine, requests_for(prompts, sampled=sampled, num_drafts=k))
        if options.get("graphs"):
            assert_all_replayed(engine)
        return [result.token_ids for result in results], steps, engine.runner.balancer

    model = MODEL | load_options(num_redundant) | {"dp_attention": dp_attention}
    return run_over_ranks(
        size, path_of(name), tokenizer, work, model=model, balancer=balancer, **sizes_of(k, 16, **options)
    )


CELLS = list(itertools.product(RANKS, (2, 4), (0, 4, 8), (False, True), (0, 1, 3), PREEMPTIONS))
DEFAULT = {
    ("tiny-mla", 2, 4, False, 1, "to host memory"),
    ("tiny-mla", 4, 0, True, 3, "stays"),
    ("tiny-hybrid", 2, 8, True, 1, "stays"),
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
        assert balancer.num_moved >= 3, "layers, one after the other; a few steps lie between"


GRAPHS = {"sizes": (2, 3, 4), "widths": (12,)}
DEALT = list(itertools.product((2, 4), (0, 4), (False, True), (0, 1, 3), ("stays", "computed again"), (False, True)))
DEALT_DEFAULT = {(2, 4, True, 1, "stays", True), (2, 0, False, 3, "computed again", False)}


@pytest.mark.parametrize(
    ("size", "num_redundant", "sampled", "k", "preemption", "replayed"), marked(DEALT, DEALT_DEFAULT)
)
def test_moves_where_sequences_are_dealt_to_ranks_change_no_token(
    size, num_redundant, sampled, k, preemption, replayed, tokenizer, prompts, plain
):
    """Launched or replayed: copies are chosen by positions that ranks tell each other."""
    tokens, accepted = plain("tiny-mla", sampled, k)
    options = {"scheduling": "async", "dp_attention": True, **PREEMPTIONS[preemption]}
    options["graphs"] = GRAPHS if replayed else None
    made, steps, balancer = served(
        size, "tiny-mla", tokenizer, prompts,
        sampled=sampled, k=k, num_redundant=num_redundant, balancer=shuffling(k), **options,
    )  # fmt: skip
    assert made == tokens
    assert preemption != "stays" or steps == accepted
    assert balancer.num_moved >= 3


EVENED = [("tiny-mla", 2, 0), ("tiny-mla", 4, 0), ("tiny-mla", 4, 8), ("tiny-hybrid", 2, 4)]


@pytest.mark.parametrize(("name", "size", "num_redundant"), marked(EVENED, {("tiny-hybrid", 2, 4)}))
def test_ranks_get_more_even_loads_by_what_experts_got(name, size, num_redundant, tokenizer, plain, prompts, capsys):
    """As with `--enable-eplb`, read after a few steps: all that was computed, by the maps of then and now."""
    tokens, steps = plain(name, True, 1)
    kept = []

    def balancer_of(exchange):
        kept.append(exchange)
        return ExpertBalancer(exchange, 4)

    made, stepped, balancer = served(
        size, name, tokenizer, prompts,
        sampled=True, k=1, num_redundant=num_redundant, balancer=balancer_of, scheduling="async",
    )  # fmt: skip
    assert (made, stepped) == (tokens, steps)
    assert balancer.num_moved > 0
    [exchange] = kept
    loads = torch.stack([layer.slots.load_E for layer in exchange._layers]).tolist()
    first = first_map(len(loads[0]), num_redundant)
    before, after = (
        balance([rank_loads(its, experts, world_size=size) for its, experts in zip(loads, maps, strict=True)])
        for maps in ([first] * len(loads), exchange.maps)
    )
    with capsys.disabled():
        print(f"\n{name} over {size} ranks, {num_redundant} copies: mean load by the largest {before:.3f}, {after:.3f}")
    assert after > before


PAIRS = [(name, *pair, num) for name, *pair in SIZES if max(pair) > 1 for num in (0, 4)]
PAIRS_DEFAULT = {("tiny-mla", 2, 2, 4)}


@pytest.mark.parametrize(("name", "tp_prefill", "tp_decode", "num_redundant"), marked(PAIRS, PAIRS_DEFAULT))
def test_moves_at_either_side_of_a_hand_off_change_no_token(
    name, tp_prefill, tp_decode, num_redundant, processes, prompts, tokenizer, model_of
):
    """Every rank a process."""
    options = {"expert_parallel": (True, True), "num_redundant": num_redundant}
    with TPGroupTopology(processes, path_of(name), tp_prefill, tp_decode, **options) as topology:
        check(topology, prompts, reference(model_of(name), tokenizer, prompts), drafts=(2,))
        for size, held in zip((tp_prefill, tp_decode), topology.inventories(), strict=True):
            assert held.HasField("experts") == (size > 1)
            assert size == 1 or held.experts.num_layers_moved > 0
            assert size == 1 or 1 / size <= held.experts.balance < 1


def test_moves_at_ranks_that_sequences_are_handed_over_to_one_by_one(processes, prompts, tokenizer, model_of):
    options = {"expert_parallel": (False, True), "num_redundant": 4, "dp_attention": True}
    with TPGroupTopology(processes, path_of("tiny-mla"), 1, 2, **options) as topology:
        check(topology, prompts, reference(model_of("tiny-mla"), tokenizer, prompts), drafts=(2,))
        _, held = topology.inventories()
        assert held.experts.num_layers_moved > 0


def test_a_rank_that_fails_in_an_exchange_ends_its_worker_which_says_why(processes, prompts):
    options = {"expert_parallel": (False, True), "num_redundant": 0, "fails_to_move": True}
    topology = TPGroupTopology(processes, path_of("tiny-mla"), 1, 2, **options)
    try:
        started = [topology.start(request) for request in requests_for(prompts, sampled=False, num_drafts=1)]
        kind, why = topology.decode[0].answers.get(timeout=20.0)
        assert kind == "fatal"
        assert "out of memory" in why
        for running in started:
            topology.finish_or_lose(running)
        for process in topology.decode:
            process.process.join(5.0)
            assert not process.process.is_alive()
    finally:
        topology.abandon()
