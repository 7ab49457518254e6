"""Attention that is divided by work: plans against their definition, results against softmax(q k) v in float64."""

import itertools
import random

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention import decode_plan as attention_split_kv
from baton.kernels.attention import prefill as attention_prefill
from baton.kernels.attention import prefill_plan
from baton.kernels.attention import short_chunks as attention_short_chunks
from baton.kernels.attention import split_kv_plan_triton as attention_split_kv_plan_triton
from baton.kernels.attention.decode_plan import SplitKVPlans, rows_of_program
from baton.kernels.attention.row_tile_plan_triton import ENTRY_LEN
from baton.kernels.attention.split_kv_plan_triton import PIECE_LEN, begins_at, most_pieces
from baton.kernels.implementation import Implementation
from baton.kernels.kv import dequantize as kv_dequantize
from baton.kernels.memo import Memo
from baton.tests.kernels.harness import Guards, assert_deterministic, relative_error, same_bits
from baton.tests.kernels.test_attention_decode import DIRECT, FLOAT8, MOVED_APART, PLAIN, SWAPPED, Problem
from baton.tests.kernels.test_attention_prefill import MIXED, Padded, Sequences

SHARES = PLAIN | {"tile": 16, "slots": 12, "shares": True}
SWAPPED_SHARES = SWAPPED | {"slots": 12, "shares": True}


def pieces_of(lens, starts, *, tile, num_shares, bound=1 << 20):
    """Each share's pieces as (sequence, first tile, end tile, length), having checked all else that a plan has."""
    wanted = attention_split_kv.Division(tile=tile, num_shares=num_shares, max_context_len=bound)
    plan = attention_split_kv.make_plan(lens, starts, wanted)
    num_sequences = lens.shape[0]
    most, begins_of_sequences = most_pieces(num_shares, num_sequences), begins_at(num_shares, num_sequences)
    begins = plan[: num_shares + 1].tolist()
    pieces = plan[num_shares + 1 : begins_of_sequences].view(most, PIECE_LEN).tolist()
    assert begins[0] == 0
    assert begins == sorted(begins)
    of_sequences = plan[begins_of_sequences:].tolist()
    assert len(of_sequences) == num_sequences + 1
    assert of_sequences[-1] == begins[-1]
    for sequence, (begin, end) in enumerate(itertools.pairwise(of_sequences)):
        assert {piece[0] for piece in pieces[begin:end]} <= {sequence}
    return [[tuple(piece) for piece in pieces[begin:end]] for begin, end in itertools.pairwise(begins)]


