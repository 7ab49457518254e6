"""What a graph is of, and which graphs a runner captures: shapes alone, nothing is computed here.

A graph's kind is said, never read off its sizes: verification without drafts, and one more draft, have the same. A
step of n sequences runs at the next captured size, its tables at the next captured width; both are padded. Widths are
powers of two, so at most half of what attention reads is padding.

Legend: B sequences, Q rows of each, W entries of a block table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

MIN_WIDTH = 16  # blocks; below it, captures would cost more than they save
MAX_NODES = 20_000  # of a graph in invariant numerics, where every 64 keys take launches of their own
NODES_PER_STEP = 12  # of such 64 keys, in one layer, about


class GraphKind(Enum):
    """What a graph computes; see `passes`."""

    VERIFY = "verify"
    DRAFT = "draft"
    DRAFT_PREFILL = "draft prefill"


class EagerReason(Enum):
    """Why a step was not replayed."""

    SEQUENCES = "more sequences than the largest captured size"
    CONTEXT = "a context beyond what is captured for so many sequences"
    DRAFTS = "a number of drafts that nothing is captured for"
    FAILED = "a size that could not be captured"
    ROWS = "with chunks, more rows than any graph"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph.

    Attributes:
        kind: what it computes.
        num_rows: Q; k + 1 drafts are verified, one entry is drafted.
        num_sequences: B.
        width: W.
    """

    kind: GraphKind
    num_rows: int
    num_sequences: int
    width: int

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.num_sequences} x {self.num_rows} rows over {self.width} blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Which graphs there are.

    Attributes:
        sizes: numbers of sequences, ascending.
        widths: of block tables, ascending.
        num_draft_tokens: the most drafts of a step; fewer have graphs of their own.
        max_entries: B * W of a graph at most.
        rows: of steps with chunks of prompts, ascending; see `piecewise`.
        has_mtp: an MTP head makes the drafts, and has graphs of its own.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    num_draft_tokens: int
    max_entries: int
    rows: tuple[int, ...] = ()
    has_mtp: bool = True

    def keys(self) -> Iterator[GraphKey]:
        """Every graph, the largest first, so that what the later ones need is in the memory of the first."""
        shapes = [(size, width) for size in self.sizes for width in self.widths if size * width <= self.max_entries]
        for size, width in sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[0])):
            for num_drafts in range(self.num_draft_tokens, -1, -1):
                yield GraphKey(GraphKind.VERIFY, num_drafts + 1, size, width)
                if (
                    self.has_mtp and self.num_draft_tokens >= 1
                ):  # with no drafts now, too: the MTP head sees every token
                    yield GraphKey(GraphKind.DRAFT_PREFILL, num_drafts + 1, size, width)
            if self.has_mtp and self.num_draft_tokens >= 2:
                yield GraphKey(GraphKind.DRAFT, 1, size, width)

    def shape_for(self, num_sequences: int, num_blocks: int) -> tuple[int, int] | EagerReason:
        """(B, W) that a step of so many sequences and blocks is padded to."""
        size = _next(self.sizes, num_sequences)
        if size is None:
            return EagerReason.SEQUENCES
        width = _next(self.widths, num_blocks)
        if width is None or size * width > self.max_entries:
            return EagerReason.CONTEXT
        return size, width

    def step_keys(self, shape: tuple[int, int], num_drafts: int) -> tuple[GraphKey, ...] | EagerReason:
        """The graphs of a step of this shape, in no order: all of them, or it is computed as it comes."""
        if num_drafts > self.num_draft_tokens:
            return EagerReason.DRAFTS
        keys = [GraphKey(GraphKind.VERIFY, num_drafts + 1, *shape)]
        if self.has_mtp and self.num_draft_tokens >= 1:
            keys.append(GraphKey(GraphKind.DRAFT_PREFILL, num_drafts + 1, *shape))
        if self.has_mtp and num_drafts >= 2:
            keys.append(GraphKey(GraphKind.DRAFT, 1, *shape))
        return tuple(keys)


def default_sizes(max_num_sequences: int) -> tuple[int, ...]:
    """Powers of two up to 8, then multiples of 8 up to 32, then powers of two and one and a half times those."""
    sizes = {1, 2, 4, 8, 16, 24, 32, max_num_sequences}
    power = 32
    while power < max_num_sequences:
        sizes |= {power * 3 // 2, power * 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= max_num_sequences))


def default_widths(max_blocks: int) -> tuple[int, ...]:
    """Powers of two from `MIN_WIDTH` on; the last is `max_blocks`, so that every sequence fits."""
    widths = []
    width = MIN_WIDTH
    while width < max_blocks:
        widths.append(width)
        width *= 2
    return (*widths, max_blocks)


def max_invariant_entries(num_layers: int, block_size: int) -> int:
    """`GraphSizes.max_entries` in invariant numerics, where what is launched grows with the context."""
    return max(MIN_WIDTH, MAX_NODES // (num_layers * NODES_PER_STEP) * 64 // block_size)


def _next(values: Sequence[int], at_least: int) -> int | None:
    return next((value for value in values if value >= at_least), None)
