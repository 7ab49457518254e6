"""Ranks that attend for sequences of their own, each with a pool of its own: tokens and steps are those of one process.

The bundled model of latents, in float64, over 2 and 4 ranks, which hold whole experts or a part of each. First the
one-process engine over ranks that are threads, then decode workers whose ranks are processes.
"""

import itertools
import time
from functools import cache, partial

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.local import LocalEngine
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.e2e import features
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_async_equals_sync import LOOKUP, generate, sizes_of
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.e2e.tp_groups import TPGroupTopology

MLA = TINY.with_name("tiny-mla")
MODEL = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
SIZES = (2, 4)
MODES = {"greedy": False, "coupled": True}
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model_of():
    return cache(lambda **options: load_model(MLA, **(MODEL | options)))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, 8, max_len=60)


def cut(*, held, **options):
    """How a rank's model is loaded."""
    return MODEL | {"dp_attention": True, "expert_parallel": held, **options}


def over_ranks(size, tokenizer, work, *, held, model=(), **options):
    return run_over_ranks(size, MLA, tokenizer, work, model=cut(held=held, **dict(model)), **options)


# Steps

FEW = {"max_num_sequences": 8, "overcommit": True, "num_blocks": 27, "block_size": 4}
ROOM = {  # of each rank's pool; by preemption
    "stays": {"max_num_sequences": 4},
    "computed again": {"max_num_sequences": 4, "overcommit": True, "preempt_at": (1, 6)},
    "to host memory": {"max_num_sequences": 4, "overcommit": True, "preempt_at": (1, 6), "host_kv_bytes": 64 << 20},
    "for want of blocks": FEW,
    "for want, to host memory": FEW | {"host_kv_bytes": 64 << 20},
}
CELLS = list(itertools.product(SIZES, (False, True), MODES, (0, 1, 2, 3), ROOM))
CELLS_DEFAULT = {
    (2, True, "coupled", 3, "stays"),
    (4, False, "greedy", 1, "stays"),
    (2, True, "greedy", 1, "to host memory"),
    (2, False, "greedy", 2, "for want, to host memory"),
}


def marked(cells, default):
    """The slow ones among cells."""
    return [pytest.param(*cell, marks=[] if cell in default else [pytest.mark.slow]) for cell in cells]


@pytest.mark.parametrize(("size", "held", "mode", "k", "room"), marked(CELLS, CELLS_DEFAULT))
def test_steps_are_those_of_one_process_synchronous_or_not(
    size, held, mode, k, room, model_of, tokenizer, prompts, monkeypatch
):
    """And tokens those of one plain run: no drafts, no chunks, no preemption."""

    def made_by(engine, num_drafts):
        max_tokens = 40 if "for want" in room else 16
        requests = requests_for(prompts, sampled=MODES[mode], num_drafts=num_drafts, max_tokens=max_tokens)
        results, steps = generate(monkeypatch, engine, requests)
        return [result.token_ids for result in results], steps, engine.preemptions

    plain, _, _ = made_by(LocalEngine(model_of(), tokenizer, **sizes_of(0, 4096, scheduling="sync")), 0)
    options = {**sizes_of(k, 16), **ROOM[room]}
    _, wanted, _ = made_by(LocalEngine(model_of(), tokenizer, **sizes_of(k, 16, scheduling="sync")), k)
    for scheduling in ("sync", "async"):
        made = over_ranks(size, tokenizer, partial(made_by, num_drafts=k), held=held, scheduling=scheduling, **options)
        tokens, steps, counts = made
        assert tokens == plain
        assert (counts.num_preemptions > 0) == (room != "stays")
        assert (counts.num_restored_blocks > 0) == ("host memory" in room)
        assert any(accepted for mine in steps for _, accepted, _ in mine) == (k > 0)
        if room == "stays":  # what is computed again is counted again
            assert steps == wanted


GRAPHS = {"sizes": (2, 3, 4), "widths": (12,)}
GRAPHED = list(
    itertools.product(SIZES, (False, True), MODES, (0, 1, 2, 3), ("stays", "computed again", "to host memory"))
)
GRAPHED_DEFAULT = {(2, True, "coupled", 3, "stays"), (4, False, "greedy", 1, "to host memory")}


