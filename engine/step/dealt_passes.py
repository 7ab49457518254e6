"""Runs the passes of a step in which each rank attends for its own sequences, in its own pool.

Plans and slots are the same on every rank and name blocks of all pools; outside of attention, so are the step's rows.
This module derives what one rank needs for its attention: the chunks and decode rows of its own sequences, with block
tables of its own pool. A rank whose sequences have no row in a pass still takes part in it.

Legend: T tokens of all chunks, B decode sequences, b of them this rank's, Q rows of each, M entries of a block table.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from baton.engine.step.batch import ChunkRows, DecodeRows, Ints, PrefillInputs, decode_batch, prefill_inputs
from baton.engine.step.passes import EagerPasses, ignore_layer
from baton.kernels.copies import to_device
from baton.kvcache.pool import KVPool
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.dealt_rows import DealtBatch, DealtRows
from baton.model.inputs import AttentionBatch, DecodeBatch, MixedBatch
from baton.model.model import Model


def rank_blocks(model: Model, pool: KVPool) -> RankBlocks:
    """Map of plan blocks to this rank's pool: all of them, unless the model's rows are distributed over ranks."""
    rank, num_pools = (0, 1) if model.deal is None else (model.deal.rank, model.deal.size)
    return RankBlocks(num_blocks=pool.num_blocks, rank=rank, num_pools=num_pools)


class DealtPasses(EagerPasses):
    """The passes with rows distributed over ranks; the host launches each operation.

    Args:
        model: the model, with rows distributed over ranks.
        pool: this rank's pool.
        blocks: says which blocks are in that pool.
        rows: the decode rows of all ranks; None if there are none.
        owners: owner rank of each decode sequence.
        max_context_len: upper bound of every decode position + 1.
        prompt: the chunks of all ranks; None if there are none.
        chunks: the chunks that `prompt` was made from.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        blocks: RankBlocks,
        rows: DecodeRows | None,
        owners: Sequence[int],
        max_context_len: int,
        prompt: PrefillInputs | None,
        chunks: Sequence[ChunkRows],
    ) -> None:
        super().__init__(model, pool, rows, max_context_len, prompt)
        self._owner_B: Ints = np.array(owners, dtype=np.int64)
        chunk_owners = np.array([blocks.owner(chunk.blocks) for chunk in chunks], dtype=np.int64)
        self._owner_T = np.repeat(chunk_owners, [chunk.length for chunk in chunks])
        mine = [replace(chunk, blocks=own) for chunk in chunks if (own := blocks.own(chunk.blocks))]
        self._own_prompt = prefill_inputs(mine, pool).batch if mine else None
        self._known: dict[tuple[bool, int], DealtRows] = {}  # see `_dealt`
        self._own_b = torch.empty(0, dtype=torch.int64)
        if rows is not None:
            own_b = torch.from_numpy(np.flatnonzero(self._owner_B == blocks.rank))
            self._own_b = to_device(own_b, pool.device)
            self._own_rows = DecodeRows(
                block_tables_BM=blocks.own_tables(rows.block_tables_BM.index_select(0, self._own_b)),
                limit_B=rows.limit_B.index_select(0, self._own_b),
                draft_cap_B=rows.draft_cap_B.index_select(0, self._own_b),
            )

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        batch = DealtBatch(own=self._decode_batch(position_B, 1), rows=self._dealt(with_prompt=False, num_rows=1))
        return self._model.mtp(token_B, hidden_BD, batch, self._pool, ignore_layer)

    def _batch(self, decode: DecodeBatch | None) -> DealtBatch:
        own: AttentionBatch = self._own_prompt or self._no_rows()
        if decode is not None and self._own_prompt is None:
            own = decode
        elif decode is not None and self._own_prompt is not None and len(self._own_b):
            own = MixedBatch(prompts=self._own_prompt, decode=decode)
        num_rows = 0 if decode is None else decode.positions_BQ.shape[1]
        return DealtBatch(own=own, rows=self._dealt(with_prompt=True, num_rows=num_rows))

    def _dealt(self, *, with_prompt: bool, num_rows: int) -> DealtRows:
        """How the chunks' rows and `num_rows` rows per decode sequence are distributed.

        Verification and draft extend have the same rows, and share the result.
        """
        key = with_prompt, num_rows
        if key not in self._known:
            assert self._model.deal is not None
            owner_T = np.repeat(self._owner_B, num_rows)
            if with_prompt:
                owner_T = np.concatenate([self._owner_T, owner_T])
            self._known[key] = self._model.deal.rows(owner_T, self._pool.device, may_wait=num_rows == 0)
        return self._known[key]

    def _decode_batch(self, first_B: torch.Tensor, num_rows: int) -> DecodeBatch:
        """The decode batch of this rank's sequences, which may be empty."""
        first_b = first_B.index_select(0, self._own_b)
        return decode_batch(first_b, num_rows, self._own_rows, self._max_context_len, self._pool, self._model.around)

    def _no_rows(self) -> DecodeBatch:
        """An empty batch, for which no layer computes attention."""
        none_BX = torch.empty(0, 1, dtype=torch.int64, device=self._pool.device)
        return DecodeBatch(positions_BQ=none_BX, slots_BQ=none_BX, block_tables_BM=none_BX, max_context_len=1)
