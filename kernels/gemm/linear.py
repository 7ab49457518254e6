"""Products with a weight: y = x W^T, no bias. Legend: T rows, K inputs, N outputs."""

import torch
from torch.nn import functional

from baton.kernels.tiles import product_rows


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The library's product, [T, N] in the dtype of both operands."""
    return functional.linear(x_TK, weight_NK)


def linear_invariant(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The same, each row independent of the rows beside it (`kernels.tiles`)."""
    return product_rows(x_TK, weight_NK)
