"""GEMMs with a float8 weight: C = A W^T in bfloat16, with 1 x 128 scales of A and 128 x 128 scales of W.

    C[m, n] = sum over groups g of  scale_A[g, m] * scale_W[n / 128, g] * (A[m, g] . W[n, g])

The tensor cores compute each group's dot product, which is scaled and added in float32. `gemm_fp8` takes quantized
activations; `linear_fp8` takes bfloat16 activations and quantizes them in the same call, to the same bits. Where it
takes a launch for that (`num_quantized`), what makes the activations can do it instead, for `linear_quantized`.

For few rows the operands may be swapped (`swap_ab`). Where the table or the rule says so, the library computes GEMMs of
many rows (`kernels.gemm.scaled_mm`). On Hopper few rows may use a kernel of their own
(`kernels.gemm.fp8_hopper_triton`), and one or two rows that of `linear_vector`, in which each program quantizes the
rows for itself. With `invariant` a row's result depends on that row alone, bit for bit: tile, splits and order depend
on the weight only.

Launches that share a `GemmWorkspace` must run one after the other, so a workspace belongs to one stream. Shapes that do
not fit are refused before anything is launched.

Legend: M rows, N outputs, K inputs, G groups of 128 inputs.
Source: DeepSeek-V3 (section 3.3) for the scheme; swapping operands for small M as in DeepGEMM and cuBLAS.
"""

import functools
import logging
from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm import fp8_hopper_triton as gemm_fp8_hopper_triton
from baton.kernels.gemm import fp8_triton as gemm_fp8_triton
from baton.kernels.gemm import linear_vector_triton, vector_plan
from baton.kernels.gemm.fp8_plan import (
    FEW_ROWS,
    GemmPlan,
    SwapAB,
    invariant_plan,
    machine_of,
    plan_of,
    predicted_plan,
    rule,
    size_of,
)
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.quantize_fp8 import (
    GROUP_LEN,
    Fp8Rows,
    dequantize_fp8,
    quantize_fp8_reference,
    quantize_unchecked,
)
from baton.kernels.gemm.scaled_mm import LIBRARY, ROWS_MULTIPLE
from baton.kernels.gemm.workspace import MAX_TILES, GemmWorkspace, default_workspace
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.tiles import matmul_rows

log = logging.getLogger(__name__)

_HOPPER = (9, 0)
_OLDEST = (8, 9)  # oldest capability with float8 instructions


