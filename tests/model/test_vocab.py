"""A vocabulary cut over ranks: what torch does with whole rows, with few numbers crossing."""

import pytest
import torch

from baton.model.vocab import WHOLE, CutVocab
from baton.tests.model.ranks import on_ranks
from baton.tests.model.together import part_of, together

pytestmark = pytest.mark.fast
SIZES = [(2, 2, 1), (2, 7, 1), (3, 7, 1), (4, 5, 1), (4, 96, 16), (8, 96, 16), (2, 1000, 16), (8, 1003, 16)]


def rows_with_ties(vocab_size, num_rows=40, seed=0):
    """Few different values; rows of one value, of -inf, with NaN, and with a single finite value."""
    generator = torch.Generator().manual_seed(seed)
    x_NV = torch.randint(0, 4, (num_rows, vocab_size), generator=generator).double()
    x_NV[1] = 2.5
    x_NV[2] = -torch.inf
    x_NV[3, vocab_size // 2] = torch.nan
    x_NV[4], x_NV[4, -1] = -torch.inf, -7.0
    x_NV[5, :-1] = x_NV[5, :-1].clamp(max=-1.0)
    x_NV[5, -1] = 0.0
    return x_NV


@pytest.mark.parametrize(("size", "vocab_size", "multiple"), SIZES)
def test_ranks_hold_every_token_once_in_order(size, vocab_size, multiple):
    parts = [CutVocab(vocab_size, rank, size, None, multiple) for rank in range(size)]
    ids = [token for part in parts for token in range(part.first, part.first + part.num_ids)]
    assert ids == list(range(vocab_size))
    assert len({part.width(vocab_size) for part in parts}) == 1
    assert parts[0].width(vocab_size) % multiple == 0
    head_VD = torch.randn(vocab_size, 3)
    rows = torch.cat([part.own_rows(head_VD) for part in parts])
    assert torch.equal(rows[:vocab_size], head_VD)
    assert not rows[vocab_size:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("size", "vocab_size", "multiple"), SIZES)
@pytest.mark.long
def test_what_is_chosen_among_ranks_is_what_torch_chooses(size, vocab_size, multiple, dtype):
    x_NV = rows_with_ties(vocab_size).to(dtype)
    ids_NK = torch.randint(0, vocab_size, (len(x_NV), 3), generator=torch.Generator().manual_seed(1))

    def work(vocab):
        x_NW = part_of(x_NV, vocab)
        best = vocab.best(x_NW)
        return *best, vocab.argmax(x_NW), vocab.amax(x_NW), vocab.values_at(x_NW, ids_NK), vocab.gather(x_NW)

    wanted = (*WHOLE.best(x_NV), x_NV.argmax(-1), x_NV.amax(-1, keepdim=True), x_NV.gather(1, ids_NK), x_NV)
    results, meeting = together(size, vocab_size, work, multiple)
    for result in results:
        for got, value in zip(result, wanted, strict=True):
            assert got.dtype == value.dtype
            assert torch.equal(got.nan_to_num(nan=99.0), value.nan_to_num(nan=99.0))
    assert meeting.num_operations == [5] * size


def test_an_argmax_is_one_small_operation():
    x_NV = torch.randn(6, 4, 1000)
    results, meeting = together(4, 1000, lambda vocab: vocab.argmax(part_of(x_NV, vocab)))
    assert torch.equal(results[0], x_NV.argmax(-1))
    assert meeting.num_operations == [1] * 4
    assert meeting.num_bytes == [6 * 4 * 2 * 8] * 4


def test_the_lowest_of_equals_wins_wherever_they_are():
    """Every pair of equal largest values, of a vocabulary that is no multiple of the ranks."""
    pairs = [(low, high) for low in range(10) for high in range(low + 1, 10)]
    x_NV = torch.zeros(len(pairs), 10)
    for row, (low, high) in enumerate(pairs):
        x_NV[row, [low, high]] = 1.0
    for size in (2, 3, 4, 8):
        results, _ = together(size, 10, lambda vocab: vocab.argmax(part_of(x_NV, vocab)).tolist())
        assert results == [[low for low, _ in pairs]] * size


def test_ids_of_other_ranks_share_one_column():
    def work(vocab):
        table = torch.zeros(vocab.table_width(vocab.width(7)))
        table.scatter_add_(0, vocab.columns(torch.tensor([0, 6, 6, 3])), torch.ones(4))
        return table.tolist()

    results, _ = together(3, 7, work)
    assert results == [[1, 0, 0, 3], [1, 0, 0, 3], [2, 0, 0, 2]]
    assert torch.equal(WHOLE.columns(torch.tensor([5])), torch.tensor([5]))


def test_sums_are_the_same_bits_at_every_rank():
    parts = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results, _ = together(4, 4, lambda vocab: vocab.add(parts[vocab.rank]))
    for result in results:
        assert torch.equal(result, (parts[0] + parts[1]) + (parts[2] + parts[3]))


def test_over_a_real_group():
    x_NV = rows_with_ties(50)

    def work(group):
        vocab = CutVocab(50, group.rank, group.size, group.all_gather)
        before = group.num_operations
        ids = vocab.argmax(part_of(x_NV, vocab))
        empty = group.all_gather(torch.empty(0, 2))
        return ids.tolist(), empty.shape, group.num_operations - before

    for ids, empty, num_operations in on_ranks(3, work):
        assert ids == x_NV.argmax(-1).tolist()
        assert empty == (3, 0, 2)
        assert num_operations == 1
