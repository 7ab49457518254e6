"""The prefill worker's side of the hand-off: `PushService`, used by the worker's loop, and its writer, used by steps.

The loop calls `reserve`, `commit`, `abort`, `poll` and the writer; none of them waits for the network or for a slow
decode worker. Writer threads read new KV from the pool; a separate thread drives protocol and data paths
(`sender.driver`).

In a tensor-parallel group, every rank has a service. Rank 0 reserves and receives the replies; the others `adopt` what
it was granted. Each rank pushes the heads that no lower rank holds, and commits its part.
"""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid, TransferFailed
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import FrameShape
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile, host_id
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.sender.actions import (
    Acked,
    DecodePeer,
    Denied,
    Granted,
    GrantInfo,
    PushAction,
    PushDrained,
    PushEvent,
    PushFailed,
)
from baton.kvtransfer.sender.async_writer import AsyncWriter, PushRange, WriterStep
from baton.kvtransfer.sender.data_path import DataPathOpener, SenderSide, sender_data_paths
from baton.kvtransfer.sender.data_path_choice import DataPathChoice, DataPathChooser
from baton.kvtransfer.sender.driver import FrameSender, PushDriver
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.route import PushRoutes, Route
from baton.kvtransfer.sender.source import PushSource, SourcePool
from baton.kvtransfer.sender.table import PathCounts
from baton.proto import kv_pb2

__all__ = [
    "Acked",
    "DecodePeer",
    "Denied",
    "GrantInfo",
    "Granted",
    "PushDrained",
    "PushEvent",
    "PushFailed",
    "PushService",
]

T = TypeVar("T")
log = logging.getLogger(__name__)

JOIN_S = 10.0
DATA_PATH_CLOSE_S = 5.0


def _do_nothing() -> None:
    pass


