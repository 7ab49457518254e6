"""KV of a batch that lies in float8, widened to the queries' dtype in blocks of its own: for attention of long chunks.

Chunks of many rows read K and V once for each tile of rows, and widening a tile costs a good part of what its GEMMs
do. Widened once, it is read at the speed of 16-bit KV, by the form that is fastest there; a pass over memory is little
beside that. It refuses what would take more memory than `MAX_BYTES`: there the attention kernel widens as it reads.

Legend: as in `attention_prefill`.
"""

from collections.abc import Callable, Sequence

import torch

from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.kv import dequantize_triton as kv_dequantize_triton

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0

Scales = tuple[torch.Tensor, torch.Tensor]  # of keys and of values, float32 [1] or [H] each
Attend = Callable[..., torch.Tensor]


def in_float8(x_THD: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values as they are stored: times 1 / scale, saturating, infinities too; what is no number stays none."""
    return (x_THD.float() * (1 / scale)[:, None]).clamp(-LARGEST, LARGEST).to(DTYPE)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes if it is float8: torch indexes no float8."""
    return x.view(torch.uint8) if x.dtype == DTYPE else x


def dequantized(kv_NHSD: torch.Tensor, scale: torch.Tensor, blocks_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of some blocks in another dtype, one after the other."""
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
    """A reference of `kernels.attention.paged.attention_decode` over float8; never waits for the device."""
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
    """A reference of `kernels.attention.paged.attention_prefill` over float8, one sequence at a time."""
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
