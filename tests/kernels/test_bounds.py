"""Where rows are cut and how they are shared: any number of programs a row, borders in the list and behind it."""

import pytest
import torch

from baton.kernels.implementation import Implementation
from baton.kernels.sampling import bounds_triton, logprobs_triton, sample_triton
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.logprobs import logprobs_topk
from baton.kernels.sampling.rows import DrawRows, EditedRows, Law
from baton.kernels.sampling.sample import sample
from baton.kernels.sampling.verify import verify
from baton.tests.kernels.harness import poison, same_bits
from baton.tests.kernels.sampling_cases import drawn_rows, small_tiles  # noqa: F401

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
SLOW = pytest.mark.slow
ALL_CHUNKS = 1  # programs that are worth starting: so one takes a whole row
EACH_CHUNK = 1 << 30


def cut_rows(temperatures, top_k=None, top_p=None, min_p=None, seed=0):
    count = len(temperatures)
    doubles = {"top_p_B": top_p, "min_p_B": min_p}
    given = {
        name: torch.tensor([value] * count if isinstance(value, float) else value, dtype=torch.float64)
        for name, value in doubles.items()
        if value is not None
    }
    if top_k is not None:
        given["top_k_B"] = torch.tensor([top_k] * count if isinstance(top_k, int) else top_k)
    return drawn_rows(torch.Generator().manual_seed(seed), temperatures, **given)


def bounds_of(logits_BV, rows):
    """Each row's bound and last token, which need not be the border's where a nominee settled the row."""
    bound_R = torch.empty(len(logits_BV))
    last_R = torch.empty(len(logits_BV), dtype=torch.int32)
    bounds_triton.launch(logits_BV[:, None], rows, None, None, bound_R, last_R)
    return bound_R, last_R


def border_of(logits_V, temperature, top_k=0, top_p=1.0):
    """The last token that stays by a sort, in float64 and whole numbers."""
    scaled_V = (logits_V.float() - logits_V.float().max()) / temperature
    order_V = scaled_V.sort(descending=True, stable=True).indices
    kept = len(order_V) if top_k <= 0 else top_k
    num_bits = 62 - (len(order_V) - 1).bit_length()
    mass_K = (scaled_V[order_V[:kept]].double().exp() * 2.0**num_bits).round().to(torch.int64).tolist()
    need, reached = top_p * sum(mass_K), 0
    for place, mass in enumerate(mass_K):
        reached += mass
        if reached >= need:
            kept = place + 1
            break
    last = int(order_V[kept - 1])
    return float(logits_V[last].float()), last


