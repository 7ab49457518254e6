# mypy: ignore-errors
"""Quantization to float8 per group of 128 in Triton: a kernel, and the formula for kernels that quantize as they load.

Every group is computed by itself: one multiplication by 1/448, one correctly rounded division, then for each element
one multiplication and one conversion that rounds to even and saturates. So the bits are those of
`quantize_fp8_reference`, whatever tile a group is in. Shapes: T rows, K columns, G groups of 128 columns.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.tuning import find
from baton.kernels.variant import Variant, with_ue8m0

GROUP = 128
SIZES = (16, 64, 512, 2048, 8192)  # rows that are tuned for


@triton.jit
def raise_scales(scale):
    """The next powers of two, or the scales themselves where they are such."""
    return ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def quantize_tile(x, AXIS: tl.constexpr, UE8M0: tl.constexpr):
    """Float8 values of float32 ones, and the scales of the groups along `AXIS` (kept, with length 1)."""
    magnitude = tl.where(x == x, tl.abs(x), 0.0)  # a NaN must not scale its neighbours
    scale = tl.maximum(tl.max(magnitude, axis=AXIS, keep_dims=True), 1e-10) * (1.0 / 448.0)
    if UE8M0:
        scale = raise_scales(scale)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return (x * inverse).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["num_rows", "num_padded", "scale_stride"])
def _quantize_kernel(
    x,
    q,
    scales,
    num_rows,
    num_padded,
    K,
    x_stride,
    scale_stride,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    UE8M0: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of ROWS x GROUPS groups; rows from `num_rows` to `num_padded` become zeros with scale 1."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_group = g < K // 128
    t_RGK = t[:, None, None].to(tl.int64)
    inside = (t[:, None, None] < num_rows) & is_group[None, :, None]
    x_RGK = tl.load(x + t_RGK * x_stride + k[None, :, :], mask=inside, other=0.0).to(tl.float32)
    q_RGK, scale_RG1 = quantize_tile(x_RGK, 2, UE8M0)
    scale_RG = tl.where(t[:, None] < num_rows, tl.reshape(scale_RG1, [ROWS, GROUPS]), 1.0)
    kept = (t < num_padded)[:, None] & is_group[None, :]
    tl.store(q + t_RGK * K + k[None, :, :], q_RGK, mask=kept[:, :, None])
    tl.store(scales + g[None, :].to(tl.int64) * scale_stride + t[:, None], scale_RG, mask=kept)


@functools.lru_cache(maxsize=1024)
def _tile_of(num_rows, device_index=None):
    """Rows and groups of a program, and its warps: few rows are spread thinly, many go in lines of DRAM."""
    tuned = find("quantize_fp8", "any", num_rows, device_index)
    if tuned is not None:
        return tuned["ROWS"], tuned["GROUPS"], tuned["num_warps"]
    return (4, 1, 1) if num_rows <= 256 else (8, 4, 4)


def launch(
    x_TK: torch.Tensor,
    q_TK: torch.Tensor,
    scales_GT: torch.Tensor,
    *,
    ue8m0: bool,
    early: bool = True,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """Quantize the rows of `x_TK`, and pad up to those of `q_TK`.

    Args:
        x_TK: rows contiguous.
        q_TK: at least as many rows, contiguous.
        scales_GT: the last dimension contiguous.
        ue8m0: whether scales are powers of two.
        early: whether programs may be there before the launch before has ended.
        tile: rows, groups and warps of a program; None: as tuned.
    """
    num_padded, K = q_TK.shape
    tile = tile or _tile_of(num_padded, x_TK.device.index)
    rows, groups, _ = tile
    grid = (-(-num_padded // rows), -(-(K // GROUP) // groups))
    arguments = (x_TK, q_TK, scales_GT, len(x_TK), num_padded, K, x_TK.stride(0), scales_GT.stride(0))
    _launch(grid, arguments, _constants(*tile, ue8m0, x_TK.device, early))


@functools.cache
def _constants(rows, groups, num_warps, ue8m0, device, early):
    options = {"num_warps": num_warps, **dependent_launch(device, early)}
    return Constants({"ROWS": rows, "GROUPS": groups, "UE8M0": ue8m0, **options})


_launch = Launcher(_quantize_kernel)


def variants() -> list[Variant]:
    """The tiles of small and large batches, and one for other GPUs."""
    types = {
        "x": "*bf16", "q": "*fp8e4nv", "scales": "*fp32", "num_rows": "i32", "num_padded": "i32", "K": "i32",
        "x_stride": "i32", "scale_stride": "i32",
    }  # fmt: skip
    aligned = ("x", "q", "scales", "K", "x_stride")
    found = []
    tiles = {_tile_of(num_rows) for num_rows in SIZES}
    for rows, groups, num_warps in sorted(tiles):
        for early in (False, True) if rows * groups <= 16 else (True,):
            found.append(
                Variant(
                    name=f"quantize_fp8 {rows}x{groups} warps={num_warps}{'' if early else ' late'}",
                    kernel=_quantize_kernel,
                    types=types,
                    constants={"ROWS": rows, "GROUPS": groups, "UE8M0": False, "EARLY": early},
                    aligned=aligned,
                    num_warps=num_warps,
                    max_registers=128,
                    max_shared_bytes=16_384,
                    on_amd=not early,
                )
            )
    return with_ue8m0(found, found[-1].name)
