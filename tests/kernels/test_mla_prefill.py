"""Expanded attention over latents in Triton's interpreter against its definition in float64, NaN beside all rows."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.implementation import Implementation
from baton.kernels.mla import prefill, prefill_hopper_triton, prefill_triton, prefill_warp_specialized_triton
from baton.kernels.mla.latent_rows import attend_expanded
from baton.kernels.mla.prefill import make_windows, mla_prefill
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided

TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
CPU = torch.device("cpu")


@dataclass
class Problem:
    """Chunks of (rows, context) each, rows of latents in scattered blocks among NaN."""

    chunks: tuple
    num_heads: int = 2
    nope: int = 32
    turned: int = 16
    values: int = 16
    latent: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    index_dtype: torch.dtype = torch.int64
    scale: float = 0.31

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.guards, row_len = Guards(), self.latent + self.turned
        num_blocks = max(1, -(-max(context for _, context in self.chunks) // self.block_size))
        total = num_blocks * len(self.chunks) + 1
        self.rows = self.guards.empty(total, self.block_size, row_len, dtype=self.dtype)
        tables = torch.randperm(total - 1, generator=generator).view(len(self.chunks), num_blocks)
        for sequence, (_, context) in enumerate(self.chunks):
            position = torch.arange(context)
            block = tables[sequence, position // self.block_size]
            self.rows[block, position % self.block_size] = draw(context, row_len)
            tables[sequence, -(-context // self.block_size) :] = total - 1
        self.tables = self.guards.copy(tables.to(self.index_dtype))
        num_rows = sum(rows for rows, _ in self.chunks)
        self.query = self.guards.copy(draw(num_rows, self.num_heads, self.nope + self.turned))
        expand = draw(self.num_heads, self.nope + self.values, self.latent) / self.latent**0.5
        self.expand = self.guards.copy(expand)

    @property
    def lens(self):
        return [rows for rows, _ in self.chunks], [context for _, context in self.chunks]

    @property
    def position_bytes(self):
        """Of one position's keys and values."""
        return self.num_heads * (self.nope + self.values) * self.dtype.itemsize

    def wanted(self):
        key, value = self.expand.double().split([self.nope, self.values], dim=1)
        return attend_expanded(self.query.double(), self.rows.double(), key, value, self.tables, *self.lens, self.scale)

    def run(self, *, most=None, implementation=Implementation.TRITON, **others):
        """`most`: positions of a window."""
        if most is not None:
            others["max_expanded_bytes"] = most * self.position_bytes
        return mla_prefill(
            self.query, self.rows, self.expand, self.tables, *self.lens, nope_dim=self.nope, softmax_scale=self.scale,
            implementation=implementation, **others,
        )  # fmt: skip

    def check(self, out):
        assert relative_error(out, self.wanted()) < TOLERANCES[self.dtype]
        assert out.dtype == self.dtype
        self.guards.check()


MIXED = ((20, 20), (7, 75), (1, 33), (70, 90))


@pytest.mark.long
@pytest.mark.parametrize("chunks", [((75, 75),), ((1, 1),), ((65, 200),), MIXED], ids=str)
def test_chunks_with_and_without_prefixes(chunks):
    problem = Problem(chunks)
    problem.check(problem.run())


@pytest.mark.long
@pytest.mark.parametrize("most", [5, 16, 30, 75, 100, 218])
def test_windows_of_any_length_give_what_one_gives(most):
    """A window may end within a prefix, within a chunk, between sequences, and before any row sees anything of it."""
    problem = Problem(MIXED, num_heads=1)
    found = problem.run(most=most)
    problem.check(found)
    assert relative_error(found, problem.run()) < 3e-3


def test_heads_that_are_served():
    problem = Problem(((40, 100), (3, 3)), 2, 128, 64, 128, 512)
    problem.check(problem.run())


@pytest.mark.parametrize("seed", range(12))
def test_drawn_shapes(seed):
    draw = random.Random(seed)
    chunks = []
    for _ in range(draw.randint(1, 3)):
        rows = draw.choice([1, 2, 17, 64, 65, 140])
        chunks.append((rows, rows + draw.choice([0, 0, 1, 63, 100])))
    problem = Problem(
        tuple(chunks), draw.choice([1, 2, 3]), draw.choice([16, 32, 64]), draw.choice([16, 32]),
        draw.choice([16, 32, 64]), draw.choice([16, 64, 128]), draw.choice([16, 32, 64]),
        draw.choice([torch.bfloat16, torch.float16]), seed, draw.choice([torch.int32, torch.int64]),
        draw.choice([0.05, 0.3, 1.0]),
    )  # fmt: skip
    problem.check(problem.run(most=draw.choice([None, 40, 100])))


