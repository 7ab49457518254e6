"""Tracks where a layer's experts lie while they may move: the slot of each choice, and the tokens of each expert.

A router selects experts, ranks compute slots. Both tables and the counts stay on the device at fixed addresses, and the
host reads nothing during a step, so captured graphs stay valid when experts move. The copy of an expert that a token
uses depends only on the token's position in its sequence, whatever is computed beside it. Every rank routes every
token, so all ranks count the same.

Legend: T tokens, K experts of a token, E experts, C maximum copies of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kernels.copies import to_device
from baton.kernels.moe.expert_map import ExpertMap, first_map
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.sampling.decision_reference import digest


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Properties of the rows of a pass that routing needs, besides their choices.

    Attributes:
        position_T1: int64 [T, 1], positions in their sequences.
        is_counted_T1: bool [T, 1], or 1 and 0; false for rows that pad the batch.
    """

    position_T1: torch.Tensor
    is_counted_T1: torch.Tensor


class ExpertSlots:
    """Tables of one layer, the same at every rank.

    Attributes:
        load_E: int64, tokens that each expert received since the model was loaded.
    """

    def __init__(self, held: HeldExperts, device: torch.device) -> None:
        self._slot_EC = torch.zeros(held.num_experts, held.num_redundant + 1, dtype=torch.int64, device=device)
        self._num_copies_E = torch.ones(held.num_experts, dtype=torch.int64, device=device)
        self.load_E = torch.zeros(held.num_experts, dtype=torch.int64, device=device)
        self.put(first_map(held.num_experts, held.num_redundant))

    def put(self, experts: ExpertMap) -> None:
        """Switch to the slots of another map, in stream order."""
        num_experts, most = self._slot_EC.shape
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(experts):
            slots[expert].append(slot)
        _write(self._slot_EC, [its + [its[0]] * (most - len(its)) for its in slots])
        _write(self._num_copies_E, [len(its) for its in slots])

    def digest(self) -> torch.Tensor:
        """64-bit digest of both tables as they are on the device: int64 [1]."""
        return digest([self._slot_EC, self._num_copies_E], self._slot_EC.device)

    def place(self, expert_TK: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
        """Count choices, int32 or int64 [T, K], and return their slots, int64 [T, K]."""
        expert_TK = expert_TK.long()
        counted_TK = rows.is_counted_T1.expand_as(expert_TK).long()
        self.load_E.scatter_add_(0, expert_TK.flatten(), counted_TK.flatten())
        return self._slot_EC[expert_TK, rows.position_T1 % self._num_copies_E[expert_TK]]


def _write(target: torch.Tensor, values: Sequence[object]) -> None:
    target.copy_(to_device(torch.tensor(values, dtype=target.dtype), target.device))
