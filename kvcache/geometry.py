"""Where the rows of a layout lie in one rank's pool: plain offsets, so that any process that maps it can find them.

A pool is one piece of memory, layer after layer; a layer is [blocks, H heads, P parts, S positions, row], so a head
range of a block is one contiguous piece. The last block is scratch (see `pool`).

A layer in state slots also has blocks: for each slot, those of a ring, one after the other. So a caller that knows a
sequence's blocks by logical index (`blocks_of`) reads and writes both kinds of layers the same way.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kvcache.layout import KVLayout, Range

ALIGNMENT_BYTES = 16  # alignment of a layer's start


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """One layer of one rank's pool, in bytes from the pool's start."""

    offset_bytes: int
    num_blocks: int  # including scratch
    head_first: int  # first head, counted in the whole model
    num_heads: int
    num_parts: int
    rows_per_block: int  # rows of one head and part
    row_bytes: int
    blocks_per_slot: int = 0  # per state slot; 0: the layer lies in the sequence's blocks

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
    def heads(self) -> Range:
        """Heads that are in this pool."""
        return Range(self.head_first, self.num_heads)

    def blocks_of(self, blocks: Sequence[int], state_slot: int | None, stop: int) -> Sequence[int]:
        """Return the blocks of this layer's positions below `stop`, indexed by position // rows_per_block.

        Args:
            blocks: blocks of the sequence.
            state_slot: state slot of the sequence; None if its layout has no state.
            stop: one past the last position to look up.
        """
        if not self.blocks_per_slot:
            return blocks
        assert state_slot is not None
        return _ring(state_slot * self.blocks_per_slot, self.blocks_per_slot, -(-stop // self.rows_per_block))


# Layers and frames of one hand-off need the same few, and device tables are identified by their tuple. Few are kept:
# for a long prompt, each has as many entries as the prompt has blocks.
@functools.lru_cache(maxsize=64)
def _ring(first: int, count: int, num_blocks: int) -> tuple[int, ...]:
    """Return `num_blocks` logical blocks of a ring, which repeat its `count` block numbers."""
    once = tuple(range(first, first + count))
    return (once * -(-num_blocks // count))[:num_blocks]


class PoolGeometry:
    """The pool of one rank.

    Args:
        layout: layout of the worker.
        num_blocks: number of blocks, without the scratch block.
        rank: rank in its tensor-parallel group.
        size: size of that group.
        num_state_slots: number of state slots, without the scratch slot; 0 if the layout has no state.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, rank: int = 0, size: int = 1, *, num_state_slots: int = 0
    ) -> None:
        assert num_blocks > 0
        assert (num_state_slots > 0) == layout.has_state
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_state_slots = num_state_slots
        self.rank = rank
        self.size = size
        layers = []
        offset_bytes = 0
        for index, spec in enumerate(layout.layers):
            heads = layout.heads_of(index, rank, size)
            rows_per_block = layout.rows_per_block(index)
            blocks_per_slot = spec.ring // rows_per_block
            layer = LayerGeometry(
                offset_bytes=offset_bytes,
                num_blocks=(num_state_slots + 1) * blocks_per_slot if spec.is_state else num_blocks + 1,
                head_first=heads.first,
                num_heads=heads.count,
                num_parts=spec.num_parts,
                rows_per_block=rows_per_block,
                row_bytes=spec.row_bytes,
                blocks_per_slot=blocks_per_slot,
            )
            layers.append(layer)
            offset_bytes += -(-layer.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.layers = tuple(layers)
        self.num_bytes = offset_bytes

    @property
    def of_all_ranks(self) -> "tuple[PoolGeometry, ...]":
        """Geometries of the pools of the whole tensor-parallel group."""
        return tuple(
            PoolGeometry(self.layout, self.num_blocks, rank, self.size, num_state_slots=self.num_state_slots)
            for rank in range(self.size)
        )

    def layer(self, layer: int) -> LayerGeometry:
        """Return one layer."""
        return self.layers[layer]
