"""A weight in float8 (e4m3) with a float32 scale for each block of 128 x 128, as `gemm_fp8` reads it.

It is made once, when a model is loaded: from a weight of a wider dtype (`quantize_weight`), or from a checkpoint that
is already quantized (`Fp8Weight.of`). Rows of scales are padded to a multiple of four, as cuBLASLt requires.

Legend: N rows (outputs), K columns (inputs), B blocks of rows, G blocks of columns.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_groups

BLOCK_LEN = GROUP_LEN
_SCALE_PAD = 4
_ROWS_AT_ONCE = 32 * BLOCK_LEN  # rows of a weight that are widened to float32 at once


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """Values and scales, checked by `of` or `quantize_weight`.

    Attributes:
        values_NK: float8, contiguous.
        scales_BG: float32 [ceil(N / 128), K / 128], a view of rows whose length is a multiple of four.
        ue8m0: whether activations get scales that are powers of two, as its checkpoint was trained (DeepSeek-V3.1).
        prepared: views and descriptors that GEMMs make of the weight once, each under a key of its own.
    """

    values_NK: torch.Tensor
    scales_BG: torch.Tensor
    ue8m0: bool = False
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(values_NK: torch.Tensor, scales_BG: torch.Tensor, *, ue8m0: bool = False) -> "Fp8Weight":
        """Wrap a checkpoint's weight, each of whose values stands for itself times its block's scale.

        Raises:
            KernelArgumentInvalid: a shape or a dtype does not fit.
        """
        require_tensor("values_NK", values_NK, [None, None], [torch.float8_e4m3fn])
        num_rows, K = values_NK.shape
        require(K % GROUP_LEN == 0 and K > 0, "values_NK", f"its {K} columns are no multiple of {GROUP_LEN}")
        require(num_rows > 0, "values_NK", "has no rows")
        blocks = [-(-num_rows // BLOCK_LEN), K // GROUP_LEN]
        require_tensor("scales_BG", scales_BG, blocks, [torch.float32, torch.bfloat16], values_NK.device)
        padded_BG = torch.zeros(
            blocks[0], -(-blocks[1] // _SCALE_PAD) * _SCALE_PAD, dtype=torch.float32, device=values_NK.device
        )
        padded_BG[:, : blocks[1]] = scales_BG
        return Fp8Weight(values_NK.contiguous(), padded_BG[:, : blocks[1]], ue8m0)

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.values_NK.shape[0]

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.values_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.values_NK.numel() + 4 * self.scales_BG.stride(0) * self.scales_BG.shape[0]

    def dequantize(self) -> torch.Tensor:
        """Return the weight as float32 [N, K]."""
        scales_NG = self.scales_BG.repeat_interleave(BLOCK_LEN, dim=0)[: self.num_outputs]
        return self.values_NK.to(torch.float32) * scales_NG.repeat_interleave(GROUP_LEN, dim=1)


def quantize_weight(weight_NK: torch.Tensor) -> Fp8Weight:
    """Quantize a weight to float8, scaling each 128 x 128 block by its largest element; K must be a multiple of 128.

    Raises:
        KernelArgumentInvalid: the shape or the dtype does not fit.
    """
    require_tensor("weight_NK", weight_NK, [None, None], [torch.bfloat16, torch.float16, torch.float32])
    num_rows, K = weight_NK.shape
    require(K % GROUP_LEN == 0 and K > 0, "weight_NK", f"its {K} columns are no multiple of {GROUP_LEN}")
    values_NK = torch.empty(num_rows, K, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scales_BG = torch.empty(-(-num_rows // BLOCK_LEN), K // GROUP_LEN, dtype=torch.float32, device=weight_NK.device)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        part_NK = weight_NK[first : first + _ROWS_AT_ONCE].to(torch.float32)
        missing = -len(part_NK) % BLOCK_LEN
        whole_NK = torch.nn.functional.pad(part_NK, (0, 0, 0, missing))
        num_blocks = len(whole_NK) // BLOCK_LEN
        q, scales = quantize_groups(whole_NK.view(num_blocks, BLOCK_LEN, K // GROUP_LEN, GROUP_LEN), (1, 3))
        values_NK[first : first + _ROWS_AT_ONCE] = q.view(len(whole_NK), K)[: len(part_NK)]
        scales_BG[first // BLOCK_LEN : first // BLOCK_LEN + num_blocks] = scales
    return Fp8Weight.of(values_NK, scales_BG)
