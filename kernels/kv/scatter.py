"""Moves blocks of KV between two pools by address, and digests them on the way: one launch for one or more layers.

Either pool may be on this device, on a peer device (CUDA IPC) or in pinned host memory. Blocks may have different sizes
on the two sides, and the sides may hold different heads: rows are addressed by position, head and part. The grid has as
many programs as the launch may use multiprocessors; each walks over tiles of rows with 16-byte accesses.

**Completion.** The last program writes a word in memory (`WriteCompletion`) after all bytes and all digests are in
place, so that a reader of the word needs no CUDA call. A launch goes to the current stream. This module does not know
what blocks mean or who may write them.

**Digest.** It is that of `kernels.kv.digest`. 64-bit multiplications must wrap, which Triton's integers do.

Shapes: L layers, N blocks, H heads, P parts, S positions of a block, W words of a row.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.kernels.copies import to_device
from baton.kernels.kv import scatter_triton as kv_scatter_triton
from baton.kernels.kv.digest import MASK, PERIOD, high_weight, layer_weight, low_weight, weight, word_weight
from baton.kernels.launcher import Constants

WORD_BYTES = kv_scatter_triton.WORD_BYTES
LAYER_COLUMNS = kv_scatter_triton.LAYER_COLUMNS
MAX_LAYERS = 256  # per launch
MAX_KEPT_TABLES = 256  # of layers, on the device
ALIGNMENT_BYTES = 16


class LayerShape(Protocol):
    """Where the rows of a layer lie in a pool: [N, H, P, S, W], contiguous, in bytes from the pool's start."""

    @property
    def offset_bytes(self) -> int:
        """Start of the layer."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with all its heads."""
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
        """Number of parts per head."""
        ...

    @property
    def rows_per_block(self) -> int:
        """Rows of one head and part in a block."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        ...


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """A pool as the launching device addresses it: the address of its first byte, and its layers."""

    address: int
    layers: Sequence[LayerShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterRange:
    """Positions [first, first + count) of some heads of layers that have one shape, in any order."""

    layers: tuple[int, ...]
    first: int
    count: int
    head_first: int
    head_count: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch configuration.

    Attributes:
        num_programs: maximum number of multiprocessors used.
        num_warps: warps per program.
        tile_words: words that a program moves in one step; at least 16 bytes for each thread.
    """

    num_programs: int
    num_warps: int = 16
    tile_words: int = 4096


@dataclass(frozen=True, slots=True)
class WriteCompletion:
    """Where a launch reports that it is done: words at `address`, from the second on the digest of each layer.

    `sequence` is written to the first word after everything else. The device must be able to write the address, which
    is usually in pinned host memory.
    """

    address: int
    sequence: int


