"""Which positions of which layers, for which heads, are there. Both sides keep one for each transfer."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions of one layer that at least one head lacks."""

    layer: int
    first: int
    count: int


class Coverage:
    """A bitmap of positions for each layer and head; Python integers hold the bits."""

    def __init__(self, num_layers: int, num_heads: int, prompt_len: int) -> None:
        assert prompt_len > 0
        self._num_heads = num_heads
        self._full = (1 << prompt_len) - 1
        self._bits = [[0] * num_heads for _ in range(num_layers)]

    def overlaps(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> bool:
        """Whether any of these is already there."""
        mask = self._mask(first, count)
        return any(bits & mask for bits in self._bits[layer][head_first : head_first + head_count])

    def add(self, layer: int, first: int, count: int, head_first: int, head_count: int) -> None:
        """Note that these are there."""
        mask = self._mask(first, count)
        for head in range(head_first, head_first + head_count):
            self._bits[layer][head] |= mask

    def is_layer_complete(self, layer: int) -> bool:
        """Whether every position is there for every head."""
        return all(bits == self._full for bits in self._bits[layer])

    def is_complete(self) -> bool:
        """Whether every layer is."""
        return all(self.is_layer_complete(layer) for layer in range(len(self._bits)))

    def reset_layer(self, layer: int) -> None:
        """Forget what is there of a layer."""
        self._bits[layer] = [0] * self._num_heads

    def gaps(self) -> Iterator[Gap]:
        """Everything that is missing, in order, as long ranges as possible."""
        for layer, heads in enumerate(self._bits):
            missing = 0
            for bits in heads:
                missing |= self._full & ~bits
            for first, count in _runs(missing):
                yield Gap(layer, first, count)

    def present(self, layer: int, first: int, count: int) -> Iterator[tuple[int, int]]:
        """What every head has of these positions, as (first, count)."""
        bits = self._mask(first, count)
        for head_bits in self._bits[layer]:
            bits &= head_bits
        return _runs(bits)

    def _mask(self, first: int, count: int) -> int:
        return ((1 << count) - 1) << first


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """Runs of set bits as (first, count)."""
    while bits:
        first = (bits & -bits).bit_length() - 1
        run = bits >> first
        count = (~run & (run + 1)).bit_length() - 1
        yield first, count
        bits &= ~(((1 << count) - 1) << first)