@pytest.mark.fast
@pytest.mark.long
def test_sequences_without_rows_are_not_read():
    problem = Problem(((20, 20), (7, 75)))
    wanted = problem.run()
    lens = problem.lens
    problem.tables = torch.cat([problem.tables[:1], torch.full_like(problem.tables[:1], 1 << 20), problem.tables[1:]])
    found = mla_prefill(
        problem.query, problem.rows, problem.expand, problem.tables, [lens[0][0], 0, lens[0][1]],
        [lens[1][0], 60, lens[1][1]], nope_dim=32, softmax_scale=problem.scale, implementation=Implementation.TRITON,
    )  # fmt: skip
    assert same_bits(found, wanted)


@pytest.mark.long
def test_queries_tables_and_blocks_that_lie_apart():
    problem = Problem(MIXED)
    plain = problem.run()
    problem.query, problem.tables, problem.rows = map(strided, (problem.query, problem.tables, problem.rows))
    assert same_bits(problem.run(), plain)


@pytest.mark.long
def test_two_runs_agree_and_write_no_input():
    problem = Problem(MIXED)
    for most in (None, 40):
        assert_deterministic(
            lambda most=most: problem.run(most=most), problem.query, problem.rows, problem.expand, problem.tables
        )


@pytest.mark.fast
def test_the_reference_is_what_float64_says():
    for dtype in TOLERANCES:
        problem = Problem(MIXED, 3, 6, 4, 10, 20, dtype=dtype)
        problem.rows[-1] = 0
        problem.check(problem.run(implementation=Implementation.REFERENCE))


@pytest.mark.long
def test_layers_of_a_pass_share_their_windows(monkeypatch):
    made = []
    monkeypatch.setattr(prefill, "make_windows", lambda *given: made.append(given) or make_windows(*given))
    problem, plans = Problem(MIXED), SplitKVPlans()
    first = problem.run(plans=plans)
    assert same_bits(problem.run(plans=plans), first)
    assert len(made) == 1
    problem.run(plans=SplitKVPlans())
    assert len(made) == 2


@pytest.mark.fast
def test_windows_cover_every_position_once():
    for most in (1, 7, 64, 1000):
        windows = make_windows((20, 0, 7), (20, 50, 75), most, CPU)
        assert sum(window.num_positions for window in windows) == 95
        seen = [0, 0, 0]
        for window in windows:
            numbers = window.numbers_6B.t().tolist()
            assert window.num_positions == sum(row[4] for row in numbers) <= most
            assert window.most_positions == max(row[4] for row in numbers)
            for sequence, (row_start, rows, key_start, first, count, context) in enumerate(numbers):
                assert (row_start, rows, context) == ((0, 20, 20), (20, 0, 0), (20, 7, 75))[sequence]
                if count:
                    assert first == seen[sequence]
                    assert 0 <= key_start <= window.num_positions - count
                    seen[sequence] += count
        assert seen == [20, 0, 75]


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [Implementation.TRITON, Implementation.REFERENCE])
def test_nothing_to_compute(implementation):
    problem = Problem(((0, 0),))
    assert problem.run(implementation=implementation).shape == (0, 2, 16)


BF16 = torch.bfloat16
BAD: dict = {
    "query_TAE": [
        {"query": torch.zeros(20, 48)},
        {"query": torch.zeros(20, 2, 48), "rows": torch.zeros(3, 16, 48), "expand": torch.zeros(2, 48, 32)},
        {"query": torch.zeros(20, 2, 96, dtype=BF16)[..., ::2]},
        {"query": torch.zeros(20, 2, 50, dtype=BF16)[..., :48]},
    ],
    "rows_KSX": [
        {"rows": torch.zeros(3, 16, 48)},
        {"rows": torch.zeros(3, 16, 64, dtype=BF16)},
        {"rows": torch.zeros(9, 8, 48, dtype=BF16), "tables": torch.zeros(1, 4).long()},
        {"rows": torch.zeros(3, 16, 40, dtype=BF16), "expand": torch.zeros(2, 48, 24, dtype=BF16)},
    ],
    "expand_AYC": [
        {"expand": torch.zeros(3, 48, 32, dtype=BF16)},
        {"expand": torch.zeros(2, 32, 48, dtype=BF16).transpose(1, 2)},
        {"expand": torch.zeros(2, 40, 32, dtype=BF16)},
    ],
    "nope_dim": [{"nope": 0}, {"nope": 48}],
    "block_tables_BM": [{"tables": torch.zeros(1, 2)}],
    "context_lens": [{"chunks": ((20, 10),)}, {"chunks": ((20, 50),)}],
    "query_lens": [{"chunks": ((19, 20),)}],
    "softmax_scale": [{"scale": 0.0}],
}


