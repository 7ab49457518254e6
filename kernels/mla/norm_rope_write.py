"""From latent attention's projections to queries and rows of the pool, in one launch.

A token's latent is normalised, its key columns beside it are rotated, and both are written to the token's slot as one
row. The last R columns of each query head are rotated, too.

Rounding is that of separate operations, bit for bit except for the order of sums: the norm rounds before and after the
weight, the rotation is computed in float32 and rounded once. A row's result depends on that row alone.

Source: DeepSeek-V2 (2024), section 2.1; transformers `DeepseekV3Attention`.
Legend: T tokens, A query heads, E columns of a head, R of them rotated, F = R / 2, C length of a latent, N blocks of
the pool, S positions of one, X = C + R elements of a row.
"""

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.mla import norm_rope_write_triton
from baton.kernels.mla.latent_rows import write_rows
from baton.kernels.mla.sizes import unfit_latents
from baton.kernels.pointwise.rms_norm import rms_norm
from baton.kernels.pointwise.rope import rope

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


def latent_norm_rope_write(
    query_TAE: torch.Tensor,
    latent_TC: torch.Tensor,
    turning_TR: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    angles: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    rows_NSX: torch.Tensor,
    *,
    interleaved: bool,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Write each token's row -> queries [T, A, E] with their last R columns rotated.

    The kernel rotates `query_TAE` where it is and returns it; the reference returns another tensor.

    Args:
        query_TAE: queries; tokens may be strided, heads follow each other.
        latent_TC: latents, same dtype; rows may be strided.
        turning_TR: key columns that are rotated, likewise.
        norm: weight [C] of the latents' norm in the same dtype, and its epsilon.
        angles: cosines and sines, float32 [T, F] each.
        slots_T: int32 or int64, block * S + offset of each token; tokens that pad a batch share the scratch slot.
        rows_NSX: pool of the layer, same dtype; blocks may be strided.
        interleaved: whether columns that are rotated together are neighbours; otherwise they are F apart.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    weight_C, eps = norm
    tensors = (query_TAE, latent_TC, turning_TR, weight_C, *angles, slots_T, rows_NSX)
    key = tuple(map(signature, tensors)), implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check(query_TAE, latent_TC, turning_TR, weight_C, angles, slots_T, rows_NSX)
        in_triton = _FORMS.keep(key, uses_triton(query_TAE.device, implementation))
    if in_triton:
        norm_rope_write_triton.launch(
            query_TAE, (latent_TC, turning_TR), norm, angles, slots_T, rows_NSX, interleaved=interleaved
        )
        return query_TAE
    latent_TC = rms_norm(latent_TC, weight_C, eps)
    return rotate_and_write(query_TAE, latent_TC, turning_TR, angles, slots_T, rows_NSX, interleaved=interleaved)


def rotate_and_write(
    query_TAE: torch.Tensor,
    latent_TC: torch.Tensor,
    turning_TR: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    rows_NSX: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Do the rest of the reference, in any dtype, with latents that are normalised already."""
    turned_TR = rope(turning_TR[:, None], *angles, interleaved=interleaved)[:, 0]
    write_rows(torch.cat([latent_TC, turned_TR], dim=1), slots_T, rows_NSX)
    nope_TAN, turning_TAR = query_TAE.tensor_split([-turning_TR.shape[1]], dim=2)
    return torch.cat([nope_TAN, rope(turning_TAR, *angles, interleaved=interleaved)], dim=2)


def _check(
    query_TAE: torch.Tensor,
    latent_TC: torch.Tensor,
    turning_TR: torch.Tensor,
    weight_C: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    rows_NSX: torch.Tensor,
) -> None:
    require_tensor("query_TAE", query_TAE, [None, None, None], _DTYPES)
    num_tokens, _, head_dim = query_TAE.shape
    dtype, device = query_TAE.dtype, query_TAE.device
    require(query_TAE.stride()[1:] == (head_dim, 1), "query_TAE", "its heads do not follow each other")
    require_tensor("latent_TC", latent_TC, [num_tokens, None], [dtype], device)
    require_tensor("turning_TR", turning_TR, [num_tokens, None], [dtype], device)
    latent_dim, turned_dim = latent_TC.shape[1], turning_TR.shape[1]
    unfit = unfit_latents(latent_dim, turned_dim)
    require(not unfit, "latent_TC", f"has no kernel: {unfit}")
    require(turned_dim <= head_dim, "turning_TR", f"has {turned_dim} columns, a query head {head_dim}")
    require_tensor("weight_C", weight_C, [latent_dim], [dtype], device)
    for name, rows in (("latent_TC", latent_TC), ("turning_TR", turning_TR), ("weight_C", weight_C)):
        require_rows(name, rows)
    for table_TF in angles:
        require_tensor("angles", table_TF, [num_tokens, turned_dim // 2], [torch.float32], device)
        require_rows("angles", table_TF)
    require(angles[0].stride() == angles[1].stride(), "angles", "have rows that lie apart by different strides")
    require_tensor("slots_T", slots_T, [num_tokens], _INTEGERS, device)
    require_rows("slots_T", slots_T)
    require_tensor("rows_NSX", rows_NSX, [None, None, latent_dim + turned_dim], [dtype], device)
    require_rows("rows_NSX", rows_NSX)
