"""Rows of `baton bench kernels` for `gelu_mul_fused`: the gates of dense layers as Gemma has them."""

from functools import partial

import torch
from torch.nn import functional

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.baselines import torch_compiled
from baton.bench.kernel_bench.case import KernelCase, Systems
from baton.kernels.pointwise.gelu_mul import gelu_mul_fused

_ROWS = (1, 8, 64, 512, 8192)


def _by_torch(gate_up_TJ: torch.Tensor) -> object:
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=1)
    return functional.gelu(gate_TI, approximate="tanh") * up_TI


def _prepare(num_rows: int, length: int, device: torch.device, num_sets: int) -> Systems:
    sets = [torch.randn(num_rows, 2 * length, device=device, dtype=torch.bfloat16) for _ in range(num_sets)]
    return {
        "ours": [kept(partial(gelu_mul_fused, gate_up_TJ)) for gate_up_TJ in sets],
        "torch": [kept(partial(_by_torch, gate_up_TJ)) for gate_up_TJ in sets],
        **torch_compiled(_by_torch, [(gate_up_TJ,) for gate_up_TJ in sets]),
    }


def _case(num_rows: int, length: int, only_gpu: bool) -> KernelCase:
    num_bytes = num_rows * 6 * length
    return KernelCase(
        kernel="gelu_mul_fused",
        shape=f"T={num_rows} I={length}",
        num_bytes=num_bytes,
        set_bytes=num_bytes,
        prepare=partial(_prepare, num_rows, length),
        only_gpu=only_gpu,
    )


def cases() -> list[KernelCase]:
    """A 9B model's layers; one tiny one for CPUs."""
    return [*(_case(num_rows, 14_336, True) for num_rows in _ROWS), _case(8, 256, False)]
