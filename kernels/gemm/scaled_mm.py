"""The library's float8 GEMM with 1 x 128 by 128 x 128 scales, for many rows: cuBLASLt, called through torch.

Not every version of torch and CUDA has it, and it refuses some shapes. A shape that it has refused once is not tried
again. Every GEMM that another kernel computes instead is counted, and the first is logged. Legend: M rows, N outputs, K
inputs, G groups.
"""

import functools
import logging

import torch
from torch.nn import functional

from baton.kernels.gemm.fp8_weight import Fp8Weight

log = logging.getLogger(__name__)

ROWS_MULTIPLE = 4
_MIN_CUDA = (12, 9)


class Library:
    """The library's GEMM, with a record of what it has refused.

    Attributes:
        num_refused: number of GEMMs that another kernel had to compute.
    """

    def __init__(self) -> None:
        self.num_refused = 0
        self._refused: set[tuple[int, int]] = set()

    @property
    def refused(self) -> frozenset[tuple[int, int]]:
        """Shapes (outputs, inputs) of the weights that the library refused."""
        return frozenset(self._refused)

    def gemm(self, q_MK: torch.Tensor, scales_GM: torch.Tensor, weight: Fp8Weight) -> torch.Tensor | None:
        """Return [M, N] bfloat16, or None if the library refuses. Pads M to a multiple of four if necessary."""
        shape = (weight.num_outputs, weight.num_inputs)
        if not _has_blockwise(q_MK.device):
            self._refuse(shape, "torch, CUDA or the device has none")
            return None
        if shape in self._refused:
            self.num_refused += 1
            return None
        try:
            return _gemm(q_MK, scales_GM, weight)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # a fault of the device, not of the shape
            raise
        except (RuntimeError, ValueError) as error:  # how torch and cuBLASLt refuse a shape
            self._refuse(shape, str(error).splitlines()[0])
            return None

    def _refuse(self, shape: tuple[int, int], reason: str) -> None:
        if not self._refused:
            log.warning("float8 GEMMs of the library are replaced by Baton's own, first at %s: %s", shape, reason)
        self._refused.add(shape)
        self.num_refused += 1


LIBRARY = Library()


@functools.cache
def _has_blockwise(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(functional, "scaled_mm") or torch.version.cuda is None:
        return False
    major, minor = torch.version.cuda.split(".")[:2]
    return torch.cuda.get_device_capability(device) == (9, 0) and (int(major), int(minor)) >= _MIN_CUDA


def _gemm(q_MK: torch.Tensor, scales_GM: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    num_rows = len(q_MK)
    missing = -num_rows % ROWS_MULTIPLE
    if missing:
        q_MK = torch.cat([q_MK, q_MK.new_zeros(missing, q_MK.shape[1])])
        scales_GM = functional.pad(scales_GM, (0, missing), value=1.0)
    # Scales of A: [M, G] with M contiguous. Of W: [G', blocks of N] with G' contiguous, G' being G padded to four.
    values_KN, scales_GB = _turned(weight)
    out_MN = functional.scaled_mm(
        q_MK.contiguous(),
        values_KN,
        scales_GM.contiguous().t(),
        functional.ScalingType.BlockWise1x128,
        scales_GB,
        functional.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out_MN[:num_rows] if missing else out_MN


def _turned(weight: Fp8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight as views in the library's layout, made once."""
    found: tuple[torch.Tensor, torch.Tensor] | None = weight.prepared.get(_turned)
    if found is None:
        scales_BG = weight.scales_BG
        padded_GB = scales_BG.as_strided((scales_BG.stride(0), len(scales_BG)), (1, scales_BG.stride(0)))
        found = weight.prepared[_turned] = weight.values_NK.t(), padded_GB
    return found
