"""Which expert lies in which slot of which rank, so that ranks get about as many tokens. Pure functions, without torch.

A map is a tuple with the expert of each slot; slots are dealt to ranks in order, as many to each. An expert may lie in
several slots, its *copies*, which share its tokens evenly. The idea is DeepSeek's EPLB: the hottest expert gets the
next copy, then copies are dealt, the heaviest first, to the rank that has least (longest processing time). No rank gets
two copies of an expert. All is done in whole numbers, so that the same loads make the same map anywhere.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

ExpertMap = tuple[int, ...]
LEAST_GAIN: Final = 50  # a part in so many of the most loaded rank's tokens: for less, no weights are moved


def first_map(num_experts: int, num_redundant: int) -> ExpertMap:
    """The map that is loaded: experts in order, then copies of the first ones; it knows nothing of loads."""
    return tuple(slot % num_experts for slot in range(num_experts + num_redundant))


def rank_loads(loads: Sequence[int], experts: ExpertMap, *, world_size: int) -> list[int]:
    """What each rank gets of so many tokens of each expert, times a number that all maps of as many slots share."""
    weights = _weights(loads, Counter(experts))
    length = len(experts) // world_size
    return [sum(weights[its] for its in experts[at : at + length]) for at in range(0, len(experts), length)]


def balance(layers: Sequence[Sequence[int]]) -> float:
    """Mean load of ranks by the largest, of layers that wait for their most loaded rank each, given by `rank_loads`.

    1 where all ranks get as much, or nothing; 1 / world_size where one gets all.
    """
    most = sum(map(max, layers))
    return sum(map(sum, layers)) / (len(layers[0]) * most) if most else 1.0


def balanced_map(loads: Sequence[int], current: ExpertMap, *, world_size: int) -> ExpertMap:
    """A map whose most loaded rank has less than in `current`, worth its moves; else `current`.

    Args:
        loads: of each expert, in tokens, >= 0.
        current: the map that it is to replace, with as many slots; each expert is in it.
        world_size: ranks. The slots are a multiple of them, and at most `world_size` for each expert.
    """
    num_slots = len(current)
    assert num_slots % world_size == 0
    assert len(loads) <= num_slots <= len(loads) * world_size
    groups = _deal(loads, _copies(loads, num_slots, world_size), num_slots // world_size, world_size)
    found = _in_place(groups, current, world_size)
    most, had = (max(rank_loads(loads, experts, world_size=world_size)) for experts in (found, current))
    return found if (had - most) * LEAST_GAIN > had else current


def _weights(loads: Sequence[int], copies: Counter[int]) -> list[int]:
    """What one copy of each expert gets, times what any number of copies divides."""
    scale = math.lcm(*range(1, copies.total() - len(loads) + 2))
    return [load * (scale // copies[expert]) for expert, load in enumerate(loads)]


def _copies(loads: Sequence[int], num_slots: int, world_size: int) -> Counter[int]:
    """How many slots each expert gets."""
    copies = Counter({expert: 1 for expert in range(len(loads))})
    hottest = [(Fraction(-load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(hottest)
    for _ in range(num_slots - len(loads)):
        _, expert = heapq.heappop(hottest)
        copies[expert] += 1
        if copies[expert] < world_size:
            heapq.heappush(hottest, (Fraction(-loads[expert], copies[expert]), expert))
    return copies


def _deal(loads: Sequence[int], copies: Counter[int], length: int, world_size: int) -> list[set[int]]:
    """The experts of each rank, `length` different ones."""
    weights = _weights(loads, copies)
    groups: list[set[int]] = [set() for _ in range(world_size)]
    totals = [0] * world_size
    for expert in sorted(copies, key=lambda its: (-weights[its], its)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(world_size) if len(groups[rank]) < length]
            open_ranks = [rank for rank in free if expert not in groups[rank]]
            if open_ranks:
                rank = min(open_ranks, key=lambda its: (totals[its], its))
            else:
                rank = _make_room(groups, totals, weights, expert, free[0])
            groups[rank].add(expert)
            totals[rank] += weights[expert]
    return groups


def _make_room(groups: list[set[int]], totals: list[int], weights: list[int], expert: int, free: int) -> int:
    """A full rank without the expert, once one of its experts has moved to the rank that is free and has this one.

    There always is one: the full rank has at least two that the other has not.
    """
    moves = [
        (max(totals[free] + weights[other], totals[rank] - weights[other] + weights[expert]), rank, other)
        for rank, group in enumerate(groups)
        if expert not in group
        for other in group - groups[free]
    ]
    _, rank, other = min(moves)
    groups[rank].remove(other)
    groups[free].add(other)
    totals[rank] -= weights[other]
    totals[free] += weights[other]
    return rank


def _in_place(groups: list[set[int]], current: ExpertMap, world_size: int) -> ExpertMap:
    """The groups as a map, each at a rank that has much of it, where an expert stays in its slot."""
    length = len(current) // world_size
    held = [current[rank * length : (rank + 1) * length] for rank in range(world_size)]
    pairs = [
        (-len(group.intersection(its)), rank, at) for at, group in enumerate(groups) for rank, its in enumerate(held)
    ]
    group_of: dict[int, int] = {}
    for _, rank, at in sorted(pairs):
        if rank not in group_of and at not in group_of.values():
            group_of[rank] = at
    experts: list[int] = []
    for rank, its in enumerate(held):
        left, slots = set(groups[group_of[rank]]), dict.fromkeys(range(length), -1)
        for slot, expert in enumerate(its):
            if expert in left:
                left.remove(expert)
                slots[slot] = expert
        new = iter(sorted(left))
        experts += [next(new) if expert < 0 else expert for expert in slots.values()]
    return tuple(experts)
