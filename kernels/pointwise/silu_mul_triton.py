# mypy: ignore-errors
"""`silu_mul_fused` in Triton: every program does some groups of 128 results; nothing crosses from one to another.

So any division gives the same bits, and it is chosen for speed alone. Groups are counted through all rows, so that
short rows make no small programs: few groups are spread over as many programs as keep a vector of 16 bytes for each
thread, many over programs that have more on its way at once.

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
from baton.kernels.variant import Variant, with_ue8m0

_THREAD_LEN = 8  # 16 bytes of bfloat16
_MANY_GROUPS = 16_384  # from which on programs are large, and beginning early gains less than it costs


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
    gate_up_TJ: torch.Tensor,
    num_padded: int | None,
    *,
    ue8m0: bool = False,
    options: Mapping[str, Any] | None = None,
    early: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales; see `silu_mul_fused`, which has checked the arguments."""
    num_given, double = gate_up_TJ.shape
    length = double // 2
    quantize = num_padded is not None
    num_rows = num_given if num_padded is None else num_padded
    rows_RI = torch.empty(num_rows, length, dtype=DTYPE if quantize else gate_up_TJ.dtype, device=gate_up_TJ.device)
    scale_GR = None
    if quantize:
        scale_GR = torch.empty(length // GROUP_LEN, num_rows, dtype=torch.float32, device=gate_up_TJ.device)
    if num_rows == 0:
        return rows_RI, scale_GR
    if options is None:
        constants = _tuned(length, num_rows, gate_up_TJ.device, quantize, ue8m0, early)
    else:
        constants = _of_options(tuple(sorted(options.items())), length, gate_up_TJ.device, quantize, ue8m0, early)
    arguments = (
        gate_up_TJ,
        gate_up_TJ.stride(0),
        rows_RI,
        rows_RI if scale_GR is None else scale_GR,
        num_given,
        num_rows,
    )
    _launch_gate((-(-num_rows * constants.by_name["G"] // constants.by_name["N"]),), arguments, constants)
    return rows_RI, scale_GR


@functools.lru_cache(maxsize=256)
def _of_options(
    options: tuple[tuple[str, Any], ...], length: int, device: torch.device, quantize: bool, ue8m0: bool,
    early: bool | None,
) -> Constants:  # fmt: skip
    """The constants of a launch."""
    chosen = dict(options)
    by_name = _shape(chosen["groups"], length) | {"QUANTIZE": quantize, "UE8M0": ue8m0 and quantize}
    by_name["num_warps"] = chosen["num_warps"]
    by_name["PTX"] = device.type == "cuda" and torch.version.hip is None and not knobs.runtime.interpret
    return Constants(by_name | dependent_launch(device, chosen.get("early", True) if early is None else early))


def _shape(groups: int, length: int) -> dict[str, Any]:
    """The constants that say what a program does."""
    group = group_len(length)
    return {"I": length, "G": -(-length // group), "N": groups, "C": group}


@functools.lru_cache(maxsize=1024)
def _tuned(
    length: int, num_rows: int, device: torch.device, quantize: bool, ue8m0: bool, early: bool | None
) -> Constants:
    """One object for all numbers of rows that are computed alike, so that they share a compiled form."""
    chosen = options_of(length, num_rows, quantize, device)
    return _of_options(tuple(sorted(chosen.items())), length, device, quantize, ue8m0, early)


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


@triton.jit(do_not_specialize=["num_given", "num_rows"])
def _silu_mul_kernel(
    gate_up,
    row_stride,
    out,
    scale,
    num_given: tl.int32,
    num_rows: tl.int32,
    I: tl.constexpr,  # noqa: E741
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    PTX: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """N groups of rows: of those below `num_given` from memory, of those below `num_rows` as zeros."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_group = tl.program_id(0) * N
    if G % N == 0:
        # All of one row: its place is computed once, not by every thread for each of its groups.
        row_N1 = first_group // G + tl.zeros([1, 1], tl.int32)
        group_N1 = first_group % G + tl.arange(0, N)[:, None]
    else:
        row_N1 = (first_group + tl.arange(0, N)[:, None]) // G
        group_N1 = (first_group + tl.arange(0, N)[:, None]) % G
    column_NC = group_N1 * C + tl.arange(0, C)[None, :]
    is_there = row_N1 < num_rows
    is_column = column_NC < I if I % C != 0 else tl.full([1, 1], True, tl.int1)
    is_real = (row_N1 < num_given) & is_column
    from_NC = gate_up + row_N1.to(tl.int64) * row_stride + column_NC
    gate_NC = tl.load(from_NC, mask=is_real, other=0.0)
    up_NC = tl.load(from_NC + I, mask=is_real, other=0.0)
    if EARLY:
        # Said twice only to keep the compiler from moving loads behind it, to where their values are used.
        tl.extra.cuda.gdc_launch_dependents()
    wide_NC = gate_NC.to(tl.float32)
    silu_NC = silu(wide_NC, PTX).to(gate_NC.dtype)
    value_NC = (silu_NC.to(tl.float32) * up_NC.to(tl.float32)).to(gate_NC.dtype)
    at_NC = row_N1.to(tl.int64) * I + column_NC
    if QUANTIZE:
        row_N = tl.reshape(tl.broadcast_to(row_N1, [N, 1]), [N])
        at_N = tl.reshape(group_N1, [N]).to(tl.int64) * num_rows + row_N
        is_row_N, is_real_N = row_N < num_rows, row_N < num_given
        store_groups(value_NC.to(tl.float32), out, at_NC, scale, at_N, is_there, is_row_N, is_real_N, UE8M0)
    else:
        tl.store(out + at_NC, value_NC, mask=is_there & is_column)


_launch_gate = Launcher(_silu_mul_kernel)


def _variant(
    name: str, length: int, num_rows: int, *, early: bool = True, quantize: bool = False, on_amd: bool = False
) -> Variant:
    chosen = _tuned(length, num_rows, torch.device("cpu"), quantize, False, False).by_name
    out = "*fp8e4nv" if quantize else "*bf16"
    types = {"gate_up": "*bf16", "out": out, "scale": "*fp32" if quantize else out}
    types |= dict.fromkeys(("row_stride", "num_given", "num_rows"), "i32")
    names = ("I", "G", "N", "C", "QUANTIZE", "UE8M0")
    return Variant(
        name=f"silu_mul_fused {length} T={num_rows}{name}{'' if early else ' late'}{' plain' * on_amd}",
        kernel=_silu_mul_kernel,
        types=types,
        constants={**{name: chosen[name] for name in names}, "PTX": not on_amd, "EARLY": early},
        aligned=("gate_up", "row_stride", "out", "scale"),
        num_warps=chosen["num_warps"],
        max_registers=96,
        max_shared_bytes=4096,
        on_amd=on_amd,
    )


def variants() -> list[Variant]:
    """The anchors' shapes: few rows and many; and without PTX, for other GPUs."""
    found = [
        _variant("", 12_288, 64),
        _variant("", 12_288, 8192, early=False),
        _variant("", 12_288, 8192, early=False, on_amd=True),
        _variant(" fp8", 12_288, 64, quantize=True),
        _variant(" fp8", 12_288, 512, quantize=True),
        _variant(" fp8", 12_288, 8192, early=False, quantize=True),
        _variant(" fp8", 12_288, 8192, early=False, quantize=True, on_amd=True),
        _variant(" fp8", 512, 64, quantize=True),
        _variant("", 768, 64),
        _variant("", 768, 65_536, early=False),
    ]
    return with_ue8m0(found, "silu_mul_fused 12288 T=64 fp8")