class PushService:
    """All pushes of one rank of a prefill worker.

    Args:
        pool: the pool to push from.
        layout: layout of the pool.
        epoch: this incarnation; random, and the same for all ranks.
        transport: the connecting side; owned from here on.
        config: limits and times; `transport` is the policy for data paths.
        clock: the worker's clock.
        openers: openers of one-sided data paths; None: those that `core.kv_transports` declares.

    Raises:
        ConfigInvalid: the layout cannot be pushed, or this process can use no data path that the policy allows.
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
        openers: Sequence[DataPathOpener] | None = None,
    ) -> None:
        assert pool.layout == layout
        self.wakeup: Callable[[], None] = _do_nothing
        self._layout = layout
        self._geometry = pool.geometry
        self._clock = clock
        self._transport = transport
        self._shape = FrameShape(layout, config.max_frame_bytes)
        self._rank, self._size = pool.geometry.rank, pool.geometry.size
        self._events: deque[PushEvent] = deque()
        self._is_closing = False
        self._broken: BaseException | None = None
        io = PoolIO(pool.bytes_view, pool.geometry) if pool.device.type == "cpu" else None
        if openers is None:
            openers = sender_data_paths(config.transport, SenderSide(pool, io, epoch, host_id()))
        self._chooser = DataPathChooser(config.transport, openers, transport)
        of_layout = layout.problem or self._shape.problem(self._rank, self._size)
        problem = of_layout or self._chooser.problem
        if problem:
            transport.close()
            raise ConfigInvalid(f"KV cannot be pushed: {problem}", keys=[] if of_layout else ["transport"])
        self._incarnation = IncarnationFile(epoch, self._rank)
        identity = self._identity(epoch, config)
        protocol = self._protocol = PushProtocol(identity=identity, layout=layout, config=config)
        self.writer = AsyncWriter(
            self._push_part,
            config.num_writer_threads or (2 if pool.device.type == "cpu" and not config.digest else 1),
            config.writer_queue_len,
            pool.device,
            on_begin=self._hold,
            on_end=self._unhold,
        )
        self._source = PushSource(
            pool=io or _device_source(pool),
            layout=layout,
            rank=self._rank,
            size=self._size,
            config=config,
            clock=clock,
            on_left=self._left,
        )
        self._routes = PushRoutes(protocol, self._chooser, clock)
        self._sender = FrameSender(
            protocol=protocol,
            transport=transport,
            source=self._source,
            config=config,
            clock=clock,
            aside=self.writer.aside,
        )
        self._driver = PushDriver(
            protocol=protocol,
            transport=transport,
            routes=self._routes,
            source=self._source,
            sender=self._sender,
            clock=clock,
            emit=self._emit,
            aside=self.writer.aside,
            num_waiting=lambda: self.writer.num_waiting,
        )
        self._thread = threading.Thread(target=self._run, name="kv-push", daemon=True)

    def start(self) -> None:
        """Start the push thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop. Transfers that were not acknowledged are lost; decode workers notice when leases expire."""
        self.writer.close()
        self._is_closing = True
        self._transport.wake()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(JOIN_S)

    def poll(self) -> list[PushEvent]:
        """Return the events since the last call, in order.

        Raises:
            TransferFailed: the thread ended on an error; this worker cannot push any more.
        """
        if self._broken is not None:
            raise TransferFailed(f"the push thread ended: {self._broken!r}") from self._broken
        return [self._events.popleft() for _ in range(len(self._events))]

    def open_step(self, parts: Sequence[tuple[AttemptKey, int, int]]) -> WriterStep:
        """Push what a step computes: (attempt, first position, number of positions) of each prompt, in every layer."""
        return self.writer.open([PushRange(*part) for part in parts])

    def reserve(
        self,
        attempt: AttemptKey,
        peer: DecodePeer,
        table: BlockTable,
        prompt_len: int,
        capacity_len: int,
        wait_s: float,
    ) -> None:
        """Ask for a transfer (rank 0). One of `Granted`, `Denied`, `PushFailed` follows within `wait_s`, or a lease."""
        assert 0 < prompt_len <= min(capacity_len, table.capacity_len)
        self._routes.add(Route(attempt, peer.kv_address, self._geometry, table, prompt_len))

        def reserve(now_s: float) -> list[PushAction]:
            problem = self._transport.problem(peer.kv_address)
            if problem:
                return [PushFailed(attempt, problem), PushDrained(attempt)]
            refusal = self._routes.refusal(attempt, peer.kv_address, peer.epoch)
            return refusal or self._protocol.reserve(
                attempt, peer, prompt_len=prompt_len, capacity_len=capacity_len, wait_s=wait_s, now_s=now_s
            )

        self._driver.post(reserve)

    def adopt(
        self, attempt: AttemptKey, peer: DecodePeer, table: BlockTable, prompt_len: int, grant: GrantInfo
    ) -> None:
        """Push into what rank 0 was granted (ranks above 0). No event follows before `Acked` or `PushFailed`.

        Parts may be pushed at once.
        """
        assert 0 < prompt_len <= table.capacity_len
        self._routes.add(Route(attempt, peer.kv_address, self._geometry, table, prompt_len))

        def adopt(now_s: float) -> list[PushAction]:
            problem = self._transport.problem(peer.kv_address)
            if problem:
                return [PushFailed(attempt, problem), PushDrained(attempt)]
            actions = self._protocol.adopt(attempt, peer, prompt_len=prompt_len, grant=grant, now_s=now_s)
            return [*actions, *self._routes.open_all(peer.kv_address)]

        self._driver.post(adopt)

    def push_cached(self, attempt: AttemptKey, first: int, count: int) -> None:
        """Push positions that earlier steps computed, in every layer; returns at once.

        For a prompt whose prefix was found in the pool: call it after `Granted`, or `adopt`, and before the prompt's
        first step. The blocks are read until `Acked`, `PushDrained` or `Denied`, like the others. A commit waits for
        it.
        """
        assert count > 0
        route = self._routes.get(attempt)
        if route is None:
            return  # the transfer failed meanwhile, and the worker was told
        jobs = []
        for layer in range(self._layout.num_layers):
            num_heads = max(1, self._layout.pushed_heads(layer, self._rank, self._size).count)
            for start, length in self._shape.split(layer, first, count, num_heads):
                jobs.append(functools.partial(self._push_part, PushRange(attempt, start, length), layer))
        self._driver.post(lambda _: self._driver.begin_aside(route, jobs))

    def commit(self, attempt: AttemptKey, state: kv_pb2.SequenceState | None, prefill_end_s: float) -> None:
        """Hand over a prompt that is computed and whose last step has ended. `Acked` or `PushFailed` follows.

        Rank 0 passes the state, the others None.
        """

        def commit(now_s: float) -> list[PushAction]:
            return self._protocol.commit(attempt, state, prefill_end_s, now_s)

        self._driver.post(lambda now_s: self._driver.commit(attempt, commit, now_s))

    def abort(self, attempt: AttemptKey, reason: str) -> None:
        """Give a transfer up. `PushDrained` follows, unless the transfer has already ended."""
        self._driver.post(lambda now_s: self._driver.abort(attempt, reason, now_s))

    def inventory(self) -> dict[str, int]:
        """Return the counters as of the thread's last turn. Any thread may call this."""
        totals = self._protocol.totals
        return {
            "num_acked": totals.num_acked,
            "transfer_us": int(totals.transfer_s * 1e6),
            "exposed_us": int(totals.exposed_s * 1e6),
            **totals.times.as_counts(),
            "credit_stall_us": int(totals.credit_stall_s * 1e6),
            "frames_resent": totals.frames_resent,
            "num_pushes": self._driver.num_pushes,
            "bytes_pushed": self._sender.num_bytes,
            "bytes_resent": self._protocol.num_bytes_resent,
            "frames_pushed": self._sender.num_frames,
            "frames_not_kept": self._source.num_frames_not_kept,
            "frames_rewritten": self._sender.num_rewritten,
            "messages_refused": self._protocol.num_messages_refused,
            "data_path_fallbacks": self._chooser.num_fallbacks,
            "writer_stalls": self.writer.num_stalls,
            "writer_deaths": self.writer.num_deaths,
        }

    def paths(self) -> tuple[PathCounts, ...]:
        """Return the measurements of the path to each decode worker, as of the last turns. Any thread may call this."""
        return self._driver.paths

    def data_path_of(self, address: str) -> DataPathChoice | None:
        """Return the data path in use to a decode worker, and why it is not a better one. Any thread may call this."""
        return self.data_paths().get(address)

    def data_paths(self) -> dict[str, DataPathChoice]:
        """Return the data paths in use to all decode workers, by address. Any thread may call this."""
        return self._chooser.data_paths()

    def _identity(self, epoch: int, config: KVTransferConfig) -> PushIdentity:
        return PushIdentity(
            epoch=epoch,
            rank=self._rank,
            size=self._size,
            data_paths=self._chooser.names,
            host_id=host_id(),
            incarnation_file=str(self._incarnation.path),
            has_digest=config.digest,
        )

    # On writer threads

    def _push_part(self, part: PushRange, layer: int) -> None:
        route = self._routes.get(part.attempt)
        if route is None:
            return  # the transfer ended during the step
        pushed = self._source.part(route, layer, part.first, part.count)
        if pushed is not None:
            self._driver.push(pushed)

    def _hold(self, parts: Sequence[PushRange]) -> None:
        self._driver.begin_step({part.attempt for part in parts})

    def _unhold(self, parts: Sequence[PushRange], error: BaseException | None) -> None:
        if error is not None and self._broken is None:
            self._broken = error  # `poll` raises it in the loop: this worker cannot push any more
            self.wakeup()
        self._driver.end_step({part.attempt for part in parts})

    def _left(self, route: Route) -> None:
        self._driver.post(lambda _: self._routes.release(route))

    # On the push thread

    def _emit(self, event: PushEvent) -> None:
        self._events.append(event)
        self.wakeup()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._driver.turn()
        # The boundary of the thread: `poll` raises what ended it, and the worker must not go on half-dead.
        except BaseException as error:
            log.exception("the push thread failed")
            self._broken = error
            self.wakeup()
        finally:
            self._end()

    def _end(self) -> None:
        self._transport.close()
        self._chooser.close(DATA_PATH_CLOSE_S)
        self._incarnation.close()


def _device_source(pool: KVPool) -> SourcePool:
    from baton.kvtransfer.sender.device_source import DeviceSource  # imports Triton, which CPUs do not need

    return DeviceSource(pool)
