"""The flagship test over a decode worker of two GPUs: tokens of prefill and decode apart are those of one process.

Prefill shares GPU 0 with decode rank 0; rank 1 has GPU 1. Payloads come over sockets, by way of host memory, or over
NVLink; rank 0's kernels fill and verify the pools of both. Everything but Ray is Baton's own.
"""

import pytest
import torch

from baton.bench.actor import SpawnedRemote
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.gpu.decode_tp_group import TPGroupDecode, all_requests, config_of, hand_over
from baton.tests.gpu.model_prefill import ModelPrefill
from baton.tests.model.harness import prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NUM_PREFILL_BLOCKS = 1024
WAYS = {
    "raw": "tcp",
    "inline": "zmq",
    "nvlink": "nvlink",
}  # the prefill worker's transport, by the data path that this is


def check(tokenizer, path, dtype, numerics, prompts, block_sizes, *, max_tokens=16, preempt_at=(), **options):
    """Every way gives the tokens of one process; the worker's state at the end."""
    config = config_of(path, dtype, numerics, block_sizes[1], **options)
    decode = SpawnedRemote(TPGroupDecode, config, preempt_at)  # both ranks load while the prefill workers do
    arguments = {
        data_path: (0, dtype, transport, NUM_PREFILL_BLOCKS, block_sizes[0], 48, path, numerics)
        for data_path, transport in WAYS.items()
    }
    prefills = {data_path: SpawnedRemote(ModelPrefill, *values) for data_path, values in arguments.items()}
    try:
        model = load_model(path, dtype=dtype, device=torch.device("cuda", 0), numerics=numerics, with_mtp=True)
        wanted = local_tokens(model, tokenizer, all_requests(prompts, "one", max_tokens))
        got = {
            data_path: hand_over(prefill, decode, all_requests(prompts, data_path, max_tokens))
            for data_path, prefill in prefills.items()
        }
        state, fatal = decode.call("state")
        assert not fatal
        assert len(state.rank_pids) == 2
        print({data_path: data_paths for data_path, (_, _, data_paths) in got.items()})
        assert {data_path: (tokens, problems) for data_path, (tokens, problems, _) in got.items()} == dict.fromkeys(
            WAYS, (wanted, [])
        )
        assert got["nvlink"][2] == ["nvlink"]
        assert got["inline"][2] == ["inline"]
        assert got["raw"][2] in (["raw"], ["inline"])
        assert decode.call("close") == [0]
        return state
    finally:
        for process in (*prefills.values(), decode):
            process.end()


def test_float32(tokenizer_of_tiny):
    """With graphs at both ranks."""
    prompts = token_prompts(tokenizer_of_tiny, 12)
    state = check(
        tokenizer_of_tiny, TINY, torch.float32, Numerics.INVARIANT, prompts, (16, 16), graph_sizes=(4, 16)
    )  # fmt: skip
    assert state.inventory.graphs.num_captured
    assert state.inventory.graphs.num_steps_replayed
    assert not state.inventory.graphs.failed


def test_bfloat16_in_blocks_of_two_sizes(tokenizer_of_tiny):
    prompts = token_prompts(tokenizer_of_tiny, 12)
    check(tokenizer_of_tiny, TINY, torch.bfloat16, Numerics.INVARIANT, prompts, (16, 64))


def test_a_head_that_both_ranks_hold_and_sequences_that_give_way(tiny_checkpoint):
    """Their KV goes to the host memory of each rank and back."""
    path = tiny_checkpoint(num_heads=8, num_kv_heads=1, tokenizer=True)
    prompts = [tuple(prompt(length, seed=length).tolist()) for length in (1, 16, 33, 64, 90, 150)]
    tokenizer = Tokenizer.from_directory(path)
    state = check(
        tokenizer, path, torch.float64, Numerics.DEFAULT, prompts, (64, 16), preempt_at=(4,), host_kv_bytes=1 << 24
    )
    assert state.inventory.num_preemptions
    assert state.inventory.num_restored_blocks


@pytest.fixture(scope="module")
def tokenizer_of_tiny():
    return Tokenizer.from_directory(TINY)
