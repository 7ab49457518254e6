"""The decode worker's side of the hand-off: all incoming transfers, wherever the KV receiver runs.

Worker and receiver share only a `ReceiverLink` and the pools' memory, so the receiver can have its own process and
interpreter lock. The worker's calls never wait. This side knows what was requested and what it granted, so it can
account for everything when the receiver's process dies: nothing is lost silently, and blocks are freed only with
evidence that no process writes them.
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
    """An attempt that was requested and is neither refused, released nor drained.

    Attributes:
        reserve: the request.
        epoch: incarnation that was asked.
        is_granted: whether it has blocks.
        is_complete: whether the sequence owns the blocks.
        has_failed: whether the worker knows that it failed.
        table: the granted blocks.
    """

    reserve: ReserveWanted
    epoch: int
    is_granted: bool = False
    is_complete: bool = False
    has_failed: bool = False
    table: BlockTable | None = None


class ReceiverDevice(Protocol):
    """The kernels for incoming transfers whose pools are on GPUs. The worker's loop calls it."""

    def launch(self, wanted: DigestWanted, table: BlockTable) -> None:
        """Launch what is requested of one rank for a transfer with these blocks in its pool; does not wait."""
        ...

    def drain(self) -> None:
        """Wait until no launch is in progress."""
        ...

    def close(self) -> None:
        """Wait until no launch is in progress, and release the memory."""
        ...


class ReceiverService:
    """All incoming transfers of one decode worker. `on_thread` and `in_process` make one.

    Args:
        link: link to the host's driver; this end is owned from here on.
        host: runs the KV receiver; owned from here on.
        region: shared memory, if there is any; owned from here on.
        device: kernels, if the pool is on a GPU; owned from here on.
        numbers: numbering of blocks, if sequences have owners.
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
        self._unsent: deque[bytes] = deque()  # commands that found the ring full; only the worker's side uses it
        self._open: dict[AttemptKey, _Open] = {}
        self.staging_len = 0  # maximum positions of one incoming transfer over sockets; 0: no limit but the pool's
        self._past = dict.fromkeys(COUNT_NAMES, 0)  # totals of former incarnations

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
        """Make a service whose KV receiver runs on a thread of this process.

        Args:
            pool: pool for payloads; one per rank if there are several.
            layout: layout of the pools.
            epoch: incarnation of this process; random.
            transport: the listening side; owned from here on.
            config: limits and times.
            clock: the worker's clock.
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
        """Make a service whose KV receiver runs in a supervised process; it serves when this returns.

        Args:
            region: shared memory from `receiver_region`; owned from here on.
            setup: setup of the first incarnation.
            device: kernels, if `setup` has a device.

        Raises:
            StartupError: the receiver cannot serve.
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
        """Make the same for pools on GPUs, which the receiver process does not access.

        Args:
            pool: pool of rank 0.
            setup: setup of the first incarnation, without `device`.
            gather: gathers bytes from every rank, if there are several; the other ranks call `rank_pools.share_pool`
                meanwhile.

        Raises:
            StartupError: the receiver cannot serve, there is not enough memory, or another rank's pool cannot be
                reached.
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
        """Address where prefill workers reach it; may change after a process ended."""
        return self._host.address

    @property
    def epoch(self) -> int:
        """Number of the present incarnation, which prefill workers must name.

        It is known before that incarnation listens. A prefill worker that reserves in between keeps asking at the last
        address until it gets an answer, and need not retry the attempt. If that port is taken meanwhile, nothing or
        another process answers: the attempt fails, and `address` is the new address as soon as there is one.
        """
        return self._host.epoch

    @property
    def wakeup(self) -> Callable[[], None]:
        """Callback on another thread when there is something to poll."""
        return self._host.wakeup

    @wakeup.setter
    def wakeup(self, wakeup: Callable[[], None]) -> None:
        self._host.wakeup = wakeup

    def start(self) -> None:
        """Begin to serve."""
        self._host.start()

    def close(self) -> None:
        """Stop; prefill workers notice when leases expire."""
        self._host.close()
        if self._device is not None:
            self._device.close()
        if self._region is not None:
            self._region.close()

    def poll(self) -> list[ReceiverEvent]:
        """Return the events since the last call, in order.

        Raises:
            TransferFailed: the receiver is gone for good; no transfer can arrive any more.
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
        """Grant blocks to a `ReserveWanted`. `Completed`, or `IncomingFailed` and `Drained`, follows."""
        known = self._open[attempt]
        known.is_granted, known.table = True, table
        self._command(GrantCommand(attempt, table))

    def deny(self, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str) -> None:
        """Refuse blocks to a `ReserveWanted`. Nothing follows."""
        self._open.pop(attempt, None)
        self._command(DenyCommand(attempt, reason, shorten(detail)))

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """Give a granted attempt up. `Drained` follows, unless it was already emitted."""
        known = self._open.get(attempt)
        if known is not None:
            known.has_failed = True
            self._command(AbortCommand(attempt, shorten(reason)))

    def release(self, attempt: AttemptKey) -> None:
        """Release a complete transfer whose sequence has ended. Nothing follows: the worker has its blocks."""
        self._open.pop(attempt, None)
        self._command(ReleaseCommand(attempt))

    def inventory(self) -> dict[str, int]:
        """Return the counters as of the KV receiver's last turns. Any thread may call this."""
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
                    return  # the worker or the receiver has given it up since; Drained follows
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
        """Return a table with the block numbers of a rank's own pool."""
        if self._numbers is None:
            return table
        owner, blocks = self._numbers.at_owner(table.blocks)
        if owner != rank:
            raise ProtocolError(f"an incoming transfer wants a digest of rank {rank} of blocks that rank {owner} has")
        return replace(table, blocks=blocks)

    def _outlive(self, reason: str, events: list[ReceiverEvent]) -> None:
        """Account for everything that the dead incarnation had in hand, and let the next one start.

        The process is reaped and its sockets are closed. On a data path where only it wrote, nothing is written any
        more. Where prefill workers write, the next incarnation asks each of them.
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
    """Create the shared memory for the pools of all ranks and the link; first remove regions of dead owners.

    Raises:
        ConfigInvalid: there is not enough room for it.
    """
    sweep()
    link_bytes = ReceiverLink.num_bytes(config.ring_slots, geometries[0].num_blocks)
    return SharedRegion.create(link_bytes=link_bytes, pool_bytes=[geometry.num_bytes for geometry in geometries])


def _staged(pool: KVPool, config: KVTransferConfig) -> tuple[ReceiverDevice, DeviceJobs, RankedPoolIO]:
    """Make what a KV receiver on a thread needs for a pool on a GPU."""
    from baton.kvtransfer.rank_pools import RankPools
    from baton.kvtransfer.receiver import device as device_receiver  # imports Triton, which CPUs do not need

    geometry = device_receiver.staging_geometry(pool, config)
    memory = device_receiver.private_memory(geometry)
    staging = PoolIO(np.frombuffer(memory.staging, dtype=np.uint8), geometry)
    jobs = DeviceJobs(geometry, flag_page(memory.flags))
    device = device_receiver.DeviceReceiver(RankPools(pool), pool, geometry, memory)
    return device, jobs, RankedPoolIO([staging])
