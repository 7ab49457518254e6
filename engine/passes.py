"""The passes of a decode step through the model: one for each further draft, one to verify, one over what was accepted.

A step calls them and chooses tokens in between, so that everything that may visit the host or differs from batch to
batch (grammars, sampling, penalties, log-probabilities) lies between passes, never in one. What is in a pass depends on
nothing but numbers on the device and three shapes: sequences, rows of each, width of the block tables. `EagerPasses`
computes them as they come, `graphed_step` replays what was captured.

Legend: B sequences, Q rows of each, T = B * Q, D hidden size.
"""

from typing import Protocol

import torch

from baton.engine.batch import DecodeRows, decode_batch
from baton.engine.prepare import StepPreparer
from baton.kvcache.pool import KVPool
from baton.model.inputs import DecodeBatch
from baton.model.model import Model


class Passes(Protocol):
    """The passes over the sequences of one step; each writes the KV of the positions it is given.

    A result is for the caller until the next pass of its kind.
    """

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        """One further entry of the MTP chain, at `position_B` -> [B, D]."""
        ...

    def verify(self, token_ids_BQ: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """The trunk over the last token and the drafts, from `first_B` on -> [T, D]."""
        ...

    def draft_prefill(self, token_ids_BQ: torch.Tensor, trunk_TD: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """The MTP head over what was emitted, at the rows that were verified -> [T, D]."""
        ...


class EagerPasses:
    """Each operation is launched by the host.

    Args:
        model: that computes.
        pool: its KV.
        rows: of the step.
        max_context_len: bound of every position + 1.
        preparer: makes what attention needs to verify, from now on, while drafts are made; None: it is made then.
        first_B: int64, where verification will begin; `preparer` needs it now.
        num_rows: Q of that.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        rows: DecodeRows,
        max_context_len: int,
        preparer: StepPreparer | None,
        first_B: torch.Tensor,
        num_rows: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._rows = rows
        self._max_context_len = max_context_len
        self._preparer = preparer
        self._ticket = None if preparer is None else preparer.launch(first_B, num_rows, rows, max_context_len)
        self._verified: DecodeBatch | None = None  # the rows of verification and of the draft prefill are the same

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        batch = decode_batch(position_B, 1, self._rows, self._max_context_len, self._pool, self._model.around)
        return self._model.mtp(token_B, hidden_BD, batch, self._pool, ignore_layer)

    def verify(self, token_ids_BQ: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        if self._preparer is None or self._ticket is None:
            num_rows = token_ids_BQ.shape[1]
            batch = decode_batch(first_B, num_rows, self._rows, self._max_context_len, self._pool, self._model.around)
        else:
            batch = self._preparer.open(self._ticket.result())
        self._verified = batch
        return self._model.trunk(token_ids_BQ.flatten(), batch, self._pool, ignore_layer)

    def draft_prefill(self, token_ids_BQ: torch.Tensor, trunk_TD: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """See `Passes`; after `verify`."""
        assert self._verified is not None
        return self._model.mtp(token_ids_BQ.flatten(), trunk_TD, self._verified, self._pool, ignore_layer)


def ignore_layer(layer: int) -> None:
    """Nobody waits for a decode step's layers."""
