"""Maps rows of a pass to positions of sequences, for layers that keep state.

Legend: B sequences, L rows of each.
"""

from dataclasses import dataclass

import torch

# Row arguments of kernels. Batches slice and stride these tensors in many ways, which must not cause recompiles.
UNSPECIALIZED = ["positions", "counts", "slots", "position_stride", "count_stride", "slot_stride", "num_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """L consecutive positions of each of B sequences; their B * L rows of the pass are contiguous.

    Attributes:
        first_row: index of the first of them among the rows of the pass.
        num_rows: L.
        positions_B: int64, position of each sequence's first row.
        counts_B: int64, how many of a sequence's rows are real; the other rows write to the scratch slot.
        slots_B: int64, state slot of each sequence.
        scratch_slot: scratch slot of the pool.
        start: first position, known on the host, of a chunk of one prompt, whose rows all stay; None for decode rows,
            the last of which may be rejected.
        keep_in: for a chunk, the state slot that gets a copy of the sequence's state after these rows; None: no copy.
    """

    first_row: int
    num_rows: int
    positions_B: torch.Tensor
    counts_B: torch.Tensor
    slots_B: torch.Tensor
    scratch_slot: int
    start: int | None = None
    keep_in: int | None = None

    @property
    def stop_row(self) -> int:
        """Index after the last of them among the rows of the pass."""
        return self.first_row + len(self.positions_B) * self.num_rows

    def places(self, ring: int, num_kept: int) -> tuple[torch.Tensor, torch.Tensor]:
        """State slot and ring row for the last `num_kept` of each sequence's rows, int64 [B, num_kept].

        All decode rows are stored, because any of them may be the last that is accepted.
        """
        at_L = torch.arange(self.num_rows - num_kept, self.num_rows, device=self.positions_B.device)
        is_real_BL = at_L < self.counts_B[:, None]
        return self.real_slots(is_real_BL), (self.positions_B[:, None] + at_L) % ring

    def real_slots(self, is_real_BL: torch.Tensor) -> torch.Tensor:
        """The sequence's slot where a row is real, else the scratch slot, int64 [B, L]."""
        return torch.where(is_real_BL, self.slots_B[:, None], self.scratch_slot)
