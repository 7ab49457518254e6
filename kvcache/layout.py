"""What a sequence keeps, layer by layer: positions, heads, parts, dtype, and which rank of a group holds what.

A layer keeps rows. A `ROWS` layer keeps every position, in blocks. A layer of another kind keeps a bounded number,
whatever the sequence's length, in the sequence's *state slot*: a ring in which position p lies in row p mod ring, so
that a rejected step is overwritten before it is read.

This module has no tensors and no torch: the KV receiver process and the protocol know layouts, not tensors.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Self

from baton.core.errors import ConfigInvalid

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
WORD_BYTES = 8  # a digest is made of words; a row is a whole number of them
MAX_BLOCK_SIZE = 64
CHECKPOINT_SHARE = 8  # checkpoints get one part in this many of the memory left beside sequences' state slots
MAX_CHECKPOINTS = 1024
NO_PREFIX_CACHE = "no prefix cache: the memory for KV has no room for checkpoints of the state that sequences keep"


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Positions, or heads of the whole model: [first, first + count)."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.first + self.count

    def shared_with(self, other: "Range") -> "Range":
        """Return the intersection; its count is 0 if it is empty."""
        first = max(self.first, other.first)
        return Range(first, max(0, min(self.stop, other.stop) - first))


class Keep(StrEnum):
    """Which positions a layer keeps of a sequence whose first n are computed."""

    ROWS = "rows"  # all: [0, n); K and V, or the latent rows of MLA
    WINDOW = "window"  # the last `length`: [n - length, n); inputs of a short convolution, sliding attention
    TAIL = "tail"  # those behind the last whole tile: [n - n % length, n); a recurrence's open tile
    SNAPSHOT = "snapshot"  # one row: the state at the end of the last whole tile; its position is the number of tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """One layer: for each position that it keeps, `num_heads` x `num_parts` rows of `row_len` elements.

    Attributes:
        num_heads: heads of the whole model; for a recurrence, its key heads.
        num_parts: rows of a head and position, e.g. 2 for K and V.
        row_len: elements of a row.
        dtype: a key of ITEM_BYTES.
        keep: which positions are kept.
        length: positions of a window, or of a tile; 0 for ROWS.
        ring: rows of a state slot, at least `length` plus what a step may write besides; 0 for ROWS, 1 for SNAPSHOT.
        whole: whether every rank of a tensor-parallel group holds every head. Rank 0 pushes whole state; whole rows are
            pushed by all ranks, 64 positions each in turn.
    """

    num_heads: int
    num_parts: int
    row_len: int
    dtype: str
    keep: Keep = Keep.ROWS
    length: int = 0
    ring: int = 0
    whole: bool = False

    @property
    def is_state(self) -> bool:
        """Whether the layer lies in state slots."""
        return self.keep is not Keep.ROWS

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_len * ITEM_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one position of one head."""
        return self.num_parts * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """All heads of one state slot."""
        return self.ring * self.num_heads * self.head_bytes

    @property
    def max_drafts(self) -> int | None:
        """Maximum drafts of a step that, rejected, overwrite no kept position; None: any number."""
        return self.ring - self.length - 1 if self.keep in (Keep.WINDOW, Keep.TAIL) else None

    def span(self, num_done: int) -> Range:
        """Return the positions kept when the first `num_done` are computed; there may be none."""
        match self.keep:
            case Keep.ROWS:
                return Range(0, num_done)
            case Keep.WINDOW:
                first = max(0, num_done - self.length)
                return Range(first, num_done - first)
            case Keep.TAIL:
                return Range(num_done - num_done % self.length, num_done % self.length)
            case Keep.SNAPSHOT:
                return Range(num_done // self.length, 1)

    @property
    def problem(self) -> str:
        """Why such a layer is impossible; empty if it is not."""
        if self.dtype not in ITEM_BYTES:
            return f"has dtype {self.dtype!r:.40}"
        if min(self.num_heads, self.num_parts, self.row_len) < 1:
            return f"has {self.num_heads} heads of {self.num_parts} rows of {self.row_len} elements"
        if self.row_bytes % WORD_BYTES:
            return f"has rows of {self.row_bytes} bytes, no multiple of {WORD_BYTES}"
        if not self.is_state:
            return f"keeps all positions, and a ring of {self.ring}" if self.length or self.ring else ""
        if self.length < 1:
            return f"keeps {self.length} positions"
        if self.keep is Keep.SNAPSHOT:
            return "" if self.ring == 1 else f"keeps one state in a ring of {self.ring}"
        fits = not self.ring % MAX_BLOCK_SIZE if self.ring > MAX_BLOCK_SIZE else self.ring & (self.ring - 1) == 0
        if self.ring < self.length or not fits:
            return f"keeps {self.length} positions in a ring of {self.ring}"
        return ""


def attention_layer(num_kv_heads: int, head_dim: int, dtype: str) -> LayerLayout:
    """Return a layer that keeps K and V of every position."""
    return LayerLayout(num_heads=num_kv_heads, num_parts=2, row_len=head_dim, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The layout of one worker's pools.

    Attributes:
        model_hash: identity of config and weights; KV of different weights is never mixed.
        layers: all layers that a sequence keeps, in the order in which steps compute them; one layer of the model may
            have several.
        block_size: positions per block; peers may differ in it.
        has_mtp: whether the last layer that keeps all positions is that of an MTP head.
    """

    model_hash: str
    layers: tuple[LayerLayout, ...]
    block_size: int
    has_mtp: bool = False

    def __post_init__(self) -> None:
        assert self.layers
        assert all(layer.dtype in ITEM_BYTES for layer in self.layers)
        assert 0 < self.block_size <= MAX_BLOCK_SIZE
        assert MAX_BLOCK_SIZE % self.block_size == 0

    @classmethod
    def of_attention(
        cls,
        *,
        model_hash: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        has_mtp: bool = False,
        more: Iterable[LayerLayout] = (),
    ) -> Self:
        """Make a layout of equal layers of K and V, including the MTP layer, followed by `more`."""
        attention = attention_layer(num_kv_heads, head_dim, dtype)
        layers = (*(attention,) * num_layers, *more)
        return cls(model_hash=model_hash, layers=layers, block_size=block_size, has_mtp=has_mtp)

    def in_blocks_of(self, block_size: int) -> Self:
        """Return the same layout with another block size."""
        return replace(self, block_size=block_size)

    @property
    def num_layers(self) -> int:
        """Number of layers of every kind; a frame names one of them."""
        return len(self.layers)

    @cached_property
    def has_state(self) -> bool:
        """Whether a sequence has a state slot."""
        return any(layer.is_state for layer in self.layers)

    @cached_property
    def attention(self) -> LayerLayout:
        """The first layer that keeps all positions."""
        found = next((layer for layer in self.layers if not layer.is_state), None)
        assert found is not None, "a model without an attention layer: the config's reader is to refuse it"
        return found

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads in the whole model."""
        return self.attention.num_heads

    @property
    def head_dim(self) -> int:
        """Elements of a row of K or V."""
        return self.attention.row_len

    @property
    def dtype(self) -> str:
        """Dtype of K and V."""
        return self.attention.dtype

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position in every layer that keeps all positions, all heads."""
        return sum(layer.num_heads * layer.head_bytes for layer in self.layers if not layer.is_state)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every layer that has blocks, all heads."""
        return self.block_size * self.bytes_per_position

    @property
    def bytes_per_state_slot(self) -> int:
        """Bytes that one sequence uses besides its blocks, all heads; 0 if it has no state."""
        return sum(layer.slot_bytes for layer in self.layers)

    def num_state_slots(self, max_num_seqs: int) -> int:
        """Return the state slots for sequences in steps, and as many for others; without the scratch slot."""
        return 2 * max_num_seqs if self.has_state else 0

    def num_checkpoints(self, room_bytes: int, slot_bytes: int | None = None) -> int:
        """Return the number of checkpoints for the prefix cache; 0 for a layout without state.

        Args:
            room_bytes: memory for checkpoints and blocks.
            slot_bytes: bytes of one checkpoint; `bytes_per_state_slot` if None.
        """
        slot_bytes = self.bytes_per_state_slot if slot_bytes is None else slot_bytes
        return min(max(0, room_bytes) // (CHECKPOINT_SHARE * slot_bytes), MAX_CHECKPOINTS) if self.has_state else 0

    def require_state(self, checkpoint_interval: int) -> None:
        """Check that a checkpoint interval is set only for a layout with state.

        Raises:
            ConfigInvalid: there is no state.
        """
        if checkpoint_interval and not self.has_state:
            message = "state_checkpoint_interval: this model keeps no state; all of its cached blocks can be begun with"
            raise ConfigInvalid(message, keys=["state_checkpoint_interval"])

    def rows_per_block(self, layer: int) -> int:
        """Return how many positions of a layer are contiguous: a block's, or a state slot's up to MAX_BLOCK_SIZE."""
        spec = self.layers[layer]
        return min(spec.ring, MAX_BLOCK_SIZE) if spec.is_state else self.block_size

    def payload_bytes(self, prompt_len: int) -> int:
        """Return the bytes of everything that a prompt leaves in the pools, each head once."""
        return sum(layer.span(prompt_len).count * layer.num_heads * layer.head_bytes for layer in self.layers)

    def heads_of(self, layer: int, rank: int, size: int) -> Range:
        """Return the heads that a rank of a tensor-parallel group holds; heads fewer than ranks are replicated."""
        assert 0 <= rank < size
        spec = self.layers[layer]
        if spec.whole:
            return Range(0, spec.num_heads)
        if spec.num_heads >= size:
            assert spec.num_heads % size == 0, f"{spec.num_heads} heads do not divide by {size} ranks"
            count = spec.num_heads // size
            return Range(rank * count, count)
        assert size % spec.num_heads == 0, f"{size} ranks do not divide by {spec.num_heads} heads"
        return Range(rank * spec.num_heads // size, 1)

    def pushed_heads(self, layer: int, rank: int, size: int) -> Range:
        """Return those of `heads_of` that no lower rank pushes, and so this rank does. The count may be 0."""
        heads = self.heads_of(layer, rank, size)
        if rank and not self._is_dealt(layer) and self.heads_of(layer, rank - 1, size).stop > heads.first:
            return Range(heads.first, 0)
        return heads

    def pushed_positions(self, layer: int, first: int, count: int, rank: int, size: int) -> Iterator[Range]:
        """Yield the runs of `count` positions from `first` on in which a rank pushes its `pushed_heads`.

        These are all positions, except for rows that every rank holds whole: their positions are dealt to the ranks in
        turn, so that the transfer uses the links of all ranks.
        """
        positions = Range(first, count)
        if size == 1 or not self._is_dealt(layer):
            yield from [positions] if count else []
            return
        turn = MAX_BLOCK_SIZE * size
        for start in range(first // turn * turn + rank * MAX_BLOCK_SIZE, positions.stop, turn):
            run = positions.shared_with(Range(start, MAX_BLOCK_SIZE))
            if run.count:
                yield run

    def _is_dealt(self, layer: int) -> bool:
        return self.layers[layer].whole and not self.layers[layer].is_state

    @property
    def problem(self) -> str:
        """Why pools of this layout cannot be handed over; empty if they can."""
        problems = (f"layer {index} {layer.problem}" for index, layer in enumerate(self.layers) if layer.problem)
        return next(problems, "")

    @cached_property
    def hash(self) -> bytes:
        """sha256 of what two peers must agree on; excludes block size and tensor parallelism."""
        fields = (self.model_hash, tuple(map(astuple, self.layers)), self.has_mtp)
        return hashlib.sha256(repr(fields).encode()).digest()
