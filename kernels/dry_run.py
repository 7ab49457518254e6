"""Work whose kernels are asked for and not launched: which forms of them it needs, before any is compiled.

What kernels would have written is zeros, so that numbers that index something are in range. A form that this process
has launched before is launched as ever, and computes of such zeros.
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
    """Whether this thread's dry run has met a launch like this one; from now on it has. False outside of one."""
    if _local.met is None or launch in _local.met:
        return _local.met is not None
    _local.met.add(launch)
    return False


def forms_of(work: Callable[[], None]) -> list[KernelForm]:
    """Do the work on this thread, but for kernels that are not loaded -> the forms of these.

    Raises:
        Exception: whatever the work raises.
    """
    assert _local.met is None, "a dry run is not part of another"
    thread = threading.get_ident()
    forms: dict[tuple[Any, str], KernelForm | None] = {}

    def note(*, key: str, repr: str, fn: Any, compile: Any, is_manual_warmup: bool, already_compiled: bool) -> bool:
        """Triton neither compiles nor launches what this returns True of."""
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
    """New memory is filled."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(keywords or {}))
        if function._schema.name.startswith(_UNFILLED) and isinstance(made, torch.Tensor):
            made.zero_()
        return made
