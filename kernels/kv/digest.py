"""A 64-bit digest of KV content that adds up: over frames, block sizes, head ranges and ranks, in any order.

Content is seen as rows (one position of one head and part of a layer) of 8-byte little-endian words. The digest of a
set of words is the sum, modulo 2**64, of `(word + 1) * weight` over them; the `+ 1` keeps zeros from being weightless.
`weight` is the product of four odd numbers: of the layer, of position // 64, of position % 64, and of (head, part, word
in its row). So the sum over a whole block is one dot product with a table, any single change shows, and a swap of two
words, positions, heads, parts or layers shows for all but a vanishing share of content. It guards against mistakes and
broken hardware, not against an attacker who wants a collision.

This is the definition and the form for memory on the CPU (NumPy: the KV receiver process has no torch). `kv_digest` and
`kv_scatter` hold the forms for devices. It refuses to know about pools or frames.

Shapes: H heads, P parts, S positions of a block, W words of a row.
"""

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
PERIOD = 64  # positions after which the table of low weights repeats
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SALT_LAYER, _SALT_HIGH, _SALT_LOW, _SALT_WORD = 1 << 60, 2 << 60, 3 << 60, 4 << 60

Words = npt.NDArray[np.uint64]


def weight(index: int) -> int:
    """An odd number out of `index`: splitmix64 with the last bit set."""
    value = (index * _GOLDEN + _GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & MASK
    return (value ^ (value >> 31)) | 1


def layer_weight(layer: int) -> int:
    """Weight of a layer."""
    return weight(_SALT_LAYER + layer)


def high_weight(position: int) -> int:
    """Weight of the stretch of PERIOD positions that a logical position is in."""
    return weight(_SALT_HIGH + position // PERIOD)


def low_weight(position: int) -> int:
    """Weight of a logical position in its stretch."""
    return weight(_SALT_LOW + position % PERIOD)


def word_weight(head: int, part: int, word: int) -> int:
    """Weight of a word of a row; head is that of the whole model."""
    return weight(_SALT_WORD + (head << 32) + (part << 24) + word)


class WordWeights:
    """The weights of one layer shape, for blocks of one size; tables are made when first needed.

    Args:
        head_first: first head held.
        num_heads: held.
        num_parts: of each head.
        num_words: of a row.
        rows_per_block: divides PERIOD.
    """

    def __init__(self, head_first: int, num_heads: int, num_parts: int, num_words: int, rows_per_block: int) -> None:
        assert PERIOD % rows_per_block == 0
        self._rows = rows_per_block
        head_H11 = np.arange(head_first, head_first + num_heads, dtype=np.uint64)[:, None, None] << np.uint64(32)
        part_P1 = np.arange(num_parts, dtype=np.uint64)[:, None] << np.uint64(24)
        self._word_HPW = _weights(np.uint64(_SALT_WORD) + head_H11 + part_P1 + np.arange(num_words, dtype=np.uint64))
        self._low_P = _weights(np.uint64(_SALT_LOW) + np.arange(PERIOD, dtype=np.uint64))
        self._tables: dict[int, Words] = {}
        self._flat: dict[tuple[int, int, int], tuple[Words, int]] = {}  # a table's heads as one row, and their sum
        self._highs: dict[int, int] = {}

    def of_block(self, words: Words, first_position: int, head: int, num_heads: int) -> int:
        """Digest, without the layer's weight, of whole blocks' worth of rows.

        Args:
            words: [num_heads * P * S * W], contiguous: some heads of one block.
            first_position: of the block.
            head: first of them, counted from the first held.
            num_heads: how many.
        """
        key = (first_position % PERIOD, head, num_heads)
        flat = self._flat.get(key)
        if flat is None:
            table_HPSW = self._table(first_position)[head : head + num_heads]
            flat = self._flat[key] = (table_HPSW.reshape(-1), int(table_HPSW.sum(dtype=np.uint64)))
        table, base = flat
        return (int(np.dot(words, table)) + base) * self._high(first_position)

    def of_rows(self, words_HPSW: Words, first_position: int, head: int) -> int:
        """The same for some rows of a block; where in it they lie, `first_position` says."""
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
        """[H, P, S, W] for blocks that begin like the one with this position."""
        block = position % PERIOD // self._rows
        found = self._tables.get(block)
        if found is None:
            low_S = self._low_P[block * self._rows : (block + 1) * self._rows]
            found = self._tables[block] = self._word_HPW[:, :, None, :] * low_S[:, None]
        return found


def _weights(index: Words) -> Words:
    """`weight` of every index."""
    value = index * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    found: Words = (value ^ (value >> np.uint64(31))) | np.uint64(1)
    return found
