"""Causal attention over paged KV, for prefill chunks and for decode rows, in torch's own arithmetic.

Row i of a sequence sees the keys at positions 0 ... position(i), all of which are already in the blocks. Slots past a
sequence's last position may contain anything, including NaN. `kernels.attention.invariant` has the same two functions
with results that do not depend on batching.

Source: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; blocks: Kwon et al. 2023 (PagedAttention).
Legend: T tokens, B sequences, Q rows of each, A query heads, H KV heads, G = A / H, D head size, N blocks, S positions
per block, M entries of a block table, C keys, W blocks a context needs.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional


def gather_blocks(
    key_NHSD: torch.Tensor, value_NHSD: torch.Tensor, blocks_BW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each sequence's blocks side by side, K and V, each [B, H, W * S, D].

    Copies the whole pool if heads are not contiguous.
    """
    num_heads = key_NHSD.shape[1]
    head_H1 = torch.arange(num_heads, device=key_NHSD.device)[:, None]
    rows = (blocks_BW[:, None] * num_heads + head_H1).flatten()  # a head of a block is one contiguous row of S * D
    num_sequences, num_blocks = blocks_BW.shape

    def gathered(kv_NHSD: torch.Tensor) -> torch.Tensor:
        _, _, block_size, head_dim = kv_NHSD.shape
        gathered_RX = kv_NHSD.reshape(-1, block_size * head_dim).index_select(0, rows)
        return gathered_RX.view(num_sequences, num_heads, num_blocks * block_size, head_dim)

    return gathered(key_NHSD), gathered(value_NHSD)


def attention_prefill(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention of concatenated chunks -> [T, A, D].

    The last row of sequence b is at position context_lens[b] - 1. Both lengths are on the host. `scale` multiplies the
    scores; None: D ** -0.5.
    """
    block_size = key_NHSD.shape[2]
    outputs = []
    row = 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks_1W = block_tables_BM[sequence : sequence + 1, : -(-context_len // block_size)]
        key_1HCD, value_1HCD = (kv[:, :, :context_len] for kv in gather_blocks(key_NHSD, value_NHSD, blocks_1W))
        query_1AQD = query_TAD[row : row + query_len].transpose(0, 1)[None]
        mask_QC = None
        if 1 < query_len < context_len:
            position_Q = torch.arange(context_len - query_len, context_len, device=query_TAD.device)
            mask_QC = torch.arange(context_len, device=query_TAD.device) <= position_Q[:, None]
        mixed_1AQD = functional.scaled_dot_product_attention(
            query_1AQD,
            key_1HCD,
            value_1HCD,
            attn_mask=mask_QC,
            is_causal=query_len == context_len > 1,
            scale=scale,
            enable_gqa=query_TAD.shape[1] != key_NHSD.shape[1],
        )
        outputs.append(mixed_1AQD[0].transpose(0, 1))
        row += query_len
    return torch.cat(outputs)


def attention_decode(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention of Q rows of each of B sequences -> [B, Q, A, D]; never waits for the device.

    `max_context_len` is a host-side upper bound of positions_BQ + 1; `scale` is as in `attention_prefill`. Query heads
    that share a KV head become further rows of it, so K and V are never repeated.
    """
    num_sequences, num_rows, num_heads, head_dim = query_BQAD.shape
    num_kv_heads, block_size = key_NHSD.shape[1:3]
    group = num_heads // num_kv_heads
    blocks_BW = block_tables_BM[:, : -(-max_context_len // block_size)]
    position_C = torch.arange(blocks_BW.shape[1] * block_size, device=query_BQAD.device)
    beyond_B1C1 = (position_C > positions_BQ.amax(dim=1, keepdim=True))[:, None, :, None]
    key_BHCD, value_BHCD = gather_blocks(key_NHSD, value_NHSD, blocks_BW)
    key_BHCD.masked_fill_(beyond_B1C1, 0.0)
    value_BHCD.masked_fill_(beyond_B1C1, 0.0)
    query_BHRD = query_BQAD.unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    visible_BQC = position_C <= positions_BQ[:, :, None]
    visible_B1RC = visible_BQC.repeat_interleave(group, dim=1)[:, None]
    mixed_BHRD = functional.scaled_dot_product_attention(
        query_BHRD, key_BHCD, value_BHCD, attn_mask=visible_B1RC, scale=scale
    )
    mixed_BHQGD = mixed_BHRD.unflatten(2, (num_rows, group))
    mixed_BQHGD: torch.Tensor = mixed_BHQGD.permute(0, 2, 1, 3, 4)
    return mixed_BQHGD.reshape(num_sequences, num_rows, num_heads, head_dim)
