"""Batch-invariant attention on GPUs: prefill chunks and decode steps give a row the same bits.

Both functions are the operations of those names in `kernels.attention.paged`. One Triton kernel
(`kernels.attention.ordered_triton`) computes them in one order of sums: a row's result depends only on that row and the
keys that it sees, whatever the chunk, the batch, the bound and the number of programs that shared the work. The
reference is `kernels.attention.invariant`, which keeps the same promise in another order, so its bits differ.

Float8 KV is refused. The host never waits for the device.

Source and legend: as in `kernels.attention.paged`; E = B + 1.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.attention import ordered_triton as attention_ordered_triton
from baton.kernels.attention.block_tables import require_columns, require_lens, within
from baton.kernels.attention.invariant import (
    KEYS_PER_STEP,
    attention_decode_invariant,
    attention_prefill_invariant,
)
from baton.kernels.copies import to_device
from baton.kernels.implementation import Implementation, uses_triton

HEAD_DIMS = (16, 32, 64, 128, 256)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_REFERENCE_DTYPES = (*_KERNEL_DTYPES, torch.float32, torch.float64)
_INDICES = (torch.int32, torch.int64)


def attention_ordered_prefill(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute attention of concatenated chunks -> [T, A, D]; on a GPU the host never waits for the device.

    Args:
        query_TAD: rows of all chunks, contiguous in D; rows past the last start belong to no chunk, and their outputs
            are undefined.
        key_NHSD: K of a layer, in the dtype of the queries, contiguous in the last two dimensions.
        value_NHSD: V, with the same shape, strides and dtype.
        block_tables_BM: int32 or int64, contiguous in M.
        query_starts_E: int32 or int64; sequence b has the rows from starts[b] up to starts[b + 1].
        context_lens_B: int32 or int64; keys that a sequence's last row sees, at least its number of rows. Not read if
            it has no rows.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    with_triton = uses_triton(query_TAD.device, implementation)
    require_tensor("query_TAD", query_TAD, (None, None, None), _KERNEL_DTYPES if with_triton else _REFERENCE_DTYPES)
    _check_pool("query_TAD", query_TAD, key_NHSD, value_NHSD, block_tables_BM, with_triton)
    num_sequences = block_tables_BM.shape[0]
    for name, tensor, length in (
        ("query_starts_E", query_starts_E, num_sequences + 1),
        ("context_lens_B", context_lens_B, num_sequences),
    ):
        require_tensor(name, tensor, (length,), _INDICES, query_TAD.device)
        require_rows(name, tensor)
    require_columns(query_TAD.shape[0], block_tables_BM)
    if not with_triton:
        starts = query_starts_E.tolist()
        lens = [end - start for start, end in pairwise(starts)]
        live = [sequence for sequence, length in enumerate(lens) if length > 0]
        output_TAD = torch.zeros_like(query_TAD)
        if live:
            contexts = context_lens_B.tolist()
            tables_BM = within(block_tables_BM.long(), context_lens_B - 1, key_NHSD.shape[2])
            output_TAD[: starts[-1]] = attention_prefill_invariant(
                query_TAD[: starts[-1]],
                key_NHSD,
                value_NHSD,
                tables_BM[live],
                [lens[sequence] for sequence in live],
                [contexts[sequence] for sequence in live],
            )
        return output_TAD
    output_TAD = torch.empty(query_TAD.shape, dtype=query_TAD.dtype, device=query_TAD.device)
    if query_TAD.numel() and num_sequences:
        attention_ordered_triton.launch_prefill(
            query_TAD, key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B, output_TAD,
            query_TAD.shape[2] ** -0.5,
        )  # fmt: skip
    return output_TAD


def attention_ordered_prefill_lens(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute `attention_ordered_prefill` with lengths on the host, sent in one copy that the host does not wait for.

    Raises:
        KernelArgumentInvalid: an argument does not fit, or the lengths do not fit the queries; nothing was launched.
    """
    require_lens(query_TAD, key_NHSD, block_tables_BM, query_lens, context_lens)
    numbers = to_device(torch.tensor([0, *accumulate(query_lens), *context_lens], dtype=torch.int32), query_TAD.device)
    starts_E, contexts_B = numbers[: len(query_lens) + 1], numbers[len(query_lens) + 1 :]
    return attention_ordered_prefill(
        query_TAD, key_NHSD, value_NHSD, block_tables_BM, starts_E, contexts_B, implementation=implementation
    )