@pytest.mark.parametrize(("size", "held", "mode", "k", "room"), marked(GRAPHED, GRAPHED_DEFAULT))
def test_replayed_steps_are_those_of_one_process(size, held, mode, k, room, model_of, tokenizer, prompts, monkeypatch):
    """Recorded at every rank with room for sequences it may not have, rounds between ranks among what is recorded."""

    def made_by(engine):
        requests = requests_for(prompts, sampled=MODES[mode], num_drafts=k)
        results, steps = generate(monkeypatch, engine, requests)
        return [result.token_ids for result in results], steps, engine.runner.graphs and engine.runner.graphs.counts

    options = {**sizes_of(k, 16, scheduling="async"), **ROOM[room]}
    plain, steps, _ = made_by(LocalEngine(model_of(), tokenizer, **sizes_of(k, 16, scheduling="sync")))
    tokens, taken, counts = over_ranks(size, tokenizer, made_by, held=held, graphs=GRAPHS, **options)
    assert tokens == plain
    assert room != "stays" or taken == steps
    assert counts.num_steps_replayed > 0
    assert not any(counts.num_steps_eager.values())
    assert not counts.failed


FEATURES = [name for name in features.FEATURES if name not in ("plain", "max length")]
FEATURES_DEFAULT = {(2, "logprobs"), (2, "schema, logprobs, penalty")}


@pytest.mark.parametrize(("size", "feature"), marked(itertools.product(SIZES, FEATURES), FEATURES_DEFAULT))
def test_every_feature(size, feature, model_of, tokenizer, monkeypatch):
    prompts = [prompt for prompt in token_prompts(tokenizer, 20) if 10 < len(prompt) < 60][: len(features.PROMPT_LENS)]

    def made_by(engine, k, name, plain):
        return generate(monkeypatch, engine, features.requests_for(name, prompts, k, plain))[0]

    one = partial(LocalEngine, model_of(), tokenizer)
    whole = sizes_of(0, 4096, scheduling="sync")
    plain = [result.token_ids for result in made_by(one(**whole), 0, "plain", None)]
    wanted = made_by(one(**whole), 0, feature, plain)
    work = partial(made_by, k=2, name=feature, plain=plain)
    results = over_ranks(size, tokenizer, work, held=True, **sizes_of(2, 16, scheduling="async"))
    for result, expected in zip(results, wanted, strict=True):
        features.check_same(result, expected)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_drafts_that_are_looked_up(size, model_of, tokenizer, prompts, monkeypatch):
    def made_by(engine, k):
        return generate(monkeypatch, engine, requests_for(prompts, sampled=True, num_drafts=k))

    options = sizes_of(3, 16, scheduling="async")
    model = {"with_mtp": False}
    alone = LocalEngine(model_of(**model), tokenizer, lookup=LOOKUP, **options)
    wanted, steps = made_by(alone, 3)
    made, taken = over_ranks(
        size, tokenizer, partial(made_by, k=3), held=False, model=model.items(), lookup=LOOKUP, **options
    )
    assert [result.token_ids for result in made] == [result.token_ids for result in wanted]
    assert taken == steps
    assert any(accepted for mine in steps for _, accepted, _ in mine)


@pytest.mark.parametrize(
    ("size", "method"),
    marked(itertools.product(SIZES, DraftSampleMethod), {(2, DraftSampleMethod.PROBABILISTIC)}),
)
def test_drafts_that_are_rejected(size, method, model_of, tokenizer, prompts, monkeypatch):
    def made_by(engine):
        results, steps = generate(monkeypatch, engine, requests_for(prompts, sampled=True, num_drafts=2))
        return [result.token_ids for result in results], steps

    verification = VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=method)
    options = sizes_of(2, 16, scheduling="async", verification=verification)
    wanted = made_by(LocalEngine(model_of(), tokenizer, **options))
    assert over_ranks(size, tokenizer, made_by, held=True, **options) == wanted


