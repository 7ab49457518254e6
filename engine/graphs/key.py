"""Identifies graphs by shape, and determines which ones a runner captures; computes nothing else.

A graph's kind is explicit, because it cannot be derived from its sizes: verification without drafts and one further
draft have the same. A step of n sequences runs at the next captured size, and its tables at the next captured width;
both are padded. Widths are powers of two, so at most half of what attention reads is padding. If sequences are
distributed over ranks that attend, a graph has room for an equal number on each rank; every rank chooses the same
graph, from the owners that a plan implies.

Legend: B sequences, C of them each rank's at most, Q rows of each, W entries of a block table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

MIN_WIDTH = 16  # blocks; narrower captures would cost more than they save
MAX_NODES = 20_000  # of a graph in invariant numerics, where every 64 keys need their own launches
NODES_PER_STEP = 12  # launches per 64 keys in one layer, approximately
_SLACK = 1.25  # times a rank's share of sequences, if they are distributed about evenly


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
    """The identity of one graph.

    Attributes:
        kind: what it computes.
        num_rows: Q; k + 1 to verify k drafts, 1 to make a further draft.
        num_sequences: B.
        width: W.
        num_each: C; 0 if each rank attends for all sequences.
    """

    kind: GraphKind
    num_rows: int
    num_sequences: int
    width: int
    num_each: int = 0

    @property
    def num_attended(self) -> int:
        """Number of sequences that a rank attends for, including padding."""
        return self.num_each or self.num_sequences

    def __str__(self) -> str:
        room = f", {self.num_each} at each rank" if self.num_each else ""
        return f"{self.kind.value} of {self.num_sequences} x {self.num_rows} rows over {self.width} blocks{room}"


Shape = tuple[int, int, int]
"""B, W and C of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The set of graphs.

    Attributes:
        sizes: numbers of sequences, ascending.
        widths: widths of block tables, ascending.
        num_draft_tokens: the most drafts of a step; each smaller number has graphs of its own.
        max_entries: maximum entries of a graph's tables, counting the sequences that a rank attends for.
        rows: numbers of rows of steps with prefill chunks, ascending; see `piecewise`.
        has_mtp: an MTP head makes the drafts, and has graphs of its own.
        num_owners: number of ranks that sequences are distributed over; 1: each rank attends for all.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    num_draft_tokens: int
    max_entries: int
    rows: tuple[int, ...] = ()
    has_mtp: bool = True
    num_owners: int = 1

    def keys(self) -> Iterator[GraphKey]:
        """Every graph, largest first, so that later ones fit in the memory of the first."""
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
        """The shape that a step is padded to; with distributed sequences, each rank owns at most `most_owned`."""
        size = _next(self.sizes, num_sequences)
        if size is None:
            return EagerReason.SEQUENCES
        width, num_each = _next(self.widths, num_blocks), _next(self._rooms(size), most_owned)
        assert num_each is not None
        if width is None or not self._fits(size, width, num_each):
            return EagerReason.CONTEXT
        return size, width, num_each

    def step_keys(self, shape: Shape, num_drafts: int) -> tuple[GraphKey, ...] | EagerReason:
        """The graphs of a step of this shape, in no order: the step needs all of them, or runs eagerly."""
        if num_drafts > self.num_draft_tokens:
            return EagerReason.DRAFTS
        keys = [GraphKey(GraphKind.VERIFY, num_drafts + 1, *shape)]
        if self.has_mtp and self.num_draft_tokens >= 1:
            keys.append(GraphKey(GraphKind.DRAFT_PREFILL, num_drafts + 1, *shape))
        if self.has_mtp and num_drafts >= 2:
            keys.append(GraphKey(GraphKind.DRAFT, 1, *shape))
        return tuple(keys)

    def _rooms(self, size: int) -> tuple[int, ...]:
        """C of graphs of B sequences, ascending: for about even distributions, and for any.

        About even: no rank has more than 1.25 times its share, rounded up to a size.
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
    """`GraphSizes.max_entries` in invariant numerics, where the number of launches grows with the context."""
    return max(MIN_WIDTH, MAX_NODES // (num_layers * NODES_PER_STEP) * 64 // block_size)


def _next(values: Sequence[int], at_least: int) -> int | None:
    return next((value for value in values if value >= at_least), None)
