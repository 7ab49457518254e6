"""The flagship: disaggregated output equals one-process output, token for token.

Requests run over the plain worker classes with real ZMQ between them, in every combination of verification, number of
drafts, chunk size and topology. The reference is the one-process engine without speculation and without chunking.
"""

import itertools

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.prompt_lookup import PromptLookup
from baton.engine.local import LocalEngine
from baton.tests.e2e.conftest import TINY_EAGLE3
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology

NUM_PROMPTS = 48
MAX_TOKENS = 16
WHOLE = 4096
SAMPLED = {"greedy": False, "coupled": True}
DRAFTS = (0, 1, 2, 4)
CHUNKS = (16, 48, WHOLE)
TOPOLOGIES = {"1P1D": (1, 1), "2P1D": (2, 1), "1P2D": (1, 2)}
CELLS = list(itertools.product(SAMPLED, DRAFTS, CHUNKS, TOPOLOGIES))


def pairs_of(cell):
    return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}


def pairwise(cells):
    """A small subset in which every pair of values of two factors occurs (greedy choice, deterministic)."""
    chosen, uncovered = [], {cell: pairs_of(cell) for cell in cells}
    while True:
        best = max(uncovered, key=lambda cell: len(uncovered[cell]))
        gain = set(uncovered[best])
        if not gain:
            return chosen
        chosen.append(best)
        for pairs in uncovered.values():
            pairs -= gain


PAIRWISE = pairwise(CELLS)
LONGEST = ("coupled", 6, 16, "1P2D")  # chains of drafts


def local_tokens(model, tokenizer, requests, *, num_drafts=0, chunk_len=WHOLE):
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=2048,
        block_size=16,
        num_draft_tokens=num_drafts,
        chunk_len=chunk_len,
        max_num_sequences=16,
    )
    return [list(result.token_ids) for result in engine.generate(requests)]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, NUM_PROMPTS)


@pytest.fixture(scope="module")
def reference(load_tiny, tokenizer, prompts):
    """Tokens of every prompt, by sampling and numerics; made without speculation, chunking or hand-off."""
    made = {}

    def get(mode, dtype=torch.float64, numerics=Numerics.DEFAULT):
        if (mode, dtype, numerics) not in made:
            requests = requests_for(prompts, sampled=SAMPLED[mode], num_drafts=0, max_tokens=MAX_TOKENS)
            model = load_tiny(dtype, numerics, with_mtp=False)
            made[mode, dtype, numerics] = local_tokens(model, tokenizer, requests)
        return made[mode, dtype, numerics]

    return get


def disaggregated(
    load_tiny, tokenizer, prompts, cell, dtype=torch.float64, numerics=Numerics.DEFAULT, drafter="mtp", least_accepted=0
):
    mode, num_drafts, chunk_len, topology = cell
    lookup = PromptLookup(min_match_len=1, max_match_len=3) if drafter == "ngram" else None
    drafting = {"draft_path": TINY_EAGLE3} if drafter == "eagle3" else {}
    model = load_tiny(dtype, numerics, with_mtp=num_drafts > 0 and drafter == "mtp", **drafting)
    requests = requests_for(prompts, sampled=SAMPLED[mode], num_drafts=num_drafts, max_tokens=MAX_TOKENS)
    num_prefill, num_decode = TOPOLOGIES[topology]
    with Topology(
        model,
        tokenizer,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_drafts=num_drafts,
        chunk_len=chunk_len,
        lookup=lookup,
    ) as deployment:
        outcomes = deployment.generate(requests)
        deployment.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert sum(outcome.decode_stats.num_accepted_tokens for outcome in outcomes) >= least_accepted
    return [outcome.token_ids for outcome in outcomes]


def cell_id(cell):
    mode, num_drafts, chunk_len, topology = cell
    return f"{mode}-k{num_drafts}-{'whole' if chunk_len == WHOLE else chunk_len}-{topology}"


def test_the_pairwise_subset_covers_every_pair():
    seen = set()
    for cell in PAIRWISE:
        seen |= pairs_of(cell)
    assert all(pairs_of(cell) <= seen for cell in CELLS)
    assert len(PAIRWISE) < len(CELLS) / 3


@pytest.mark.parametrize("cell", [*PAIRWISE, LONGEST], ids=cell_id)
def test_float64_tokens_are_identical(load_tiny, tokenizer, prompts, reference, cell):
    assert disaggregated(load_tiny, tokenizer, prompts, cell) == reference(cell[0])


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in PAIRWISE], ids=cell_id)
def test_float64_tokens_are_identical_in_every_other_cell(load_tiny, tokenizer, prompts, reference, cell):
    assert disaggregated(load_tiny, tokenizer, prompts, cell) == reference(cell[0])


DRAFTED = [*(cell for cell in CELLS if cell[1]), LONGEST]
DRAFTED_DEFAULT = {LONGEST, ("greedy", 4, 48, "2P1D"), ("coupled", 2, 16, "1P2D"), ("coupled", 1, WHOLE, "1P1D")}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in DRAFTED_DEFAULT else [pytest.mark.slow]) for cell in DRAFTED],
    ids=cell_id,
)
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_float64_tokens_are_identical_with_every_drafter(load_tiny, tokenizer, prompts, reference, cell, drafter):
    """Looked up, neither a draft nor a hidden state crosses with the prompt; EAGLE-3's KV is one more layer's."""
    tokens = disaggregated(load_tiny, tokenizer, prompts, cell, drafter=drafter, least_accepted=20)
    assert tokens == reference(cell[0])


@pytest.mark.parametrize(
    ("mode", "num_drafts", "chunk_len"),
    [
        ("greedy", 1, 16),
        ("coupled", 4, 48),
        pytest.param("greedy", 4, 48, marks=pytest.mark.slow),
        pytest.param("coupled", 1, 16, marks=pytest.mark.slow),
    ],
)
def test_the_one_process_engine_agrees_with_itself(
    load_tiny, tokenizer, prompts, reference, mode, num_drafts, chunk_len
):
    requests = requests_for(prompts, sampled=SAMPLED[mode], num_drafts=num_drafts, max_tokens=MAX_TOKENS)
    model = load_tiny(torch.float64)
    assert local_tokens(model, tokenizer, requests, num_drafts=num_drafts, chunk_len=chunk_len) == reference(mode)


INVARIANT_CELLS = [("greedy", 2, 48, "2P1D"), ("coupled", 1, 48, "1P2D")]


@pytest.mark.parametrize("cell", INVARIANT_CELLS, ids=cell_id)
def test_invariant_float32_tokens_are_identical(load_tiny, tokenizer, prompts, reference, cell):
    expected = reference(cell[0], torch.float32, Numerics.INVARIANT)
    assert disaggregated(load_tiny, tokenizer, prompts, cell, torch.float32, Numerics.INVARIANT) == expected


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*PAIRWISE, ("coupled", 4, 16, "1P2D")], ids=cell_id)
def test_invariant_float32_tokens_are_identical_pairwise(load_tiny, tokenizer, prompts, reference, cell):
    expected = reference(cell[0], torch.float32, Numerics.INVARIANT)
    assert disaggregated(load_tiny, tokenizer, prompts, cell, torch.float32, Numerics.INVARIANT) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", SAMPLED)
def test_invariant_bfloat16_tokens_are_identical(load_tiny, tokenizer, prompts, reference, mode):
    cell = (mode, 2, 48, "2P1D")
    expected = reference(mode, torch.bfloat16, Numerics.INVARIANT)
    assert disaggregated(load_tiny, tokenizer, prompts, cell, torch.bfloat16, Numerics.INVARIANT) == expected