# Room


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_group_holds_as_many_times_the_positions_in_the_same_memory(size, model_of, tokenizer):
    """Sequences that take all their blocks at once: how many run together, with heads shared and sequences dealt."""
    prompt = token_prompts(tokenizer, 8, max_len=60)[7]
    each = -(-(len(prompt) + 16) // BLOCK_SIZE)
    options = sizes_of(0, 4096, scheduling="sync", num_blocks=2 * each + 1, max_num_sequences=16)

    def most_held(engine):
        held, step = [], engine.engine.step

        def watched():
            has_worked = step()
            held.append(sum(allocator.num_reserved for allocator in engine.scheduler.allocators) * BLOCK_SIZE)
            return has_worked

        engine.engine.step = watched
        results = engine.generate(requests_for([prompt] * 12, sampled=True, num_drafts=0))
        return max(held), [result.token_ids for result in results], engine.pool.geometry.num_bytes

    shared = run_over_ranks(size, MLA, tokenizer, most_held, model=MODEL | {"with_mtp": False}, **options)
    dealt = over_ranks(size, tokenizer, most_held, held=False, model={"with_mtp": False}.items(), **options)
    assert shared[0] == 2 * each * BLOCK_SIZE
    assert dealt[0] == size * shared[0]
    assert dealt[1:] == shared[1:], "the same tokens, and bytes of a rank's pool"


# Decode workers


WORKERS = list(itertools.product(SIZES, (False, True)))
WORKERS_DEFAULT = {(2, True)}


@pytest.mark.parametrize(("size", "held"), marked(WORKERS, WORKERS_DEFAULT))
def test_decode_workers_compute_prompts_cached_or_not(size, held, processes, model_of, tokenizer):
    """Ranks are processes; a prefix is found where it is, and computed again where it is not."""
    prompts = [prompt for prompt in token_prompts(tokenizer, 60, seed=7) if len(prompt) > 80][:6]
    wanted = {
        mode: local_tokens(model_of(), tokenizer, requests_for(prompts, sampled=sampled, num_drafts=0, max_tokens=8))
        for mode, sampled in MODES.items()
    }
    options = {"expert_parallel": (False, held), "dp_attention": True, "hands_over": False}
    with TPGroupTopology(processes, MLA, 1, size, **options) as topology:
        prefill, decode = topology.inventories()
        assert decode.num_blocks == decode.num_blocks_free == size * prefill.num_blocks
        for turn, (mode, k) in enumerate(itertools.product(MODES, (0, 3))):
            requests = requests_for(prompts, sampled=MODES[mode], num_drafts=k, max_tokens=8, tag=f"{mode}-{k}-")
            outcomes = [topology.finish(each) for each in [topology.start(one, local=True) for one in requests]]
            assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
            assert [outcome.token_ids for outcome in outcomes] == wanted[mode]
            _, decode = topology.inventories()
            assert (decode.num_prefix_hits > 0) == (turn > 0)
        assert decode.num_prefix_hits >= len(prompts), "each comes back to a rank that has its beginning"
        topology.wait_idle()


# Hand-offs

HANDED_ROOM = {  # of each rank's pool; by preemption
    "stays": {},
    "computed again": {"overcommit": True, "preempt_at": (1, 6)},
    "to host memory": {"overcommit": True, "preempt_at": (1, 6), "host_kv_bytes": 64 << 20},
    "for want of blocks": {
        "overcommit": True,
        "num_decode_blocks": 38,
        "block_sizes": (16, 4),
        "host_kv_bytes": 64 << 20,
    },
}
HANDED = list(itertools.product((1, 2, 4), SIZES, ("shm", "raw", "inline"), HANDED_ROOM))
HANDED_DEFAULT = {(2, 2, "raw", "computed again"), (1, 2, "inline", "to host memory")}


@pytest.fixture(scope="module")
def handed(model_of, tokenizer):
    """Prompts of 1 to 130 tokens, and what one process makes of them."""
    prompts = token_prompts(tokenizer, 8, max_len=130)
    wanted = {
        mode: local_tokens(model_of(), tokenizer, requests_for(prompts, sampled=sampled, num_drafts=0, max_tokens=16))
        for mode, sampled in MODES.items()
    }
    return prompts, wanted


def check_handed(topology, handed, turns, tag=""):
    """`turns`: (mode, drafts) one after the other."""
    prompts, wanted = handed
    for mode, k in turns:
        requests = requests_for(prompts, sampled=MODES[mode], num_drafts=k, tag=f"{tag}{mode}-{k}-")
        outcomes = topology.generate(requests)
        assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
        assert [outcome.token_ids for outcome in outcomes] == wanted[mode], (mode, k)
        accepted = sum(outcome.stats.num_accepted_tokens for outcome in outcomes if outcome.stats)
        assert (accepted > 0) == (k > 0)


@pytest.mark.parametrize(("tp_prefill", "tp_decode", "data_path", "room"), marked(HANDED, HANDED_DEFAULT))
def test_prompts_that_a_prefill_worker_computes(tp_prefill, tp_decode, data_path, room, processes, handed):
    """Its ranks have each sequence's latents all; of the decode worker's ranks one gets them."""
    is_default = (tp_prefill, tp_decode, data_path, room) in HANDED_DEFAULT
    turns = [("greedy", 0), ("coupled", 3)] if is_default else itertools.product(MODES, (0, 1, 2, 3))
    options = {"data_path": data_path, "dp_attention": True, "expert_parallel": (False, data_path == "raw")}
    with TPGroupTopology(
        processes, MLA, tp_prefill, tp_decode, chunk_len=32, **options, **HANDED_ROOM[room]
    ) as topology:
        check_handed(topology, handed, turns)
        _, decode = topology.inventories()
        if room != "for want of blocks":  # whether they meet there is a matter of time
            assert (decode.num_preemptions > 0) == (room != "stays")
        topology.wait_idle()


@pytest.mark.parametrize(
    ("tp_prefill", "tp_decode", "data_path"),
    marked([(1, 2, "raw"), (2, 2, "shm"), (2, 4, "raw"), (4, 2, "shm"), (1, 4, "inline")], {(2, 2, "shm")}),
)
def test_cancelled_hand_offs_leave_nothing_at_any_rank(tp_prefill, tp_decode, data_path, processes, handed):
    """Given up before, during and after the push; what follows in the same blocks is right, and found where it is."""
    prompts, wanted = handed
    options = {"data_path": data_path, "dp_attention": True, "chunk_len": 16, "num_decode_blocks": 24}
    with TPGroupTopology(processes, MLA, tp_prefill, tp_decode, **options) as topology:
        for turn, wait_s in enumerate((0.0, 0.02, 0.1, 0.3)):
            gone = {"sampled": True, "num_drafts": 2, "max_tokens": 100, "tag": f"gone{turn}-"}
            started = [topology.start(request) for request in requests_for(prompts, **gone)]
            time.sleep(wait_s)
            for running in started:
                topology.cancel(running)
        topology.wait_idle()
        check_handed(topology, handed, [("coupled", 2)], "after-")
        topology.wait_idle()
        _, before = topology.inventories()
        assert before.num_blocks_free == before.num_blocks == 24 * tp_decode
        requests = requests_for(prompts, sampled=True, num_drafts=2, tag="here-")
        outcomes = [topology.finish(each) for each in [topology.start(one, local=True) for one in requests]]
        assert [outcome.token_ids for outcome in outcomes] == wanted["coupled"]
        _, after = topology.inventories()
        assert after.num_prefix_hits > before.num_prefix_hits == 0, "what was received is a prefix of what is computed"
        topology.wait_idle()


@pytest.mark.fast
def test_a_pool_is_as_large_with_dealt_sequences_as_without(model_of):
    """Rows of latents are whole at every rank: what differs is whose they are."""
    layout = model_of().kv_layout(BLOCK_SIZE)
    sizes = {KVPool(layout, 5, torch.device("cpu"), rank=rank, size=2).geometry.num_bytes for rank in range(2)}
    assert sizes == {KVPool(layout, 5, torch.device("cpu")).geometry.num_bytes}
