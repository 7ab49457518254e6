"""What tests for two GPUs stand on, on a CPU: they run seldom, and what they call must not be gone by then."""

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


def test_a_tp_group_and_a_prefill_worker_in_processes_of_their_own():
    """As `tests/gpu/test_tp_group_handoff_cuda.py` has them, by one transport."""
    dtype, numerics = torch.float32, Numerics.INVARIANT
    tokenizer = Tokenizer.from_directory(TINY)
    prompts = token_prompts(tokenizer, 4)
    config = config_of(TINY, dtype, numerics, 16, device="cpu", transport="tcp")
    decode = SpawnedRemote(TPGroupDecode, config, (4,))
    prefill = SpawnedRemote(ModelPrefill, 0, dtype, "tcp", 256, 16, 48, TINY, numerics, "cpu")
    try:
        model = load_model(TINY, dtype=dtype, device=torch.device("cpu"), numerics=numerics, with_mtp=True)
        wanted = local_tokens(model, tokenizer, all_requests(prompts, "one", 8))
        assert hand_over(prefill, decode, all_requests(prompts, "apart", 8))[:2] == (wanted, [])
        state, fatal = decode.call("state")
        assert (fatal, len(state.rank_pids)) == ([], 2)
        assert state.inventory.num_preemptions
        assert decode.call("close") == [0]
    finally:
        for process in (prefill, decode):
            process.end()
