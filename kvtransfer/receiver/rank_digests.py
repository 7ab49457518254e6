"""What the answers of a worker's ranks make together: each verified its pool, a transfer has one digest for a layer.

A digest adds up over heads, so the parts of ranks that hold different heads are added. Ranks that hold the same heads
(fewer heads than ranks, or a layer that every rank has whole) must agree, and count once: a copy that is damaged at one
rank is as wrong as a damaged original, since that rank computes with it.
"""

from collections.abc import Sequence

from baton.kernels.kv.digest import MASK
from baton.kvcache.layout import KVLayout, Range


class RankDigests:
    """Who of the ranks of a worker holds what.

    Args:
        layout: of the worker.
        num_ranks: its ranks.
    """

    def __init__(self, layout: KVLayout, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._heads: list[tuple[Range, ...]] = []  # by layer and rank
        self._holders: list[tuple[tuple[int, ...], ...]] = []  # by layer: ranks with the same heads
        for layer in range(layout.num_layers):
            heads = tuple(layout.heads_of(layer, rank, num_ranks) for rank in range(num_ranks))
            holders: dict[Range, list[int]] = {}
            for rank, its in enumerate(heads):
                holders.setdefault(its, []).append(rank)
            assert sum(its.count for its in holders) == layout.layers[layer].num_heads, "each head in one range"
            self._heads.append(heads)
            self._holders.append(tuple(tuple(ranks) for ranks in holders.values()))

    def heads(self, layer: int) -> tuple[Range, ...]:
        """What each rank holds of a layer."""
        return self._heads[layer]

    def total(self, layer: int, digests: Sequence[int]) -> int:
        """The digest of all heads of a layer, or one that matches nothing if holders of the same heads differ.

        Args:
            layer: whose.
            digests: of the part of each rank, in order.
        """
        assert len(digests) == self.num_ranks
        total = 0
        for ranks in self._holders[layer]:
            found = {digests[rank] for rank in ranks}
            total += found.pop() if len(found) == 1 else max(found) + 1
        return total & MASK
