"""Absorbed attention on a GPU: against float32 on long contexts, at served sizes, and replayed by a graph."""

import pytest
import torch

from baton.kernels.implementation import Implementation
from baton.kernels.mla.decode import mla_decode
from baton.kernels.mla.decode_plan import MLAPlanOptions, default_options

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LATENT, TURNED = 512, 64
SCALE = 192**-0.5 * 1.87  # of DeepSeek-V3, YaRN's factor in it


class Problem:
    """Rows of ragged lengths in blocks that lie scattered; slots past a sequence's end hold NaN."""

    def __init__(self, lengths, num_queries, num_heads, *, block_size=16, bound=None):
        torch.manual_seed(0)
        self.bound = bound or max(lengths)
        num_blocks = -(-self.bound // block_size)
        total = num_blocks * len(lengths)
        self.rows = torch.randn(total, block_size, LATENT + TURNED, device=CUDA, dtype=torch.bfloat16)
        self.tables = torch.randperm(total, device=CUDA).view(len(lengths), num_blocks)
        for sequence, length in enumerate(lengths):
            self.rows[self.tables[sequence, -(-length // block_size) :]] = torch.nan
            if length % block_size:
                self.rows[self.tables[sequence, length // block_size], length % block_size :] = torch.nan
        ends = torch.tensor(lengths, device=CUDA)[:, None]
        self.positions = ends - num_queries + torch.arange(num_queries, device=CUDA)
        shape = (len(lengths), num_queries, num_heads, LATENT + TURNED)
        self.query = torch.randn(shape, device=CUDA).bfloat16() * 0.5

    def run(self, **others):
        return mla_decode(
            self.query, self.rows, self.tables, self.positions, self.bound,
            **{"latent_dim": LATENT, "softmax_scale": SCALE, **others},
        )  # fmt: skip

    def check(self, out):
        """Row by row of the batch, in float32."""
        for sequence, positions_Q in enumerate(self.positions.tolist()):
            rows = self.rows[self.tables[sequence]].flatten(0, 1)[: positions_Q[-1] + 1].float()
            scores = torch.einsum("qax,lx->qal", self.query[sequence].float(), rows) * SCALE
            place = torch.arange(len(rows), device=CUDA)
            hidden = place > self.positions[sequence][:, None, None]
            wanted = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ rows[:, :LATENT]
            error = (out[sequence].float() - wanted).norm() / wanted.norm()
            assert error < 1e-2, (sequence, float(error))


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_queries", [1, 2, 4, 7])
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
def test_ragged_sequences(num_heads, num_queries, block_size):
    problem = Problem((3000, 8, 64, 1025, 500), num_queries, num_heads, block_size=block_size)
    problem.check(problem.run())


FORMS = {
    "swapped": MLAPlanOptions(tile=64, rows=16, swap=True, stages=2, warps=4),
    "swapped by 8 warps": MLAPlanOptions(tile=64, rows=16, swap=True, stages=2, warps=8),
    "swapped, 32 rows": MLAPlanOptions(tile=64, rows=32, swap=True, stages=2, warps=4),
    "swapped, 32 rows by 8 warps": MLAPlanOptions(tile=64, rows=32, swap=True, stages=2, warps=8),
    "short tiles": MLAPlanOptions(tile=32, rows=64, swap=False, stages=3, warps=8),
    "plain": MLAPlanOptions(tile=64, rows=64, swap=False, stages=2, warps=8),
    "for Hopper": MLAPlanOptions(tile=64, rows=64, swap=False, stages=2, warps=8, hopper=True),
    "for Hopper, many parts": MLAPlanOptions(
        tile=64, rows=64, swap=False, stages=2, warps=8, hopper=True, max_part_len=128
    ),
    "no early start": MLAPlanOptions(tile=64, rows=64, swap=False, stages=2, warps=8, pdl=False, max_part_len=256),
}


def named(options):
    return {name: getattr(options, name) for name in options.__slots__}


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form, block_size):
    problem = Problem((3000, 8, 64, 1025, 500), 3, 16, block_size=block_size)
    problem.check(problem.run(options=named(FORMS[form])))


@pytest.mark.parametrize("lengths", [(20_000,), (4096,) * 64, tuple(range(100, 1380, 20))], ids=len)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_long_and_many(lengths, num_heads):
    problem = Problem(lengths, 1, num_heads)
    problem.check(problem.run())


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("num_heads", "on_hopper"), [(4, False), (16, False), (16, True), (128, True)])
def test_a_graph_replays_other_lengths_and_nothing_waits(num_heads, on_hopper, pdl):
    problem = Problem((3000, 1025, 64), 4, num_heads)
    options = named(default_options(4 * num_heads, on_hopper=on_hopper)) | {"pdl": pdl}
    problem.run(options=options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        problem.run(options=options)
        with torch.cuda.graph(graph, stream=stream):
            captured = problem.run(options=options)
    torch.cuda.current_stream().wait_stream(stream)
    first = problem.positions.clone()
    for back in (0, 1, 40, 10_000):  # the last: rows at negative positions
        problem.positions.copy_(first - back)
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = problem.run(options=options)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured, eager)
        assert captured.isfinite().all()
    assert not captured.any()


def test_the_reference_agrees():
    problem = Problem((700, 8, 64), 3, 16)
    problem.rows.nan_to_num_()
    problem.check(problem.run(implementation=Implementation.REFERENCE))
    problem.check(problem.run())
