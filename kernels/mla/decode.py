"""Absorbed attention of a few rows of each sequence over latent rows, as in decode steps; on a GPU by split KV.

`mla_decode` takes queries that the key up-projection was multiplied into (`kernels.mla.latent_rows`), and returns
attention outputs over latents, which the caller still multiplies by the value up-projection. All heads read one row per
position, which is both key and value. Rows are a strided view of one layer; the module does not know pools.

Source: DeepSeek-V2 (2024), section 2.1; Dao et al. 2023 (Flash-Decoding); Kwon et al. 2023 (blocks).
Legend: B sequences, Q rows of each, A query heads (of this rank), C length of a latent, X elements of a row = C + the
columns with RoPE, N blocks, S positions per block, M entries of a block table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.kernels import tuning
from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.attention import paged as attention
from baton.kernels.attention.block_tables import within
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, signature
from baton.kernels.mla import decode_hopper_triton, decode_plan, decode_triton
from baton.kernels.mla.decode_plan import MLALaunch
from baton.kernels.mla.sizes import unfit_latents

NAME = "mla_decode"  # in the tuned table
MAX_QUERIES = 32  # rows of a sequence
BLOCK_SIZES = (16, 32, 64)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TRITON_DTYPES = (torch.bfloat16, torch.float16)
_INDEX_DTYPES = (torch.int64, torch.int32)


def mla_decode(
    query_BQAX: torch.Tensor,
    rows_NSX: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    *,
    latent_dim: int,
    softmax_scale: float,
    options: Mapping[str, Any] | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute attention of Q rows of each of B sequences -> [B, Q, A, C] in the query's dtype, without host waits.

    Row (b, q) sees the latents at positions 0 ... positions_BQ[b, q]; a row at a negative position sees none, and its
    output is 0. Slots beyond a sequence's furthest row may contain anything, including NaN; slots before it must be
    finite even for rows that do not see them. The launch depends on bounds only, so a CUDA graph may replay it. The
    bits of a row depend on the batch.

    Args:
        query_BQAX: absorbed queries, bfloat16 or float16 (the reference also takes float32 and float64), X contiguous.
        rows_NSX: same dtype; [S, X] contiguous.
        block_tables_BM: int64 or int32; entries past a sequence's furthest position are not used.
        positions_BQ: int64 or int32.
        max_context_len: host-side upper bound of positions_BQ + 1.
        latent_dim: C.
        softmax_scale: factor of scores, positive; includes YaRN's factor, which cannot be derived from sizes.
        options: launch options in the committed table's format; for tuning.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    key = (
        signature(query_BQAX), signature(rows_NSX), signature(block_tables_BM), signature(positions_BQ),
        max_context_len, latent_dim, softmax_scale, None if options is None else tuple(options.items()), implementation,
    )  # fmt: skip
    how = _FORMS.find(key)
    if how is None:
        _check(query_BQAX, rows_NSX, block_tables_BM, positions_BQ, max_context_len, latent_dim)
        require(softmax_scale > 0, "softmax_scale", f"is {softmax_scale}, not positive")
        bound = min(max_context_len, block_tables_BM.shape[1] * rows_NSX.shape[1])
        if uses_triton(query_BQAX.device, implementation):
            _check_triton(query_BQAX, rows_NSX, positions_BQ, latent_dim)
            how = _launch(query_BQAX, rows_NSX, bound, latent_dim, softmax_scale, options)
        else:
            how = _Reference(bound)
        _FORMS.keep(key, how)
    if query_BQAX.numel() == 0:
        return query_BQAX.new_empty(*query_BQAX.shape[:3], latent_dim)
    if isinstance(how, MLALaunch):
        launch = decode_hopper_triton.launch if how.options.hopper else decode_triton.launch
        out_BQAC: torch.Tensor = launch(query_BQAX, rows_NSX, block_tables_BM, positions_BQ, how)
        return out_BQAC
    return mla_decode_reference(
        query_BQAX, rows_NSX, block_tables_BM, positions_BQ, how.max_context_len, latent_dim, softmax_scale
    )


@dataclass(frozen=True, slots=True)
class _Reference:
    """A call that torch computes."""

    max_context_len: int


_FORMS: Memo[_Reference | MLALaunch] = Memo()  # how checked calls are computed


def mla_decode_reference(
    query_BQAX: torch.Tensor,
    rows_NSX: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    latent_dim: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Compute it in torch: grouped-query attention with one KV head, whose values are its keys' first columns."""
    rows_N1SX = rows_NSX[:, None]
    tables_BM = within(block_tables_BM.long(), positions_BQ.amax(dim=1), rows_NSX.shape[1])
    seen_BQ = positions_BQ.long().clamp(0, max_context_len - 1)
    mixed_BQAX = attention.attention_decode(
        query_BQAX, rows_N1SX, rows_N1SX, tables_BM, seen_BQ, max_context_len, scale=softmax_scale
    )
    return mixed_BQAX[..., :latent_dim].masked_fill((positions_BQ < 0)[:, :, None, None], 0.0)


