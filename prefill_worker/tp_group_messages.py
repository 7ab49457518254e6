"""What the ranks of a prefill worker tell each other about the hand-off; the form is `engine.tp.plan_codec`'s.

Rank 0 tells the others what to push and what to end; they report how it ended.
"""

from dataclasses import dataclass

from baton.core.requests.request import AttemptKey
from baton.engine.tp.plan import plan_codec
from baton.engine.tp.plan_codec import PlanCodec
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.sender.service import Acked, DecodePeer, GrantInfo, PushDrained, PushFailed


@dataclass(frozen=True, slots=True)
class Adopt:
    """`PushService.adopt`."""

    attempt: AttemptKey
    peer: DecodePeer
    table: BlockTable
    prompt_len: int
    grant: GrantInfo


@dataclass(frozen=True, slots=True)
class PushCached:
    """`PushService.push_cached`."""

    attempt: AttemptKey
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Commit:
    """`PushService.commit`, without the state, which is rank 0's."""

    attempt: AttemptKey
    prefill_end_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """`PushService.abort`."""

    attempt: AttemptKey
    reason: str


TOLD: dict[int, type] = {67: Adopt, 68: PushCached, 69: Commit, 70: Abort}
REPORTED: dict[int, type] = {80: Acked, 81: PushFailed, 82: PushDrained}


def prefill_codec() -> PlanCodec:
    """The codec of a prefill worker's TP group."""
    return plan_codec({**TOLD, **REPORTED})