def gemm_fp8(
    a_MK: torch.Tensor,
    scales_GM: torch.Tensor,
    weight: Fp8Weight,
    *,
    out_MN: torch.Tensor | None = None,
    swap_ab: SwapAB | str = SwapAB.AUTO,
    num_sms: int | None = None,
    invariant: bool = False,
    workspace: GemmWorkspace | None = None,
    plan: GemmPlan | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute [M, N] bfloat16 from quantized activations.

    Args:
        a_MK: float8 activations; rows may be strided.
        scales_GM: float32 [K / 128, M], as `quantize_fp8` returns them; rows may be strided.
        weight: weight of the GEMM.
        out_MN: output, whose rows may be strided; None: it is allocated.
        swap_ab: "auto": as measured; "on" and "off" force it, "on" only on sm_90.
        num_sms: maximum number of programs, each of which takes a part of a multiprocessor; None: no limit. The Hopper
            kernel cannot be limited, and is not used then.
        invariant: whether a row's result must be independent of other rows.
        workspace: workspace of the current stream; None: the device's, which is then used on one stream only.
        plan: plan to use, for tuning; None: the tuned one.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = (
        signature(a_MK), signature(scales_GM), signature(weight.values_NK), signature(out_MN), swap_ab, num_sms,
        invariant, plan, implementation,
    )  # fmt: skip
    way = _GEMMS.find(key)
    if way is None:
        require_tensor("a_MK", a_MK, [None, weight.num_inputs], [torch.float8_e4m3fn], weight.values_NK.device)
        require_rows("a_MK", a_MK)
        groups = weight.num_inputs // GROUP_LEN
        require_tensor("scales_GM", scales_GM, [groups, len(a_MK)], [torch.float32], a_MK.device)
        require_rows("scales_GM", scales_GM)
        _check_others(out_MN, len(a_MK), weight, num_sms, swap_ab)
        can_tma = gemm_fp8_hopper_triton.fits(weight, a_MK)
        way = _way("gemm_fp8", len(a_MK), weight, swap_ab, num_sms, invariant, plan, implementation, can_tma)
        _GEMMS.keep(key, way)
    if way.is_empty:
        return _out(out_MN, 0, weight)
    if not way.in_triton:
        out_MN = _out(out_MN, len(a_MK), weight)
        return out_MN.copy_(gemm_fp8_reference(a_MK, scales_GM, weight, invariant=invariant))
    return _multiplied(a_MK, scales_GM, weight, len(a_MK), out_MN, way.plan, num_sms, workspace)


def linear_fp8(
    x_MK: torch.Tensor,
    weight: Fp8Weight,
    *,
    out_MN: torch.Tensor | None = None,
    swap_ab: SwapAB | str = SwapAB.AUTO,
    num_sms: int | None = None,
    invariant: bool = False,
    workspace: GemmWorkspace | None = None,
    plan: GemmPlan | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute [M, N] bfloat16 from bfloat16 activations: quantize, pad and multiply, to the bits of separate calls.

    Args:
        x_MK: bfloat16 activations; rows may be strided. The reference takes float32, too, and then returns float32.
        weight: weight; this and the other arguments are as in `gemm_fp8`.
        out_MN: output.
        swap_ab: whether operands are swapped.
        num_sms: maximum number of programs of the GEMM.
        invariant: whether a row's result must be independent of other rows.
        workspace: workspace of the current stream.
        plan: plan to use, for tuning.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = (
        signature(x_MK), signature(weight.values_NK), signature(out_MN), swap_ab, num_sms, invariant, plan,
        implementation,
    )  # fmt: skip
    way = _LINEARS.find(key)
    if way is None:
        dtypes = (
            [torch.bfloat16]
            if _uses_triton(weight.values_NK.device, implementation)
            else [torch.bfloat16, torch.float32]
        )
        require_tensor("x_MK", x_MK, [None, weight.num_inputs], dtypes, weight.values_NK.device)
        require_rows("x_MK", x_MK)
        _check_others(out_MN, len(x_MK), weight, num_sms, swap_ab)
        way = _LINEARS.keep(key, _linear_way(len(x_MK), weight, swap_ab, num_sms, invariant, plan, implementation))
    if way.is_empty:
        return _out(out_MN, 0, weight).to(x_MK.dtype)
    num_rows, plan = len(x_MK), way.plan
    if not way.in_triton:
        a_MK, scales_GM = quantize_fp8_reference(x_MK, ue8m0=weight.ue8m0)
        gemm_MN = gemm_fp8_reference(a_MK, scales_GM, weight, invariant=invariant, out_dtype=x_MK.dtype)
        return gemm_MN if out_MN is None else out_MN.copy_(gemm_MN)
    if plan is not None and not way.pad_to:
        out_MN = _out(out_MN, num_rows, weight)
        if plan.vector:
            linear_vector_triton.launch(x_MK, weight, out_MN)
            return out_MN
        counters = (workspace or default_workspace(x_MK.device)).counters
        gemm_fp8_triton.launch(x_MK, None, weight, out_MN, plan, counters, num_sms=num_sms)
        return out_MN
    a_MK, scales_GM = quantize_unchecked(x_MK, ue8m0=weight.ue8m0, pad_to=way.pad_to)
    return _multiplied(a_MK, scales_GM, weight, num_rows, out_MN, plan, num_sms, workspace)


def num_quantized(
    num_rows: int,
    weight: Fp8Weight,
    *,
    invariant: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> int | None:
    """Number of rows, with padding, that `linear_fp8` quantizes in a launch of its own; None: it has no such launch."""
    key = num_rows, signature(weight.values_NK), invariant, implementation
    way = _ROWS.find(key)
    if way is None:
        way = _linear_way(num_rows, weight, SwapAB.AUTO, None, invariant, None, implementation)
        _ROWS.keep(key, way)
    return -(-num_rows // way.pad_to) * way.pad_to if way.pad_to else None


def linear_quantized(
    rows: Fp8Rows,
    weight: Fp8Weight,
    *,
    invariant: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute `linear_fp8` of rows that are quantized already, and as many as `num_quantized` says, to the same bits.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = (
        signature(rows.values_RK), signature(rows.scales_GR), rows.num_rows, signature(weight.values_NK), invariant,
        implementation,
    )  # fmt: skip
    way = _QUANTIZED.find(key)
    if way is None:
        num_padded = num_quantized(rows.num_rows, weight, invariant=invariant, implementation=implementation)
        require(num_padded is not None, "rows", "are quantized, which the GEMM does by itself")
        device = weight.values_NK.device
        require_tensor("values_RK", rows.values_RK, [num_padded, weight.num_inputs], [torch.float8_e4m3fn], device)
        require_rows("values_RK", rows.values_RK)
        groups = weight.num_inputs // GROUP_LEN
        require_tensor("scales_GR", rows.scales_GR, [groups, num_padded], [torch.float32], device)
        require_rows("scales_GR", rows.scales_GR)
        way = _linear_way(rows.num_rows, weight, SwapAB.AUTO, None, invariant, None, implementation)
        _QUANTIZED.keep(key, way)
    return _multiplied(rows.values_RK, rows.scales_GR, weight, rows.num_rows, None, way.plan, None, None)


def gemm_fp8_reference(
    a_MK: torch.Tensor,
    scales_GM: torch.Tensor,
    weight: Fp8Weight,
    *,
    invariant: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Compute `gemm_fp8` in torch: dequantize both operands, multiply in float32, then round."""
    wide_MK, weight_NK = dequantize_fp8(a_MK, scales_GM), weight.dequantize()
    out_MN = matmul_rows(wide_MK, weight_NK) if invariant else wide_MK @ weight_NK.t()
    return out_MN.to(out_dtype)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a checked GEMM is computed.

    Attributes:
        is_empty: whether there is nothing to compute.
        in_triton: whether a GPU kernel computes it, not torch's reference.
        plan: plan of the launch; None: the library's GEMM.
    """

    is_empty: bool
    in_triton: bool
    plan: GemmPlan | None

    @property
    def pad_to(self) -> int:
        """Multiple to which `linear_fp8` pads rows as a launch quantizes them; 0: there is no launch for that."""
        if not self.in_triton or (self.plan is not None and self.plan.fused):
            return 0
        return ROWS_MULTIPLE if self.plan is None else 1


_GEMMS: Memo[_Way] = Memo()
_LINEARS: Memo[_Way] = Memo()
_ROWS: Memo[_Way] = Memo()
_QUANTIZED: Memo[_Way] = Memo()


def _linear_way(
    num_rows: int,
    weight: Fp8Weight,
    swap_ab: SwapAB | str,
    num_sms: int | None,
    invariant: bool,
    plan: GemmPlan | None,
    implementation: Implementation,
) -> _Way:
    """Choose for `linear_fp8`, by nothing of its rows but how many there are."""
    can_tma = gemm_fp8_hopper_triton.fits(weight)
    return _way("linear_fp8", num_rows, weight, swap_ab, num_sms, invariant, plan, implementation, can_tma)


def _way(
    table: str,
    num_rows: int,
    weight: Fp8Weight,
    swap_ab: SwapAB | str,
    num_sms: int | None,
    invariant: bool,
    plan: GemmPlan | None,
    implementation: Implementation,
    can_tma: bool,
) -> _Way:
    """Finish the checks, and choose how to compute from sizes, device and the caller's arguments."""
    device = weight.values_NK.device
    if num_rows == 0 or not _uses_triton(device, implementation):
        return _Way(num_rows == 0, False, None)
    if plan is not None:
        _check_plan(plan, weight)
        is_able = not plan.workers or _is_warp_specialized(plan, num_rows, weight, num_sms, can_tma)
        require(is_able, "plan", "has workers: on sm_90 only, of aligned rows, without num_sms, splits of few rows")
        is_few = table == "linear_fp8" and plan.fused and num_rows <= vector_plan.MAX_TOKENS and num_sms is None
        is_vector = is_few and weight.num_inputs <= vector_plan.MAX_INPUTS
        require(is_vector or not plan.vector, "plan", "is of vectors: of one or two rows that are not quantized yet")
    else:
        plan = _chosen(table, num_rows, weight, swap_ab, num_sms, invariant, can_tma)
    return _Way(False, True, plan)


def _is_warp_specialized(plan: GemmPlan, num_rows: int, weight: Fp8Weight, num_sms: int | None, can_tma: bool) -> bool:
    """Return whether a plan with workers can run here."""
    num_counters = gemm_fp8_hopper_triton.num_counters(plan, num_rows, weight.num_outputs)
    return can_tma and num_sms is None and num_counters <= MAX_TILES


def _check_others(
    out_MN: torch.Tensor | None, num_rows: int, weight: Fp8Weight, num_sms: int | None, swap_ab: SwapAB | str
) -> None:
    """Check the arguments that both functions take besides activations."""
    require(num_sms is None or num_sms > 0, "num_sms", f"is {num_sms}, not positive")
    names = [item.value for item in SwapAB]
    is_known = isinstance(swap_ab, SwapAB) or swap_ab in names
    require(is_known, "swap_ab", f"is {swap_ab!r}, not one of {names}")
    if out_MN is not None:
        shape = [num_rows, weight.num_outputs]
        require_tensor("out_MN", out_MN, shape, [torch.bfloat16], weight.values_NK.device)
        require_rows("out_MN", out_MN)


def _out(out_MN: torch.Tensor | None, num_rows: int, weight: Fp8Weight) -> torch.Tensor:
    """Return the output that was given, or allocate one."""
    if out_MN is not None:
        return out_MN
    return torch.empty(num_rows, weight.num_outputs, dtype=torch.bfloat16, device=weight.values_NK.device)


def _check_plan(plan: GemmPlan, weight: Fp8Weight) -> None:
    """Check that a plan given by the caller covers all of K."""
    num_groups = weight.num_inputs // GROUP_LEN
    is_step = plan.groups in ((1, 2, 4) if plan.copied else (1, 2))
    divides = is_step and num_groups % plan.groups == 0 and plan.splits <= num_groups // plan.groups
    require(divides, "plan", f"cuts {num_groups} groups into {plan.splits} parts, steps of {plan.groups}")
    widths = (16, 32, 64, GROUP_LEN) if plan.swap else (32, 64, GROUP_LEN)
    is_width = bool(plan.workers) or plan.BN in widths
    require(is_width, "plan", f"has tiles of {plan.BN} rows of the weight, not one of {widths}")
    is_form = not plan.workers or gemm_fp8_hopper_triton.is_form(plan)
    require(is_form, "plan", f"has {plan.workers} workers for tiles, stages, depth or splits that are not for them")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; that of Hopper for the interpreter, which has no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _HOPPER


def _uses_triton(device: torch.device, implementation: Implementation) -> bool:
    """Return whether Triton computes; with AUTO, GPUs too old for float8 use the reference."""
    if implementation is Implementation.AUTO and device.type == "cuda" and _capability(device) < _OLDEST:
        return False
    return uses_triton(device, implementation)


def _chosen(
    table: str,
    num_rows: int,
    weight: Fp8Weight,
    swap_ab: SwapAB | str,
    num_sms: int | None,
    invariant: bool,
    can_tma: bool,
) -> GemmPlan | None:
    """Choose the plan; None: the library's GEMM, which can be neither limited to `num_sms` nor batch-invariant."""
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    device = weight.values_NK.device
    can_swap = _capability(device)[0] == _HOPPER[0]
    plan = plan_of(
        table,
        num_rows,
        num_outputs,
        num_inputs,
        SwapAB(swap_ab),
        can_swap=can_swap,
        device_index=device.index,
    )
    if invariant:
        return invariant_plan(num_outputs, num_inputs)
    if plan is not None and plan.workers and not _is_warp_specialized(plan, num_rows, weight, num_sms, can_tma):
        if can_swap and num_sms is None and device.type == "cuda":
            _tell_of_rule(num_outputs, num_inputs)
        is_swapped = can_swap and num_rows <= FEW_ROWS and SwapAB(swap_ab) is not SwapAB.OFF
        return rule(num_rows, num_outputs, num_inputs, swap=is_swapped)
    if plan is not None and plan.vector and num_sms is not None:
        return rule(num_rows, num_outputs, num_inputs, swap=True)
    if plan is None and (num_sms is not None or device.type != "cuda"):
        return rule(num_rows, num_outputs, num_inputs, swap=False)
    return plan


@functools.cache
def _tell_of_rule(num_outputs: int, num_inputs: int) -> None:
    log.warning(
        "a float8 GEMM of %d outputs and %d inputs is computed by rule, not as tuned: its rows do not begin at "
        "multiples of 16 bytes, or it has more tiles than counters",
        num_outputs,
        num_inputs,
    )


def _own(a_MK: torch.Tensor, num_rows: int, weight: Fp8Weight) -> GemmPlan:
    """Plan for a GEMM that the library refused."""
    N, K = weight.num_outputs, weight.num_inputs
    can_tma = gemm_fp8_hopper_triton.fits(weight, a_MK)
    if can_tma:
        plan, _ = predicted_plan(size_of(num_rows), N, K, machine_of(a_MK.device.index))
        if _is_warp_specialized(plan, num_rows, weight, None, can_tma):
            return plan
    return rule(num_rows, N, K, swap=False)


def _multiplied(
    a_MK: torch.Tensor,
    scales_GM: torch.Tensor,
    weight: Fp8Weight,
    num_rows: int,
    out_MN: torch.Tensor | None,
    plan: GemmPlan | None,
    num_sms: int | None,
    workspace: GemmWorkspace | None,
) -> torch.Tensor:
    """Multiply quantized rows; rows beyond `num_rows` are padding, and are not stored or are cut off."""
    if plan is None:
        gemm_MN = LIBRARY.gemm(a_MK, scales_GM, weight)
        if gemm_MN is not None:
            if len(gemm_MN) != num_rows:
                gemm_MN = gemm_MN[:num_rows]
            return gemm_MN if out_MN is None else out_MN.copy_(gemm_MN)
        plan = _own(a_MK, num_rows, weight)
    if len(a_MK) != num_rows:
        a_MK, scales_GM = a_MK[:num_rows], scales_GM[:, :num_rows]
    out_MN = _out(out_MN, num_rows, weight)
    counters = (workspace or default_workspace(a_MK.device)).counters
    if plan.workers:
        gemm_fp8_hopper_triton.launch(a_MK, scales_GM, weight, out_MN, plan, counters)
    else:
        gemm_fp8_triton.launch(a_MK, scales_GM, weight, out_MN, plan, counters, num_sms=num_sms)
    return out_MN
