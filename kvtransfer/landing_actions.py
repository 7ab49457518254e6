"""What the landing protocol tells its caller: events for the decode worker, and things to do for it."""

from dataclasses import dataclass

from baton.core.request import AttemptKey
from baton.kvtransfer.frame import FrameHeader
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class ReserveWanted:
    """A prefill worker asks for blocks: answer with `grant` or `deny` before `deadline_s`. Nothing is held yet."""

    attempt: AttemptKey
    prompt_len: int
    capacity_len: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Sealed:
    """Every position of every layer has landed and is verified; the blocks belong to the sequence from here on.

    Attributes:
        attempt: whose.
        landing_id: of this landing; never used again in this epoch.
        prompt_len: positions that landed.
        state: what decode needs beside the KV.
        bytes_landed: payload bytes, each counted once.
        bytes_landed_before_prefill_end: those of frames that were in the pool when the first token was known.
        prefill_end_s: when that was, on this side's clock.
    """

    attempt: AttemptKey
    landing_id: int
    prompt_len: int
    state: kv_pb2.SequenceState
    bytes_landed: int
    bytes_landed_before_prefill_end: int
    prefill_end_s: float


@dataclass(frozen=True, slots=True)
class LandingFailed:
    """Stop the request. If blocks were granted and the landing was not sealed, they stay taken until `Drained`.

    Attributes:
        attempt: whose.
        reason: one sentence.
        by_peer: the prefill worker gave it up, and counts the failure itself.
    """

    attempt: AttemptKey
    reason: str
    by_peer: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing will be written into the granted blocks any more: free the table."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a message to a peer. It may get lost."""

    peer: str
    control: kv_pb2.Control


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """Write the payload at hand into the landing's blocks, then call `landed`."""

    landing_id: int
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class DigestLayer:
    """Compute the digest of a complete layer from the pool, then call `digested`."""

    landing_id: int
    layer: int


LandingEvent = ReserveWanted | Sealed | LandingFailed | Drained
LandingAction = LandingEvent | SendControl | WriteFrame | DigestLayer
