# mypy: ignore-errors
"""`rms_norm_fused` in Triton: a program holds whole rows in registers, and reads and writes memory once.

How many warps share a row is chosen by its length alone, never by how many rows there are: the order in which a row's
squares are added, and so its result, is the same in every batch. Thread by thread 8 neighbouring values (16 bytes) are
loaded, and all loads are under way together.

Shapes: R rows of a program, N groups, C columns of a group.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels import tuning
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.quantize_fp8 import DTYPE, GROUP_LEN, LARGEST, TINIEST
from baton.kernels.gemm.quantize_fp8_triton import raise_scales
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.moe.summands import Added, Summands
from baton.kernels.pointwise.sigmoid_gate_triton import add_gated
from baton.kernels.prefetch_triton import prefetch_vector
from baton.kernels.variant import Variant, with_ue8m0

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(TINIEST)
_PROGRAM_LEN = 1024  # values that make a program worth its launch
_THREAD_LEN = 8  # 16 bytes of bfloat16
_MAX_WARPS = 16


@dataclass(frozen=True, slots=True)
class _Added:
    """What a norm adds first, besides x.

    Attributes:
        rows: whether there are rows; those of a shared expert if there are choices, too.
        num_chosen: choices whose parts are added; 0: none.
        num_experts: ids below this number are of experts.
        gated: whether the rows are weighed by logits.
    """

    rows: bool = False
    num_chosen: int = 0
    num_experts: int = 0
    gated: bool = False

    def constants(self) -> dict[str, Any]:
        """As the kernel's."""
        names = "RESIDUAL", "CHOSEN", "NUM_EXPERTS", "GATED"
        return dict(zip(names, (self.rows, self.num_chosen, self.num_experts, self.gated), strict=True))


_NOTHING, _ROWS = _Added(), _Added(rows=True)