def check_division(lens, shares, tile, num_shares):
    """Every tile once and in order, and no share longer than an equal one, but for the last."""
    tiles = [-(-length // tile) for length in lens]
    each = max(1, -(-sum(tiles) // num_shares))
    assert len(shares) == num_shares
    line = [(sequence, index) for sequence, count in enumerate(tiles) for index in range(count)]
    for share, pieces in enumerate(shares):
        assert all(first < end and length == lens[sequence] for sequence, first, end, length in pieces)
        assert len({sequence for sequence, *_ in pieces}) == len(pieces)
        taken = [(sequence, index) for sequence, first, end, _ in pieces for index in range(first, end)]
        assert taken == line[share * each : (share + 1) * each]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_drawn_lengths(seed):
    draw = random.Random(seed)
    lens = [draw.choice((0, 1, 5, 64, 65, 700, 20_000)) for _ in range(draw.randint(1, 7))]
    num_queries, tile, num_shares = draw.randint(1, 4), draw.choice((16, 64)), draw.choice((1, 3, 33, 300))
    ends = torch.tensor(lens, dtype=draw.choice((torch.int32, torch.int64)))
    positions = ends[:, None] - num_queries + torch.arange(num_queries, dtype=ends.dtype)
    positions = torch.where(ends[:, None] == 0, -1, positions)
    positions = positions[:, torch.randperm(num_queries)]  # nothing is said about their order
    check_division(lens, pieces_of(positions, None, tile=tile, num_shares=num_shares), tile, num_shares)
    starts = torch.cat([torch.zeros(1), (ends > 0).cumsum(0) * 3]).to(ends.dtype)  # no rows, no length
    spoiled = torch.where(ends == 0, 10**6, ends)
    check_division(lens, pieces_of(spoiled, starts, tile=tile, num_shares=num_shares), tile, num_shares)


def test_a_plan_of_more_sequences_and_shares_than_are_looked_at_and_written_together(monkeypatch):
    monkeypatch.setattr(attention_split_kv_plan_triton, "_SEARCHED", 4)
    monkeypatch.setattr(attention_split_kv_plan_triton, "_WRITTEN", 8)
    lens = [5, 4000, *(17 * (index % 7) for index in range(9))]
    positions = torch.tensor(lens)[:, None] - 1
    check_division(lens, pieces_of(positions, None, tile=16, num_shares=50), 16, 50)


@pytest.mark.fast
def test_a_plan_keeps_to_the_bound_and_to_sequences_there_are():
    positions = torch.tensor([[10**12], [-(2**62)], [3]])
    found = pieces_of(positions, None, tile=16, num_shares=4, bound=100)
    check_division([100, 0, 4], found, 16, 4)


@pytest.mark.parametrize("options", [SHARES, SWAPPED_SHARES], ids=["plain", "swapped"])
@pytest.mark.parametrize("num_queries", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_of_ragged_sequences(num_queries, options):
    problem = Problem((150, 4, 64), num_queries)
    problem.check(problem.run(options))


def drawn(seed):
    """A batch of lengths that differ much, and a form of the launch."""
    draw = random.Random(seed)
    num_queries = draw.choice([1, 1, 2, 4, 8])
    count = draw.choice([1, 2, 4])
    lengths = tuple(max(num_queries, draw.choice((1, 9, 16, 33, 64, 150))) for _ in range(count))
    kv_dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, FLOAT8])
    num_kv_heads = draw.choice([1, 2])
    problem = Problem(
        lengths, num_queries, num_kv_heads * draw.choice([1, 2, 3]), num_kv_heads, draw.choice([16, 32, 64]),
        draw.choice([16, 32]), torch.bfloat16 if kv_dtype == FLOAT8 else kv_dtype, kv_dtype, seed,
        draw.choice([torch.int32, torch.int64]), draw.random() < 0.5,
    )  # fmt: skip
    options = {
        "tile": draw.choice([16, 32, 64]), "rows": draw.choice([16, 32]), "swap": draw.random() < 0.5, "stages": 3,
        "warps": 4, "slots": draw.choice([1, 7, 20, 60]), "shares": True,
    }  # fmt: skip
    if kv_dtype == FLOAT8 and problem.head_dim >= 32 and not options["swap"]:
        options["direct"] = draw.choice([0, 1, 2])
        options["apart"] = options["direct"] > 0 and options["tile"] >= 64
    return problem, options


@pytest.mark.parametrize("seed", range(6))
def test_drawn_ragged_batches(seed):
    problem, options = drawn(seed)
    problem.check(problem.run(options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 250))
def test_many_drawn_ragged_batches(seed):
    problem, options = drawn(seed)
    problem.check(problem.run(options))


@pytest.mark.parametrize(
    "options",
    [
        SHARES,
        pytest.param(DIRECT | SHARES, marks=pytest.mark.slow),
        pytest.param(MOVED_APART | {"slots": 12, "shares": True}, marks=pytest.mark.slow),
    ],
)
def test_one_huge_and_many_tiny(options):
    kv_dtype = FLOAT8 if "direct" in options else None
    problem = Problem((1, 2, 150, 1, 4), num_heads=2, num_kv_heads=1, kv_dtype=kv_dtype)
    out = assert_deterministic(
        lambda: problem.run(options), problem.query, problem.key, problem.value, problem.tables, problem.positions
    )
    problem.check(out)


def test_shares_that_span_sequences():
    """Fewer shares than sequences: each has several, and parts of others."""
    problem = Problem((150, 4, 64, 20), 1)
    for slots in (1, 2, 6):
        problem.check(problem.run(SHARES | {"slots": slots * problem.num_kv_heads}))


def test_sequences_that_see_nothing_are_zero_and_nobodys_business():
    problem = Problem((50, 20, 33, 20), 3, 2, 1)
    problem.positions[1] = -1
    problem.positions[2, 0] = -1
    problem.positions[3] = -(2**40)
    problem.tables[1] = 0
    out = problem.run(SHARES)
    assert not out[1].any()
    assert not out[3].any()
    assert not out[2, 0].any()
    assert relative_error(out, problem.wanted()) < 6e-3
    problem.positions[:] = -1
    assert not problem.run(SHARES).any()


def test_sequences_of_one_share_have_the_bits_of_one_part():
    problem = Problem((100, 90), 2, 2, 1)
    for options in (PLAIN, SWAPPED):
        divided = problem.run(options | {"slots": 2, "shares": True})
        assert same_bits(divided, problem.run(options))


def test_a_bound_beyond_the_table_changes_no_bit():
    problem = Problem((50, 20), 1, 2, 1)
    problem.check(problem.run(SHARES, bound=10_000))
    assert same_bits(problem.run(SHARES, bound=10_000), problem.run(SHARES))


def test_invariant_numerics_are_never_divided_by_work(monkeypatch):
    monkeypatch.setattr(attention_split_kv, "make_plan", None)
    problem = Problem((40, 20), 1, 1, 1)
    assert same_bits(problem.run(SHARES, invariant=True), problem.run(invariant=True))


def test_layers_of_a_pass_share_a_plan(monkeypatch):
    made = []
    make = attention_split_kv.make_plan
    monkeypatch.setattr(attention_split_kv, "make_plan", lambda *arguments: made.append(arguments) or make(*arguments))
    problem, plans = Problem((40,), 1, 1, 1), SplitKVPlans()
    first = problem.run(SHARES, plans=plans)
    assert same_bits(problem.run(SHARES, plans=plans), first)
    assert len(made) == 1
    problem.run(SHARES | {"slots": 2}, plans=plans)  # divided in another way
    assert len(made) == 2
    problem.positions = problem.positions.clone()  # of other sequences, perhaps
    assert same_bits(problem.run(SHARES, plans=plans), first)
    assert len(made) == 3
    assert same_bits(problem.run(SHARES), first)
    assert len(made) == 4


@pytest.fixture
def always_short(monkeypatch):
    """Short chunks whatever their context."""
    monkeypatch.setattr(attention_short_chunks, "_MIN_CONTEXT_LEN", 1)


def short(sequences):
    """The options of a division so fine that even these have several shares."""
    num_rows = (max(sequences.lens) + 1) * sequences.query.shape[1] // sequences.num_kv_heads
    return PLAIN | {"tile": 16, "rows": rows_of_program(num_rows), "slots": 20, "shares": True}


def attend(sequences, guards=None, num_tokens=None, index_dtype=torch.int32, plans=None):
    guards = guards or Guards()
    padded = Padded(sequences, guards, num_tokens or sum(sequences.lens), len(sequences.lens) + 2, index_dtype)
    return attention_short_chunks.attend(
        *padded.inputs(), max_query_len=max(sequences.lens) + 1, scale=sequences.query.shape[2] ** -0.5,
        key_scale=None, value_scale=None, plans=plans or SplitKVPlans(), options=short(sequences),
    )  # fmt: skip


def test_short_chunks_of_a_padded_batch():
    sequences, guards = Sequences([(1, 40), (0, 0), (2, 0), (5, 60), (0, 30)], heads=(2, 1)), Guards()
    found = attend(sequences, guards, 12, torch.int64)
    assert relative_error(found[: sum(sequences.lens)], sequences.wanted()) < 4e-3
    guards.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_dim", "chunks"),
    [
        ((4, 2), 16, MIXED),
        ((2, 1), 32, [(16, 300), (3, 2), (9, 100)]),
        ((7, 1), 16, [(20, 130), (0, 9), (1, 0)]),
        ((4, 4), 64, [(5, 200)]),
        ((8, 1), 128, [(9, 90), (2, 60)]),
    ],
)
def test_short_chunks_of_other_shapes(heads, head_dim, chunks):
    sequences = Sequences(chunks, heads=heads, head_dim=head_dim)
    found = attend(sequences)
    assert relative_error(found, sequences.wanted()) < 4e-3
    assert same_bits(attend(sequences), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_the_public_function_divides_short_chunks(always_short, monkeypatch, dtype):
    asked = []
    compute = attention_short_chunks.attend
    monkeypatch.setattr(
        attention_short_chunks, "attend", lambda *places, **others: asked.append(others) or compute(*places, **others)
    )
    sequences = Sequences([(3, 40), (2, 30)], heads=(2, 2), kv_dtype=dtype)
    scales = {}
    if dtype == FLOAT8:
        scales = {"key_scale": torch.tensor([0.5, 1.5]), "value_scale": torch.tensor([2.0, 0.25])}
    found = sequences.run(**scales)
    assert len(asked) == 1
    wanted = sequences.wanted(*(scale[:, None] for scale in scales.values()))
    assert relative_error(found, wanted) < 4e-3
    sequences.run(**scales, invariant=True)  # a row would depend on the batch
    sequences.run(
        **scales, options={"BM": 64, "BN": 64, "OVERLAP": False, "AHEAD": False, "num_warps": 4, "num_stages": 2}
    )
    if dtype == FLOAT8:
        sequences.run()  # without scales
        with pytest.raises(KernelArgumentInvalid, match="options"):
            sequences.run(options=short(sequences))
    assert len(asked) == 1


@pytest.mark.fast
@pytest.mark.parametrize(
    ("is_better", "lens", "bound", "heads"),
    [
        (True, [16] * 8, 8208, (32, 8, 128)),
        (True, [16] * 8, 8208, (16, 2, 256)),
        (True, [1], 4096, (32, 8, 128)),
        (True, [128], 32768, (32, 8, 128)),
        (False, [16] * 8, 512, (32, 8, 128)),  # nothing to divide
        (False, [128], 2048, (32, 8, 128)),
        (False, [16] * 32, 8208, (32, 8, 128)),  # enough tiles
        (False, [512], 32768, (32, 8, 128)),
        (False, [2048, 1], 32768, (32, 8, 128)),
    ],
)
def test_which_chunks_are_divided(is_better, lens, bound, heads):
    num_heads, num_kv_heads, head_dim = heads
    query = torch.empty(sum(lens), num_heads, head_dim, device="meta")
    key = torch.empty(1, num_kv_heads, 16, head_dim, device="meta")
    assert attention_short_chunks.is_better(query, key, len(lens), bound, max(lens)) == is_better


WARP_SPECIALIZED = {
    "GROUPS": 2,
    "BN": 128,
    "STAGES": 2,
    "TURNS": False,
    "PIN": False,
    "PERSISTENT": False,
    "slots": 132,
}


def test_what_is_chosen_for_hopper_divides_positions_there_alone(monkeypatch):
    sequences = Sequences([(3, 40), (2, 30)], heads=(2, 2))
    with pytest.raises(KernelArgumentInvalid, match="options"):  # no GPU
        sequences.run(options=WARP_SPECIALIZED)
    ruled, by_rule = [], attention_short_chunks._options
    with monkeypatch.context() as patch:  # by the loops of decode steps
        patch.setattr(attention_short_chunks, "is_better", lambda *_: True)
        patch.setattr(attention_short_chunks, "_options", lambda *those: ruled.append(those) or by_rule(*those))
        found = sequences.run()
    assert len(ruled) == 1
    assert relative_error(found, sequences.wanted()) < 4e-3
    asked = []
    hopper = attention_short_chunks.attention_prefill_hopper_triton
    monkeypatch.setattr(hopper, "fits", lambda *_: True)
    monkeypatch.setattr(hopper, "launch_divided", lambda *places, **others: asked.append((places, others)))
    monkeypatch.setattr(hopper, "launch", lambda *places, **others: asked.append((places, others)))
    chosen, choices = [], []
    monkeypatch.setattr(prefill_plan, "choose", lambda *those, **others: chosen.append((those, others)) or choices[-1])
    for choice in (WARP_SPECIALIZED, {key: value for key, value in WARP_SPECIALIZED.items() if key != "slots"}):
        choices.append(choice)
        monkeypatch.setattr(attention_prefill, "_FORMS", Memo())
        monkeypatch.setattr(attention_prefill, "_KINDS", Memo())
        sequences.run()
        sequences.run()  # as the layer before it
    assert [others["may_divide"] for _, others in chosen] == [True, True]
    assert {those[0] for those, _ in chosen} == {
        prefill_plan.Chunks(
            num_rows=5, num_sequences=2, longest=3, max_context_len=sequences.tables.shape[1] * 16,
            group=1, num_kv_heads=2, head_dim=16,
        )
    }  # fmt: skip
    (places, others) = asked[0]
    assert (others["max_query_len"], others["options"]) == (3, WARP_SPECIALIZED)
    assert len(places[-1]) == 66 * ENTRY_LEN  # programs of a KV head
    assert ["max_query_len" in others for _, others in asked] == [True, True, False, False]


def dequantized(sequences, scales, index_dtype=torch.int64):
    starts = torch.tensor([0, *torch.tensor(sequences.lens).cumsum(0).tolist()], dtype=index_dtype)
    contexts = torch.tensor(sequences.contexts, dtype=index_dtype)
    return kv_dequantize.dequantize_kv(
        sequences.key, sequences.value, sequences.tables.to(index_dtype), starts, contexts, *scales, torch.bfloat16
    )


@pytest.mark.fast
@pytest.mark.parametrize("num_scales", [0, 1, 2])
def test_kv_is_dequantized_in_blocks_of_its_own(num_scales):
    sequences = Sequences([(5, 90), (0, 40), (2, 30), (16, 0)], kv_dtype=FLOAT8)
    scales = (torch.tensor([0.5, 1.5])[:num_scales], torch.tensor([2.0, 0.25])[:num_scales])
    before = [tensor.clone() for tensor in (sequences.key, sequences.value, sequences.tables)]
    key, value, tables = dequantized(
        sequences, scales if num_scales else (None, None), (torch.int64, torch.int32)[num_scales % 2]
    )
    for tensor, kept in zip((sequences.key, sequences.value, sequences.tables), before, strict=True):
        assert same_bits(tensor, kept)
    assert tables.flatten().tolist() == list(range(tables.numel()))
    for sequence, (rows, kv) in enumerate(zip(sequences.lens, sequences.kv, strict=True)):
        for index, wide in enumerate((key, value)):
            found = wide[tables[sequence]].permute(0, 2, 1, 3).flatten(0, 1)[: kv.shape[1]]
            scale = scales[index][:, None] if num_scales else 1.0
            if rows:
                assert torch.equal(found, (kv[index].float() * scale).bfloat16())


def test_long_chunks_over_float8_are_computed_from_dequantized_kv(monkeypatch):
    monkeypatch.setattr(attention_prefill, "_FORMS", Memo())
    monkeypatch.setattr(attention_prefill, "_KINDS", Memo())
    monkeypatch.setattr(kv_dequantize, "MIN_QUERY_LEN", 1)
    monkeypatch.setattr(attention_prefill.attention_prefill_hopper_triton, "fits_size", lambda *_: True)
    asked = []
    dequantize = kv_dequantize.dequantize_kv
    monkeypatch.setattr(
        kv_dequantize, "dequantize_kv", lambda *arguments: asked.append(arguments) or dequantize(*arguments)
    )
    monkeypatch.setattr(attention_prefill.attention_prefill_hopper_triton, "fits", lambda *_: False)
    sequences = Sequences([(20, 70), (3, 0)], kv_dtype=FLOAT8)
    scales = {"key_scale": torch.tensor([0.5, 1.5]), "value_scale": torch.tensor([2.0, 0.25])}
    found = sequences.run(**scales)
    assert len(asked) == 1
    assert relative_error(found, sequences.wanted(*(scale[:, None] for scale in scales.values()))) < 6e-3
    assert relative_error(found, sequences.run(Implementation.REFERENCE, **scales)) < 1e-2
    monkeypatch.setattr(kv_dequantize, "MAX_BYTES", 1)
    monkeypatch.setattr(attention_prefill, "_FORMS", Memo())
    sequences.run(**scales)
    sequences.run(**scales, invariant=True)
    assert len(asked) == 1
    asked.clear()
    Sequences([(20, 70), (3, 0)]).run()  # nothing to widen
    assert not asked
