"""Converts sequences to the tensors of a forward pass.

Prefill batches are laid out on the host and copied to the device in one copy; decode batches are computed on the device
from the slots' rows.

Legend: T tokens, B sequences, Q rows of each, M entries of a block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.attention.row_places import row_places
from baton.kernels.copies import to_device
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.model.inputs import DecodeBatch, PrefillBatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """Tokens of one sequence that one step computes.

    Attributes:
        token_ids: int64, every token of the sequence, on the host.
        start: position of the chunk's first token; everything before it is in the pool.
        length: tokens in the chunk, >= 1.
        blocks: the sequence's KV blocks.
        knows_next: the last of `token_ids` is not computed: it was sampled earlier, and follows from those before it.
        state_slot: the sequence's state slot; None if the layout has no state.
        keep_in: checkpoints that it leaves, as in `plan.Chunk`.
    """

    token_ids: Ints
    start: int
    length: int
    blocks: Sequence[int]
    knows_next: bool = False
    state_slot: int | None = None
    keep_in: Sequence[tuple[int, int]] = ()

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """Whether this chunk completes the tokens to compute, so that the next token follows from it."""
        return self.end == len(self.token_ids) - self.knows_next


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInputs:
    """The tensors of one prefill step.

    Attributes:
        token_ids_T: int64.
        next_token_ids_T: int64, the token after each; 0 after a sequence's newest, which the caller fills in.
        last_row_F: int64, rows of the newest tokens of sequences whose computation this step completes, in chunk order.
        known_F: the tokens that follow them, if they were sampled earlier; -1 if they are sampled now.
        batch: positions, slots and tables.
    """

    token_ids_T: torch.Tensor
    next_token_ids_T: torch.Tensor
    last_row_F: torch.Tensor
    batch: PrefillBatch
    known_F: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """What does not change during a decode step about its sequences.

    Attributes:
        block_tables_BM: int64; unused entries point at the null block.
        limit_B: int64, positions that fit in each sequence's blocks.
        draft_cap_B: int64, drafts each may accept.
        state_slots_B: int64, state slot of each; None if the layout has no state.
    """

    block_tables_BM: torch.Tensor
    limit_B: torch.Tensor
    draft_cap_B: torch.Tensor
    state_slots_B: torch.Tensor | None = None


def prefill_inputs(chunks: Sequence[ChunkRows], pool: KVPool, null_block: int | None = None) -> PrefillInputs:
    """Lay the chunks out one after the other; `null_block` fills unused table entries, and defaults to the pool's."""
    assert chunks
    null_block = pool.num_blocks if null_block is None else null_block
    block_size = pool.layout.block_size
    num_tokens = sum(chunk.length for chunk in chunks)
    num_entries = max(-(-chunk.end // block_size) for chunk in chunks)
    ids_4T = np.zeros((4, num_tokens), dtype=np.int64)
    tables_BM = np.full((len(chunks), num_entries), null_block, dtype=np.int64)
    last_rows, known = [], []
    row = 0
    for index, chunk in enumerate(chunks):
        assert chunk.length >= 1
        assert chunk.end <= min(len(chunk.token_ids), len(chunk.blocks) * block_size)
        blocks = np.asarray(chunk.blocks[: -(-chunk.end // block_size)], dtype=np.int64)
        tables_BM[index, : len(blocks)] = blocks
        positions = np.arange(chunk.start, chunk.end)
        following = chunk.token_ids[chunk.start + 1 : chunk.end + 1]
        ids_4T[0, row : row + chunk.length] = chunk.token_ids[chunk.start : chunk.end]
        ids_4T[1, row : row + len(following)] = following
        ids_4T[2, row : row + chunk.length] = positions
        ids_4T[3, row : row + chunk.length] = blocks[positions // block_size] * block_size + positions % block_size
        row += chunk.length
        if chunk.is_last:
            last_rows.append(row - 1)
            known.append(int(chunk.token_ids[-1]) if chunk.knows_next else -1)
    query_lens, context_lens = [chunk.length for chunk in chunks], [chunk.end for chunk in chunks]
    lens = np.asarray([0, *accumulate(query_lens), *context_lens], dtype=np.int64)
    state_slots = [chunk.state_slot for chunk in chunks if chunk.state_slot is not None]
    assert len(state_slots) == len(chunks) * pool.layout.has_state
    tail = np.asarray([*last_rows, *state_slots], dtype=np.int64)
    packed = np.concatenate([ids_4T.ravel(), tables_BM.ravel(), lens, tail])
    on_device = to_device(torch.from_numpy(packed), pool.device)
    tables_end = ids_4T.size + tables_BM.size
    lens_end = tables_end + len(lens)
    token_ids_T, next_token_ids_T, positions_T, slots_T = on_device[: ids_4T.size].view(4, num_tokens).unbind()
    batch = PrefillBatch(
        positions_T=positions_T,
        slots_T=slots_T,
        block_tables_BM=on_device[ids_4T.size : tables_end].view(len(chunks), num_entries),
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        lens_on_device=(on_device[tables_end : lens_end - len(chunks)], on_device[lens_end - len(chunks) : lens_end]),
        state_slots_B=on_device[lens_end + len(last_rows) :] if state_slots else None,
        keep_in=tuple(tuple(chunk.keep_in) for chunk in chunks),
    )
    return PrefillInputs(
        token_ids_T=token_ids_T,
        next_token_ids_T=next_token_ids_T,
        last_row_F=on_device[lens_end : lens_end + len(last_rows)],
        batch=batch,
        known_F=tuple(known),
    )


def decode_batch(
    first_position_B: torch.Tensor,
    num_rows: int,
    rows: DecodeRows,
    max_context_len: int,
    pool: KVPool,
    implementation: Implementation = Implementation.AUTO,
) -> DecodeBatch:
    """Rows for `num_rows` consecutive positions of every sequence, from `first_position_B` on.

    Rows beyond a sequence's limit (drafts after its last possible token) sit at its last position and write to the
    scratch slot; what they compute is never emitted.
    """
    positions_BQ, slots_BQ = row_places(
        first_position_B,
        num_rows,
        rows.limit_B,
        rows.block_tables_BM,
        block_size=pool.layout.block_size,
        scratch_slot=pool.scratch_slot,
        implementation=implementation,
    )
    return DecodeBatch(
        positions_BQ=positions_BQ,
        slots_BQ=slots_BQ,
        block_tables_BM=rows.block_tables_BM,
        max_context_len=max_context_len,
        state_slots_B=rows.state_slots_B,
    )
