"""Which positions of which layers, for which heads, are there. Both sides keep one for each transfer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.kvcache.layout import Range


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Positions of one layer that at least one head lacks."""

    layer: int
    first: int
    count: int


class Coverage:
    """A bitmap of positions for each layer and head; Python integers hold the bits.

    Args:
        spans: positions of each layer; there may be none.
        num_heads: heads of each layer.
    """

    def __init__(self, spans: Sequence[Range], num_heads: Sequence[int]) -> None:
        self._full = [_mask(span.first, span.count) for span in spans]
        self._bits = [[0] * count for count in num_heads]

    def overlaps(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> bool:
        """Whether any of these is already there."""
        mask = _mask(first, count)
        return any(bits & mask for bits in self._bits[layer][head_first : head_first + head_count])

    def add(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> None:
        """Note that these are there."""
        mask = _mask(first, count)
        heads = self._bits[layer]
        for head in range(head_first, head_first + head_count):
            heads[head] |= mask

    def is_layer_complete(self, layer: int) -> bool:
        """Whether every position is there for every head."""
        full = self._full[layer]
        return all(bits == full for bits in self._bits[layer])

    def is_complete(self) -> bool:
        """Whether every layer is."""
        return all(self.is_layer_complete(layer) for layer in range(len(self._bits)))

    def remove(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> None:
        """Forget that these are there."""
        kept, heads = ~_mask(first, count), self._bits[layer]
        for head in range(head_first, head_first + head_count):
            heads[head] &= kept

    def layer_gaps(self, layer: int, head_first: int, head_count: int) -> Iterator[LayerRange]:
        """What is missing of a layer for these heads, in order, as long ranges as possible."""
        missing = 0
        for bits in self._bits[layer][head_first : head_first + head_count]:
            missing |= self._full[layer] & ~bits
        for first, count in _runs(missing):
            yield LayerRange(layer, first, count)

    def gaps(self) -> Iterator[LayerRange]:
        """Everything that is missing."""
        for layer, heads in enumerate(self._bits):
            yield from self.layer_gaps(layer, 0, len(heads))

    def present(self, layer: int, first: int, count: int) -> Iterator[tuple[int, int]]:
        """What every head has of these positions, as (first, count)."""
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
