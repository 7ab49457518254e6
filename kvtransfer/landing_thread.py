"""What runs beside the decode loop: takes messages from the transport, writes payloads into the pool, verifies them.

It shares rings, words and the pool with the worker's side (`landing`), and nothing else.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError, ProtocolError
from baton.core.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.frame import Bytes, FrameHeader, decode_header, is_frame
from baton.kvtransfer.landing_actions import (
    DigestLayer,
    DiscardWrites,
    Drained,
    LandingAction,
    LandingEvent,
    LandingFailed,
    Sealed,
    SendControl,
    WriteFrame,
)
from baton.kvtransfer.landing_protocol import LandingProtocol
from baton.kvtransfer.landing_table import LandingState
from baton.kvtransfer.messages import encode_control, parse_control
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.records import (
    NO_SLOT,
    AbortCommand,
    Command,
    DenyCommand,
    GrantCommand,
    ReleaseCommand,
    decode_record,
    encode_record,
)
from baton.kvtransfer.ring import CompletionWords, Ring
from baton.kvtransfer.transport import Delivery, Transport

log = logging.getLogger(__name__)

IDLE_S = 0.02
JOIN_S = 10.0


class LandingThread:
    """Drives one transport and one `LandingProtocol`.

    Args:
        pool: where payloads go.
        epoch: of this process.
        transport: owned from here on.
        config: limits and times.
        clock: the worker's.
        commands: read here.
        events: written here.
        words: written here.
        wakeup: called after events were written.
    """

    def __init__(
        self,
        *,
        pool: KVPool,
        epoch: int,
        transport: Transport,
        config: KVTransferConfig,
        clock: Clock,
        commands: Ring,
        events: Ring,
        words: CompletionWords,
        wakeup: Callable[[], None],
    ) -> None:
        self.broken: BaseException | None = None
        self._config = config
        self._transport = transport
        self._clock = clock
        self._io = PoolIO(pool.bytes_view, pool.geometry)
        self._protocol = LandingProtocol(
            epoch=epoch,
            layout=pool.layout,
            config=config,
            max_capacity_len=pool.num_blocks * pool.layout.block_size,
        )
        self._commands = commands
        self._events = events
        self._words = words
        self._wakeup = wakeup
        self._backlog: deque[bytes] = deque()  # events that found the ring full; at most a few for each landing
        self._tables: dict[AttemptKey, BlockTable] = {}
        self._slots: dict[AttemptKey, int] = {}
        self._free_slots = deque(range(len(words)))
        self._turn_s = clock.now_s()
        self._is_closing = False
        self.counts: dict[str, int] = {}
        self._count()
        self._thread = threading.Thread(target=self._run, name="kv-landing", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and close the transport."""
        self._is_closing = True
        self._transport.wake()
        if self._thread.ident is None:
            self._transport.close()
        else:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        # The boundary of the thread: `poll` raises what ended it, and the worker must not go on half-dead.
        except BaseException as error:
            log.exception("the landing thread failed")
            self.broken = error
            self._wakeup()
        finally:
            self._transport.close()

    def _turn(self) -> None:
        now_s = self._clock.now_s()
        self._protocol.forgive(now_s - self._turn_s, now_s)
        self._turn_s = now_s
        while (data := self._commands.pop()) is not None:
            command, _ = decode_record(data)
            assert isinstance(command, GrantCommand | DenyCommand | AbortCommand | ReleaseCommand)
            self._do(self._obey(command, now_s))
        for delivery in self._transport.receive(0.0 if self._backlog else IDLE_S):
            self._deliver(delivery)
        self._do(self._protocol.flush())
        self._do(self._protocol.tick(self._clock.now_s()))
        self._publish()
        self._count()

    def _obey(self, command: Command, now_s: float) -> list[LandingAction]:
        attempt = command.attempt
        match command:
            case GrantCommand():
                self._tables[attempt] = command.table
                if self._free_slots:  # none are left only if the landing has ended meanwhile
                    self._slots[attempt] = self._free_slots.popleft()
                return self._protocol.grant(attempt, now_s)
            case DenyCommand():
                return self._protocol.deny(attempt, command.reason, command.detail, now_s)
            case AbortCommand():
                return self._protocol.abort(attempt, command.reason, now_s)
            case ReleaseCommand():
                actions = self._protocol.release(attempt, now_s)
                self._forget(attempt)
                return actions

    def _deliver(self, delivery: Delivery) -> None:
        now_s = self._clock.now_s()
        try:
            if not is_frame(delivery.parts[0]):
                control = parse_control(delivery.parts[0])
                self._do(self._protocol.on_control(delivery.peer, control, now_s))
                return
            if len(delivery.parts) != 2:
                raise ProtocolError(f"a frame of {len(delivery.parts)} parts")
            actions = self._protocol.on_frame(delivery.peer, _intact(*delivery.parts), now_s)
        except BatonError as error:
            if is_frame(delivery.parts[0]):
                self._protocol.on_corrupt_frame()
            log.warning("a message from %s is refused: %s", delivery.peer, error)
            return
        self._do(actions, delivery)

    def _do(self, actions: list[LandingAction], delivery: Delivery | None = None) -> None:
        for action in actions:
            match action:
                case SendControl():
                    self._transport.send(action.peer, [encode_control(action.control)])
                case WriteFrame():
                    assert delivery is not None
                    self._write(action, delivery)
                case DigestLayer() | DiscardWrites():
                    raise AssertionError("a write is over when `_write` returns, and verified with it")
                case _:
                    self._tell(action)

    def _write(self, action: WriteFrame, delivery: Delivery) -> None:
        landing = self._protocol.landing(action.landing_id)
        header = action.header
        blocks = self._tables[landing.attempt].blocks
        self._io.write(blocks, header.span, delivery.parts[1], header.order_block_size)
        self._do(self._protocol.landed(header, self._io.digest(blocks, header.span), self._clock.now_s()))

    def _tell(self, event: LandingEvent) -> None:
        slot = self._slots.get(event.attempt, NO_SLOT)
        if isinstance(event, Sealed):
            self._words.set(slot, event.landing_id)
        elif isinstance(event, LandingFailed) and slot != NO_SLOT:
            self._words.set(slot, 0)
        elif isinstance(event, Drained):
            self._forget(event.attempt)
        self._backlog.append(encode_record(event, slot))

    def _forget(self, attempt: AttemptKey) -> None:
        self._tables.pop(attempt, None)
        slot = self._slots.pop(attempt, None)
        if slot is not None:
            self._words.set(slot, 0)
            self._free_slots.append(slot)

    def _publish(self) -> None:
        has_published = False
        while self._backlog and self._events.push(self._backlog[0]):
            self._backlog.popleft()
            has_published = True
        if has_published:
            self._wakeup()

    def _count(self) -> None:
        landings = tuple(self._protocol.landings())
        num_landings = sum(landing.state is not LandingState.WANTED for landing in landings)
        self.counts = {
            "num_landings": num_landings,
            "num_reserves_waiting": len(landings) - num_landings,
            **asdict(self._protocol.counts),
        }


def _intact(head: Bytes, payload: Bytes) -> FrameHeader:
    header = decode_header(head)
    if header.payload_bytes != len(payload):
        raise ProtocolError("the payload of a frame is not as long as its header says")
    return header
