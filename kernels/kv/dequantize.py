"""Dequantizes a batch's float8 KV to the queries' dtype, into blocks of its own, for attention of long chunks.

Long chunks read K and V once for each tile of rows, and dequantizing a tile costs a good part of what its matmuls do.
Dequantized once, KV is read at the speed of 16-bit KV, by the fastest kernel for that; one pass over memory costs
little compared with it. Where it would take more than `MAX_BYTES`, KV is not dequantized beforehand, and the attention
kernel does it while reading.

Legend: as in `attention_prefill`.
"""

from collections.abc import Callable, Sequence

import torch

from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.kv import dequantize_triton as kv_dequantize_triton

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0

Scales = tuple[torch.Tensor, torch.Tensor]  # for keys and for values, float32 [1] or [H] each
Attend = Callable[..., torch.Tensor]


def in_float8(x_THD: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize values for storage: times 1 / scale, saturating, infinities too; NaN stays NaN."""
    return (x_THD.float() * (1 / scale)[:, None]).clamp(-LARGEST, LARGEST).to(DTYPE)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View float8 memory as bytes, because torch cannot index float8; other dtypes are returned as they are."""
    return x.view(torch.uint8) if x.dtype == DTYPE else x


def dequantized(kv_NHSD: torch.Tensor, scale: torch.Tensor, blocks_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy some blocks, one after the other, into another dtype."""
    picked_NHSD = as_bytes(kv_NHSD)[blocks_N.long()].view(DTYPE)
    return (picked_NHSD.float() * scale[:, None, None]).to(dtype)


def attend_decode(
    attend: Attend,
    query_BQAD: torch.Tensor,
    kv_NHSD: tuple[torch.Tensor, torch.Tensor],
    scales: Scales,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """Run a reference of `kernels.attention.paged.attention_decode` over float8 KV; never waits for the device."""
    num_blocks = -(-max_context_len // kv_NHSD[0].shape[2])
    blocks_BW = block_tables_BM[:, :num_blocks]
    own_BW = torch.arange(blocks_BW.numel(), device=blocks_BW.device).view(blocks_BW.shape)
    key_NHSD, value_NHSD = (
        dequantized(part_NHSD, scale, blocks_BW.flatten(), query_BQAD.dtype)
        for part_NHSD, scale in zip(kv_NHSD, scales, strict=True)
    )
    return attend(query_BQAD, key_NHSD, value_NHSD, own_BW, positions_BQ, max_context_len)


def attend_prefill(
    attend: Attend,
    query_TAD: torch.Tensor,
    kv_NHSD: tuple[torch.Tensor, torch.Tensor],
    scales: Scales,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
) -> torch.Tensor:
    """Run a reference of `kernels.attention.paged.attention_prefill` over float8 KV, one sequence at a time."""
    block_size = kv_NHSD[0].shape[2]
    outputs = []
    for sequence, query_bAD in enumerate(query_TAD.split(list(query_lens))):
        context_len = context_lens[sequence]
        blocks_W = block_tables_BM[sequence, : -(-context_len // block_size)]
        own_1W = torch.arange(len(blocks_W), device=blocks_W.device)[None]
        key_NHSD, value_NHSD = (
            dequantized(part_NHSD, scale, blocks_W, query_TAD.dtype)
            for part_NHSD, scale in zip(kv_NHSD, scales, strict=True)
        )
        outputs.append(attend(query_bAD, key_NHSD, value_NHSD, own_1W, [len(query_bAD)], [context_len]))
    return torch.cat(outputs)


MAX_BYTES = 1 << 30  # limit of the dequantized KV of one layer
MIN_QUERY_LEN = 256  # it pays if the longest chunk has at least this many rows


def most_bytes(kv_dtype: torch.dtype, device_index: int | None, head_dim: int, block_size: int) -> int:
    """Maximum bytes of a call; 0 where KV is never dequantized beforehand: off Hopper, and for KV that is not float8.

    Batch-invariant numerics do not dequantize beforehand, either.

    Args:
        kv_dtype: dtype of K and V.
        device_index: index of the GPU; None: no GPU.
        head_dim: D.
        block_size: S.
    """
    fits = attention_prefill_hopper_triton.fits_size(device_index, head_dim, block_size)
    return MAX_BYTES if kv_dtype == torch.float8_e4m3fn and fits else 0


def num_bytes(block_tables_BM: torch.Tensor, key_NHSD: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of the dequantized K and V: every block that the tables have room for."""
    return 2 * _num_blocks(block_tables_BM) * key_NHSD[0].numel() * dtype.itemsize


def dequantize_kv(
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return K and V in `dtype`, times their scales, and block tables [B, M] (int32) for their blocks.

    Blocks past a sequence's last position, and those of sequences without rows, contain anything. Never waits for the
    device. [S, D] of a block must be contiguous.
    """
    _, num_kv_heads, block_size, head_dim = key_NHSD.shape
    shape = (_num_blocks(block_tables_BM), num_kv_heads, 2, block_size, head_dim)
    wide_NHPSD = torch.empty(shape, dtype=dtype, device=key_NHSD.device)
    tables_BM = torch.empty(block_tables_BM.shape, dtype=torch.int32, device=key_NHSD.device)
    kv_dequantize_triton.launch(
        key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B, key_scale, value_scale, wide_NHPSD,
        tables_BM,
    )  # fmt: skip
    return wide_NHPSD[:, :, 0], wide_NHPSD[:, :, 1], tables_BM


def _num_blocks(block_tables_BM: torch.Tensor) -> int:
    """Number of blocks, rounded up to a power of two, so that torch's allocator does not keep many smaller sizes.

    As a context grows, former sizes together take no more than the last one.
    """
    return 1 << max(0, block_tables_BM.numel() - 1).bit_length()
