"""Dry runs: find out which kernel specializations some work needs, before any of them is compiled.

The work runs on this thread, but kernels that are not loaded yet are recorded instead of launched. Memory that they
would have written is filled with zeros, so that numbers used as indices are in range. Specializations that this process
has launched before are launched as usual, and compute on such zeros.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from baton.kernels.dispatch_mode import DispatchMode
from baton.kernels.kernel_form import KernelForm

_UNFILLED = ("aten::empty", "aten::new_empty")


class _Local(threading.local):
    met: set[Hashable] | None = None


_local = _Local()


def is_met(launch: Hashable) -> bool:
    """Return whether this thread's dry run has already seen such a launch, and record it; False outside a dry run."""
    if _local.met is None or launch in _local.met:
        return _local.met is not None
    _local.met.add(launch)
    return False


def forms_of(work: Callable[[], None]) -> list[KernelForm]:
    """Do the work on this thread, but skip kernels that are not loaded -> the specializations that were skipped.

    Raises:
        Exception: whatever the work raises.
    """
    assert _local.met is None, "a dry run is not part of another"
    thread = threading.get_ident()
    forms: dict[tuple[Any, str], KernelForm | None] = {}

    def note(*, key: str, repr: str, fn: Any, compile: Any, is_manual_warmup: bool, already_compiled: bool) -> bool:
        """Record the specialization; Triton neither compiles nor launches if this hook returns True."""
        if threading.get_ident() != thread:
            return False
        if (fn.jit_function, key) not in forms:
            gpu: Any = driver.active
            forms[fn.jit_function, key] = KernelForm.asked(fn, compile, gpu.get_current_target())
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    _local.met = set()
    try:
        with _Zeros():
            work()
    finally:
        _local.met = None
        knobs.runtime.jit_cache_hook = before
    return [form for form in forms.values() if form is not None]


class _Zeros(DispatchMode):
    """Fills newly allocated memory with zeros."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(keywords or {}))
        if function._schema.name.startswith(_UNFILLED) and isinstance(made, torch.Tensor):
            made.zero_()
        return made
