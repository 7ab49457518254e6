"""Decides which idle workers to probe with a canary, and which workers are unfit. Pure; time is an argument.

A heartbeat proves that a process lives, not that a request would get through. With traffic, attempts find that out.
When a worker has been idle for a while, a canary does: a small request of the router's own to one pair of workers. This
module chooses the pair and draws the conclusions. It sends nothing (`canaries` does), and it takes no worker out of
routing: *unfit* workers are only avoided while there are others.
"""

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from baton.router.placement.members import Incarnation

NUM_FAILURES: Final = 2  # this many unanswered canaries in a row make an incarnation unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """When idle workers are probed.

    Attributes:
        idle_s: idle time after which a worker is probed; 0 disables canaries.
        retry_s: time between two canaries to a worker that did not answer the last one.
        timeout_s: time within which the answer must be complete.
    """

    idle_s: float = 0.0
    retry_s: float = 5.0
    timeout_s: float = 10.0


class CanaryOutcome(Enum):
    """How a canary ended. Only the first two outcomes say something about the workers' fitness."""

    ANSWERED = "answered"
    FAILED = "failed"
    OVERLOADED = "overloaded"  # a worker has too much to do, so it is alive
    REFUSED = "refused"  # one worker does not take KV from the other; `refusals` records the pair
    LOST = "lost"  # an incarnation was lost, which heartbeats report


@dataclass(frozen=True, slots=True)
class CanaryRoster:
    """The workers that could be probed.

    Attributes:
        prefill: all live prefill incarnations; membership tests must be fast.
        decode: likewise, decode incarnations.
        barred: incarnations that must not be probed: they are draining, or too small.
        apart: pairs that refuse each other.
        alone: decode workers that compute prompts themselves, if no prefill worker is available; else empty.
        is_busy: whether a client's attempt is at the worker now.
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
        prefill: computes its prompt; the decode incarnation itself if that computes everything.
        decode: decodes its answer.
        target: the one of the two that was due.
        judged: incarnations that a failure counts against. A busy partner is not among them: its attempts show its
            fitness.
        begun_s: when it was sent.
    """

    prefill: Incarnation
    decode: Incarnation
    target: Incarnation
    judged: tuple[Incarnation, ...]
    begun_s: float

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """The distinct incarnations, one or two."""
        return (self.decode,) if self.prefill == self.decode else (self.prefill, self.decode)


@dataclass(slots=True)
class _Record:
    came_s: float  # when it last served something, or was first heard of
    asked_s: float  # when its last canary ended
    num_failures: int = 0  # in a row
    failed_with: set[Incarnation] = field(default_factory=set)  # partners in failed canaries since its last answer


class CanaryWatch:
    """What is known about each incarnation. `begin` and `ended` alternate: there is at most one canary at a time.

    Args:
        config: when to probe.
        on_change: called with an incarnation and the reason when it becomes unfit, or with "" when it is fit again.
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
        """Number of incarnations tracked."""
        return len(self._records)

    @property
    def under_way(self) -> Probe | None:
        """The canary in progress; None if there is none."""
        return self._under_way

    def is_unfit(self, incarnation: Incarnation) -> bool:
        """Whether the incarnation answered neither its last canaries nor any client since."""
        return incarnation in self._unfit

    def why_unfit(self, incarnation: Incarnation) -> str:
        """What its last canary ended with; empty if the incarnation is fit."""
        return self._unfit.get(incarnation, "")

    def came(self, incarnation: Incarnation, now_s: float) -> None:
        """Record that an incarnation served a request as it should."""
        record = self._records.get(incarnation)
        if record is None:
            return
        record.came_s = now_s
        record.num_failures = 0
        record.failed_with.clear()
        if self._unfit.pop(incarnation, None) is not None:
            self._on_change(incarnation, "")

    def begin(self, roster: CanaryRoster, now_s: float) -> Probe | None:
        """Return the canary to send now, if one is due and none is in progress."""
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
        """Record the outcome of the canary that `begin` returned last."""
        assert probe is self._under_way
        self._under_way = None
        for incarnation in probe.judged:
            record = self._records.get(incarnation)
            # A doubtful partner keeps its turn: others' failures with it must not postpone its own canary.
            keeps_turn = outcome is CanaryOutcome.FAILED and incarnation != probe.target
            if record is not None and not (keeps_turn and record.num_failures):
                record.asked_s = now_s
        if outcome is CanaryOutcome.ANSWERED:
            for incarnation in probe.incarnations:
                self.came(incarnation, now_s)
        elif outcome is CanaryOutcome.FAILED:
            self._blame(probe, why)

    def _follow(self, roster: CanaryRoster, now_s: float) -> None:
        """Track exactly the incarnations that are live."""
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
        """Pair a doubtful worker with one that is not, and not yet tried with it: that tells the two apart."""
        for incarnation in asked:
            failed_with = self._records[incarnation].failed_with
            partner = self._partner(incarnation, roster) if self._is_doubtful(incarnation) else None
            if partner is not None and not self._is_doubtful(partner) and partner not in failed_with:
                return incarnation, partner
        return None

    def _waiting(self, asked: Sequence[Incarnation], roster: CanaryRoster) -> tuple[Incarnation, Incarnation] | None:
        """Pick the worker that has waited longest, among those with a possible partner."""
        lonely = set()  # roles for which an unrestricted worker found no partner
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
        """Choose a partner of the other role: preferably not doubtful, then idle, then not yet tried with this worker.

        A doubtful partner is allowed only for a doubtful worker; otherwise two hanging workers could make an innocent
        partner unfit. A busy partner is allowed only for an unfit worker, which might otherwise never be probed again.
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
        """Count the failure against the judged workers.

        A worker is excused if its partner was known to be unfit, or if it has served something since.
        """
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
