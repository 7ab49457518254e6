"""Counts on the device what steps proposed and accepted, from the result tensors themselves.

A row with p drafts, a of them accepted, adds 1 to element (p, a) of one small table. The numbers of rows, drafts and
tokens are margins of this table, so no count can be forgotten, and nothing waits for the host. A few results are added
at a time, in the executor's order, which costs a step next to nothing. The table counts what was computed
(`core.telemetry.step_report`).

Legend: B sequences of a step, Q = most drafts of a step + 1, C columns of a result, P results to be added.
"""

from typing import Final

import torch

from baton.core.telemetry.step_report import RowCounts
from baton.kernels.sampling.verify import NOT_FINITE

IDLE: Final = (1 << 31) - 1  # in place of an accepted length: the step emitted nothing for this sequence
_MAX_PENDING: Final = 16


class StepCounters:
    """Counters of one runner. `add` and `copy` run on its executor.

    Args:
        num_draft_tokens: maximum number of drafts in a step.
        device: device of the steps.
    """

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        self._num_columns = num_draft_tokens + 1
        self._rows_QQ = torch.zeros(self._num_columns**2, dtype=torch.int64, device=device)
        self._slots_B: torch.Tensor | None = None
        self._num_drafts = -1
        self._tells_proposed = False
        self._proposed_B = torch.zeros(0, dtype=torch.int64, device=device)
        self._pending: list[torch.Tensor] = []

    @property
    def num_values(self) -> int:
        """Number of elements of a copy."""
        return self._num_columns**2

    def add(
        self,
        slots_B: torch.Tensor,
        draft_cap_B: torch.Tensor,
        num_drafts: int,
        result_BC: torch.Tensor,
        *,
        tells_proposed: bool = False,
    ) -> None:
        """Count one step.

        Args:
            slots_B: slots of its sequences; the same tensor object only while nothing about the batch has changed.
            draft_cap_B: int64, drafts each sequence may accept.
            num_drafts: drafts made in this step.
            result_BC: int64; column 0 is the number of accepted drafts, `IDLE` if the sequence emitted nothing, or that
                number combined with `NOT_FINITE`; the last two are not counted. Must not be modified afterwards.
            tells_proposed: the last column says how many drafts each sequence had; else each had as many as it may
                accept.
        """
        if self._slots_B is not slots_B or self._num_drafts != num_drafts or self._tells_proposed != tells_proposed:
            self._add_pending()
            self._slots_B, self._num_drafts, self._tells_proposed = slots_B, num_drafts, tells_proposed
            self._proposed_B = draft_cap_B.clamp(max=num_drafts)
        self._pending.append(result_BC)
        if len(self._pending) == _MAX_PENDING:
            self._add_pending()

    def copy(self) -> torch.Tensor:
        """A copy of the current counters, int64 [num_values], which later steps do not modify."""
        self._add_pending()
        return self._rows_QQ.clone()

    def read(self, values: torch.Tensor) -> RowCounts:
        """Convert a copy, on the host, to row counts."""
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

    def _add_pending(self) -> None:
        if self._pending:
            results_PBC = torch.stack(self._pending)
            self._pending.clear()
            accepted_PB = results_PBC[:, :, 0]
            proposed_PB = results_PBC[:, :, -1] if self._tells_proposed else self._proposed_B
            is_idle_PB = accepted_PB >= NOT_FINITE
            places_PB = accepted_PB.masked_fill(is_idle_PB, 0) + proposed_PB * self._num_columns
            self._rows_QQ.index_add_(0, places_PB.flatten(), (~is_idle_PB).to(torch.int64).flatten())


def mark_idle(accepted_len_B: torch.Tensor) -> torch.Tensor:
    """Accepted lengths as results store them: `IDLE` replaces -1."""
    return accepted_len_B.masked_fill(accepted_len_B < 0, IDLE)


def at_least(by_length: list[int]) -> tuple[int, ...]:
    """Convert the number of rows of each length, from 0 on, to the number with at least 1, 2, ..."""
    return tuple(sum(by_length[length:]) for length in range(1, len(by_length)))
