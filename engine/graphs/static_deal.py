"""Holds which sequences of a graph a rank attends for, in buffers that the graph reads; this may differ in each step.

Every rank has room for the same number of sequences, so that all replay the same shapes and the same collectives, even
a rank that owns no sequence. Unused places are padding: they read the graph's padding rows, and their results go only
to the graph's padding.

Legend: B sequences of a graph, C of them each rank's at most, Q rows of each, X numbers of each.
"""

from collections.abc import Sequence

import numpy as np
import torch

from baton.kernels.copies import to_device
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.dealt_rows import DealtRows, RowDeal


class StaticDeal:
    """The distribution for all graphs with the same B and C, of which one runs at a time.

    Args:
        deal: how rows are distributed.
        blocks: says which blocks are in this rank's pool.
        num_sequences: B.
        num_each: C.
        device: device of the graphs.
    """

    def __init__(
        self, deal: RowDeal, blocks: RankBlocks, num_sequences: int, num_each: int, device: torch.device
    ) -> None:
        assert deal.size * num_each >= num_sequences
        self.blocks = blocks
        self.num_each = num_each
        self._deal = deal
        self._num_sequences = num_sequences
        # This rank's sequences, or the padding row at the end; then the place of each sequence's results.
        self._numbers = torch.empty(num_each + num_sequences, dtype=torch.int64, device=device)
        self._own_C, self._place_B = self._numbers.split([num_each, num_sequences])
        self.write(())

    @property
    def num_rows(self) -> int:
        """Number of sequences of all ranks, including padding; an all-gather has Q times as many rows."""
        return self._deal.size * self.num_each

    def write(self, owners: Sequence[int]) -> None:
        """Assign the sequences of a step, B at most, to the ranks `owners`, no more than C to each."""
        num_padding = self._num_sequences - len(owners)
        assert num_padding >= 0
        own, places = self._deal.places(np.array(owners, dtype=np.int64), self.num_each)
        free = np.setdiff1d(np.arange(self.num_rows), places)[:1]  # an unused place of a rank; none if all are full
        unused = np.full(self.num_each - len(own), self._num_sequences)
        numbers = np.concatenate([own, unused, places, free.repeat(num_padding)])
        self._numbers.copy_(to_device(torch.from_numpy(numbers), self._numbers.device))

    def own(self, numbers_BX: torch.Tensor) -> torch.Tensor:
        """The numbers of this rank's sequences, [C, X]; `numbers_BX` ends with an additional padding row."""
        return numbers_BX.index_select(0, self._own_C)

    def rows(self, num_rows: int) -> DealtRows:
        """Distribution with Q rows per sequence; in place of padding, this rank computes other rows again."""
        row_Q = torch.arange(num_rows, device=self._numbers.device)
        own_O = (self._own_C[:, None] * num_rows + row_Q).flatten()
        return DealtRows(
            own_O=own_O.clamp(max=self._num_sequences * num_rows - 1),
            place_T=(self._place_B[:, None] * num_rows + row_Q).flatten(),
            num_each=self.num_each * num_rows,
            may_wait=False,
            all_gather=self._deal.all_gather,
        )
