"""What a model's trunk computes, row by row: tokens, positions, and digests of the hidden rows' bits."""

import hashlib
from dataclasses import dataclass

from baton.model.inputs import MixedBatch, PrefillBatch


@dataclass(frozen=True)
class Run:
    """Consecutive positions of one sequence in one pass."""

    first: int
    token_ids: list[int]
    digests: list[bytes]
    is_chunk: bool


def record_rows(model, seen):
    """The model's trunk as it is, but that every run of rows that it computes is given to `seen`."""
    trunk = model.trunk

    def recorded(token_ids, batch, *rest):
        hidden_TD = trunk(token_ids, batch, *rest)
        tokens = token_ids.flatten().tolist()
        rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in hidden_TD]
        for at, positions, is_chunk in _runs(batch):
            until = at + len(positions)
            seen(Run(positions[0], tokens[at:until], rows[at:until], is_chunk))
        return hidden_TD

    model.trunk = recorded


def _runs(batch):
    """(first row, positions, is a chunk) of every sequence of a batch."""
    if isinstance(batch, MixedBatch):
        yield from _runs(batch.prompts)
        for row, *rest in _runs(batch.decode):
            yield row + len(batch.prompts.positions_T), *rest
    elif isinstance(batch, PrefillBatch):
        row = 0
        for length in batch.query_lens:
            yield row, batch.positions_T[row : row + length].tolist(), True
            row += length
    else:
        num_rows = batch.positions_BQ.shape[1]
        for index, positions in enumerate(batch.positions_BQ.tolist()):
            yield index * num_rows, positions, False
