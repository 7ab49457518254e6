"""Move blocks of KV between two pools by address, and digest them on the way: one launch for a layer, or for several.

Either pool may be of this device, of a peer device (CUDA IPC) or pinned host memory. Blocks may have different sizes on
the two sides, and each side may hold other heads: rows are addressed by position, head and part. The grid is as many
programs as may be used of the device's multiprocessors; each walks over tiles of rows with 16-byte accesses.

Completion is a word in memory (`WriteCompletion`) that the last program writes after all bytes and all digests are
where they belong, so that a reader of the word needs no call to the device. It refuses to know what blocks mean, who
may write them, and streams: a launch goes to the current one.

The digest is that of `kernels.kv.digest`. 64-bit products must wrap, which Triton's integers do.

Shapes: L layers, N blocks, H heads, P parts, S positions of a block, W words of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.kernels.copies import to_device
from baton.kernels.kv import scatter_triton as kv_scatter_triton
from baton.kernels.kv.digest import MASK, PERIOD, high_weight, layer_weight, low_weight, weight, word_weight

WORD_BYTES = kv_scatter_triton.WORD_BYTES
MAX_LAYERS = 256  # of one launch
ALIGNMENT_BYTES = 16


class LayerShape(Protocol):
    """Where the rows of a layer lie in a pool: [N, H, P, S, W], contiguous, in bytes from the pool's start."""

    @property
    def offset_bytes(self) -> int:
        """Of the layer."""
        ...

    @property
    def block_bytes(self) -> int:
        """All heads of a block."""
        ...

    @property
    def head_first(self) -> int:
        """First head that the pool holds."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads that the pool holds."""
        ...

    @property
    def num_parts(self) -> int:
        """Of each head."""
        ...

    @property
    def rows_per_block(self) -> int:
        """Of one head and part."""
        ...

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        ...


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """A pool as the launching device reaches it: its first byte there, and its layers."""

    address: int
    layers: Sequence[LayerShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterRange:
    """Positions [first, first + count) of some heads of layers [layer, layer + num_layers), all of one shape."""

    layer: int
    first: int
    count: int
    head_first: int
    head_count: int
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a launch spreads.

    Attributes:
        num_programs: multiprocessors used, at most.
        num_warps: of each program.
        tile_words: that a program moves in one step; 16 bytes and more for each thread.
    """

    num_programs: int
    num_warps: int = 16
    tile_words: int = 4096


@dataclass(frozen=True, slots=True)
class WriteCompletion:
    """Where a launch says that it is done: `1 + num_layers` words at `address`, the digests from the second on.

    `sequence` is written to the first word after everything else. The address is of memory that the device may write,
    usually pinned host memory.
    """

    address: int
    sequence: int


class ScatterWorkspace:
    """What launches on one stream need on the device; not to be shared between streams.

    Args:
        device: of the launches.
        max_len: positions that a digest may reach.
    """

    def __init__(self, device: torch.device, max_len: int) -> None:
        # [programs done, digest of each layer]; each launch leaves zeros.
        self.sums = torch.zeros(1 + MAX_LAYERS, dtype=torch.int64, device=device)
        low = [weight((3 << 60) + position) for position in range(PERIOD)]
        high = [weight((2 << 60) + stretch) for stretch in range(-(-max_len // PERIOD))]
        table = [value - (1 << 64) if value >> 63 else value for value in low + high]
        self.weights = to_device(torch.tensor(table, dtype=torch.int64), device)


def kv_scatter(
    source: PoolAddress,
    source_blocks: torch.Tensor,
    target: PoolAddress,
    target_blocks: torch.Tensor,
    piece: ScatterRange,
    workspace: ScatterWorkspace,
    completion: WriteCompletion,
    tuning: Tuning,
    *,
    with_digest: bool = True,
) -> None:
    """Copy a piece from one pool to the other; without a digest, zeros are reported.

    Args:
        source: pool that is read.
        source_blocks: int32 ids on the device, by logical index; its own block size.
        target: pool that is written.
        target_blocks: the same for the target, whose block size may differ.
        piece: what to move; both pools hold all of it.
        workspace: of the current stream.
        completion: told when all is there.
        tuning: how to spread it.
        with_digest: of what was written.
    """
    move(source, source_blocks, target, target_blocks, piece, workspace, completion, tuning, with_digest)


def move(
    source: PoolAddress,
    source_blocks: torch.Tensor,
    target: PoolAddress | None,
    target_blocks: torch.Tensor,
    piece: ScatterRange,
    workspace: ScatterWorkspace,
    completion: WriteCompletion,
    tuning: Tuning,
    with_digest: bool,
) -> None:
    """Launch the kernel for `kv_scatter`, or without a target for `kv_digest`."""
    here = source.layers[piece.layer]
    there = here if target is None else target.layers[piece.layer]
    assert (here.row_bytes, here.num_parts) == (there.row_bytes, there.num_parts)
    to = source if target is None else target
    _check_piece(source, to, piece, workspace)
    constants = kv_scatter_triton.tile_of(here, there, piece.head_count * here.num_parts, tuning)
    constants |= {"COPY": target is not None, "DIGEST": with_digest}
    kv_scatter_triton.move_kernel[(tuning.num_programs,)](
        source.address,
        source_blocks,
        here.offset_bytes // WORD_BYTES,
        _layer_words(source.layers, piece),
        piece.head_first - here.head_first,
        to.address,
        target_blocks,
        there.offset_bytes // WORD_BYTES,
        _layer_words(to.layers, piece),
        piece.head_first - there.head_first,
        piece.layer,
        piece.num_layers,
        piece.first,
        piece.count,
        piece.head_first,
        piece.head_count,
        workspace.weights,
        workspace.sums,
        completion.address,
        completion.sequence,
        **constants,
    )


def _check_piece(source: PoolAddress, target: PoolAddress, piece: ScatterRange, workspace: ScatterWorkspace) -> None:
    for shape in (source.layers[piece.layer], target.layers[piece.layer]):
        assert shape.head_first <= piece.head_first
        assert piece.head_first + piece.head_count <= shape.head_first + shape.num_heads
    assert 0 < piece.num_layers <= MAX_LAYERS
    assert piece.first + piece.count <= (len(workspace.weights) - PERIOD) * PERIOD
    assert source.address % ALIGNMENT_BYTES == target.address % ALIGNMENT_BYTES == 0


def _layer_words(layers: Sequence[LayerShape], piece: ScatterRange) -> int:
    """Words from one layer of the piece to the next."""
    if piece.num_layers == 1:
        return 0
    shapes = layers[piece.layer : piece.layer + piece.num_layers]
    step = shapes[1].offset_bytes - shapes[0].offset_bytes
    wanted = [shapes[0].offset_bytes + index * step for index in range(piece.num_layers)]
    assert [shape.offset_bytes for shape in shapes] == wanted, "layers of one launch have one shape"
    return step // WORD_BYTES


def kv_scatter_reference(
    source_NHPSW: torch.Tensor,
    source_blocks: Sequence[int],
    target_NHPSW: torch.Tensor,
    target_blocks: Sequence[int],
    piece: ScatterRange,
    heads: tuple[int, int] = (0, 0),
) -> None:
    """`kv_scatter` of one layer, position by position.

    Args:
        source_NHPSW: the layer in the source pool.
        source_blocks: ids by logical index.
        target_NHPSW: the layer in the target pool.
        target_blocks: the same for the target.
        piece: what to move.
        heads: first head that source and target hold.
    """
    here = slice(piece.head_first - heads[0], piece.head_first - heads[0] + piece.head_count)
    there = slice(piece.head_first - heads[1], piece.head_first - heads[1] + piece.head_count)
    from_size, to_size = source_NHPSW.shape[3], target_NHPSW.shape[3]
    for position in range(piece.first, piece.first + piece.count):
        source, target = source_blocks[position // from_size], target_blocks[position // to_size]
        target_NHPSW[target, there, :, position % to_size] = source_NHPSW[source, here, :, position % from_size]


def kv_digest_reference(
    words_NHPSW: torch.Tensor, blocks: Sequence[int], piece: ScatterRange, *, layer: int, head_first: int = 0
) -> int:
    """The digest of one layer, in torch on any device.

    Args:
        words_NHPSW: int64, the layer in the pool.
        blocks: ids by logical index.
        piece: what to digest.
        layer: its number.
        head_first: first head that the pool holds.
    """
    size = words_NHPSW.shape[3]
    heads = slice(piece.head_first - head_first, piece.head_first - head_first + piece.head_count)
    words_HPW = [
        [
            [word_weight(head, part, word) for word in range(words_NHPSW.shape[4])]
            for part in range(words_NHPSW.shape[2])
        ]
        for head in range(piece.head_first, piece.head_first + piece.head_count)
    ]
    weight_HPW = torch.tensor([_signed(row) for head in words_HPW for row in head], device=words_NHPSW.device)
    weight_HPW = weight_HPW.view(piece.head_count, words_NHPSW.shape[2], -1)
    total = 0
    for position in range(piece.first, piece.first + piece.count):
        row_HPW = words_NHPSW[blocks[position // size], heads, :, position % size]
        row_sum = int(((row_HPW + 1) * weight_HPW).sum())
        total += row_sum * high_weight(position) * low_weight(position)
    return total * layer_weight(layer) & MASK


def _signed(values: list[int]) -> list[int]:
    return [value - (1 << 64) if value >> 63 else value for value in values]
