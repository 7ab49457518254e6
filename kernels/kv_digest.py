"""The digest of what a pool on a device holds: all layers of a piece in one launch, on a few multiprocessors.

The same value as `kernels.digest` and as `kv_scatter` gives for the same content. It refuses to compare: the result is
a row of words in memory that the caller named.

Shapes: N blocks, H heads, P parts, S positions of a block, W words of a row.
"""

from collections.abc import Sequence

import torch

from baton.kernels.digest import MASK, high_weight, layer_weight, low_weight, word_weight
from baton.kernels.kv_scatter import Completion, Piece, PoolAddress, Tuning, Workspace, move


def kv_digest(
    pool: PoolAddress,
    blocks: torch.Tensor,
    piece: Piece,
    workspace: Workspace,
    completion: Completion,
    tuning: Tuning,
) -> None:
    """Digest a piece, each layer of it by itself.

    Args:
        pool: that is read.
        blocks: int32 ids on the device, by logical index.
        piece: what to digest; its layers have one shape.
        workspace: of the current stream.
        completion: where the digests go.
        tuning: how to spread it.
    """
    move(pool, blocks, None, blocks, piece, workspace, completion, tuning, True)


def kv_digest_reference(
    words_NHPSW: torch.Tensor, blocks: Sequence[int], piece: Piece, *, layer: int, head_first: int = 0
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