def _check(
    query_BQAX: torch.Tensor,
    rows_NSX: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    latent_dim: int,
) -> None:
    device = query_BQAX.device
    require_tensor("query_BQAX", query_BQAX, (None, None, None, None), _DTYPES)
    num_sequences, num_queries, _, row_len = query_BQAX.shape
    require_tensor("rows_NSX", rows_NSX, (None, None, row_len), (query_BQAX.dtype,), device)
    require_tensor("block_tables_BM", block_tables_BM, (num_sequences, None), _INDEX_DTYPES, device)
    require_tensor("positions_BQ", positions_BQ, (num_sequences, num_queries), _INDEX_DTYPES, device)
    require(0 < latent_dim <= row_len, "latent_dim", f"is {latent_dim}, of rows of {row_len}")
    require(rows_NSX.shape[1] > 0, "rows_NSX", "has blocks of no position")
    require_rows("query_BQAX", query_BQAX)
    require_rows("block_tables_BM", block_tables_BM)
    require(rows_NSX.stride()[1:] == (row_len, 1), "rows_NSX", "the last two dimensions must be contiguous")
    require(max_context_len > 0, "max_context_len", f"is {max_context_len}, not positive")
    require(block_tables_BM.shape[1] > 0, "block_tables_BM", "has no column")


def _check_triton(
    query_BQAX: torch.Tensor, rows_NSX: torch.Tensor, positions_BQ: torch.Tensor, latent_dim: int
) -> None:
    """Check what only the kernel requires: dtypes, sizes that are powers of two, and 16-byte aligned rows."""
    require(query_BQAX.dtype in _TRITON_DTYPES, "query_BQAX", f"Triton's kernel does not take {query_BQAX.dtype}")
    unfit = unfit_latents(latent_dim, query_BQAX.shape[3] - latent_dim)
    require(not unfit, "latent_dim", f"Triton's kernel does not take {unfit}")
    block_size = rows_NSX.shape[1]
    require(block_size in BLOCK_SIZES, "rows_NSX", f"S is {block_size}, not one of {BLOCK_SIZES}")
    for name, tensor in (("query_BQAX", query_BQAX), ("rows_NSX", rows_NSX)):
        unit = decode_triton.STRIDE_UNIT
        aligned = tensor.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in tensor.stride()[:-1])
        require(aligned, name, f"must lie at a multiple of 16 bytes, with strides that are multiples of {unit}")
    require(rows_NSX.stride(0) < 1 << 32, "rows_NSX", "the stride of blocks must be under 2 ** 32")
    most = MAX_QUERIES
    require(positions_BQ.shape[1] <= most, "positions_BQ", f"Triton's kernel takes at most {most} rows of a sequence")


def _launch(
    query_BQAX: torch.Tensor,
    rows_NSX: torch.Tensor,
    bound: int,
    latent_dim: int,
    scale: float,
    given: Mapping[str, Any] | None,
) -> MLALaunch:
    """Choose the launch: options from the caller, else from the committed table, else by rule."""
    num_sequences, num_queries, num_heads, row_len = query_BQAX.shape
    num_rows = max(1, num_queries * num_heads)
    if given is None:
        shape = decode_plan.table_shape(num_rows, latent_dim)
        given = tuning.find(NAME, shape, num_sequences * bound, query_BQAX.device.index)
    on_hopper = decode_hopper_triton.fits(query_BQAX, rows_NSX, latent_dim)
    if given is None:
        chosen = decode_plan.default_options(num_rows, on_hopper=on_hopper)
    else:
        chosen = decode_plan.options_of_row(given)
    require(
        on_hopper or not chosen.hopper, "options", "are of the form for Hopper, which cannot take these tensors here"
    )
    row_bytes = row_len * rows_NSX.element_size()
    count = decode_plan.num_parts(max(1, num_sequences), num_rows, bound, row_bytes, latent_dim, chosen)
    return MLALaunch(scale=scale, latent_dim=latent_dim, max_context_len=bound, num_parts=count, options=chosen)
