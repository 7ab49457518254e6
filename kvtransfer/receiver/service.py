"""The decode worker's end of the hand-off: every incoming transfer, wherever it runs.

Worker and receiver share a `ReceiverLink` and the pools' memory, nothing else, so that the receiver has a process, and
an interpreter lock, of its own. The worker's calls never wait. This side knows what it was asked for and what it
granted; so it can say what became of it when the receiver's process dies: nothing is lost silently, and blocks come
back only with evidence that no process writes them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvcache.rank_blocks import RankBlocks
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.kvtransfer.protocol.messages import shorten
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.receiver.actions import (
    Completed,
    DigestWanted,
    Drained,
    IncomingFailed,
    ReceiverEvent,
    ReserveWanted,
)
from baton.kvtransfer.receiver.device_jobs import DeviceJobs, flag_page
from baton.kvtransfer.receiver.driver import COUNT_NAMES, GAUGE_NAMES, ReceiverDriver
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.records import (
    AbortCommand,
    Command,
    DenyCommand,
    GrantCommand,
    ReleaseCommand,
    decode_record,
    encode_record,
)
from baton.kvtransfer.receiver.setup import DeviceSetup, Legacy, Listen, ReceiverSetup
from baton.kvtransfer.receiver.supervisor import ReceiverSupervisor
from baton.kvtransfer.receiver.thread import ReceiverHost, ReceiverThread
from baton.kvtransfer.shared_region import SharedRegion, sweep
from baton.proto import kv_pb2

__all__ = [
    "Completed",
    "Drained",
    "IncomingFailed",
    "ReceiverEvent",
    "ReceiverService",
    "ReserveWanted",
    "receiver_region",
]


@dataclass(slots=True)
class _Open:
    """An attempt that was asked for and is neither refused, released nor drained.

    Attributes:
        reserve: what was asked for.
        epoch: of the incarnation that was asked.
        is_granted: it has blocks.
        is_complete: the sequence has them.
        has_failed: the worker knows.
        table: what it was granted.
    """

    reserve: ReserveWanted
    epoch: int
    is_granted: bool = False
    is_complete: bool = False
    has_failed: bool = False
    table: BlockTable | None = None


class ReceiverDevice(Protocol):
    """The kernels that serve an incoming transfer whose pools are on GPUs. Called by the worker's loop."""

    def launch(self, wanted: DigestWanted, table: BlockTable) -> None:
        """Post what is wanted of one rank for an incoming transfer that has these blocks of it; does not wait."""
        ...

    def drain(self) -> None:
        """Wait until nothing that was posted is under way."""
        ...

    def close(self) -> None:
        """The same, and give the memory back."""
        ...


