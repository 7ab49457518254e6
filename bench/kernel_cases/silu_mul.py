"""Rows of `baton bench kernels` for `silu_mul_fused`: activations of a layer, plain and in float8."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.baselines import torch_compiled
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8_reference
from baton.kernels.pointwise import silu_mul_triton
from baton.kernels.pointwise.silu_mul import silu_mul_fused

_ROWS = (1, 8, 64, 512, 2048, 8192)


def _num_bytes(num_rows: int, length: int, quantize: bool) -> int:
    return num_rows * (4 * length + (length + 4 * length // GROUP_LEN if quantize else 2 * length))


def _by_torch(gate_up_TJ: torch.Tensor, quantize: bool) -> object:
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=1)
    rows_TI = functional.silu(gate_TI) * up_TI
    return quantize_fp8_reference(rows_TI) if quantize else rows_TI


def _inputs(device: torch.device, num_rows: int, length: int) -> torch.Tensor:
    return torch.randn(num_rows, 2 * length, device=device, dtype=torch.bfloat16)


def _prepare(num_rows: int, length: int, quantize: bool, device: torch.device, num_sets: int) -> Systems:
    sets = [_inputs(device, num_rows, length) for _ in range(num_sets)]
    num_padded = num_rows if quantize else None
    systems = {
        "ours": [kept(partial(silu_mul_fused, gate_up_TJ, num_padded=num_padded)) for gate_up_TJ in sets],
        "torch": [kept(partial(_by_torch, gate_up_TJ, quantize)) for gate_up_TJ in sets],
        **torch_compiled(_by_torch, [(gate_up_TJ, quantize) for gate_up_TJ in sets]),
    }
    if device.type == "cuda":
        launch = partial(silu_mul_triton.launch, num_padded=num_padded, early=False)
        systems["late"] = [kept(partial(launch, gate_up_TJ)) for gate_up_TJ in sets]
    return systems


def _case(num_rows: int, length: int, quantize: bool, only_gpu: bool) -> KernelCase:
    return KernelCase(
        kernel="silu_mul_fused",
        shape=f"T={num_rows} I={length}{' fp8' if quantize else ''}",
        num_bytes=_num_bytes(num_rows, length, quantize),
        set_bytes=_num_bytes(num_rows, length, quantize),
        prepare=partial(_prepare, num_rows, length, quantize),
        only_gpu=only_gpu,
    )


def cases() -> list[KernelCase]:
    """An 8B model's layers, a 30B model's experts; a tiny case for CPUs."""
    found = [_case(num_rows, 12_288, quantize, True) for quantize in (False, True) for num_rows in _ROWS]
    found += [_case(num_rows, 768, False, True) for num_rows in (8, 512, 65_536)]
    return [*found, _case(8, 256, True, False)]


def _prepare_tuning(
    num_rows: int, length: int, quantize: bool, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    launch = partial(silu_mul_triton.launch, num_padded=num_rows if quantize else None, options=options)
    return [kept(partial(launch, _inputs(device, num_rows, length))) for _ in range(num_sets)]


def tuning() -> list[TuningPoint]:
    """Groups of a program, its warps, and early start where it may not pay; all give the same bits."""
    small = [(2, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (16, 4), (16, 8)]
    large = [(8, 2), (8, 4), (16, 2), (16, 4), (16, 8), (32, 4), (32, 8)]
    points = [(12_288, quantize, num_rows) for quantize in (False, True) for num_rows in (64, 512, 8192)]
    points += [(768, False, 512), (768, False, 65_536)]
    found = []
    for length, quantize, num_rows in points:
        candidates: list[dict[str, object]] = [
            {"groups": groups, "num_warps": num_warps}
            for groups, num_warps in (small if num_rows * length < 1 << 21 else large)
        ]
        if num_rows > 512:
            candidates = [one | {"early": early} for one in candidates for early in (True, False)]
        found.append(
            TuningPoint(
                kernel="silu_mul_fused",
                shape=f"{length} fp8" if quantize else str(length),
                size=num_rows,
                candidates=candidates,
                set_bytes=_num_bytes(num_rows, length, quantize),
                prepare=partial(_prepare_tuning, num_rows, length, quantize),
            )
        )
    return found
