"""Paged prefill attention with lengths on the device, against softmax(q k) v written out in float64."""

import itertools
import random

import pytest
import torch

from baton.bench.kernel_cases.attention_prefill import cases, works
from baton.bench.kernel_cases.attention_prefill import tuning as tuning_points
from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention import prefill_triton as attention_prefill_triton
from baton.kernels.attention.prefill import attention_prefill, attention_prefill_lens
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits, strided

FP8 = torch.float8_e4m3fn
TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
PLAIN = {"BM": 64, "BN": 64, "OVERLAP": False, "AHEAD": False, "num_warps": 4, "num_stages": 2}
OVERLAPPED = {**PLAIN, "OVERLAP": True}
AHEAD = {**OVERLAPPED, "AHEAD": True}
FORMS = [PLAIN, OVERLAPPED]


def naive(query_TAD, key_CHD, value_CHD, first_position, scale):
    """Row t stands at first_position + t; float64."""
    group = query_TAD.shape[1] // key_CHD.shape[1]
    key_CAD, value_CAD = (x.double().repeat_interleave(group, dim=1) for x in (key_CHD, value_CHD))
    scores_ATC = torch.einsum("tad,cad->atc", query_TAD.double(), key_CAD) * scale
    position_T = first_position + torch.arange(query_TAD.shape[0])
    scores_ATC.masked_fill_(torch.arange(key_CHD.shape[0]) > position_T[:, None], float("-inf"))
    return torch.einsum("atc,cad->tad", scores_ATC.softmax(dim=-1), value_CAD)


