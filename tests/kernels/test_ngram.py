"""Drafts by prompt lookup: the kernel and the reference beside the rule, said token by token in Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.sampling import ngram_triton
from baton.kernels.sampling.ngram import ngram_drafts
from baton.tests.kernels.harness import assert_deterministic, poison

pytestmark = pytest.mark.fast
KINDS = [Implementation.TRITON, Implementation.REFERENCE]


def by_rule(tokens, num_drafts, shortest, longest):
    """The longest suffix that stood before, its latest place; what followed, over and over."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                followed = tokens[end:]
                return [followed[place % len(followed)] for place in range(num_drafts)]
    return [-1] * num_drafts


def laid_out(sequences, width):
    """Each in a slot of its own; behind its tokens lies what would agree with everything."""
    tokens_NL = torch.zeros(len(sequences) + 2, width, dtype=torch.int32)
    slots = list(range(len(sequences), 0, -1))
    for slot, tokens in zip(slots, sequences, strict=True):
        tokens_NL[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        tokens_NL[slot, len(tokens) :] = tokens[-1] if tokens else 0
    return tokens_NL, torch.tensor(slots), torch.tensor([len(tokens) for tokens in sequences])


def check(kind, sequences, num_drafts, shortest, longest, width=40):
    tokens_NL, slot_B, length_B = laid_out(sequences, width)
    found = ngram_drafts(
        tokens_NL, slot_B, length_B, num_drafts, min_match_len=shortest, max_match_len=longest, implementation=kind
    )
    assert found.dtype == torch.int64
    assert found.tolist() == [by_rule(tokens, num_drafts, shortest, longest) for tokens in sequences]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 3),
    st.integers(0, 3),
)  # fmt: skip
def test_drafts_are_what_followed_before(kind, sequences, num_drafts, shortest, more):
    check(kind, sequences, num_drafts, shortest, shortest + more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([], [-1] * 4),
        ([5], [-1] * 4),
        ([5, 5], [-1] * 4),  # one token agrees, two are asked
        ([5, 5, 5], [5] * 4),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest, then from its own beginning
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # three tokens agree there
        ([1, 2, 3, 4], [-1] * 4),
    ],
)
def test_which_place_wins(kind, tokens, drafts):
    assert by_rule(tokens, 4, 2, 3) == drafts
    check(kind, [tokens], 4, 2, 3, width=12)


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_and_whole_rows(kind):
    """More tokens than one turn of a program, and rows without a place to spare."""
    long = ngram_triton._PLACES + 77
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 50_000, (3, long), generator=generator)
    rows[0, -3:] = rows[0, 5:8]
    rows[1, -3:] = rows[1, long - 40 : long - 37]
    check(kind, rows.tolist(), 4, 3, 3, width=long)


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_past_the_row_counts_as_the_row(kind):
    """Steps planned ahead of a sequence's end know its length by bounds; behind the last row memory is another's."""
    rows = [[5, 6, 7, 8, 1, 2, 3, 9], [1, 2, 3, 9, 4, 1, 2, 3], [2, 2, 2, 2, 2, 2, 2, 2]]
    memory = torch.full((4 * 8,), 3, dtype=torch.int32)
    memory[:24] = torch.tensor(rows).flatten()
    for past in (0, 1, 5, 1 << 40):
        found = ngram_drafts(
            memory[:24].view(3, 8), torch.arange(3), torch.tensor([8 + past] * 3), 4,
            min_match_len=1, max_match_len=3, implementation=kind,
        )  # fmt: skip
        assert found.tolist() == [by_rule(row, 4, 1, 3) for row in rows], past


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_table_and_two_runs(kind):
    tokens_NL, slot_B, length_B = laid_out([[1, 2, 3, 1, 2], [4, 4, 4]], 8)
    numbers_BC = poison(torch.empty(2, 3, dtype=torch.int64))
    numbers_BC[:, 1] = length_B
    found = assert_deterministic(
        lambda: ngram_drafts(
            tokens_NL, slot_B, numbers_BC[:, 1], 2, min_match_len=1, max_match_len=4, implementation=kind
        ),
        tokens_NL, slot_B,
    )  # fmt: skip
    assert found.tolist() == [[3, 1], [4, 4]]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"tokens_NL": torch.zeros(2, 8, dtype=torch.int64)}, "tokens_NL"),
        ({"slot_B": torch.zeros(2)}, "slot_B"),
        ({"length_B": torch.zeros(3, dtype=torch.int64)}, "length_B"),
        ({"num_drafts": 0}, "num_drafts"),
        ({"min_match_len": 0}, "min_match_len"),
        ({"max_match_len": 17}, "max_match_len"),
        ({"min_match_len": 5}, "max_match_len"),
    ],
)
def test_what_does_not_fit_is_named(wrong, name):
    right = {"tokens_NL": torch.zeros(2, 8, dtype=torch.int32), "slot_B": torch.zeros(2, dtype=torch.int64)}
    right |= {"length_B": torch.ones(2, dtype=torch.int64), "num_drafts": 1, "min_match_len": 1, "max_match_len": 4}
    ngram_drafts(**right)
    with pytest.raises(KernelArgumentInvalid, match=f"^{name}:"):
        ngram_drafts(**right | wrong)
    nobody = torch.zeros(0, dtype=torch.int64)
    assert ngram_drafts(**right | {"slot_B": nobody, "length_B": nobody}).shape == (0, 1)
