"""The masked grouped GEMM: each expert's rows, whose number is on the device, times the expert's weights.

The input is what an exchange between expert-parallel ranks leaves behind: a buffer [E, M, K] of which only the first
masked_m[e] rows of each expert are filled. Rows beyond are neither read nor written, and experts without rows cost
nothing. One call quantizes (if activations are not float8 yet), pads within its tiles, and multiplies. Programs, as
many as `num_sms` allows, walk over the tiles that have rows.

With swapped operands, weights are the wgmma's M side and rows its N side, so that 16 rows cost no more than they need.
That is faster for up to 64 rows. It needs Hopper's instructions, so elsewhere `auto` does not swap.

There is no epilogue; `kernels.moe.gemm` has those. Legend: E experts, M rows, N outputs, K inputs, G groups of 128
inputs.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.kernels import tuning
from baton.kernels.arguments import require, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.moe import gemm_masked_triton as moe_gemm_masked_triton
from baton.kernels.moe.align import GROUP, quantize_reference
from baton.kernels.moe.gemm import dequantize

KERNEL = "moe_gemm_masked"
MAX_SWAPPED = 64  # up to this many rows of an expert, operands are swapped
_DEFAULT_SMS = 132
_SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True)
class MaskedTiles:
    """Tiling of the GEMM; only `rows` and `outputs` can change a result's bits.

    Attributes:
        rows: rows of a tile.
        outputs: outputs of a tile.
        warps: warps of a program.
        stages: tiles of weights in flight.
        programs: programs per multiprocessor.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int