@pytest.mark.fast
@pytest.mark.parametrize(("argument", "changes"), [(name, change) for name in BAD for change in BAD[name]])
def test_what_does_not_fit_is_named(argument, changes):
    problem = Problem(((20, 20),))
    for name, value in changes.items():
        setattr(problem, name, value)
    with pytest.raises(KernelArgumentInvalid) as caught:
        problem.run()
    assert caught.value.fields["argument"] == argument


@dataclass
class Walks:
    """The form for Hopper cannot run here; which tiles its programs walk over is arithmetic, and that can."""

    monkeypatch: pytest.MonkeyPatch
    num_heads: int

    def __post_init__(self):
        self.program = 0, 0
        stub = SimpleNamespace(program_id=lambda axis: self.program[axis], minimum=min, maximum=max)
        device = prefill_warp_specialized_triton
        self.monkeypatch.setattr(device, "gl", stub)
        self.monkeypatch.setattr(device, "_number", lambda numbers, place, sequence, _: int(numbers[place, sequence]))
        self.find, self.find_walk = device._find.fn, device._find_walk.fn

    def of_all(self, numbers, num_tiles, together, rows, keys):
        """Of each program: sequence, head, first row, rows, keys in the window, keys before the chunk, tiles."""
        num_sequences = numbers.shape[1]
        for program in product(range(num_tiles * self.num_heads), range(num_sequences)):
            self.program = program
            sequence, head, first = self.find(num_tiles, together, rows)
            yield sequence, head, first, *self.find_walk(numbers, sequence, num_sequences, first, rows, keys)


