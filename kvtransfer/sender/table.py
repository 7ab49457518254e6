"""The records of the prefill side: one per transfer, and one per decode worker that it pushes to.

Bookkeeping only; the rules about when a record changes are in `sender.rules` and its callers.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.coverage import Coverage, LayerRange
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.transfer_times import TransferTimes
from baton.kvtransfer.sender.actions import DecodePeer, GrantInfo
from baton.proto import kv_pb2

RATE_MEMORY_S = 10.0
MAX_SAMPLES = 256


class Window:
    """The window estimate for one connection."""

    def __init__(self) -> None:
        self._posted_bytes = 0
        self._credited_bytes = 0
        # (moment, total posted including this post, total credited by then)
        self._posts: deque[tuple[float, int, int]] = deque(maxlen=MAX_SAMPLES)
        self._rates: deque[tuple[float, float]] = deque()  # (moment, bytes per second), decreasing

    def posted(self, num_bytes: int, now_s: float) -> None:
        """Record that bytes were posted."""
        self._posted_bytes += num_bytes
        self._posts.append((now_s, self._posted_bytes, self._credited_bytes))

    def credited(self, num_bytes: int, now_s: float) -> None:
        """Record that posted bytes arrived."""
        self._credited_bytes += num_bytes
        newest = None
        while self._posts and self._posts[0][1] <= self._credited_bytes:
            newest = self._posts.popleft()
        if newest is None or now_s <= newest[0]:
            return
        rate = (self._credited_bytes - newest[2]) / (now_s - newest[0])
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now_s, rate))
        if len(self._rates) > MAX_SAMPLES:
            self._rates.popleft()

    def lost(self, num_bytes: int) -> None:
        """Record that posted bytes will never be credited."""
        self._credited_bytes += num_bytes
        while self._posts and self._posts[0][1] <= self._credited_bytes:
            self._posts.popleft()

    def size_bytes(self, two_layers_bytes: int, round_trip_s: float, limit_bytes: int, now_s: float) -> int:
        """Return how many bytes may be in flight now."""
        return min(limit_bytes, max(two_layers_bytes, int(2 * self.rate(now_s) * round_trip_s)))

    def rate(self, now_s: float) -> float:
        """Return the best recent rate, in bytes per second; 0 if there was none."""
        while self._rates and self._rates[0][0] < now_s - RATE_MEMORY_S:
            self._rates.popleft()
        return self._rates[0][1] if self._rates else 0.0


MAX_HELLOS = 16  # number of HELLOs sent and not answered
MAX_OFFSETS = 16  # number of clock samples considered


class TransferState(Enum):
    """The state of one attempt. A transfer that leaves the last state is gone."""

    RESERVING = auto()
    PUSHING = auto()  # granted; frames may be posted
    COMMITTING = auto()
    ABORTING = auto()  # nothing is posted any more; source blocks may still be read, or the incoming transfer written


@dataclass(slots=True)
class Transfer:
    """One attempt on its way to a decode worker, for this rank's heads.

    Attributes:
        deadline_s: deadline for the reply to RESERVE.
        retry_s: when RESERVE, COMMIT or RESUME is repeated.
        renewed: when the decode worker last showed that it knows this transfer.
        named_s: the same, with nothing forgiven.
        progress: when the decode worker last made progress on it.
        is_told: whether `Granted` was emitted, so that other ranks may know of the grant.
        is_confirmed: whether the decode worker confirmed the transfer after this rank learned of the grant.
        num_writes: writes into the decode worker's pool that have begun and not ended.
        two_layers_bytes: how many bytes of the window two layers use.
        charged_bytes: bytes posted, except those written off as lost.
        credited_bytes: of those, bytes no longer in flight.
        bytes_pushed: payload bytes, each position counted once.
        first_posted_s: when its first frame was posted; None before.
        abort: the decode worker's ABORT, which waits for an ABORT_ACK.
    """

    attempt: AttemptKey
    peer: DecodePeer
    prompt_len: int
    capacity_len: int
    deadline_s: float
    retry_s: float
    renewed: LastSign
    progress: LastSign
    named_s: float
    coverage: Coverage
    digests: list[int]
    two_layers_bytes: int
    state: TransferState = TransferState.RESERVING
    grant: GrantInfo | None = None
    data_path: str = ""
    lease_s: float = 0.0
    is_told: bool = False
    is_confirmed: bool = True
    to_send: deque[LayerRange] = field(default_factory=deque)
    next_seq: int = 0
    num_writes: int = 0
    num_holds: int = 0
    charged_bytes: int = 0
    credited_bytes: int = 0
    bytes_pushed: int = 0
    first_posted_s: float | None = None
    num_resends: int = 0
    round: int = 0
    state_message: kv_pb2.SequenceState | None = None
    prefill_end_s: float = 0.0
    is_commit_posted: bool = False
    is_resume_posted: bool = False
    resume_round: int = 0
    abort: kv_pb2.Abort | None = None

    @property
    def incoming_id(self) -> int:
        """Id of the incoming transfer; 0 before the grant."""
        return self.grant.incoming_id if self.grant is not None else 0

    @property
    def incoming_key(self) -> tuple[str, int, int]:
        """Key of the incoming transfer: every incarnation of a decode worker counts its transfers from 1."""
        return self.peer.kv_address, self.peer.epoch, self.incoming_id

    @property
    def in_flight_bytes(self) -> int:
        """Charged bytes that were not credited."""
        return self.charged_bytes - self.credited_bytes

    @property
    def is_one_sided(self) -> bool:
        """Whether this side writes the decode worker's pool."""
        return is_one_sided(self.data_path)

    @property
    def is_commit_due(self) -> bool:
        """Whether all frames are posted and, where this side writes, written, but no COMMIT was posted yet."""
        is_ready = self.state is TransferState.COMMITTING and not self.to_send and not self.num_writes
        return is_ready and not self.is_commit_posted

    @property
    def has_something_to_post(self) -> bool:
        """Whether a frame or a COMMIT waits to be posted."""
        return bool(self.to_send) or self.is_commit_due

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads the source blocks or writes the incoming transfer on behalf of this transfer."""
        return not self.num_holds and not self.num_writes


@dataclass(slots=True)
class RepeatedAbort:
    """An ABORT that is repeated until it is acknowledged or pointless. `is_told` is the transfer's."""

    control: kv_pb2.Control
    is_told: bool
    retry_s: float
    until_s: float


