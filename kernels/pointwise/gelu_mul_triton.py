# mypy: ignore-errors
"""`gelu_mul_fused` in Triton: every program does one piece of one row; nothing crosses from one to another.

Shapes: I results of a row, C columns of a piece.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_PIECE_LEN = 1024
_THREAD_LEN = 8  # 16 bytes of bfloat16


def launch(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """[T, I]; see `gelu_mul_fused`, which has checked the argument."""
    num_rows, double = gate_up_TJ.shape
    out_TI = torch.empty(num_rows, double // 2, dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    if num_rows == 0:
        return out_TI
    constants = _constants(double // 2, gate_up_TJ.device)
    num_pieces = -(-(double // 2) // constants.by_name["C"])
    _launch_gate((num_pieces, num_rows), (gate_up_TJ, gate_up_TJ.stride(0), out_TI), constants)
    return out_TI


@functools.lru_cache(maxsize=64)
def _constants(length: int, device: torch.device) -> Constants:
    piece = min(_PIECE_LEN, triton.next_power_of_2(length))
    by_name = {"I": length, "C": piece, "num_warps": max(piece // (32 * _THREAD_LEN), 1)}
    return Constants(by_name | dependent_launch(device, True))


@triton.jit
def _gelu_mul_kernel(
    gate_up,
    row_stride,
    out,
    I: tl.constexpr,  # noqa: E741
    C: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column_C = tl.program_id(0) * C + tl.arange(0, C)
    is_column = column_C < I
    from_C = gate_up + row * row_stride + column_C
    gate_C = tl.load(from_C, mask=is_column, other=0.0)
    up_C = tl.load(from_C + I, mask=is_column, other=0.0)
    wide_C = gate_C.to(tl.float32)
    # 1 + tanh(y) is 2 / (1 + exp(-2 y)); 1.596 is twice the square root of 2 / pi.
    twice_C = 1.5957691216057308 * (wide_C + 0.044715 * wide_C * wide_C * wide_C)
    gelu_C = (wide_C / (1.0 + tl.exp(-twice_C))).to(gate_C.dtype)
    value_C = (gelu_C.to(tl.float32) * up_C.to(tl.float32)).to(gate_C.dtype)
    tl.store(out + row * I + column_C, value_C, mask=is_column)


_launch_gate = Launcher(_gelu_mul_kernel)


def variants() -> list[Variant]:
    """Gemma 2's 2B and 9B layers, and a length that no piece divides."""
    found = []
    for length in (9216, 14_336, 300):
        chosen = _constants(length, torch.device("cpu")).by_name
        found.append(
            Variant(
                name=f"gelu_mul_fused {length}",
                kernel=_gelu_mul_kernel,
                types={"gate_up": "*bf16", "row_stride": "i32", "out": "*bf16"},
                constants={"I": length, "C": chosen["C"], "EARLY": True},
                aligned=("gate_up", "out", *(("row_stride",) if length % 8 == 0 else ())),
                num_warps=chosen["num_warps"],
                max_registers=96,
                max_shared_bytes=4096,
                on_amd=False,
            )
        )
    return found
