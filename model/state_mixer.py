"""Base class of layers that mix rows through a recurrent state, and a pass's rows in the form that they read.

What runs layers (`model.decoder`, `model.model`, `engine.graphs.piecewise`) knows this class, not its kinds. It does
not say what a layer computes or keeps: see `model.delta_net` for a gated delta net.

Legend: T tokens, D hidden size, M columns of what a mixer makes.
"""

from abc import ABC, abstractmethod

import torch

from baton.kernels.delta_net.rows import StateRows
from baton.kernels.ops import Rows, Weight
from baton.kvcache.pool import KVPool
from baton.model.attention import AttentionInputs
from baton.model.inputs import AttentionBatch, DecodeBatch, MixedBatch, PrefillBatch


class StateMixer(ABC):
    """One layer with a recurrent state: project, carry, join.

    Attributes:
        pool_layers: pool layers of what it keeps of a sequence.
        read_lens: columns of each tensor that `project` returns and `carry` reads.
        made_len: columns of what `carry` makes.
    """

    pool_layers: range
    read_lens: tuple[int, ...]
    made_len: int

    @property
    @abstractmethod
    def reader(self) -> Weight:
        """The weight of the GEMM that reads the rows given to `project`; others may, too."""

    @abstractmethod
    def project(self, x_TD: Rows, rows: tuple[StateRows, ...]) -> tuple[torch.Tensor, ...]:
        """What the mixer reads of each row; `rows` are those of the pass if `carry` follows at once, else ()."""

    @abstractmethod
    def stored(self, pool: KVPool) -> tuple[torch.Tensor, ...]:
        """The tensors of this layer alone that `carry` needs: what its sequences keep, of all slots, and weights."""

    @abstractmethod
    def carry(
        self, read: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...], rows: tuple[StateRows, ...]
    ) -> torch.Tensor:
        """Carry the rows into their sequences' states -> [T, M]. Never waits for the device."""

    @abstractmethod
    def join(self, out_TM: torch.Tensor) -> torch.Tensor:
        """Output projection, [T, M] -> [T, D]."""

    def mix(self, read: tuple[torch.Tensor, ...], inputs: AttentionInputs) -> torch.Tensor:
        """Result of `project` -> [T, M]; writes the state, then reports its pool layers."""
        out_TM = self.carry(read, self.stored(inputs.pool), inputs.state_rows)
        for layer in self.pool_layers:
            inputs.on_layer(layer)
        return out_TM


def state_rows(batch: AttentionBatch, pool: KVPool) -> tuple[StateRows, ...]:
    """The rows of a pass in the form for layers with state: chunk segments separately, decode rows together."""
    match batch:
        case PrefillBatch():
            return tuple(_chunks(batch, pool))
        case DecodeBatch():
            return (_decode_rows(batch, pool, 0),)
        case MixedBatch():
            chunks = tuple(_chunks(batch.prompts, pool))
            return (*chunks, _decode_rows(batch.decode, pool, len(batch.prompts.positions_T)))


def _chunks(batch: PrefillBatch, pool: KVPool) -> list[StateRows]:
    assert batch.state_slots_B is not None
    found = []
    for index, first_row, start, length, keep_in in batch.segments():
        first_B = batch.positions_T[first_row : first_row + 1]
        rows = StateRows(
            first_row=first_row,
            num_rows=length,
            positions_B=first_B,
            counts_B=torch.full_like(first_B, length),
            slots_B=batch.state_slots_B[index : index + 1],
            scratch_slot=pool.num_state_slots,
            start=start,
            keep_in=keep_in,
        )
        found.append(rows)
    return found


def _decode_rows(batch: DecodeBatch, pool: KVPool, first_row: int) -> StateRows:
    assert batch.state_slots_B is not None
    return StateRows(
        first_row=first_row,
        num_rows=batch.positions_BQ.shape[1],
        positions_B=batch.positions_BQ[:, 0],
        counts_B=(batch.slots_BQ != pool.scratch_slot).sum(dim=1),
        slots_B=batch.state_slots_B,
        scratch_slot=pool.num_state_slots,
    )
