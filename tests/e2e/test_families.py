"""The families without an MTP head, in float64: neither hand-off, scheduling nor drafts change a token.

Disaggregated output equals one-process output over prompt chunks, sampling and topologies, as `test_same_tokens` has it
for the bundled model; asynchronous scheduling equals one plain run, step after step on one rank, over preemption and
ranks, too, as `test_async_equals_sync` has it.
"""

import itertools
from functools import cache

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.prompt_lookup import PromptLookup
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_async_equals_sync import PREEMPTIONS, sizes_of
from baton.tests.e2e.test_same_tokens import (
    CHUNKS,
    NUM_PROMPTS,
    SAMPLED,
    TOPOLOGIES,
    WHOLE,
    cell_id,
    disaggregated,
    local_tokens,
)
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.eagle_checkpoints import write_drafter

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYERS = 3  # of which a drafter joins all
DRAFTERS = {  # whose attention has heads of its own
    "llama": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8},
    "mistral": {"num_heads": 4, "num_kv_heads": 1},
    "deepseek_v3": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
}
FAMILIES = {
    "llama": {"tie": False, "overrides": {"rope_scaling": LLAMA3}},
    "mistral": {"tie": True},
    "qwen2": {"tie": False},
    "qwen3": {"tie": True},
    "qwen3_moe": {"tie": True, "overrides": {"mlp_only_layers": [1]}},
    "mixtral": {"tie": True},
    "qwen2_moe": {"tie": False, "overrides": {"num_experts": 5}},
    "qwen3_5": {"tie": True},
    "qwen3_5_moe": {"tie": False},
    "qwen3_next": {"tie": True, "seed": 3},  # whose texts repeat themselves
    "deepseek_v3": {"tie": False},
    "glm4_moe": {"tie": False},
}
MODEL = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": False}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory, tokenizer):
    @cache
    def write(family):
        return write_checkpoint(
            tmp_path_factory.mktemp(family),
            kind=family,
            with_mtp=False,
            vocab_size=tokenizer.vocab_size,
            hidden_size=48,
            layers=LAYERS,
            **FAMILIES[family],
        )

    return write


@pytest.fixture(scope="module")
def drafter_of(path_of, tmp_path_factory):
    """An EAGLE-3 drafter of a family's model, with random weights too."""

    def write(family):
        return write_drafter(
            tmp_path_factory.mktemp(family), path_of(family), aux=range(LAYERS), **DRAFTERS.get(family, {})
        )

    return cache(write)


@pytest.fixture(scope="module")
def drafting(drafter_of):
    """How a model is loaded for a drafter."""
    return lambda family, drafter: {"draft_path": drafter_of(family) if drafter == "eagle3" else None}


@pytest.fixture(scope="module")
def model_of(path_of, drafting):
    return cache(lambda family, drafter="": load_model(path_of(family), **MODEL, **drafting(family, drafter)))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, NUM_PROMPTS)


@pytest.fixture(scope="module")
def one_process(model_of, tokenizer, prompts):
    """Tokens of every prompt, made without chunking and hand-off."""

    @cache
    def run(family, mode):
        requests = requests_for(prompts, sampled=SAMPLED[mode], num_drafts=0)
        tokens = local_tokens(model_of(family), tokenizer, requests)
        assert len({token for text in tokens for token in text}) > 100, "texts say too little"
        return tokens

    return run


HANDED_OVER = list(itertools.product(FAMILIES, SAMPLED, (0,), CHUNKS, TOPOLOGIES))
HANDED_OVER_DEFAULT = {
    ("llama", "greedy", 0, 48, "2P1D"),
    ("mistral", "coupled", 0, 16, "1P1D"),
    ("qwen2", "coupled", 0, WHOLE, "1P2D"),
    ("qwen3_moe", "greedy", 0, 16, "1P2D"),
    ("qwen2_moe", "greedy", 0, WHOLE, "2P1D"),
    ("qwen3_5", "coupled", 0, 16, "1P2D"),
    ("deepseek_v3", "coupled", 0, 48, "2P1D"),
}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=f"{cell[0]}-{cell_id(cell[1:])}", marks=marks)
        for cell in HANDED_OVER
        for marks in [[] if cell in HANDED_OVER_DEFAULT else [pytest.mark.slow]]
    ],
)
def test_disaggregated_tokens_are_those_of_one_process(cell, model_of, one_process, tokenizer, prompts):
    family, *how = cell

    def load(*options, with_mtp):
        assert (*options, with_mtp) == (torch.float64, Numerics.DEFAULT, False)
        return model_of(family)

    assert disaggregated(load, tokenizer, prompts, how) == one_process(family, how[0])


