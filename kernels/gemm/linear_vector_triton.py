# mypy: ignore-errors
"""The kernel of `linear_vector`: a GEMM of one or two tokens, without tensor cores.

Such a GEMM takes as long as reading the weight. A program has all columns of a few rows of it, so there are no parts
to add, and asks for them, and for their scales, before it waits for the launch before: they are in its registers, or on
their way there, when the tokens come. Where the weight is float8, a program makes float8 of the tokens, as
`quantize_fp8` does, and multiplies them with the scales of both.

Shapes: N rows of the weight of a program, K columns, G groups of 128 of them.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.quantize_fp8_triton import quantize_tile
from baton.kernels.gemm.vector_plan import VectorTile, tile_of
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant, with_ue8m0


@triton.jit
def load_vector(x, num_inputs, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Float32 [K]; what pads it is 0."""
    at_K = tl.arange(0, COLUMNS)
    if WHOLE:
        return tl.load(x + at_K).to(tl.float32)
    return tl.load(x + at_K, mask=at_K < num_inputs, other=0.0).to(tl.float32)


@triton.jit
def load_rows(at_N, num_inputs, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """[N, K] from where rows begin, as they are stored; what pads them is 0 and is not read."""
    at_K = tl.arange(0, COLUMNS)
    at_NK = at_N[:, None] + at_K[None, :]
    if WHOLE:
        return tl.load(at_NK)
    return tl.load(at_NK, mask=(at_K < num_inputs)[None, :], other=0.0)


@triton.jit
def _quantized(x, scale_G, num_inputs, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, UE8M0: tl.constexpr):
    """Float32 [K]: what float8 makes of a token, times the scales of the token and of the weight."""
    group_G = tl.arange(0, COLUMNS // 128)
    at_GC = group_G[:, None] * 128 + tl.arange(0, 128)[None, :]
    if WHOLE:
        x_GC = tl.load(x + at_GC)
    else:
        x_GC = tl.load(x + at_GC, mask=(group_G < num_inputs // 128)[:, None], other=0.0)
    q_GC, x_scale_G1 = quantize_tile(x_GC.to(tl.float32), 1, UE8M0)
    return tl.reshape(q_GC.to(tl.float32) * (x_scale_G1 * scale_G[:, None]), [COLUMNS])


@triton.jit(do_not_specialize=["w_scale_stride"])
def _vector_kernel(
    x, weight, w_scales, out, N, num_inputs, x_stride, weight_stride, w_scale_stride, out_stride,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr, FP8: tl.constexpr,
    UE8M0: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of all tokens; WHOLE where nothing pads the columns."""
    first = tl.program_id(0) * OUTPUTS
    output_N = first + tl.arange(0, OUTPUTS)
    # Rows past the end read the last one again, which costs less than a mask; they are not stored.
    at_N = weight + tl.minimum(output_N, N - 1).to(tl.int64) * weight_stride
    weight_NK = load_rows(at_N, num_inputs, COLUMNS, WHOLE)
    if FP8:
        group_G = tl.arange(0, COLUMNS // 128)
        scales_at_G = w_scales + (first // 128).to(tl.int64) * w_scale_stride + group_G
        scale_G = tl.load(scales_at_G, mask=group_G < num_inputs // 128, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for token in tl.static_range(TOKENS):
        if FP8:
            x_K = _quantized(x + token * x_stride, scale_G, num_inputs, COLUMNS, WHOLE, UE8M0)
        else:
            x_K = load_vector(x + token * x_stride, num_inputs, COLUMNS, WHOLE)
        sum_N = tl.sum(weight_NK.to(tl.float32) * x_K[None, :], axis=1)
        tl.store(out + token * out_stride + output_N, sum_N.to(out.dtype.element_ty), mask=output_N < N)


def launch(
    x_MK: torch.Tensor,
    weight: torch.Tensor | Fp8Weight,
    out_MN: torch.Tensor,
    *,
    tile: VectorTile | None = None,
) -> None:
    """Write `out_MN`; all arguments were checked.

    Args:
        x_MK: one or two rows; bfloat16 if the weight is float8, else of the weight's dtype.
        weight: of at most `MAX_INPUTS` columns, a multiple of 128.
        out_MN: rows may be strided.
        tile: of a program; None: as measured.
    """
    is_fp8 = isinstance(weight, Fp8Weight)
    values_NK = weight.values_NK if is_fp8 else weight
    scales_BG = weight.scales_BG if is_fp8 else values_NK
    (num_tokens, num_inputs), num_outputs = x_MK.shape, len(values_NK)
    tile = tile or tile_of(num_inputs, is_fp8=is_fp8)
    is_many = num_tokens > 1  # a single row's stride may be anything
    arguments = (
        x_MK, values_NK, scales_BG, out_MN, num_outputs, num_inputs, x_MK.stride(0) if is_many else num_inputs,
        values_NK.stride(0), scales_BG.stride(0), out_MN.stride(0) if is_many else num_outputs,
    )  # fmt: skip
    constants = _constants(tile, num_inputs, num_tokens, is_fp8, is_fp8 and weight.ue8m0, x_MK.device)
    _launch_vector((-(-num_outputs // tile.outputs),), arguments, constants)


@functools.lru_cache(maxsize=256)
def _constants(
    tile: VectorTile, num_inputs: int, num_tokens: int, is_fp8: bool, ue8m0: bool, device: torch.device
) -> Constants:
    options = {"num_warps": tile.warps} | dependent_launch(device)
    return Constants(_by_name(tile, num_inputs, num_tokens, is_fp8, ue8m0) | options)


def _by_name(tile: VectorTile, num_inputs: int, num_tokens: int, is_fp8: bool, ue8m0: bool) -> dict[str, int]:
    """All but `EARLY`."""
    return {
        "OUTPUTS": tile.outputs,
        "COLUMNS": tile.columns,
        "WHOLE": num_inputs == tile.columns,
        "TOKENS": num_tokens,
        "FP8": is_fp8,
        "UE8M0": ue8m0,
    }


_launch_vector = Launcher(_vector_kernel)


def variants() -> list[Variant]:
    """Each number of columns, whole and padded, of one token and of two."""
    integers = ("N", "num_inputs", "x_stride", "weight_stride", "w_scale_stride", "out_stride")
    forms = [
        (num_inputs, num_tokens, is_fp8, True)
        for num_inputs in (512, 640, 1024, 1536, 2048, 3584, 4096, 5120, 8192)
        for num_tokens in (1, 2)
        for is_fp8 in (False, True)
        if num_tokens == 1 or num_inputs <= 4096
    ]
    forms += [(2048, 1, False, False), (2048, 1, True, False)]
    aligned = ("x", "weight", "w_scales", "out", "N", "num_inputs", "x_stride", "weight_stride", "out_stride")
    found = []
    for num_inputs, num_tokens, is_fp8, early in forms:
        tile = tile_of(num_inputs, is_fp8=is_fp8)
        kind = f"{'fp8' if is_fp8 else 'bf16'}{'' if early else ' late'}"
        of_weight = "*fp8e4nv" if is_fp8 else "*bf16"
        pointers = {"x": "*bf16", "weight": of_weight, "w_scales": "*fp32" if is_fp8 else of_weight, "out": "*bf16"}
        found.append(
            Variant(
                name=f"linear_vector {tile.outputs}x{num_inputs} tokens={num_tokens} {kind}",
                kernel=_vector_kernel,
                types=pointers | dict.fromkeys(integers, "i32"),
                constants=_by_name(tile, num_inputs, num_tokens, is_fp8, False) | {"EARLY": early},
                aligned=aligned,
                num_warps=tile.warps,
                lacks=("HMMA", "HGMMA", "QGMMA"),
                max_registers=168,
                on_amd=not is_fp8 and not early,  # gfx942 has another float8, and launches nothing early
                options={"launch_pdl": True} if early else {},
            )
        )
    return with_ue8m0(found, next(variant.name for variant in found if variant.name.endswith("fp8")))
