"""The route of one transfer: where its frames come from and go to, and the fence that writer threads pass.

The push thread sets the data path, and opens and shuts the fence. Writer threads enter the fence or are refused. Once
it is shut and the last writer has left, nothing writes the incoming transfer any more, and the protocol reports that to
the decode worker.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.clock import Clock
from baton.core.kv_transports import RAW, is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.sender.actions import Denied, GrantInfo, OpenDataPath, PushAction, PushFailed
from baton.kvtransfer.sender.data_path import PushDataPath
from baton.kvtransfer.sender.data_path_choice import DataPathChooser
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.table import TransferState
from baton.proto import kv_pb2

CLOSED = float("-inf")


@dataclass(frozen=True, slots=True)
class Frame:
    """What is known of a frame before it is posted.

    Attributes:
        count: number of positions.
        digest: digest of the pool's rows; None with digests off.
        crc: crc32c of the payload, if it has no digest and is sent over a socket.
        data: the gathered payload, on a data path that needs it in one piece.
        is_written: whether the payload is in the decode worker's pool.
    """

    count: int
    digest: int | None = None
    crc: int | None = None
    data: memoryview | None = None
    is_written: bool = False


class WriteFence:
    """Controls which writers are inside an incoming transfer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s = CLOSED
        self._num_inside = 0
        self._is_shut = False

    def open_until(self, moment_s: float) -> None:
        """Let writers in until this moment, unless the fence was shut."""
        self._until_s = moment_s

    def enter(self, now_s: float) -> bool:
        """Enter, if that is allowed; `leave` must follow."""
        with self._lock:
            if self._is_shut or now_s > self._until_s:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> bool:
        """Leave; return whether the fence is shut and no writer is inside any more."""
        with self._lock:
            self._num_inside -= 1
            return self._is_shut and not self._num_inside

    def shut(self) -> bool:
        """Let no writer in any more, for good; return whether none is inside."""
        with self._lock:
            self._is_shut = True
            return not self._num_inside

    @property
    def is_shut(self) -> bool:
        """Whether the fence was shut."""
        return self._is_shut


@dataclass(slots=True, eq=False)
class Route:
    """The route of one transfer.

    Attributes:
        attempt: the attempt that is pushed.
        address: address of the decode worker.
        geometry: geometry of this rank's pool.
        table: the source blocks.
        prompt_len: number of positions to push.
        data_path: the data path; empty until it is known.
        opened: the opened data path to write with, if it is one-sided.
        grant: the decode worker's blocks and state slot, on a one-sided data path.
        frames: frames that were read or written and not posted yet, by (layer, first position).
        fence: fence of the incoming transfer.
        is_held: whether the push thread holds the transfer in the protocol because a writer may be inside.
        num_open: number of operations that must end before the commit. Only the push thread uses it.
        commit: the commit that waits for them.
    """

    attempt: AttemptKey
    address: str
    geometry: PoolGeometry
    table: BlockTable
    prompt_len: int
    data_path: str = ""
    opened: PushDataPath | None = None
    grant: GrantInfo | None = None
    frames: dict[tuple[int, int], Frame] = field(default_factory=dict)
    fence: WriteFence = field(default_factory=WriteFence)
    is_held: bool = False
    num_open: int = 0
    commit: Callable[[float], list[PushAction]] | None = None

    def blocks_of(self, span: KVRange) -> Sequence[int]:
        """Return the blocks of a span's layer in this rank's pool, indexed by position // rows per block."""
        return self.geometry.layer(span.layer).blocks_of(self.table.blocks, self.table.state_slot, span.end)

    def target_blocks_of(self, span: KVRange) -> Sequence[int]:
        """Return the same for the decode worker's pools."""
        assert self.grant is not None
        return self.geometry.layer(span.layer).blocks_of(self.grant.blocks, self.grant.state_slot, span.end)

    def problem_of(self, grant: GrantInfo) -> str:
        """Return why the grant cannot be written through the open data path; empty if it can."""
        assert self.opened is not None
        num_blocks, num_slots = self.opened.num_blocks, self.opened.num_state_slots
        blocks, block_size, slot = grant.blocks, self.opened.block_size, grant.state_slot
        if (slot is None) == self.geometry.layout.has_state or (slot is not None and not 0 <= slot < num_slots):
            return f"the decode worker granted state slot {slot} of {num_slots}"
        stray = next((block for block in blocks if not 0 <= block < num_blocks), None)
        if stray is not None:
            return f"the decode worker granted block {stray} of {num_blocks}"
        if len(set(blocks)) != len(blocks):
            return "the decode worker granted a block twice"
        if len(blocks) * block_size < self.prompt_len:
            size = f"{len(blocks)} blocks of {block_size}"
            return f"the decode worker granted {size} for {self.prompt_len} positions"
        return ""


