"""Policies that choose the workers for a request. Pure: a policy chooses among the live workers it is given."""

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import NoWorker, WorkersIncompatible
from baton.core.requests.request import GenerationRequest
from baton.router.placement.local_prefill import LOCAL, SPLIT, LocalPrefill
from baton.router.placement.members import DECODE, PREFILL, Incarnation, Member

Incarnations = tuple[Incarnation, Incarnation]  # (prefill worker, decode worker)
NOBODY: Set[Incarnations] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers that compute the prompt and the answer; the same one twice if the decode worker does both."""

    prefill: Member
    decode: Member
    expected_cached_len: int = 0  # prompt tokens expected in the cache of the worker that computes them
    routing: str = ""  # policy that chose the pair

    @property
    def incarnations(self) -> Incarnations:
        """The two incarnations."""
        return self.prefill.incarnation, self.decode.incarnation

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt."""
        return self.prefill.incarnation == self.decode.incarnation


class Policy(Protocol):
    """Chooses a pair of workers."""

    @property
    def name(self) -> str:
        """The policy's name for `--routing`."""
        ...

    def pick(
        self,
        prefill: Sequence[Member],
        decode: Sequence[Member],
        excluded: Set[Incarnations] = NOBODY,
        request: GenerationRequest | None = None,
    ) -> Pair:
        """Choose among live workers, each sequence ordered by name; an excluded pair is never chosen.

        Args:
            prefill: workers that may compute the prompt.
            decode: workers that may decode the answer.
            excluded: pairs that must not be chosen.
            request: the request to place; None: nothing is known about it.

        Raises:
            NoWorker: a role has no worker.
            WorkersIncompatible: every pair is excluded.
        """
        ...


class RoundRobin:
    """Takes each role's workers in turn, by name, even as workers come and go."""

    name = "round_robin"

    def __init__(self, local: LocalPrefill | None = None) -> None:
        self._local = local or LocalPrefill()
        self._last = {PREFILL: "", DECODE: ""}

    def pick(
        self,
        prefill: Sequence[Member],
        decode: Sequence[Member],
        excluded: Set[Incarnations] = NOBODY,
        request: GenerationRequest | None = None,
    ) -> Pair:
        """Pick the next worker of each role; if that pair is excluded, the next pair after it.

        No costs are compared: a decode worker computes the prompt only if it must, or if every pair is excluded.

        Raises:
            NoWorker: a role has no worker; the turn is kept.
            WorkersIncompatible: every pair is excluded; the turn is kept.
        """
        require(decode, DECODE)
        able = self._local.required(prefill, decode, excluded, request)
        if able:
            member = self._in_turn(able, DECODE)[0]
            self._last[DECODE] = member.state.worker_id
            self._local.chosen(LOCAL, self._local.required_reason(prefill))
            return Pair(member, member, routing=self.name)
        require(prefill, PREFILL)
        decode_in_turn = self._in_turn(decode, DECODE)
        for prefill_member in self._in_turn(prefill, PREFILL):
            for decode_member in decode_in_turn:
                if (prefill_member.incarnation, decode_member.incarnation) not in excluded:
                    self._last[PREFILL] = prefill_member.state.worker_id
                    self._last[DECODE] = decode_member.state.worker_id
                    self._local.chosen(SPLIT, self.name)
                    return Pair(prefill_member, decode_member, routing=self.name)
        able = self._local.optional(decode, excluded, request)
        if able:
            member = self._in_turn(able, DECODE)[0]
            self._last[DECODE] = member.state.worker_id
            self._local.chosen(LOCAL, "incompatible")
            return Pair(member, member, routing=self.name)
        message = f"none of {len(prefill)} prefill workers can hand over to any of {len(decode)} decode workers"
        raise WorkersIncompatible(message, num_prefill=len(prefill), num_decode=len(decode))

    def _in_turn(self, members: Sequence[Member], role: str) -> list[Member]:
        names = [member.state.worker_id for member in members]
        first = bisect_right(names, self._last[role]) % len(members)
        return [*members[first:], *members[:first]]


def require(members: Sequence[Member], role: str) -> None:
    """Check that there is a worker.

    Raises:
        NoWorker: there is none.
    """
    if not members:
        raise NoWorker(f"no {role} worker takes requests now: all are lost or draining; try again shortly", role=role)
