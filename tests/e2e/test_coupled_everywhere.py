"""Coupled sampling: seeded requests at temperature 1 give the same tokens however they are run.

With 0, 1, 2, 4 or 6 drafts, one at a time or 32 together, on one rank or two, in one process or handed over from
prefill to decode workers. In float64, and in float32 with invariant numerics. The reference is the one-process engine,
some requests at a time, without drafts and without chunks.
"""

import itertools

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.test_same_tokens import WHOLE, pairwise
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.e2e.tp_groups import TPGroupTopology

ALL, FEW = (200, 10), (8, 6)  # requests, and tokens of each
REFERENCE_BATCH = 11  # none of those below
WAVE = 50  # requests handed over at once; the last of them waits for all others
NUM_BLOCKS, BLOCK_SIZE, CHUNK_LEN = 512, 16, 48
DRAFTS, BATCHES, RANKS, PLACES = (0, 1, 2, 4), (1, 32), (1, 2), ("local", "handed over")
CELLS = list(itertools.product(DRAFTS, BATCHES, RANKS, PLACES))
PAIRWISE = pairwise(CELLS)
LONGEST = [(6, 32, 2, "handed over"), (6, 1, 1, "local")]  # chains
NUMERICS = {"float64": (torch.float64, Numerics.DEFAULT), "invariant": (torch.float32, Numerics.INVARIANT)}
QUICK_INVARIANT = [(2, 32, 1, "handed over"), (4, 32, 2, "local")]


def cell_id(cell):
    k, batch, ranks, place = cell
    return f"k{k}-batch{batch}-tp{ranks}-{place.replace(' ', '_')}"


def requests_with(tokenizer, k, size, tag=""):
    count, max_tokens = size
    return [
        GenerationRequest(
            key=AttemptKey(f"{tag}{seed}", 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed),
            deadline_s=1e12,
            num_draft_tokens=k,
        )
        for seed, prompt in enumerate(token_prompts(tokenizer, count, max_len=70))
    ]


def in_one_process(model, tokenizer, requests, k, batch, chunk_len=CHUNK_LEN):
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_draft_tokens=k,
        chunk_len=chunk_len,
        max_num_sequences=batch,
    )
    return [list(result.token_ids) for result in engine.generate(requests)]


@pytest.fixture(scope="module")
def wanted(load_tiny, tokenizer):
    """Tokens of every request; as many as are asked for."""
    made = {}

    def get(numerics, size):
        if (numerics, size) not in made:
            model = load_tiny(*NUMERICS[numerics], with_mtp=False)
            requests = requests_with(tokenizer, 0, size)
            made[numerics, size] = in_one_process(model, tokenizer, requests, 0, REFERENCE_BATCH, chunk_len=WHOLE)
        return made[numerics, size]

    return get


def on_two_ranks(tokenizer, requests, k, batch, dtype, numerics):
    """In one process, each rank a thread."""
    return run_over_ranks(
        2,
        TINY,
        tokenizer,
        lambda engine: [list(result.token_ids) for result in engine.generate(requests)],
        model={"dtype": dtype, "numerics": numerics},
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_draft_tokens=k,
        chunk_len=max(CHUNK_LEN, batch * (k + 1)),
        max_num_sequences=batch,
        scheduling="async",
    )


def tokens_of(cell, numerics, size, *, load_tiny, tokenizer, processes):
    k, batch, ranks, place = cell
    dtype, mode = NUMERICS[numerics]
    requests = requests_with(tokenizer, k, size, tag=f"{numerics}-{cell_id(cell)}-")
    if place == "local" and ranks == 1:
        return in_one_process(load_tiny(dtype, mode), tokenizer, requests, k, batch)
    if place == "local":
        return on_two_ranks(tokenizer, requests, k, batch, dtype, mode)
    if ranks == 1:
        topology = Topology(load_tiny(dtype, mode), tokenizer, num_drafts=k, chunk_len=CHUNK_LEN, max_num_seqs=batch)
    else:
        topology = TPGroupTopology(
            processes, TINY, ranks, ranks, dtype=dtype, numerics=mode, chunk_len=CHUNK_LEN, max_num_seqs=batch
        )
    outcomes = []
    with topology:
        for first in range(0, len(requests), WAVE):
            outcomes += topology.generate(requests[first : first + WAVE])
        topology.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture
def check(load_tiny, tokenizer, processes, wanted):
    def check(cell, numerics, size):
        options = {"load_tiny": load_tiny, "tokenizer": tokenizer, "processes": processes}
        assert tokens_of(cell, numerics, size, **options) == wanted(numerics, size)

    return check


def test_the_requests_are_what_is_promised(tokenizer, wanted):
    requests = requests_with(tokenizer, 0, ALL)
    assert len({request.sampling.seed for request in requests}) == 200
    assert {request.sampling.temperature for request in requests} == {1.0}
    assert len({tuple(tokens) for tokens in wanted("float64", FEW)}) == FEW[0]


@pytest.mark.parametrize("cell", [*PAIRWISE, *LONGEST], ids=cell_id)
def test_a_few_requests_in_float64(cell, check):
    check(cell, "float64", FEW)


@pytest.mark.parametrize("cell", QUICK_INVARIANT, ids=cell_id)
def test_a_few_requests_in_float32_with_invariant_numerics(cell, check):
    check(cell, "invariant", FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("cell", [*CELLS, *LONGEST], ids=cell_id)
def test_all_requests_in_every_cell(cell, numerics, check):
    check(cell, numerics, ALL)
