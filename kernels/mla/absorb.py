"""Multiplies heads' up-projections into decode rows: into queries before attention over latents, into outputs after.

For few rows of DeepSeek's sizes Triton does more in the same launch on Hopper: it joins the absorbed query with the
columns that RoPE has rotated, and quantizes values to float8 for the GEMM that reads them. Torch does the rest: other
sizes, more rows, other GPUs, and what is not aligned. Sums are in float32, and rounded once.

Source: DeepSeek-V2 (2024), section 2.1.
Legend: T rows, A query heads (of this rank), N columns of a query without RoPE, P with it, E = N + P, C length of a
latent, X = C + P, V columns of a value, Q = A V, G groups of 128 of them, R rows including padding.
"""

from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN, quantize_fp8
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.mla import absorb_triton
from baton.kernels.mla.latent_rows import absorbed_queries, absorbed_values

MAX_ROWS = 256  # of Triton's kernels, which read weights once for all rows; of more, sums take longer than weights
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TRITON_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # bytes
_FORMS: Memo[bool] = Memo()  # checked calls, and whether Triton computes them


@dataclass(frozen=True, slots=True)
class AbsorbedValues:
    """Result of `absorb_values`.

    Attributes:
        rows: [T, Q] in the dtype of the input, or [R, Q] float8.
        scale_GR: float32 scales of the float8 rows.
    """

    rows: torch.Tensor
    scale_GR: torch.Tensor | None


def absorb_queries(
    query_TAE: torch.Tensor, key_ANC: torch.Tensor, *, implementation: Implementation = Implementation.AUTO
) -> torch.Tensor:
    """Multiply the key up-projection into the queries' first N columns, and leave the others, [T, A, X].

    Args:
        query_TAE: [nope | RoPE] columns, bfloat16 or float16 (the reference also takes float32 and float64); rows and
            heads may be strided.
        key_ANC: same dtype; C contiguous.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = "queries", signature(query_TAE), signature(key_ANC), implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check("query_TAE", query_TAE, "key_ANC", key_ANC)
        nope_dim, latent_dim = key_ANC.shape[1:]
        turned_dim = query_TAE.shape[2] - nope_dim
        require(turned_dim > 0, "query_TAE", f"has {query_TAE.shape[2]} columns, {nope_dim} of them without RoPE")
        sizes = absorb_triton.NOPE_DIM, absorb_triton.TURNED_DIM, absorb_triton.LATENT_DIM
        fits = (nope_dim, turned_dim, latent_dim) == sizes
        in_triton = _FORMS.keep(key, fits and _is_served(query_TAE, key_ANC, implementation))
    if in_triton:
        return absorb_triton.launch_queries(query_TAE, key_ANC)
    nope_TAN, turned_TAP = query_TAE.tensor_split([key_ANC.shape[1]], dim=2)
    return absorbed_queries(nope_TAN, turned_TAP, key_ANC, invariant=False)


def absorb_values(
    mixed_TAC: torch.Tensor,
    value_AVC: torch.Tensor,
    *,
    num_padded: int | None = None,
    ue8m0: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> AbsorbedValues:
    """Multiply the value up-projection into attention's outputs over latents, and optionally quantize what it makes.

    Args:
        mixed_TAC: bfloat16 or float16 (the reference also takes float32 and float64); rows and heads may be strided.
        value_AVC: same dtype; C contiguous.
        num_padded: return so many float8 rows, at least T, with a scale for each 128 columns (`quantize_fp8`), made of
            rounded values; those beyond T are zeros with scale 1; none if there is no row. None: rows are not
            quantized.
        ue8m0: whether scales are rounded up to powers of two.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    key = "values", signature(mixed_TAC), signature(value_AVC), num_padded, implementation
    in_triton = _FORMS.find(key)
    if in_triton is None:
        _check("mixed_TAC", mixed_TAC, "value_AVC", value_AVC)
        num_rows, num_heads, latent_dim = mixed_TAC.shape
        value_dim = value_AVC.shape[1]
        require(latent_dim == value_AVC.shape[2], "mixed_TAC", f"has {latent_dim} columns, not {value_AVC.shape[2]}")
        if num_padded is not None:
            is_whole = num_heads * value_dim % GROUP_LEN == 0
            require(is_whole, "num_padded", f"rows of {num_heads * value_dim} are no multiple of {GROUP_LEN}")
            require(num_padded >= num_rows, "num_padded", f"is below the {num_rows} rows there are")
        fits = (latent_dim, value_dim) == (absorb_triton.LATENT_DIM, absorb_triton.VALUE_DIM)
        in_triton = _FORMS.keep(key, fits and _is_served(mixed_TAC, value_AVC, implementation))
    if in_triton:
        return AbsorbedValues(*absorb_triton.launch_values(mixed_TAC, value_AVC, num_padded, ue8m0=ue8m0))
    rows_TQ = absorbed_values(mixed_TAC, value_AVC, invariant=False).flatten(1)
    if num_padded is None:
        return AbsorbedValues(rows_TQ, None)
    pad_to = max(1, num_padded)
    return AbsorbedValues(*quantize_fp8(rows_TQ, ue8m0=ue8m0, pad_to=pad_to, implementation=implementation))


def _check(rows_name: str, rows_TAK: torch.Tensor, weight_name: str, weight_AJK: torch.Tensor) -> None:
    require_tensor(rows_name, rows_TAK, (None, None, None), _DTYPES)
    require_tensor(weight_name, weight_AJK, (rows_TAK.shape[1], None, None), (rows_TAK.dtype,), rows_TAK.device)
    require_rows(rows_name, rows_TAK)
    require_rows(weight_name, weight_AJK)


def _is_served(rows_TAK: torch.Tensor, weight_AJK: torch.Tensor, implementation: Implementation) -> bool:
    """Whether Triton's kernels are for so many rows, their dtype and where they lie."""
    return (
        uses_triton(rows_TAK.device, implementation)
        and absorb_triton.fits(rows_TAK.device.index)
        and 0 < len(rows_TAK) <= MAX_ROWS
        and rows_TAK.shape[1] > 0
        and rows_TAK.dtype in _TRITON_DTYPES
        and all(_is_aligned(tensor) for tensor in (rows_TAK, weight_AJK))
    )


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether each row of each head lies at a multiple of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % _ALIGNED == 0 and all(
        stride * size % _ALIGNED == 0 for length, stride in zip(x.shape[:2], x.stride()[:2], strict=True) if length > 1
    )