class ScatterWorkspace:
    """Device memory that launches on one stream need; must not be shared between streams.

    Args:
        device: device of the launches.
        max_len: number of positions that a digest may cover.
    """

    def __init__(self, device: torch.device, max_len: int) -> None:
        # [finished programs, digest of each layer]; each launch leaves zeros.
        self.sums = torch.zeros(1 + MAX_LAYERS, dtype=torch.int64, device=device)
        low = [weight((3 << 60) + position) for position in range(PERIOD)]
        high = [weight((2 << 60) + stretch) for stretch in range(-(-max_len // PERIOD))]
        table = [value - (1 << 64) if value >> 63 else value for value in low + high]
        self.weights = to_device(torch.tensor(table, dtype=torch.int64), device)
        self._device = device
        self._tables: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def layer_table(self, source: PoolAddress, target: PoolAddress, layers: Sequence[int]) -> torch.Tensor:
        """Return int64 [L, 3] on the device: each layer's number, and where it begins in either pool, in words."""
        numbers: list[int] = []
        for layer in layers:
            offsets = (pool.layers[layer].offset_bytes // WORD_BYTES for pool in (source, target))
            numbers += layer, *offsets
        key = tuple(numbers)
        table = self._tables.get(key)
        if table is None:
            _check_layers(source, layers)
            _check_layers(target, layers)
            table = to_device(torch.tensor(numbers, dtype=torch.int64).view(-1, LAYER_COLUMNS), self._device)
            self._tables[key] = table
            if len(self._tables) > MAX_KEPT_TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table


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
    """Copy a range from one pool to the other; without a digest, zeros are reported.

    Args:
        source: pool to read.
        source_blocks: int32 ids on the device, by logical index, in the source's block size.
        target: pool to write.
        target_blocks: the same for the target, whose block size may differ.
        piece: range to move; both pools hold all of it.
        workspace: workspace of the current stream.
        completion: where completion is reported.
        tuning: launch configuration.
        with_digest: whether to digest what is written.
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
    here = source.layers[piece.layers[0]]
    there = here if target is None else target.layers[piece.layers[0]]
    assert (here.row_bytes, here.num_parts) == (there.row_bytes, there.num_parts)
    to = source if target is None else target
    _check_piece(here, there, piece, workspace)
    assert source.address % ALIGNMENT_BYTES == to.address % ALIGNMENT_BYTES == 0
    arguments = (
        source.address,
        source_blocks,
        piece.head_first - here.head_first,
        to.address,
        target_blocks,
        piece.head_first - there.head_first,
        workspace.layer_table(source, to, piece.layers),
        len(piece.layers),
        piece.first,
        piece.count,
        piece.head_first,
        piece.head_count,
        workspace.weights,
        workspace.sums,
        completion.address,
        completion.sequence,
    )
    constants = _constants(
        _Rows.of(here), _Rows.of(there), piece.head_count * here.num_parts, tuning, target is not None, with_digest
    )
    kv_scatter_triton.launch_move((tuning.num_programs,), arguments, constants)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What of a layer's shape a kernel is compiled for."""

    num_heads: int
    num_parts: int
    rows_per_block: int
    row_bytes: int

    @staticmethod
    def of(layer: LayerShape) -> "_Rows":
        """Take it from a layer."""
        return _Rows(layer.num_heads, layer.num_parts, layer.rows_per_block, layer.row_bytes)


@functools.lru_cache(maxsize=1024)
def _constants(here: _Rows, there: _Rows, num_pairs: int, tuning: Tuning, copy: bool, digest: bool) -> Constants:
    """Return the constants of a launch, kept so that `Launcher` knows them again."""
    constants: dict[str, Any] = kv_scatter_triton.tile_of(here, there, num_pairs, tuning)
    return Constants(constants | {"COPY": copy, "DIGEST": digest})


def _check_piece(here: LayerShape, there: LayerShape, piece: ScatterRange, workspace: ScatterWorkspace) -> None:
    for shape in (here, there):
        assert shape.head_first <= piece.head_first
        assert piece.head_first + piece.head_count <= shape.head_first + shape.num_heads
    assert 0 < len(piece.layers) <= MAX_LAYERS
    assert piece.first + piece.count <= (len(workspace.weights) - PERIOD) * PERIOD


def _check_layers(pool: PoolAddress, layers: Sequence[int]) -> None:
    """Check that layers have one shape, and begin where 16 bytes can be accessed at once."""
    shapes = [pool.layers[layer] for layer in layers]
    assert len({(_Rows.of(shape), shape.head_first) for shape in shapes}) == 1, "layers of one launch have one shape"
    assert all(shape.offset_bytes % ALIGNMENT_BYTES == 0 for shape in shapes)


def kv_scatter_reference(
    source_NHPSW: torch.Tensor,
    source_blocks: Sequence[int],
    target_NHPSW: torch.Tensor,
    target_blocks: Sequence[int],
    piece: ScatterRange,
    heads: tuple[int, int] = (0, 0),
) -> None:
    """Compute `kv_scatter` of one layer, position by position.

    Args:
        source_NHPSW: layer in the source pool.
        source_blocks: ids by logical index.
        target_NHPSW: layer in the target pool.
        target_blocks: the same for the target.
        piece: range to move.
        heads: first heads that source and target hold.
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
    """Compute the digest of one layer, in torch on any device.

    Args:
        words_NHPSW: int64, layer in the pool.
        blocks: ids by logical index.
        piece: range to digest.
        layer: number of the layer.
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
