"""Decides which expert lies in which slot of which rank, to balance tokens over ranks. Pure functions, without torch.

A map is a tuple with the expert of each slot; slots are dealt to ranks in order, equally many to each. An expert may
lie in several slots, its *copies*, which share its tokens evenly. The algorithm is that of DeepSeek's EPLB: the hottest
expert gets the next copy; then copies are dealt, the heaviest first, to the least loaded rank (longest processing
time). No rank gets two copies of an expert. All arithmetic uses whole numbers, so that the same loads give the same map
on any machine.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

ExpertMap = tuple[int, ...]
LEAST_GAIN: Final = 50  # weights move only if the most loaded rank sheds more than one in this many of its tokens


def first_map(num_experts: int, num_redundant: int) -> ExpertMap:
    """Return the initial map: experts in order, then copies of the first ones, regardless of loads."""
    return tuple(slot % num_experts for slot in range(num_experts + num_redundant))


def rank_loads(loads: Sequence[int], experts: ExpertMap, *, world_size: int) -> list[int]:
    """Load of each rank for these tokens per expert, times a factor that all maps with as many slots share."""
    weights = _weights(loads, Counter(experts))
    length = len(experts) // world_size
    return [sum(weights[its] for its in experts[at : at + length]) for at in range(0, len(experts), length)]


def balance(layers: Sequence[Sequence[int]]) -> float:
    """Mean load of ranks divided by the largest, over layers that each wait for their most loaded rank.

    `layers` holds loads from `rank_loads`. 1 if all ranks get equally much, or nothing; 1 / world_size if one gets all.
    """
    most = sum(map(max, layers))
    return sum(map(sum, layers)) / (len(layers[0]) * most) if most else 1.0


def balanced_map(loads: Sequence[int], current: ExpertMap, *, world_size: int) -> ExpertMap:
    """Return a map that relieves the most loaded rank enough to be worth the moves, else `current`.

    Args:
        loads: tokens of each expert, >= 0.
        current: map to replace, with as many slots, in which each expert occurs.
        world_size: number of ranks, which divides the number of slots. At most `world_size` slots per expert.
    """
    num_slots = len(current)
    assert num_slots % world_size == 0
    assert len(loads) <= num_slots <= len(loads) * world_size
    groups = _deal(loads, _copies(loads, num_slots, world_size), num_slots // world_size, world_size)
    found = _in_place(groups, current, world_size)
    most, had = (max(rank_loads(loads, experts, world_size=world_size)) for experts in (found, current))
    return found if (had - most) * LEAST_GAIN > had else current


def _weights(loads: Sequence[int], copies: Counter[int]) -> list[int]:
    """Load of one copy of each expert, times a number that any possible number of copies divides."""
    scale = math.lcm(*range(1, copies.total() - len(loads) + 2))
    return [load * (scale // copies[expert]) for expert, load in enumerate(loads)]


def _copies(loads: Sequence[int], num_slots: int, world_size: int) -> Counter[int]:
    """Number of slots of each expert."""
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
    """Experts of each rank, `length` different ones."""
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
    """Return a full rank without the expert, after moving one of its experts to `free`, which already has this one.

    There always is such a rank: it has at least two experts that `free` lacks.
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
    """Convert groups to a map: each group goes to a rank that holds much of it, and experts stay in their slots."""
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