def moe_gemm_masked(
    a_EMK: torch.Tensor,
    masked_m_E: torch.Tensor,
    b_ENK: torch.Tensor,
    *,
    a_scale_EGM: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    swap_ab: bool | None = None,
    num_sms: int | None = None,
    out_EMN: torch.Tensor | None = None,
    invariant: bool = False,
    tiles: MaskedTiles | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute out[e, :masked_m[e]] = a[e, :masked_m[e]] b[e]^T, [E, M, N]; the host never waits.

    Args:
        a_EMK: bfloat16 or float16, or float8_e4m3fn with `a_scale_EGM`. Contiguous.
        masked_m_E: int32 or int64; more than M counts as M, less than 0 as 0.
        b_ENK: float8_e4m3fn with `b_scale`, or a's dtype. Contiguous.
        a_scale_EGM: float32 [E, K / 128, M], contiguous.
        b_scale: float32 [E, N / 128 rounded up, K / 128], contiguous.
        swap_ab: whether weights are the wgmma's M side; None: where that is faster.
        num_sms: number of multiprocessors that may be used; None: all.
        out_EMN: bfloat16 or float16, contiguous; allocated if None. Rows beyond masked_m are arbitrary if allocated.
        invariant: whether tiles must not depend on M.
        tiles: tiles to use instead of the tuned ones, for the tuner.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    _check(a_EMK, masked_m_E, b_ENK, a_scale_EGM, b_scale, num_sms)
    num_experts, num_rows, _ = a_EMK.shape
    half = (torch.bfloat16, torch.float16)
    shape = (num_experts, num_rows, b_ENK.shape[1])
    if tiles is not None:
        fits = b_scale is None or GROUP % tiles.outputs == 0
        require(fits, "tiles", f"do not go with groups of {GROUP}: {tiles}")
    if out_EMN is None:
        dtype = a_EMK.dtype if a_EMK.dtype in half else torch.bfloat16
        out_EMN = torch.empty(shape, dtype=dtype, device=a_EMK.device)
    require_tensor("out_EMN", out_EMN, shape, half, a_EMK.device)
    require(out_EMN.is_contiguous(), "out_EMN", "must be contiguous")
    if not uses_triton(a_EMK.device, implementation):
        moe_gemm_masked_reference(a_EMK, masked_m_E, b_ENK, a_scale_EGM, b_scale, out_EMN)
        return out_EMN
    if out_EMN.numel() == 0:
        return out_EMN
    is_fp8 = b_scale is not None
    if is_fp8 and a_scale_EGM is None:
        a_EMK, a_scale_EGM = moe_gemm_masked_triton.quantize_masked(a_EMK, masked_m_E)
    device_index = a_EMK.device.index if a_EMK.device.type == "cuda" else None
    if swap_ab is None:
        swap_ab = (invariant or num_rows <= MAX_SWAPPED) and _has_wgmma(device_index)
    if tiles is None:
        tiles = choose_tiles(b_ENK.shape, is_fp8, swap_ab, None if invariant else num_rows, device_index)
    num_programs = (num_sms or _num_sms(device_index)) * tiles.programs
    scales = None if a_scale_EGM is None or b_scale is None else (a_scale_EGM, b_scale)
    moe_gemm_masked_triton.launch(a_EMK, masked_m_E, b_ENK, scales, out_EMN, tiles, swap_ab, num_programs)
    return out_EMN


def _check(
    a_EMK: torch.Tensor,
    masked_m_E: torch.Tensor,
    b_ENK: torch.Tensor,
    a_scale_EGM: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    num_sms: int | None,
) -> None:
    half, fp8 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
    device = a_EMK.device
    require_tensor("a_EMK", a_EMK, (None, None, None), (*half, fp8))
    num_experts, num_rows, num_inputs = a_EMK.shape
    require(0 < num_experts <= 4096, "a_EMK", f"has {num_experts} experts, not 1 to 4096")
    require_tensor("masked_m_E", masked_m_E, (num_experts,), (torch.int32, torch.int64), device)
    require_tensor("b_ENK", b_ENK, (num_experts, None, num_inputs), (*half, fp8), device)
    is_fp8 = b_ENK.dtype == fp8
    require((b_scale is not None) == is_fp8, "b_scale", f"does not go with {b_ENK.dtype} weights")
    require((a_scale_EGM is not None) == (a_EMK.dtype == fp8), "a_scale_EGM", f"does not go with {a_EMK.dtype} rows")
    fits = is_fp8 if a_EMK.dtype == fp8 else is_fp8 or b_ENK.dtype == a_EMK.dtype
    require(fits, "b_ENK", f"is {b_ENK.dtype}, which does not go with {a_EMK.dtype} rows")
    named = {"a_EMK": a_EMK, "masked_m_E": masked_m_E, "b_ENK": b_ENK}
    if b_scale is not None:
        require(num_inputs % GROUP == 0, "a_EMK", f"has {num_inputs} columns, no multiple of {GROUP}")
        shape = (num_experts, -(-b_ENK.shape[1] // GROUP), num_inputs // GROUP)
        require_tensor("b_scale", b_scale, shape, (torch.float32,), device)
        named["b_scale"] = b_scale
    if a_scale_EGM is not None:
        shape = (num_experts, num_inputs // GROUP, num_rows)
        require_tensor("a_scale_EGM", a_scale_EGM, shape, (torch.float32,), device)
        named["a_scale_EGM"] = a_scale_EGM
    for name, tensor in named.items():
        require(tensor.is_contiguous(), name, "must be contiguous")
    require(num_sms is None or num_sms > 0, "num_sms", f"is {num_sms}, not positive")


@functools.cache
def choose_tiles(
    shape_ENK: tuple[int, ...], is_fp8: bool, swap_ab: bool, num_rows: int | None, device_index: int | None
) -> MaskedTiles:
    """Return the tuned tiles of the swapped form, else the rule's; `num_rows` None: tiles for any number of rows."""
    if swap_ab and num_rows is not None:
        found = tuning.find(KERNEL, shape_name(shape_ENK, is_fp8), num_rows, device_index)
        if found is not None:
            return tiles_of(found)
    rows = 16 if num_rows is None or num_rows <= 16 else 32 if num_rows <= 32 else 64
    if not swap_ab:
        return MaskedTiles(64, 128, 4, 3, 2)
    if rows == 64:  # sums of 64 x 64 leave registers for one other program
        return MaskedTiles(64, 64, 4, 5, 2)
    return MaskedTiles(rows, 128, 4, 4, max_programs(rows, 128, 4))


def max_programs(rows: int, outputs: int, stages: int) -> int:
    """Number of programs that fit a multiprocessor's shared memory."""
    return max(1, min(4, _SHARED_BYTES // (stages * (rows + outputs) * 128 + 2048)))


def shape_name(shape_ENK: tuple[int, ...], is_fp8: bool) -> str:
    """Name of a shape in the tuned table."""
    num_experts, num_outputs, num_inputs = shape_ENK
    return f"{'fp8' if is_fp8 else 'bf16'} {num_experts}x{num_outputs}x{num_inputs}"


def tiles_of(options: Mapping[str, Any]) -> MaskedTiles:
    """Convert a row of the table to tiles."""
    return MaskedTiles(**{name: int(options[name]) for name in MaskedTiles.__slots__})


@functools.cache
def _num_sms(device_index: int | None) -> int:
    if device_index is None:
        return _DEFAULT_SMS
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@functools.cache
def _has_wgmma(device_index: int | None) -> bool:
    """Return whether the GPU has wgmma; True without a GPU, so that tests cover the served form."""
    return device_index is None or torch.cuda.get_device_capability(device_index)[0] == 9


def moe_gemm_masked_reference(
    a_EMK: torch.Tensor,
    masked_m_E: torch.Tensor,
    b_ENK: torch.Tensor,
    a_scale_EGM: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    out_EMN: torch.Tensor,
) -> None:
    """Compute it in torch, expert by expert; rows beyond masked_m stay as they are."""
    row_M = torch.arange(a_EMK.shape[1], device=a_EMK.device)
    for expert in range(a_EMK.shape[0]):
        is_row_M1 = (row_M < masked_m_E[expert])[:, None]
        a_MK = torch.where(is_row_M1, a_EMK[expert].float(), 0.0)
        b_NK = b_ENK[expert].float()
        if b_scale is not None:
            if a_scale_EGM is None:
                values_MK, scale_MG = quantize_reference(a_MK)
            else:
                values_MK, scale_MG = a_MK, torch.where(is_row_M1, a_scale_EGM[expert].T, 0.0)
            a_MK = values_MK.float() * scale_MG.repeat_interleave(GROUP, dim=-1)
            b_NK = dequantize(b_ENK[expert], b_scale[expert])
        out_MN = (a_MK @ b_NK.T).to(out_EMN.dtype)
        out_EMN[expert] = torch.where(is_row_M1, out_MN, out_EMN[expert])
