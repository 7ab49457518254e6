# mypy: ignore-errors
"""`silu_mul_fused` in Triton: every program does some groups of 128 results; nothing crosses from one to another.

So any division gives the same bits, and it is chosen for speed alone. Groups are counted through all rows, so that
short rows make no small programs: few groups are spread over as many programs as keep a vector of 16 bytes for each
thread, many over programs that have more on its way at once. Of a batch with a mask, every expert has a fixed number of
programs, which share the rows it has: what it lacks costs nothing.

Shapes: N groups of a program, C columns of a group.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from baton.kernels import tuning
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.quantize_fp8 import DTYPE, GROUP_LEN
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.pointwise.rms_norm_triton import store_groups
from baton.kernels.variant import Variant

_THREAD_LEN = 8  # 16 bytes of bfloat16
_MANY_GROUPS = 16_384  # from which on programs are large, and beginning early gains less than it costs
_EXPERTS_PROGRAMS = 1024  # of all experts together: so many are resident at once


def group_len(length: int) -> int:
    """Columns of a group."""
    return min(GROUP_LEN, triton.next_power_of_2(length))


def rule(length: int, num_rows: int) -> dict[str, Any]:
    """Options for rows of `length` results that no table has."""
    group = group_len(length)
    is_many = num_rows * -(-length // group) > _MANY_GROUPS
    groups = (2048 if is_many else 512) // group
    num_warps = groups * group // (32 * _THREAD_LEN * (2 if is_many else 1))
    return {"groups": groups, "num_warps": num_warps, "early": not is_many}


def options_of(length: int, num_rows: int, quantize: bool, device: torch.device) -> Mapping[str, Any]:
    """By the length, by how many rows there are, and by what becomes of them."""
    shape = f"{length} fp8" if quantize else str(length)
    return tuning.find("silu_mul_fused", shape, num_rows, device.index) or rule(length, num_rows)


def launch(
    gate_up: torch.Tensor,
    num_rows_E: torch.Tensor | None,
    num_padded: int | None,
    *,
    quantize: bool,
    options: Mapping[str, Any] | None = None,
    early: bool | None = None,
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
        constants = _tuned(length, num_rows, gate_up.device, *flags)
    else:
        constants = _of_options(tuple(sorted(options.items())), length, gate_up.device, *flags)
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
    num_programs = -(-leading[-1] * constants.by_name["G"] // constants.by_name["N"])
    if num_rows_E is None:
        grid = (num_programs,)
    else:
        grid = min(num_programs, max(_EXPERTS_PROGRAMS // len(num_rows_E), 1)), len(num_rows_E)
    _launch_gate(grid, arguments, constants)
    return rows, scale


@functools.lru_cache(maxsize=256)
def _of_options(
    options: tuple[tuple[str, Any], ...], length: int, device: torch.device, mask: bool, quantize: bool,
    early: bool | None,
) -> Constants:  # fmt: skip
    """The constants of a launch."""
    chosen = dict(options)
    by_name = _shape(chosen["groups"], length) | {"MASK": mask, "QUANTIZE": quantize, "num_warps": chosen["num_warps"]}
    by_name["PTX"] = device.type == "cuda" and torch.version.hip is None and not knobs.runtime.interpret
    return Constants(by_name | dependent_launch(device, chosen.get("early", True) if early is None else early))


def _shape(groups: int, length: int) -> dict[str, Any]:
    """The constants that say what a program does."""
    group = group_len(length)
    return {"I": length, "G": -(-length // group), "N": groups, "C": group}


@functools.lru_cache(maxsize=1024)
def _tuned(
    length: int, num_rows: int, device: torch.device, mask: bool, quantize: bool, early: bool | None
) -> Constants:
    """One object for all numbers of rows that are computed alike, so that they share a compiled form."""
    # How many rows a mask leaves is not known here; large programs do for any number.
    chosen = (
        {**rule(length, _MANY_GROUPS + 1), "early": True} if mask else options_of(length, num_rows, quantize, device)
    )
    return _of_options(tuple(sorted(chosen.items())), length, device, mask, quantize, early)


@triton.jit
def silu(wide, PTX: tl.constexpr):
    """A number over 1 + exp of its negative; in PTX without the steps for what is below 2^-126, which becomes 0."""
    if PTX:
        sigmoid = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [wide],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return wide * sigmoid
    return wide / (1.0 + tl.exp(-wide))


@triton.jit
def _silu_mul_groups(
    gate_up, out, scale, first_group, scale_expert, expert_row, row_stride, num_real, num_there, num_rows,
    I: tl.constexpr,  # noqa: E741
    G: tl.constexpr, N: tl.constexpr, C: tl.constexpr, QUANTIZE: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """N groups of rows: of those below `num_real` from memory, of those below `num_there` as zeros."""
    if G % N == 0:
        # All of one row: its place is computed once, not by every thread for each of its groups.
        row_N1 = first_group // G + tl.zeros([1, 1], tl.int32)
        group_N1 = first_group % G + tl.arange(0, N)[:, None]
    else:
        row_N1 = (first_group + tl.arange(0, N)[:, None]) // G
        group_N1 = (first_group + tl.arange(0, N)[:, None]) % G
    column_NC = group_N1 * C + tl.arange(0, C)[None, :]
    is_there = row_N1 < num_there
    is_column = column_NC < I if I % C != 0 else tl.full([1, 1], True, tl.int1)
    is_real = (row_N1 < num_real) & is_column
    from_NC = gate_up + row_N1.to(tl.int64) * row_stride + column_NC
    gate_NC = tl.load(from_NC, mask=is_real, other=0.0)
    up_NC = tl.load(from_NC + I, mask=is_real, other=0.0)
    if EARLY:
        # Said twice only to keep the compiler from moving loads behind it, to where their values are used.
        tl.extra.cuda.gdc_launch_dependents()
    wide_NC = gate_NC.to(tl.float32)
    silu_NC = silu(wide_NC, PTX).to(gate_NC.dtype)
    value_NC = (silu_NC.to(tl.float32) * up_NC.to(tl.float32)).to(gate_NC.dtype)
    at_NC = (expert_row + row_N1.to(tl.int64)) * I + column_NC
    if QUANTIZE:
        row_N = tl.reshape(tl.broadcast_to(row_N1, [N, 1]), [N])
        at_N = scale_expert + tl.reshape(group_N1, [N]).to(tl.int64) * num_rows + row_N
        store_groups(value_NC.to(tl.float32), out, at_NC, scale, at_N, is_there, row_N < num_there, row_N < num_real)
    else:
        tl.store(out + at_NC, value_NC, mask=is_there & is_column)


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
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    MASK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PTX: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * N
    if MASK:
        # What is never read is not written either.
        expert = tl.program_id(1).to(tl.int64)
        num_real = tl.minimum(tl.load(counts + expert).to(tl.int32), num_rows)
        gate_up += expert * expert_stride
        for start in range(first, num_real * G, tl.num_programs(0) * N):
            _silu_mul_groups(
                gate_up, out, scale, start, expert * G * num_rows, expert * num_rows, row_stride, num_real, num_real,
                num_rows, I, G, N, C, QUANTIZE, PTX, False,
            )  # fmt: skip
    else:
        _silu_mul_groups(
            gate_up, out, scale, first, 0, 0, row_stride, num_given, num_rows, num_rows, I, G, N, C, QUANTIZE, PTX,
            EARLY,
        )  # fmt: skip


_launch_gate = Launcher(_silu_mul_kernel)


def _variant(
    name: str, length: int, num_rows: int, *, early: bool = True, mask: bool = False, quantize: bool = False,
    on_amd: bool = False,
) -> Variant:  # fmt: skip
    chosen = _tuned(length, num_rows, torch.device("cpu"), mask, quantize, False).by_name
    out = "*fp8e4nv" if quantize else "*bf16"
    types = {"gate_up": "*bf16", "out": out, "scale": "*fp32" if quantize else out, "counts": "*i32" if mask else out}
    types |= dict.fromkeys(("expert_stride", "row_stride", "num_given", "num_rows"), "i32")
    names = ("I", "G", "N", "C", "MASK", "QUANTIZE")
    return Variant(
        name=f"silu_mul_fused {length} T={num_rows}{name}{'' if early else ' late'}{' plain' * on_amd}",
        kernel=_silu_mul_kernel,
        types=types,
        constants={**{name: chosen[name] for name in names}, "PTX": not on_amd, "EARLY": early},
        aligned=("gate_up", "expert_stride", "row_stride", "counts", "out", "scale"),
        num_warps=chosen["num_warps"],
        max_registers=96,
        max_shared_bytes=4096,
        on_amd=on_amd,
    )


def variants() -> list[Variant]:
    """The anchors' shapes: few rows and many, dense and of experts; and without PTX, for other GPUs."""
    return [
        _variant("", 12_288, 64),
        _variant("", 12_288, 8192, early=False),
        _variant("", 12_288, 8192, early=False, on_amd=True),
        _variant(" fp8", 12_288, 64, quantize=True),
        _variant(" fp8", 12_288, 512, quantize=True),
        _variant(" fp8", 12_288, 8192, early=False, quantize=True),
        _variant("", 768, 64),
        _variant("", 768, 65_536, early=False),
        _variant(" fp8 experts", 768, 8192, mask=True, quantize=True),
        _variant(" fp8 experts", 768, 8192, early=False, mask=True, quantize=True, on_amd=True),
        _variant(" experts", 2048, 8192, mask=True),
    ]
