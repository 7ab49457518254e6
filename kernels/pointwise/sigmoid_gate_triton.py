# mypy: ignore-errors
"""`sigmoid_gate` in Triton: a program for a row of a shared expert's, or for some columns of a row of attention's.

B: columns of a program.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_OUTPUT_COLUMNS, _OUTPUT_NUM_WARPS = 1024, 4
_THREAD_LEN = 8  # 16 bytes of bfloat16


@triton.jit
def _gate_output_kernel(
    mixed, gate, out, mixed_row, gate_row, gate_head,
    Q: tl.constexpr, E: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.program_id(1) * B + tl.arange(0, B)
    is_there_B = at_B < Q
    gate_B = tl.load(gate + row * gate_row + at_B // E * gate_head + at_B % E, mask=is_there_B, other=0.0)
    mixed_B = tl.load(mixed + row * mixed_row + at_B, mask=is_there_B, other=0.0)
    value_B = mixed_B.to(tl.float32) / (1.0 + tl.exp(-gate_B.to(tl.float32)))
    tl.store(out + row * Q + at_B, value_B.to(out.dtype.element_ty), mask=is_there_B)


@triton.jit
def _add_shared_kernel(
    mixed, shared, x, gate, out, mixed_row, shared_row, x_row,
    D: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at_B = tl.arange(0, B)
    is_there_B = at_B < D
    if GATED:  # a weight, which no launch before writes
        gate_B = tl.load(gate + at_B, mask=is_there_B, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    sum_B = tl.load(shared + row * shared_row + at_B, mask=is_there_B, other=0.0).to(tl.float32)
    mixed_B = tl.load(mixed + row * mixed_row + at_B, mask=is_there_B, other=0.0).to(tl.float32)
    if GATED:
        x_B = tl.load(x + row * x_row + at_B, mask=is_there_B, other=0.0)
        logit = tl.sum(x_B.to(tl.float32) * gate_B, axis=0).to(x_B.dtype).to(tl.float32)
        sum_B /= 1.0 + tl.exp(-logit)
    tl.store(out + row * D + at_B, (sum_B + mixed_B).to(out.dtype.element_ty), mask=is_there_B)


_launch_output = Launcher(_gate_output_kernel)
_launch_shared = Launcher(_add_shared_kernel)


def launch_output(mixed_TQ: torch.Tensor, gate_TAE: torch.Tensor) -> torch.Tensor:
    """See `gate_output`, which has checked the arguments."""
    num_rows, length = mixed_TQ.shape
    out_TQ = torch.empty(num_rows, length, dtype=mixed_TQ.dtype, device=mixed_TQ.device)
    if out_TQ.numel():
        arguments = mixed_TQ, gate_TAE, out_TQ, mixed_TQ.stride(0), *gate_TAE.stride()[:2]
        grid = num_rows, triton.cdiv(length, _OUTPUT_COLUMNS)
        _launch_output(grid, arguments, _output_constants(length, gate_TAE.shape[2], mixed_TQ.device))
    return out_TQ


def launch_shared(
    mixed_TD: torch.Tensor, shared_TD: torch.Tensor, x_TD: torch.Tensor, gate_1D: torch.Tensor | None
) -> torch.Tensor:
    """See `add_shared`, which has checked the arguments."""
    num_rows, length = mixed_TD.shape
    out_TD = torch.empty(num_rows, length, dtype=mixed_TD.dtype, device=mixed_TD.device)
    if out_TD.numel():
        is_gated = gate_1D is not None
        rows = mixed_TD, shared_TD, x_TD
        arguments = *rows, gate_1D if is_gated else x_TD, out_TD, *(row.stride(0) for row in rows)
        _launch_shared((num_rows,), arguments, _shared_constants(length, is_gated, mixed_TD.device))
    return out_TD


@functools.lru_cache(maxsize=256)
def _output_constants(length: int, head_dim: int, device: torch.device) -> Constants:
    by_name = {"Q": length, "E": head_dim, "B": _OUTPUT_COLUMNS, "num_warps": _OUTPUT_NUM_WARPS}
    return Constants(by_name | dependent_launch(device))


@functools.lru_cache(maxsize=256)
def _shared_constants(length: int, is_gated: bool, device: torch.device) -> Constants:
    return Constants(_of_row(length) | {"GATED": is_gated} | dependent_launch(device))


def _of_row(length: int) -> dict[str, int]:
    columns = triton.next_power_of_2(length)
    return {"D": length, "B": columns, "num_warps": min(max(columns // (32 * _THREAD_LEN), 1), 16)}


def variants() -> list[Variant]:
    """Of Qwen3.5-35B-A3B and of DeepSeek-V3, whose shared expert has no gate."""
    found = []
    for length, is_gated, early in ((2048, True, True), (2048, True, False), (7168, False, True)):
        rows = ("mixed", "shared", "x", "gate", "out")
        strides = ("mixed_row", "shared_row", "x_row")
        by_name = _of_row(length)
        num_warps = by_name.pop("num_warps")
        found.append(
            Variant(
                name=f"add_shared {length}{'' if is_gated else ' ungated'}{'' if early else ' late'}",
                kernel=_add_shared_kernel,
                types=dict.fromkeys(rows, "*bf16") | dict.fromkeys(strides, "i32"),
                constants=by_name | {"GATED": is_gated, "EARLY": early},
                aligned=(*rows, *strides),
                num_warps=num_warps,
                max_registers=96,
                max_shared_bytes=1024,
                on_amd=not early,
            )
        )
    for early in (True, False):
        rows, strides = ("mixed", "gate", "out"), ("mixed_row", "gate_row", "gate_head")
        found.append(
            Variant(
                name=f"gate_output 4096{'' if early else ' late'}",
                kernel=_gate_output_kernel,
                types=dict.fromkeys(rows, "*bf16") | dict.fromkeys(strides, "i32"),
                constants={"Q": 4096, "E": 256, "B": _OUTPUT_COLUMNS, "EARLY": early},
                aligned=(*rows, *strides),
                num_warps=_OUTPUT_NUM_WARPS,
                max_registers=64,
                max_shared_bytes=4096,
                on_amd=not early,
            )
        )
    return found
