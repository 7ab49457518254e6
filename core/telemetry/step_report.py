"""Reports of decode steps, for an engine or a worker: rows, drafts and tokens with their fates, and times.

A *row* is one sequence in one step. What a step computes is counted twice: by counters on the device, from the tensors
that also make the result (`computed`), and on the host as results are read, by what became of each row. Nothing is lost
between the two, so once every step was read, for rows, tokens and drafts at every place:

    computed = kept + cut + late + failed

No number is derived from another that it should be compared with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.core.distribution import Distribution

STEP_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
GAP_BOUNDS_S: Final = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
COUNT_BOUNDS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows and their contents.

    Attributes:
        num_rows: verify steps of one sequence.
        num_tokens: tokens emitted in them; a whole row emits one more than its accepted drafts.
        proposed_at: rows with a draft at each place, the first place first.
        accepted_at: rows in which that draft was accepted, together with all drafts before it.
    """

    num_rows: int
    num_tokens: int
    proposed_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        """Rows with any draft: what vLLM calls a draft."""
        return self.proposed_at[0] if self.proposed_at else 0

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafts proposed."""
        return sum(self.proposed_at)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of drafts accepted."""
        return sum(self.accepted_at)

    def __add__(self, other: "RowCounts") -> "RowCounts":
        return RowCounts(
            num_rows=self.num_rows + other.num_rows,
            num_tokens=self.num_tokens + other.num_tokens,
            proposed_at=_add(self.proposed_at, other.proposed_at),
            accepted_at=_add(self.accepted_at, other.accepted_at),
        )

    def __neg__(self) -> "RowCounts":
        return RowCounts(
            num_rows=-self.num_rows,
            num_tokens=-self.num_tokens,
            proposed_at=tuple(-count for count in self.proposed_at),
            accepted_at=tuple(-count for count in self.accepted_at),
        )


def no_rows(num_draft_tokens: int) -> RowCounts:
    """Make empty counts for `num_draft_tokens` places."""
    zeros = (0,) * num_draft_tokens
    return RowCounts(num_rows=0, num_tokens=0, proposed_at=zeros, accepted_at=zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCounts:
    """Counts of one draft method, or of steps without drafts.

    Attributes:
        num_steps: steps for which it made drafts.
        num_draft_tokens: its drafts in rows that were kept.
        num_accepted_tokens: those of them that were accepted.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def since(self, earlier: "MethodCounts") -> "MethodCounts":
        """Subtract an earlier report."""
        return MethodCounts(
            num_steps=self.num_steps - earlier.num_steps,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The steps of one runner so far.

    Attributes:
        num_steps: steps whose results were read.
        computed: counted on the device; includes steps in flight, though its copy on the host may be behind.
        kept: rows and tokens that requests got.
        cut: tokens and accepted drafts past the end of a sequence, in a row of which the others were kept.
        late: rows of sequences that had ended (a step in flight runs them once more).
        failed: rows that ended their sequence with an error.
        step_s: seconds from a step's start to its end, on the device.
        host_gap_s: seconds from a step's end to the next one's start, if a sequence continues from one to the other, so
            that there was work: how long the host made the device wait.
        step_tokens: tokens per step that requests got.
        step_sequences: rows per step.
        by_method: counts of each `DraftMethod` by name, and of "none".
    """

    num_steps: int
    computed: RowCounts
    kept: RowCounts
    cut: RowCounts
    late: RowCounts
    failed: RowCounts
    step_s: Distribution
    host_gap_s: Distribution
    step_tokens: Distribution
    step_sequences: Distribution
    by_method: Mapping[str, MethodCounts] = field(default_factory=dict)

    @property
    def read(self) -> RowCounts:
        """All rows whose results were read."""
        return self.kept + self.cut + self.late + self.failed

    @property
    def verified(self) -> RowCounts:
        """Kept rows with their cut parts: what vLLM's counters of drafts count."""
        return self.kept + self.cut

    @property
    def acceptance_per_position(self) -> tuple[float | None, ...]:
        """Share of the drafts proposed at each place that was accepted; None where none was proposed."""
        rows = self.verified
        pairs = zip(rows.accepted_at, rows.proposed_at, strict=True)
        return tuple(accepted / proposed if proposed else None for accepted, proposed in pairs)

    @property
    def mean_acceptance_len(self) -> float | None:
        """As in vLLM: tokens per row that had drafts, its accepted drafts and one more; None without any."""
        rows = self.verified
        return 1 + rows.num_accepted_tokens / rows.num_drafts if rows.num_drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that requests got per step; None without any step."""
        return self.step_tokens.mean

    def since(self, earlier: "StepReport") -> "StepReport":
        """Subtract an earlier report of the same runner."""
        return StepReport(
            num_steps=self.num_steps - earlier.num_steps,
            computed=self.computed + -earlier.computed,
            kept=self.kept + -earlier.kept,
            cut=self.cut + -earlier.cut,
            late=self.late + -earlier.late,
            failed=self.failed + -earlier.failed,
            step_s=self.step_s.since(earlier.step_s),
            host_gap_s=self.host_gap_s.since(earlier.host_gap_s),
            step_tokens=self.step_tokens.since(earlier.step_tokens),
            step_sequences=self.step_sequences.since(earlier.step_sequences),
            by_method={
                name: counts.since(earlier.by_method.get(name, MethodCounts()))
                for name, counts in self.by_method.items()
            },
        )


def _add(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(first, second, strict=True))
