"""What ranks give each other so that one map of a layer's experts takes the place of another. Without torch.

An exchange has rounds. In each of them every rank gives one expert to all, of which each keeps what it needs: so rounds
have one shape whatever moves, and an expert crosses once however many ranks take it.
"""

from dataclasses import dataclass

from baton.kernels.moe.expert_map import ExpertMap


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Slots are numbered over all ranks.

    Attributes:
        given: of each round, the slot that each rank gives; one that no rank takes where it has none to give.
        taken: by slot that gets an expert of another rank: the round, and the rank that gives it.
        copied: by slot that gets an expert of its own rank: a slot that has it.
    """

    given: tuple[tuple[int, ...], ...]
    taken: dict[int, tuple[int, int]]
    copied: dict[int, int]

    @classmethod
    def between(cls, old: ExpertMap, new: ExpertMap, *, world_size: int) -> "ExpertMoves":
        """From one map to another over the same slots. Of ranks with the same expert, the one that gives least does."""
        length = len(old) // world_size
        slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(old):
            slots_of.setdefault(expert, []).append(slot)
        copied: dict[int, int] = {}
        takers: dict[int, list[int]] = {}
        for slot, expert in enumerate(new):
            if expert == old[slot]:
                continue
            own = next((its for its in slots_of[expert] if its // length == slot // length), None)
            if own is None:
                takers.setdefault(expert, []).append(slot)
            else:
                copied[slot] = own
        gives: list[list[int]] = [[] for _ in range(world_size)]
        taken: dict[int, tuple[int, int]] = {}
        for expert, its_takers in takers.items():
            source = min(slots_of[expert], key=lambda slot: (len(gives[slot // length]), slot))
            rank = source // length
            taken |= dict.fromkeys(its_takers, (len(gives[rank]), rank))
            gives[rank].append(source)
        num_rounds = max(map(len, gives))
        given = tuple(
            tuple(its[at] if at < len(its) else rank * length for rank, its in enumerate(gives))
            for at in range(num_rounds)
        )
        return cls(given, taken, copied)

    @property
    def num_operations(self) -> int:
        """Rounds, the last of which ends the exchange; one at least."""
        return max(1, len(self.given))
