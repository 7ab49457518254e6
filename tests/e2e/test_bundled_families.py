"""The bundled models with state and with latents, in float64: how they are served changes no token and no acceptance.

They are trained, so their drafts stand. With random weights `test_hybrids` has more ways to serve the same families.
"""

import itertools
import sysconfig
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.scripts import prune_draft_vocab
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_async_equals_sync import PREEMPTIONS, generate, sizes_of
from baton.tests.e2e.test_pruned_vocabulary import run
from baton.tests.e2e.test_same_tokens import (
    CHUNKS,
    SAMPLED,
    TOPOLOGIES,
    cell_id,
    disaggregated,
    local_tokens,
)
from baton.tests.e2e.test_split_acceptance import Speculated, counts_of, locally, split
from baton.tests.e2e.test_tensor_parallel import check, reference
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.e2e.tp_groups import TPGroupTopology

MODEL = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
RANKS = {"tiny-hybrid": (1, 2), "tiny-mla": (1, 2, 4)}
NUM_PROMPTS = 20
LIBRARY = Path(sysconfig.get_path("stdlib"))


def path_of(name):
    return TINY.with_name(name)


@pytest.fixture(scope="module")
def model_of():
    return cache(lambda name, **options: load_model(path_of(name), **(MODEL | options)))


def marked(cells, default):
    """The slow ones among cells."""
    return [pytest.param(*cell, marks=[] if cell in default else [pytest.mark.slow]) for cell in cells]


@pytest.fixture(scope="module")
def one_process(model_of, tokenizer):
    """Tokens of every prompt, made without drafts, chunks and hand-off."""

    @cache
    def run_once(name, mode):
        requests = requests_for(token_prompts(tokenizer, NUM_PROMPTS), sampled=SAMPLED[mode], num_drafts=0)
        return local_tokens(model_of(name, with_mtp=False), tokenizer, requests)

    return run_once


HANDED_OVER = list(itertools.product(RANKS, SAMPLED, (0, 1, 3), CHUNKS, TOPOLOGIES))
HANDED_OVER_DEFAULT = {("tiny-hybrid", "coupled", 3, 16, "1P2D"), ("tiny-mla", "greedy", 1, 48, "2P1D")}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=f"{cell[0]}-{cell_id(cell[1:])}", marks=marks)
        for cell in HANDED_OVER
        for marks in [[] if cell in HANDED_OVER_DEFAULT else [pytest.mark.slow]]
    ],
)
def test_disaggregated_tokens_are_those_of_one_process(cell, model_of, one_process, tokenizer):
    name, mode, k, *how = cell

    def load(*options, with_mtp):
        assert (*options, with_mtp) == (torch.float64, Numerics.DEFAULT, k > 0)
        return model_of(name, with_mtp=with_mtp)

    prompts = token_prompts(tokenizer, NUM_PROMPTS)
    tokens = disaggregated(load, tokenizer, prompts, (mode, k, *how), least_accepted=NUM_PROMPTS * k)
    assert tokens == one_process(name, mode)


@pytest.fixture(scope="module")
def rank_prompts(tokenizer):
    return token_prompts(tokenizer, 8, max_len=130)


@pytest.fixture(scope="module")
def wanted_of(model_of, tokenizer, rank_prompts):
    return cache(lambda name: reference(model_of(name), tokenizer, rank_prompts))


SIZES = [(name, *pair) for name, sizes in RANKS.items() for pair in itertools.product(sizes, sizes)]
SIZES_DEFAULT = {("tiny-hybrid", 2, 1), ("tiny-mla", 1, 4)}


@pytest.mark.parametrize(("name", "tp_prefill", "tp_decode"), marked(SIZES, SIZES_DEFAULT))
def test_ranks_on_either_side_change_no_token(name, tp_prefill, tp_decode, processes, rank_prompts, wanted_of):
    """With drafts and without."""
    with TPGroupTopology(processes, path_of(name), tp_prefill, tp_decode) as topology:
        check(topology, rank_prompts, wanted_of(name))


PLACED = [
    (name, *pair, *held)
    for name, sizes in RANKS.items()
    for pair in itertools.product(sizes, sizes)
    for held in itertools.product((True, False), (True, False))
    if any(size > 1 and is_held for size, is_held in zip(pair, held, strict=True))
]
PLACED_DEFAULT = {
    ("tiny-mla", 2, 2, True, False),
    ("tiny-mla", 2, 2, True, True),
    ("tiny-hybrid", 2, 2, False, True),
}


@pytest.mark.parametrize(
    ("name", "tp_prefill", "tp_decode", "prefill_held", "decode_held"), marked(PLACED, PLACED_DEFAULT)
)
def test_experts_over_ranks_on_either_side_change_no_token(
    name, tp_prefill, tp_decode, prefill_held, decode_held, processes, rank_prompts, wanted_of
):
    """Ranks of the one worker hold whole experts, those of the other a part of each, or all ranks whole ones."""
    held = (prefill_held, decode_held)
    with TPGroupTopology(processes, path_of(name), tp_prefill, tp_decode, expert_parallel=held) as topology:
        check(topology, rank_prompts, wanted_of(name))


SCHEDULED = list(itertools.product(RANKS, SAMPLED, (0, 1, 3), PREEMPTIONS, (1, 2)))
SCHEDULED_DEFAULT = {("tiny-hybrid", "coupled", 3, "stays", 1), ("tiny-mla", "greedy", 1, "to host memory", 2)}


