"""Tracks bounds of sequence lengths, by slot, while results are outstanding on the host.

A step in flight adds at least one token to a sequence, and at most one more than the drafts it may accept. (A sequence
whose grammar is late gets none, which is known when the step is read.) The bounds move when a step is launched, and
become exact again when the host learns what it emitted; the order in which results arrive does not matter. A slot's
incarnation counts its sequences, so that a result that arrives after its sequence has left does not affect the next
one.

Legend: N slots, B sequences of a step.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LaunchedLengths:
    """How a launch moved the bounds; passed back with what the step emitted.

    Attributes:
        slots_B: slots that the step ran.
        incarnations_B: incarnations of these slots at the launch.
        most_B: tokens each sequence could emit.
    """

    slots_B: Ints
    incarnations_B: Ints
    most_B: Ints


class LengthBounds:
    """Bounds of every slot's length L: the tokens of its sequence so far, including the newest."""

    def __init__(self, num_slots: int) -> None:
        self._least_N = np.zeros(num_slots, dtype=np.int64)
        self._most_N = np.zeros(num_slots, dtype=np.int64)
        self._limit_N = np.zeros(num_slots, dtype=np.int64)
        self._end_N = np.zeros(num_slots, dtype=np.int64)
        self._reach_N = np.zeros(num_slots, dtype=np.int64)
        self._incarnation_N = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, length: int, *, limit: int, end: int, reach: int | None = None) -> None:
        """Set the bounds of a sequence of known length that takes a slot.

        Args:
            slot: its slot.
            length: L.
            limit: positions that fit in its blocks.
            end: L at which it is finished.
            reach: positions that its blocks may ever hold; None: `limit`, as it has all its blocks.
        """
        self._incarnation_N[slot] += 1
        self._least_N[slot] = self._most_N[slot] = length
        self._limit_N[slot] = limit
        self._end_N[slot] = end
        self._reach_N[slot] = limit if reach is None else reach

    def grow(self, slot: int, limit: int) -> None:
        """Raise a sequence's limit, as it got more blocks."""
        assert limit >= self._limit_N[slot]
        self._limit_N[slot] = limit

    def short_of_room(self, slots_B: Ints, most_B: Ints) -> list[tuple[int, int]]:
        """(place in B, positions) of sequences whose next step, of at most `most_B` tokens each, may need more blocks.

        The step writes positions up to L - 1 + its drafts, even past `end`: with block verification a draft there may
        cause earlier ones to be accepted, and acceptance must not depend on which blocks are free.
        """
        wanted_B = np.minimum(self._most_N[slots_B] + most_B - 1, self._reach_N[slots_B])
        is_short_B = wanted_B > self._limit_N[slots_B]
        if not is_short_B.any():
            return []
        return [(int(place), int(wanted_B[place])) for place in np.flatnonzero(is_short_B)]

    def unfinished(self, slots_B: Ints) -> npt.NDArray[np.bool_]:
        """Whether each may need another step; False only if it is certainly finished or has no positions left."""
        least_B = self._least_N[slots_B]
        room_B = np.maximum(self._limit_N[slots_B], self._reach_N[slots_B])  # that it has or may get
        result: npt.NDArray[np.bool_] = (least_B < self._end_N[slots_B]) & (least_B <= room_B)
        return result

    def max_context_len(self, slots_B: Ints, num_drafts: int) -> int:
        """Upper bound of the context that a step with `num_drafts` drafts may read: the highest position + 1."""
        # Past its limit a sequence would write to the null block and read back garbage: fail instead of emitting a
        # wrong token.
        assert (self._least_N[slots_B] <= self._limit_N[slots_B]).all()
        return int(np.minimum(self._most_N[slots_B] + num_drafts, self._limit_N[slots_B]).max())

    def launch(self, slots_B: Ints, most_B: Ints) -> LaunchedLengths:
        """Move the bounds for a launched step, which emits 1 ... most_B tokens for each sequence."""
        self._least_N[slots_B] += 1
        self._most_N[slots_B] += most_B
        return LaunchedLengths(slots_B, self._incarnation_N[slots_B], most_B)

    def collect(self, launched: LaunchedLengths, emitted_B: Ints) -> None:
        """Make the bounds exact again, given what the step emitted."""
        assert ((emitted_B >= 0) & (emitted_B <= launched.most_B)).all(), "a step emitted more than it could"
        still_B = self._incarnation_N[launched.slots_B] == launched.incarnations_B
        slots = launched.slots_B[still_B]
        self._least_N[slots] += emitted_B[still_B] - 1
        self._most_N[slots] -= (launched.most_B - emitted_B)[still_B]
