"""Paged attention against softmax(q k) v written out, NaN in every slot that may not be read."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.kv.write import kv_write
from baton.kernels.ops import Ops

pytestmark = pytest.mark.fast
GROUPS = [(4, 4), (4, 2), (8, 2), (8, 1)]
HEAD_DIM = 16
LENGTHS = (100, 1, 64, 65)


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(query_TAD, key_CHD, value_CHD, first_position):
    """Row t stands at first_position + t."""
    group = query_TAD.shape[1] // key_CHD.shape[1]
    out = torch.empty_like(query_TAD)
    for row in range(query_TAD.shape[0]):
        end = first_position + row + 1
        for head in range(query_TAD.shape[1]):
            scores = key_CHD[:end, head // group] @ query_TAD[row, head] / query_TAD.shape[2] ** 0.5
            out[row, head] = scores.softmax(dim=0) @ value_CHD[:end, head // group]
    return out


class Sequences:
    """KV of LENGTHS positions in blocks that lie scattered among NaN."""

    def __init__(self, num_heads, num_kv_heads, block_size):
        self.kv = [values(2, length, num_kv_heads, HEAD_DIM, seed=s) for s, length in enumerate(LENGTHS)]
        self.query = [values(length, num_heads, HEAD_DIM, seed=9 + s) * 2 for s, length in enumerate(LENGTHS)]
        per_sequence = -(-max(LENGTHS) // block_size) + 1
        num_blocks = per_sequence * len(LENGTHS)
        self.key, self.value = torch.full(
            (2, num_blocks + 1, num_kv_heads, block_size, HEAD_DIM), float("nan"), dtype=torch.float64
        )
        self.table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).view(len(LENGTHS), -1)
        for sequence, length in enumerate(LENGTHS):
            position = torch.arange(length)
            slots = self.table[sequence, position // block_size] * block_size + position % block_size
            kv_write(*self.kv[sequence], slots, self.key, self.value)
        self.wanted = [naive(q, *kv, 0) for q, kv in zip(self.query, self.kv, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_prefill(num_heads, num_kv_heads, block_size, numerics):
    sequences = Sequences(num_heads, num_kv_heads, block_size)
    for query_lens in (LENGTHS, (1, 1, 1, 1), (37, 1, 20, 64)):
        query = torch.cat([q[-n:] for q, n in zip(sequences.query, query_lens, strict=True)])
        wanted = torch.cat([w[-n:] for w, n in zip(sequences.wanted, query_lens, strict=True)])
        args = (sequences.key, sequences.value, sequences.table, query_lens, LENGTHS)
        assert (Ops(numerics).attention_prefill(query, *args) - wanted).abs().max() < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_decode(num_heads, num_kv_heads, block_size, numerics):
    sequences = Sequences(num_heads, num_kv_heads, block_size)
    rows = {0: 100, 2: 64, 3: 65}
    for num_rows in range(1, 6):
        query = torch.stack([sequences.query[s][end - num_rows : end] for s, end in rows.items()])
        position = torch.stack([torch.arange(end - num_rows, end) for end in rows.values()])
        wanted = torch.stack([sequences.wanted[s][end - num_rows : end] for s, end in rows.items()])
        for bound in (100, 112):
            args = (sequences.key, sequences.value, sequences.table[list(rows)], position, bound)
            assert (Ops(numerics).attention_decode(query, *args) - wanted).abs().max() < 1e-12


def test_large_scores_do_not_overflow():
    sequences = Sequences(4, 2, 16)
    query = sequences.query[0] * 1e4
    wanted = naive(query, *sequences.kv[0], 0)
    for numerics in Numerics:
        args = (sequences.key, sequences.value, sequences.table[:1], (100,), (100,))
        assert (Ops(numerics).attention_prefill(query, *args) - wanted).abs().max() < 1e-9
