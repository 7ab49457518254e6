"""Which sequences of a graph a rank attends for, in buffers that the graph reads: a deal may differ from step to step.

Every rank has room for as many sequences, so that all replay the same shapes and the same rounds, one that owns none
among them. What it has no sequences for is padding: it stands where a graph's padding does, and what comes of it goes
to the padding of the graph alone.

Legend: B sequences of a graph, C of them each rank's at most, Q rows of each, X numbers of each.
"""

from collections.abc import Sequence

import numpy as np
import torch

from baton.kernels.copies import to_device
from baton.kvcache.rank_blocks import RankBlocks
from baton.model.dealt_rows import DealtRows, RowDeal


class StaticDeal:
    """For all graphs of one B and C, of which one runs at a time.

    Args:
        deal: how rows are dealt.
        blocks: which ones are in this rank's pool.
        num_sequences: B.
        num_each: C.
        device: of the graphs.
    """

    def __init__(
        self, deal: RowDeal, blocks: RankBlocks, num_sequences: int, num_each: int, device: torch.device
    ) -> None:
        assert deal.size * num_each >= num_sequences
        self.blocks = blocks
        self.num_each = num_each
        self._deal = deal
        self._num_sequences = num_sequences
        # This rank's sequences, or the row of padding behind all; then where each one's results are.
        self._numbers = torch.empty(num_each + num_sequences, dtype=torch.int64, device=device)
        self._own_C, self._place_B = self._numbers.split([num_each, num_sequences])
        self.write(())

    @property
    def num_rows(self) -> int:
        """Sequences of all ranks, with their padding: rows of what is gathered are as many times Q."""
        return self._deal.size * self.num_each

    def write(self, owners: Sequence[int]) -> None:
        """Deal the sequences of a step, B at most, to the ranks `owners`, no more than C to each."""
        num_padding = self._num_sequences - len(owners)
        assert num_padding >= 0
        own, places = self._deal.places(np.array(owners, dtype=np.int64), self.num_each)
        free = np.setdiff1d(np.arange(self.num_rows), places)[:1]  # where a rank has no sequence; none if all are full
        unused = np.full(self.num_each - len(own), self._num_sequences)
        numbers = np.concatenate([own, unused, places, free.repeat(num_padding)])
        self._numbers.copy_(to_device(torch.from_numpy(numbers), self._numbers.device))

    def own(self, numbers_BX: torch.Tensor) -> torch.Tensor:
        """Those of this rank's sequences, [C, X]; behind those of all B comes a row of padding."""
        return numbers_BX.index_select(0, self._own_C)

    def rows(self, num_rows: int) -> DealtRows:
        """Q rows of each sequence; for padding, this rank computes rows of others once more."""
        row_Q = torch.arange(num_rows, device=self._numbers.device)
        own_O = (self._own_C[:, None] * num_rows + row_Q).flatten()
        return DealtRows(
            own_O=own_O.clamp(max=self._num_sequences * num_rows - 1),
            place_T=(self._place_B[:, None] * num_rows + row_Q).flatten(),
            num_each=self.num_each * num_rows,
            may_wait=False,
            all_gather=self._deal.all_gather,
        )
