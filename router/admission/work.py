"""What a request asks of the workers, and what they can do, as admission sees it. Pure values."""

from dataclasses import dataclass
from typing import Final

LOW: Final = 0
NORMAL: Final = 1
HIGH: Final = 2
KV_FILL: Final = 0.9  # part of all KV that is in use when the next request does not fit
PRIORITIES: Final = (HIGH, NORMAL, LOW)  # in the order they are served


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request.

    Attributes:
        tenant: whose it is.
        num_tokens: of its prompt, to be computed.
        num_positions: of KV that it may come to hold.
        num_bytes: of the router's memory that it takes as long as it is here.
        deadline_s: when its first token must be there.
        priority: LOW, NORMAL or HIGH.
    """

    tenant: str
    num_tokens: int
    num_positions: int
    deadline_s: float
    priority: int = NORMAL
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What all workers together do. A 0 is not known, and limits nothing.

    Attributes:
        tokens_per_s: of prompts computed.
        num_workers: prefill workers, >= 1; one prompt is computed by one of them.
        num_pairs: while fewer requests than this run, some prefill and some decode worker have nothing to do.
        num_positions: of KV in all decode workers.
        residence_s: for which a request holds its KV, lately.
    """

    tokens_per_s: float = 0.0
    num_workers: int = 1
    num_pairs: int = 1
    num_positions: int = 0
    residence_s: float = 0.0

    def share_s(self, work: Work) -> float:
        """Seconds of everybody's time that a request takes: of the prefill workers, or of the KV if that is scarcer."""
        prefill_s = work.num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0
        return max(prefill_s, self.kv_s(work.num_positions))

    def kv_s(self, num_positions: int) -> float:
        """Seconds in which so many positions come free, if all are in use."""
        budget = KV_FILL * self.num_positions
        return num_positions * self.residence_s / budget if budget else 0.0

    def own_s(self, work: Work) -> float:
        """Seconds from its start to its first token, on one worker."""
        return work.num_tokens * self.num_workers / self.tokens_per_s if self.tokens_per_s else 0.0
