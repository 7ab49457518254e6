"""What Baton's kernels are held against, none of it a dependency: each is imported when a case asks for it.

A function here gives a system or none: `{"fa3": [...]}`, or `{}` where the package cannot be imported, so that a case
adds a baseline with one line, `**fa3_attention(...)`. Baselines get memory of their own where their layout differs from
Baton's. What is there and what is not, and why, is in the result's `baselines`.

From vLLM's wheel: FlashAttention-3, DeepGEMM, the Triton kernels of attention and of a mixture of experts.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from baton.bench.kernel_case import Call
from baton.bench.kernel_failure import ERRORS

PAGE_SIZE = 16
_SEGMENTS = 16  # of the key positions, as vLLM splits them
_SEQUENCES_OF_3D = 128  # as vLLM: so many programs of a batch without a split fill a GPU

Baseline = dict[str, list[Call]]

_MODULES = {
    "fa3": "vllm.vllm_flash_attn.flash_attn_interface",
    "deep_gemm": "vllm.third_party.deep_gemm",
    "vllm_attention": "vllm.v1.attention.ops.triton_unified_attention",
    "vllm_moe": "vllm.model_executor.layers.fused_moe.fused_moe",
}


@functools.cache
def _imported(name: str) -> tuple[Any, str]:
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
    return {name: _imported(name)[1] or "available" for name in _MODULES}


def each(function: Callable[..., object], sets: Sequence[Sequence[Any]]) -> list[Call]:
    """A call for each set of buffers: `function` with its arguments."""
    return [functools.partial(function, *arguments) for arguments in sets]


def torch_compiled(function: Callable[..., object], sets: Sequence[Sequence[Any]]) -> Baseline:
    """`torch.compile` of a reference, for these shapes alone."""
    compiled = torch.compile(function, dynamic=False, fullgraph=True)
    return {"torch_compile": each(compiled, sets)}
