# mypy: ignore-errors
"""`latent_norm_rope_write` in Triton: a token has one program for its row, and one for every few query heads.

A program for queries reads and writes the rotated columns only, where they are. All programs are one warp: the largest
tile is a latent of 512 elements.

Shapes: A query heads of a program, J pairs of columns, E columns of a head, C of a latent, R rotated.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.pointwise.head_halves_triton import load_halves, store_halves
from baton.kernels.prefetch_triton import prefetch_vector
from baton.kernels.variant import Variant

_HEADS = 8  # of a program: 1 KB of bfloat16
_NUM_WARPS = 1
_FIXED = {"enable_fp_fusion": False}  # a product that torch rounds is rounded here, too


def launch(
    query_TAE: torch.Tensor,
    projected: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, float],
    angles: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    rows_NSX: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """See `latent_norm_rope_write`, which has checked the arguments."""
    num_tokens, num_heads, head_dim = query_TAE.shape
    if num_tokens == 0:
        return
    latent_TC, turning_TR = projected
    arguments = (
        query_TAE,
        query_TAE.stride(0),
        latent_TC,
        latent_TC.stride(0),
        turning_TR,
        turning_TR.stride(0),
        *norm,
        *angles,
        angles[0].stride(0),
        slots_T,
        rows_NSX,
        *rows_NSX.stride()[:2],
    )
    sizes = num_heads, head_dim, latent_TC.shape[1], turning_TR.shape[1], rows_NSX.shape[1]
    constants = _constants(sizes, interleaved, query_TAE.device)
    _launch((num_tokens, 1 + triton.cdiv(num_heads, _HEADS)), arguments, constants)


@functools.lru_cache(maxsize=256)
def _constants(sizes: tuple[int, int, int, int, int], interleaved: bool, device: torch.device) -> Constants:
    by_name = dict(zip(("NUM_HEADS", "E", "C", "R", "S"), sizes, strict=True))
    by_name |= {"A": _HEADS, "INTERLEAVED": interleaved, "num_warps": _NUM_WARPS, **_FIXED}
    return Constants(by_name | dependent_launch(device))


@triton.jit
def _rotate(
    source, target, is_there_A1, cosines, sines, R: tl.constexpr, A: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Rotate R columns at each of A pointers; the angles are one token's."""
    pair_1J = tl.arange(0, R // 2)[None, :]
    left_AJ, right_AJ = load_halves(source, is_there_A1, pair_1J, A, R, R, INTERLEAVED)
    at_AJ = tl.broadcast_to(pair_1J, [A, R // 2])
    cosine_AJ, sine_AJ = tl.load(cosines + at_AJ), tl.load(sines + at_AJ)
    wide_left_AJ, wide_right_AJ = left_AJ.to(tl.float32), right_AJ.to(tl.float32)
    turned_left_AJ = (wide_left_AJ * cosine_AJ - wide_right_AJ * sine_AJ).to(left_AJ.dtype)
    turned_right_AJ = (wide_right_AJ * cosine_AJ + wide_left_AJ * sine_AJ).to(left_AJ.dtype)
    store_halves(target, is_there_A1, pair_1J, turned_left_AJ, turned_right_AJ, R, R, INTERLEAVED)


@triton.jit(do_not_specialize=["slots"])
def _latent_norm_rope_write_kernel(
    query, query_stride, latent, latent_stride, turning, turning_stride, weight, eps, cosines, sines, angle_stride,
    slots, rows, block_stride, row_stride,
    NUM_HEADS: tl.constexpr, E: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, A: tl.constexpr,
    INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    if EARLY:
        prefetch_vector(weight, C)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    cosines += token * angle_stride
    sines += token * angle_stride
    if place == 0:
        slot = tl.load(slots + token).to(tl.int64)
        row = rows + (slot // S * block_stride + slot % S * row_stride)
        column_C = tl.arange(0, C)
        latent_C = tl.load(latent + token * latent_stride + column_C)
        wide_C = latent_C.to(tl.float32)
        normed_C = (wide_C * tl.rsqrt(tl.sum(wide_C * wide_C, axis=0) / C + eps)).to(latent_C.dtype)
        weight_C = tl.load(weight + column_C)
        normed_C = (normed_C.to(tl.float32) * weight_C.to(tl.float32)).to(latent_C.dtype)
        tl.store(row + column_C, normed_C)
        one_11 = tl.full([1, 1], 0, tl.int32)
        source = turning + token * turning_stride + one_11
        _rotate(source, row + C + one_11, one_11 == 0, cosines, sines, R, 1, INTERLEAVED)
    else:
        head_A1 = (place - 1) * A + tl.arange(0, A)[:, None]
        at_A1 = query + token * query_stride + head_A1 * E + (E - R)
        _rotate(at_A1, at_A1, head_A1 < NUM_HEADS, cosines, sines, R, A, INTERLEAVED)


_launch = Launcher(_latent_norm_rope_write_kernel)


def variants() -> list[Variant]:
    """Of DeepSeek-V3, whole and on one of eight ranks, and with columns that turn half a head apart."""
    found = []
    strides = ("query_stride", "latent_stride", "turning_stride", "angle_stride", "block_stride", "row_stride")
    pointers = ("query", "latent", "turning", "weight", "rows")
    for num_heads, interleaved, early in ((128, True, True), (16, True, True), (128, True, False), (128, False, True)):
        name = "" if interleaved else " halves"
        found.append(
            Variant(
                name=f"latent_norm_rope_write {num_heads}/192/512{name}{'' if early else ' late'}",
                kernel=_latent_norm_rope_write_kernel,
                types=dict.fromkeys(pointers, "*bf16")
                | dict.fromkeys(("cosines", "sines"), "*fp32")
                | dict.fromkeys(strides, "i32")
                | {"eps": "fp32", "slots": "*i64"},
                constants={
                    "NUM_HEADS": num_heads,
                    "E": 192,
                    "C": 512,
                    "R": 64,
                    "S": 16,
                    "A": _HEADS,
                    "INTERLEAVED": interleaved,
                    "EARLY": early,
                },
                aligned=(*pointers, "cosines", "sines", *strides),
                num_warps=_NUM_WARPS,
                max_registers=168,
                max_shared_bytes=4096,
                lacks=("FFMA",),  # which rounds once where torch rounds twice
                on_amd=not early,
                options=_FIXED,
            )
        )
    return found
