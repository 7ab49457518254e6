"""The prefill worker's end of the hand-off: a thread that drives protocol and transport, and the async writer.

The worker's loop calls `reserve`, `commit`, `abort`, `poll` and the writer; none of them waits for the network. Writer
threads read new KV from the pool, digest it and hand both over. If there is no room to keep a payload until the window
opens, only its digest is handed over, and the thread reads the blocks again when it sends: nobody waits for a slow
decode worker, and memory stays bounded.
"""

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError, TransferFailed
from baton.core.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.async_writer import AsyncWriter, PushPart
from baton.kvtransfer.frame import FrameHeader, FrameShape, crc_of, encode_header
from baton.kvtransfer.lanes import INLINE
from baton.kvtransfer.messages import encode_control, parse_control
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.push_actions import (
    Acked,
    DecodePeer,
    Denied,
    DropPeer,
    Granted,
    OpenLane,
    PushAction,
    PushDrained,
    PushEvent,
    PushFailed,
    SendControl,
    SendFrame,
    StopFrames,
)
from baton.kvtransfer.push_messages import PushIdentity
from baton.kvtransfer.push_protocol import PushProtocol
from baton.kvtransfer.span import Span
from baton.kvtransfer.transport import Delivery, Transport
from baton.proto import kv_pb2

__all__ = ["Acked", "DecodePeer", "Denied", "Granted", "PushDrained", "PushEvent", "PushFailed", "PushService"]

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_S = 0.02
JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Payload:
    count: int
    data: memoryview
    crc: int


@dataclass(frozen=True, slots=True)
class _Pushed:
    """One part of one layer, read and digested."""

    attempt: AttemptKey
    layer: int
    first: int
    count: int
    digest: int


def _do_nothing() -> None:
    pass


