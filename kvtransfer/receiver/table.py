"""The receiver's records: live incoming transfers, and tombstones of recent ones.

Bookkeeping only; the rules about when a record changes are in `receiver.rules` and its callers.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.coverage import Coverage
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.proto import kv_pb2

MAX_AHEAD = 1 << 16  # a window never allows more frames


class SeqSet:
    """All numbers below a base, and some above it."""

    __slots__ = ("_above", "base")

    def __init__(self) -> None:
        self.base = 0
        self._above: set[int] = set()

    def add(self, seq: int) -> bool:
        """Add a number; return whether it was new. One too far above the base never is: no honest peer sends it."""
        if seq < self.base or seq in self._above or seq >= self.base + MAX_AHEAD:
            return False
        self._above.add(seq)
        self._advance()
        return True

    def raise_base(self, base: int) -> None:
        """Count all numbers below `base` as seen."""
        if base > self.base:
            self.base = base
            self._above = {seq for seq in self._above if seq >= base}
            self._advance()

    def _advance(self) -> None:
        while self.base in self._above:
            self._above.remove(self.base)
            self.base += 1


TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 65_536


class IncomingState(Enum):
    """The state of one attempt. A transfer that leaves the last two states is gone, except for a tombstone."""

    WANTED = auto()  # RESERVE received; holds nothing
    FILLING = auto()  # blocks granted; frames may arrive
    COMPLETE = auto()  # complete and verified; the sequence owns the blocks, nothing is written
    QUARANTINED = auto()  # fenced; a prefill worker may still write the blocks


@dataclass(slots=True)
class RankPush:
    """The part of an incoming transfer that one rank of the prefill worker pushes.

    Attributes:
        rank: rank of the prefill worker.
        renewed: its last sign of life for this incoming transfer.
        digests: sums of the digests of its frames that arrived, by layer.
        charged_bytes: bytes of its frames that arrived, each counted once, without frames written off.
        seen: numbers of frames that were charged or written off.
        min_seq: frames with a lower number are written off: their sender was told that they are missing.
        commit: its last COMMIT.
        is_commit_void: whether its sender was asked to write again, so that only the next COMMIT counts.
        nack_due_s: when to ask for what is missing.
        nacked_round: round of the COMMIT that was last answered with a NACK.
        is_drained: whether it reported that it writes nothing any more, or is dead.
        asked_s: when it was last asked whether it has drained.
    """

    rank: int
    renewed: LastSign
    digests: list[int]
    charged_bytes: int = 0
    seen: SeqSet = field(default_factory=SeqSet)
    min_seq: int = 0
    commit: kv_pb2.Commit | None = None
    is_commit_void: bool = False
    nack_due_s: float | None = None
    nacked_round: int = -1
    is_drained: bool = False
    asked_s: float = float("-inf")

    def write_off(self, next_seq: int) -> None:
        """Write off frames below `next_seq`: their sender knows what is missing, and late ones are not charged."""
        if next_seq > self.min_seq:
            self.min_seq = next_seq
            self.seen.raise_base(next_seq)


@dataclass(slots=True)
class IncomingTransfer:
    """One attempt at this decode worker. Counts of positions and bytes start with the grant.

    Attributes:
        epoch: incarnation that granted it; a former one if it was inherited.
        parts: parts by rank of the prefill worker.
        writes: writes in progress, by what they cover.
        corrupt: ranges that arrived corrupt before.
        ack_to: peers that wait for an ABORT_ACK.
        has_failed: whether IncomingFailed was emitted.
    """

    attempt: AttemptKey
    epoch: int
    peer: str
    p_epoch: int
    data_path: str
    prompt_len: int
    capacity_len: int
    deadline_s: float
    coverage: Coverage
    parts: list[RankPush]
    digests: list[int | None]  # digests of whole layers, if only the engine can read the pool
    state: IncomingState = IncomingState.WANTED
    incoming_id: int = 0
    blocks: tuple[int, ...] = ()
    state_slot: int | None = None
    writes: dict[tuple[int, int, int], FrameHeader] = field(default_factory=dict)
    corrupt: Coverage | None = None
    corrupt_layers: set[int] = field(default_factory=set)
    bytes_landed: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (moment, payload bytes)
    complete_s: float = 0.0  # since when every COMMIT and every position has been there; 0: something is missing
    has_failed: bool = False
    ack_to: set[str] = field(default_factory=set)
    reason: str = ""
    deny_reason: kv_pb2.Deny.Reason = kv_pb2.Deny.STALE

    def bytes_before(self, moment_s: float) -> int:
        """Return the payload bytes that had arrived by then."""
        return sum(num_bytes for arrived_s, num_bytes in self.arrivals if arrived_s <= moment_s)

    def is_being_written(self, header: FrameHeader) -> bool:
        """Return whether a write in progress overlaps this frame."""
        return any(
            write.layer == header.layer
            and write.first < header.end
            and header.first < write.end
            and write.head_first < header.head_first + header.head_count
            and header.head_first < write.head_first + write.head_count
            for write in self.writes.values()
        )


def write_key(header: FrameHeader) -> tuple[int, int, int]:
    """Return the key of a write in progress; unique because such writes do not overlap."""
    return header.layer, header.first, header.head_first


@dataclass(frozen=True, slots=True)
class Inherited:
    """An incoming transfer that a former incarnation of the KV receiver process granted, as the worker knows it.

    Attributes:
        attempt: the attempt that was granted.
        epoch: incarnation that granted it.
        p_epoch: incarnation of the prefill worker, from `ReserveWanted`.
        tp_size: number of the prefill worker's ranks.
        data_path: its data path, a one-sided one.
        is_complete: whether the sequence runs; else its blocks are held until there is evidence that no process writes
            them.
    """

    attempt: AttemptKey
    epoch: int
    p_epoch: int
    tp_size: int
    data_path: str
    is_complete: bool


@dataclass(slots=True)
class Tombstone:
    """What is needed to answer messages about an attempt that has ended."""

    attempt: AttemptKey
    incoming_id: int
    was_complete: bool
    ended_s: float
    reason: str
    deny_reason: kv_pb2.Deny.Reason = kv_pb2.Deny.STALE
    told_s: float = float("-inf")  # when the peer was last told that the incoming transfer is gone


class IncomingTable:
    """All live incoming transfers, and tombstones of those that ended."""

    def __init__(self) -> None:
        self._live: dict[AttemptKey, IncomingTransfer] = {}
        self._by_id: dict[int, IncomingTransfer] = {}
        self._ended: OrderedDict[AttemptKey, Tombstone] = OrderedDict()
        self._ended_by_id: dict[int, Tombstone] = {}
        self._highest: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[IncomingTransfer]:
        return iter(tuple(self._live.values()))

    def get(self, attempt: AttemptKey) -> IncomingTransfer | None:
        """Return the live incoming transfer of an attempt."""
        return self._live.get(attempt)

    def by_id(self, incoming_id: int) -> IncomingTransfer | None:
        """Return the live incoming transfer that was granted this id."""
        return self._by_id.get(incoming_id)

    def tombstone(self, attempt: AttemptKey) -> Tombstone | None:
        """Return the tombstone of an attempt that has ended."""
        return self._ended.get(attempt)

    def tombstone_by_id(self, incoming_id: int) -> Tombstone | None:
        """Return the tombstone of the incoming transfer that was granted this id."""
        return self._ended_by_id.get(incoming_id)

    def highest_attempt(self, request_id: str) -> int:
        """Return the highest attempt of a request that was seen; -1 for none."""
        return self._highest.get(request_id, (-1, 0.0))[0]

    def add(self, incoming: IncomingTransfer, now_s: float) -> None:
        """Add an attempt that was never seen."""
        key = incoming.attempt
        assert key not in self._live
        assert key not in self._ended
        self._live[key] = incoming
        self._see(key, now_s)

    def index(self, incoming: IncomingTransfer) -> None:
        """Make an incoming transfer findable by the id that it was just granted."""
        assert incoming.incoming_id not in self._by_id
        self._by_id[incoming.incoming_id] = incoming

    def end(self, incoming: IncomingTransfer, now_s: float) -> None:
        """Replace a live incoming transfer by its tombstone."""
        del self._live[incoming.attempt]
        self._by_id.pop(incoming.incoming_id, None)
        complete = incoming.state is IncomingState.COMPLETE
        self.bury(
            Tombstone(incoming.attempt, incoming.incoming_id, complete, now_s, incoming.reason, incoming.deny_reason)
        )

    def bury(self, tombstone: Tombstone) -> None:
        """Add the tombstone of an attempt that has ended, whether or not it was ever here."""
        self._ended[tombstone.attempt] = tombstone
        if tombstone.incoming_id:
            self._ended_by_id[tombstone.incoming_id] = tombstone
        self._see(tombstone.attempt, tombstone.ended_s)
        if len(self._ended) > MAX_TOMBSTONES:
            self._forget_oldest()

    def others_of(self, attempt: AttemptKey) -> list[IncomingTransfer]:
        """Return the live incoming transfers of the same request."""
        return [live for live in self if live.attempt.request_id == attempt.request_id]

    def prune(self, now_s: float) -> None:
        """Forget tombstones that no message in flight can ask about any more."""
        while self._ended and next(iter(self._ended.values())).ended_s < now_s - TOMBSTONE_S:
            self._forget_oldest()
        while len(self._highest) > MAX_TOMBSTONES or (
            self._highest and next(iter(self._highest.values()))[1] < now_s - TOMBSTONE_S
        ):
            request_id, (attempt, _) = self._highest.popitem(last=False)
            if AttemptKey(request_id, attempt) in self._live:
                self._highest[request_id] = (attempt, now_s)

    def _see(self, attempt: AttemptKey, now_s: float) -> None:
        highest = max(self.highest_attempt(attempt.request_id), attempt.attempt)
        self._highest[attempt.request_id] = (highest, now_s)
        self._highest.move_to_end(attempt.request_id)

    def _forget_oldest(self) -> None:
        _, tombstone = self._ended.popitem(last=False)
        self._ended_by_id.pop(tombstone.incoming_id, None)
