"""Pairs of workers of which one refused to take KV from the other: layout, model, TP or version. Pure.

What two processes are does not change while they live, so a refused pair is never tried again until one of the two
has another life.
"""

from collections.abc import Set
from dataclasses import dataclass

from baton.router.members import Life, Members
from baton.router.policy import Lives, Pair


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused pair, and the sentence that says why."""

    prefill: Life
    decode: Life
    reason: str


class Refusals:
    """The refused pairs among the workers that are known."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reasons: dict[Lives, str] = {}

    def add(self, pair: Pair, reason: str) -> None:
        """Do not pair these two lives again."""
        self._reasons[pair.lives] = reason

    def all(self) -> list[Refusal]:
        """Those whose lives were not replaced or forgotten, by name."""
        lives = {member.life for member in self._members.all()}
        for pair in [pair for pair in self._reasons if not lives.issuperset(pair)]:
            del self._reasons[pair]
        refusals = [Refusal(*pair, reason) for pair, reason in self._reasons.items()]
        return sorted(refusals, key=lambda refusal: (refusal.prefill.worker_id, refusal.decode.worker_id))

    def lives(self) -> Set[Lives]:
        """The pairs alone."""
        return {(refusal.prefill, refusal.decode) for refusal in self.all()}
