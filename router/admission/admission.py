"""Models the work of a request and the workers' capacity, and limits how many answers the router holds at once."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from baton.core.errors import Overloaded
from baton.router.metrics import RouterMetrics, is_clients


class Settling:
    """A router's start: requests wait until the workers are known.

    Args:
        until_s: when the wait ends in any case, on the clock of `look`.
        is_whole: whether all expected workers are known.
    """

    def __init__(self, until_s: float, is_whole: Callable[[], bool]) -> None:
        self._until_s = until_s
        self._is_whole = is_whole
        self._over = asyncio.Event()

    def look(self, now_s: float) -> None:
        """End the wait if its time is over or all workers are known; called several times a second."""
        if not self._over.is_set() and (now_s >= self._until_s or self._is_whole()):
            self._over.set()

    async def wait(self) -> None:
        """Wait until the start is over."""
        await self._over.wait()


LOW: Final = 0
NORMAL: Final = 1
HIGH: Final = 2
KV_FILL: Final = 0.9  # share of all KV that is in use when the next request does not fit
PRIORITIES: Final = (HIGH, NORMAL, LOW)  # in the order in which they are served


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWork:
    """What one request needs.

    Attributes:
        tenant: the request's tenant.
        num_tokens: prompt tokens to be computed.
        num_positions: positions of KV that it may come to hold, or those that its answers' places among the workers'
            sequences stand for, if these are more.
        num_bytes: router memory that it takes while it is in the queue or running.
        num_answer_tokens: tokens that its answers are likely to have; 0 if nothing is known of answers.
        deadline_s: when its first token is due.
        priority: LOW, NORMAL or HIGH.
    """

    tenant: str
    num_tokens: int
    num_positions: int
    deadline_s: float
    priority: int = NORMAL
    num_bytes: int = 0
    num_answer_tokens: int = 0

    @property
    def cost(self) -> int:
        """Tokens that its tenant's turn is charged with.

        Those of answers count: short prompts, or cached ones, would otherwise have all turns.
        """
        return self.num_tokens + self.num_answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What all workers together can do. A 0 means unknown, and limits nothing.

    Attributes:
        tokens_per_s: prompt tokens computed per second.
        num_workers: prefill workers, >= 1; one of them computes a prompt alone.
        num_pairs: while fewer requests than this run, some prefill worker and some decode worker are idle.
        num_positions: positions of KV in all decode workers.
        residence_s: recent mean time for which a request holds its KV.
    """

    tokens_per_s: float = 0.0
    num_workers: int = 1
    num_pairs: int = 1
    num_positions: int = 0
    residence_s: float = 0.0

    def share_s(self, work: RequestWork) -> float:
        """Seconds of all workers' time that a request takes: of prefill, or of KV if that is scarcer."""
        prefill_s = work.num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0
        return max(prefill_s, self.kv_s(work.num_positions))

    def kv_s(self, num_positions: int) -> float:
        """Seconds in which this many positions become free, if all are in use."""
        budget = KV_FILL * self.num_positions
        return num_positions * self.residence_s / budget if budget else 0.0

    def own_s(self, work: RequestWork) -> float:
        """Seconds from a request's start to its first token, on one worker."""
        return work.num_tokens * self.num_workers / self.tokens_per_s if self.tokens_per_s else 0.0


INTERVAL_S = 10.0
log = logging.getLogger(__name__)


class ShedReport:
    """Reports which errors have ended requests since the last report.

    Args:
        metrics: the router's metrics.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._told: Counter[str] = Counter()

    def line(self) -> str:
        """Format the report for the log; empty if there is nothing to report."""
        now = self._counts()
        new = now - self._told
        self._told = now
        if not new:
            return ""
        kinds = ", ".join(f"{kind} {num}" for kind, num in new.most_common())
        return f"{new.total()} requests were refused or failed in the last {INTERVAL_S:.0f} s: {kinds}"

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for family in self._metrics.requests_failed.collect():
            for sample in family.samples:
                kind = sample.labels.get("error", "")
                if sample.name.endswith("_total") and not is_clients(kind):
                    counts[kind] += int(sample.value)
        return counts


async def watch(metrics: RouterMetrics) -> None:
    """Log the report periodically until cancelled."""
    report = ShedReport(metrics)
    while True:
        await asyncio.sleep(INTERVAL_S)
        line = report.line()
        if line:
            log.warning("%s", line)


RETRY_AFTER_S = 1.0


class Admission:
    """Counts answers in flight against a limit; None: no limit, the queue's own rules bound them."""

    def __init__(self, limit: int | None) -> None:
        assert limit is None or limit >= 1
        self.limit = self.default = limit
        self.num_in_flight = 0

    @contextmanager
    def slot(self, num_answers: int = 1) -> Iterator[None]:
        """Hold a place for each of a request's answers.

        Raises:
            Overloaded: there are not enough places left; retry after `retry_after_s`.
        """
        if self.limit is not None and self.num_in_flight + num_answers > self.limit:
            message = f"{self.num_in_flight} requests are in flight, the limit; try again in {RETRY_AFTER_S:g} s"
            raise Overloaded(message, limit=self.limit, retry_after_s=RETRY_AFTER_S)
        self.num_in_flight += num_answers
        try:
            yield
        finally:
            self.num_in_flight -= num_answers
