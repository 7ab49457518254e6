"""Counts what became of the rows that steps computed, as their results are read; complements `engine.step.counters`.

A row is *kept*, or dropped whole because its sequence had ended (*late*) or ends with an error (*failed*). In a kept
row, everything past its sequence's end is *cut*. The reader of a step reports the fate of every row in one call, before
it publishes the tokens; a row that it forgets shows up as a difference from the device counters.
"""

import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from baton.core.distribution import Buckets
from baton.core.draft_method import DraftMethod
from baton.core.telemetry.step_report import COUNT_BOUNDS, MethodCounts, RowCounts, StepReport
from baton.engine.step.counters import at_least
from baton.engine.step.meter import StepMeter
from baton.engine.step.result import Emitted

NO_METHOD: Final = "none"
METHODS: Final = (NO_METHOD, *(method.value for method in DraftMethod))
_MAX_STEPS: Final = 64  # counted in one go, which is cheaper than one by one


class Fate(Enum):
    """Why something that was computed is not published."""

    LATE = auto()
    FAILED = auto()
    CUT = auto()


class Dropped(NamedTuple):
    """A dropped row, or with CUT everything after its first `num_kept` tokens."""

    fate: Fate
    row: Emitted
    num_kept: int = 0


class _Rows:
    """Sums of dropped rows."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_rows = self.num_tokens = 0
        self.proposed_at = [0] * num_draft_tokens
        self.accepted_at = [0] * num_draft_tokens

    def add(self, dropped: Dropped) -> None:
        row, num_kept = dropped.row, dropped.num_kept
        if row.is_idle:
            return
        self.num_tokens += len(row.token_ids) - num_kept
        if dropped.fate is not Fate.CUT:
            self.num_rows += 1
            for place in range(row.proposed_len):
                self.proposed_at[place] += 1
        for place in range(num_kept, row.accepted_len):
            self.accepted_at[place] += 1

    def read(self) -> RowCounts:
        return RowCounts(
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            proposed_at=tuple(self.proposed_at),
            accepted_at=tuple(self.accepted_at),
        )


class StepTally:
    """Counts of one runner's steps. One thread adds, any thread reads.

    Args:
        num_draft_tokens: maximum number of drafts in a step.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._longest_first = tuple(range(num_draft_tokens, -1, -1))
        self._steps: deque[tuple[list[int], list[int], int, Sequence[Dropped]]] = deque()  # not counted yet
        self._num_steps = 0
        self._num_tokens = 0
        self._by_proposed = [0] * (num_draft_tokens + 1)  # kept rows
        self._by_accepted = [0] * (num_draft_tokens + 1)
        self._dropped = {fate: _Rows(num_draft_tokens) for fate in Fate}
        self._step_tokens = Buckets(COUNT_BOUNDS)
        self._step_sequences = Buckets(COUNT_BOUNDS)
        self._by_method = {name: [0, 0, 0] for name in METHODS}  # steps, drafts, accepted drafts
        self._lock = threading.Lock()

    def add_step(
        self,
        proposed_lens: list[int],
        accepted_lens: list[int],
        num_emitted: int,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        """Count one step; takes ownership of the lists.

        Args:
            proposed_lens: drafts of each kept row.
            accepted_lens: how many of them were accepted and kept.
            num_emitted: tokens kept.
            dropped: everything else.
        """
        self._steps.append((proposed_lens, accepted_lens, num_emitted, dropped))
        if len(self._steps) >= _MAX_STEPS:
            with self._lock:
                self._sort()

    def add_drafts(self, method: DraftMethod | None, num_steps: int, num_proposed: int, num_accepted: int) -> None:
        """Count the drafts that a method made in kept rows; None: steps without drafts."""
        counts = self._by_method[NO_METHOD if method is None else method.value]
        counts[0] += num_steps
        counts[1] += num_proposed
        counts[2] += num_accepted

    def kept(self) -> RowCounts:
        """Counts of the rows and tokens that requests received."""
        with self._lock:
            self._sort()
            return self._kept()

    def report(self, meter: StepMeter, computed: RowCounts) -> StepReport:
        """The full report, including what the runner's meter knows.

        Args:
            meter: the runner's meter.
            computed: its device counters.
        """
        step_s, host_gap_s = meter.times()
        with self._lock:
            self._sort()
            return StepReport(
                num_steps=self._num_steps,
                computed=computed,
                kept=self._kept(),
                cut=self._dropped[Fate.CUT].read(),
                late=self._dropped[Fate.LATE].read(),
                failed=self._dropped[Fate.FAILED].read(),
                step_s=step_s,
                host_gap_s=host_gap_s,
                step_tokens=self._step_tokens.read(),
                step_sequences=self._step_sequences.read(),
                by_method={
                    name: MethodCounts(num_steps=steps, num_draft_tokens=drafts, num_accepted_tokens=accepted)
                    for name, (steps, drafts, accepted) in self._by_method.items()
                },
            )

    def _sort(self) -> None:
        for _ in range(len(self._steps)):
            proposed_lens, accepted_lens, num_emitted, dropped = self._steps.popleft()
            num_rows = len(proposed_lens)
            self._num_steps += 1
            self._num_tokens += num_emitted
            self._count(proposed_lens, self._by_proposed)
            self._count(accepted_lens, self._by_accepted)
            for item in dropped:
                self._dropped[item.fate].add(item)
                num_rows += item.fate is not Fate.CUT and not item.row.is_idle
            self._step_tokens.observe(num_emitted)
            self._step_sequences.observe(num_rows)

    def _count(self, lengths: list[int], by_length: list[int]) -> None:
        num_left = len(lengths)
        for length in self._longest_first:  # usually every row has the maximum
            num = lengths.count(length)
            by_length[length] += num
            num_left -= num
            if not num_left:
                break

    def _kept(self) -> RowCounts:
        return RowCounts(
            num_rows=sum(self._by_proposed),
            num_tokens=self._num_tokens,
            proposed_at=at_least(self._by_proposed),
            accepted_at=at_least(self._by_accepted),
        )