@pytest.mark.parametrize(("name", "mode", "k", "preemption", "tp"), marked(SCHEDULED, SCHEDULED_DEFAULT))
def test_asynchronous_steps_accept_what_synchronous_ones_do(
    name, mode, k, preemption, tp, model_of, tokenizer, monkeypatch
):
    """And give the tokens of one plain run, preempted or not."""
    prompts = token_prompts(tokenizer, 8, max_len=60)

    def made_by(engine, num_drafts):
        requests = requests_for(prompts, sampled=SAMPLED[mode], num_drafts=num_drafts)
        results, steps = generate(monkeypatch, engine, requests)
        return [result.token_ids for result in results], steps, engine.preemptions.num_preemptions

    plain, _, _ = made_by(LocalEngine(model_of(name), tokenizer, **sizes_of(0, 4096, scheduling="sync")), 0)
    taken = {}
    for scheduling in ("sync", "async"):
        options = sizes_of(k, 16, scheduling=scheduling, **PREEMPTIONS[preemption])
        if tp == 1:
            tokens, steps, preempted = made_by(LocalEngine(model_of(name), tokenizer, **options), k)
        else:
            work = partial(made_by, num_drafts=k)
            tokens, steps, preempted = run_over_ranks(tp, path_of(name), tokenizer, work, model=MODEL, **options)
        assert tokens == plain
        assert (preempted > 0) == (preemption != "stays")
        assert any(accepted for mine in steps for _, accepted, _ in mine) == (k > 0)
        taken[scheduling] = steps
    if preemption == "stays":  # what is computed again is counted again
        assert taken["async"] == taken["sync"]


LEAST = {1: (0.6, 1.6), 3: (0.5, 2.0)}  # acceptance and tokens a step, of k drafts


@pytest.mark.parametrize(
    ("name", "k"),
    marked(itertools.product(RANKS, LEAST), {("tiny-hybrid", 1), ("tiny-mla", 1), ("tiny-mla", 3)}),
)
def test_acceptance_is_the_same_split_and_local_sync_and_async(name, k, model_of, tokenizer, capsys):
    """Step by step, on text that is in no training corpus."""
    least_acceptance, least_tokens_per_step = LEAST[k]
    prompts = token_prompts(tokenizer, 20, seed=5)[8:]
    requests = requests_for(prompts, sampled=False, num_drafts=k, max_tokens=48)
    made = split(model_of(name), tokenizer, requests, k)
    for scheduling in ("sync", "async"):
        assert locally(model_of(name), tokenizer, requests, k, scheduling=scheduling) == made
    steps, drafts, accepted = (sum(counts) for counts in zip(*(one.counts for one in made), strict=True))
    tokens_per_step = sum(len(step) for one in made for step in one.steps) / steps
    with capsys.disabled():
        print(f"\n{name} k={k}: acceptance {accepted / drafts:.3f}, {tokens_per_step:.2f} tokens a step")
    assert accepted >= least_acceptance * drafts
    assert tokens_per_step >= least_tokens_per_step


CACHED = list(itertools.product(RANKS, (1, 2, 3, 4), (0, 1)))
CACHED_DEFAULT = {("tiny-hybrid", 3, 0), ("tiny-hybrid", 1, 1), ("tiny-mla", 2, 1)}


@pytest.mark.parametrize(("name", "k", "num_prefill"), marked(CACHED, CACHED_DEFAULT))
def test_acceptance_is_the_same_cached_and_not(name, k, num_prefill, model_of, tokenizer):
    """Step by step, where all but the end of each prompt is found in the cache of the worker that computes it."""
    prompts = [prompt for prompt in token_prompts(tokenizer, 60, seed=7) if len(prompt) > 80][:8]

    def asked(tag):
        return requests_for(prompts, sampled=False, num_drafts=k, max_tokens=24, tag=tag)

    wanted = locally(model_of(name), tokenizer, asked("off"), k, scheduling="sync")
    with Topology(model_of(name), tokenizer, num_prefill=num_prefill, num_drafts=k, chunk_len=48) as topology:
        for num_hits, tag in ((0, "a"), (len(prompts), "b")):
            outcomes = topology.generate(asked(tag), local=not num_prefill)
            assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
            made = [Speculated(outcome.decode_steps, counts_of(outcome.decode_stats)) for outcome in outcomes]
            assert made == wanted
            computing = (topology.prefill or topology.decode)[0].worker.engine.scheduler
            assert computing.num_prefix_hits == num_hits
    assert sum(one.counts[2] for one in wanted) > 0


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_half_of_the_vocabulary_drafts_nearly_as_well(sampled, model_of, tokenizer, tmp_path, capsys):
    """The half that the running interpreter's library has most of; of 4,096 tokens it is nine tenths of any text."""
    whole = model_of("tiny-hybrid")
    keep, texts = whole.config.vocab_size // 2, sorted(map(str, LIBRARY.glob("[a-m]*.py")))
    flags = ["--keep", str(keep), "--link", "--text", *texts]
    assert prune_draft_vocab.main([str(path_of("tiny-hybrid")), str(tmp_path / "pruned"), *flags]) == 0
    pruned = load_model(tmp_path / "pruned", **MODEL)
    assert len(pruned.d2t_C) == keep
    tokens, acceptance = run(whole, tokenizer, sampled=sampled, num_drafts=1, max_tokens=64)
    pruned_tokens, kept = run(pruned, tokenizer, sampled=sampled, num_drafts=1, max_tokens=64)
    with capsys.disabled():
        print(f"\ntiny-hybrid k=1 sampled={sampled}: acceptance {acceptance:.3f} whole, {kept:.3f} of half")
    assert pruned_tokens == tokens
    assert acceptance - 0.08 <= kept <= acceptance + 0.01
