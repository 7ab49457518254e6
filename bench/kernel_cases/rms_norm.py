"""Rows of `baton bench kernels` for `rms_norm_fused`: the norms of a layer, with the residual and in float8."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.baselines import torch_compiled
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8_reference
from baton.kernels.pointwise import rms_norm_triton
from baton.kernels.pointwise.rms_norm import rms_norm_fused

_ROWS = (1, 8, 64, 512, 2048, 8192)
_EPS = 1e-6
_FORMS = ("plain", "residual", "residual fp8")


def _num_bytes(form: str, num_rows: int, length: int) -> int:
    row_bytes = {"plain": 4 * length, "residual": 8 * length, "residual fp8": 7 * length + 4 * length // GROUP_LEN}
    return num_rows * row_bytes[form] + 2 * length


def _inputs(device: torch.device, num_rows: int, length: int) -> list[torch.Tensor]:
    rows = [torch.randn(num_rows, length, device=device, dtype=torch.bfloat16) for _ in range(2)]
    return [*rows, torch.ones(length, device=device, dtype=torch.bfloat16)]


def _ours(form: str, inputs: Sequence[torch.Tensor]) -> Call:
    x_TD, other_TD, weight_D = inputs
    residual_TD = other_TD if "residual" in form else None
    num_padded = len(x_TD) if "fp8" in form else None
    return kept(partial(rms_norm_fused, x_TD, weight_D, _EPS, residual_TD=residual_TD, num_padded=num_padded))


def _launch(
    form: str, inputs: Sequence[torch.Tensor], options: Mapping[str, object] | None = None, early: bool = True
) -> Call:
    x_TD, other_TD, weight_D = inputs
    residual_TD = other_TD if "residual" in form else None
    num_padded = len(x_TD) if "fp8" in form else None
    launch = partial(rms_norm_triton.launch, plus_one=False, options=options, early=early)
    return kept(partial(launch, x_TD, weight_D, _EPS, residual_TD, num_padded))


def _by_torch(form: str, x_TD: torch.Tensor, other_TD: torch.Tensor, weight_D: torch.Tensor) -> object:
    sum_TD = x_TD + other_TD if "residual" in form else x_TD
    rows_TD = functional.rms_norm(sum_TD, weight_D.shape, weight_D, _EPS)
    return sum_TD, quantize_fp8_reference(rows_TD) if "fp8" in form else rows_TD


def _prepare(form: str, num_rows: int, length: int, device: torch.device, num_sets: int) -> Systems:
    sets = [_inputs(device, num_rows, length) for _ in range(num_sets)]
    systems = {
        "ours": [_ours(form, inputs) for inputs in sets],
        "invariant": [_ours(form, inputs) for inputs in sets],  # there is one form, whose price is none
        "torch": [kept(partial(_by_torch, form, *inputs)) for inputs in sets],
        **torch_compiled(_by_torch, [(form, *inputs) for inputs in sets]),
    }
    if device.type == "cuda":
        systems["late"] = [_launch(form, inputs, early=False) for inputs in sets]
    return systems


def cases() -> list[KernelCase]:
    """Hidden sizes of an 8B and a 30B model; a tiny case for CPUs."""
    shapes = [(form, num_rows, 4096) for form in _FORMS for num_rows in _ROWS]
    shapes += [("residual", num_rows, 2048) for num_rows in (1, 64, 8192)]
    found = [(shape, True) for shape in shapes] + [(("residual fp8", 8, 256), False)]
    return [
        KernelCase(
            kernel="rms_norm_fused",
            shape=f"T={num_rows} D={length} {form}",
            num_bytes=_num_bytes(form, num_rows, length),
            set_bytes=_num_bytes(form, num_rows, length),
            prepare=partial(_prepare, form, num_rows, length),
            only_gpu=only_gpu,
        )
        for (form, num_rows, length), only_gpu in found
    ]


def _prepare_tuning(
    form: str, length: int, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    """Time few rows, repeated to cost as much as many, with many rows: both share one choice, so bits are the same."""
    few = [_inputs(device, max(16, 4096 // length), length) for _ in range(num_sets)]
    many = [_inputs(device, (1 << 23) // length, length) for _ in range(num_sets)]

    def both(small: Call, large: Call) -> None:
        for _ in range(8):
            small()
        large()

    pairs = zip(few, many, strict=True)
    return [partial(both, _launch(form, small, options), _launch(form, large, options)) for small, large in pairs]


def tuning() -> list[TuningPoint]:
    """Number of warps that share a row."""
    long = [{"rows": 1, "num_warps": num_warps} for num_warps in (2, 4, 8, 16)]
    points = [("residual", 4096, long), ("residual", 2048, long), ("residual", 5120, long[1:])]
    return [
        TuningPoint(
            kernel="rms_norm_fused",
            shape=str(length),
            size=0,
            candidates=candidates,
            set_bytes=_num_bytes(form, (1 << 23) // length, length),
            prepare=partial(_prepare_tuning, form, length),
        )
        for form, length, candidates in points
    ]
