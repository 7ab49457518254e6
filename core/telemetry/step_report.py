"""What decode steps did: rows, drafts and tokens with their fates, and times; of an engine, or of a worker.

A *row* is one sequence in one step. What a step computes is counted twice: by counters on the device, from the tensors
that also make the result (`computed`), and on the host as results are read, by what became of each row. Nothing is lost
between the two, so of rows, tokens and drafts at every place

    computed = kept + cut + late + failed

once every step was read. No number is derived from another that it should be compared with.
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
    """Rows, and what was in them.

    Attributes:
        num_rows: verify steps of one sequence.
        num_tokens: emitted in them; of a whole row one more than drafts were accepted.
        proposed_at: rows that had a draft at each place, the first place first.
        accepted_at: rows in which it was accepted; all drafts before it were, too.
    """

    num_rows: int
    num_tokens: int
    proposed_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        """Rows that had any draft: what vLLM calls a draft."""
        return self.proposed_at[0] if self.proposed_at else 0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts proposed."""
        return sum(self.proposed_at)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted."""
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
    """Nothing yet, at so many places."""
    zeros = (0,) * num_draft_tokens
    return RowCounts(num_rows=0, num_tokens=0, proposed_at=zeros, accepted_at=zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCounts:
    """What one method made, or steps without drafts.

    Attributes:
        num_steps: that it made drafts for.
        num_draft_tokens: its drafts in rows that were kept.
        num_accepted_tokens: of those, accepted.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def since(self, earlier: "MethodCounts") -> "MethodCounts":
        """What came after an earlier report."""
        return MethodCounts(
            num_steps=self.num_steps - earlier.num_steps,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The steps of one runner so far.

    Attributes:
        num_steps: whose results were read.
        computed: counted on the device; steps in flight are ahead of the others, and a copy to the host may be behind.
        kept: what requests were given.
        cut: tokens and accepted drafts behind the end of a sequence, in a row of which the others were kept.
        late: rows of sequences that had ended (a step in flight runs them once more).
        failed: rows that ended their sequence with an error.
        step_s: seconds from a step's begin to its end, on the device.
        host_gap_s: seconds from a step's end to the next one's begin, where a sequence goes on from the one to the
            other, so that there was work; what the host made the device wait.
        step_tokens: tokens that requests were given, of each step.
        step_sequences: rows of each step.
        by_method: of each `DraftMethod` by name, and of "none".
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
        """Everything that results said."""
        return self.kept + self.cut + self.late + self.failed

    @property
    def verified(self) -> RowCounts:
        """Rows that were kept, whole: what vLLM's counters of drafts count."""
        return self.kept + self.cut

    @property
    def acceptance_per_position(self) -> tuple[float | None, ...]:
        """Of the drafts proposed at each place, the share accepted; None where none was proposed."""
        rows = self.verified
        pairs = zip(rows.accepted_at, rows.proposed_at, strict=True)
        return tuple(accepted / proposed if proposed else None for accepted, proposed in pairs)

    @property
    def mean_acceptance_len(self) -> float | None:
        """As vLLM: tokens of a row that had drafts, its accepted drafts and one more; None without any."""
        rows = self.verified
        return 1 + rows.num_accepted_tokens / rows.num_drafts if rows.num_drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that requests were given by a step; None without any step."""
        return self.step_tokens.mean

    def since(self, earlier: "StepReport") -> "StepReport":
        """What happened after an earlier report of the same runner."""
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
