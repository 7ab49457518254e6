"""What ranks say about themselves; what rank 0 plans is in `step_plan`. `plan_codec` makes bytes of them.

Numbers are fixed: a kind that is deleted takes its number with it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Join:
    """First word of a rank on its connection.

    Attributes:
        rank: its own.
        token: of the TP group; whoever does not know it is nobody's rank.
    """

    rank: int
    token: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.

    Attributes:
        num_operations: collectives that the rank has begun.
    """

    num_operations: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank is loaded and follows from now on."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """Last word of a rank that ends.

    Attributes:
        error: `BatonError.to_wire` of why; empty: it was told to.
        is_victim: it could not go on without another rank; the fault is that one's.
    """

    error: str
    is_victim: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Rank 0 ends; nothing follows."""


CONTROL_KINDS: dict[int, type] = {1: Join, 2: Beat, 3: Ready, 4: Farewell, 5: Stop}
