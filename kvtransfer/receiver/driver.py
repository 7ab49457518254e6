"""The receiver's loop beside the decode loop: takes messages, has payloads written into the pools, and verifies them.

It drives one transport and one `ReceiverProtocol`. It shares only a `ReceiverLink` and the pools' memory with the
worker's side (`receiver.service`); whether the two share a process is up to the caller of `turn`, which may be a thread
or a process. No turn waits for one peer: the transport reads a payload that is still arriving while other frames are
processed.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace

from baton.core.clock import Clock
from baton.core.errors import BatonError, ProtocolError
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.pool_io import WorkerPoolIO
from baton.kvtransfer.protocol.frame import Bytes, FrameHeader, crc_of, decode_header
from baton.kvtransfer.protocol.incarnation_file import Evidence, host_id
from baton.kvtransfer.protocol.messages import encode_control, parse_control
from baton.kvtransfer.protocol.transfer_times import TIME_NAMES
from baton.kvtransfer.protocol.transport import Delivery, Payload, PayloadDone, Transport, TransportCounts
from baton.kvtransfer.receiver.actions import (
    AnswerControl,
    Completed,
    DigestLayer,
    DiscardWrites,
    Drained,
    IncomingFailed,
    ReceiverAction,
    ReceiverEvent,
    ReserveWanted,
    WriteFrame,
)
from baton.kvtransfer.receiver.device_jobs import DeviceJobs
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.protocol import ReceiverProtocol
from baton.kvtransfer.receiver.records import (
    NO_SLOT,
    AbortCommand,
    Command,
    DenyCommand,
    GrantCommand,
    ReleaseCommand,
    decode_record,
    encode_record,
)
from baton.kvtransfer.receiver.rules import ReceiverCounts
from baton.kvtransfer.receiver.setup import ReceiverSetup
from baton.kvtransfer.receiver.table import IncomingState
from baton.proto import kv_pb2

log = logging.getLogger(__name__)

IDLE_S = 0.02
STAGING_KEY = "kv_staging_mib"  # prefix of a denial for lack of staging memory
FLAG_S = 50e-6  # interval between checks of the kernels' flags
SAY_EVERY_S = 10.0  # every refusal is counted, but logged no more often than this
COUNT_S = 0.01  # maximum age of the published counters
CREDIT_BYTES = 1 << 20
TICK_S = 0.005  # nothing that becomes due by time is more urgent
GAUGE_NAMES = frozenset(("num_kv_receives", "num_reserves_waiting"))
COUNT_NAMES = (
    *sorted(GAUGE_NAMES),
    *(field.name for field in fields(ReceiverCounts)),
    *(f"transport_{field.name}" for field in fields(TransportCounts)),
    *TIME_NAMES,
)


class ReceiverDriver:
    """One incarnation of a KV receiver.

    Args:
        setup: epoch, layout, limits and times.
        io: the pools of all ranks.
        transport: the listening transport; owned from here on.
        clock: a clock comparable with the worker's.
        link: link to the worker.
        notify: called after events were written.
        offers: data paths on which senders write the pools themselves.
        jobs: the engine's jobs, if the pool is on a GPU; `io` is then the staging memory.
    """

    def __init__(
        self,
        *,
        setup: ReceiverSetup,
        io: WorkerPoolIO,
        transport: Transport,
        clock: Clock,
        link: ReceiverLink,
        notify: Callable[[], None],
        offers: Sequence[kv_pb2.DataPathOffer] = (),
        jobs: DeviceJobs | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._io = io
        self._link = link
        self._notify = notify
        self._protocol = ReceiverProtocol(
            epoch=setup.epoch,
            layout=setup.layout,
            config=setup.config,
            max_capacity_len=setup.num_blocks * setup.layout.block_size,
            offers=[*transport.offers(), *offers],
            host_id=host_id(),
            has_digest=setup.config.digest,
            digests_layers=jobs is not None,
        )
        self._jobs = jobs
        self._numbers = setup.blocks
        self._has_digest = setup.config.digest
        self._granted: dict[AttemptKey, BlockTable] = {}  # granted; these wait for staging memory, oldest first
        self._undrained: list[AttemptKey] = []  # drained for the protocol; a kernel may still use the blocks
        self._backlog: deque[bytes] = deque()  # events that found the ring full; at most a few per incoming transfer
        self._has_news = False
        self._tables: dict[AttemptKey, BlockTable] = {}
        self._slots: dict[AttemptKey, int] = {}
        self._free_slots = deque(range(len(link.words)))
        self._reading: dict[int, tuple[Payload, FrameHeader]] = {}  # payloads that are still arriving, by id
        self._evidence = Evidence(setup.legacies)
        self._heartbeat_s = setup.config.heartbeat_s
        self._num_unproved, self._say_unproved_s = 0, float("-inf")
        self._turn_s = self._ticked_s = self._counted_s = self._looked_s = clock.now_s()
        for legacy in setup.legacies:
            self._protocol.inherit(legacy.inherited, self._turn_s)
        self._count_incoming_transfers(self._turn_s)

    def turn(self) -> None:
        """Do what there is to do; sleep a little if there is nothing."""
        now_s = self._clock.now_s()
        self._link.beat()
        self._protocol.forgive(now_s - self._turn_s, now_s)
        self._turn_s = now_s
        while (data := self._link.commands.pop()) is not None:
            command, _ = decode_record(data)
            assert isinstance(command, GrantCommand | DenyCommand | AbortCommand | ReleaseCommand)
            self._do(self._obey(command, now_s))
        arrived = self._receive()
        for item in arrived:
            if isinstance(item, PayloadDone):
                self._finish(item)
            else:
                self._deliver(item)
        # A CREDIT costs as much as transferring 100 KiB, so a few frames share one, as long as more come without a
        # pause.
        if self._protocol.uncredited_bytes and not (arrived and self._protocol.uncredited_bytes < CREDIT_BYTES):
            self._do(self._protocol.flush())
        now_s = self._clock.now_s()
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            self._do(self._protocol.tick(now_s))
        if now_s - self._looked_s >= self._heartbeat_s:
            self._looked_s = now_s
            for incarnation in self._protocol.suspects():
                if self._evidence.is_over(incarnation):
                    self._do(self._protocol.peer_is_dead(incarnation.p_epoch, now_s, incarnation.rank))
        if self._jobs is not None:
            self._attend_to(self._jobs, now_s)
        self._publish()
        if now_s - self._counted_s >= COUNT_S:
            self._count_incoming_transfers(now_s)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _receive(self) -> list[Delivery | PayloadDone]:
        """Receive messages; waits only as long as there is nothing else to check."""
        if self._jobs is None or not self._jobs.is_waiting:
            return self._transport.receive(0.0 if self._backlog or self._protocol.uncredited_bytes else IDLE_S)
        arrived = self._transport.receive(0.0)
        if not arrived:
            time.sleep(FLAG_S)
        return arrived

    # Commands of the worker

    def _obey(self, command: Command, now_s: float) -> list[ReceiverAction]:
        attempt = command.attempt
        match command:
            case GrantCommand():
                return self._grant(attempt, command.table, now_s)
            case DenyCommand():
                return self._protocol.deny(attempt, command.reason, command.detail, now_s)
            case AbortCommand():
                if self._jobs is not None:
                    self._jobs.stop(attempt)
                aborted = self._protocol.abort(attempt, command.reason, now_s)
                if self._granted.pop(attempt, None) is not None:
                    aborted.append(Drained(attempt))  # the protocol does not know that it has blocks
                return aborted
            case ReleaseCommand():
                actions = self._protocol.release(attempt, now_s)
                self._forget(attempt)
                return actions

    def _grant(self, attempt: AttemptKey, table: BlockTable, now_s: float) -> list[ReceiverAction]:
        incoming = self._protocol.find(attempt)
        if self._jobs is not None and incoming is not None:
            if not is_one_sided(incoming.data_path) and incoming.prompt_len > self._jobs.staging_len:
                reason = f"{STAGING_KEY}: a prompt of {incoming.prompt_len} tokens does not fit into staging memory"
                denied = self._protocol.deny(attempt, kv_pb2.Deny.TOO_LONG, reason, now_s)
                return [*denied, IncomingFailed(attempt, reason), Drained(attempt)]
            is_next = is_one_sided(incoming.data_path) or next(iter(self._granted), attempt) == attempt
            owner = self._numbers.owner(table.blocks) if self._numbers.num_pools > 1 else 0
            if not is_next or not self._jobs.begin(incoming, has_digest=self._has_digest, owner=owner):
                self._granted[attempt] = table
                return []
        self._granted.pop(attempt, None)
        self._tables[attempt] = table
        if self._free_slots:  # none is left only if the incoming transfer has ended meanwhile
            self._slots[attempt] = self._free_slots.popleft()
        return self._protocol.grant(attempt, now_s, table.blocks, table.state_slot)

    # Work of the engine on GPUs

    def _attend_to(self, jobs: DeviceJobs, now_s: float) -> None:
        """Process the results of kernels, request jobs for complete layers, and continue what waited for either."""
        for incoming_id, layer, digest in jobs.answers():
            self._do(self._protocol.digested(incoming_id, layer, digest, now_s))
        quiet = [attempt for attempt in self._undrained if not jobs.is_busy(attempt)]
        for attempt in quiet:
            self._undrained.remove(attempt)
            self._tell(Drained(attempt))
        for attempt, table in tuple(self._granted.items()):
            self._do(self._grant(attempt, table, now_s))
            if attempt in self._granted:
                break  # first come, first served
        for wanted in jobs.desired_state():
            self._post(encode_record(wanted))

    def _digest_layer(self, action: DigestLayer, now_s: float) -> None:
        assert self._jobs is not None
        attempt = self._protocol.incoming(action.incoming_id).attempt
        if not self._jobs.complete(attempt, action.layer):
            self._do(self._protocol.digested(action.incoming_id, action.layer, 0, now_s))

    # Arrivals

    def _deliver(self, delivery: Delivery) -> None:
        try:
            if delivery.header is not None:
                self._take_frame(delivery.peer, delivery.header, delivery.payload)
            elif delivery.control is not None:
                control = parse_control(delivery.control)
                self._do(self._protocol.on_control(delivery.peer, control, self._clock.now_s()))
                if control.HasField("hello") and self._protocol.is_met(delivery.peer):
                    self._transport.welcome(delivery.peer)
        except BatonError as error:
            if delivery.header is not None:
                self._protocol.on_corrupt_frame()
                if delivery.payload is not None:
                    delivery.payload.discard()
            log.warning("a message from %s is refused: %s", delivery.peer, error)

    def _take_frame(self, peer: str, head: Bytes, payload: Payload | None) -> None:
        header = decode_header(head)
        arriving_bytes = None if payload is None else payload.num_bytes
        if arriving_bytes != (None if header.is_written else header.payload_bytes):
            raise ProtocolError(f"a frame of {header.payload_bytes} payload bytes came with {arriving_bytes}")
        is_wanted = False
        for action in self._protocol.on_frame(peer, header, self._clock.now_s()):
            if isinstance(action, WriteFrame):
                is_wanted = True
            else:
                self._do([action])
        if is_wanted:
            self._write(header, payload)
        elif payload is not None:
            payload.discard()

    def _write(self, header: FrameHeader, payload: Payload | None) -> None:
        if payload is None:
            self._land(header)
        elif payload.read_into(self._io.pieces(self._blocks(header), header.span, header.order_block_size)):
            self._land(header)
        else:
            self._reading[id(payload)] = payload, header

    def _finish(self, done: PayloadDone) -> None:
        found = self._reading.pop(id(done.payload), None)
        if found is None:
            return  # the payload was discarded meanwhile
        _, header = found
        if done.ok:
            self._land(header)
        else:
            self._do(self._protocol.write_failed(header, self._clock.now_s()))

    def _land(self, header: FrameHeader) -> None:
        """Perform the one check of a payload that is in the pool, while it is in the cache."""
        blocks, span = self._blocks(header), header.span
        digest: int | None = None
        if not header.is_written:
            self._io.spread(blocks, span)
        if self._jobs is not None and header.payload_digest is not None:
            pass  # kernels digest the layer when it is complete
        elif header.payload_digest is not None:
            digest = self._io.digest(blocks, span)
        elif header.payload_crc is not None:
            if crc_of(self._io.pieces(blocks, span, header.order_block_size)) != header.payload_crc:
                self._do(self._protocol.write_failed(header, self._clock.now_s(), is_corrupt=True))
                return
        self._do(self._protocol.landed(header, digest, self._clock.now_s()))

    def _blocks(self, header: FrameHeader) -> Sequence[int]:
        attempt = self._protocol.incoming(header.incoming_id).attempt
        table = self._tables[attempt] if self._jobs is None else self._jobs.staging_of(attempt)
        if not table.blocks:
            return ()  # the sender wrote the pool, which this process cannot access
        layer = self._io.ranks[0].geometry.layer(header.layer)
        return layer.blocks_of(table.blocks, table.state_slot, header.end)

    # Actions of the protocol

    def _do(self, actions: Sequence[ReceiverAction]) -> None:
        for action in actions:
            match action:
                case AnswerControl():
                    self._transport.send(action.peer, encode_control(action.control))
                case DiscardWrites():
                    self._discard(action.incoming_id)
                case DigestLayer():
                    self._digest_layer(action, self._clock.now_s())
                case WriteFrame():
                    raise AssertionError(f"nothing asked for {action}")
                case _:
                    self._tell(action)

    def _discard(self, incoming_id: int) -> None:
        fenced = [key for key, (_, header) in self._reading.items() if header.incoming_id == incoming_id]
        for key in fenced:
            payload, header = self._reading.pop(key)
            payload.discard()
            self._do(self._protocol.write_failed(header, self._clock.now_s()))

    # Events for the worker

    def _tell(self, event: ReceiverEvent) -> None:
        if self._jobs is not None and not isinstance(event, ReserveWanted):
            self._jobs.stop(event.attempt)
            if isinstance(event, Drained) and self._jobs.is_busy(event.attempt):
                self._undrained.append(event.attempt)
                return
            if isinstance(event, Completed | Drained):
                self._jobs.end(event.attempt)
        slot = self._slots.get(event.attempt, NO_SLOT)
        if isinstance(event, Completed):
            self._link.words.set(slot, event.incoming_id)
            event = replace(event, completed_s=self._clock.now_s())
        elif isinstance(event, IncomingFailed) and slot != NO_SLOT:
            self._link.words.set(slot, 0)
        elif isinstance(event, Drained):
            self._forget(event.attempt)
        # Immediately: if this process dies, the worker must know what prefill workers are told after this.
        self._post(encode_record(event, slot))
        if isinstance(event, IncomingFailed) and self._granted.pop(event.attempt, None) is not None:
            self._tell(Drained(event.attempt))  # the protocol does not know that it has blocks

    def _post(self, record: bytes) -> None:
        self._has_news = True
        if self._backlog or not self._link.events.push(record):
            self._backlog.append(record)

    def _forget(self, attempt: AttemptKey) -> None:
        self._tables.pop(attempt, None)
        slot = self._slots.pop(attempt, None)
        if slot is not None:
            self._link.words.set(slot, 0)
            self._free_slots.append(slot)

    def _publish(self) -> None:
        while self._backlog and self._link.events.push(self._backlog[0]):
            self._backlog.popleft()
        if self._has_news:
            self._has_news = bool(self._backlog)
            self._notify()

    def _count_incoming_transfers(self, now_s: float) -> None:
        num_kv_receives = num_wanted = 0
        for incoming in self._protocol.incoming_transfers():
            if incoming.state is IncomingState.WANTED:
                num_wanted += 1
            else:
                num_kv_receives += 1
        self._counted_s = now_s
        num_unproved = self._protocol.counts.hellos_unproved
        if num_unproved != self._num_unproved and now_s >= self._say_unproved_s:
            self._num_unproved, self._say_unproved_s = num_unproved, now_s + SAY_EVERY_S
            log.warning("refused (kv_proof): %d HELLOs of peers that do not know the deployment's secret", num_unproved)
        of_transport = {f"transport_{name}": count for name, count in asdict(self._transport.counts).items()}
        gauges = {"num_kv_receives": num_kv_receives, "num_reserves_waiting": num_wanted}
        counts = {**gauges, **asdict(self._protocol.counts), **of_transport, **self._protocol.times.as_counts()}
        assert tuple(counts) == COUNT_NAMES
        self._link.set_counts(counts)
