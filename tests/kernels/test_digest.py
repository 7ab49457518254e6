"""The digest against a plain-integer reference, and the properties the hand-off relies on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels.kv.digest import (
    MASK,
    PERIOD,
    WordWeights,
    high_weight,
    layer_weight,
    low_weight,
    weight,
    word_weight,
)

pytestmark = pytest.mark.fast


def reference(words_HPSW, first_position, head_first):
    total = 0
    for (head, part, row, word), value in np.ndenumerate(words_HPSW):
        position = first_position + row
        weights = high_weight(position) * low_weight(position) * word_weight(head_first + head, part, word)
        total += (int(value) + 1) * weights
    return total & MASK


def random(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, shape, dtype=np.uint64)


@given(
    st.sampled_from([1, 2, 16, 64]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 9),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_it_is_what_the_definition_says(size, num_heads, num_parts, num_words, block, data):
    head_first = data.draw(st.integers(0, 5))
    weights = WordWeights(head_first, num_heads, num_parts, num_words, size)
    words_HPSW = random((num_heads, num_parts, size, num_words), data.draw(st.integers(0, 99)))
    head = data.draw(st.integers(0, num_heads - 1))
    count = data.draw(st.integers(1, num_heads - head))
    some = words_HPSW[head : head + count]
    expected = reference(some, block * size, head_first + head)
    assert weights.of_block(some.reshape(-1), block * size, head, count) & MASK == expected
    row = data.draw(st.integers(0, size - 1))
    rows = some[:, :, row : data.draw(st.integers(row + 1, size))]
    found = weights.of_rows(rows, block * size + row, head) & MASK
    assert found == reference(rows, block * size + row, head_first + head)


def of(words_HPSW, first_position=0, head_first=0):
    num_heads, num_parts, size, num_words = words_HPSW.shape
    weights = WordWeights(head_first, num_heads, num_parts, num_words, size)
    return weights.of_block(words_HPSW.reshape(-1), first_position, 0, num_heads) & MASK


def test_it_adds_up_over_block_sizes_and_head_ranges():
    words = random((4, 2, 64, 3))
    whole = of(words)
    assert sum(of(words[:, :, row : row + 16].copy(), row) for row in range(0, 64, 16)) & MASK == whole
    assert sum(of(words[head : head + 2].copy(), head_first=head) for head in (0, 2)) & MASK == whole


def test_every_single_bit_and_every_swap_shows():
    words = random((2, 2, 4, 3))
    clean = of(words)
    for bit in range(64):
        flipped = words.copy()
        flipped[1, 0, 2, 1] ^= np.uint64(1 << bit)
        assert of(flipped) != clean
    for axis in range(4):
        order = np.arange(words.shape[axis])
        order[[0, 1]] = order[[1, 0]]
        assert of(np.take(words, order, axis).copy()) != clean
    assert of(words, first_position=PERIOD) != clean
    assert of(words, first_position=4) != clean


def test_zeros_have_weight():
    zeros = np.zeros((2, 2, 16, 2), dtype=np.uint64)
    assert of(zeros) != 0
    assert of(zeros) != of(zeros, 16)


def test_weights_are_odd_and_different():
    values = [weight(index) for index in range(4096)]
    values += [layer_weight(0), low_weight(0), high_weight(0), word_weight(0, 0, 0)]
    assert all(value & 1 for value in values)
    assert len(set(values)) == len(values)