DRAFTED = list(itertools.product(FAMILIES, ("ngram", "eagle3"), SAMPLED))
DRAFTED_DEFAULT = {
    ("llama", "eagle3", "greedy"), ("qwen2", "ngram", "coupled"), ("qwen2_moe", "eagle3", "coupled"),
    ("deepseek_v3", "eagle3", "greedy"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "drafter", "mode"),
    [pytest.param(*cell, marks=[] if cell in DRAFTED_DEFAULT else [pytest.mark.slow]) for cell in DRAFTED],
)
def test_drafts_change_no_token_that_is_handed_over(family, drafter, mode, model_of, one_process, tokenizer, prompts):
    def load(*options, with_mtp, draft_path=None):
        assert (*options, with_mtp) == (torch.float64, Numerics.DEFAULT, False)
        return model_of(family, drafter)

    tokens = disaggregated(load, tokenizer, prompts, (mode, 3, 16, "1P2D"), drafter=drafter)
    assert tokens == one_process(family, mode)


SCHEDULED = list(itertools.product(FAMILIES, SAMPLED, PREEMPTIONS, (16, WHOLE), (1, 2)))
SCHEDULED_DEFAULT = {
    ("llama", "coupled", "stays", 16, 2),
    ("mistral", "greedy", "computed again", WHOLE, 1),
    ("qwen2", "coupled", "to host memory", 16, 1),
    ("qwen3_moe", "greedy", "to host memory", WHOLE, 2),
    ("qwen2_moe", "coupled", "computed again", 16, 2),
    ("qwen3_5_moe", "coupled", "to host memory", 16, 2),
    ("qwen3_next", "greedy", "computed again", WHOLE, 1),
    ("glm4_moe", "coupled", "to host memory", 16, 2),
}


def scheduled_id(cell):
    family, mode, preemption, chunk_len, tp = cell
    return f"{family}-{mode}-{preemption.replace(' ', '_')}-{chunk_len}-tp{tp}"


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=scheduled_id(cell), marks=marks)
        for cell in SCHEDULED
        for marks in [[] if cell in SCHEDULED_DEFAULT else [pytest.mark.slow]]
    ],
)
def test_asynchronous_tokens_are_those_of_one_plain_run(cell, path_of, model_of, one_plain_run, tokenizer):
    family, mode, preemption, chunk_len, tp = cell
    options = sizes_of(0, chunk_len, scheduling="async", **PREEMPTIONS[preemption])
    requests = scheduled_requests(tokenizer, mode)

    def work(engine):
        return engine.generate(requests), engine.preemptions

    if tp == 1:
        results, preempted = work(LocalEngine(model_of(family), tokenizer, **options))
    else:
        results, preempted = run_over_ranks(tp, path_of(family), tokenizer, work, model=MODEL, **options)
    assert [result.token_ids for result in results] == one_plain_run(family, mode)
    assert (preempted.num_preemptions > 0) == (preemption != "stays")
    assert (preempted.num_offloaded_blocks > 0) == (preemption == "to host memory")


LATER = list(itertools.product(FAMILIES, ("ngram", "eagle3"), PREEMPTIONS, (1, 2)))
LATER_DEFAULT = {
    ("mistral", "eagle3", "to host memory", 2),
    ("mixtral", "ngram", "computed again", 1),
    ("qwen3_moe", "eagle3", "computed again", 1),
    ("qwen3_5", "ngram", "to host memory", 2),
    ("deepseek_v3", "ngram", "computed again", 2),
}


@pytest.mark.parametrize(
    ("family", "drafter", "preemption", "tp"),
    [pytest.param(*cell, marks=[] if cell in LATER_DEFAULT else [pytest.mark.slow]) for cell in LATER],
)
def test_drafts_change_no_token_of_asynchronous_steps(
    family, drafter, preemption, tp, path_of, model_of, drafting, one_plain_run, tokenizer
):
    options = sizes_of(3, 16, scheduling="async", **PREEMPTIONS[preemption])
    options["lookup"] = PromptLookup(min_match_len=1) if drafter == "ngram" else None
    requests = scheduled_requests(tokenizer, "coupled", num_drafts=3)

    def work(engine):
        return engine.generate(requests)

    if tp == 1:
        results = work(LocalEngine(model_of(family, drafter), tokenizer, **options))
    else:
        model = MODEL | drafting(family, drafter)
        results = run_over_ranks(tp, path_of(family), tokenizer, work, model=model, **options)
    assert [result.token_ids for result in results] == one_plain_run(family, "coupled")
    assert sum(result.counts.num_draft_tokens for result in results) > 0


@pytest.fixture(scope="module")
def one_plain_run(model_of, tokenizer):
    @cache
    def run(family, mode):
        engine = LocalEngine(model_of(family), tokenizer, **sizes_of(0, WHOLE, scheduling="sync"))
        return [result.token_ids for result in engine.generate(scheduled_requests(tokenizer, mode))]

    return run


def scheduled_requests(tokenizer, mode, num_drafts=0):
    prompts = token_prompts(tokenizer, 8, max_len=60)
    return requests_for(prompts, sampled=SAMPLED[mode], num_drafts=num_drafts, max_tokens=24)
