"""Runs the passes of a step through the model: one per further draft, the trunk, and the draft extend.

A step calls the passes and samples tokens in between. Everything that may need the host or differs between batches
(grammars, sampling, penalties, log-probabilities) therefore lies between passes, never inside one. `EagerPasses`
launches each kernel. `graphed_step` replays decode-only passes from CUDA graphs, and the trunk of others in pieces. In
`dealt_passes`, ranks attend for different rows.

Legend: B decode sequences, Q rows of each, T tokens of chunks, D hidden size.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from baton.engine.step.batch import DecodeRows, PrefillInputs, decode_batch
from baton.kvcache.pool import KVPool
from baton.model.dealt_rows import PassBatch
from baton.model.inputs import DecodeBatch, MixedBatch
from baton.model.model import Model

Hidden = tuple[torch.Tensor | None, torch.Tensor | None]
"""Hidden states of the chunks' tokens [T, D] and of the decode rows [B * Q, D]; None where there are none."""


class Passes(Protocol):
    """The passes over the rows of one step; each writes the KV of the positions it is given.

    A result is valid until the next pass of the same kind.
    """

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        """Run one further step of the MTP chain, at `position_B` -> [B, D]."""
        ...

    def trunk(self, ids_BQ: torch.Tensor | None, first_B: torch.Tensor | None) -> Hidden:
        """Run the trunk over the chunks, and over decode rows from `first_B` on."""
        ...

    def extend(
        self,
        prompt: tuple[torch.Tensor, torch.Tensor] | None,
        decode: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> Hidden:
        """Run the MTP head over the same rows.

        Args:
            prompt: for each token of the chunks, the token after it [T] and its hidden state [T, D].
            decode: emitted tokens [B, Q], hidden states of the verified rows [B * Q, D], and `first_B`.
        """
        ...


class EagerPasses:
    """The passes, with each operation launched by the host.

    Args:
        model: the model.
        pool: its KV pool.
        rows: the decode rows; None if there are none.
        max_context_len: upper bound of every decode position + 1.
        prompt: the chunks; None if there are none.
        on_layer: called with each pool layer right after its KV was written.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        rows: DecodeRows | None,
        max_context_len: int,
        prompt: PrefillInputs | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._rows = rows
        self._max_context_len = max_context_len
        self._prompt = prompt
        self._on_layer = on_layer or ignore_layer
        self._verified: DecodeBatch | None = None  # the rows of verification and of the draft extend are the same

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        return self._model.mtp(token_B, hidden_BD, self._decode_batch(position_B, 1), self._pool, ignore_layer)

    def trunk(self, ids_BQ: torch.Tensor | None, first_B: torch.Tensor | None) -> Hidden:
        """See `Passes`."""
        ids = [] if self._prompt is None else [self._prompt.token_ids_T]
        if ids_BQ is not None:
            assert first_B is not None
            self._verified = self._decode_batch(first_B, ids_BQ.shape[1])
            ids.append(ids_BQ.flatten())
        hidden_TD = self._trunk(_joined(ids), self._batch(self._verified))
        return self._split(hidden_TD, has_decode=ids_BQ is not None)

    def extend(
        self,
        prompt: tuple[torch.Tensor, torch.Tensor] | None,
        decode: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> Hidden:
        """See `Passes`; after `trunk`."""
        ids: list[torch.Tensor] = []
        hidden: list[torch.Tensor] = []
        if prompt is not None:
            ids.append(prompt[0])
            hidden.append(prompt[1])
        if decode is not None:
            assert self._verified is not None
            ids.append(decode[0].flatten())
            hidden.append(decode[1])
        batch = self._batch(None if decode is None else self._verified)
        mtp_TD = self._model.mtp(_joined(ids), _joined(hidden), batch, self._pool, self._on_layer)
        return self._split(mtp_TD, has_decode=decode is not None)

    def _trunk(self, token_ids_T: torch.Tensor, batch: PassBatch) -> torch.Tensor:
        return self._model.trunk(token_ids_T, batch, self._pool, self._on_layer)

    def _batch(self, decode: DecodeBatch | None) -> PassBatch:
        prompt = None if self._prompt is None else self._prompt.batch
        if prompt is None:
            assert decode is not None
            return decode
        return prompt if decode is None else MixedBatch(prompts=prompt, decode=decode)

    def _decode_batch(self, first_B: torch.Tensor, num_rows: int) -> DecodeBatch:
        assert self._rows is not None
        return decode_batch(first_B, num_rows, self._rows, self._max_context_len, self._pool, self._model.around)

    def _split(self, hidden_TD: torch.Tensor, *, has_decode: bool) -> Hidden:
        if self._prompt is None:
            return None, hidden_TD
        num_prompt = len(self._prompt.token_ids_T)
        return hidden_TD[:num_prompt], hidden_TD[num_prompt:] if has_decode else None


def ignore_layer(layer: int) -> None:
    """Do nothing: no KV of this pass is pushed."""


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
