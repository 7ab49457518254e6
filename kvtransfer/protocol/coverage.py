"""Tracks which positions of each layer and head have arrived. Each side keeps one `Coverage` per transfer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.kvcache.layout import Range


@dataclass(frozen=True, slots=True)
class LayerRange:
    """A range of positions of one layer that at least one head lacks."""

    layer: int
    first: int
    count: int


class Coverage:
    """A bitmap of positions for each layer and head, held in Python integers.

    Args:
        spans: the positions of each layer; a layer may have none.
        num_heads: the number of heads of each layer.
    """

    def __init__(self, spans: Sequence[Range], num_heads: Sequence[int]) -> None:
        self._full = [_mask(span.first, span.count) for span in spans]
        self._bits = [[0] * count for count in num_heads]

    def overlaps(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> bool:
        """Return whether any of these positions is already present for any of these heads."""
        mask = _mask(first, count)
        return any(bits & mask for bits in self._bits[layer][head_first : head_first + head_count])

    def add(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> None:
        """Mark these positions as present for these heads."""
        mask = _mask(first, count)
        heads = self._bits[layer]
        for head in range(head_first, head_first + head_count):
            heads[head] |= mask

    def is_layer_complete(self, layer: int) -> bool:
        """Return whether every position of a layer is present for every head."""
        full = self._full[layer]
        return all(bits == full for bits in self._bits[layer])

    def is_complete(self) -> bool:
        """Return whether every layer is complete."""
        return all(self.is_layer_complete(layer) for layer in range(len(self._bits)))

    def remove(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> None:
        """Mark these positions as missing for these heads."""
        kept, heads = ~_mask(first, count), self._bits[layer]
        for head in range(head_first, head_first + head_count):
            heads[head] &= kept

    def layer_gaps(self, layer: int, head_first: int, head_count: int) -> Iterator[LayerRange]:
        """Yield the ranges of a layer that any of these heads lacks, in order and as long as possible."""
        missing = 0
        for bits in self._bits[layer][head_first : head_first + head_count]:
            missing |= self._full[layer] & ~bits
        for first, count in _runs(missing):
            yield LayerRange(layer, first, count)

    def gaps(self) -> Iterator[LayerRange]:
        """Yield every missing range of every layer."""
        for layer, heads in enumerate(self._bits):
            yield from self.layer_gaps(layer, 0, len(heads))

    def present(self, layer: int, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges among these positions that every head has, as (first, count)."""
        bits = _mask(first, count)
        for head_bits in self._bits[layer]:
            bits &= head_bits
        return _runs(bits)


def _mask(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """Runs of set bits as (first, count)."""
    while bits:
        first = (bits & -bits).bit_length() - 1
        run = bits >> first
        count = (~run & (run + 1)).bit_length() - 1
        yield first, count
        bits &= ~(((1 << count) - 1) << first)
