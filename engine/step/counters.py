"""Counters on the device: what steps proposed and accepted, added up from the very tensors of their results.

A row of a step that had p drafts and accepted a of them adds 1 to the element (p, a) of one small tensor; everything
else follows from it. So nothing waits for the host, and no count can be forgotten: rows, drafts and tokens are margins
of one table. A few results are added at a time, in the order of the executor, which costs a step next to nothing. It
counts what was computed (`core.telemetry.step_report`).

Legend: B sequences of a step, Q = most drafts of a step + 1, C columns of a result, P results to be added.
"""

from typing import Final

import torch

from baton.core.telemetry.step_report import RowCounts
from baton.kernels.sampling.verify import NOT_FINITE

IDLE: Final = (1 << 31) - 1  # instead of a number of drafts: the step made nothing of this sequence
_MAX_PENDING: Final = 16


class StepCounters:
    """Of one runner. `add` and `copy` belong to its executor.

    Args:
        num_draft_tokens: most drafts of a step.
        device: of the steps.
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
        """Elements of a copy."""
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
            slots_B: of its sequences; the same tensor only while nothing about the batch has changed.
            draft_cap_B: int64, drafts each sequence may accept.
            num_drafts: made in this step.
            result_BC: int64, of each sequence first the number of drafts that stand, `IDLE` if it emitted nothing,
                or that number and `NOT_FINITE`: neither is counted. It must not be changed afterwards.
            tells_proposed: its last column says how many drafts each sequence had; else each had all it may accept.
        """
        if self._slots_B is not slots_B or self._num_drafts != num_drafts or self._tells_proposed != tells_proposed:
            self._add_pending()
            self._slots_B, self._num_drafts, self._tells_proposed = slots_B, num_drafts, tells_proposed
            self._proposed_B = draft_cap_B.clamp(max=num_drafts)
        self._pending.append(result_BC)
        if len(self._pending) == _MAX_PENDING:
            self._add_pending()

    def copy(self) -> torch.Tensor:
        """The counters as of now, int64 [num_values]; a tensor of its own, which later steps leave alone."""
        self._add_pending()
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
    """Accepted lengths as results hold them: `IDLE` for -1."""
    return accepted_len_B.masked_fill(accepted_len_B < 0, IDLE)


def at_least(by_length: list[int]) -> tuple[int, ...]:
    """From how many have each length, 0 first, to how many have at least 1, 2, ..."""
    return tuple(sum(by_length[length:]) for length in range(1, len(by_length)))
