"""When a sequence got where on a decode worker, and what its first event says of that."""

from dataclasses import dataclass
from typing import Final

from baton.kvtransfer.receiver.service import Completed
from baton.proto import worker_pb2

MAX_DRAFT_MS: Final = 1e9


@dataclass(slots=True)
class DecodeTimes:
    """Readings of the worker's clock, in seconds; 0 for what has not happened.

    Attributes:
        attended_s: the router's stream was opened.
        granted_s: blocks were granted.
        computing_s: of a prompt that is computed here, its first chunk was begun.
        first_token_s: likewise, its first token was known.
        admitted_s: it took part in steps from here on.
        first_s: the first step's tokens were ready.
    """

    attended_s: float = 0.0
    granted_s: float = 0.0
    computing_s: float = 0.0
    first_token_s: float = 0.0
    admitted_s: float = 0.0
    first_s: float = 0.0


def landed_s(complete: Completed) -> float:
    """When everything that the seal rests on was there; the seal itself where an incoming transfer does not say."""
    return complete.complete_s or complete.completed_s


def draft_s(complete: Completed) -> float:
    """From the first token to the hand-over, as the prefill worker says; 0 if that is no duration."""
    draft_ms = complete.state.draft_ms
    return draft_ms / 1e3 if 0 <= draft_ms < MAX_DRAFT_MS else 0.0  # nor is a NaN


def decode_start(times: DecodeTimes, complete: Completed) -> worker_pb2.DecodeStart:
    """The parts of the way to the first decoded tokens."""
    here_s, draft = landed_s(complete), draft_s(complete)
    return worker_pb2.DecodeStart(
        draft_ms=1e3 * draft,
        transfer_ms=1e3 * (here_s - complete.prefill_end_s - draft),
        landed_ns=int(1e9 * here_s),
        verification_ms=1e3 * (complete.completed_s - here_s),
        admission_ms=1e3 * (times.admitted_s - complete.completed_s),
        step_ms=1e3 * (times.first_s - times.admitted_s),
    )


def local_start(times: DecodeTimes) -> worker_pb2.DecodeStart:
    """The same where the prompt was computed here: nothing was handed over."""
    return worker_pb2.DecodeStart(
        draft_ms=1e3 * (times.admitted_s - times.first_token_s),
        landed_ns=int(1e9 * times.admitted_s),
        step_ms=1e3 * (times.first_s - times.admitted_s),
    )