class Sequences:
    """Chunks, and KV of their contexts in blocks that lie scattered among NaN."""

    def __init__(
        self, chunks, *, heads=(4, 2), head_dim=16, block_size=16, dtype=torch.bfloat16, kv_dtype=None, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        num_heads, self.num_kv_heads = heads
        kv_dtype = kv_dtype or dtype
        self.lens = [rows for rows, _ in chunks]
        self.contexts = [rows + prefix for rows, prefix in chunks]
        self.query = torch.randn(sum(self.lens), num_heads, head_dim, generator=generator).to(dtype)
        self.kv = [
            (torch.randn(2, context, self.num_kv_heads, head_dim, generator=generator) * 2).to(kv_dtype)
            for context in self.contexts
        ]
        self.place(block_size, generator)
        self.arguments = {}

    def place(self, block_size, generator):
        counts = [-(-context // block_size) for context in self.contexts]
        shape = (sum(counts) + 2, self.num_kv_heads, 2, block_size, self.kv[0].shape[-1])
        pool = torch.full(shape, float("nan")).to(self.kv[0].dtype)
        ids = iter(torch.randperm(sum(counts), generator=generator).tolist())
        unused = sum(counts)
        self.tables = torch.full((len(counts), max(counts)), unused)
        for sequence, (count, kv) in enumerate(zip(counts, self.kv, strict=True)):
            for index in range(count):
                block = self.tables[sequence, index] = next(ids)
                piece = kv[:, index * block_size : (index + 1) * block_size]
                pool[block, :, :, : piece.shape[1]] = piece.permute(2, 0, 1, 3)
        self.key, self.value = pool[:, :, 0], pool[:, :, 1]

    def run(self, implementation=TRITON, **arguments):
        return attention_prefill_lens(
            self.query, self.key, self.value, self.tables, self.lens, self.contexts,
            implementation=implementation, **arguments,
        )  # fmt: skip

    def wanted(self, key_scale=1.0, value_scale=1.0):
        scale = self.query.shape[2] ** -0.5
        pieces = zip(self.query.split(self.lens), self.kv, self.lens, self.contexts, strict=True)
        return torch.cat([
            naive(query, kv[0].double() * key_scale, kv[1].double() * value_scale, context - rows, scale)
            for query, kv, rows, context in pieces
        ])  # fmt: skip


MIXED = [(1, 40), (0, 0), (2, 0), (65, 63), (7, 121), (0, 30), (8, 64)]
SIZES = [(rows, prefix) for rows, prefix in zip((1, 2, 7, 8, 15, 16, 63, 64, 65, 128), itertools.cycle((0, 1, 77)))]


@pytest.mark.fast
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_reference_is_softmax_written_out(block_size, invariant):
    sequences = Sequences(MIXED, block_size=block_size, dtype=torch.float64)
    assert relative_error(sequences.run(REFERENCE, invariant=invariant), sequences.wanted()) < 1e-12


@pytest.mark.fast
def test_the_reference_scales_scores_and_stored_values():
    sequences = Sequences([(5, 9), (3, 0)], kv_dtype=FP8, dtype=torch.float32)
    scales = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    found = sequences.run(REFERENCE, key_scale=scales[0], value_scale=scales[1])
    assert relative_error(found, sequences.wanted(*(scale[:, None] for scale in scales))) < 1e-6


@pytest.mark.parametrize("options", FORMS)
def test_mixed_chunks(options):
    sequences = Sequences(MIXED)
    assert relative_error(sequences.run(options=options), sequences.wanted()) < 4e-3


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("heads", [(2, 1), (7, 1), (3, 3)])
def test_chunks_of_all_sizes(heads, options):
    sequences = Sequences(SIZES[:: 1 if heads[0] == 2 else 3], heads=heads)
    assert relative_error(sequences.run(options=options), sequences.wanted()) < 4e-3


@pytest.mark.parametrize("seed", range(4))
def test_drawn_shapes(seed):
    draw = random.Random(seed)
    chunks = [(draw.choice((0, 1, 3, 17, 40, 70)), draw.randrange(150)) for _ in range(draw.randrange(1, 5))] + [(4, 9)]
    sequences = Sequences(
        chunks,
        heads=draw.choice(((1, 1), (4, 2), (5, 1), (6, 2))),
        head_dim=draw.choice((16, 32, 64)),
        block_size=draw.choice((8, 16, 32, 64)),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        seed=seed,
    )
    options = {**draw.choice(FORMS), "BN": draw.choice((64, 128))}
    assert relative_error(sequences.run(options=options), sequences.wanted()) < 4e-3


@pytest.mark.parametrize("head_dim", [128, 256])
def test_large_heads_and_serving_options(head_dim):
    sequences = Sequences([(40, 100), (1, 3)], heads=(4, 1), head_dim=head_dim)
    assert relative_error(sequences.run(), sequences.wanted()) < 4e-3


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("num_scales", [1, 2])
def test_fp8_kv(num_scales, options):
    sequences = Sequences([(20, 70), (3, 0)], kv_dtype=FP8)
    scales = torch.tensor([0.5, 1.5])[:num_scales], torch.tensor([2.0, 0.25])[:num_scales]
    found = sequences.run(options=options, key_scale=scales[0], value_scale=scales[1])
    wanted = sequences.wanted(*(scale[:, None] for scale in scales))
    assert relative_error(found, wanted) < 4e-3
    assert relative_error(sequences.run(REFERENCE, key_scale=scales[0], value_scale=scales[1]), wanted) < 1e-2


def test_large_scores_do_not_overflow():
    sequences = Sequences([(70, 60)])
    sequences.query *= 1e4
    for options in FORMS:
        assert relative_error(sequences.run(options=options), sequences.wanted()) < 4e-3


class Padded:
    """A batch as a graph has it: more rows and sequences than there are, what is too many poisoned."""

    def __init__(self, sequences, guards, num_tokens, num_sequences, index_dtype=torch.int32):
        live = len(sequences.lens)
        total = sum(sequences.lens)
        query = torch.full((num_tokens, *sequences.query.shape[1:]), float("nan"), dtype=sequences.query.dtype)
        query[:total] = sequences.query
        self.query, self.total = guards.copy(query), total
        starts = [0, *itertools.accumulate(sequences.lens)] + [total] * (num_sequences - live)
        self.starts = guards.copy(torch.tensor(starts, dtype=index_dtype))
        contexts = sequences.contexts + [0] * (num_sequences - live)
        self.contexts = guards.copy(torch.tensor(contexts, dtype=index_dtype))
        tables = torch.full((num_sequences, sequences.tables.shape[1]), -1, dtype=index_dtype)
        tables[:live] = sequences.tables
        self.tables = guards.copy(tables)
        # In guarded memory of their own, not in one pool: the strides are still equal.
        self.key, self.value = guards.copy(sequences.key), guards.copy(sequences.value)

    def inputs(self):
        return self.query, self.key, self.value, self.tables, self.starts, self.contexts


@pytest.mark.parametrize(("index_dtype", "options"), [(torch.int32, OVERLAPPED), (torch.int64, PLAIN)])
def test_padding_is_neither_read_nor_written(index_dtype, options):
    sequences, guards = Sequences(MIXED), Guards()
    padded = Padded(sequences, guards, 120, 9, index_dtype)
    output = guards.empty(120, 4, 16)

    def compute():
        attention_prefill_triton.launch(
            *padded.inputs(), output, scale=0.25, key_scale=None, value_scale=None, options=options
        )
        return output.clone()

    found = assert_deterministic(compute, *padded.inputs())
    guards.check()
    assert found[padded.total :].isnan().all()
    assert same_bits(found[: padded.total], sequences.run(options=options))


def test_strided_inputs_give_the_same_bits():
    sequences = Sequences(MIXED)
    wanted = sequences.run(options=OVERLAPPED)
    sequences.query = strided(sequences.query)
    sequences.tables = strided(sequences.tables)
    assert same_bits(sequences.run(options=OVERLAPPED), wanted)


@pytest.mark.parametrize("options", FORMS)
def test_a_row_depends_neither_on_chunks_nor_on_the_batch(options):
    whole = Sequences([(150, 0)])
    wanted = whole.run(options=options, invariant=True)
    beside = Sequences([(30, 64)], seed=3)
    first = 0
    for rows in (1, 63, 20, 66):
        last = first + rows
        query = torch.cat([beside.query, whole.query[first:last]])
        key, value = (torch.cat(pair) for pair in ((beside.key, whole.key), (beside.value, whole.value)))
        tables = torch.zeros(2, 10, dtype=torch.int64)
        tables[0, : beside.tables.shape[1]] = beside.tables
        tables[1, : whole.tables.shape[1]] = whole.tables + len(beside.key)
        found = attention_prefill_lens(
            query, key, value, tables, [30, rows], [94, last], invariant=True, options=options, implementation=TRITON
        )
        assert same_bits(found[30:], wanted[first:last]), rows
        first = last


def test_reading_the_table_ahead_changes_no_bit():
    sequences = Sequences([(30, 400), (65, 64), (3, 20)], heads=(2, 1))
    assert same_bits(sequences.run(options=AHEAD), sequences.run(options=OVERLAPPED))


def test_blocks_may_lie_anywhere_and_be_of_any_size():
    sequences = Sequences([(30, 100), (3, 20)])
    wanted = sequences.run(options=OVERLAPPED)
    for block_size in (8, 32, 64):
        sequences.place(block_size, torch.Generator().manual_seed(block_size))
        assert same_bits(sequences.run(options=OVERLAPPED), wanted)


def test_invariant_numerics_have_one_configuration(monkeypatch):
    asked = []
    monkeypatch.setattr(attention_prefill_triton, "launch", lambda *_, options, **__: asked.append(options))
    for rows in (1, 200):
        Sequences([(rows, 0)], heads=(2, 1)).run(invariant=True)
        Sequences([(rows, 0)], heads=(2, 1)).run()
    assert asked[0] == asked[2]
    assert asked[1] != asked[3]


@pytest.mark.fast
def test_every_tile_of_the_grid_has_one_sequence():
    draw = random.Random(1)
    for _ in range(300):
        lens = [draw.choice((0, 1, 5, 63, 64, 65, 200)) for _ in range(draw.randrange(1, 9))]
        group, block_rows = draw.choice((1, 3, 4, 7)), draw.choice((64, 128))
        starts = [0, *itertools.accumulate(lens)]
        firsts = [start * group // block_rows + b for b, start in enumerate(starts)]
        bound = starts[-1] * group // block_rows + len(lens)
        assert firsts[-1] == bound
        for first, end, length in zip(firsts, firsts[1:], lens, strict=False):
            assert end - first >= -(-length * group // block_rows)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_nothing_to_do(implementation):
    empty = Sequences([(3, 5)])
    for lens in ([], [0, 0]):
        found = attention_prefill_lens(
            empty.query[:0], empty.key, empty.value, empty.tables[:0].expand(len(lens), -1) if not lens
            else empty.tables.expand(2, -1), lens, lens, implementation=implementation,
        )  # fmt: skip
        assert found.shape == (0, 4, 16)


BAD = {
    "query_TAD": [
        lambda a: a["query_TAD"][0],
        lambda a: a["query_TAD"].float(),
        lambda a: a["query_TAD"][:, :3],
        lambda a: a["query_TAD"].transpose(1, 2).contiguous().transpose(1, 2),
    ],
    "key_NHSD": [
        lambda a: a["key_NHSD"].half(),
        lambda a: a["key_NHSD"][..., :8],
        lambda a: a["key_NHSD"][0],
    ],
    "value_NHSD": [lambda a: a["value_NHSD"].contiguous(), lambda a: a["value_NHSD"][1:]],
    "block_tables_BM": [
        lambda a: a["block_tables_BM"].short(),
        lambda a: a["block_tables_BM"].t().contiguous().t(),
        lambda a: a["block_tables_BM"][:, :0],
        lambda a: a["block_tables_BM"][0, 0],
    ],
    "query_starts_E": [
        lambda a: a["query_starts_E"][1:],
        lambda a: a["query_starts_E"].float(),
        lambda a: a["query_starts_E"][0],
    ],
    "context_lens_B": [
        lambda a: a["context_lens_B"][1:],
        lambda a: a["context_lens_B"].bool(),
        lambda a: a["context_lens_B"][0],
    ],
    "max_query_len": [lambda a: -1],
    "scale": [lambda a: 0.0, lambda a: -1.0, lambda a: float("nan")],
    "key_scale": [lambda a: torch.ones(3), lambda a: torch.ones(2, dtype=torch.float64)],
    "value_scale": [lambda a: None, lambda a: torch.ones(1, 1)],
}


@pytest.mark.fast
@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named(name):
    sequences = Sequences([(3, 5), (2, 20)])
    good = {
        "query_TAD": sequences.query,
        "key_NHSD": sequences.key,
        "value_NHSD": sequences.value,
        "block_tables_BM": sequences.tables,
        "query_starts_E": torch.tensor([0, 3, 5]),
        "context_lens_B": torch.tensor([8, 22]),
        "max_query_len": 3,
        "key_scale": torch.ones(1),
        "value_scale": torch.ones(1),
    }
    for spoil in BAD[name]:
        with pytest.raises(KernelArgumentInvalid, match=f"^{name}: "):
            attention_prefill(**{**good, name: spoil(good)}, implementation=TRITON)


@pytest.mark.fast
def test_a_size_that_the_kernel_is_not_made_for_is_refused():
    for sizes in ({"block_size": 48}, {"block_size": 128}, {"head_dim": 24}):
        with pytest.raises(KernelArgumentInvalid, match=r"^(key_NHSD: has blocks|query_TAD: has head size)"):
            Sequences([(3, 5)], **sizes).run()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "lens", "contexts"),
    [
        ("query_lens", [3], [8]), ("context_lens", [3, 2], [8]), ("context_lens", [3, 2], [8, 1]),
        ("context_lens", [3, 2], [8, 33]),
    ],
)  # fmt: skip
def test_lengths_on_the_host_must_fit(name, lens, contexts):
    sequences = Sequences([(3, 5), (2, 20)])
    with pytest.raises(KernelArgumentInvalid, match=f"^{name}: "):
        attention_prefill_lens(sequences.query, sequences.key, sequences.value, sequences.tables, lens, contexts)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
@pytest.mark.parametrize("argument", ["query_TAD", "key_NHSD", "block_tables_BM"])
def test_tensors_of_no_dimension_are_named_where_lengths_are_on_the_host(argument, implementation):
    sequences = Sequences([(3, 5)])
    tensors = {"query_TAD": sequences.query, "key_NHSD": sequences.key, "value_NHSD": sequences.value}
    tensors |= {"block_tables_BM": sequences.tables}
    tensors[argument] = tensors[argument].flatten()[0]
    with pytest.raises(KernelArgumentInvalid, match=f"^{argument}: "):
        attention_prefill_lens(**tensors, query_lens=[3], context_lens=[8], implementation=implementation)


@pytest.mark.fast
@pytest.mark.parametrize("implementation", [TRITON, REFERENCE])
def test_a_table_of_one_column_may_come_from_anywhere(implementation):
    sequences = Sequences([(3, 5), (2, 9)])
    sequences.tables = sequences.tables.T.clone(
        memory_format=torch.contiguous_format
    ).T  # its only column's stride says nothing
    assert sequences.tables.stride() == (1, 2)
    assert relative_error(sequences.run(implementation), sequences.wanted()) < 4e-3


@pytest.mark.fast
@pytest.mark.parametrize("invariant", [False, True])
def test_the_reference_uses_no_entry_past_a_sequences_end(invariant):
    sequences = Sequences([(3, 14), (0, 0), (4, 60)])
    sequences.tables[0, 2:], sequences.tables[1] = -1, 1 << 40
    assert relative_error(sequences.run(REFERENCE, invariant=invariant), sequences.wanted()) < 4e-3


@pytest.mark.fast
def test_the_case_for_cpus_computes_the_same_in_every_system():
    tiny = [case for case in cases() if not case.only_gpu]
    systems = tiny[0].prepare(torch.device("cpu"), 1)
    wanted = systems["torch"][0]()
    for calls in systems.values():
        assert relative_error(calls[0](), wanted) < 1e-5


@pytest.mark.fast
def test_work_is_counted():
    work = works()[0]
    assert (str(work), work.num_tokens) == ("32/8/128 1 x 8192 causal", 8192)
    assert work.num_flops == 4 * 32 * 128 * (8192 * 8193 // 2)
    points = tuning_points()
    assert len({(point.shape, point.size) for point in points}) == len(points)
