"""Plans the exchange by which ranks switch a layer's experts from one map to another. Without torch.

An exchange has rounds. In each round every rank sends one expert to all ranks, which keep what they need. So rounds
have one shape whatever moves, and an expert is sent once however many ranks take it.
"""

from dataclasses import dataclass

from baton.kernels.moe.expert_map import ExpertMap


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Moves of an exchange; slots are numbered over all ranks.

    Attributes:
        given: for each round, the slot that each rank sends; a slot that no rank takes, if a rank has nothing to send.
        taken: for each slot that gets an expert of another rank: the round, and the rank that sends it.
        copied: for each slot that gets an expert of its own rank: a slot that has the expert.
    """

    given: tuple[tuple[int, ...], ...]
    taken: dict[int, tuple[int, int]]
    copied: dict[int, int]

    @classmethod
    def between(cls, old: ExpertMap, new: ExpertMap, *, world_size: int) -> "ExpertMoves":
        """Plan the moves between two maps over the same slots; the least busy rank with an expert sends it."""
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
        """Number of rounds, the last of which ends the exchange; at least one."""
        return max(1, len(self.given))
