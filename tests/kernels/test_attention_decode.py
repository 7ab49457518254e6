"""Decode attention in Triton's interpreter against softmax(q k) v in float64, NaN wherever nothing may be read."""

import random
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention import decode_plan as attention_plan
from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.decode_plan import PlanOptions, default_options, num_parts, rows_of_program
from baton.kernels.attention.float8_triton import dequantize_pairs
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import Guards, assert_deterministic, poison, relative_error, same_bits, strided

FLOAT8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3, FLOAT8: 6e-3}
SWAPPED = {"tile": 64, "rows": 16, "swap": True, "stages": 3, "warps": 4, "slots": 264}
PLAIN = SWAPPED | {"swap": False, "tile": 32}
DIRECT = PLAIN | {"direct": 1}
MOVED = PLAIN | {"direct": 2}
APART = DIRECT | {"apart": True, "warps": 2, "registers": 168}
MOVED_APART = APART | {"direct": 2, "tile": 64, "warps": 4}


@triton.jit
def dequantize_kernel(pairs, even, odd, MOVE: tl.constexpr):
    index = tl.arange(0, 256)
    even_N, odd_N = dequantize_pairs(tl.load(pairs + index), MOVE, True)
    tl.store(even + index, even_N)
    tl.store(odd + index, odd_N)


