"""What the bytes of KV blocks mean, whoever holds them: layers, heads, parts, dtype, and who of a group holds what.

No tensors and no torch here: the KV receiver process and the protocol know layouts, not tensors.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
WORD_BYTES = 8  # a digest is made of words; a row holds a whole number of them
MAX_BLOCK_SIZE = 64


class PayloadKind(StrEnum):
    """What a layer keeps for a sequence."""

    ATTENTION = "attention"  # K and V of each position and head
    LATENT = "latent"  # one compressed row of each position, which every rank holds (MLA)
    STATE = "state"  # one recurrent state of each sequence, by head


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer: for each position, `num_heads` x `num_parts` rows of `row_len` elements."""

    kind: PayloadKind
    num_heads: int
    num_parts: int
    row_len: int


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads [first, first + count) of a layer of the whole model."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.first + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layout of one worker's pools.

    Attributes:
        model_hash: identity of config and weights; KV of different weights never mixes.
        num_layers: attention layers of the trunk, plus one for the MTP layer when drafts are made.
        num_kv_heads: of the whole model.
        head_dim: elements per head.
        block_size: positions per block; peers may differ in it.
        dtype: a key of ITEM_BYTES.
        extra_layers: layers of other kinds, numbered after the attention layers.
        has_mtp: the last attention layer is that of an MTP head.
    """

    model_hash: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    extra_layers: tuple[LayerLayout, ...] = ()
    has_mtp: bool = False

    def __post_init__(self) -> None:
        assert self.dtype in ITEM_BYTES, self.dtype
        assert 0 < self.block_size <= MAX_BLOCK_SIZE
        assert MAX_BLOCK_SIZE % self.block_size == 0

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_all_layers(self) -> int:
        """Layers of every kind; a frame names one of them."""
        return self.num_layers + len(self.extra_layers)

    def layer(self, layer: int) -> LayerLayout:
        """The layout of one layer."""
        if layer < self.num_layers:
            return LayerLayout(PayloadKind.ATTENTION, self.num_kv_heads, 2, self.head_dim)
        return self.extra_layers[layer - self.num_layers]

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """All layers, in order."""
        return tuple(self.layer(layer) for layer in range(self.num_all_layers))

    def layer_len(self, layer: int, prompt_len: int) -> int:
        """Positions of a layer that a prompt of `prompt_len` fills."""
        return 1 if self.layer(layer).kind is PayloadKind.STATE else prompt_len

    def row_bytes(self, layer: int) -> int:
        """Bytes of one row of a layer."""
        return self.layer(layer).row_len * self.item_bytes

    def head_bytes(self, layer: int) -> int:
        """Bytes of one position of one head of a layer."""
        return self.layer(layer).num_parts * self.row_bytes(layer)

    @property
    def bytes_per_position(self) -> int:
        """K and V of one position in one attention layer, all heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def bytes_per_block(self) -> int:
        """One block in every layer, all heads."""
        total = 0
        for index, layer in enumerate(self.layers):
            rows = 1 if layer.kind is PayloadKind.STATE else self.block_size
            total += rows * layer.num_heads * self.head_bytes(index)
        return total

    def payload_bytes(self, prompt_len: int) -> int:
        """Everything that a prompt leaves in the pools, each head once."""
        layers = enumerate(self.layers)
        return sum(
            self.layer_len(index, prompt_len) * layer.num_heads * self.head_bytes(index) for index, layer in layers
        )

    def heads_of(self, layer: int, rank: int, size: int) -> HeadRange:
        """Heads that a rank of a tensor-parallel group holds; heads fewer than ranks are replicated."""
        assert 0 <= rank < size
        spec = self.layer(layer)
        if spec.kind is PayloadKind.LATENT:
            return HeadRange(0, spec.num_heads)
        if spec.num_heads >= size:
            assert spec.num_heads % size == 0, f"{spec.num_heads} heads do not divide by {size} ranks"
            count = spec.num_heads // size
            return HeadRange(rank * count, count)
        assert size % spec.num_heads == 0, f"{size} ranks do not divide by {spec.num_heads} heads"
        return HeadRange(rank * spec.num_heads // size, 1)

    def pushed_heads(self, layer: int, rank: int, size: int) -> HeadRange:
        """Those of `heads_of` that no lower rank holds too: what this rank pushes. Its count may be 0."""
        heads = self.heads_of(layer, rank, size)
        if rank and self.heads_of(layer, rank - 1, size).stop > heads.first:
            return HeadRange(heads.first, 0)
        return heads

    @property
    def problem(self) -> str:
        """Why pools of this layout cannot be handed over; empty if they can."""
        for index in range(self.num_all_layers):
            if self.row_bytes(index) % WORD_BYTES:
                return f"rows of layer {index} have {self.row_bytes(index)} bytes, no multiple of {WORD_BYTES}"
        return ""

    @property
    def hash(self) -> bytes:
        """sha256 of what two peers must agree on; block size and tensor parallelism are not part of it."""
        extra = tuple(
            (layer.kind.value, layer.num_heads, layer.num_parts, layer.row_len) for layer in self.extra_layers
        )
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)
        fields = (self.model_hash, *sizes, extra, self.has_mtp)
        return hashlib.sha256(repr(fields).encode()).digest()
