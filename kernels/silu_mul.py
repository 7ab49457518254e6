"""The gate of SwiGLU: silu(gate) * up. Legend: T rows, I intermediate size.

Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

import torch
from torch.nn import functional

from baton.kernels.tiles import wide_dtype


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 I], gate first -> [..., I], same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_invariant(gate_up: torch.Tensor) -> torch.Tensor:
    """The same from operations that do not tell the vector body from the scalar tail."""
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
