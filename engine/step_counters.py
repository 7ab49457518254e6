"""Counters on the device: what steps proposed and accepted, added up by the step from the tensors of its result.

A row of a step that had p drafts and accepted a of them adds 1 to the element (p, a) of one small tensor; everything
else follows from it. So a step costs two operations, nothing waits for the host, and no count can be forgotten: rows,
drafts and tokens are margins of one table. It counts what was computed, whoever wants it (`core.step_report`).

Legend: B sequences of a step, Q = most drafts of a step + 1.
"""

import torch

from baton.core.step_report import RowCounts


class StepCounters:
    """Of one runner. `add` and `copy` belong to its lane.

    Args:
        num_draft_tokens: most drafts of a step.
        device: of the steps.
    """

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        self._num_columns = num_draft_tokens + 1
        self._rows_QQ = torch.zeros(self._num_columns**2, dtype=torch.int64, device=device)
        self._slots_B: torch.Tensor | None = None
        self._num_drafts = -1
        self._first_B = self._ones_B = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def num_values(self) -> int:
        """Elements of a copy."""
        return self._num_columns**2

    def add(
        self, slots_B: torch.Tensor, draft_cap_B: torch.Tensor, num_drafts: int, accepted_len_B: torch.Tensor
    ) -> None:
        """Count one step.

        Args:
            slots_B: of its sequences; the same tensor only while nothing about the batch has changed.
            draft_cap_B: int64, drafts each sequence may accept.
            num_drafts: made in this step.
            accepted_len_B: int64, drafts that stand.
        """
        if self._slots_B is not slots_B or self._num_drafts != num_drafts:
            self._slots_B, self._num_drafts = slots_B, num_drafts
            self._first_B = draft_cap_B.clamp(max=num_drafts) * self._num_columns
            self._ones_B = torch.ones_like(self._first_B)
        self._rows_QQ.scatter_add_(0, self._first_B + accepted_len_B, self._ones_B)

    def copy(self) -> torch.Tensor:
        """The counters as of now, int64 [num_values]; a tensor of its own, which later steps leave alone."""
        return self._rows_QQ.clone()

    def read(self, values: torch.Tensor) -> RowCounts:
        """What a copy, on the host, says."""
        by_proposed: list[list[int]] = values.view(self._num_columns, self._num_columns).tolist()
        by_accepted = [sum(column) for column in zip(*by_proposed, strict=True)]
        num_rows = sum(by_accepted)
        accepted_at = at_least(by_accepted)
        return RowCounts(
            num_rows=num_rows,
            num_tokens=num_rows + sum(accepted_at),
            proposed_at=at_least([sum(row) for row in by_proposed]),
            accepted_at=accepted_at,
        )


def at_least(by_length: list[int]) -> tuple[int, ...]:
    """From how many have each length, 0 first, to how many have at least 1, 2, ..."""
    return tuple(sum(by_length[length:]) for length in range(1, len(by_length)))
