"""Pairs of workers of which one refused to take KV from the other: layout, model, TP or version. Pure.

What two processes are does not change while they live, so a refused pair is never tried again until one of the two
has another incarnation.
"""

from collections.abc import Set
from dataclasses import dataclass

from baton.router.placement.members import Incarnation, Members
from baton.router.placement.policy import Incarnations, Pair


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused pair, and the sentence that says why."""

    prefill: Incarnation
    decode: Incarnation
    reason: str


class Refusals:
    """The refused pairs among the workers that are known."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reasons: dict[Incarnations, str] = {}

    def add(self, pair: Pair, reason: str) -> None:
        """Do not pair these two incarnations again."""
        self._reasons[pair.incarnations] = reason

    def all(self) -> list[Refusal]:
        """Those whose lives were not replaced or forgotten, by name."""
        incarnations = {member.incarnation for member in self._members.all()}
        for pair in [pair for pair in self._reasons if not incarnations.issuperset(pair)]:
            del self._reasons[pair]
        refusals = [Refusal(*pair, reason) for pair, reason in self._reasons.items()]
        return sorted(refusals, key=lambda refusal: (refusal.prefill.worker_id, refusal.decode.worker_id))

    def incarnations(self) -> Set[Incarnations]:
        """The pairs alone."""
        return {(refusal.prefill, refusal.decode) for refusal in self.all()}
