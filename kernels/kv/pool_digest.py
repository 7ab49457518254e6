"""The digest of what a pool on a device holds: all layers of a piece in one launch, on a few multiprocessors.

The same value as `kernels.kv.digest` and as `kv_scatter` gives for the same content. It refuses to compare: the result
is a row of words in memory that the caller named.

Shapes: N blocks, H heads, P parts, S positions of a block, W words of a row.
"""

import torch

from baton.kernels.kv.scatter import PoolAddress, ScatterRange, ScatterWorkspace, Tuning, WriteCompletion, move


def kv_digest(
    pool: PoolAddress,
    blocks: torch.Tensor,
    piece: ScatterRange,
    workspace: ScatterWorkspace,
    completion: WriteCompletion,
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
