"""A line in the router's log every few seconds in which requests were refused or failed: how many, and of what.

Single refusals are not logged, as under overload they would be most lines. What a client did wrong (invalid requests,
missing keys) and what it gave up is not counted here: /metrics has it.
"""

import asyncio
import logging
from collections import Counter

from baton.core import errors
from baton.router.metrics import RouterMetrics

INTERVAL_S = 10.0
log = logging.getLogger(__name__)


class ShedReport:
    """What has ended with an error since the last look.

    Args:
        metrics: the router's.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._told: Counter[str] = Counter()

    def line(self) -> str:
        """The sentence for the log; empty if there is nothing to say."""
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
                if sample.name.endswith("_total") and not _is_clients(kind):
                    counts[kind] += int(sample.value)
        return counts


def _is_clients(kind: str) -> bool:
    own = (errors.InvalidRequest, errors.AccessRefused, errors.RequestCancelled)
    found = getattr(errors, kind, None)
    return isinstance(found, type) and issubclass(found, own)


async def watch(metrics: RouterMetrics) -> None:
    """Log it until cancelled."""
    report = ShedReport(metrics)
    while True:
        await asyncio.sleep(INTERVAL_S)
        line = report.line()
        if line:
            log.warning("%s", line)
