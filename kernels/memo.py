"""Caches what was decided about a call (checks, options, launch sizes) for later calls that are alike.

A layer calls with the same shapes as the layer before it, and a step with those of the step before. Two calls are alike
if everything that checks and decisions may read is equal: each tensor's shape, strides, dtype, device and address
modulo 16 bytes (`signature`; or `open_signature` where any number of rows is decided alike), and the other arguments
themselves. No decision may depend on anything that the key leaves out, and never on the contents of a tensor. Only
calls that passed their checks are cached, so an invalid call is checked, and refused, every time.

A memo does not grow without bound: a full one is cleared.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

MAX_ENTRIES = 512
_LAST_BITS = 15  # mask of an address modulo 16 bytes

Kept = TypeVar("Kept")
Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


def signature(tensor: torch.Tensor | None) -> Signature | None:
    """Everything about a tensor that a decision may depend on; None for None."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & _LAST_BITS


def open_signature(tensor: torch.Tensor, num_open: int = 1) -> tuple[object, ...]:
    """Everything about a tensor that a decision may depend on if its first `num_open` dimensions may have any length.

    For the last dimension, even if it is one of those, the result says whether it is contiguous.
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
    """Decisions, keyed by everything that they depend on; usable from any thread."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._kept: dict[Hashable, Kept] = {}
        self._max_entries = max_entries
        self.find = self._kept.get

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Hashable, decision: Kept) -> Kept:
        """Store `decision` under `key` for later calls of `find`, and return it."""
        if len(self._kept) >= self._max_entries:
            self._kept.clear()
        self._kept[key] = decision
        return decision
