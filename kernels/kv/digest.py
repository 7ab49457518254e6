"""A 64-bit digest of KV content that adds up over frames, block sizes, head ranges and ranks, in any order.

Content is read as rows (one position of one head and part of a layer) of 8-byte little-endian words. The digest of a
set of words is the sum, modulo 2**64, of `(word + 1) * weight` over them; the `+ 1` makes zeros count. `weight` is the
product of four odd numbers: of the layer, of position // 64, of position % 64, and of (head, part, word in its row). So
the sum over a whole block is one dot product with a table. Any single change is detected, and a swap of two words,
positions, heads, parts or layers for all but a vanishing share of content. The digest guards against mistakes and
broken hardware, not against an attacker who constructs a collision.

This module is the definition, and the implementation for memory on the CPU (NumPy, because the KV receiver process has
no torch). `kv_digest` and `kv_scatter` are the implementations for devices. It does not know pools or frames.

Shapes: H heads, P parts, S positions of a block, W words of a row.
"""

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
PERIOD = 64  # the table of low weights repeats after this many positions
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SALT_LAYER, _SALT_HIGH, _SALT_LOW, _SALT_WORD = 1 << 60, 2 << 60, 3 << 60, 4 << 60

Words = npt.NDArray[np.uint64]


def weight(index: int) -> int:
    """Hash `index` to an odd number: splitmix64 with the last bit set."""
    value = (index * _GOLDEN + _GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & MASK
    return (value ^ (value >> 31)) | 1


def layer_weight(layer: int) -> int:
    """Weight of a layer."""
    return weight(_SALT_LAYER + layer)


def high_weight(position: int) -> int:
    """Weight of the stretch of PERIOD positions that contains a logical position."""
    return weight(_SALT_HIGH + position // PERIOD)


def low_weight(position: int) -> int:
    """Weight of a logical position within its stretch."""
    return weight(_SALT_LOW + position % PERIOD)


def word_weight(head: int, part: int, word: int) -> int:
    """Weight of a word of a row; `head` counts over the whole model."""
    return weight(_SALT_WORD + (head << 32) + (part << 24) + word)


class WordWeights:
    """The weights of one layer shape, for blocks of one size; tables are made on first use.

    Args:
        head_first: number of the first head held.
        num_heads: number of heads held.
        num_parts: number of parts per head.
        num_words: number of words per row.
        rows_per_block: positions per block; divides PERIOD.
    """

    def __init__(self, head_first: int, num_heads: int, num_parts: int, num_words: int, rows_per_block: int) -> None:
        assert PERIOD % rows_per_block == 0
        self._rows = rows_per_block
        head_H11 = np.arange(head_first, head_first + num_heads, dtype=np.uint64)[:, None, None] << np.uint64(32)
        part_P1 = np.arange(num_parts, dtype=np.uint64)[:, None] << np.uint64(24)
        self._word_HPW = _weights(np.uint64(_SALT_WORD) + head_H11 + part_P1 + np.arange(num_words, dtype=np.uint64))
        self._low_P = _weights(np.uint64(_SALT_LOW) + np.arange(PERIOD, dtype=np.uint64))
        self._tables: dict[int, Words] = {}
        self._flat: dict[tuple[int, int, int], tuple[Words, int]] = {}  # flattened heads of a table, and their sum
        self._highs: dict[int, int] = {}

    def of_block(self, words: Words, first_position: int, head: int, num_heads: int) -> int:
        """Digest rows that fill a block, for some heads, without the layer's weight.

        Args:
            words: [num_heads * P * S * W], contiguous: some heads of one block.
            first_position: first position of the block.
            head: first of these heads, counted from the first held.
            num_heads: number of these heads.
        """
        key = (first_position % PERIOD, head, num_heads)
        flat = self._flat.get(key)
        if flat is None:
            table_HPSW = self._table(first_position)[head : head + num_heads]
            flat = self._flat[key] = (table_HPSW.reshape(-1), int(table_HPSW.sum(dtype=np.uint64)))
        table, base = flat
        return (int(np.dot(words, table)) + base) * self._high(first_position)

    def of_rows(self, words_HPSW: Words, first_position: int, head: int) -> int:
        """Digest some rows of a block likewise; `first_position` says where in the block they lie."""
        num_heads, _, num_rows, _ = words_HPSW.shape
        row = first_position % self._rows
        table_HPSW = self._table(first_position)[head : head + num_heads, :, row : row + num_rows]
        total = int((words_HPSW * table_HPSW).sum(dtype=np.uint64)) + int(table_HPSW.sum(dtype=np.uint64))
        return total * self._high(first_position)

    def _high(self, position: int) -> int:
        found = self._highs.get(position // PERIOD)
        if found is None:
            found = self._highs[position // PERIOD] = high_weight(position)
        return found

    def _table(self, position: int) -> Words:
        """Weights [H, P, S, W] for blocks at the same place in PERIOD as the block with this position."""
        block = position % PERIOD // self._rows
        found = self._tables.get(block)
        if found is None:
            low_S = self._low_P[block * self._rows : (block + 1) * self._rows]
            found = self._tables[block] = self._word_HPW[:, :, None, :] * low_S[:, None]
        return found


def _weights(index: Words) -> Words:
    """Compute `weight` of every index."""
    value = index * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    found: Words = (value ^ (value >> np.uint64(31))) | np.uint64(1)
    return found
