"""Which form of an operation computes: its Triton kernel or its torch reference. Left open, the device decides."""

from enum import Enum

import torch


class Implementation(Enum):
    """What a public function of this package may be asked for."""

    AUTO = "auto"  # Triton on GPUs, the reference on CPUs
    TRITON = "triton"  # on a CPU only in Triton's interpreter, for tests
    REFERENCE = "reference"


def uses_triton(device: torch.device, implementation: Implementation) -> bool:
    """Whether an operation on tensors of `device` runs its Triton kernel."""
    if implementation is Implementation.AUTO:
        return device.type == "cuda"
    return implementation is Implementation.TRITON
