# mypy: ignore-errors
"""`sigmoid_gate` in Triton: a program for some columns of a row.

B: columns of a program.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_COLUMNS, _NUM_WARPS = 1024, 4


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
def add_gated(mixed, shared, logit):
    """Float32 mixed + shared * sigmoid(logit), rounded once: left to a compiler, one kernel would, another not."""
    weight = 1.0 / (1.0 + tl.exp(-logit.to(tl.float32)))
    return tl.fma(shared, tl.broadcast_to(weight, shared.shape), mixed)


@triton.jit
def _add_shared_kernel(
    mixed, shared, gate, out, mixed_row, shared_row, gate_row,
    D: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at_B = tl.program_id(1) * B + tl.arange(0, B)
    is_there_B = at_B < D
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    shared_B = tl.load(shared + row * shared_row + at_B, mask=is_there_B, other=0.0).to(tl.float32)
    mixed_B = tl.load(mixed + row * mixed_row + at_B, mask=is_there_B, other=0.0).to(tl.float32)
    if GATED:
        sum_B = add_gated(mixed_B, shared_B, tl.load(gate + row * gate_row))
    else:
        sum_B = mixed_B + shared_B
    tl.store(out + row * D + at_B, sum_B.to(out.dtype.element_ty), mask=is_there_B)


_launch_output = Launcher(_gate_output_kernel)
_launch_shared = Launcher(_add_shared_kernel)


def launch_output(mixed_TQ: torch.Tensor, gate_TAE: torch.Tensor) -> torch.Tensor:
    """See `gate_output`, which has checked the arguments."""
    num_rows, length = mixed_TQ.shape
    out_TQ = torch.empty(num_rows, length, dtype=mixed_TQ.dtype, device=mixed_TQ.device)
    if out_TQ.numel():
        arguments = mixed_TQ, gate_TAE, out_TQ, mixed_TQ.stride(0), *gate_TAE.stride()[:2]
        grid = num_rows, triton.cdiv(length, _COLUMNS)
        _launch_output(grid, arguments, _output_constants(length, gate_TAE.shape[2], mixed_TQ.device))
    return out_TQ


def launch_shared(mixed_TD: torch.Tensor, shared_TD: torch.Tensor, gate_T1: torch.Tensor | None) -> torch.Tensor:
    """See `add_shared`, which has checked the arguments."""
    num_rows, length = mixed_TD.shape
    out_TD = torch.empty(num_rows, length, dtype=mixed_TD.dtype, device=mixed_TD.device)
    if out_TD.numel():
        is_gated = gate_T1 is not None
        rows = mixed_TD, shared_TD, gate_T1 if is_gated else shared_TD
        arguments = *rows, out_TD, *(row.stride(0) for row in rows)
        grid = num_rows, triton.cdiv(length, _COLUMNS)
        _launch_shared(grid, arguments, _shared_constants(length, is_gated, mixed_TD.device))
    return out_TD


@functools.lru_cache(maxsize=256)
def _output_constants(length: int, head_dim: int, device: torch.device) -> Constants:
    by_name = {"Q": length, "E": head_dim, "B": _COLUMNS, "num_warps": _NUM_WARPS}
    return Constants(by_name | dependent_launch(device))


@functools.lru_cache(maxsize=256)
def _shared_constants(length: int, is_gated: bool, device: torch.device) -> Constants:
    by_name = {"D": length, "B": _COLUMNS, "GATED": is_gated, "num_warps": _NUM_WARPS}
    return Constants(by_name | dependent_launch(device))


def variants() -> list[Variant]:
    """Of Qwen3.5-35B-A3B and of DeepSeek-V3, whose shared expert has no gate."""
    found = []
    for length, is_gated, early in ((2048, True, True), (2048, True, False), (7168, False, True)):
        rows = ("mixed", "shared", "gate", "out")
        strides = ("mixed_row", "shared_row", "gate_row")
        found.append(
            Variant(
                name=f"add_shared {length}{'' if is_gated else ' ungated'}{'' if early else ' late'}",
                kernel=_add_shared_kernel,
                types=dict.fromkeys(rows, "*bf16") | dict.fromkeys(strides, "i32"),
                constants={"D": length, "B": _COLUMNS, "GATED": is_gated, "EARLY": early},
                aligned=("mixed", "shared", "out", *strides[:2]),  # logits stand behind others
                num_warps=_NUM_WARPS,
                max_registers=64,
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
                constants={"Q": 4096, "E": 256, "B": _COLUMNS, "EARLY": early},
                aligned=(*rows, *strides),
                num_warps=_NUM_WARPS,
                max_registers=64,
                max_shared_bytes=4096,
                on_amd=not early,
            )
        )
    return found
