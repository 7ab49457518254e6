"""The flagship with KV in float8 at both sides: disaggregated output equals one-process output, token for token.

Through the hand-off, its digests, prefixes that are used again and sequences that give way, as with any other KV.
"""

import pytest
import torch

from baton.core.errors import TransferFailed
from baton.core.numerics import KVDtype, Numerics
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import PAIRWISE, SAMPLED, TOPOLOGIES, cell_id, local_tokens
from baton.tests.e2e.topology import Topology

FP8 = KVDtype.FP8


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, 48)


def wanted_tokens(load_tiny, tokenizer, prompts, mode, dtype, numerics, max_tokens):
    requests = requests_for(prompts, sampled=SAMPLED[mode], num_drafts=0, max_tokens=max_tokens)
    return local_tokens(load_tiny(dtype, numerics, with_mtp=False, kv_dtype=FP8), tokenizer, requests)


def check(load_tiny, tokenizer, prompts, cell, dtype, numerics, *, max_tokens=16, rounds=1, **options):
    """Equal tokens in every round; returns the inventories at the end."""
    mode, num_drafts, chunk_len, topology = cell
    wanted = wanted_tokens(load_tiny, tokenizer, prompts, mode, dtype, numerics, max_tokens)
    model = load_tiny(dtype, numerics, with_mtp=num_drafts > 0, kv_dtype=FP8)
    num_prefill, num_decode = TOPOLOGIES[topology]
    with Topology(
        model, tokenizer, num_prefill=num_prefill, num_decode=num_decode, num_drafts=num_drafts, chunk_len=chunk_len,
        **options,
    ) as deployment:  # fmt: skip
        assert {side.pool.layout.dtype for side in (*deployment.prefill, *deployment.decode)} == {"float8_e4m3fn"}
        for index in range(rounds):
            requests = requests_for(
                prompts, sampled=SAMPLED[mode], num_drafts=num_drafts, max_tokens=max_tokens, tag=f"{index}-"
            )
            outcomes = deployment.generate(requests)
            assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
            assert [outcome.token_ids for outcome in outcomes] == wanted
        deployment.wait_idle()
        return deployment.inventories()


@pytest.fixture(scope="module")
def few(tokenizer):
    return token_prompts(tokenizer, 8, max_len=60)[4:]


def test_invariant_tokens_are_identical_with_prefixes_used_again(load_tiny, tokenizer, few):
    cell = ("coupled", 1, 48, "1P1D")
    prefill, _ = check(load_tiny, tokenizer, few, cell, torch.float32, Numerics.INVARIANT, max_tokens=6, rounds=2)
    assert prefill.num_prefix_hit_tokens > 0


def test_float64_tokens_are_identical_when_sequences_give_way(load_tiny, tokenizer, few):
    cell, way = ("greedy", 1, 64, "1P1D"), {"preempt_at": (3,), "host_kv_bytes": 1 << 24}
    _, decode = check(load_tiny, tokenizer, few, cell, torch.float64, Numerics.DEFAULT, max_tokens=6, **way)
    assert decode.num_preemptions > 0
    assert decode.num_restored_blocks == decode.num_offloaded_blocks > 0


@pytest.mark.slow
def test_kv_in_float8_is_not_landed_in_a_pool_that_holds_more(load_tiny, tokenizer, prompts):
    (request,) = requests_for(prompts[8:9], sampled=False, num_drafts=0)
    with (
        Topology(load_tiny(torch.float32, kv_dtype=FP8), tokenizer) as here,
        Topology(load_tiny(torch.float32), tokenizer) as there,
    ):
        ours, here.decode = here.decode, there.decode
        error = here.generate([request])[0].error
        here.decode = ours
        assert isinstance(error, TransferFailed)
        assert "dtype 'float8_e4m3fn' here 'float32'" in error.fields["pair_refused"]
        here.wait_idle()
        there.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("cell", PAIRWISE, ids=cell_id)
def test_invariant_float32_tokens_are_identical_pairwise(load_tiny, tokenizer, prompts, cell):
    check(load_tiny, tokenizer, prompts[:24], cell, torch.float32, Numerics.INVARIANT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SAMPLED)
@pytest.mark.parametrize(
    ("dtype", "numerics"), [(torch.bfloat16, Numerics.INVARIANT), (torch.float64, Numerics.DEFAULT)]
)
def test_other_dtypes_give_identical_tokens(load_tiny, tokenizer, prompts, mode, dtype, numerics):
    check(load_tiny, tokenizer, prompts[:24], (mode, 2, 48, "2P1D"), dtype, numerics)
