"""Whether a call that failed is made again, and when. Pure: the clock and the randomness are given.

A call is made again only if nothing of its answer has arrived, so no token is ever repeated, and only for an error
that says so (`BatonError.retry`). A pause that the server asks for is kept; other pauses grow, and are drawn at random,
so that many clients do not come back at once. It never sleeps itself.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.core.errors import BatonError, ConfigInvalid, Retry

SPREAD: Final = 0.25  # of a pause that the server asked for, so much longer at most


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and with which pauses. A call with all its pauses never takes longer than the client's `timeout_s`.

    Attributes:
        max_attempts: of one call, the first one included; ConfigInvalid unless positive.
        first_delay_s: the longest first pause; it doubles each time. ConfigInvalid unless positive and finite.
        max_delay_s: no pause that the server did not ask for is longer; likewise.
    """

    max_attempts: int = 4
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigInvalid(f"max_attempts: {self.max_attempts} is not positive", keys=["max_attempts"])
        for name in ("first_delay_s", "max_delay_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigInvalid(f"{name}: {value} is not positive and finite", keys=[name])


NO_RETRY: Final = RetryPolicy(max_attempts=1)


class CallAttempts:
    """The attempts at one call.

    Args:
        policy: how many.
        timeout_s: for all of them.
        now_s: the clock.
        draw: a number in [0, 1).
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._now_s = now_s
        self._draw = draw
        self._deadline_s = now_s() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float:
        """What the next attempt may take."""
        return max(self._deadline_s - self._now_s(), 0.0)

    def pause_s(self, error: BatonError) -> float:
        """How long to wait before the next attempt.

        Raises:
            BatonError: this one, if there is none.
        """
        self._num_failed += 1
        if error.retry is Retry.NEVER or self._num_failed >= self._policy.max_attempts:
            raise error
        asked_s = error.fields.get("retry_after_s")
        if isinstance(asked_s, int | float) and 0 <= asked_s < math.inf:
            delay_s = asked_s * (1 + SPREAD * self._draw())
        else:
            doubled_s = self._policy.first_delay_s * 2.0 ** min(self._num_failed - 1, 60)
            delay_s = min(doubled_s, self._policy.max_delay_s) * (1 + self._draw()) / 2
        if delay_s >= self.left_s:
            raise error
        return delay_s
