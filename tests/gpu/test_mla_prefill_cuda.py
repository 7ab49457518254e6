"""Expanded attention over latents on a GPU: against its definition in float32, in one window and in several."""

import pytest
import torch

from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.mla.latent_rows import attend_expanded
from baton.kernels.mla.prefill import mla_prefill

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
NOPE, TURNED, VALUES, LATENT = 128, 64, 128, 512
SCALE = 192**-0.5 * 1.87
CHUNKS = {
    "prompts": ((1000, 1000), (1, 1), (300, 300)),
    "prefixes": ((200, 3000), (64, 65), (17, 900)),
    "one row each": ((1, 700), (1, 64), (1, 65)),
}


class Problem:
    """Chunks of (rows, context) each in blocks that lie scattered; slots past a sequence's end hold NaN."""

    def __init__(self, chunks, num_heads, *, block_size=16):
        torch.manual_seed(0)
        self.lens = [rows for rows, _ in chunks], [context for _, context in chunks]
        num_blocks = -(-max(self.lens[1]) // block_size)
        total = num_blocks * len(chunks)
        self.rows = torch.randn(total, block_size, LATENT + TURNED, device=CUDA).bfloat16()
        self.tables = torch.randperm(total, device=CUDA).view(len(chunks), num_blocks)
        for sequence, context in enumerate(self.lens[1]):
            self.rows[self.tables[sequence, -(-context // block_size) :]] = torch.nan
            if context % block_size:
                self.rows[self.tables[sequence, context // block_size], context % block_size :] = torch.nan
        self.query = torch.randn(sum(self.lens[0]), num_heads, NOPE + TURNED, device=CUDA).bfloat16()
        expand = torch.randn(num_heads, NOPE + VALUES, LATENT, device=CUDA) / LATENT**0.5
        self.expand = expand.bfloat16()

    def run(self, **others):
        return mla_prefill(
            self.query, self.rows, self.expand, self.tables, *self.lens, nope_dim=NOPE, softmax_scale=SCALE, **others
        )

    def check(self, out):
        key, value = self.expand.float().split([NOPE, VALUES], dim=1)
        wanted = attend_expanded(self.query.float(), self.rows.float(), key, value, self.tables, *self.lens, SCALE)
        assert (out.float() - wanted).norm() / wanted.norm() < 1.5e-2


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks(chunks, num_heads, block_size):
    problem = Problem(CHUNKS[chunks], num_heads, block_size=block_size)
    problem.check(problem.run())


@pytest.mark.parametrize("most", [100, 700, 2000])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_windows(chunks, most):
    problem = Problem(CHUNKS[chunks], 16)
    problem.check(problem.run(max_expanded_bytes=most * 16 * (NOPE + VALUES) * 2))


def test_two_runs_agree_and_nothing_waits():
    problem, plans = Problem(CHUNKS["prefixes"], 16), SplitKVPlans()
    first = problem.run(plans=plans)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = problem.run(plans=plans)
        third = problem.run(plans=SplitKVPlans())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
    assert torch.equal(first, third)
