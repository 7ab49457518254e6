"""Expanded attention over latents on a GPU: against its definition in float32, in one window and in several."""

import pytest
import torch

from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.mla import prefill_hopper_triton
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
    "edges of tiles of rows": tuple((rows, rows + 40) for rows in (1, 64, 65, 127, 128, 129)),
    "edges of tiles of keys": tuple((70, context) for context in (127, 128, 129, 191, 192, 193, 256)),
    "a sequence without rows": ((100, 300), (0, 50), (33, 129)),
}
HOPPER_OPTIONS = {"long": prefill_hopper_triton._LONG, "short": prefill_hopper_triton._SHORT}


@pytest.fixture(autouse=True, params=["hopper", *HOPPER_OPTIONS, "plain"])
def form(request, monkeypatch):
    """Both forms, where there are both: that for Hopper as it chooses its options, and with each of them throughout."""
    if request.param == "plain":
        monkeypatch.setattr(prefill_hopper_triton, "fits", lambda *_: False)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper alone")
    elif request.param in HOPPER_OPTIONS:
        monkeypatch.setattr(prefill_hopper_triton, "default_options", lambda *_: HOPPER_OPTIONS[request.param])
    return request.param


class Problem:
    """Chunks of (rows, context) each in blocks that lie scattered; slots past a sequence's end hold NaN.

    So does every row of the `spoiled` sequence.
    """

    def __init__(self, chunks, num_heads, *, block_size=16, dtype=torch.bfloat16, spoiled=None):
        torch.manual_seed(0)
        self.lens = [rows for rows, _ in chunks], [context for _, context in chunks]
        num_blocks = -(-max(self.lens[1]) // block_size)
        total = num_blocks * len(chunks)
        self.rows = torch.randn(total, block_size, LATENT + TURNED, device=CUDA).to(dtype)
        self.tables = torch.randperm(total, device=CUDA).view(len(chunks), num_blocks)
        for sequence, context in enumerate(self.lens[1]):
            if sequence == spoiled:
                self.rows[self.tables[sequence]] = torch.nan
            self.rows[self.tables[sequence, -(-context // block_size) :]] = torch.nan
            if context % block_size:
                self.rows[self.tables[sequence, context // block_size], context % block_size :] = torch.nan
        self.query = torch.randn(sum(self.lens[0]), num_heads, NOPE + TURNED, device=CUDA).to(dtype)
        expand = torch.randn(num_heads, NOPE + VALUES, LATENT, device=CUDA) / LATENT**0.5
        self.expand = expand.to(dtype)
        self.spoiled, self.limit = spoiled, 1.5e-2 if dtype == torch.bfloat16 else 4e-3

    def run(self, **others):
        return mla_prefill(
            self.query, self.rows, self.expand, self.tables, *self.lens, nope_dim=NOPE, softmax_scale=SCALE, **others
        )

    def check(self, out):
        key, value = self.expand.float().split([NOPE, VALUES], dim=1)
        alive = [sequence for sequence, rows in enumerate(self.lens[0]) if rows]
        lens = [[each[sequence] for sequence in alive] for each in self.lens]
        tables = self.tables[alive]
        wanted = attend_expanded(self.query.float(), self.rows.float(), key, value, tables, *lens, SCALE)
        rows_of = [part.split(self.lens[0]) for part in (out.float(), wanted)]
        for sequence, (found, right) in enumerate(zip(*rows_of, strict=True)):
            if sequence != self.spoiled and len(found):
                assert (found - right).norm() / right.norm() < self.limit, sequence
                assert ((found - right).norm(dim=-1) / right.norm(dim=-1)).max() < 5 * self.limit, sequence


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


@pytest.mark.parametrize("chunks", CHUNKS)
def test_float16(chunks):
    problem = Problem(CHUNKS[chunks], 3, dtype=torch.float16)
    problem.check(problem.run())


@pytest.mark.parametrize("most", [None, 90, 128, 500])
@pytest.mark.parametrize("spoiled", range(3))
def test_nothing_of_a_sequence_reaches_another(spoiled, most):
    """NaN of one lies beside the rows of others in a window, where the last tile of their keys ends."""
    problem = Problem(((100, 111), (60, 201), (130, 333)), 16, spoiled=spoiled)
    others = {} if most is None else {"max_expanded_bytes": most * 16 * (NOPE + VALUES) * 2}
    problem.check(problem.run(**others))


@pytest.mark.parametrize("together", [1, 4])
def test_how_many_heads_are_under_way_together_changes_no_bit_on_hopper(together, form, monkeypatch):
    if form == "plain":
        pytest.skip("whose heads are all under way")
    problem = Problem(CHUNKS["prompts"], 16)
    wanted = problem.run()
    monkeypatch.setattr(prefill_hopper_triton, "_heads_together", lambda *_: together)
    assert torch.equal(problem.run(), wanted)


@pytest.mark.parametrize("most", [None, 700])
def test_two_runs_agree_and_nothing_waits(most):
    problem, plans = Problem(CHUNKS["prefixes"], 16), SplitKVPlans()
    others = {} if most is None else {"max_expanded_bytes": most * 16 * (NOPE + VALUES) * 2}
    first = problem.run(plans=plans, **others)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = problem.run(plans=plans, **others)
        third = problem.run(plans=SplitKVPlans(), **others)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
    assert torch.equal(first, third)
