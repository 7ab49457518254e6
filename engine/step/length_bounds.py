"""What the host knows of lengths while results are outstanding: bounds, by slot.

A step in flight adds at least one token to a sequence (but for one whose grammar is late: none, which is known when the
step is read) and at most one more than it may accept drafts. Both bounds are
moved when it is launched and made exact again by what it is then said to have emitted; the order in which results
come in does not matter. A slot's incarnation counts its sequences, so that a result that comes after its sequence has
left changes nothing for the next.

Legend: N slots, B sequences of a step.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LaunchedLengths:
    """How a launch moved the bounds, to be given back with what the step emitted.

    Attributes:
        slots_B: what was run.
        incarnations_B: whose they were.
        most_B: tokens each could emit.
    """

    slots_B: Ints
    incarnations_B: Ints
    most_B: Ints


class LengthBounds:
    """Bounds of every slot's length L, tokens of the sequence so far, the newest included."""

    def __init__(self, num_slots: int) -> None:
        self._least_N = np.zeros(num_slots, dtype=np.int64)
        self._most_N = np.zeros(num_slots, dtype=np.int64)
        self._limit_N = np.zeros(num_slots, dtype=np.int64)
        self._end_N = np.zeros(num_slots, dtype=np.int64)
        self._reach_N = np.zeros(num_slots, dtype=np.int64)
        self._incarnation_N = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, length: int, *, limit: int, end: int, reach: int | None = None) -> None:
        """A sequence of known length takes a slot.

        Args:
            slot: which.
            length: L.
            limit: positions it has room for.
            end: L at which it is finished.
            reach: positions that it may ever have room for; `limit` if None: then it has all of them.
        """
        self._incarnation_N[slot] += 1
        self._least_N[slot] = self._most_N[slot] = length
        self._limit_N[slot] = limit
        self._end_N[slot] = end
        self._reach_N[slot] = limit if reach is None else reach

    def grow(self, slot: int, limit: int) -> None:
        """A sequence has room for more positions."""
        assert limit >= self._limit_N[slot]
        self._limit_N[slot] = limit

    def short_of_room(self, slots_B: Ints, most_B: Ints) -> list[tuple[int, int]]:
        """(place in B, positions) of those whose next step, of at most `most_B` tokens each, may need more room.

        It writes positions up to L - 1 + its drafts, also past `end`: where drafts are verified as a block, one there
        may make earlier ones stand, and what stands must not depend on which blocks are free.
        """
        wanted_B = np.minimum(self._most_N[slots_B] + most_B - 1, self._reach_N[slots_B])
        is_short_B = wanted_B > self._limit_N[slots_B]
        if not is_short_B.any():
            return []
        return [(int(place), int(wanted_B[place])) for place in np.flatnonzero(is_short_B)]

    def unfinished(self, slots_B: Ints) -> npt.NDArray[np.bool_]:
        """Of each, whether it may need another step; else it is finished, or out of all room there is, for certain."""
        least_B = self._least_N[slots_B]
        room_B = np.maximum(self._limit_N[slots_B], self._reach_N[slots_B])  # that it has, or may get
        result: npt.NDArray[np.bool_] = (least_B < self._end_N[slots_B]) & (least_B <= room_B)
        return result

    def max_context_len(self, slots_B: Ints, num_drafts: int) -> int:
        """Bound of what a step with so many drafts may read: the highest position + 1."""
        # Past its room a sequence would write to the scratch block and read back nothing: never a wrong token instead.
        assert (self._least_N[slots_B] <= self._limit_N[slots_B]).all()
        return int(np.minimum(self._most_N[slots_B] + num_drafts, self._limit_N[slots_B]).max())

    def launch(self, slots_B: Ints, most_B: Ints) -> LaunchedLengths:
        """A step was launched that emits 1 ... most_B tokens of each."""
        self._least_N[slots_B] += 1
        self._most_N[slots_B] += most_B
        return LaunchedLengths(slots_B, self._incarnation_N[slots_B], most_B)

    def collect(self, launched: LaunchedLengths, emitted_B: Ints) -> None:
        """That step emitted so many."""
        assert ((emitted_B >= 0) & (emitted_B <= launched.most_B)).all(), "a step emitted more than it could"
        still_B = self._incarnation_N[launched.slots_B] == launched.incarnations_B
        slots = launched.slots_B[still_B]
        self._least_N[slots] += emitted_B[still_B] - 1
        self._most_N[slots] -= (launched.most_B - emitted_B)[still_B]