@dataclass(slots=True)
class PushPeer:
    """What is known of one decode worker, by its address.

    Attributes:
        heard: its last sign of life.
        used_s: when this side last needed to communicate with it.
        progress_s: when credit last came from it.
        epoch: its incarnation; 0 until a HELLO was answered.
        data_path: the best data path opened to that incarnation; empty until then.
        has_digest: whether it verifies by digest.
        block_size: block size of its pools.
        hellos: send times of unanswered HELLOs, in ns.
        hello_ns: send time of the last HELLO.
        challenge: the challenge that it gave to this connection; empty until then.
        challenged_s: when a challenge was last answered at once.
        is_doubted: whether it replied without a proof, and that was reported.
        may_ask: whether a transfer to it used a data path where this side writes; then it asks every rank before it
            frees the blocks.
        offsets: pairs (round trip, clock offset).
    """

    heard: LastSign
    used_s: float
    progress_s: float = float("-inf")
    epoch: int = 0
    data_path: str = ""
    has_digest: bool = False
    block_size: int = 0
    window: Window = field(default_factory=Window)
    hello_s: float = float("-inf")
    hellos: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_HELLOS))
    offsets: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_OFFSETS))
    hello_ns: int = 0
    challenge: bytes = b""
    challenged_s: float = float("-inf")
    is_doubted: bool = False
    may_ask: bool = False
    farewells: OrderedDict[AttemptKey, RepeatedAbort] = field(default_factory=OrderedDict)

    @property
    def clock_offset_s(self) -> float:
        """What to add to a time on this side's clock to get its clock's: the estimate with the shortest round trip."""
        return min(self.offsets)[1] if self.offsets else 0.0

    @property
    def round_trip_s(self) -> float:
        """The shortest recent round trip; 0 if none was measured."""
        return min(self.offsets)[0] if self.offsets else 0.0

    def forget_incarnation(self) -> None:
        """Forget the incarnation: the next reply may be another's, and replies of the old one do not count any more."""
        self.epoch = 0
        self.data_path = ""
        self.hellos.clear()
        self.hello_s = float("-inf")


# What the sender counts for metrics and the doctor: transfers, times, waits for the window, and each path. Owned by
# `PushRules`, on the push thread. It makes no decisions.


@dataclass(frozen=True, slots=True)
class PathCounts:
    """Measurements of the path to one decode worker.

    Attributes:
        address: address of its KV receiver.
        epoch: its incarnation; 0 if it is not known now.
        bytes_pushed: bytes of transfers that were acknowledged.
        num_acked: number of acknowledged transfers.
        bytes_per_s: the best recent rate at which pushed bytes were credited; 0 if none was measured.
        round_trip_s: the shortest recent round trip of control messages; 0 if none was measured.
    """

    address: str
    epoch: int
    bytes_pushed: int
    num_acked: int
    bytes_per_s: float
    round_trip_s: float


class PushTotals:
    """Totals since the start; they only grow."""

    def __init__(self) -> None:
        self.num_acked = 0
        self.transfer_s = 0.0  # from the first frame to the acknowledgement
        self.exposed_s = 0.0  # from the end of the prefill to the acknowledgement
        self.times = TransferTimes()
        self.credit_stall_s = 0.0
        self.frames_resent = 0
        self._blocked_since_s: dict[str, float] = {}
        self._acked: dict[str, tuple[int, int]] = {}  # by address: transfers, bytes

    def acked(self, transfer: Transfer, now_s: float) -> None:
        """Count a transfer that the decode worker acknowledged."""
        self.num_acked += 1
        transfer_s = now_s - (transfer.first_posted_s or now_s)
        exposed_s = max(0.0, now_s - transfer.prefill_end_s)
        self.transfer_s += transfer_s
        self.exposed_s += exposed_s
        self.times.observe(transfer_s, exposed_s)
        num_acked, num_bytes = self._acked.get(transfer.peer.kv_address, (0, 0))
        self._acked[transfer.peer.kv_address] = num_acked + 1, num_bytes + transfer.bytes_pushed

    def window(self, address: str, is_full: bool, now_s: float) -> None:
        """Record whether frames for a decode worker wait for its credit now."""
        since_s = self._blocked_since_s.pop(address, None)
        if since_s is not None:
            self.credit_stall_s += now_s - since_s
        if is_full:
            self._blocked_since_s[address] = now_s

    def forget(self, address: str) -> None:
        """Forget a decode worker that is not used any more."""
        self._blocked_since_s.pop(address, None)
        self._acked.pop(address, None)

    def path(self, address: str, peer: PushPeer, now_s: float) -> PathCounts:
        """Return the measurements of one decode worker."""
        num_acked, num_bytes = self._acked.get(address, (0, 0))
        return PathCounts(address, peer.epoch, num_bytes, num_acked, peer.window.rate(now_s), peer.round_trip_s)
