"""The digest of KV in a pool on a device: layers of one shape in one launch, on a few multiprocessors.

It equals what `kernels.kv.digest` and `kv_scatter` compute for the same content. The result is a row of words in memory
that the caller names; comparing is up to the caller.

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
    """Digest a range, each layer separately.

    Args:
        pool: pool to read.
        blocks: int32 ids on the device, by logical index.
        piece: range to digest; its layers have one shape.
        workspace: workspace of the current stream.
        completion: where the digests are written.
        tuning: launch configuration.
    """
    move(pool, blocks, None, blocks, piece, workspace, completion, tuning, True)
