"""How many attempts after failed ones a router may make: a part of its requests, and a trickle. Pure; time is given.

When hand-offs fail because workers are overloaded or a network is down, retries are work that makes it worse: three
attempts for each request are three times the load, just when there is least room for it. So retries share a bucket of
tokens, as in gRPC's `retryThrottling` (proposal A6) and in the retry budgets of Google's SRE book (chapter "Handling
Overload": a client's retries stay below 10 % of its requests): each request puts a part of a token in, each retry takes
one out, and with an empty bucket the first error stands. The bucket is full at the start, and a trickle flows in by
itself, so that a router with little to do can retry at all.

Migrations take nothing here. A worker's death moves all its streams at the same moment, which is no storm: each has at
most `max_migrations` of them in its life, they go where there is room, and they wait with growing, random pauses.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """Of the bucket.

    Attributes:
        share: of a token that each request puts in.
        per_s: tokens that come by themselves.
        burst: tokens that the bucket holds.
    """

    share: float = 0.2
    per_s: float = 1.0
    burst: float = 50.0


class RetryBudget:
    """One router's."""

    def __init__(self, limits: RetryLimits, now_s: float) -> None:
        self._limits = limits
        self._tokens = limits.burst
        self._filled_s = now_s
        self.num_refused = 0

    def tokens(self, now_s: float) -> float:
        """Retries that could be made now."""
        self._fill(now_s)
        return self._tokens

    def request(self, now_s: float) -> None:
        """A request has come: its first attempt is no retry."""
        self._fill(now_s)
        self._add(self._limits.share)

    def retry(self, now_s: float) -> float:
        """Take a retry; 0, or where there is none to take, the seconds after which there will be one."""
        self._fill(now_s)
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        self.num_refused += 1
        return (1.0 - self._tokens) / self._limits.per_s

    def _fill(self, now_s: float) -> None:
        self._add(max(0.0, now_s - self._filled_s) * self._limits.per_s)
        self._filled_s = max(now_s, self._filled_s)

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._limits.burst, self._tokens + tokens)
