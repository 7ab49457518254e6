"""The records of the prefill side: one for each transfer, one for each decode worker it goes to.

Bookkeeping only; every rule about when a record changes is in `push_protocol`.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.request import AttemptKey
from baton.kvtransfer.coverage import Coverage, Gap
from baton.kvtransfer.last_sign import LastSign
from baton.kvtransfer.push_actions import DecodePeer
from baton.proto import kv_pb2

MAX_HELLOS = 16  # sent and not answered
MAX_OFFSETS = 16  # clock samples looked back at


class TransferState(Enum):
    """Where one attempt is. What leaves the last is gone."""

    RESERVING = auto()
    PUSHING = auto()  # granted; frames may be posted
    COMMITTING = auto()
    ABORTING = auto()  # nothing is posted any more; source blocks may still be read by a writer


@dataclass(slots=True)
class Transfer:
    """One attempt on its way to a decode worker."""

    attempt: AttemptKey
    peer: DecodePeer
    prompt_len: int
    capacity_len: int
    deadline_s: float  # for the answer to RESERVE
    retry_s: float  # when RESERVE or COMMIT is repeated
    renewed: LastSign  # when the decode worker last showed that it knows this transfer
    progress: LastSign  # when it last did something about it
    coverage: Coverage
    digests: list[int]
    state: TransferState = TransferState.RESERVING
    landing_id: int = 0
    window_bytes: int = 0
    to_send: deque[Gap] = field(default_factory=deque)
    next_seq: int = 0
    charged_bytes: int = 0  # posted
    credited_bytes: int = 0  # of those, no longer in flight
    bytes_pushed: int = 0  # payload, each position once
    num_resends: int = 0
    round: int = 0
    state_message: kv_pb2.SequenceState | None = None
    prefill_end_s: float = 0.0
    num_holds: int = 0
    is_commit_posted: bool = False
    is_resume_posted: bool = False
    resume_round: int = 0

    @property
    def in_flight_bytes(self) -> int:
        """Charged bytes that no credit has come back for."""
        return max(0, self.charged_bytes - self.credited_bytes)


@dataclass(slots=True)
class Farewell:
    """An ABORT that is repeated until it is acknowledged or pointless."""

    control: kv_pb2.Control
    retry_s: float
    until_s: float


@dataclass(slots=True)
class PushPeer:
    """What is known of one decode worker, by its address."""

    heard: LastSign
    progress_s: float = float("-inf")  # when credit last came from it
    epoch: int = 0  # 0 until a HELLO was answered
    hello_s: float = float("-inf")
    hellos: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_HELLOS))  # sent_ns
    offsets: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_OFFSETS))
    farewells: dict[AttemptKey, Farewell] = field(default_factory=dict)

    @property
    def clock_offset_s(self) -> float:
        """What to add to a reading here to get one there: the estimate with the shortest round trip."""
        return min(self.offsets)[1] if self.offsets else 0.0
