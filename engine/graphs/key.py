"""What a graph is of, and which graphs a runner captures: shapes alone, nothing is computed here.

A graph's kind is said, never read off its sizes: verification without drafts, and one more draft, have the same. A
step of n sequences runs at the next captured size, its tables at the next captured width; both are padded. Widths are
powers of two, so at most half of what attention reads is padding. Where sequences are dealt to ranks that attend, a
graph has room for as many of each rank; from what a plan says of their owners, every rank chooses the same.

Legend: B sequences, C of them each rank's at most, Q rows of each, W entries of a block table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

MIN_WIDTH = 16  # blocks; below it, captures would cost more than they save
MAX_NODES = 20_000  # of a graph in invariant numerics, where every 64 keys take launches of their own
NODES_PER_STEP = 12  # of such 64 keys, in one layer, about
_SLACK = 1.25  # of a rank's share of sequences, in a deal that is about even


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
        num_each: C; 0 where each rank attends for all sequences.
    """

    kind: GraphKind
    num_rows: int
    num_sequences: int
    width: int
    num_each: int = 0

    @property
    def num_attended(self) -> int:
        """Sequences that a rank attends for, those of padding among them."""
        return self.num_each or self.num_sequences

    def __str__(self) -> str:
        room = f", {self.num_each} at each rank" if self.num_each else ""
        return f"{self.kind.value} of {self.num_sequences} x {self.num_rows} rows over {self.width} blocks{room}"


Shape = tuple[int, int, int]
"""B, W and C of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Which graphs there are.

    Attributes:
        sizes: numbers of sequences, ascending.
        widths: of block tables, ascending.
        num_draft_tokens: the most drafts of a step; fewer have graphs of their own.
        max_entries: of a graph's tables at most: those of the sequences that a rank attends for.
        rows: of steps with chunks of prompts, ascending; see `piecewise`.
        has_mtp: an MTP head makes the drafts, and has graphs of its own.
        num_owners: ranks that sequences are dealt to; 1: each rank attends for all.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    num_draft_tokens: int
    max_entries: int
    rows: tuple[int, ...] = ()
    has_mtp: bool = True
    num_owners: int = 1

    def keys(self) -> Iterator[GraphKey]:
        """Every graph, the largest first, so that what the later ones need is in the memory of the first."""
        shapes = [
            (size, width, num_each)
            for size in self.sizes
            for width in self.widths
            for num_each in self._rooms(size)
            if self._fits(size, width, num_each)
        ]
        for shape in sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[0], -shape[2])):
            for num_drafts in range(self.num_draft_tokens, -1, -1):
                yield GraphKey(GraphKind.VERIFY, num_drafts + 1, *shape)
                if (
                    self.has_mtp and self.num_draft_tokens >= 1
                ):  # with no drafts now, too: the MTP head sees every token
                    yield GraphKey(GraphKind.DRAFT_PREFILL, num_drafts + 1, *shape)
            if self.has_mtp and self.num_draft_tokens >= 2:
                yield GraphKey(GraphKind.DRAFT, 1, *shape)

    def shape_for(self, num_sequences: int, num_blocks: int, most_owned: int = 0) -> Shape | EagerReason:
        """What a step of so many sequences and blocks is padded to; of dealt ones a rank has `most_owned` at most."""
        size = _next(self.sizes, num_sequences)
        if size is None:
            return EagerReason.SEQUENCES
        width, num_each = _next(self.widths, num_blocks), _next(self._rooms(size), most_owned)
        assert num_each is not None
        if width is None or not self._fits(size, width, num_each):
            return EagerReason.CONTEXT
        return size, width, num_each

    def step_keys(self, shape: Shape, num_drafts: int) -> tuple[GraphKey, ...] | EagerReason:
        """The graphs of a step of this shape, in no order: all of them, or it is computed as it comes."""
        if num_drafts > self.num_draft_tokens:
            return EagerReason.DRAFTS
        keys = [GraphKey(GraphKind.VERIFY, num_drafts + 1, *shape)]
        if self.has_mtp and self.num_draft_tokens >= 1:
            keys.append(GraphKey(GraphKind.DRAFT_PREFILL, num_drafts + 1, *shape))
        if self.has_mtp and num_drafts >= 2:
            keys.append(GraphKey(GraphKind.DRAFT, 1, *shape))
        return tuple(keys)

    def _rooms(self, size: int) -> tuple[int, ...]:
        """C of graphs of B sequences, ascending: for deals that are about even, and for any.

        About even: no rank has more than its share and a quarter of it, rounded up to a size.
        """
        if self.num_owners == 1:
            return (0,)
        even = _next(self.sizes, ceil(_SLACK * size / self.num_owners))
        return (size,) if even is None or even >= size else (even, size)

    def _fits(self, size: int, width: int, num_each: int) -> bool:
        return (num_each or size) * width <= self.max_entries


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
