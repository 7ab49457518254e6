"""Describes which of a layer's experts a rank holds, where ranks hold different whole experts. Without torch."""

from dataclasses import dataclass

from baton.kernels.moe.expert_map import first_map


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """Consecutive slots with an expert each; the other slots of the layer are at other ranks.

    If experts do not move, each expert has the slot of its own number.

    Attributes:
        first: number of the first slot, as the router counts.
        count: number of slots.
        num_all: slots of the layer.
        num_redundant: number of slots beyond the number of experts, so that some experts have several.
        may_move: whether slots change their experts while the model serves (`kernels.moe.expert_slots`).
    """

    first: int
    count: int
    num_all: int
    num_redundant: int = 0
    may_move: bool = False

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer."""
        return self.num_all - self.num_redundant

    @property
    def world_size(self) -> int:
        """Number of ranks that share the layer."""
        return self.num_all // self.count

    @property
    def numbers(self) -> tuple[int, ...]:
        """Experts that are loaded into the slots, as the router counts."""
        return first_map(self.num_experts, self.num_redundant)[self.first : self.first + self.count]

    @classmethod
    def of_rank(cls, num_experts: int, rank: int, size: int, num_redundant: int | None = None) -> "HeldExperts":
        """Slots of one of `size` ranks, which divides the slots; with a number of redundant ones, experts may move."""
        num_all = num_experts + (num_redundant or 0)
        count = num_all // size
        return cls(rank * count, count, num_all, num_redundant or 0, num_redundant is not None)