def attention_ordered_decode(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    *,
    is_split: bool | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute attention of Q rows of each of B sequences -> [B, Q, A, D]; the host never waits for the device.

    Row (b, q) sees the keys at positions 0 ... positions_BQ[b, q]; a row at a negative position sees none, and its
    output is 0. The launch depends on bounds only, so a CUDA graph may replay it.

    Args:
        query_BQAD: queries, contiguous in D.
        key_NHSD: K of a layer, in the dtype of the queries, contiguous in the last two dimensions.
        value_NHSD: V, with the same shape, strides and dtype.
        block_tables_BM: int32 or int64, contiguous in M; entries past a sequence's furthest position are not used.
        positions_BQ: int32 or int64.
        max_context_len: host-side upper bound of positions_BQ + 1.
        is_split: whether each part of the context gets programs of its own; None: chosen for the GPU. Does not change
            any bit.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; nothing was launched.
    """
    with_triton = uses_triton(query_BQAD.device, implementation)
    dtypes = _KERNEL_DTYPES if with_triton else _REFERENCE_DTYPES
    require_tensor("query_BQAD", query_BQAD, (None, None, None, None), dtypes)
    _check_pool("query_BQAD", query_BQAD, key_NHSD, value_NHSD, block_tables_BM, with_triton)
    require_tensor("positions_BQ", positions_BQ, query_BQAD.shape[:2], _INDICES, query_BQAD.device)
    num_sequences = block_tables_BM.shape[0]
    require(num_sequences == query_BQAD.shape[0], "block_tables_BM", f"has {num_sequences} rows, not one a sequence")
    require(max_context_len > 0, "max_context_len", f"is {max_context_len}, not positive")
    require(block_tables_BM.shape[1] > 0, "block_tables_BM", "has no column")
    bound = min(max_context_len, block_tables_BM.shape[1] * key_NHSD.shape[2])
    if not with_triton and query_BQAD.numel():
        seen_BQ = positions_BQ.long().clamp(0, bound - 1)
        tables_BM = within(block_tables_BM.long(), positions_BQ.amax(dim=1), key_NHSD.shape[2])
        mixed_BQAD = attention_decode_invariant(query_BQAD, key_NHSD, value_NHSD, tables_BM, seen_BQ, bound)
        return mixed_BQAD.masked_fill((positions_BQ < 0)[:, :, None, None], 0.0)
    output_BQAD = torch.empty(query_BQAD.shape, dtype=query_BQAD.dtype, device=query_BQAD.device)
    if query_BQAD.numel():
        attention_ordered_triton.launch_decode(
            query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, bound, output_BQAD,
            query_BQAD.shape[3] ** -0.5, is_split,
        )  # fmt: skip
    return output_BQAD


def _check_pool(
    name: str,
    query: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    with_triton: bool,
) -> None:
    """Check what both functions have in common; `name` is the argument name of the queries, [..., A, D]."""
    require_rows(name, query)
    num_heads, head_dim = query.shape[-2:]
    require_tensor("key_NHSD", key_NHSD, (None, None, None, head_dim), (query.dtype,), query.device)
    require_tensor("value_NHSD", value_NHSD, key_NHSD.shape, (key_NHSD.dtype,), query.device)
    require(value_NHSD.stride() == key_NHSD.stride(), "value_NHSD", "must have the strides of key_NHSD")
    num_kv_heads = key_NHSD.shape[1]
    fits = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    require(fits, name, f"{num_heads} heads cannot share {num_kv_heads} KV heads")
    require_tensor("block_tables_BM", block_tables_BM, (None, None), _INDICES, query.device)
    require_rows("block_tables_BM", block_tables_BM)
    block_size = key_NHSD.shape[2]
    require(block_size > 0, "key_NHSD", "has blocks of no position")
    steps = with_triton or KEYS_PER_STEP % block_size == 0
    require(steps, "key_NHSD", f"has blocks of {block_size}, no divisor of the reference's {KEYS_PER_STEP}")
    if with_triton:
        require(head_dim in HEAD_DIMS, name, f"has head size {head_dim}, none of {HEAD_DIMS}")
        is_dense = key_NHSD.stride()[2:] == (head_dim, 1)
        require(is_dense, "key_NHSD", "the last two dimensions must be contiguous")
