"""Decode attention on a GPU: against the reference on long contexts, replayed by a graph, and row by row."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.decode_plan import default_options
from baton.kernels.attention.float8_triton import dequantize_pairs
from baton.kernels.implementation import Implementation

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
FLOAT8 = torch.float8_e4m3fn
HEADS = [(32, 8, 128), (28, 4, 128), (16, 2, 256), (8, 2, 64), (4, 2, 32)]


@triton.jit
def dequantize_kernel(pairs, even, odd, MOVE: tl.constexpr):
    index = tl.arange(0, 256)
    even_N, odd_N = dequantize_pairs(tl.load(pairs + index), MOVE, True)
    tl.store(even + index, even_N)
    tl.store(odd + index, odd_N)


class Problem:
    """KV of ragged lengths in blocks that lie scattered; slots past a sequence's end hold NaN."""

    def __init__(self, heads, lengths, num_queries, *, kv_dtype=torch.bfloat16, block_size=16, bound=None):
        num_heads, num_kv_heads, head_dim = heads
        torch.manual_seed(0)
        self.bound = bound or max(lengths)
        num_blocks = -(-self.bound // block_size)
        total = num_blocks * len(lengths)
        dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
        pool = torch.randn(total, num_kv_heads, 2, block_size, head_dim, device=CUDA).to(kv_dtype)
        self.tables = torch.randperm(total, device=CUDA).view(len(lengths), num_blocks)
        for sequence, length in enumerate(lengths):
            rest = self.tables[sequence, -(-length // block_size) :]
            self.fill(pool, rest, slice(None))
            if length % block_size:
                last = self.tables[sequence, length // block_size]
                self.fill(pool, last[None], slice(length % block_size, None))
        self.key, self.value = pool[:, :, 0], pool[:, :, 1]
        ends = torch.tensor(lengths, device=CUDA)[:, None]
        self.positions = ends - num_queries + torch.arange(num_queries, device=CUDA)
        self.query = torch.randn(len(lengths), num_queries, num_heads, head_dim, device=CUDA).to(dtype) * 2
        self.scales = {}
        if kv_dtype == FLOAT8:
            self.scales = {name: torch.rand(num_kv_heads, device=CUDA) + 0.1 for name in ("key_scale", "value_scale")}

    @staticmethod
    def fill(pool, blocks, slots):
        bits = pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.element_size()])
        bits[blocks, :, :, slots] = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}[pool.element_size()]

    def run(self, at=slice(None), rows=slice(None), *, bound=None, **others):
        return attention_decode(
            self.query[at, rows], self.key, self.value, self.tables[at], self.positions[at, rows],
            bound or self.bound, **self.scales, **others,
        )  # fmt: skip

    def check(self, out):
        wanted = self.run(implementation=Implementation.REFERENCE).float()
        error = (out.float() - wanted).norm() / wanted.norm()
        assert error < (1e-4 if self.query.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8, torch.float32], ids=str)
@pytest.mark.parametrize("num_queries", [1, 4, 8])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_sequences(heads, num_queries, kv_dtype):
    problem = Problem(heads, (3000, 8, 64, 1025, 500), num_queries, kv_dtype=kv_dtype)
    problem.check(problem.run())
    problem.check(problem.run(invariant=True))


@pytest.mark.parametrize(
    ("heads", "num_queries", "changes"),
    [
        ((32, 8, 128), 1, {"apart": True}),
        ((32, 8, 128), 2, {"apart": True, "direct": 2, "stages": 4}),
        ((32, 8, 128), 1, {"apart": False, "registers": 0}),
        ((32, 4, 128), 4, {"direct": 2}),
        ((16, 2, 256), 1, {"direct": 2}),
        ((16, 2, 256), 4, {"tile": 32, "stages": 4}),
        ((8, 2, 64), 3, {"tile": 128, "registers": 0}),
        ((4, 2, 32), 4, {"direct": 1}),
    ],
)
def test_direct_forms_of_float8(heads, num_queries, changes):
    problem = Problem(heads, (3000, 8, 64, 1025, 500), num_queries, kv_dtype=FLOAT8)
    rule = default_options(num_queries * heads[0] // heads[1], heads[2], 1)
    problem.check(problem.run(options={name: getattr(rule, name) for name in rule.__slots__} | changes))


@pytest.mark.parametrize("is_moved", [False, True])
def test_every_code_of_float8_is_dequantized_exactly(is_moved):
    codes = torch.arange(256, dtype=torch.uint8, device=CUDA)
    pairs = torch.stack([codes, codes.flip(0)], dim=1).view(torch.int16).flatten()
    even, odd = torch.full((2, 256), torch.nan, dtype=torch.float16, device=CUDA)
    dequantize_kernel[(1,)](pairs, even, odd, MOVE=is_moved)
    wanted = codes.view(FLOAT8).float() / (256 if is_moved else 1)
    finite = wanted.isfinite()
    assert finite.sum() == 254
    assert torch.equal(even.float()[finite], wanted[finite])
    assert torch.equal(odd.float().flip(0)[finite], wanted[finite])
    assert even[~finite].isnan().all() != is_moved


@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_blocks(block_size):
    problem = Problem((32, 8, 128), (3000, 8, 64, 1025), 4, block_size=block_size)
    problem.check(problem.run())


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("lengths", [(20_000,), (8192,) * 16, tuple(range(100, 1380, 20))], ids=len)
def test_long_and_many(lengths, pdl):
    problem = Problem((32, 8, 128), lengths, 2)
    rule = default_options(8, 128, 2)
    options = {name: getattr(rule, name) for name in rule.__slots__} | {"pdl": pdl}
    problem.check(problem.run(options=options))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_graph_replays_other_lengths_and_nothing_waits(invariant, pdl):
    problem = Problem((32, 8, 128), (3000, 1025, 64), 4)
    rule = default_options(16, 128, 2)
    options = {name: getattr(rule, name) for name in rule.__slots__} | {"pdl": pdl}
    run = partial(problem.run, options=options, invariant=invariant)
    run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
    torch.cuda.current_stream().wait_stream(stream)
    first = problem.positions.clone()
    for back in (0, 1, 40, 10_000):  # the last: rows at negative positions
        problem.positions.copy_(first - back)
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = run()
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured, eager)
        assert captured.isfinite().all()
    assert not captured.any()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_invariant_rows_depend_on_themselves_alone(heads, kv_dtype):
    problem = Problem(heads, (3000, 40, 530, 1024), 8, kv_dtype=kv_dtype)
    whole = problem.run(invariant=True)
    assert torch.equal(problem.run(invariant=True), whole)
    for sequence, bound in ((0, 3000), (1, 48), (1, 3000), (2, 544), (3, 2000)):
        at = slice(sequence, sequence + 1)
        for rows in (slice(None), slice(0, 1), slice(7, 8), slice(2, 6)):
            assert torch.equal(problem.run(at, rows, bound=bound, invariant=True), whole[at, rows])
