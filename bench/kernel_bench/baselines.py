"""What Baton's kernels are held against, none of it a dependency: each is imported when a case asks for it.

A function here or in `kernel_baselines_attention` and `kernel_baselines_gemm` gives a system or none: `{"fa3": [...]}`,
or `{}` where the package cannot be imported, so that a case adds a baseline with one line, `**fa3(sets)`. Baselines
get memory of their own where their layout differs from Baton's, and what vLLM prepares once for all layers of a step is
prepared outside of the calls. What is there and what is not, and why, is in the result's `baselines`.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from baton.bench.kernel_bench.case import Call
from baton.bench.kernel_bench.failure import ERRORS

TORCH_COMPILE = "torch_compile"  # the name of a system that `torch.compile` makes
_MAX_SHAPES = 4096  # of one function that are compiled, in a process that measures many rows

Baseline = dict[str, list[Call]]

_MODULES = {
    "fa3": "vllm.vllm_flash_attn.flash_attn_interface",
    "deep_gemm": "vllm.third_party.deep_gemm",
    "vllm_attention": "vllm.v1.attention.ops.triton_unified_attention",
    "vllm_moe": "vllm.model_executor.layers.fused_moe.fused_moe",
}


@functools.cache
def imported(name: str) -> tuple[Any, str]:
    """The module of a baseline, or None and why not."""
    try:
        module = importlib.import_module(_MODULES[name])
    except ERRORS as error:
        return None, f"{type(error).__name__}: {error}"[:300]
    if name == "fa3" and not module.FA3_AVAILABLE:
        return None, str(module.FA3_UNAVAILABLE_REASON)[:300]
    return module, ""


def availability() -> dict[str, str]:
    """Of each baseline that is not torch's own: "available", or why not."""
    return {name: imported(name)[1] or "available" for name in _MODULES}


def each(function: Callable[..., object], sets: Sequence[Sequence[Any]]) -> list[Call]:
    """A call for each set of buffers: `function` with its arguments."""
    return [functools.partial(function, *arguments) for arguments in sets]


def torch_compiled(
    function: Callable[..., object], sets: Sequence[Sequence[Any]], name: str = TORCH_COMPILE
) -> Baseline:
    """`torch.compile` of a reference, for these shapes alone; nothing on a CPU, where it would take minutes."""
    if not any(getattr(argument, "is_cuda", False) for argument in sets[0]):
        return {}
    return {name: each(compiled(function), sets)}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function by `torch.compile`, one thread of compilation and no limit that many rows would meet."""
    import torch
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MAX_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = _MAX_SHAPES
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, dynamic=False, fullgraph=True)
