"""What `kv_scatter` and `kv_digest` must do, position by position, in torch on any device.

Shapes: N blocks, H heads, P parts, S positions of a block, W words of a row.
"""

from collections.abc import Sequence

import torch

from baton.kernels.kv.digest import MASK, high_weight, layer_weight, low_weight, word_weight
from baton.kernels.kv.scatter import Piece


def kv_scatter_reference(
    source_NHPSW: torch.Tensor,
    source_blocks: Sequence[int],
    target_NHPSW: torch.Tensor,
    target_blocks: Sequence[int],
    piece: Piece,
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