class ReceiverService:
    """Every incoming transfer of one decode worker. `on_thread` and `in_process` make one.

    Args:
        link: to the host's driver; this end is owned from here on.
        host: owned from here on.
        region: owned from here on, if there is one.
        device: owned from here on, where the pool is on a GPU.
        numbers: of blocks, where sequences have owners.
    """

    def __init__(
        self,
        link: ReceiverLink,
        host: ReceiverHost,
        region: SharedRegion | None = None,
        device: ReceiverDevice | None = None,
        numbers: RankBlocks | None = None,
    ) -> None:
        self._link = link
        self._host = host
        self._region = region
        self._device = device
        self._numbers = numbers
        self._unsent: deque[bytes] = deque()  # commands that found the ring full; the worker's side
        self._open: dict[AttemptKey, _Open] = {}
        self.staging_len = (
            0  # positions that one incoming transfer by sockets may have; 0: any that the pool has room for
        )
        self._past = dict.fromkeys(COUNT_NAMES, 0)  # totals of incarnations gone by

    @classmethod
    def on_thread(
        cls,
        *,
        pool: KVPool | Sequence[KVPool],
        layout: KVLayout,
        epoch: int,
        transport: Transport,
        config: KVTransferConfig,
        clock: Clock,
    ) -> "ReceiverService":
        """An incoming transfer on a thread of this process.

        Args:
            pool: where payloads go; that of every rank if there are several.
            layout: of the pools.
            epoch: of this process; random.
            transport: the listening side; owned from here on.
            config: limits and times.
            clock: the worker's.
        """
        pools = [pool] if isinstance(pool, KVPool) else list(pool)
        num_blocks = pools[0].num_blocks
        setup = ReceiverSetup(
            epoch=epoch,
            layout=layout,
            num_blocks=num_blocks,
            num_state_slots=pools[0].num_state_slots,
            tp_size=len(pools),
            listen=Listen("", ""),
            config=config,
        )
        assert [pool.geometry.layers for pool in pools] == [geometry.layers for geometry in setup.geometries]
        link = ReceiverLink(
            bytearray(ReceiverLink.num_bytes(config.ring_slots, num_blocks)), config.ring_slots, num_blocks
        )
        device, jobs = None, None
        if pools[0].device.type == "cpu":
            io = RankedPoolIO([PoolIO(pool.bytes_view, pool.geometry) for pool in pools])
        else:
            device, jobs, io = _staged(pools[0], config)

        def make_driver(notify: Callable[[], None]) -> ReceiverDriver:
            return ReceiverDriver(
                setup=setup, io=io, transport=transport, clock=clock, link=link, notify=notify, jobs=jobs
            )

        service = cls(link, ReceiverThread(epoch, transport, make_driver), device=device)
        service.staging_len = 0 if jobs is None else jobs.staging_len
        return service

    @classmethod
    def in_process(
        cls, region: SharedRegion, setup: ReceiverSetup, device: ReceiverDevice | None = None
    ) -> "ReceiverService":
        """An incoming transfer in a supervised process of its own; it serves when this returns.

        Args:
            region: from `receiver_region`; owned from here on.
            setup: of the first incarnation.
            device: where `setup` has one.

        Raises:
            StartupError: it cannot serve.
        """
        setup = replace(setup, region_path=str(region.path), region_nonce=region.nonce)
        link = ReceiverLink(region.link, setup.config.ring_slots, setup.num_blocks)
        host = ReceiverSupervisor(region, link, setup)
        service = cls(link, host, region, device, setup.blocks if setup.num_pools > 1 else None)
        try:
            host.start()
        except BaseException:
            service.close()
            raise
        return service

    @classmethod
    def over_device(
        cls, pool: KVPool, setup: ReceiverSetup, gather: Callable[[bytes], list[bytes]] | None = None
    ) -> "ReceiverService":
        """The same over pools on GPUs, which the process does not touch.

        Args:
            pool: of rank 0.
            setup: of the first incarnation, but for `device`.
            gather: bytes of every rank, where there are several; the others call `rank_pools.share_pool` meanwhile.

        Raises:
            StartupError: it cannot serve, or there is no memory for it, or another rank's pool is not to be reached.
        """
        from baton.kvtransfer.rank_pools import RankPools, share_pool
        from baton.kvtransfer.receiver import device as device_receiver

        pools = RankPools(pool, () if gather is None else share_pool(pool, gather))
        region: SharedRegion | None = None
        try:
            staging = device_receiver.staging_geometry(pool, setup.config)
            region = device_receiver.device_region(pool, staging, setup.config)
            device = device_receiver.DeviceReceiver(pools, pool, staging, device_receiver.memory_of(region))
        except BaseException:
            pools.close()
            if region is not None:
                region.close()
            raise
        before = DeviceSetup(staging.num_blocks, staging.num_state_slots, pools.places)
        service = cls.in_process(region, replace(setup, device=before), device)
        service.staging_len = staging.num_blocks * pool.layout.block_size
        return service

    @property
    def address(self) -> str:
        """Where prefill workers reach it; may change when a process ended."""
        return self._host.address

    @property
    def epoch(self) -> int:
        """Of the present incarnation: what prefill workers must name.

        It is known before that incarnation listens: who reserves in between asks at the last address until it is
        answered, and need not try again. If that port is taken meanwhile, nothing answers, or another process does: the
        attempt fails, and `address` is the new one as soon as there is one.
        """
        return self._host.epoch

    @property
    def wakeup(self) -> Callable[[], None]:
        """Called on another thread when there is something to poll."""
        return self._host.wakeup

    @wakeup.setter
    def wakeup(self, wakeup: Callable[[], None]) -> None:
        self._host.wakeup = wakeup

    def start(self) -> None:
        """Begin to serve."""
        self._host.start()

    def close(self) -> None:
        """Stop; prefill workers notice by lease."""
        self._host.close()
        if self._device is not None:
            self._device.close()
        if self._region is not None:
            self._region.close()

    def poll(self) -> list[ReceiverEvent]:
        """What happened since the last call, in order.

        Raises:
            TransferFailed: nothing can land any more.
        """
        self._host.check()
        death = self._host.death()
        if death is None:
            self._send_commands()
        events: list[ReceiverEvent] = []
        try:
            while (data := self._link.events.pop()) is not None:
                self._take(data, events)
        except ProtocolError as error:
            if death is None:
                self._host.condemn(error.message)
        if death is not None:
            self._outlive(f"the KV receiver process ended: {death}", events)
        return events

    def grant(self, attempt: AttemptKey, table: BlockTable) -> None:
        """Blocks for a `ReserveWanted`. `Completed`, or `IncomingFailed` and `Drained`, follows."""
        known = self._open[attempt]
        known.is_granted, known.table = True, table
        self._command(GrantCommand(attempt, table))

    def deny(self, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str) -> None:
        """No blocks for a `ReserveWanted`. Nothing follows."""
        self._open.pop(attempt, None)
        self._command(DenyCommand(attempt, reason, shorten(detail)))

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """Give a granted attempt up. `Drained` follows, unless it was said already."""
        known = self._open.get(attempt)
        if known is not None:
            known.has_failed = True
            self._command(AbortCommand(attempt, shorten(reason)))

    def release(self, attempt: AttemptKey) -> None:
        """The sequence of a complete incoming transfer has ended. Nothing follows: the worker has its blocks."""
        self._open.pop(attempt, None)
        self._command(ReleaseCommand(attempt))

    def inventory(self) -> dict[str, int]:
        """Counts, as of the incoming transfer's last turns. Any thread."""
        return {name: self._past[name] + count for name, count in self._link.counts(COUNT_NAMES).items()}

    def _take(self, data: bytes, events: list[ReceiverEvent]) -> None:
        event, slot = decode_record(data)
        attempt = event.attempt
        known = self._open.get(attempt)
        match event:
            case DigestWanted():
                known = self._open.get(attempt)
                if self._device is None or known is None or known.table is None:
                    raise ProtocolError(
                        f"an incoming transfer wants a digest of {attempt}, which has no blocks on a GPU"
                    )
                self._device.launch(event, self._at_rank(event.rank, known.table))
                return
            case ReserveWanted():
                self._open[attempt] = _Open(event, self._host.epoch)
            case Completed():
                if known is None or known.has_failed or self._link.words.get(slot) != event.incoming_id:
                    return  # it was given up since, by the worker or by the incoming transfer; Drained is behind it
                known.is_complete = True
            case IncomingFailed():
                if known is not None and known.is_granted:
                    known.has_failed = True
                else:
                    self._open.pop(attempt, None)
            case Drained():
                self._open.pop(attempt, None)
            case _:
                raise ProtocolError(f"an incoming transfer says {event}")
        events.append(event)

    def _at_rank(self, rank: int, table: BlockTable) -> BlockTable:
        """A table as a rank's pool has it."""
        if self._numbers is None:
            return table
        owner, blocks = self._numbers.at_owner(table.blocks)
        if owner != rank:
            raise ProtocolError(f"an incoming transfer wants a digest of rank {rank} of blocks that rank {owner} has")
        return replace(table, blocks=blocks)

    def _outlive(self, reason: str, events: list[ReceiverEvent]) -> None:
        """Say what becomes of everything the dead incarnation had in hand, and let the next one start.

        The process is reaped and its sockets are closed: on a data path where it alone wrote, nothing is written any
        more. Where prefill workers write themselves, the next incarnation asks each of them.
        """
        if self._device is not None:
            self._device.drain()
        legacies = []
        for attempt, known in tuple(self._open.items()):
            if not known.is_complete and not known.has_failed:
                known.has_failed = True
                events.append(IncomingFailed(attempt, reason))
            reserve = known.reserve
            if known.is_complete or (known.is_granted and is_one_sided(reserve.data_path)):
                origin = (known.epoch, reserve.p_epoch, reserve.tp_size, reserve.data_path)
                legacies.append(Legacy(attempt, *origin, known.is_complete))
                continue
            del self._open[attempt]
            if known.is_granted:
                events.append(Drained(attempt))
        self._unsent.clear()
        for name in set(COUNT_NAMES) - GAUGE_NAMES:
            self._past[name] += self._link.counts(COUNT_NAMES)[name]
        self._link.reset()
        self._host.revive(legacies)

    def _command(self, command: Command) -> None:
        self._unsent.append(encode_record(command))
        self._send_commands()

    def _send_commands(self) -> None:
        if not self._unsent:
            return
        while self._unsent and self._link.commands.push(self._unsent[0]):
            self._unsent.popleft()
        self._host.wake()


