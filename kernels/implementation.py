"""Selects the implementation of an operation: its Triton kernel or its torch reference. `AUTO` decides by device."""

from enum import Enum

import torch


class Implementation(Enum):
    """Implementation that a caller of a public function of this package may request."""

    AUTO = "auto"  # Triton on GPUs, the reference on CPUs
    TRITON = "triton"  # on a CPU only in Triton's interpreter, for tests
    REFERENCE = "reference"


def uses_triton(device: torch.device, implementation: Implementation) -> bool:
    """Return whether an operation on tensors of `device` runs its Triton kernel."""
    if implementation is Implementation.AUTO:
        return device.type == "cuda"
    return implementation is Implementation.TRITON
