"""Which idle workers to ask for a sign that they can serve, and who has given none. Pure; the time is given.

A heartbeat says that a process lives, not that a request would come through. While there is traffic attempts find that
out; where nothing came from a worker for a while, a canary does: a small request of the router's own to one pair of
workers. This chooses the pair and draws the conclusions. It sends nothing (`canaries` does), and it takes no worker out
of routing: who is *unfit* is avoided while there are others.
"""

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from baton.router.placement.members import Incarnation

NUM_FAILURES: Final = 2  # canaries in a row without an answer make an incarnation unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """When idle workers are asked.

    Attributes:
        idle_s: nothing came from a worker for so long; 0: no worker is ever asked.
        retry_s: between two canaries of a worker that did not answer the last one.
        timeout_s: an answer must be complete by then.
    """

    idle_s: float = 0.0
    retry_s: float = 5.0
    timeout_s: float = 10.0


class CanaryOutcome(Enum):
    """How a canary ended. Only the first two say something of workers."""

    ANSWERED = "answered"
    FAILED = "failed"
    OVERLOADED = "overloaded"  # one has too much to do, so it is alive
    REFUSED = "refused"  # one does not take KV from the other: `refusals` knows that from now on
    LOST = "lost"  # an incarnation was lost: heartbeats tell that


@dataclass(frozen=True, slots=True)
class CanaryRoster:
    """Who there is.

    Attributes:
        prefill: all live incarnations of the role; quick to look up.
        decode: likewise.
        barred: those that must not be asked: they are being emptied, or are too small.
        apart: pairs that refuse each other.
        alone: decode workers that compute prompts themselves, where there are no others for it; else none.
        is_busy: whether an attempt of a client is there now.
    """

    prefill: Collection[Incarnation]
    decode: Collection[Incarnation]
    barred: Set[Incarnation]
    apart: Set[tuple[Incarnation, Incarnation]]
    alone: Set[Incarnation]
    is_busy: Callable[[Incarnation], bool]


@dataclass(frozen=True, slots=True)
class Probe:
    """One canary.

    Attributes:
        prefill: who computes its prompt; the decode incarnation itself if that does it all.
        decode: who writes its answer.
        target: whose turn it is, one of the two.
        judged: whom a failure counts for. A busy partner has attempts that find out.
        begun_s: when it was sent.
    """

    prefill: Incarnation
    decode: Incarnation
    target: Incarnation
    judged: tuple[Incarnation, ...]
    begun_s: float

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """Each once."""
        return (self.decode,) if self.prefill == self.decode else (self.prefill, self.decode)


@dataclass(slots=True)
class _Record:
    came_s: float  # something came from it then, or it was first heard of
    asked_s: float  # its last canary ended then
    num_failures: int = 0  # in a row
    failed_with: set[Incarnation] = field(default_factory=set)  # since its last answer


class CanaryWatch:
    """What is known of each incarnation. `begin` and `ended` take turns: there is one canary at most.

    Args:
        config: see there.
        on_change: called with an incarnation and why it is unfit from now on, or with "" when it is fit again.
    """

    def __init__(
        self,
        config: CanaryConfig | None = None,
        on_change: Callable[[Incarnation, str], None] = lambda incarnation, why: None,
    ) -> None:
        self.config = config or CanaryConfig()
        self._on_change = on_change
        self._records: dict[Incarnation, _Record] = {}
        self._unfit: dict[Incarnation, str] = {}
        self._under_way: Probe | None = None

    @property
    def num_incarnations(self) -> int:
        """Incarnations that something is known of."""
        return len(self._records)

    @property
    def under_way(self) -> Probe | None:
        """The canary that has not ended."""
        return self._under_way

    def is_unfit(self, incarnation: Incarnation) -> bool:
        """Whether it has answered neither its last canaries nor any client since."""
        return incarnation in self._unfit

    def why_unfit(self, incarnation: Incarnation) -> str:
        """What its last canary ended with; empty if it is fit."""
        return self._unfit.get(incarnation, "")

    def came(self, incarnation: Incarnation, now_s: float) -> None:
        """A client got from this incarnation what it should."""
        record = self._records.get(incarnation)
        if record is None:
            return
        record.came_s = now_s
        record.num_failures = 0
        record.failed_with.clear()
        if self._unfit.pop(incarnation, None) is not None:
            self._on_change(incarnation, "")

    def begin(self, roster: CanaryRoster, now_s: float) -> Probe | None:
        """The canary to send now, if one is due and none is under way."""
        if not self.config.idle_s or self._under_way is not None:
            return None
        self._follow(roster, now_s)
        due = [incarnation for incarnation, record in self._records.items() if self._due_s(record) <= now_s]
        asked = [
            incarnation for incarnation in due if incarnation not in roster.barred and not roster.is_busy(incarnation)
        ]
        asked.sort(key=lambda incarnation: (self._due_s(self._records[incarnation]), incarnation.worker_id))
        pair = self._settling(asked, roster) or self._waiting(asked, roster)
        if pair is not None:
            incarnation, partner = pair
            order = (incarnation, partner) if incarnation in roster.prefill else (partner, incarnation)
            judged = (incarnation,) if partner == incarnation or roster.is_busy(partner) else (incarnation, partner)
            self._under_way = Probe(*order, target=incarnation, judged=judged, begun_s=now_s)
        return self._under_way

    def ended(self, probe: Probe, outcome: CanaryOutcome, now_s: float, why: str = "") -> None:
        """What became of the canary that `begin` returned last."""
        assert probe is self._under_way
        self._under_way = None
        for incarnation in probe.judged:
            record = self._records.get(incarnation)
            # A partner that is in doubt keeps its turn: others' failures with it must not put off its own canary.
            keeps_turn = outcome is CanaryOutcome.FAILED and incarnation != probe.target
            if record is not None and not (keeps_turn and record.num_failures):
                record.asked_s = now_s
        if outcome is CanaryOutcome.ANSWERED:
            for incarnation in probe.incarnations:
                self.came(incarnation, now_s)
        elif outcome is CanaryOutcome.FAILED:
            self._blame(probe, why)

    def _follow(self, roster: CanaryRoster, now_s: float) -> None:
        """Know every incarnation that there is, and no other."""
        live = {*roster.prefill, *roster.decode}
        for incarnation in self._records.keys() - live:
            del self._records[incarnation]
            self._unfit.pop(incarnation, None)
            for record in self._records.values():
                record.failed_with.discard(incarnation)
        for incarnation in live - self._records.keys():
            self._records[incarnation] = _Record(now_s, now_s)

    def _due_s(self, record: _Record) -> float:
        if record.num_failures:
            return record.asked_s + self.config.retry_s
        return max(record.came_s, record.asked_s) + self.config.idle_s

    def _settling(self, asked: Sequence[Incarnation], roster: CanaryRoster) -> tuple[Incarnation, Incarnation] | None:
        """Who is in doubt, with one that is not and with whom it was not tried: that tells the two sides apart."""
        for incarnation in asked:
            failed_with = self._records[incarnation].failed_with
            partner = self._partner(incarnation, roster) if self._is_doubtful(incarnation) else None
            if partner is not None and not self._is_doubtful(partner) and partner not in failed_with:
                return incarnation, partner
        return None

    def _waiting(self, asked: Sequence[Incarnation], roster: CanaryRoster) -> tuple[Incarnation, Incarnation] | None:
        """Who has waited longest, of those for whom there is a partner."""
        lonely = set()  # roles of which a worker that may have any partner found none
        for incarnation in asked:
            kind = incarnation in roster.prefill
            is_alike = not (roster.apart or incarnation in roster.alone or self._is_doubtful(incarnation))
            if is_alike and kind in lonely:
                continue
            partner = self._partner(incarnation, roster)
            if partner is not None:
                return incarnation, partner
            if is_alike:
                lonely.add(kind)
        return None

    def _is_doubtful(self, incarnation: Incarnation) -> bool:
        return self._records[incarnation].num_failures > 0

    def _partner(self, incarnation: Incarnation, roster: CanaryRoster) -> Incarnation | None:
        """One of the other role: rather one not in doubt, then an idle one, then one with whom it was not tried.

        One in doubt only for an incarnation that is in doubt itself: else two that hang would make an innocent partner
        unfit. A busy one only for an incarnation that is unfit, which else might never be asked again.
        """
        is_prefill = incarnation in roster.prefill
        if not is_prefill and incarnation in roster.alone:
            return incarnation
        own = self._records[incarnation]

        def may(one: Incarnation) -> bool:
            pair = (incarnation, one) if is_prefill else (one, incarnation)
            if one in roster.barred or pair in roster.apart or (self._is_doubtful(one) and not own.num_failures):
                return False
            return self.is_unfit(incarnation) or not roster.is_busy(one)

        def rank(one: Incarnation) -> tuple[bool, bool, bool, int, float, str]:
            other = self._records[one]
            is_tried, is_busy = one in own.failed_with, roster.is_busy(one)
            return (other.num_failures > 0, is_busy, is_tried, other.num_failures, -other.came_s, one.worker_id)

        return min(filter(may, roster.decode if is_prefill else roster.prefill), key=rank, default=None)

    def _blame(self, probe: Probe, why: str) -> None:
        """Count the failure, but not for one whose partner was known to be unfit, or who has answered meanwhile."""
        unfit = [incarnation for incarnation in probe.incarnations if self.is_unfit(incarnation)]
        for incarnation in probe.judged:
            record = self._records.get(incarnation)
            others = [one for one in probe.incarnations if one != incarnation]
            excused = not self.is_unfit(incarnation) and any(one in unfit for one in others)
            if record is None or excused or record.came_s > probe.begun_s:
                continue
            record.num_failures += 1
            record.failed_with.update(one for one in others if one in self._records)
            if record.num_failures >= NUM_FAILURES:
                is_news = incarnation not in self._unfit
                self._unfit[incarnation] = why
                if is_news:
                    self._on_change(incarnation, why)
