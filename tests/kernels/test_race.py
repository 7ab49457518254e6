"""The race of a row from bounds of noise: the winner is the reference's, though it was not nominated."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from baton.kernels.implementation import Implementation
from baton.kernels.sampling import race_triton, sample_triton
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.noise import Purpose, gumbel
from baton.kernels.sampling.race_triton import tokens_of_group
from baton.kernels.sampling.rows import DrawRows, EditedRows, Law
from baton.kernels.sampling.sample import sample
from baton.kernels.sampling.verify import verify
from baton.tests.kernels.sampling_cases import small_tiles  # noqa: F401

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
SLOW = pytest.mark.slow
CHUNK = 64


class Races:
    """Counts the chunks that are raced again."""

    def __init__(self, monkeypatch):
        self.count, race = 0, sample_triton._race_again

        def counted(*arguments, **named):
            self.count += 1
            return race(*arguments, **named)

        monkeypatch.setattr(sample_triton, "_race_again", counted)


def rows_of(seeds, temperature=1.0, **cut):
    count = len(seeds)
    return DrawRows(
        temperature_B=torch.full((count,), temperature, dtype=torch.float64),
        seed_B=torch.tensor(seeds),
        choice_B=torch.zeros(count, dtype=torch.int64),
        position_B=torch.full((count,), 7),
        **cut,
    )


def noise_of(seed, vocab_size, position=7):
    key = (torch.tensor([seed]), torch.tensor([0]), torch.tensor([position]))
    return gumbel(*key, Purpose.SAMPLE, vocab_size, torch.float32)[0]


def check(logits_BV, rows, edited=None):
    wanted_B = sample(logits_BV, rows, edited=edited, implementation=REFERENCE)
    assert sample(logits_BV, rows, edited=edited, implementation=TRITON).tolist() == wanted_B.tolist()


def scores_of(blocks, winner):
    """Scores of a token of some blocks of the second chunk; the winner's is a little above."""
    score_V = torch.full((3 * CHUNK + 5,), torch.nan)
    for block in blocks:
        score_V[CHUNK + 4 * block + block % 4] = 2.0 + (0.01 if block == winner else 0.0)
    return score_V


def by_score(score_V, seed=5, position=7):
    """Logits that have (nearly) these scores with this noise, -inf where there is none."""
    return torch.where(torch.isnan(score_V), -torch.inf, score_V - noise_of(seed, len(score_V), position))


@pytest.mark.parametrize(
    "blocks", [(1, 3, 5, 7, 9), pytest.param((0, 1, 8, 9, 14, 15), marks=SLOW), pytest.param((1, 2, 3), marks=SLOW)]
)
def test_any_block_of_a_chunk_may_win(monkeypatch, blocks):
    """Scores that differ by little, so that bounds say nothing of their order; every block wins once."""
    races = Races(monkeypatch)
    for winner in blocks:
        logits_1V = by_score(scores_of(blocks, winner))[None]
        rows = rows_of([5])
        assert int(sample(logits_1V, rows, implementation=REFERENCE)[0]) == CHUNK + 4 * winner + winner % 4
        check(logits_1V, rows)
    assert races.count > 0


@pytest.mark.parametrize("blocks", [(5, 6, 37, 300, 1023), pytest.param((64, 65, 66, 67, 96, 320, 576), marks=SLOW)])
def test_any_block_of_a_chunk_of_full_size_may_win(monkeypatch, blocks):
    """Groups of several lanes and turns, as kernels have them; blocks of one group and of others."""
    monkeypatch.setattr(sample_triton, "CHUNK", 4096)
    monkeypatch.setattr(sample_triton, "GROUP", 32)
    races = Races(monkeypatch)
    logits_BV, wanted = [], []
    for winner in blocks:
        score_V = torch.full((2 * 4096 + 300,), torch.nan)
        for block in blocks:
            score_V[4096 + 4 * block + block % 4] = 2.0 + (0.01 if block == winner else 0.0)
        logits_BV.append(by_score(score_V))
        wanted.append(4096 + 4 * winner + winner % 4)
    rows = rows_of([5] * len(blocks))
    assert sample(torch.stack(logits_BV), rows, implementation=TRITON).tolist() == wanted
    assert races.count > 0
    flat_BV = torch.randn(4, 4096 + 4000, generator=torch.Generator().manual_seed(9)).bfloat16()
    check(flat_BV, rows_of(range(4)))


