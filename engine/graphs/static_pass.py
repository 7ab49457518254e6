"""One pass of a decode step over fixed buffers: what a graph is captured of, and how it is replayed.

The buffers are the graph's own, and what a replay reads is copied into them on the device. Rows that pad a batch are
written anew wherever the replay before had a sequence (a row that an earlier, larger batch left would write into blocks
that are somebody else's by now), and nobody else writes them: they stand at position 0 of a sequence with room for one
token, whose table is nothing but the scratch block.
What they compute is cut off here and is seen by nobody. Sequences and the width of tables are padded apart from each
other; padding is told by the number of sequences, which the host knows.

Legend: B sequences, Q rows of each, T = B * Q, W entries of a block table, D hidden size, C = 2 + Q + W numbers of a
sequence: its first position, its room, its tokens, its blocks.
"""

import torch

from baton.engine.graphs.backend import GraphBackend, Replay
from baton.engine.graphs.key import GraphKey, GraphKind
from baton.engine.step.batch import DecodeRows, decode_batch
from baton.engine.step.passes import ignore_layer
from baton.kvcache.pool import KVPool
from baton.model.model import Model

_FIRST, _LIMIT, _TOKENS = 0, 1, 2


class StaticPass:
    """Buffers of one pass, and its graph once `capture` has been called.

    Args:
        key: kind and shapes.
        model: that computes.
        pool: its KV.
    """

    def __init__(self, key: GraphKey, model: Model, pool: KVPool) -> None:
        self.key = key
        self._model = model
        self._pool = pool
        self._tables = _TOKENS + key.num_rows
        num_numbers, num_tokens = self._tables + key.width, key.num_sequences * key.num_rows
        padding_C = torch.zeros(num_numbers, dtype=torch.int64, device=pool.device)
        padding_C[_LIMIT] = 1
        padding_C[self._tables :] = pool.num_blocks
        self._padding_BC = padding_C.expand(key.num_sequences, -1)
        self._numbers_BC = self._padding_BC.clone(memory_format=torch.contiguous_format)
        shape = num_tokens, model.config.hidden_size
        self._hidden_TD: torch.Tensor | None = None  # what an MTP entry joins its token with
        if key.kind is not GraphKind.VERIFY:
            self._hidden_TD = torch.zeros(shape, dtype=model.dtype, device=pool.device)
        self._output_TD = torch.zeros(shape, dtype=model.dtype, device=pool.device)
        self._replay: Replay | None = None
        self._num_written = 0  # rows that a replay has put sequences into, and none has padded since

    @property
    def num_bytes(self) -> int:
        """About what the pass holds at its peak, beside its buffers: K and V of all tables, and copies of them."""
        layout = self._pool.layout
        positions = self.key.num_sequences * self.key.width * layout.block_size
        return 4 * 2 * positions * self._pool.num_kv_heads * layout.head_dim * self._model.dtype.itemsize

    @torch.inference_mode()
    def warm_up(self, backend: GraphBackend) -> None:
        """Compute it once, of padding.

        Raises:
            Exception: what it raised.
        """
        backend.warm_up(self._compute)

    @torch.inference_mode()
    def capture(self, backend: GraphBackend) -> None:
        """Make it replayable.

        Raises:
            Exception: what capturing it raised.
        """
        self._replay = backend.capture(self._compute)

    def replay(
        self, token_ids_BQ: torch.Tensor, first_B: torch.Tensor, rows: DecodeRows, hidden_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """The pass over a batch that is not larger -> [T, D] of that batch; valid until the next replay."""
        key = self.key
        num_sequences, num_blocks = rows.block_tables_BM.shape
        num_tokens = num_sequences * key.num_rows
        assert self._replay is not None
        assert num_sequences <= key.num_sequences
        assert num_blocks <= key.width
        assert token_ids_BQ.shape == (num_sequences, key.num_rows)
        parts = [first_B[:, None], rows.limit_B[:, None], token_ids_BQ, rows.block_tables_BM]
        if num_blocks < key.width:
            parts.append(self._padding_BC[:num_sequences, self._tables + num_blocks :])
        num_before, self._num_written = self._num_written, max(self._num_written, num_sequences)
        torch.cat(parts, dim=1, out=self._numbers_BC[:num_sequences])
        if num_sequences < num_before:
            self._numbers_BC[num_sequences:num_before].copy_(self._padding_BC[num_sequences:num_before])
            self._num_written = num_sequences
        if self._hidden_TD is not None:
            assert hidden_TD is not None
            self._hidden_TD[:num_tokens].copy_(hidden_TD)
        self._replay()
        return self._output_TD[:num_tokens]

    def _compute(self) -> None:
        """From the buffers to the output: what is captured."""
        numbers_BC, key, pool = self._numbers_BC, self.key, self._pool
        limit_B, tables_BW = numbers_BC[:, _LIMIT], numbers_BC[:, self._tables :]
        rows = DecodeRows(block_tables_BM=tables_BW, limit_B=limit_B, draft_cap_B=limit_B)
        max_context_len = key.width * pool.layout.block_size
        batch = decode_batch(numbers_BC[:, _FIRST], key.num_rows, rows, max_context_len, pool, self._model.around)
        token_ids_T = numbers_BC[:, _TOKENS : self._tables].flatten()
        if self._hidden_TD is None:
            self._output_TD.copy_(self._model.trunk(token_ids_T, batch, pool, ignore_layer))
        else:
            self._output_TD.copy_(self._model.mtp(token_ids_T, self._hidden_TD, batch, pool, ignore_layer))