def rule(length: int) -> dict[str, Any]:
    """Options for rows of a length that no table has: one vector for each thread, as far as threads go."""
    block = triton.next_power_of_2(length)
    rows = max(_PROGRAM_LEN // block, 1)
    values = rows * block // (32 * _THREAD_LEN)
    return {"rows": rows, "num_warps": min(max(values, 1), _MAX_WARPS)}


def options_of(length: int, device: torch.device) -> Mapping[str, Any]:
    """By the length alone; 0 rows are asked for, since every number must get the same."""
    return tuning.find("rms_norm_fused", str(length), 0, device.index) or rule(length)


def launch(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: Added | None,
    num_padded: int | None,
    *,
    plus_one: bool,
    keep: bool = False,
    ue8m0: bool = False,
    options: Mapping[str, Any] | None = None,
    early: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Rows, sum, scales and what is kept; see `rms_norm_fused`, which has checked the arguments."""
    num_rows, length = x_TD.shape
    quantize = num_padded is not None
    if num_padded is None:
        num_padded = num_rows
    out_RD = torch.empty(num_padded, length, dtype=DTYPE if quantize else x_TD.dtype, device=x_TD.device)
    sum_TD = None if residual_TD is None else torch.empty(num_rows, length, dtype=x_TD.dtype, device=x_TD.device)
    scale_GR = None
    if quantize:
        scale_GR = torch.empty(length // GROUP_LEN, num_padded, dtype=torch.float32, device=x_TD.device)
    kept_TD = torch.empty(num_rows, length, dtype=x_TD.dtype, device=x_TD.device) if keep else None
    if num_padded == 0:
        return out_RD, sum_TD, scale_GR, kept_TD
    added, rows_TD = _NOTHING if residual_TD is None else _ROWS, residual_TD
    parts = weight_D, weight_D, weight_D, 0  # which are not read
    if isinstance(residual_TD, Summands):
        rows_TD, gate_T1 = residual_TD.shared_TD, residual_TD.gate_T1
        gate = (weight_D, 0) if gate_T1 is None else (gate_T1, gate_T1.stride(0))
        parts = residual_TD.part_ND, residual_TD.expert_TK, *gate
        num_chosen = residual_TD.expert_TK.shape[1]
        added = _Added(rows_TD is not None, num_chosen, residual_TD.num_experts, gate_T1 is not None)
    flags = plus_one, quantize, ue8m0 and quantize, keep, early
    if options is None:
        rows, constants = _tuned(length, x_TD.device, added, *flags)
    else:
        rows, constants = _constants(options, length, x_TD.device, added, *flags)
    arguments = (
        x_TD,
        x_TD.stride(0),
        weight_D,
        x_TD if rows_TD is None else rows_TD,
        0 if rows_TD is None else rows_TD.stride(0),
        out_RD,
        out_RD if sum_TD is None else sum_TD,
        out_RD if scale_GR is None else scale_GR,
        out_RD if kept_TD is None else kept_TD,
        num_rows,
        num_padded,
        eps,
        *parts,
    )
    _launch_norm((-(-num_padded // rows),), arguments, constants)
    return out_RD, sum_TD, scale_GR, kept_TD


def _constants(
    options: Mapping[str, Any], length: int, device: torch.device, added: _Added, plus_one: bool, quantize: bool,
    ue8m0: bool, keep: bool, early: bool,
) -> tuple[int, Constants]:  # fmt: skip
    """Rows of a program, and the constants of a launch."""
    block = triton.next_power_of_2(length)
    group = min(GROUP_LEN, block)
    by_name = {"D": length, "R": options["rows"], "N": block // group, "C": group} | added.constants()
    by_name |= {"PLUS_ONE": plus_one, "QUANTIZE": quantize, "UE8M0": ue8m0, "KEEP": keep}
    by_name["num_warps"] = options["num_warps"]
    return options["rows"], Constants(by_name | dependent_launch(device, early))


@functools.lru_cache(maxsize=256)
def _tuned(length: int, device: torch.device, added: _Added, *rest: bool) -> tuple[int, Constants]:
    return _constants(options_of(length, device), length, device, added, *rest)


@triton.jit
def store_groups(
    value, out, at, scale, at_scale, is_there, is_group_there, is_group_real, UE8M0: tl.constexpr
):  # fmt: skip
    """Store groups, which lie along the last dimension, in float8 and their scales; what is not real with scale 1."""
    AXIS: tl.constexpr = len(value.shape) - 1
    largest = tl.maximum(tl.max(tl.abs(value), axis=AXIS), _SMALLEST)
    scales = largest * (1.0 / _LARGEST)
    if UE8M0:
        scales = raise_scales(scales)
    inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    # The conversion saturates, and keeps NaN.
    quantized = (value * tl.expand_dims(inverse, AXIS)).to(tl.float8e4nv)
    tl.store(out + at, quantized, mask=is_there)
    tl.store(scale + at_scale, tl.where(is_group_real, scales, 1.0), mask=is_group_there)


@triton.jit
def _load_summands(
    part, expert, gate, gate_stride, row_R11, column_1NC, num_rows, D: tl.constexpr, CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Ids, parts and logits of each row, as tuples. Parts are loaded whether or not they are used: no load waits."""
    is_row_R11 = row_R11 < num_rows
    its_R11, part_RNC, logit_R11 = (), (), ()
    for choice in tl.static_range(CHOSEN):
        at_R11 = row_R11 * CHOSEN + choice
        its_R11 += (tl.load(expert + at_R11, mask=is_row_R11, other=-1),)
        part_RNC += (tl.load(part + at_R11 * D + column_1NC, mask=is_row_R11 & (column_1NC < D), other=0.0),)
    if GATED:
        logit_R11 = (tl.load(gate + row_R11 * gate_stride, mask=is_row_R11, other=0.0),)
    return its_R11, part_RNC, logit_R11


@triton.jit
def _add_choices(its_R11, part_RNC, CHOSEN: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Add the parts in the order of the choices, rounded to their dtype; ids of no expert add nothing."""
    sum_RNC = tl.zeros(part_RNC[0].shape, dtype=tl.float32)
    for choice in tl.static_range(CHOSEN):
        is_own_R11 = (its_R11[choice] >= 0) & (its_R11[choice] < NUM_EXPERTS)
        sum_RNC += tl.where(is_own_R11, part_RNC[choice].to(tl.float32), 0.0)
    return sum_RNC.to(part_RNC[0].dtype)


@triton.jit
def _add_shared(mixed_RNC, shared_RNC, logit_R11, GATED: tl.constexpr):
    """Add a shared expert's rows, weighed by its gate's logits if any, and round again."""
    if GATED:
        sum_RNC = add_gated(mixed_RNC.to(tl.float32), shared_RNC.to(tl.float32), logit_R11[0])
    else:
        sum_RNC = mixed_RNC.to(tl.float32) + shared_RNC.to(tl.float32)
    return sum_RNC.to(shared_RNC.dtype)


# What differs from step to step, and from tensor to tensor of one shape, must not compile anything.
@triton.jit(do_not_specialize=["num_rows", "num_padded"])
def _norm_kernel(
    x, x_stride, weight, residual, residual_stride, out, sums, scale, kept, num_rows: tl.int32,
    num_padded: tl.int32, eps, part, expert, gate, gate_stride, D: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, RESIDUAL: tl.constexpr, CHOSEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, GATED: tl.constexpr,
    PLUS_ONE: tl.constexpr, QUANTIZE: tl.constexpr, UE8M0: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """With CHOSEN, what is added are the parts of so many choices and, with RESIDUAL, a shared expert's rows."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row_R11 = row_R[:, None, None]
    column_1NC = (tl.arange(0, N)[:, None] * C + tl.arange(0, C)[None, :])[None]
    is_column = column_1NC < D
    is_real = (row_R11 < num_rows) & is_column
    if EARLY:
        prefetch_vector(weight, D)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_RNC = tl.load(x + row_R11 * x_stride + column_1NC, mask=is_real, other=0.0)
    # Loaded by every row's threads, from the cache: handing it from thread to thread would cost a barrier.
    at_weight_RNC = tl.broadcast_to(weight + column_1NC, [R, N, C])
    weight_RNC = tl.load(at_weight_RNC, mask=is_column, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual_RNC = tl.load(residual + row_R11 * residual_stride + column_1NC, mask=is_real, other=0.0)
    if CHOSEN > 0:
        its_R11, part_RNC, logit_R11 = _load_summands(
            part, expert, gate, gate_stride, row_R11, column_1NC, num_rows, D, CHOSEN, GATED
        )
    if EARLY:
        # Said twice only to keep the compiler from moving loads behind it, to where their values are used.
        tl.extra.cuda.gdc_launch_dependents()
    if CHOSEN > 0:
        mixed_RNC = _add_choices(its_R11, part_RNC, CHOSEN, NUM_EXPERTS)
        if RESIDUAL:
            mixed_RNC = _add_shared(mixed_RNC, residual_RNC, logit_R11, GATED)
        residual_RNC = mixed_RNC
    wide_RNC = x_RNC.to(tl.float32)
    if RESIDUAL or CHOSEN > 0:
        wide_RNC += residual_RNC.to(tl.float32)
        rounded_RNC = wide_RNC.to(x_RNC.dtype)
        tl.store(sums + row_R11 * D + column_1NC, rounded_RNC, mask=is_real)
        wide_RNC = rounded_RNC.to(tl.float32)
    square_R = tl.sum(tl.sum(wide_RNC * wide_RNC, axis=2), axis=1)
    wide_RNC *= tl.rsqrt(square_R / D + eps)[:, None, None]
    if PLUS_ONE:
        value_RNC = (wide_RNC * (1.0 + weight_RNC)).to(x_RNC.dtype)
    else:
        value_RNC = (wide_RNC.to(x_RNC.dtype).to(tl.float32) * weight_RNC).to(x_RNC.dtype)
    at_RNC = row_R11 * D + column_1NC
    if KEEP:
        tl.store(kept + at_RNC, value_RNC, mask=is_real)
    if QUANTIZE:
        row_R1 = row_R[:, None]
        group_1N = tl.arange(0, N)[None, :]
        is_group = (row_R1 < num_padded) & (group_1N < D // C)
        is_there = (row_R11 < num_padded) & is_column
        at_RN = group_1N.to(tl.int64) * num_padded + row_R1
        wide_RNC = tl.where(is_real, value_RNC.to(tl.float32), 0.0)  # 0 times a weight may be -0
        # Vectors of 16 bytes of float8 would take values from thread to thread, through shared memory.
        at_RNC = tl.max_contiguous(at_RNC, [1, 1, 8])
        store_groups(wide_RNC, out, at_RNC, scale, at_RN, is_there, is_group, row_R1 < num_rows, UE8M0)
    else:
        tl.store(out + at_RNC, value_RNC, mask=is_real)


_launch_norm = Launcher(_norm_kernel)


def _variant(name: str, length: int, *, early: bool = True, added: _Added = _NOTHING, **flags: bool) -> Variant:
    chosen = options_of(length, torch.device("cpu"))
    block = triton.next_power_of_2(length)
    group = min(GROUP_LEN, block)
    names = ("PLUS_ONE", "QUANTIZE", "UE8M0", "KEEP")
    constants = added.constants() | {name: flags.get(name, False) for name in names}
    pointers = dict.fromkeys(("x", "weight", "residual", "sums", "part"), "*bf16")
    quantize = constants["QUANTIZE"]
    types = pointers | {"out": "*fp8e4nv" if quantize else "*bf16", "scale": "*fp32" if quantize else "*bf16"}
    types["kept"] = "*bf16" if constants["KEEP"] else types["out"]
    types |= dict.fromkeys(("x_stride", "residual_stride", "num_rows", "num_padded", "gate_stride"), "i32")
    types |= {"eps": "fp32", "gate": "*bf16", "expert": "*i64" if added.num_chosen else "*bf16"}
    return Variant(
        name=f"rms_norm_fused {length}{name}{'' if early else ' late'}",
        kernel=_norm_kernel,
        types=types,
        constants=constants | {"D": length, "R": chosen["rows"], "N": block // group, "C": group, "EARLY": early},
        aligned=(*pointers, "out", "scale", "kept", "x_stride", "residual_stride", "expert"),
        num_warps=chosen["num_warps"],
        max_registers=128,
        max_shared_bytes=8192,
        on_amd=not early,
    )


def variants() -> list[Variant]:
    """Norms of the anchors' shapes, as they stand in a layer; some add up what experts of the layer before made."""
    nine_of_257, eight_and_gated = _Added(False, 9, 257), _Added(True, 8, 256, gated=True)
    eight_and_shared = _Added(True, 8, 256)
    found = [
        _variant("", 4096),
        _variant("", 4096, early=False),
        _variant(" residual", 4096, added=_ROWS),
        _variant(" residual fp8", 4096, added=_ROWS, QUANTIZE=True),
        _variant(" residual fp8", 4096, early=False, added=_ROWS, QUANTIZE=True),
        _variant(" residual", 2048, added=_ROWS),
        _variant(" residual fp8", 2048, added=_ROWS, QUANTIZE=True),
        _variant(" residual", 5120, added=_ROWS),
        _variant(" fp8", 1536, QUANTIZE=True),
        _variant(" residual plus one", 2048, added=_ROWS, PLUS_ONE=True),
        _variant(" residual plus one fp8", 5120, added=_ROWS, PLUS_ONE=True, QUANTIZE=True),
        _variant(" residual plus one fp8 kept", 2048, added=_ROWS, PLUS_ONE=True, QUANTIZE=True, KEEP=True),
        _variant(" experts plus one", 2048, added=nine_of_257, PLUS_ONE=True),
        _variant(" experts plus one", 2048, early=False, added=eight_and_gated, PLUS_ONE=True),
        _variant(" experts, shared one gated, plus one", 2048, added=eight_and_gated, PLUS_ONE=True),
        _variant(" experts plus one fp8 kept", 2048, added=nine_of_257, PLUS_ONE=True, QUANTIZE=True, KEEP=True),
        _variant(" experts fp8", 7168, added=nine_of_257, QUANTIZE=True),
        _variant(" experts and shared one fp8", 7168, added=eight_and_shared, QUANTIZE=True),
    ]
    return with_ue8m0(found, "rms_norm_fused 4096 residual fp8")