@dataclass
class Problem:
    """Sequences of some lengths, the last rows of each as queries, KV in scattered blocks among NaN."""

    lengths: tuple
    num_queries: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    seed: int = 0
    index_dtype: torch.dtype = torch.int64
    per_head_scales: bool = True

    def __post_init__(self):
        self.kv_dtype = self.kv_dtype or self.dtype
        generator = torch.Generator().manual_seed(self.seed)
        self.guards = Guards()
        self.bound = max(self.lengths)
        num_blocks = -(-self.bound // self.block_size)
        total = num_blocks * len(self.lengths) + 1
        shape = (total, self.num_kv_heads, 2, self.block_size, self.head_dim)
        pool = self.guards.empty(*shape, dtype=self.kv_dtype)
        self.key, self.value = pool[:, :, 0], pool[:, :, 1]
        order = torch.randperm(total - 1, generator=generator)
        tables = order[: num_blocks * len(self.lengths)].view(len(self.lengths), num_blocks)
        self.kv = []
        for sequence, length in enumerate(self.lengths):
            kv = torch.randn(2, length, self.num_kv_heads, self.head_dim, generator=generator).to(self.kv_dtype)
            self.kv.append(kv)
            for position in range(length):
                block, slot = tables[sequence, position // self.block_size], position % self.block_size
                self.key[block, :, slot], self.value[block, :, slot] = kv[0, position], kv[1, position]
            used = -(-length // self.block_size)
            tables[sequence, used:] = total - 1  # what pads a table is a block of NaN
        self.tables = self.guards.copy(tables.to(self.index_dtype))
        positions = torch.stack([torch.arange(length - self.num_queries, length) for length in self.lengths])
        self.positions = self.guards.copy(positions.to(self.index_dtype))
        query_shape = (len(self.lengths), self.num_queries, self.num_heads, self.head_dim)
        self.query = self.guards.copy((torch.randn(query_shape, generator=generator) * 2).to(self.dtype))
        self.scales = {}
        if self.kv_dtype == FLOAT8:
            count = self.num_kv_heads if self.per_head_scales else 1
            self.scales = {
                name: self.guards.copy(torch.rand(count, generator=generator) + 0.1)
                for name in ("key_scale", "value_scale")
            }

    def wanted(self):
        """In float64, row by row; a row at a negative position is 0."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.num_heads // self.num_kv_heads
        for b, q, a in torch.cartesian_prod(*(torch.arange(n) for n in self.query.shape[:3])).tolist():
            end = int(self.positions[b, q]) + 1
            if end <= 0:
                continue
            key, value = self.kv[b][:, :end, a // group].double()
            if self.scales:
                key, value = (
                    part * self.scales[name].double().expand(self.num_kv_heads)[a // group]
                    for part, name in ((key, "key_scale"), (value, "value_scale"))
                )
            scores = key @ self.query[b, q, a].double() / self.head_dim**0.5
            out[b, q, a] = scores.softmax(dim=0) @ value
        return out

    def run(self, options=None, *, implementation=Implementation.TRITON, bound=None, **others):
        return attention_decode(
            self.query, self.key, self.value, self.tables, self.positions, bound or self.bound,
            options=options, implementation=implementation, **self.scales, **others,
        )  # fmt: skip

    def check(self, out):
        assert relative_error(out, self.wanted()) < TOLERANCES[self.kv_dtype]
        assert out.dtype == self.dtype
        assert out.is_contiguous()
        self.guards.check()


@pytest.mark.parametrize("options", [None, SWAPPED, PLAIN], ids=["rule", "swapped", "plain"])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_rows_of_ragged_sequences(num_queries, options):
    problem = Problem((40, 4, 64, 65), num_queries)
    problem.check(problem.run(options))


def drawn(seed):
    """A shape within the cost of some hundred steps of the interpreter."""
    draw = random.Random(seed)
    num_kv_heads = draw.choice([1, 1, 2, 3])
    num_queries = draw.randint(1, 8)
    lengths = tuple(draw.randint(num_queries, 100) for _ in range(draw.randint(1, 3)))
    kv_dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, FLOAT8])
    problem = Problem(
        lengths, num_queries, num_kv_heads * draw.choice([1, 2, 3, 4, 7, 8]), num_kv_heads,
        draw.choice([16, 32, 64, 128, 256]), draw.choice([16, 32, 64]),
        torch.bfloat16 if kv_dtype == FLOAT8 else kv_dtype, kv_dtype, seed,
        draw.choice([torch.int32, torch.int64]), draw.random() < 0.5,
    )  # fmt: skip
    options = {
        "tile": draw.choice([16, 32, 64, 128]), "rows": draw.choice([16, 32, 64]), "swap": draw.random() < 0.5,
        "stages": 3, "warps": 4, "slots": 264, "max_part_len": draw.choice([32, 64, 8192]),
    }  # fmt: skip
    chosen = draw.choice([None, options, options, options])
    if chosen and kv_dtype == FLOAT8 and problem.head_dim >= 32 and not options["swap"]:
        options["direct"] = draw.choice([0, 1, 2])
        options["apart"] = options["direct"] > 0 and options["tile"] >= 64 and draw.random() < 0.5
    return problem, chosen


@pytest.mark.parametrize("seed", range(20))
def test_drawn_shapes(seed):
    problem, options = drawn(seed)
    problem.check(problem.run(options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_drawn_shapes(seed):
    problem, options = drawn(seed)
    problem.check(problem.run(options))


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 15, 16, 63, 64, 65, 128])
def test_numbers_of_rows_of_a_head(num_rows):
    num_queries = 1 if num_rows in (1, 2, 7, 15) else 8 if num_rows % 8 == 0 else 3 if num_rows == 63 else 5
    problem = Problem((70,), num_queries, num_rows // num_queries, 1)
    problem.check(problem.run())


@pytest.mark.long
@pytest.mark.parametrize("max_part_len", [16, 32, 48, 8192])
def test_any_number_of_parts(max_part_len):
    problem = Problem((100, 3, 66), 2, 3, 1)
    options = PLAIN | {"tile": 16, "max_part_len": max_part_len}
    problem.check(problem.run(options))


def test_float8_scales_per_tensor_and_per_head():
    for per_head in (False, True):
        problem = Problem((90, 33), 3, 6, 2, 32, kv_dtype=FLOAT8, per_head_scales=per_head)
        problem.check(problem.run())
        problem.check(problem.run(SWAPPED | {"max_part_len": 64}))


@pytest.mark.parametrize("options", [DIRECT, MOVED, APART, MOVED_APART], ids=["direct", "moved", "apart", "both"])
def test_float8_that_is_dequantized_in_the_matmuls_registers(options):
    """Ragged ends among NaN, rows that see nothing, several parts, and values that do not lie beside their keys."""
    problem = Problem((90, 33, 4), 3, 6, 2, 64, kv_dtype=FLOAT8, block_size=32)
    whole = problem.run(options)
    problem.check(whole)
    problem.check(problem.run(options | {"max_part_len": 64}))
    problem.check(problem.run(options | {"rows": 32}))
    assert_deterministic(lambda: problem.run(options), problem.query, problem.key, problem.value, problem.tables)
    problem.value = torch.empty_strided(problem.key.shape, problem.key.stride(), dtype=FLOAT8).copy_(problem.value)
    assert same_bits(problem.run(options), whole)
    problem.positions[1] = -1
    out = problem.run(options)
    assert not out[1].any()
    assert same_bits(out[0], whole[0])


@pytest.mark.fast
@pytest.mark.parametrize("is_moved", [False, True])
def test_every_code_of_float8_is_dequantized_exactly(is_moved):
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack([codes, codes.flip(0)], dim=1).view(torch.int16).flatten()
    even, odd = torch.full((2, 256), torch.nan, dtype=torch.float16)
    dequantize_kernel[(1,)](pairs, even, odd, MOVE=is_moved)
    wanted = codes.view(FLOAT8).float()
    assert wanted.isnan().sum() == 2
    if is_moved:
        wanted = torch.where(wanted.isnan(), torch.copysign(torch.tensor(480.0), codes.view(torch.int8)), wanted) / 256
    assert same_bits(even.float(), wanted)
    assert same_bits(odd.float(), wanted.flip(0))


@pytest.mark.fast
@pytest.mark.parametrize(
    "options",
    [DIRECT | {"swap": True}, PLAIN | {"apart": True}, APART | {"warps": 4}, DIRECT | {"head_dim": 16}],
    ids=["swapped", "not direct", "too few keys", "small heads"],
)
def test_options_that_contradict_themselves_are_refused(options):
    problem = Problem((20,), head_dim=options.get("head_dim", 32), kv_dtype=FLOAT8)
    with pytest.raises(KernelArgumentInvalid, match="options"):
        problem.run({name: value for name, value in options.items() if name != "head_dim"})


@pytest.mark.fast
@pytest.mark.long
def test_a_bound_beyond_the_table_and_positions_past_it_read_nothing_else():
    problem = Problem((50, 20), 2)
    problem.check(problem.run(bound=10_000))
    wild = Problem((50, 20), 2)
    wild.positions[1] = 10**6  # a row that nobody wants; the table says NaN there, others must not see it
    out = wild.run()
    assert same_bits(out[0], problem.run()[0])
    wild.guards.check()


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [Implementation.TRITON, Implementation.REFERENCE])
def test_rows_at_negative_positions_are_zero_and_nobodys_business(implementation):
    problem = Problem((50, 20, 33), 3)
    problem.positions[1] = -1
    problem.positions[2, 0] = -1
    poison(problem.tables[1])
    if implementation is Implementation.REFERENCE:
        problem.tables[1] = 0
        problem.key[0], problem.value[0] = problem.key[0].nan_to_num(), problem.value[0].nan_to_num()
        problem.kv[0] = problem.kv[0].clone()
    out = problem.run(implementation=implementation)
    assert not out[1].any()
    assert not out[2, 0].any()
    assert relative_error(out, problem.wanted()) < 6e-3


@pytest.mark.fast
@pytest.mark.long
def test_queries_between_other_columns_and_positions_between_others():
    problem = Problem((50, 20), 2)
    plain = problem.run()
    wide = poison(torch.empty(2, 2, 12, 32, dtype=torch.bfloat16))
    wide[:, :, :4] = problem.query
    problem.query = wide[:, :, :4]
    problem.positions = strided(problem.positions)
    problem.tables = strided(problem.tables)
    assert same_bits(problem.run(), plain)


def test_two_runs_agree_and_write_no_input():
    problem = Problem((50, 20), 2, 4, 1)
    for options in (PLAIN | {"max_part_len": 32}, None):
        assert_deterministic(
            lambda options=options: problem.run(options), problem.query, problem.key, problem.value, problem.tables
        )


@pytest.mark.long
def test_block_sizes_and_orders_of_blocks_give_the_same_bits():
    outs = []
    for block_size, seed in ((16, 1), (32, 1), (64, 1)):
        problem = Problem((70, 130), 2, block_size=block_size, seed=seed)
        for sequence in range(2):  # the same numbers, whatever the pool drew
            kv = torch.randn(problem.kv[sequence].shape, generator=torch.Generator().manual_seed(sequence)).bfloat16()
            for position in range(problem.lengths[sequence]):
                block, slot = problem.tables[sequence, position // block_size], position % block_size
                problem.key[block, :, slot], problem.value[block, :, slot] = kv[:, position]
        problem.query[:] = torch.randn(problem.query.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
        outs.append(problem.run(SWAPPED))
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_invariant_rows_depend_on_themselves_alone(kv_dtype, monkeypatch):
    """Alone or beside others, one row at a time or eight, within a narrow bound or a wide one: the same bits."""
    monkeypatch.setattr(attention_plan, "INVARIANT_PART_LEN", 64)
    problem = Problem((150, 40, 67), 8, 3, 1, 16, kv_dtype=kv_dtype)
    whole = problem.run(invariant=True)
    assert relative_error(whole, problem.wanted()) < TOLERANCES[kv_dtype]
    kept = problem.query, problem.positions, problem.tables
    for sequence, bound in ((0, 150), (1, 64), (1, 150)):
        at = slice(sequence, sequence + 1)
        problem.query, problem.positions, problem.tables = (tensor[at] for tensor in kept)
        assert same_bits(problem.run(invariant=True, bound=bound), whole[at]), (sequence, bound)
        for rows in (slice(7, 8), slice(2, 6)):
            problem.query, problem.positions = kept[0][at, rows], kept[1][at, rows]
            assert same_bits(problem.run(invariant=True, bound=bound), whole[at, rows]), (sequence, bound, rows)


@pytest.mark.fast
def test_an_empty_batch():
    problem = Problem((20,))
    problem.query, problem.positions, problem.tables = problem.query[:0], problem.positions[:0], problem.tables[:0]
    assert problem.run().shape == (0, 1, 4, 32)


BAD: dict = {
    "query_BQAD": [
        {"query": torch.zeros(1, 4, 32)},
        {"query": torch.zeros(1, 1, 4, 32, dtype=torch.int32)},
        {"query": torch.zeros(1, 1, 3, 32, dtype=torch.bfloat16)},
        {"query": torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)[..., ::2]},
    ],
    "key_NHSD": [{"key": torch.zeros(3, 2, 16, 32)}, {"key": torch.zeros(3, 2, 32, 16).bfloat16().transpose(2, 3)}],
    "value_NHSD": [{"value": torch.zeros(3, 2, 16, 32).bfloat16()}, {"value": torch.zeros(3, 2, 16, 32)}],
    "block_tables_BM": [{"tables": torch.zeros(2, 2).long()}, {"tables": torch.zeros(1, 2)}],
    "positions_BQ": [{"positions": torch.zeros(1, 2).long()}, {"positions": torch.zeros(1, 1).bfloat16()}],
    "max_context_len": [{"bound": 0}],
    "key_scale": [{"scales": {"key_scale": torch.ones(1), "value_scale": torch.ones(1)}}],
}


@pytest.mark.fast
@pytest.mark.parametrize(("argument", "changes"), [(name, change) for name in BAD for change in BAD[name]])
def test_what_does_not_fit_is_named(argument, changes):
    problem = Problem((20,))
    for name, value in changes.items():
        setattr(problem, name, value)
    # The table's bound is what the kernel uses, so only a bound of the caller's can be wrong.
    with pytest.raises(KernelArgumentInvalid) as caught:
        attention_decode(
            problem.query, problem.key, problem.value, problem.tables, problem.positions, problem.bound,
            implementation=Implementation.TRITON, **problem.scales,
        )  # fmt: skip
    assert caught.value.fields["argument"] == argument


@pytest.mark.fast
@pytest.mark.parametrize("scales", [{}, {"key_scale": torch.ones(1)}, {"value_scale": torch.ones(2)}])
def test_float8_needs_both_scales(scales):
    problem = Problem((20,), kv_dtype=FLOAT8)
    problem.scales = scales
    with pytest.raises(KernelArgumentInvalid, match="_scale"):
        problem.run()


@pytest.mark.fast
def test_more_rows_of_a_sequence_than_the_kernel_takes_are_refused():
    with pytest.raises(KernelArgumentInvalid, match="positions_BQ"):
        Problem((40,), 33).run()


@pytest.mark.fast
def test_the_reference_is_what_float64_says():
    for kv_dtype in (torch.bfloat16, FLOAT8, torch.float32):
        dtype = torch.bfloat16 if kv_dtype == FLOAT8 else kv_dtype
        problem = Problem((40, 4, 64), 3, dtype=dtype, kv_dtype=kv_dtype)
        for pad in (problem.key, problem.value):  # it masks scores and values of the bound, but gathers its blocks
            pad[-1] = 0
        for invariant in (False, True):
            out = problem.run(implementation=Implementation.REFERENCE, invariant=invariant)
            assert relative_error(out, problem.wanted()) < max(TOLERANCES[kv_dtype], 1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_the_reference_uses_no_entry_past_a_sequences_end(kv_dtype, invariant):
    problem = Problem((40, 4, 64), 3, kv_dtype=kv_dtype)
    problem.positions[1] = -1
    for sequence, used in enumerate((3, 0, 4)):
        problem.tables[sequence, used:] = 1 << 40 if sequence else -1
    out = problem.run(implementation=Implementation.REFERENCE, invariant=invariant)
    assert not out[1].any()
    assert relative_error(out, problem.wanted()) < TOLERANCES[kv_dtype]


@pytest.mark.fast
def test_the_reference_takes_blocks_that_lie_apart():
    problem = Problem((40, 4, 64), 3)
    wanted = problem.run(implementation=Implementation.REFERENCE)
    pool = poison(torch.empty(len(problem.key), 2, 2, 16, 32, dtype=torch.bfloat16))
    pool[:, 0], pool[:, 1] = problem.key, problem.value
    problem.key, problem.value = pool[:, 0], pool[:, 1]  # keys of all heads of a block, then its values
    for invariant in (False, True):
        out = problem.run(implementation=Implementation.REFERENCE, invariant=invariant)
        assert relative_error(out, wanted) < TOLERANCES[torch.bfloat16]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [Implementation.TRITON, Implementation.REFERENCE])
def test_sequences_without_rows(implementation):
    problem = Problem((20,))
    problem.query, problem.positions = problem.query[:, :0], problem.positions[:, :0]
    assert problem.run(implementation=implementation).shape == (1, 0, 4, 32)


@pytest.mark.fast
def test_blocks_that_the_invariant_reference_cannot_step_over_are_refused():
    for block_size in (48, 128):
        with pytest.raises(KernelArgumentInvalid, match="key_NHSD"):
            Problem((20,), block_size=block_size).run(invariant=True, implementation=Implementation.REFERENCE)


@pytest.mark.fast
def test_a_softmax_scale_of_ones_own():
    problem = Problem((40, 9), dtype=torch.float32)
    outs = [problem.run(softmax_scale=0.3, implementation=i) for i in (Implementation.TRITON, Implementation.REFERENCE)]
    problem.query *= 0.3 * 32**0.5
    for out in outs:
        assert relative_error(out, problem.wanted()) < 1e-5


@pytest.mark.fast
def test_parts_fill_the_device_and_no_more():
    options = default_options(4, 128, 2)
    assert isinstance(options, PlanOptions)

    def parts(num_programs, max_context_len):
        return num_parts(num_programs, max_context_len, 512, 2048, options)

    assert parts(8, 64) == 1
    assert parts(64 * 8, 1024) == 1
    assert 8 <= parts(8, 1024) <= 16
    assert 25 <= parts(8, 32768) <= 40
    assert parts(512, 32768) >= 4  # a sequence of its bound beside short ones is shared
    for num_programs in (1, 3, 8, 100, 300, 5000):
        for max_context_len in (1, 63, 65, 5000, 131072):
            assert 1 <= parts(num_programs, max_context_len) <= min(128, -(-max_context_len // 64))


@pytest.mark.fast
def test_rows_are_padded_to_what_tensor_cores_take():
    assert [rows_of_program(n) for n in (1, 16, 17, 33, 64, 65, 500)] == [16, 16, 32, 64, 64, 64, 64]