class PushService:
    """Every push of one prefill worker.

    Args:
        pool: source of the blocks.
        layout: of the pool.
        epoch: of this process; random.
        transport: the connecting side; owned from here on.
        config: limits and times.
        clock: the worker's.
    """

    def __init__(
        self,
        *,
        pool: KVPool,
        layout: KVLayout,
        epoch: int,
        transport: Transport,
        config: KVTransferConfig,
        clock: Clock,
    ) -> None:
        assert pool.layout == layout
        self.wakeup: Callable[[], None] = _do_nothing
        self._config = config
        self._transport = transport
        self._clock = clock
        self._layout = layout
        self._io = PoolIO(pool.bytes_view, pool.geometry)
        self._shape = FrameShape(layout, config.max_frame_bytes)
        self._protocol = PushProtocol(identity=PushIdentity(epoch), layout=layout, config=config)
        self._commands: deque[Callable[[float], list[PushAction]]] = deque()
        self._pushed: deque[_Pushed] = deque()
        self._events: deque[PushEvent] = deque()
        self._tables: dict[AttemptKey, BlockTable] = {}
        self._payloads: dict[tuple[AttemptKey, int, int], _Payload] = {}
        self._payload_bytes = 0
        self._payload_lock = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(
            ("num_pushes", "bytes_pushed", "frames_pushed", "frames_not_kept"), 0
        )
        self._turn_s = clock.now_s()
        self._is_closing = False
        self._broken: BaseException | None = None
        self._warned_of_drops = False
        self._thread = threading.Thread(target=self._run, name="kv-push", daemon=True)
        self.writer = AsyncWriter(
            self._push_part,
            config.num_writer_threads,
            config.writer_queue_len,
            pool.device,
            on_begin=self._hold,
            on_end=self._unhold,
        )

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what was not acknowledged is lost, and decode workers notice by lease."""
        self.writer.close()
        self._is_closing = True
        self._transport.wake()
        if self._thread.ident is None:
            self._transport.close()
        else:
            self._thread.join(JOIN_S)

    def poll(self) -> list[PushEvent]:
        """What happened since the last call, in order.

        Raises:
            TransferFailed: the thread ended on an error; this worker cannot push any more.
        """
        if self._broken is not None:
            raise TransferFailed(f"the push thread ended: {self._broken!r}") from self._broken
        return _take_all(self._events)

    def reserve(
        self,
        attempt: AttemptKey,
        peer: DecodePeer,
        table: BlockTable,
        prompt_len: int,
        capacity_len: int,
        wait_s: float,
    ) -> None:
        """Ask for a landing. One of `Granted`, `Denied`, `PushFailed` follows within `wait_s`, or a lease."""
        assert 0 < prompt_len <= min(capacity_len, table.capacity_len)
        self._tables[attempt] = table

        def reserve(now_s: float) -> list[PushAction]:
            problem = self._transport.problem(peer.kv_address)
            if problem:
                return [PushFailed(attempt, problem), PushDrained(attempt)]
            return self._protocol.reserve(
                attempt, peer, prompt_len=prompt_len, capacity_len=capacity_len, wait_s=wait_s, now_s=now_s
            )

        self._post(reserve)

    def commit(self, attempt: AttemptKey, state: kv_pb2.SequenceState, prefill_end_s: float) -> None:
        """The prompt is computed and its last step has ended: hand over. `Acked` or `PushFailed` follows."""
        self._post(lambda now_s: self._protocol.commit(attempt, state, prefill_end_s, now_s))

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """Give up. `PushDrained` follows, unless the transfer has ended already."""
        self._post(lambda now_s: self._protocol.abort(attempt, reason, now_s))

    def inventory(self) -> dict[str, int]:
        """Counts, as of the thread's last turn. Any thread."""
        return dict(self._counts)

    # Writer threads

    def _push_part(self, part: PushPart, layer: int) -> None:
        table = self._tables.get(part.attempt)
        if table is None:
            return  # it ended during the step
        digest = 0
        num_heads = self._layout.num_kv_heads
        for first, count in self._shape.split(layer, part.first, part.count, num_heads):
            span = Span(layer, first, count, 0, num_heads)
            digest += self._io.digest(table.blocks, span)
            self._keep(part.attempt, layer, first, count, self._io.read(table.blocks, span, self._layout.block_size))
        self._pushed.append(_Pushed(part.attempt, layer, part.first, part.count, digest))
        self._transport.wake()

    def _keep(self, attempt: AttemptKey, layer: int, first: int, count: int, data: memoryview) -> None:
        payload = _Payload(count, data, crc_of([data]))
        with self._payload_lock:
            if self._payload_bytes + len(data) > self._config.window_bytes:
                self._counts["frames_not_kept"] += 1
                return
            self._payload_bytes += len(data)
            self._payloads[attempt, layer, first] = payload

    def _hold(self, parts: Sequence[PushPart]) -> None:
        attempts = {part.attempt for part in parts}

        def hold(_: float) -> list[PushAction]:
            for attempt in attempts:
                self._protocol.hold(attempt)
            return []

        self._post(hold)

    def _unhold(self, parts: Sequence[PushPart]) -> None:
        attempts = {part.attempt for part in parts}
        self._post(lambda _: [action for attempt in attempts for action in self._protocol.unhold(attempt)])

    def _post(self, command: Callable[[float], list[PushAction]]) -> None:
        self._commands.append(command)
        self._transport.wake()

    # The service thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        # The boundary of the thread: `poll` raises what ended it, and the worker must not go on half-dead.
        except BaseException as error:
            log.exception("the push thread failed")
            self._broken = error
            self.wakeup()
        finally:
            self._transport.close()

    def _turn(self) -> None:
        now_s = self._clock.now_s()
        self._protocol.forgive(now_s - self._turn_s, now_s)
        self._turn_s = now_s
        # A commit may only overtake what was pushed before it; so the commands are taken first, and run last.
        commands = _take_all(self._commands)
        for pushed in _take_all(self._pushed):
            where = (pushed.attempt, pushed.layer, pushed.first, pushed.count)
            self._do(self._protocol.pushed(*where, pushed.digest, now_s))
            if pushed.attempt not in self._tables:
                self._forget(pushed.attempt)  # it ended while the writer was reading
        for command in commands:
            self._do(command(now_s))
        for delivery in self._transport.receive(IDLE_S):
            if isinstance(delivery, Delivery):
                self._deliver(delivery)
        self._do(self._protocol.tick(self._clock.now_s()))
        self._counts["num_pushes"] = len(tuple(self._protocol.transfers()))

    def _deliver(self, delivery: Delivery) -> None:
        try:
            assert delivery.control is not None
            control = parse_control(delivery.control)
            self._do(self._protocol.on_control(delivery.peer, control, self._clock.now_s()))
        except BatonError as error:
            log.warning("a message from %s is refused: %s", delivery.peer, error)

    def _do(self, actions: list[PushAction]) -> None:
        has_event = False
        for action in actions:
            match action:
                case SendControl():
                    self._transport.send(action.peer, encode_control(action.control))
                case SendFrame():
                    self._send_frame(action)
                case OpenLane():
                    self._do(self._protocol.lane_opened(action.peer, INLINE, self._clock.now_s()))
                case StopFrames():
                    pass  # what was posted is the transport's own copy
                case DropPeer():
                    self._transport.drop(action.peer)
                case _:
                    if isinstance(action, Denied | Acked | PushDrained):
                        self._forget(action.attempt)
                    self._events.append(action)
                    has_event = True
        if has_event:
            self.wakeup()

    def _send_frame(self, action: SendFrame) -> None:
        header = action.header
        payload = self._take_payload(action.attempt, header)
        self._counts["frames_pushed"] += 1
        self._counts["bytes_pushed"] += header.payload_bytes
        if self._config.drop_pushes:
            if not self._warned_of_drops:
                self._warned_of_drops = True
                log.warning("drop_pushes is set: no KV leaves this worker, every hand-off will fail")
            return
        digest = self._io.digest(self._tables[action.attempt].blocks, header.span)
        header = dataclasses.replace(header, payload_digest=digest)
        self._transport.send_frame(action.peer, encode_header(header), [payload.data], action.lane)

    def _take_payload(self, attempt: AttemptKey, header: FrameHeader) -> _Payload:
        with self._payload_lock:
            kept = self._payloads.pop((attempt, header.layer, header.first), None)
            if kept is not None:
                self._payload_bytes -= len(kept.data)
        if kept is not None and kept.count == header.count:
            return kept
        data = self._io.read(self._tables[attempt].blocks, header.span, header.order_block_size)
        return _Payload(header.count, data, crc_of([data]))

    def _forget(self, attempt: AttemptKey) -> None:
        self._tables.pop(attempt, None)
        with self._payload_lock:
            for key in [key for key in self._payloads if key[0] == attempt]:
                self._payload_bytes -= len(self._payloads.pop(key).data)


def _take_all(queue: deque[T]) -> list[T]:
    """Everything that is in a queue now; others may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
