"""Rows of one pass, dealt to the ranks of a group: each attends for its own, and all get what came of every row.

Whose a row is follows from its sequence's owner, which every rank knows from the plan; so no count crosses, and all
ranks give an all-gather the same shape: as many rows as the rank with most has, or as a captured graph has for each.
What pads a rank's part is dropped where it arrives. A rank without rows gives padding alone. Owns the indices; who owns
a sequence is the scheduler's to say, and how ranks reach each other the engine's.

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
    """Who attends for which rows of a pass.

    Attributes:
        own_O: int64, this rank's rows in ascending order; in a graph others follow, and their results are dropped.
        place_T: int64, where each row stands among the P rows of every rank, one rank after the other.
        num_each: P.
        may_wait: whether the host may wait for the device in this pass, at every rank: no decode row takes part.
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
        """Every rank's rows, each rank giving its own, at every rank: [T, D]."""
        padded_PD = functional.pad(x_OD, (0, 0, 0, self.num_each - len(x_OD)))
        return self.all_gather(padded_PD).flatten(0, 1).index_select(0, self.place_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDeal:
    """How the rows of this rank's passes are dealt.

    Attributes:
        rank: this one.
        size: of the group.
        all_gather: see `DealtRows`.
    """

    rank: int
    size: int
    all_gather: Callable[[torch.Tensor], torch.Tensor]

    def rows(self, owner_T: Ints, device: torch.device, *, may_wait: bool) -> DealtRows:
        """Deal T >= 1 rows, each to the rank that `owner_T` names; one copy to the device."""
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
        """This rank's rows in ascending order [O], and where each row stands among `num_each` of every rank [T]."""
        counts = self._counts(owner_T)
        assert counts.max() <= num_each, "a rank has more rows than each may give"
        order = np.argsort(owner_T, kind="stable")
        first = np.repeat(np.cumsum(counts) - counts, counts)
        place_T = np.empty_like(owner_T)
        place_T[order] = owner_T[order] * num_each + np.arange(len(owner_T)) - first
        return np.flatnonzero(owner_T == self.rank), place_T

    def _counts(self, owner_T: Ints) -> Ints:
        """Rows of each rank."""
        counts = np.bincount(owner_T, minlength=self.size)
        assert len(counts) == self.size, "a row of no rank"
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtBatch:
    """What a pass must know beside its tokens where its rows are dealt.

    Attributes:
        own: of this rank's rows, in their order; if it has none, a batch of none.
        rows: whose the rows are.
    """

    own: AttentionBatch
    rows: DealtRows


PassBatch = AttentionBatch | DealtBatch
