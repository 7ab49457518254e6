"""The decode worker's end of the hand-off: a thread that drives protocol and transport and writes into the pool.

Worker and thread share two rings of plain records (commands one way, events the other), completion words, and the pool;
nothing else, so that the thread can become a process of its own. The worker's calls never wait.
"""

from collections import deque
from collections.abc import Callable

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.errors import TransferFailed
from baton.core.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.landing_actions import Drained, LandingEvent, LandingFailed, ReserveWanted, Sealed
from baton.kvtransfer.landing_thread import LandingThread
from baton.kvtransfer.messages import shorten
from baton.kvtransfer.records import (
    AbortCommand,
    Command,
    DenyCommand,
    GrantCommand,
    ReleaseCommand,
    decode_record,
    encode_record,
)
from baton.kvtransfer.ring import HEADER_BYTES, CompletionWords, Ring
from baton.kvtransfer.transport import Transport
from baton.proto import kv_pb2

__all__ = ["Drained", "LandingEvent", "LandingFailed", "LandingService", "ReserveWanted", "Sealed"]

RING_BYTES_PER_SLOT = 1024
RING_BYTES_PER_BLOCK = 8  # a grant names each of its blocks with four
MIN_RING_BYTES = 1 << 20  # four of the largest states (messages.MAX_STATE_BYTES)


def _do_nothing() -> None:
    pass


class LandingService:
    """Every landing of one decode worker.

    Args:
        pool: where payloads go.
        layout: of the pool.
        epoch: of this process; random.
        transport: the listening side; owned from here on.
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
        self.address = transport.address
        sizes = (MIN_RING_BYTES, config.ring_slots * RING_BYTES_PER_SLOT, pool.num_blocks * RING_BYTES_PER_BLOCK)
        ring_bytes = HEADER_BYTES + max(sizes)
        self._command_ring = Ring(bytearray(ring_bytes))
        self._event_ring = Ring(bytearray(ring_bytes))
        self._words = CompletionWords(bytearray(CompletionWords.num_bytes(config.ring_slots)))
        self._unsent: deque[bytes] = deque()  # commands that found the ring full; the worker's side
        self._thread = LandingThread(
            pool=pool,
            epoch=epoch,
            transport=transport,
            config=config,
            clock=clock,
            commands=self._command_ring,
            events=self._event_ring,
            words=self._words,
            wakeup=lambda: self.wakeup(),
        )
        self._transport = transport

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop; prefill workers notice by lease."""
        self._thread.close()

    def poll(self) -> list[LandingEvent]:
        """What happened since the last call, in order.

        Raises:
            TransferFailed: the thread ended on an error; nothing can land any more.
        """
        if self._thread.broken is not None:
            raise TransferFailed(f"the landing thread ended: {self._thread.broken!r}") from self._thread.broken
        self._send_commands()
        events: list[LandingEvent] = []
        while (data := self._event_ring.pop()) is not None:
            event, slot = decode_record(data)
            assert isinstance(event, ReserveWanted | Sealed | LandingFailed | Drained)
            if isinstance(event, Sealed) and self._words.get(slot) != event.landing_id:
                continue  # it was given up since; LandingFailed is behind it
            events.append(event)
        return events

    def grant(self, attempt: AttemptKey, table: BlockTable) -> None:
        """Blocks for a `ReserveWanted`. `Sealed`, or `LandingFailed` and `Drained`, follows."""
        self._command(GrantCommand(attempt, table))

    def deny(self, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str) -> None:
        """No blocks for a `ReserveWanted`. Nothing follows."""
        self._command(DenyCommand(attempt, reason, shorten(detail)))

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """Give a granted attempt up. `Drained` follows, unless it was said already."""
        self._command(AbortCommand(attempt, shorten(reason)))

    def release(self, attempt: AttemptKey) -> None:
        """The sequence of a sealed landing has ended. Nothing follows; the worker has its blocks already."""
        self._command(ReleaseCommand(attempt))

    def inventory(self) -> dict[str, int]:
        """Counts, as of the thread's last turn. Any thread."""
        return dict(self._thread.counts)

    def _command(self, command: Command) -> None:
        self._unsent.append(encode_record(command))
        self._send_commands()

    def _send_commands(self) -> None:
        if not self._unsent:
            return
        while self._unsent and self._command_ring.push(self._unsent[0]):
            self._unsent.popleft()
        self._transport.wake()