def receiver_region(geometries: Sequence[PoolGeometry], config: KVTransferConfig) -> SharedRegion:
    """Shared memory for the pools of all ranks and the link; those of owners that died are removed first.

    Raises:
        ConfigInvalid: there is no room for it.
    """
    sweep()
    link_bytes = ReceiverLink.num_bytes(config.ring_slots, geometries[0].num_blocks)
    return SharedRegion.create(link_bytes=link_bytes, pool_bytes=[geometry.num_bytes for geometry in geometries])


def _staged(pool: KVPool, config: KVTransferConfig) -> tuple[ReceiverDevice, DeviceJobs, RankedPoolIO]:
    """What an incoming transfer on a thread has before a pool on a GPU."""
    from baton.kvtransfer.rank_pools import RankPools
    from baton.kvtransfer.receiver import device as device_receiver  # with it comes Triton, which CPUs have no use for

    geometry = device_receiver.staging_geometry(pool, config)
    memory = device_receiver.private_memory(geometry)
    staging = PoolIO(np.frombuffer(memory.staging, dtype=np.uint8), geometry)
    jobs = DeviceJobs(geometry, flag_page(memory.flags))
    device = device_receiver.DeviceReceiver(RankPools(pool), pool, geometry, memory)
    return device, jobs, RankedPoolIO([staging])
