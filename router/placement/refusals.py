"""Pairs of workers one of which refused to take KV from the other: layout, model, TP or version. Pure.

Those properties do not change while a process lives, so a refused pair is not tried again until one of the two has a
new incarnation.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from baton.core.requests.request import GenerationRequest
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member, Members
from baton.router.placement.policy import Incarnations, Pair

HEARD_S: Final = 0.5  # a heartbeat in flight when a worker died is not taken for a sign of life


class Outcasts:
    """Workers and pairs that failed one request."""

    def __init__(self) -> None:
        self.pairs: set[Incarnations] = set()
        self.lost: dict[Incarnation, float] = {}  # when each lost a stream of the request
        self._incarnations: set[Incarnation] = set()

    def add(self, pair: Pair, *, role: object, now_s: float) -> None:
        """Record a failed attempt of these two; `role` is the role of the worker whose stream was lost, if one was."""
        self.pairs.add(pair.incarnations)
        self._incarnations.update(pair.incarnations)
        if role == PREFILL:
            self.lost[pair.prefill.incarnation] = now_s
        elif role == DECODE:
            self.lost[pair.decode.incarnation] = now_s

    def without(self, members: Sequence[Member]) -> list[Member]:
        """Workers that had no part in a failed attempt."""
        return [member for member in members if member.incarnation not in self._incarnations]

    def heard(self, members: Sequence[Member]) -> list[Member]:
        """Workers that lost no stream of the request, or have sent a heartbeat since."""
        if not self.lost:
            return list(members)
        return [
            member
            for member in members
            if member.incarnation not in self.lost or member.heartbeat_s > self.lost[member.incarnation] + HEARD_S
        ]


def fits(request: GenerationRequest, member: Member) -> bool:
    """Whether a worker can hold the request; for workers that joined after the request was checked."""
    state = member.state
    if request.capacity_len - request.num_draft_tokens > state.max_model_len:
        return False
    if state.role == PREFILL:
        return request.prompt_len <= member.capacity_len
    return request.capacity_len <= member.capacity_len and request.num_draft_tokens <= state.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused pair, with the reason."""

    prefill: Incarnation
    decode: Incarnation
    reason: str


class Refusals:
    """The refused pairs among the known workers."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reasons: dict[Incarnations, str] = {}

    def add(self, pair: Pair, reason: str) -> None:
        """Never pair these two incarnations again."""
        self._reasons[pair.incarnations] = reason

    def all(self) -> list[Refusal]:
        """Refusals whose incarnations were not replaced or forgotten, by name."""
        incarnations = {member.incarnation for member in self._members.all()}
        for pair in [pair for pair in self._reasons if not incarnations.issuperset(pair)]:
            del self._reasons[pair]
        refusals = [Refusal(*pair, reason) for pair, reason in self._reasons.items()]
        return sorted(refusals, key=lambda refusal: (refusal.prefill.worker_id, refusal.decode.worker_id))

    def incarnations(self) -> Set[Incarnations]:
        """The refused pairs, without reasons."""
        return {(refusal.prefill, refusal.decode) for refusal in self.all()}
