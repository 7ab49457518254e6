"""Tuned kernel configurations: one committed table per kind of GPU, filled by `scripts/tune_kernels.py`.

Nothing is tuned while serving. A table maps kernel -> shape -> size -> options; a tuned size covers all sizes up to it
and above the tuned size before it. Shapes that no table has get the kernel's own rule, not the options of another
shape.
"""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch

_TABLES = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h200"}  # both have the same multiprocessors
_DEFAULT = "h200"  # used when compiling or interpreting without a GPU

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


_UNTUNED: set[str] = set()


def untuned() -> tuple[str, ...]:
    """Sorted kernels and shapes that this process asked for and no table has."""
    return tuple(sorted(_UNTUNED.copy()))


@functools.cache
def table(name: str = _DEFAULT) -> Table:
    """Load the committed table of one kind of GPU."""
    found: Table = json.loads((resources.files("baton.kernels") / "tuned" / f"{name}.json").read_text())
    return found


@functools.cache
def _table_name(device_index: int | None) -> str:
    if device_index is None:
        return _DEFAULT
    return _TABLES.get(torch.cuda.get_device_name(device_index), _DEFAULT)


@functools.lru_cache(maxsize=4096)
def find(
    kernel: str, shape: str, size: int, device_index: int | None = None, *, reaches_on: bool = True
) -> Mapping[str, Any] | None:
    """Return the options for a shape at a size: of the smallest tuned size that is not below it, else of the largest.

    Args:
        kernel: name in the table.
        shape: what does not change between launches, e.g. "24576x4096".
        size: what changes, e.g. the number of rows.
        device_index: index of the GPU; None if there is none.
        reaches_on: whether the largest tuned size covers all sizes above it; otherwise those get None.
    """
    sizes = table(_table_name(device_index)).get(kernel, {}).get(shape)
    if not sizes:
        _UNTUNED.add(f"{kernel} {shape}")
        return None
    numbers = sorted(int(number) for number in sizes)
    chosen = next((number for number in numbers if number >= size), numbers[-1] if reaches_on else None)
    return None if chosen is None else sizes[str(chosen)]
