"""Which workers serve a request. Pure: it sees the live ones and chooses; it never asks whether they are well."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import NoWorker
from baton.router.members import DECODE, PREFILL, Member


@dataclass(frozen=True, slots=True)
class Pair:
    """Who computes the prompt and who writes the answer."""

    prefill: Member
    decode: Member


class Policy(Protocol):
    """Chooses a pair."""

    def pick(self, prefill: Sequence[Member], decode: Sequence[Member]) -> Pair:
        """Choose among live workers, each sequence ordered by name.

        Raises:
            NoWorker: a role has none.
        """
        ...


class RoundRobin:
    """Each role's workers in turn, by name, whoever comes and goes."""

    def __init__(self) -> None:
        self._last = {PREFILL: "", DECODE: ""}

    def pick(self, prefill: Sequence[Member], decode: Sequence[Member]) -> Pair:
        """The next of each role.

        Raises:
            NoWorker: a role has none; no turn is taken.
        """
        require(prefill, PREFILL)
        require(decode, DECODE)
        return Pair(self._next(prefill, PREFILL), self._next(decode, DECODE))

    def _next(self, members: Sequence[Member], role: str) -> Member:
        names = [member.state.worker_id for member in members]
        member = members[bisect_right(names, self._last[role]) % len(members)]
        self._last[role] = member.state.worker_id
        return member


def require(members: Sequence[Member], role: str) -> None:
    """Check that there is a worker.

    Raises:
        NoWorker: there is none.
    """
    if not members:
        raise NoWorker(f"no {role} worker is alive; try again shortly", role=role)
