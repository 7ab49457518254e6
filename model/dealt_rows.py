"""Distributes the rows of one pass over the ranks of a group: each attends for its own rows, and all get every result.

A row's rank is the owner of its sequence, which every rank knows from the plan. So no counts are exchanged, and all
ranks pass the same shape to an all-gather: as many rows as the rank with most has, or as a captured graph has for each.
Padding is dropped on receipt. A rank without rows sends only padding. This module owns the indices; the scheduler
decides who owns a sequence, and the engine provides the communication.

Legend: T rows of a pass, O of them this rank's own, P rows that each rank gives, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from baton.kernels.copies import to_device
from baton.model.inputs import AttentionBatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtRows:
    """Which rank attends for which rows of a pass.

    Attributes:
        own_O: int64, this rank's rows in ascending order; in a graph, followed by others, whose results are dropped.
        place_T: int64, place of each row among the P rows of every rank, rank after rank.
        num_each: P.
        may_wait: whether the host may wait for the device in this pass, the same on every rank: there are no decode
            rows.
        all_gather: every rank's tensor of one shape, in rank order, [size, ...].
    """

    own_O: torch.Tensor
    place_T: torch.Tensor
    num_each: int
    may_wait: bool
    all_gather: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_idle(self) -> bool:
        """Whether this rank computes no row."""
        return len(self.own_O) == 0

    def own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's rows, [O, D]."""
        return x_TD.index_select(0, self.own_O)

    def shared(self, x_OD: torch.Tensor) -> torch.Tensor:
        """Every rank's rows, on every rank; each rank contributes its own: [T, D]."""
        padded_PD = functional.pad(x_OD, (0, 0, 0, self.num_each - len(x_OD)))
        return self.all_gather(padded_PD).flatten(0, 1).index_select(0, self.place_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDeal:
    """How the rows of this rank's passes are distributed.

    Attributes:
        rank: this rank.
        size: size of the group.
        all_gather: see `DealtRows`.
    """

    rank: int
    size: int
    all_gather: Callable[[torch.Tensor], torch.Tensor]

    def rows(self, owner_T: Ints, device: torch.device, *, may_wait: bool) -> DealtRows:
        """Distribute T >= 1 rows, each to the rank in `owner_T`; one copy to the device."""
        num_each = int(self._counts(owner_T).max())
        own_O, place_T = self.places(owner_T, num_each)
        packed = to_device(torch.from_numpy(np.concatenate([own_O, place_T])), device)
        own_O_on_device, place_T_on_device = packed.split([len(own_O), len(place_T)])
        return DealtRows(
            own_O=own_O_on_device,
            place_T=place_T_on_device,
            num_each=num_each,
            may_wait=may_wait,
            all_gather=self.all_gather,
        )

    def places(self, owner_T: Ints, num_each: int) -> tuple[Ints, Ints]:
        """This rank's rows in ascending order [O], and each row's place among `num_each` rows of every rank [T]."""
        counts = self._counts(owner_T)
        assert counts.max() <= num_each, "a rank has more rows than each may give"
        order = np.argsort(owner_T, kind="stable")
        first = np.repeat(np.cumsum(counts) - counts, counts)
        place_T = np.empty_like(owner_T)
        place_T[order] = owner_T[order] * num_each + np.arange(len(owner_T)) - first
        return np.flatnonzero(owner_T == self.rank), place_T

    def _counts(self, owner_T: Ints) -> Ints:
        """Number of rows of each rank."""
        counts = np.bincount(owner_T, minlength=self.size)
        assert len(counts) == self.size, "a row of no rank"
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtBatch:
    """What a pass needs besides its tokens if its rows are distributed over ranks.

    Attributes:
        own: batch of this rank's rows, in their order; an empty batch if it has none.
        rows: how the rows are distributed.
    """

    own: AttentionBatch
    rows: DealtRows


PassBatch = AttentionBatch | DealtBatch
