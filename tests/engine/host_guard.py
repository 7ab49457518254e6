"""A guard against code that would make the host wait for a GPU, on a CPU where nothing waits.

Inside it, reading a number from a tensor (`item`, `bool`, `int`, `tolist`, `numpy`, `cpu`), and operations whose result
has a size that depends on numbers (`nonzero`, a boolean mask as an index, ...), raise `HostRead`.
"""

import contextlib
import threading

import torch
from torch.utils._pytree import tree_leaves

from baton.kernels.dispatch_mode import DispatchMode

READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::masked_scatter",
    "aten::equal",
    "aten::allclose",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
METHODS = ("tolist", "numpy", "cpu", "__array__")
_state = threading.local()


class HostRead(Exception):
    """The host looked at a number on the device."""


class _Guard(DispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        name = function._schema.name
        if name in READS:
            raise HostRead(name)
        if name in INDEXED and any(_is_mask(index) for index in arguments[1]):
            raise HostRead(f"{name} with a mask")
        if name == "aten::repeat_interleave" and _counts_on_device(arguments, keywords):
            raise HostRead(name)
        with self:  # what it is made of is looked at, too
            made = function.decompose(*arguments, **keywords)
        return function(*arguments, **keywords) if made is NotImplemented else made


def _is_mask(index):
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _counts_on_device(arguments, keywords):
    counts = arguments[1] if len(arguments) > 1 else arguments[0]
    return isinstance(counts, torch.Tensor) and keywords.get("output_size") is None


def _refusing(name):
    method = getattr(torch.Tensor, name)

    def refuse(self, *arguments, **keywords):
        if getattr(_state, "depth", 0):
            raise HostRead(f"Tensor.{name}")
        return method(self, *arguments, **keywords)

    return refuse


@contextlib.contextmanager
def methods_guarded(patch):
    """Needed around `guarded`, once: what no operation of torch shows. Other threads may still read."""
    for name in METHODS:
        patch.setattr(torch.Tensor, name, _refusing(name))
    yield


@contextlib.contextmanager
def guarded():
    """No host read by this thread."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        with _Guard():
            yield
    finally:
        _state.depth -= 1


def visiting(function):
    """A function in which the host may look: a visit that is meant."""

    def visit(*arguments, **keywords):
        depth, _state.depth = getattr(_state, "depth", 0), 0
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return function(*arguments, **keywords)
        finally:
            _state.depth = depth

    return visit


def leaves(values):
    """All tensors of a structure."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