@pytest.mark.parametrize("vocab_size", [65, *(pytest.param(size, marks=SLOW) for size in (1, 37, 300))])
def test_what_a_program_takes_changes_no_bit(monkeypatch, vocab_size):
    """The scan's numbers, bounds, tokens and reports, of one program a row and of one a chunk."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_BV = torch.randn(3, vocab_size, generator=generator) * 4
    rows = cut_rows([1.0, 0.7, 0.0], top_k=[0, 5, 5], top_p=[0.9, 0.9, 1.0])
    found = []
    for programs in (ALL_CHUNKS, EACH_CHUNK):
        monkeypatch.setattr(sample_triton, "PROGRAMS", programs)
        scan = sample_triton.launch_scan(logits_BV[:, None], rows, None, None)
        reports = logprobs_topk(logits_BV, torch.zeros(3, dtype=torch.int64), 2, implementation=TRITON)
        tokens = sample(logits_BV, rows, implementation=TRITON)
        # Of a greedy row the second number of a chunk is nobody's.
        found.append((scan.values[:2], scan.maxima[:2], *bounds_of(logits_BV, rows), tokens, reports))
    assert sample_triton.span_of(3, 5) == 1
    for one, other in zip(*found, strict=True):
        assert same_bits(one, other)


@pytest.mark.fast
def test_a_program_takes_as_many_chunks_as_leave_enough_programs(monkeypatch):
    monkeypatch.setattr(sample_triton, "PROGRAMS", 100)
    assert [sample_triton.span_of(rows, 38) for rows in (1, 2, 10, 100, 1000)] == [1, 1, 3, 38, 38]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(7, 0.8), *(pytest.param(*cut, marks=SLOW) for cut in ((3, 1.0), (17, 1.0), (0, 0.3), (60, 1.0), (0, 0.97)))],
)
def test_the_border_is_a_sorts(top_k, top_p):
    """Of peaked rows, whose border is listed; k of 60 lies behind the list."""
    generator = torch.Generator().manual_seed(top_k)
    logits_BV = (torch.randn(2, 201, generator=generator) * 9).bfloat16()
    logits_BV[1] = (logits_BV[1] / 4).round() * 4
    rows = cut_rows([1.0, 1.5], top_k=top_k, top_p=top_p)
    bound_R, last_R = bounds_of(logits_BV, rows)
    for row, temperature in enumerate((1.0, 1.5)):
        wanted = border_of(logits_BV[row], temperature, top_k, top_p)
        assert (float(bound_R[row]), int(last_R[row])) == wanted


@pytest.mark.parametrize("where", ["chunk", "tile", "all"])
def test_equals_on_both_sides_of_a_chunk_are_counted_off_by_id(where):
    logits_1V = torch.full((1, 200), -1.0)
    if where == "all":
        logits_1V[:] = 2.5
    else:
        middle = 64 if where == "chunk" else 128
        logits_1V[0, middle - 3 : middle + 3] = 4.0
    bound_R, last_R = bounds_of(logits_1V, cut_rows([1.0], top_k=4))
    assert (float(bound_R), int(last_R)) == border_of(logits_1V[0], 1.0, 4)
    assert int(last_R) == {"chunk": 64, "tile": 128, "all": 3}[where]


@pytest.mark.parametrize(
    "cut", [{"top_k": 2}, pytest.param({"top_p": 0.9}, marks=SLOW), pytest.param({"min_p": 0.5}, marks=SLOW)]
)
def test_rows_of_nothing_but_minus_infinity_and_nearly_so(cut):
    logits_BV = torch.full((3, 90), -torch.inf)
    logits_BV[1, 70] = -3.0
    logits_BV[2, [5, 88]] = 1.0
    rows = cut_rows([1.0] * 3, **cut)
    found = sample(logits_BV, rows, implementation=TRITON).tolist()
    assert found[:2] == [0, 70]
    assert found[2] == int(sample(logits_BV, rows, implementation=REFERENCE)[2])


class Searches:
    """Counts the searches for a border behind the list."""

    def __init__(self, monkeypatch):
        self.count, search = 0, bounds_triton.behind_list

        def counted(*arguments, **named):
            self.count += 1
            return search(*arguments, **named)

        monkeypatch.setattr(bounds_triton, "behind_list", counted)


@pytest.mark.parametrize(
    ("top_p", "edited"), [(0.8, False), *(pytest.param(*cut, marks=SLOW) for cut in ((0.8, True), (0.95, False)))]
)
def test_flat_rows_are_settled_by_their_nominees(monkeypatch, top_p, edited):
    """As the reference, and without a search for the border, as nearly every row of a bigger vocabulary."""
    searches = Searches(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.randn(4, 250, generator=generator)
    rows = cut_rows([1.0, 2.0, 0.5, 1.0], top_p=top_p)
    edits = None
    if edited:
        place_R = torch.tensor([-1, 0, -1, 1]).int()
        edits = EditedRows(logits_EV=torch.randn(2, 250, generator=generator), place_R=place_R)
    wanted = sample(logits_BV, rows, edited=edits, implementation=REFERENCE)
    assert sample(logits_BV, rows, edited=edits, implementation=TRITON).tolist() == wanted.tolist()
    assert searches.count < len(logits_BV)


def test_a_row_whose_nominees_are_all_cut_off_is_searched(monkeypatch):
    """Two blocks of each chunk are nominated; few are of what stays, the first tokens of a row of equals."""
    searches = Searches(monkeypatch)
    logits_BV = torch.zeros(2, 300)
    rows = cut_rows([1.0] * 2, top_p=0.02, seed=3)
    wanted = sample(logits_BV, rows, implementation=REFERENCE).tolist()
    assert sample(logits_BV, rows, implementation=TRITON).tolist() == wanted
    assert searches.count > 0


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.2),
        *(pytest.param(*cut, marks=SLOW) for cut in ((0, 0.8, 0.05), (9, 0.9, 0.3), (50, 0.9, 0.01))),
    ],
)
def test_min_p_goes_first(top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(5)
    logits_BV = torch.randn(4, 220, generator=generator)
    logits_BV[3] = 0.5
    rows = cut_rows([1.0, 0.3, 2.0, 1.0], top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = sample(logits_BV, rows, implementation=REFERENCE)
    assert sample(logits_BV, rows, implementation=TRITON).tolist() == wanted.tolist()


def test_top_p_counts_nothing_that_min_p_cuts_where_the_list_ends_with_it():
    """Sixteen equals, which fill the list, and many more that min-p cuts: nine tenths of what stays are fifteen."""
    logits_BV = torch.full((12, 201), -5.0)
    logits_BV[:, 3:67:4] = 0.0  # each in a group of its own
    rows = cut_rows([1.0] * 12, top_p=0.9, min_p=0.05)
    found = sample(logits_BV, rows, implementation=TRITON)
    assert torch.equal(found, sample(logits_BV, rows, implementation=REFERENCE))


def test_few_tokens_that_a_grammar_leaves_are_all_listed():
    logits_1V = torch.full((1, 201), -torch.inf)
    logits_1V[0, [5, 70, 71, 150, 200]] = torch.tensor([1.0, 2.0, 0.5, 2.0, 1.5])
    for cut, last in (({"top_k": 20}, 71), ({"top_k": 2}, 150), ({"top_k": 20, "top_p": 0.6}, 150)):
        bound_R, last_R = bounds_of(logits_1V, cut_rows([1.0], **cut))
        assert (float(bound_R), int(last_R)) == (float(logits_1V[0, last]), last)


@pytest.mark.parametrize("scale", [8.0, pytest.param(1.0, marks=SLOW)])
def test_drafts_of_cut_rows_are_judged_as_by_the_reference(scale):
    """Every law, borders listed and behind the list; NaN in rows that nobody may read."""
    generator = torch.Generator().manual_seed(int(scale))
    logits_BQV = torch.randn(5, 3, 150, generator=generator) * scale
    ids_BK = logits_BQV.argmax(dim=-1)[:, :2].contiguous()
    ids_BK[1, 1] = -1
    rows = cut_rows([1.0, 1.0, 0.8, 1.0, 0.0], top_k=[0, 8, 0, 40, 3], top_p=[0.9, 0.9, 0.7, 1.0, 0.9])
    laws = [Law.REJECT, Law.BLOCK, Law.MATCH, Law.BLOCK, Law.REJECT]
    drafts = DraftRows(
        ids_BK=ids_BK,
        cap_B=torch.tensor([2, 2, 1, 2, 2]),
        law_B=torch.tensor(laws, dtype=torch.int32),
        by_chance=True,
        probs_NKC=torch.rand(5, 2, 150, generator=generator).softmax(dim=-1),
        probs_row_B=torch.tensor([-1, 1, -1, 3, -1], dtype=torch.int32),
    )
    poison(logits_BQV[1, 2])
    poison(logits_BQV[2, 2])
    wanted = verify(logits_BQV, rows, drafts, implementation=REFERENCE)
    found = verify(logits_BQV, rows, drafts, implementation=TRITON)
    assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
    assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()


def test_only_the_row_after_made_up_drafts_is_read():
    generator = torch.Generator().manual_seed(4)
    logits_BQV = torch.randn(3, 3, 70, generator=generator)
    rows = cut_rows([1.0, 0.0, 1.0], top_k=[0, 0, 5])
    drafts = DraftRows(
        ids_BK=torch.tensor([[4, 5], [6, 7], [8, -1]]),
        cap_B=torch.tensor([2, 2, 2]),
        law_B=torch.tensor([Law.FORCE, Law.SYNTHETIC, Law.SYNTHETIC], dtype=torch.int32),
        rates_K=torch.tensor([1.0, 0.0], dtype=torch.float64),
        forced_len=2,
    )
    for sequence, place in ((0, 0), (0, 1), (1, 0), (1, 2), (2, 0), (2, 2)):
        poison(logits_BQV[sequence, place])
    wanted = verify(logits_BQV, rows, drafts, implementation=REFERENCE)
    found = verify(logits_BQV, rows, drafts, implementation=TRITON)
    assert wanted.accepted_len_B.tolist() == found.accepted_len_B.tolist() == [2, 1, 1]
    assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()


@SLOW
def test_a_token_is_the_same_beside_rows_that_are_cut_otherwise():
    generator = torch.Generator().manual_seed(8)
    logits_BV = torch.randn(4, 180, generator=generator) * 2
    rows = cut_rows([1.0] * 4, top_k=[0, 4, 0, 0], top_p=[1.0, 0.9, 0.95, 0.4], min_p=[0.0, 0.0, 0.0, 0.2])
    whole = sample(logits_BV, rows, implementation=TRITON).tolist()
    for place in range(4):
        fields = {name: getattr(rows, name)[place : place + 1] for name in DrawRows.__dataclass_fields__}
        alone = sample(logits_BV[place : place + 1], DrawRows(**fields), implementation=TRITON)
        assert alone.tolist() == [whole[place]]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["equal", "infinite", "rounded", "drawn"])
def test_reports_of_many_equals_are_in_order_of_ids(monkeypatch, kind):
    for name, value in (("CHUNK", 64), ("GROUP", 4), ("REREAD", 8), ("LISTED", 16)):
        monkeypatch.setattr(logprobs_triton, name, value)
    logits_NV = torch.randn(2, 131, generator=torch.Generator().manual_seed(2))
    if kind == "equal":
        logits_NV[:] = 1.5
    elif kind == "infinite":
        logits_NV[:, 3:] = -torch.inf
    elif kind == "rounded":
        logits_NV = logits_NV.round()
    token_N = torch.tensor([0, 130])
    wanted_NX = logprobs_topk(logits_NV, token_N, 12, implementation=REFERENCE)
    found_NX = logprobs_topk(logits_NV, token_N, 12, implementation=TRITON)
    assert torch.equal(found_NX[:, 13:], wanted_NX[:, 13:])
    assert torch.allclose(found_NX, wanted_NX, atol=2e-6, rtol=1e-6)
