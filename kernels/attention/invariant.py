"""Attention whose result for a row does not depend on chunking, batch or bound: an ordered online softmax.

Keys are taken 64 at a time from position 0 on. Each step rescales the running sums and adds the contribution of its 64
keys, in float32 (float64 for float64). Keys past a row's position change nothing, exactly: their weights are 0, their
maximum is -inf and the scale is 1. So prefill, which stops at the last row, and decode, which runs to a bound, agree
bit for bit. Query heads that share a KV head are rows of one matmul; rows are padded to a tile (`kernels.tiles`).

Source: Milakov and Gimelshein 2018 (online softmax).
Legend: as in `kernels.attention.paged`; further R rows of one KV head (queries times G, padded), P = B * H batched
matmuls, C = 64 keys of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kernels.attention.paged import gather_blocks
from baton.kernels.tiles import matmul_groups, ordered_sum, pad_rows, row_tile, wide_dtype

KEYS_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class _Keys:
    """K and V of B sequences, read 64 positions at a time."""

    key_NHSD: torch.Tensor
    value_NHSD: torch.Tensor
    block_tables_BM: torch.Tensor
    last_position_B: torch.Tensor

    def step(self, start: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K [P, D, C] and V [P, C, D] of positions start ... start + 63; zeros past a sequence's last position."""
        block_size = self.key_NHSD.shape[2]
        assert KEYS_PER_STEP % block_size == 0
        num_blocks = KEYS_PER_STEP // block_size
        first = start // block_size
        # The last step may reach past the table. No row sees those positions, so any block will do.
        last = self.block_tables_BM.shape[1] - 1
        columns = [min(column, last) for column in range(first, first + num_blocks)]
        blocks_BW = self.block_tables_BM[:, columns[0] : columns[-1] + 1]
        if blocks_BW.shape[1] < num_blocks:
            tail_BW = blocks_BW[:, -1:].expand(-1, num_blocks - blocks_BW.shape[1])
            blocks_BW = torch.cat([blocks_BW, tail_BW], dim=1)
        position_C = torch.arange(start, start + KEYS_PER_STEP, device=blocks_BW.device)
        beyond_B1C1 = (position_C > self.last_position_B[:, None])[:, None, :, None]
        key_BHCD, value_BHCD = gather_blocks(self.key_NHSD, self.value_NHSD, blocks_BW)
        key_BHCD.masked_fill_(beyond_B1C1, 0.0)
        value_BHCD.masked_fill_(beyond_B1C1, 0.0)
        return key_BHCD.flatten(0, 1).transpose(1, 2).to(dtype), value_BHCD.flatten(0, 1).to(dtype)


@dataclass(slots=True)
class _Running:
    """Online softmax state: maximum and sum of weights [P, R, 1], weighted sum of V [P, R, D]."""

    maximum_PR1: torch.Tensor
    total_PR1: torch.Tensor
    mixed_PRD: torch.Tensor


def _add_step(
    state: _Running, score_PRC: torch.Tensor, value_PCD: torch.Tensor, first_row: int, num_kv_heads: int
) -> None:
    """Fold one step of scores (masked with -inf) into the running state of rows from `first_row` on."""
    rows = slice(first_row, None)
    old_PR1 = state.maximum_PR1[:, rows]
    new_PR1 = torch.maximum(old_PR1, score_PRC.amax(dim=-1, keepdim=True))
    scale_PR1 = torch.exp(old_PR1 - new_PR1)
    weight_PRC = torch.exp(score_PRC - new_PR1)
    share_PRD = matmul_groups(weight_PRC, value_PCD, num_kv_heads)
    state.maximum_PR1[:, rows] = new_PR1
    state.total_PR1[:, rows] = state.total_PR1[:, rows] * scale_PR1 + ordered_sum(weight_PRC)
    state.mixed_PRD[:, rows] = state.mixed_PRD[:, rows] * scale_PR1 + share_PRD


@dataclass(frozen=True, slots=True)
class _Ascent:
    """Rows of a prefill chunk: `rows_per_position` for each position from `first_position` on."""

    first_position: int
    rows_per_position: int

    def first_row(self, key: int, tile: int) -> int:
        """First row of the first tile that has a row which sees position `key`."""
        return max(0, key - self.first_position) * self.rows_per_position // tile * tile


