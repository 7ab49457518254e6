"""Sums the partial results of a GEMM whose inner dimension a group of ranks may share.

In default numerics a rank's part is one library GEMM, and the ranks' parts are added in rank order. In batch-invariant
numerics the whole inner dimension is cut into the same slices however many ranks there are, and the slices' GEMMs are
added as one balanced tree: a rank adds the subtree it holds, and the ranks together add the levels above it. So 1, 2, 4
or 8 ranks round alike, bit for bit, and ranks still exchange just one tensor each.

Legend: T rows, K inner size (of this rank), N outputs, C slices (of this rank).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.kernels.gemm.slices import num_slices
from baton.kernels.tiles import matmul_slices


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add neighbours, then neighbours of those; the order depends only on the number of parts."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, parts[-1]] if len(parts) % 2 else pairs
    return parts[0]


def _same(part: torch.Tensor) -> torch.Tensor:
    return part


@dataclass(frozen=True, slots=True)
class InnerSum:
    """How a group of ranks shares inner dimensions.

    Attributes:
        num_ranks: ranks of the group; each holds an equal part.
        add_ranks: function that sums every rank's tensor, with the same bits at each rank.
    """

    num_ranks: int = 1
    add_ranks: Callable[[torch.Tensor], torch.Tensor] = _same

    def num_slices(self, inner_size: int) -> int:
        """Number of slices of this rank's part, which is `inner_size` long."""
        count, rest = divmod(num_slices(inner_size * self.num_ranks), self.num_ranks)
        assert count > 0
        assert rest == 0
        return count

    def linear(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Compute X W^T over the inner dimension of all ranks, [T, N]."""
        return self.add_ranks(functional.linear(x_TK, weight_NK))

    def linear_invariant(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Compute the same, each row independent of other rows and of the number of ranks; rounded once."""
        parts_CTN = matmul_slices(x_TK, weight_NK, self.num_slices(x_TK.shape[1]))
        return self.add_ranks(tree_sum(parts_CTN.unbind())).to(x_TK.dtype)


ALONE = InnerSum()
