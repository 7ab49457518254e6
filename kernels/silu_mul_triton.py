"""`silu_mul_fused` in Triton: every program does a piece of one row; nothing crosses from one group of 128 to another.

So any division into pieces gives the same bits, and it is chosen for speed alone: few rows are spread over as many
programs as keep a vector of 16 bytes for each thread, many rows over programs that move more at once.

Shapes: N groups of a piece, C columns of a group.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.fp8_groups import DTYPE, GROUP_LEN
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.rms_norm_triton import store_groups
from baton.kernels.variant import Variant

_THREAD_LEN = 8  # 16 bytes of bfloat16
_FEW_ROWS = 256
_MAX_PIECE_LEN = 2048
_MIN_PIECE_LEN = 256


def rule(length: int, num_rows: int) -> dict[str, Any]:
    """Options for rows of `length` results that no table has."""
    piece = min(length & -length, _MAX_PIECE_LEN if num_rows > _FEW_ROWS else _MAX_PIECE_LEN // 2)
    if piece < _MIN_PIECE_LEN:
        piece = min(triton.next_power_of_2(length), _MAX_PIECE_LEN)
    return {"piece": piece, "num_warps": max(piece // (32 * _THREAD_LEN), 1)}


def options_of(length: int, num_rows: int, device: torch.device) -> Mapping[str, Any]:
    """By the length, and by how many rows there are."""
    return tuning.find("silu_mul_fused", str(length), num_rows, device.index) or rule(length, num_rows)


def launch(
    gate_up: torch.Tensor,
    num_rows_E: torch.Tensor | None,
    num_padded: int | None,
    *,
    quantize: bool,
    options: Mapping[str, Any] | None = None,
    early: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales; see `silu_mul_fused`, which has checked the arguments."""
    *leading, double = gate_up.shape
    length = double // 2
    num_given = leading[-1]
    leading[-1] = num_given if num_padded is None else num_padded
    rows = torch.empty(*leading, length, dtype=DTYPE if quantize else gate_up.dtype, device=gate_up.device)
    scale = None
    if quantize:
        shape = (*leading[:-1], length // GROUP_LEN, leading[-1])
        scale = torch.empty(shape, dtype=torch.float32, device=gate_up.device)
    if rows.numel() == 0:
        return rows, scale
    num_rows = rows.numel() // length
    flags = num_rows_E is not None, quantize, early
    if options is None:
        piece, constants = _tuned(length, num_rows, gate_up.device, *flags)
    else:
        piece, constants = _constants(options, length, gate_up.device, *flags)
    arguments = (
        gate_up,
        gate_up.stride(0) if num_rows_E is not None else 0,
        gate_up.stride(-2),
        rows if num_rows_E is None else num_rows_E,
        rows,
        rows if scale is None else scale,
        num_given,
        leading[-1],
    )
    _launch_gate((num_rows, -(-length // piece)), arguments, constants)
    return rows, scale


def _constants(
    options: Mapping[str, Any], length: int, device: torch.device, mask: bool, quantize: bool, early: bool
) -> tuple[int, Constants]:
    """Results of a program, and the constants of a launch."""
    piece = options["piece"]
    group = min(GROUP_LEN, piece)
    by_name = {"I": length, "N": piece // group, "C": group, "MASK": mask, "QUANTIZE": quantize}
    by_name |= {"num_warps": options["num_warps"]}
    return piece, Constants(by_name | dependent_launch(device, early))


@functools.lru_cache(maxsize=256)
def _of_options(piece: int, num_warps: int, length: int, device: torch.device, *flags: bool) -> tuple[int, Constants]:
    return _constants({"piece": piece, "num_warps": num_warps}, length, device, *flags)


@functools.lru_cache(maxsize=1024)
def _tuned(length: int, num_rows: int, device: torch.device, *flags: bool) -> tuple[int, Constants]:
    """One object for all numbers of rows that are computed alike, so that they share a compiled form."""
    chosen = options_of(length, num_rows, device)
    return _of_options(chosen["piece"], chosen["num_warps"], length, device, *flags)


@triton.jit(do_not_specialize=["num_given", "num_rows"])
def _silu_mul_kernel(
    gate_up,
    expert_stride,
    row_stride,
    counts,
    out,
    scale,
    num_given: tl.int32,
    num_rows: tl.int32,
    I: tl.constexpr,  # noqa: E741
    N: tl.constexpr,
    C: tl.constexpr,
    MASK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    expert, place = tl.zeros([], tl.int64), row
    if MASK:
        expert, place = (row // num_rows).to(tl.int64), row % num_rows
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_real = num_given
    if MASK:
        num_real = tl.load(counts + expert).to(tl.int32)
        # What nobody reads is not written either.
        if place >= num_real:
            return
    group_1N = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    column_1NC = group_1N[:, :, None] * C + tl.arange(0, C)[None, None, :]
    is_column = column_1NC < I
    from_row = gate_up + expert * expert_stride + place.to(tl.int64) * row_stride
    is_real = is_column & (place < num_real)
    gate_1NC = tl.load(from_row + column_1NC, mask=is_real, other=0.0)
    up_1NC = tl.load(from_row + I + column_1NC, mask=is_real, other=0.0)
    if EARLY:
        # Said twice only to keep the compiler from moving loads behind it, to where their values are used.
        tl.extra.cuda.gdc_launch_dependents()
    wide_1NC = gate_1NC.to(tl.float32)
    silu_1NC = (wide_1NC / (1.0 + tl.exp(-wide_1NC))).to(gate_1NC.dtype)
    value_1NC = (silu_1NC.to(tl.float32) * up_1NC.to(tl.float32)).to(gate_1NC.dtype)
    at_1NC = row.to(tl.int64) * I + column_1NC
    if QUANTIZE:
        at_1N = (expert * (I // C) + group_1N) * num_rows + place
        is_group = group_1N < I // C
        store_groups(value_1NC.to(tl.float32), out, at_1NC, scale, at_1N, is_column, is_group, place < num_real)
    else:
        tl.store(out + at_1NC, value_1NC, mask=is_column)


_launch_gate = Launcher(_silu_mul_kernel)


def _variant(name: str, length: int, num_rows: int, *, early: bool = True, mask: bool = False, quantize: bool = False):
    chosen = options_of(length, num_rows, torch.device("cpu"))
    group = min(GROUP_LEN, chosen["piece"])
    out = "*fp8e4nv" if quantize else "*bf16"
    types = {"gate_up": "*bf16", "out": out, "scale": "*fp32" if quantize else out, "counts": "*i32" if mask else out}
    types |= dict.fromkeys(("expert_stride", "row_stride", "num_given", "num_rows"), "i32")
    constants = {"I": length, "N": chosen["piece"] // group, "C": group, "MASK": mask, "QUANTIZE": quantize}
    return Variant(
        name=f"silu_mul_fused {length} T={num_rows}{name}{'' if early else ' late'}",
        kernel=_silu_mul_kernel,
        types=types,
        constants=constants | {"EARLY": early},
        aligned=("gate_up", "expert_stride", "row_stride", "counts", "out", "scale"),
        num_warps=chosen["num_warps"],
        max_registers=96,
        max_shared_bytes=4096,
        on_amd=not early,
    )


def variants() -> list[Variant]:
    """The anchors' shapes: few rows and many, dense and of experts."""
    return [
        _variant("", 12_288, 64),
        _variant("", 12_288, 8192),
        _variant("", 12_288, 8192, early=False),
        _variant(" fp8", 12_288, 64, quantize=True),
        _variant(" fp8", 12_288, 8192, quantize=True),
        _variant("", 768, 64),
        _variant(" fp8 experts", 768, 8192, mask=True, quantize=True),
        _variant(" fp8 experts", 768, 8192, early=False, mask=True, quantize=True),
        _variant(" experts", 2048, 8192, mask=True),
    ]