def _attend(
    query_PRD: torch.Tensor,
    position_PR: torch.Tensor,
    keys: _Keys,
    context_len: int,
    ascent: _Ascent | None,
    scale: float | None,
) -> torch.Tensor:
    """Compute attention of padded rows, [P, R, D]; every position lies in 0 ... context_len - 1."""
    num_kv_heads, head_dim = keys.key_NHSD.shape[1], keys.key_NHSD.shape[3]
    tile = row_tile(query_PRD.device)
    scaled_PRD = query_PRD * (head_dim**-0.5 if scale is None else scale)
    shape_PR1 = (*query_PRD.shape[:2], 1)
    state = _Running(
        maximum_PR1=query_PRD.new_full(shape_PR1, float("-inf")),
        total_PR1=query_PRD.new_zeros(shape_PR1),
        mixed_PRD=torch.zeros_like(query_PRD),
    )
    for start in range(0, context_len, KEYS_PER_STEP):
        # Skip whole tiles of rows that see none of these keys; the step would not change them.
        first_row = ascent.first_row(start, tile) if ascent else 0
        key_PDC, value_PCD = keys.step(start, query_PRD.dtype)
        score_PRC = matmul_groups(scaled_PRD[:, first_row:], key_PDC, num_kv_heads)
        position_C = torch.arange(start, start + KEYS_PER_STEP, device=query_PRD.device)
        score_PRC.masked_fill_(position_C > position_PR[:, first_row:, None], float("-inf"))
        _add_step(state, score_PRC, value_PCD, first_row, num_kv_heads)
    return state.mixed_PRD / state.total_PR1


def attention_prefill_invariant(
    query_TAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `attention_prefill`, with the same arithmetic per row as `attention_decode_invariant`."""
    num_heads, num_kv_heads, device = query_TAD.shape[1], key_NHSD.shape[1], query_TAD.device
    group = num_heads // num_kv_heads
    outputs = []
    for sequence, query_TAD_b in enumerate(query_TAD.split(list(query_lens))):
        query_len, context_len = query_lens[sequence], context_lens[sequence]
        keys = _Keys(
            key_NHSD,
            value_NHSD,
            block_tables_BM[sequence : sequence + 1],
            torch.full((1,), context_len - 1, device=device),
        )
        query_HRD = query_TAD_b.unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2)
        padded_HRD = pad_rows(query_HRD.to(wide_dtype(query_TAD.dtype)), row_tile(device), dim=1)
        position_R = torch.arange(padded_HRD.shape[1], device=device) // group + (context_len - query_len)
        ascent = _Ascent(context_len - query_len, group)
        mixed_HRD = _attend(padded_HRD, position_R.clamp_max(context_len - 1)[None], keys, context_len, ascent, scale)
        mixed_HTGD = mixed_HRD[:, : query_len * group].unflatten(1, (query_len, group))
        outputs.append(mixed_HTGD.transpose(0, 1).flatten(1, 2))
    return torch.cat(outputs).to(query_TAD.dtype)


def attention_decode_invariant(
    query_BQAD: torch.Tensor,
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    positions_BQ: torch.Tensor,
    max_context_len: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `attention_decode`, with the same arithmetic per row as `attention_prefill_invariant`."""
    num_sequences, num_rows, num_heads, head_dim = query_BQAD.shape
    num_kv_heads = key_NHSD.shape[1]
    group = num_heads // num_kv_heads
    tile = row_tile(query_BQAD.device)
    query_BHRD = query_BQAD.unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    query_PRD = pad_rows(query_BHRD.flatten(0, 1).to(wide_dtype(query_BQAD.dtype)), tile, dim=1)
    position_BR = pad_rows(positions_BQ.repeat_interleave(group, dim=1)[..., None], tile, dim=1)[..., 0]
    position_PR = position_BR.repeat_interleave(num_kv_heads, dim=0)
    keys = _Keys(key_NHSD, value_NHSD, block_tables_BM, positions_BQ.amax(dim=1))
    mixed_PRD = _attend(query_PRD, position_PR, keys, max_context_len, None, scale)
    mixed_BHQGD = mixed_PRD[:, : num_rows * group].unflatten(0, (-1, num_kv_heads)).unflatten(2, (num_rows, group))
    mixed_BQAD: torch.Tensor = mixed_BHQGD.permute(0, 2, 1, 3, 4).reshape(num_sequences, num_rows, num_heads, head_dim)
    return mixed_BQAD.to(query_BQAD.dtype)