@pytest.mark.fast
def test_groups_of_a_chunk_have_each_token_once():
    for chunk, num_tokens in ((4096, 512), (64, 8), (16, 4)):
        found = [_group_of(chunk, group) for group in range(chunk // num_tokens)]
        assert sorted(token for tokens in found for token in tokens) == list(range(3 * chunk, 4 * chunk))


@triton.jit
def _group_kernel(found, group, N: tl.constexpr):
    token_N = tokens_of_group(3, group, N)
    tl.store(found + tl.arange(0, token_N.shape[0]), token_N)


def _group_of(chunk, group):
    found = torch.full((max(4, chunk // 8),), -1, dtype=torch.int32)
    _group_kernel[(1,)](found, group, N=chunk)
    return found.tolist()


def test_a_winner_far_above_its_bounds_rivals_needs_no_second_race(monkeypatch):
    races = Races(monkeypatch)
    logits_BV = torch.randn(4, 3 * CHUNK, generator=torch.Generator().manual_seed(1)) * 20
    check(logits_BV, rows_of([1, 2, 3, 4]))
    assert races.count == 0


def test_scores_that_are_equal_go_to_the_lowest_id():
    """Logits so large that the noise is lost in rounding: all that are largest have the same score, to a bit."""
    logits_BV = torch.full((4, 4 * CHUNK + 3), -1.0)
    logits_BV[0, [9, 80, 84, 88, 92, 96, 250]] = 1.0
    logits_BV[1, 70::4] = 1.0
    logits_BV[2, 200:] = 1.0
    logits_BV[3, 258] = 1.0
    check(logits_BV, rows_of([1, 2, 3, 4], 1e-30))
    check(logits_BV, rows_of([1, 2, 3, 4], 1e-7))


@pytest.mark.parametrize(
    "temperature", [1.0, *(pytest.param(t, marks=SLOW) for t in (1e-40, 1e-30, 1e-4, 0.3, 1e4, 1e30))]
)
@pytest.mark.parametrize("kind", ["flat", *(pytest.param(kind, marks=SLOW) for kind in ("peaked", "chunk", "few"))])
def test_tokens_are_the_references_at_any_temperature(kind, temperature):
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(6, 3 * CHUNK - 7, generator=generator)
    if kind == "peaked":
        logits_BV *= 6
    elif kind == "chunk":
        logits_BV[:, CHUNK : 2 * CHUNK] += 12
    elif kind == "few":
        logits_BV[:, 3:] = -torch.inf
        logits_BV[4:, 1:] = -torch.inf
        logits_BV[5] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        check(logits_BV.to(dtype), rows_of(range(6), temperature))


@pytest.mark.parametrize("edited", [True, pytest.param(False, marks=SLOW)])
def test_masses_of_a_quarter_in_one_chunk(monkeypatch, edited):
    """Four blocks, or eight, with the same mass: half of the winners have rivals that their bounds do not rule out."""
    races = Races(monkeypatch)
    logits_BV = torch.full((24, 2 * CHUNK), -50.0)
    logits_BV[:12, [3, 17, 34, 58]] = 0.0
    logits_BV[12:, 2:64:8] = 0.0
    edits, given_BV = None, logits_BV
    if edited:
        edits = EditedRows(logits_EV=logits_BV[::2].clone(), place_R=torch.arange(24, dtype=torch.int32) // 2)
        edits.place_R[1::2] = -1
        given_BV = logits_BV.clone()
        given_BV[::2] = torch.randn(12, 2 * CHUNK)
    check(given_BV, rows_of(range(24)), edits)
    assert races.count < 12


@pytest.mark.parametrize("top_p", [pytest.param(p, marks=SLOW) for p in (0.1, 0.4, 0.7, 0.95)])
def test_the_first_of_a_cut_row_are_cut_away_in_one_chunk(top_p):
    """A crowd of unlikely tokens in one chunk, which lead the race as often as not."""
    generator = torch.Generator().manual_seed(int(top_p * 100))
    logits_BV = torch.randn(8, 4 * CHUNK, generator=generator) * 0.05
    logits_BV[:, CHUNK : 2 * CHUNK] -= 0.2
    logits_BV[4:, CHUNK + 5 : CHUNK + 20] += 0.5
    rows = rows_of(range(8), top_p_B=torch.full((8,), top_p, dtype=torch.float64))
    check(logits_BV, rows)


@pytest.mark.fast
def test_the_bound_of_a_word_is_no_less_than_its_noise():
    """In float64, as its docstring says, with the word's half left out."""
    count_N = np.unique(np.concatenate([np.geomspace(1, 2**32 - 1, 4001).astype(np.int64), [0, 2**32 - 2, 2**31]]))
    noise_N = -np.log(-np.log1p(-(count_N + 0.5) * 2.0**-32)) / np.log(2)
    with np.errstate(divide="ignore"):
        bound_N = 32 - np.log2(count_N.astype(np.float64))
    assert (bound_N >= noise_N - 1e-12).all()
    is_late_N = (count_N > 1000) & (count_N < 2**24)
    assert (bound_N - noise_N)[is_late_N].max() < 0.003


def test_what_the_scan_leaves_bounds_every_score():
    """The nominees, the others' bounds, and that no token of the row has a score above what is said of it."""
    vocab_size, seed = 3 * CHUNK - 10, 11
    logits_1V = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    scan = sample_triton.launch_scan(logits_1V[:, None], rows_of([seed]), None, None)
    words_M8X4 = scan.ids[0].view(3, 8, 4)
    score_V = (logits_1V[0] - logits_1V.max() + noise_of(seed, vocab_size)).double() / np.log(2)
    best_M = scan.values[0, :, 0]
    for chunk in range(3):
        for group in range(8):
            first, second, rest, again = words_M8X4[chunk, group].tolist()
            assert rest == again and first >= second >= rest
            nominated = {group * 2 + first % 2, group * 2 + second % 2}
            for place in (group * 2, group * 2 + 1):
                start = chunk * CHUNK + 4 * place
                word = max(w for w in (first, second) if group * 2 + w % 2 == place) if place in nominated else rest
                bound = np.int32(word | 1).view(np.float32) * 128 - 32 + float(best_M[chunk] - best_M.max()) / np.log(2)
                scores = score_V[start : min(start + 4, vocab_size)]
                assert not len(scores) or bound >= float(scores.max()) - 1e-4
    assert scan.ids.shape == (1, 3, race_triton.num_words(CHUNK))


def test_rows_of_drafts_are_raced_again_each_for_itself(monkeypatch):
    """The noise of each row is that of its own place, and the winner another block of the chunk in each."""
    races = Races(monkeypatch)
    logits_BQV = torch.stack(
        [by_score(scores_of((1, 3, 5, 7, 9), winner), 5, 7 + place) for place, winner in enumerate((7, 1, 9))]
    )[None].repeat(3, 1, 1)
    choices_1Q = CHUNK + 4 * torch.tensor([[7, 1, 9]]) + 1
    choices_1Q[0, 0] += 2  # the place of block 7's token
    drafts = DraftRows(
        ids_BK=choices_1Q[:, :2].repeat(3, 1),
        cap_B=torch.tensor([2, 1, 0]),
        law_B=torch.full((3,), Law.MATCH, dtype=torch.int32),
    )
    found = verify(logits_BQV, rows_of([5] * 3), drafts, implementation=TRITON)
    wanted_BQ = choices_1Q.repeat(3, 1).tril()[[2, 1, 0]]
    assert found.token_ids_BQ.tolist() == wanted_BQ.tolist()
    assert races.count > 0


@pytest.mark.parametrize(("law", "temperature"), [(Law.MATCH, 0.7), (Law.MATCH, 0.0), (Law.REJECT, 1.3)])
def test_pairs_of_bfloat16_leave_what_float32_does(monkeypatch, law, temperature):
    """To a bit, several chunks to a program and the last of them short; -inf among the logits, and rows without any."""
    monkeypatch.setattr(sample_triton, "PROGRAMS", 4)
    logits_BQV = torch.randn(3, 2, 5 * CHUNK - 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits_BQV[0, :, ::3] = -torch.inf
    logits_BQV[1, :, CHUNK : 2 * CHUNK] = -torch.inf
    logits_BQV[2, 1] = -torch.inf
    drafts = DraftRows(
        ids_BK=torch.zeros(3, 1, dtype=torch.int64),
        cap_B=torch.ones(3, dtype=torch.int64),
        law_B=torch.full((3,), law, dtype=torch.int32),
        by_chance=law is Law.REJECT,
    )
    pairs, others = (
        sample_triton.launch_scan(x_BQV, rows_of([5, 6, 7], temperature), drafts, None)
        for x_BQV in (logits_BQV, logits_BQV.float())
    )
    num_values, num_words = 1 + (law is Law.REJECT), 0 if law is Law.REJECT else 1 if temperature == 0 else None
    assert torch.equal(pairs.values[..., :num_values], others.values[..., :num_values])
    assert torch.equal(pairs.ids[..., :num_words], others.ids[..., :num_words])
