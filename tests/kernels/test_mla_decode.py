"""Absorbed attention in Triton's interpreter against softmax(q k) v in float64, NaN wherever nothing may be read."""

import random
from dataclasses import dataclass

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.mla.decode import mla_decode
from baton.kernels.mla.decode_plan import default_options, num_parts
from baton.tests.kernels.harness import Guards, assert_deterministic, poison, relative_error, same_bits, strided

TOLERANCES = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SWAPPED = {"tile": 64, "rows": 16, "swap": True, "stages": 2, "warps": 4}
PLAIN = {"tile": 32, "rows": 64, "swap": False, "stages": 2, "warps": 8}


@dataclass
class Problem:
    """Sequences of some lengths, the last rows of each as queries, rows of latents in scattered blocks among NaN."""

    lengths: tuple
    num_queries: int = 1
    num_heads: int = 4
    latent: int = 32
    turned: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    index_dtype: torch.dtype = torch.int64
    scale: float = 0.21

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.guards, self.bound = Guards(), max(self.lengths)
        num_blocks, row_len = -(-self.bound // self.block_size), self.latent + self.turned
        total = num_blocks * len(self.lengths) + 1
        self.rows = self.guards.empty(total, self.block_size, row_len, dtype=self.dtype)
        tables = torch.randperm(total - 1, generator=generator).view(len(self.lengths), num_blocks)
        self.kept = []
        for sequence, length in enumerate(self.lengths):
            self.kept.append(torch.randn(length, row_len, generator=generator).to(self.dtype))
            position = torch.arange(length)
            block = tables[sequence, position // self.block_size]
            self.rows[block, position % self.block_size] = self.kept[sequence]
            tables[sequence, -(-length // self.block_size) :] = total - 1  # what pads a table is a block of NaN
        self.tables = self.guards.copy(tables.to(self.index_dtype))
        positions = torch.stack([torch.arange(length - self.num_queries, length) for length in self.lengths])
        self.positions = self.guards.copy(positions.to(self.index_dtype))
        query = torch.randn(len(self.lengths), self.num_queries, self.num_heads, row_len, generator=generator)
        self.query = self.guards.copy(query.to(self.dtype))

    def wanted(self):
        """In float64, row by row; a row at a negative position is 0."""
        out = torch.zeros(*self.query.shape[:3], self.latent, dtype=torch.float64)
        for b, q in torch.cartesian_prod(*(torch.arange(n) for n in self.query.shape[:2])).tolist():
            rows = self.kept[b][: max(0, int(self.positions[b, q]) + 1)].double()
            if len(rows):
                scores = self.query[b, q].double() @ rows.T * self.scale
                out[b, q] = scores.softmax(dim=1) @ rows[:, : self.latent]
        return out

    def run(self, options=None, *, implementation=Implementation.TRITON, bound=None):
        return mla_decode(
            self.query, self.rows, self.tables, self.positions, bound or self.bound, latent_dim=self.latent,
            softmax_scale=self.scale, options=options, implementation=implementation,
        )  # fmt: skip

    def check(self, out):
        assert relative_error(out, self.wanted()) < TOLERANCES[self.dtype]
        assert out.dtype == self.dtype
        assert out.is_contiguous()
        self.guards.check()


@pytest.mark.long
@pytest.mark.parametrize("options", [None, SWAPPED, PLAIN], ids=["rule", "swapped", "plain"])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_rows_of_ragged_sequences(num_queries, options):
    problem = Problem((40, 4, 64, 65), num_queries)
    problem.check(problem.run(options))


def test_the_sizes_that_are_served():
    problem = Problem((70, 9), 2, 16, 512, 64)
    problem.check(problem.run())
    problem = Problem((70,), 1, 128, 512, 64, block_size=64)
    problem.check(problem.run())


@pytest.mark.long
@pytest.mark.parametrize("num_queries", range(1, 8))
def test_rows_of_a_verify_step_see_up_to_themselves(num_queries):
    """Each row against the same one alone: what later ones stand at is no concern of its."""
    problem = Problem((75,), num_queries, 5)
    whole = problem.run()
    problem.check(whole)
    query, positions = problem.query, problem.positions
    for row in range(num_queries):
        problem.query, problem.positions = query[:, row : row + 1], positions[:, row : row + 1]
        assert relative_error(problem.run(), whole[:, row : row + 1]) < TOLERANCES[torch.bfloat16]


def drawn(seed):
    """A shape within the cost of some hundred steps of the interpreter."""
    draw = random.Random(seed)
    num_queries = draw.randint(1, 7)
    lengths = tuple(draw.randint(num_queries, 130) for _ in range(draw.randint(1, 3)))
    problem = Problem(
        lengths, num_queries, draw.choice([1, 2, 3, 5, 8, 16]), draw.choice([16, 32, 64, 128]),
        draw.choice([16, 32, 64]), draw.choice([16, 32, 64]), draw.choice([torch.bfloat16, torch.float16]), seed,
        draw.choice([torch.int32, torch.int64]), draw.choice([0.05, 0.2, 1.0]),
    )  # fmt: skip
    options = {
        "tile": draw.choice([16, 32, 64, 128]), "rows": draw.choice([16, 32, 64]), "swap": draw.random() < 0.5,
        "stages": 2, "warps": 4, "max_part_len": draw.choice([32, 64, 8192]),
    }  # fmt: skip
    return problem, draw.choice([None, options, options, options])


@pytest.mark.parametrize("seed", range(16))
def test_drawn_shapes(seed):
    problem, options = drawn(seed)
    problem.check(problem.run(options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_drawn_shapes(seed):
    problem, options = drawn(seed)
    problem.check(problem.run(options))


@pytest.mark.long
@pytest.mark.parametrize("max_part_len", [16, 32, 48, 8192])
def test_any_number_of_parts(max_part_len):
    problem = Problem((100, 3, 66), 2, 3)
    for base in (SWAPPED, PLAIN):
        problem.check(problem.run(base | {"tile": 16, "max_part_len": max_part_len}))


@pytest.mark.fast
def test_a_bound_beyond_the_table_and_positions_past_it_read_nothing_else():
    problem = Problem((50, 20), 2)
    problem.check(problem.run(bound=10_000))
    wild = Problem((50, 20), 2)
    wild.positions[1] = 10**6  # padding; its table says NaN there, others must not see it
    assert same_bits(wild.run()[0], problem.run()[0])
    wild.guards.check()


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [Implementation.TRITON, Implementation.REFERENCE])
def test_rows_at_negative_positions_are_zero_and_read_nothing(implementation):
    problem = Problem((50, 20, 33), 3)
    problem.positions[1] = -1
    problem.positions[2, 0] = -1
    poison(problem.tables[1])
    if implementation is Implementation.REFERENCE:  # which gathers whatever blocks a table names
        problem.tables[1] = 0
        problem.rows[0] = problem.rows[0].nan_to_num()
    out = problem.run(implementation=implementation)
    assert not out[1].any()
    assert not out[2, 0].any()
    assert relative_error(out, problem.wanted()) < TOLERANCES[torch.bfloat16]


@pytest.mark.fast
def test_queries_tables_and_blocks_that_lie_apart():
    problem = Problem((50, 20), 2)
    plain = problem.run()
    wide = poison(torch.empty(2, 2, 12, 48, dtype=torch.bfloat16))
    wide[:, :, :4] = problem.query
    problem.query = wide[:, :, :4]
    problem.positions, problem.tables = strided(problem.positions), strided(problem.tables)
    problem.rows = strided(problem.rows)
    assert same_bits(problem.run(), plain)


@pytest.mark.fast
def test_a_table_of_one_column_with_any_stride():
    problem = Problem((9, 14), 2)
    plain = problem.run()
    problem.tables = problem.tables.as_strided((2, 1), (1, 5))
    assert same_bits(problem.run(), plain)


@pytest.mark.long
def test_two_runs_agree_and_write_no_input():
    problem = Problem((50, 20), 2)
    for options in (SWAPPED | {"tile": 16, "max_part_len": 32}, None):
        assert_deterministic(
            lambda options=options: problem.run(options), problem.query, problem.rows, problem.tables, problem.positions
        )


@pytest.mark.fast
def test_the_reference_is_what_float64_says():
    for dtype in TOLERANCES:
        problem = Problem((40, 4, 64), 3, 7, 20, 6, dtype=dtype)
        problem.rows[-1] = 0  # it masks what is past a length, but gathers its blocks
        out = problem.run(implementation=Implementation.REFERENCE)
        assert relative_error(out, problem.wanted()) < TOLERANCES[dtype]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [Implementation.TRITON, Implementation.REFERENCE])
def test_nothing_to_compute(implementation):
    problem = Problem((20,))
    query, positions, tables = problem.query, problem.positions, problem.tables
    problem.query, problem.positions = query[:, :0], positions[:, :0]
    assert problem.run(implementation=implementation).shape == (1, 0, 4, 32)
    problem.query, problem.positions, problem.tables = query[:0], positions[:0], tables[:0]
    assert problem.run(implementation=implementation).shape == (0, 1, 4, 32)


BF16 = torch.bfloat16
BAD: dict = {
    "query_BQAX": [
        {"query": torch.zeros(1, 4, 48)},
        {"query": torch.zeros(1, 1, 4, 48, dtype=torch.int32)},
        {"query": torch.zeros(1, 1, 4, 48), "rows": torch.zeros(3, 16, 48)},
        {"query": torch.zeros(1, 1, 4, 96, dtype=BF16)[..., ::2]},
        {"query": torch.zeros(1, 1, 4, 50, dtype=BF16)[..., :48]},
    ],
    "rows_NSX": [
        {"rows": torch.zeros(3, 16, 48)},
        {"rows": torch.zeros(3, 16, 32, dtype=BF16)},
        {"rows": torch.zeros(3, 48, 16, dtype=BF16).transpose(1, 2)},
        {"rows": torch.zeros(3, 8, 48, dtype=BF16)},
        {"rows": torch.zeros(3 * 16 * 48 + 1, dtype=BF16)[1:].view(3, 16, 48)},
    ],
    "block_tables_BM": [
        {"tables": torch.zeros(2, 2).long()},
        {"tables": torch.zeros(1, 2)},
        {"tables": torch.zeros(1, 0).long()},
    ],
    "positions_BQ": [{"positions": torch.zeros(1, 2).long()}, {"positions": torch.zeros(1, 1)}],
    "max_context_len": [{"bound": 0}],
    "latent_dim": [{"latent": 0}, {"latent": 49}, {"latent": 24}, {"latent": 40}],
    "softmax_scale": [{"scale": 0.0}],
}


@pytest.mark.fast
@pytest.mark.parametrize(("argument", "changes"), [(name, change) for name in BAD for change in BAD[name]])
def test_what_does_not_fit_is_named(argument, changes):
    problem = Problem((20,))
    for name, value in changes.items():
        setattr(problem, name, value)
    with pytest.raises(KernelArgumentInvalid) as caught:
        mla_decode(
            problem.query, problem.rows, problem.tables, problem.positions, problem.bound, latent_dim=problem.latent,
            softmax_scale=problem.scale, implementation=Implementation.TRITON,
        )  # fmt: skip
    assert caught.value.fields["argument"] == argument


@pytest.mark.fast
def test_more_rows_of_a_sequence_than_the_kernel_takes_are_refused():
    with pytest.raises(KernelArgumentInvalid, match="positions_BQ"):
        Problem((40,), 33).run()


@pytest.mark.fast
def test_parts_fill_the_device_and_no_more():
    def parts(num_sequences, num_rows, max_context_len):
        return num_parts(num_sequences, num_rows, max_context_len, 1152, 512, default_options(num_rows))

    assert parts(64, 16, 4096) == 2
    assert parts(64, 128, 4096) == 1
    assert parts(1, 16, 64) == 1
    assert parts(1, 16, 32_768) >= 60
    assert all(1 <= parts(*sizes) <= 128 for sizes in ((1, 1, 1), (3, 7, 500), (256, 896, 131_072)))


@pytest.mark.fast
def test_few_rows_are_on_the_right_and_many_on_the_left():
    found = [(default_options(n).rows, default_options(n).swap) for n in (1, 16, 17, 33, 64, 896)]
    assert found == [(16, True), (16, True), (32, True), (64, False), (64, False), (64, False)]


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [1, 16, 32, 64, 896])
def test_hopper_has_one_form_for_any_number_of_rows(num_rows):
    options = default_options(num_rows, on_hopper=True)
    assert (options.tile, options.rows, options.swap, options.stages, options.warps) == (64, 64, False, 2, 8)
    assert options.hopper
    assert not default_options(num_rows).hopper
