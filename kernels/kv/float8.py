"""KV in float8 (e4m3): how values are rounded into a pool, and how torch attends over it: widened, block by block.

What is stored is x / scale, rounded to even and saturating; what is read is that times the scale, in float32, rounded
to the dtype of the queries. Both are functions of one element, so they keep whatever numerics have what is computed
with them. Triton's kernels read float8 as it is and refuse to be called from here.

Shapes: T tokens, A query heads, H KV heads, D head size, N blocks, S positions of a block, B sequences, Q rows of each,
M entries of a block table, W blocks that a context needs.
"""

from collections.abc import Callable, Sequence

import torch

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
