"""Where one transfer's frames come from and go to, as writer threads see it, and the gate before its incoming transfer.

The push thread decides: it fills in the lane and opens and closes the gate. Writer threads pass the gate, or not. Once
it is closed and the last of them is out, nothing writes the incoming transfer any more, and that is said on the wire.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.protocol.frame import Span
from baton.kvtransfer.sender.actions import GrantInfo, PushAction
from baton.kvtransfer.sender.lane import PushLane

CLOSED = float("-inf")


@dataclass(frozen=True, slots=True)
class Frame:
    """What is known of a frame before it is posted.

    Attributes:
        count: its positions.
        digest: of the pool's rows; None with digests off.
        crc: of the payload, where it has no digest and goes by a socket.
        data: its payload, gathered, on a lane that needs it in one piece.
        is_written: it lies in the decode worker's pool.
    """

    count: int
    digest: int | None = None
    crc: int | None = None
    data: memoryview | None = None
    is_written: bool = False


class Gate:
    """Who is inside an incoming transfer. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s = CLOSED
        self._num_inside = 0
        self._is_shut = False

    def open_until(self, moment_s: float) -> None:
        """Let writers in until this moment, unless it was shut."""
        self._until_s = moment_s

    def enter(self, now_s: float) -> bool:
        """Go in, if that is allowed; `leave` must follow."""
        with self._lock:
            if self._is_shut or now_s > self._until_s:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> bool:
        """Go out; whether the gate is shut and nobody is inside any more."""
        with self._lock:
            self._num_inside -= 1
            return self._is_shut and not self._num_inside

    def shut(self) -> bool:
        """Let nobody in any more; whether nobody is inside. For good."""
        with self._lock:
            self._is_shut = True
            return not self._num_inside

    @property
    def is_shut(self) -> bool:
        """Whether it was."""
        return self._is_shut


@dataclass(slots=True, eq=False)
class Route:
    """One transfer.

    Attributes:
        attempt: whose.
        address: of the decode worker.
        geometry: of this rank's pool.
        table: the source.
        prompt_len: positions that will be pushed.
        lane: empty until it is known.
        opened: what to write with, on a one-sided lane.
        grant: the decode worker's blocks and state slot, on a one-sided lane.
        frames: read, or written, and not posted yet, by (layer, first position).
        gate: before the incoming transfer.
        is_held: the push thread holds the transfer in the protocol for as long as somebody may be inside.
        num_open: what was begun for it and has to be over before it may be committed. Of the push thread.
        commit: waits for that.
    """

    attempt: AttemptKey
    address: str
    geometry: PoolGeometry
    table: BlockTable
    prompt_len: int
    lane: str = ""
    opened: PushLane | None = None
    grant: GrantInfo | None = None
    frames: dict[tuple[int, int], Frame] = field(default_factory=dict)
    gate: Gate = field(default_factory=Gate)
    is_held: bool = False
    num_open: int = 0
    commit: Callable[[float], list[PushAction]] | None = None

    def blocks_of(self, span: Span) -> Sequence[int]:
        """Where a span's layer lies here, by position // its rows per block."""
        return self.geometry.layer(span.layer).blocks_of(self.table.blocks, self.table.state_slot, span.end)

    def target_blocks_of(self, span: Span) -> Sequence[int]:
        """The same in the decode worker's pools."""
        assert self.grant is not None
        return self.geometry.layer(span.layer).blocks_of(self.grant.blocks, self.grant.state_slot, span.end)

    def problem_of(self, grant: GrantInfo) -> str:
        """Why what was granted cannot be written through the open lane; empty if it can."""
        assert self.opened is not None
        num_blocks, num_slots = self.opened.num_blocks, self.opened.num_state_slots
        blocks, block_size, slot = grant.blocks, grant.block_size, grant.state_slot
        if (slot is None) == self.geometry.layout.has_state or (slot is not None and not 0 <= slot < num_slots):
            return f"the decode worker granted state slot {slot} of {num_slots}"
        stray = next((block for block in blocks if not 0 <= block < num_blocks), None)
        if stray is not None:
            return f"the decode worker granted block {stray} of {num_blocks}"
        if len(set(blocks)) != len(blocks):
            return "the decode worker granted a block twice"
        if len(blocks) * block_size < self.prompt_len:
            return f"the decode worker granted {len(blocks)} blocks for {self.prompt_len} positions"
        return ""


class KeptBytes:
    """How much memory gathered payloads may take, shared fairly among decode workers.

    Each may have as much as is left: one that is slow takes half, two of them two thirds, so there always is some for
    those that get on.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._by_address: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, address: str, num_bytes: int) -> bool:
        """Take memory for a payload to this decode worker; False if it has its share."""
        with self._lock:
            taken = self._by_address.get(address, 0) + num_bytes
            if taken > self._free_bytes - num_bytes:
                return False
            self._free_bytes -= num_bytes
            self._by_address[address] = taken
            return True

    def give(self, address: str, num_bytes: int) -> None:
        """Give it back."""
        with self._lock:
            self._free_bytes += num_bytes
            left = self._by_address[address] - num_bytes
            if left:
                self._by_address[address] = left
            else:
                del self._by_address[address]
