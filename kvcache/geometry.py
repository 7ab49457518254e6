"""Where the rows of a layout lie in one rank's pool: plain offsets, so that anybody who maps the memory can find them.

A pool is one piece of memory, layer after layer; a layer is [N + 1 blocks, H heads, P parts, S positions, row], so a
head range of a block is one contiguous piece. Block N (one past the last) is the scratch block (see `pool`).
"""

from dataclasses import dataclass

from baton.kvcache.layout import HeadRange, KVLayout, PayloadKind


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer of one rank's pool, in bytes from the pool's start."""

    offset_bytes: int
    num_blocks: int  # the scratch block included
    head_first: int  # of the whole model
    num_heads: int
    num_parts: int
    rows_per_block: int  # of one head and part
    row_bytes: int

    @property
    def part_bytes(self) -> int:
        """K (or V) of one head of a block."""
        return self.rows_per_block * self.row_bytes

    @property
    def head_bytes(self) -> int:
        """All parts of one head of a block."""
        return self.num_parts * self.part_bytes

    @property
    def block_bytes(self) -> int:
        """All heads of a block."""
        return self.num_heads * self.head_bytes

    @property
    def num_bytes(self) -> int:
        """All blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def heads(self) -> HeadRange:
        """Heads that are here."""
        return HeadRange(self.head_first, self.num_heads)


class PoolGeometry:
    """The pool of one rank.

    Args:
        layout: of the worker.
        num_blocks: without the scratch block.
        rank: in its tensor-parallel group.
        size: of that group.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, rank: int = 0, size: int = 1) -> None:
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.rank = rank
        self.size = size
        layers = []
        offset_bytes = 0
        for index, spec in enumerate(layout.layers):
            heads = layout.heads_of(index, rank, size)
            layer = LayerGeometry(
                offset_bytes=offset_bytes,
                num_blocks=num_blocks + 1,
                head_first=heads.first,
                num_heads=heads.count,
                num_parts=spec.num_parts,
                rows_per_block=1 if spec.kind is PayloadKind.STATE else layout.block_size,
                row_bytes=layout.row_bytes(index),
            )
            layers.append(layer)
            offset_bytes += layer.num_bytes
        self.layers = tuple(layers)
        self.num_bytes = offset_bytes

    @property
    def of_all_ranks(self) -> "tuple[PoolGeometry, ...]":
        """The pools of the whole tensor-parallel group."""
        return tuple(PoolGeometry(self.layout, self.num_blocks, rank, self.size) for rank in range(self.size))

    def layer(self, layer: int) -> LayerGeometry:
        """One layer."""
        return self.layers[layer]
