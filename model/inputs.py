"""What a forward pass needs besides its tokens: positions, where to write KV, and what each row may read.

Legend: T tokens, B sequences, Q query rows per sequence, M entries of the widest block table.

Padding rows have the pool's scratch slot; nothing reads what they compute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Consecutive rows of one sequence in a `PrefillBatch`.

    Attributes:
        sequence: index of the sequence.
        first_row: first row within the batch.
        start: position of the first row.
        length: >= 1.
        keep_in: state slot that the sequence's state is copied to after these rows; None: no copy.
    """

    sequence: int
    first_row: int
    start: int
    length: int
    keep_in: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Chunks of several sequences, one after the other.

    Attributes:
        positions_T: int64, position of each token in its sequence.
        slots_T: int64, flat pool slot each token's KV is written to.
        block_tables_BM: int64, blocks of each sequence in order; unused entries point at the null block.
        query_lens: tokens of each sequence in this batch, on the host; they sum to T.
        context_lens: keys visible to each sequence's last row (cached ones and this chunk), on the host.
        lens_on_device: int64 starts of the sequences' rows [B + 1] and the context lengths [B]; None if they are only
            on the host.
        state_slots_B: int64, state slot of each sequence; None if the layout has no state.
        keep_in: per sequence, the checkpoints that its rows leave, ascending: a position, and the state slot that
            receives the state after all rows before it. () if no sequence leaves any.
    """

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    block_tables_BM: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    lens_on_device: tuple[torch.Tensor, torch.Tensor] | None = None
    state_slots_B: torch.Tensor | None = None
    keep_in: tuple[tuple[tuple[int, int], ...], ...] = ()

    def segments(self) -> Iterator[Segment]:
        """Rows in the form for layers with state: the chunks in order, split where they leave checkpoints."""
        row = 0
        for index, (length, context_len) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            start = context_len - length
            for position, slot in (*(self.keep_in[index] if self.keep_in else ()), (context_len, None)):
                if position > start:
                    yield Segment(index, row, start, position - start, slot)
                    row, start = row + position - start, position


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """The dense layout: Q consecutive rows of each of B sequences, flattened to T = B * Q.

    Row (b, q) attends to keys at positions 0 ... positions_BQ[b, q]. Lengths stay on the device; the host knows a
    bound.

    Attributes:
        positions_BQ: int64.
        slots_BQ: int64.
        block_tables_BM: int64.
        max_context_len: host upper bound of positions_BQ + 1.
        state_slots_B: int64, state slot of each sequence; None if the layout has no state. A row that writes its KV to
            the scratch slot writes its state to the scratch state slot.
    """

    positions_BQ: torch.Tensor
    slots_BQ: torch.Tensor
    block_tables_BM: torch.Tensor
    max_context_len: int
    state_slots_B: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBatch:
    """Prefill chunks and decode rows in one pass: the T tokens of `prompts`, then the B * Q rows of `decode`."""

    prompts: PrefillBatch
    decode: DecodeBatch


AttentionBatch = PrefillBatch | DecodeBatch | MixedBatch


def positions_of(batch: AttentionBatch) -> torch.Tensor:
    """Position of every row, int64 [T]."""
    match batch:
        case PrefillBatch():
            return batch.positions_T
        case DecodeBatch():
            return batch.positions_BQ.flatten()
        case MixedBatch():
            return torch.cat([batch.prompts.positions_T, batch.decode.positions_BQ.flatten()])


def slots_of(batch: AttentionBatch) -> torch.Tensor:
    """Flat pool slot that every row's KV is written to, int64 [T]."""
    match batch:
        case PrefillBatch():
            return batch.slots_T
        case DecodeBatch():
            return batch.slots_BQ.flatten()
        case MixedBatch():
            return torch.cat([batch.prompts.slots_T, batch.decode.slots_BQ.flatten()])
