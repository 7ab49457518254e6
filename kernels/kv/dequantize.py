"""KV of a batch that lies in float8, widened to the queries' dtype in blocks of its own: for attention of long chunks.

Chunks of many rows read K and V once for each tile of rows, and widening a tile costs a good part of what its products
do. Widened once, it is read at the speed of 16-bit KV, by the form that is fastest there; a pass over memory is little
beside that. It refuses what would take more memory than `MAX_BYTES`: there the attention kernel widens as it reads.

Legend: as in `attention_prefill`.
"""

import torch

from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.kv import dequantize_triton as kv_dequantize_triton

MAX_BYTES = 1 << 30  # of what is made for one layer
MIN_QUERY_LEN = 256  # the longest chunk's rows from which on it pays


def most_bytes(kv_dtype: torch.dtype, device_index: int | None, head_dim: int, block_size: int) -> int:
    """Of one call; 0 where nothing is ever widened: but on Hopper, and of other KV. Invariant numerics do not, either.

    Args:
        kv_dtype: of K and V.
        device_index: of the GPU; None: none.
        head_dim: D.
        block_size: S.
    """
    fits = attention_prefill_hopper_triton.fits_size(device_index, head_dim, block_size)
    return MAX_BYTES if kv_dtype == torch.float8_e4m3fn and fits else 0


def num_bytes(block_tables_BM: torch.Tensor, key_NHSD: torch.Tensor, dtype: torch.dtype) -> int:
    """Of the widened K and V: every block that the tables have room for."""
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
    """K and V in `dtype`, times their scales, and the block tables [B, M] (int32) that name their blocks.

    Blocks past a sequence's last position, and those of sequences without rows, hold anything. Never waits for the
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
    """A power of two, so that what torch keeps of former sizes, as a context grows, is no more than the last one."""
    return 1 << max(0, block_tables_BM.numel() - 1).bit_length()
