"""Causal attention of prefill chunks over latent rows, expanded: keys and values of each head are computed first.

A chunk of many rows costs a third of what it costs in the absorbed form (`kernels.mla.decode`). The price is that each
layer computes keys and values of the chunk's whole context, including its cached prefix. Many or long sequences are
processed in *windows* of positions whose expanded keys and values fit a bound; partial sums carry over from one window
to the next, so the result is that of a single window.

Attention over a window has a form of its own on Hopper (`kernels.mla.prefill_hopper_triton`), where DeepSeek's heads
are served; elsewhere it is `kernels.mla.prefill_triton`. This module does not know pools, and takes lengths from the
host only.

Source: DeepSeek-V2 (2024), section 2.1; Dao 2023 (FlashAttention-2).
Legend: T tokens, B sequences, A query heads (of this rank), N columns of a query without RoPE, P columns with RoPE, E =
N + P, V columns of a value, Y = N + V, C length of a latent, X = C + P elements of a row, L positions of a window, K
blocks of the pool, S positions per block, M entries of a block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.attention import paged as attention
from baton.kernels.attention.block_tables import require_lens
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.copies import to_device
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.mla import prefill_hopper_triton, prefill_triton
from baton.kernels.mla.decode import BLOCK_SIZES
from baton.kernels.mla.latent_rows import absorbed_queries, absorbed_values
from baton.kernels.mla.sizes import unfit_heads, unfit_latents

MAX_EXPANDED_BYTES = 1 << 28  # limit of the keys and values of one window
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TRITON_DTYPES = (torch.bfloat16, torch.float16)
_INDEX_DTYPES = (torch.int64, torch.int32)


def most_bytes(num_tokens: int, num_heads: int, sizes: tuple[int, int, int, int]) -> int:
    """Maximum bytes that a call over `num_tokens` rows allocates, besides its arguments and output.

    Args:
        num_tokens: T.
        num_heads: A, of this rank.
        sizes: C, P, N and V.
    """
    latent_dim, turned_dim, nope_dim, value_dim = sizes
    expanded_len = num_heads * (nope_dim + value_dim)
    rows_bytes = MAX_EXPANDED_BYTES * (latent_dim + turned_dim) // expanded_len
    return MAX_EXPANDED_BYTES + rows_bytes + 4 * num_tokens * num_heads * (value_dim + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWindow:
    """Positions that are expanded together.

    Attributes:
        numbers_6B: int32, on the device; see `prefill_triton`.
        num_positions: positions of all sequences in the window.
        most_positions: positions of the sequence that has the most.
    """

    numbers_6B: torch.Tensor
    num_positions: int
    most_positions: int


def mla_prefill(
    query_TAE: torch.Tensor,
    rows_KSX: torch.Tensor,
    expand_AYC: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    nope_dim: int,
    softmax_scale: float,
    plans: SplitKVPlans | None = None,
    max_expanded_bytes: int = MAX_EXPANDED_BYTES,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute attention of concatenated chunks -> head values [T, A, V]; on a GPU the host never waits.

    Row i of a chunk is at position context_len - query_len + i and sees the latent rows up to its own, all of which are
    already in the blocks. Slots past a sequence's last position may contain anything, including NaN.

    Args:
        query_TAE: [nope | RoPE] columns, bfloat16 or float16 (the reference also takes float32 and float64), E
            contiguous.
        rows_KSX: same dtype; [S, X] contiguous.
        expand_AYC: up-projection from a latent to a head's N key columns and V value columns; contiguous.
        block_tables_BM: int64 or int32.
        query_lens: rows of each sequence, on the host.
        context_lens: positions that a sequence's last row sees.
        nope_dim: N.
        softmax_scale: factor of scores, positive.
        plans: plans of the pass, shared by its layers, which have the same lengths and tables; None if there is only
            this layer.
        max_expanded_bytes: limit of a window's keys and values.
        implementation: implementation to use. The reference needs no windows: it multiplies the up-projection into the
            queries.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    _check(query_TAE, rows_KSX, expand_AYC, block_tables_BM, nope_dim, softmax_scale)
    require_lens(query_TAE, rows_KSX[:, None], block_tables_BM, query_lens, context_lens)
    uses = uses_triton(query_TAE.device, implementation)
    if uses:
        _check_triton(query_TAE, rows_KSX, expand_AYC, nope_dim)
    value_dim = expand_AYC.shape[1] - nope_dim
    if query_TAE.numel() == 0:
        return query_TAE.new_empty(*query_TAE.shape[:2], value_dim)
    if not uses:
        key_ANC, value_AVC = expand_AYC.split([nope_dim, value_dim], dim=1)
        return mla_prefill_reference(
            query_TAE, rows_KSX, key_ANC, value_AVC, block_tables_BM, query_lens, context_lens, softmax_scale
        )
    return _by_windows(
        query_TAE, rows_KSX, expand_AYC, block_tables_BM, tuple(query_lens), tuple(context_lens), softmax_scale,
        plans or SplitKVPlans(), max_expanded_bytes,
    )  # fmt: skip


def mla_prefill_reference(
    query_TAE: torch.Tensor,
    rows_KSX: torch.Tensor,
    key_ANC: torch.Tensor,
    value_AVC: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    softmax_scale: float,
) -> torch.Tensor:
    """Compute it in torch in the absorbed form, with the same arithmetic as for decode rows."""
    nope_TAN, turned_TAP = query_TAE.split([key_ANC.shape[1], query_TAE.shape[2] - key_ANC.shape[1]], dim=2)
    query_TAX = absorbed_queries(nope_TAN, turned_TAP, key_ANC, invariant=False)
    rows_K1SX = rows_KSX[:, None]
    mixed_TAX = attention.attention_prefill(
        query_TAX, rows_K1SX, rows_K1SX, block_tables_BM, query_lens, context_lens, scale=softmax_scale
    )
    return absorbed_values(mixed_TAX, value_AVC, invariant=False)


def _by_windows(
    query_TAE: torch.Tensor,
    rows_KSX: torch.Tensor,
    expand_AYC: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    scale: float,
    plans: SplitKVPlans,
    max_expanded_bytes: int,
) -> torch.Tensor:
    num_heads, num_columns, latent_dim = expand_AYC.shape
    turned_dim = rows_KSX.shape[2] - latent_dim
    value_dim = num_columns - (query_TAE.shape[2] - turned_dim)
    most = max(1, max_expanded_bytes // (num_heads * num_columns * expand_AYC.element_size()))
    device = query_TAE.device
    windows = plans.keep(
        ("mla_prefill", query_lens, context_lens, most), lambda: make_windows(query_lens, context_lens, most, device)
    )
    sizes = query_TAE.shape[2] - turned_dim, turned_dim, value_dim
    on_hopper = prefill_hopper_triton.fits(query_TAE, rows_KSX, sizes)
    attend = prefill_hopper_triton.launch if on_hopper else prefill_triton.attend
    out_TAV = query_TAE.new_empty(*query_TAE.shape[:2], value_dim)
    num_carried = out_TAV.numel() if len(windows) > 1 else 1
    sums = torch.empty(num_carried, dtype=torch.float32, device=device)
    carried = sums, torch.empty(-(-num_carried // value_dim), dtype=torch.float32, device=device)
    for window in windows:
        rows_LX = prefill_triton.gather(
            rows_KSX, block_tables_BM, window.numbers_6B,
            num_positions=window.num_positions, most_positions=window.most_positions, latent_dim=latent_dim,
        )  # fmt: skip
        expanded_LW = torch.mm(rows_LX[:, :latent_dim], expand_AYC.flatten(0, 1).t())
        attend(
            query_TAE, expanded_LW, rows_LX, window.numbers_6B, out_TAV, carried,
            max_query_len=max(query_lens), most_positions=window.most_positions, turned_dim=turned_dim, scale=scale,
        )  # fmt: skip
    return out_TAV


def make_windows(
    query_lens: Sequence[int], context_lens: Sequence[int], most_positions: int, device: torch.device
) -> tuple[LatentWindow, ...]:
    """Concatenate all contexts and cut them into windows of `most_positions`; sequences without rows count as empty."""
    lens = [context if rows else 0 for rows, context in zip(query_lens, context_lens, strict=True)]
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    row_starts = [0]
    for rows in query_lens:
        row_starts.append(row_starts[-1] + rows)
    made: list[tuple[list[list[int]], int, int]] = []
    for first in range(0, starts[-1], most_positions):
        end = min(first + most_positions, starts[-1])
        numbers: list[list[int]] = []
        for start, length, row_start, rows in zip(starts[:-1], lens, row_starts[:-1], query_lens, strict=True):
            begin, stop = max(first, start), min(end, start + length)
            numbers.append([row_start, rows, begin - first, begin - start, max(0, stop - begin), length])
        made.append((numbers, end - first, max(row[4] for row in numbers)))
    together = to_device(torch.tensor([numbers for numbers, _, _ in made], dtype=torch.int32), device)
    return tuple(
        LatentWindow(numbers_6B=numbers_B6.t().contiguous(), num_positions=count, most_positions=most)
        for numbers_B6, (_, count, most) in zip(together.unbind(0), made, strict=True)
    )


def _check(
    query_TAE: torch.Tensor,
    rows_KSX: torch.Tensor,
    expand_AYC: torch.Tensor,
    block_tables_BM: torch.Tensor,
    nope_dim: int,
    softmax_scale: float,
) -> None:
    device = query_TAE.device
    require_tensor("query_TAE", query_TAE, (None, None, None), _DTYPES)
    _, num_heads, query_dim = query_TAE.shape
    require_tensor("expand_AYC", expand_AYC, (num_heads, None, None), (query_TAE.dtype,), device)
    _, num_columns, latent_dim = expand_AYC.shape
    require(0 < nope_dim < min(query_dim, num_columns), "nope_dim", f"is {nope_dim}, of {query_dim} and {num_columns}")
    row_len = latent_dim + query_dim - nope_dim
    require_tensor("rows_KSX", rows_KSX, (None, None, row_len), (query_TAE.dtype,), device)
    require_tensor("block_tables_BM", block_tables_BM, (None, None), _INDEX_DTYPES, device)
    require_rows("query_TAE", query_TAE)
    require_rows("block_tables_BM", block_tables_BM)
    require(expand_AYC.is_contiguous(), "expand_AYC", "must be contiguous")
    require(rows_KSX.stride()[1:] == (row_len, 1), "rows_KSX", "the last two dimensions must be contiguous")
    require(softmax_scale > 0, "softmax_scale", f"is {softmax_scale}, not positive")


def _check_triton(query_TAE: torch.Tensor, rows_KSX: torch.Tensor, expand_AYC: torch.Tensor, nope_dim: int) -> None:
    """Check what only the kernel requires: dtypes, sizes that are powers of two, and 16-byte aligned rows."""
    require(query_TAE.dtype in _TRITON_DTYPES, "query_TAE", f"Triton's kernel does not take {query_TAE.dtype}")
    _, num_columns, latent_dim = expand_AYC.shape
    unfit = unfit_latents(latent_dim, query_TAE.shape[2] - nope_dim)
    require(not unfit, "rows_KSX", f"Triton's kernel does not take {unfit}")
    unfit = unfit_heads(nope_dim, num_columns - nope_dim)
    require(not unfit, "expand_AYC", f"Triton's kernel does not take {unfit}")
    block_size = rows_KSX.shape[1]
    require(block_size in BLOCK_SIZES, "rows_KSX", f"S is {block_size}, not one of {BLOCK_SIZES}")
    for name, tensor in (("query_TAE", query_TAE), ("rows_KSX", rows_KSX)):
        aligned = tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])
        require(aligned, name, "must lie at a multiple of 16 bytes, with strides that are multiples of 16")