class KeptBytes:
    """Limits the memory of gathered payloads, and shares it fairly among decode workers.

    Each decode worker may use as much as is left for others: a slow one gets at most half, two get two thirds together,
    so some memory always remains for those that make progress.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._by_address: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, address: str, num_bytes: int) -> bool:
        """Take memory for a payload to this decode worker; False if it has used its share."""
        with self._lock:
            taken = self._by_address.get(address, 0) + num_bytes
            if taken > self._free_bytes - num_bytes:
                return False
            self._free_bytes -= num_bytes
            self._by_address[address] = taken
            return True

    def give(self, address: str, num_bytes: int) -> None:
        """Return memory taken by `take`."""
        with self._lock:
            self._free_bytes += num_bytes
            left = self._by_address[address] - num_bytes
            if left:
                self._by_address[address] = left
            else:
                del self._by_address[address]


Actions = list[PushAction]
REOPEN_S = 0.25  # how long requests are refused after a data path could not be opened; the next one tries again


class PushRoutes:
    """The routes of all transfers of one rank.

    Args:
        protocol: this rank's protocol.
        chooser: chooses data paths.
        clock: the worker's clock.
    """

    def __init__(self, protocol: PushProtocol, chooser: DataPathChooser, clock: Clock) -> None:
        self._protocol = protocol
        self._chooser = chooser
        self._clock = clock
        self._routes: dict[AttemptKey, Route] = {}
        self._num_two_sided = 0  # number of open two-sided routes
        self._failed_s: dict[str, float] = {}  # when no data path could be opened, by address

    @property
    def are_one_sided(self) -> bool:
        """Whether no payload currently leaves through the push thread."""
        return not self._num_two_sided

    def add(self, route: Route) -> None:
        """Add the route of a transfer that is about to begin. Any thread may call this."""
        self._routes[route.attempt] = route

    def get(self, attempt: AttemptKey) -> Route | None:
        """Return the route of a live transfer. Any thread may call this."""
        return self._routes.get(attempt)

    def is_live(self, route: Route) -> bool:
        """Return whether the route's transfer has not ended."""
        return self._routes.get(route.attempt) is route

    def pop(self, attempt: AttemptKey) -> Route | None:
        """Remove the route of a transfer that has ended, and return it."""
        route = self._routes.pop(attempt, None)
        if route is not None:
            route.fence.shut()
            self._num_two_sided -= bool(route.data_path) and not is_one_sided(route.data_path)
        return route

    def refusal(self, attempt: AttemptKey, address: str, epoch: int) -> Actions:
        """Refuse a transfer to a decode worker without a usable data path; return an empty list if there may be one.

        The cause may be temporary (no file descriptor was left), so the refusal never claims that the two are
        incompatible.
        """
        choice = self._chooser.data_path_of(address)
        if choice is None or choice.epoch != epoch or choice.data_path:
            return []
        if self._clock.now_s() - self._failed_s.get(address, CLOSED) > REOPEN_S:
            return []
        return [Denied(attempt, kv_pb2.Deny.DATA_PATH, f"no data path to the decode worker: {choice.why}")]

    def fail(self, route: Route, problem: str) -> Actions:
        """End a transfer for a reason on this side."""
        transfer = self._protocol.transfer(route.attempt)
        if not self.is_live(route) or transfer is None or transfer.state is TransferState.ABORTING:
            return []
        abort = self._protocol.abort(route.attempt, problem, self._clock.now_s())
        return [PushFailed(route.attempt, problem), *abort]

    def open_data_path(self, action: OpenDataPath) -> Actions:
        """Open the best data path to a decode worker; if none works, its transfers end."""
        choice = self._chooser.choose(action.peer, action.epoch, action.host_id, action.offers)
        if choice.data_path:
            self._failed_s.pop(action.peer, None)
            return self._protocol.data_path_opened(action.peer, choice.data_path, self._clock.now_s())
        self._failed_s[action.peer] = self._clock.now_s()
        problem = f"no data path to the decode worker: {choice.why}"
        return [failed for route in self._to(action.peer) for failed in self.fail(route, problem)]

    def open_all(self, address: str) -> Actions:
        """Open the routes of transfers that were granted before there was a data path."""
        actions: Actions = []
        for route in self._to(address):
            transfer = self._protocol.transfer(route.attempt)
            if route.data_path or transfer is None or not transfer.data_path or transfer.grant is None:
                continue
            if transfer.state in (TransferState.PUSHING, TransferState.COMMITTING):
                problem = self.open(route, transfer.data_path, transfer.grant)
                actions += self.fail(route, problem) if problem else []
        return actions

    def open(self, route: Route, data_path: str, grant: GrantInfo) -> str:
        """Tell writers how to push; return why that is not possible, or empty."""
        if is_one_sided(data_path):
            choice = self._chooser.data_path_of(route.address)
            if choice is None or choice.data_path != data_path or choice.epoch != grant.d_epoch:
                return f"data path {data_path} is not open any more"
            route.opened, route.grant = choice.opened, grant
            problem = route.problem_of(grant)
            if problem:
                return problem
            self._protocol.hold(route.attempt)
            route.is_held = True
            route.fence.open_until(self._protocol.write_deadline_s(route.attempt))
        else:
            self._num_two_sided += 1
        route.data_path = data_path  # set last: writers begin once they see it
        return ""

    def ask_for_lost(self, now_s: float) -> Actions:
        """Ask what has arrived, because a two-sided connection broke and its queue was lost."""
        addresses = {route.address for route in self._all() if route.data_path == RAW}
        return [action for address in addresses for action in self._protocol.data_path_lost(address, now_s)]

    def renew(self) -> None:
        """Extend the times until which writers may enter."""
        for route in self._all():
            if route.is_held and not route.fence.is_shut:
                route.fence.open_until(self._protocol.write_deadline_s(route.attempt))
        self._chooser.sweep()

    def forget_peer(self, address: str) -> None:
        """Forget a decode worker that is not connected any more."""
        self._chooser.forget(address)
        self._failed_s.pop(address, None)

    def shut(self, attempt: AttemptKey) -> Actions:
        """Let no writer into an incoming transfer any more; once the last has left, the transfer may drain."""
        route = self._routes.get(attempt)
        return self.release(route) if route is not None and route.fence.shut() else []

    def release(self, route: Route) -> Actions:
        """Release the hold on a transfer: no writer is inside it, nor ever will be."""
        if not route.is_held:
            return []
        route.is_held = False
        return self._protocol.unhold(route.attempt)

    def _to(self, address: str) -> Iterator[Route]:
        return (route for route in self._all() if route.address == address)

    def _all(self) -> tuple[Route, ...]:
        return tuple(self._routes.values())  # a copy: the worker's thread may add routes meanwhile
