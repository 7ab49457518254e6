"""What was decided of a call is kept for the next one that is alike: checks, options, sizes of a launch.

A layer calls with the same shapes as the one before it, and a step with those of the step before. Two calls are alike
if everything that checks and decisions may read is equal: of each tensor its shape, strides, dtype, device and place
within 16 bytes (`signature`; `open_signature` where any number of rows is decided alike), and the other arguments
themselves. Nothing may be decided by what a key leaves out; what is in the memory of a tensor is never read. Only calls
that were found right are kept, so a wrong one is checked, and refused, each time it comes.

It refuses to grow: a memo that is full begins anew.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

MAX_ENTRIES = 512
_LAST_BITS = 15  # of an address, within 16 bytes

Kept = TypeVar("Kept")
Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


def signature(tensor: torch.Tensor | None) -> Signature | None:
    """All of a tensor that a decision may depend on; None of none."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & _LAST_BITS


def open_signature(tensor: torch.Tensor, num_open: int = 1) -> tuple[object, ...]:
    """All of a tensor that a decision may depend on that takes any number along the first `num_open` dimensions.

    Of the last dimension, even if it is one of those, it says whether its numbers lie one after the other.
    """
    shape, strides = tensor.shape, tensor.stride()
    is_dense = not shape or shape[-1] <= 1 or strides[-1] == 1
    open_strides = strides[num_open:] if num_open == len(shape) else strides
    return (
        len(shape),
        shape[num_open:],
        open_strides,
        is_dense,
        tensor.dtype,
        tensor.device,
        tensor.data_ptr() & _LAST_BITS,
    )


class Memo(Generic[Kept]):
    """Decisions by what they depend on; from any thread."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._kept: dict[Hashable, Kept] = {}
        self._max_entries = max_entries
        self.find = self._kept.get

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Hashable, decision: Kept) -> Kept:
        """`decision`, which `find` gives for `key` from now on."""
        if len(self._kept) >= self._max_entries:
            self._kept.clear()
        self._kept[key] = decision
        return decision
