"""The workers that have failed one request, or cannot hold it. Pure.

A worker that lost its stream is out until it is heard of again well after that: then it was the connection alone.
Beside that all workers of failed attempts are avoided as long as there are others.
"""

from collections.abc import Sequence
from typing import Final

from baton.core.requests.request import GenerationRequest
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member
from baton.router.placement.policy import Incarnations, Pair

HEARD_S: Final = 0.5  # a report that was under way when a worker died is not taken for a sign of life


class Outcasts:
    """Of one request."""

    def __init__(self) -> None:
        self.pairs: set[Incarnations] = set()
        self.lost: dict[Incarnation, float] = {}  # since when
        self._incarnations: set[Incarnation] = set()

    def add(self, pair: Pair, *, role: object, now_s: float) -> None:
        """An attempt of these two failed; `role` is whose stream was lost, if one was."""
        self.pairs.add(pair.incarnations)
        self._incarnations.update(pair.incarnations)
        if role == PREFILL:
            self.lost[pair.prefill.incarnation] = now_s
        elif role == DECODE:
            self.lost[pair.decode.incarnation] = now_s

    def without(self, members: Sequence[Member]) -> list[Member]:
        """Those that had no part in a failed attempt."""
        return [member for member in members if member.incarnation not in self._incarnations]

    def heard(self, members: Sequence[Member]) -> list[Member]:
        """Those that lost no stream, or were heard of since."""
        if not self.lost:
            return list(members)
        return [
            member
            for member in members
            if member.incarnation not in self.lost or member.heartbeat_s > self.lost[member.incarnation] + HEARD_S
        ]


def fits(request: GenerationRequest, member: Member) -> bool:
    """Whether a worker that came after a request was checked can hold it."""
    state = member.state
    if request.capacity_len - request.num_draft_tokens > state.max_model_len:
        return False
    if state.role == PREFILL:
        return request.prompt_len <= member.capacity_len
    return request.capacity_len <= member.capacity_len and request.num_draft_tokens <= state.num_draft_tokens