@pytest.mark.fast
@pytest.mark.parametrize(("num_rows", "keys"), [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize(("most", "together"), [(1000, 1), (100, 2), (64, 6)])
def test_programs_on_hopper_walk_over_what_each_row_sees_once(monkeypatch, most, together, num_rows, keys):
    chunks, num_heads = ((130, 130), (0, 40), (70, 300), (1, 65)), 6
    query_lens, context_lens = zip(*chunks, strict=True)
    windows = make_windows(query_lens, context_lens, most, CPU)
    walks = Walks(monkeypatch, num_heads)
    num_tiles = -(-max(query_lens) // num_rows)
    seen = Counter()
    for window in windows:
        for sequence, head, first, rows, key_len, before, tiles in walks.of_all(
            window.numbers_6B, num_tiles, together, num_rows, keys
        ):
            assert tiles == 0 or (tiles - 1) * keys < key_len
            for row in range(first, min(first + num_rows, rows)):
                visible = max(0, min(before + row + 1, key_len))
                assert visible <= tiles * keys
                seen[sequence, head, row] += visible
    assert seen == {
        (sequence, head, row): context - rows + row + 1
        for sequence, (rows, context) in enumerate(chunks)
        for head in range(num_heads)
        for row in range(rows)
    }


@pytest.mark.fast
def test_programs_on_hopper_take_the_longest_walks_of_a_few_heads_first(monkeypatch):
    walks = Walks(monkeypatch, 16)
    found = []
    for program in range(4 * 16):
        walks.program = program, 3
        found.append(walks.find(4, 8, 128))
    assert {sequence for sequence, _, _ in found} == {3}
    assert [first for _, _, first in found[:32:8]] == [384, 256, 128, 0]
    assert {head for _, head, _ in found[:32]} == set(range(8))
    assert [head for _, head, _ in found[32:40]] == list(range(8, 16))


@pytest.mark.fast
def test_heads_that_are_under_way_together_fit_the_cache_and_divide_all():
    together = prefill_hopper_triton._heads_together
    assert [together(128, length * 640) for length in (64, 4096, 8192, 60_000, 1 << 20)] == [128, 8, 4, 1, 1]
    assert [together(heads, 1) for heads in (1, 3, 12, 16)] == [1, 1, 4, 16]


SERVED = {"num_heads": 2, "nope": 128, "turned": 64, "values": 128, "latent": 128}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sizes", "is_hopper", "fits"),
    [
        ({}, True, True),
        ({"dtype": torch.float16}, True, True),
        ({}, False, False),
        ({"nope": 64}, True, False),
        ({"turned": 32}, True, False),
        ({"values": 64}, True, False),
    ],
)
def test_the_form_for_hopper_is_for_hopper_and_for_heads_that_are_served(monkeypatch, sizes, is_hopper, fits):
    """Of one call, each window is taken by the same form."""
    monkeypatch.setattr(
        prefill_hopper_triton.attention_prefill_hopper_triton, "num_multiprocessors", lambda _: 132 * is_hopper
    )
    taken = []
    monkeypatch.setattr(prefill_hopper_triton, "launch", lambda *_, **given: taken.append((True, given)))
    monkeypatch.setattr(prefill_triton, "attend", lambda *_, **given: taken.append((False, given)))
    problem = Problem(((20, 50), (3, 4)), **{**SERVED, **sizes})
    problem.run(most=30)
    assert [on_hopper for on_hopper, _ in taken] == [fits, fits]
    assert [given["most_positions"] for _, given in taken] == [30, 20]
    assert all(given["max_query_len"] == 20 for _, given in taken)


@pytest.mark.fast
def test_the_form_for_hopper_is_for_no_cpu():
    problem = Problem(((3, 4),), **SERVED)
    assert not prefill_hopper_triton.fits(problem.query, problem.rows, prefill_hopper_triton.SIZES)


class Launched:
    """What `launch` of the form for Hopper asks of its kernel."""

    def __init__(self, monkeypatch, chunks, num_heads=16):
        monkeypatch.setattr(prefill_hopper_triton, "_launch_attend", self)
        query_lens, context_lens = zip(*chunks, strict=True)
        (window,) = make_windows(query_lens, context_lens, 1 << 20, CPU)
        nothing = torch.empty(1)
        total, num_rows = window.num_positions, sum(query_lens)
        query = torch.empty(num_rows, num_heads, 192, dtype=BF16)
        prefill_hopper_triton.launch(
            query, torch.empty(total, num_heads * 256, dtype=BF16), torch.empty(total, 576, dtype=BF16),
            window.numbers_6B, torch.empty(num_rows, num_heads, 128, dtype=BF16), (nothing, nothing),
            max_query_len=max(query_lens), most_positions=window.most_positions, turned_dim=64, scale=1.0,
        )  # fmt: skip

    def __call__(self, grid, arguments, constants):
        names = prefill_hopper_triton.mla_prefill_hopper_kernel.arg_names
        self.grid, self.options = grid, dict(constants.by_name)
        self.given = dict(zip(names, arguments, strict=False))


@pytest.mark.fast
def test_what_the_form_for_hopper_launches(monkeypatch):
    launched = Launched(monkeypatch, ((129, 600), (5, 100)))
    assert launched.grid == (2 * 16, 2)
    assert (launched.given["num_tiles"], launched.given["together"]) == (2, 16)
    assert (launched.given["query_stride"], launched.given["query_head_stride"]) == (16 * 192 // 16, 192 // 16)
    keys = launched.options["BN"]
    expanded, turned = launched.given["expanded"], launched.given["turned"]
    assert (expanded.shape, expanded.strides, expanded.block_shape) == ([700, 4096], [4096, 1], [keys, 64])
    assert (turned.shape, turned.strides, turned.block_shape) == ([700, 576], [576, 1], [keys, 64])
    assert [launched.options[name] for name in "NPVX"] == [128, 64, 128, 576]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("chunks", "groups"),
    [
        (((1, 8000),), 1),
        (((64, 8000), (1, 1)), 1),
        (((65, 8000), (1, 1)), 2),
        (((512, 512), (400, 512)), 1),
        (((65, 200), (1, 513)), 2),
        (((600, 600),), 2),
    ],
)
def test_few_rows_or_positions_take_programs_of_one_warpgroup_on_hopper(monkeypatch, chunks, groups):
    launched = Launched(monkeypatch, chunks)
    assert (launched.options["GROUPS"], launched.options["BN"]) == (groups, 64 * groups)
    assert launched.grid == (-(-max(rows for rows, _ in chunks) // (64 * groups)) * 16, len(chunks))
    assert launched.options.get("maxnreg") == {1: 128, 2: None}[groups]
