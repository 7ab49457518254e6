"""The push thread, the only thread that drives the sender's protocol, transport and data paths.

Other threads post commands, and parts of layers that were read or written; the push thread takes both once per turn. It
never waits for a peer. It does not know the model's steps (`async_writer`) or the format of payloads (`sender.source`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import crc_of, decode_header, encode_header
from baton.kvtransfer.protocol.messages import encode_control, parse_control
from baton.kvtransfer.protocol.transport import Delivery, PayloadDone, Transport
from baton.kvtransfer.sender.actions import (
    Acked,
    Denied,
    DropPeer,
    Granted,
    OpenDataPath,
    PushAction,
    PushDrained,
    PushEvent,
    PushFailed,
    SendControl,
    SendFrame,
    StopFrames,
)
from baton.kvtransfer.sender.data_path import DataPathFailed, Written
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.route import PushRoutes, Route
from baton.kvtransfer.sender.source import PushedRange, PushSource
from baton.kvtransfer.sender.table import PathCounts

Actions = list[PushAction]
Aside = Callable[[Sequence[Callable[[], None]], Callable[[BaseException | None], None]], None]

log = logging.getLogger(__name__)


class _Rewrite:
    """One frame that a writer thread writes because the protocol asked for it."""

    def __init__(self, route: Route, action: SendFrame, source: PushSource) -> None:
        self.action = action
        self.problem = ""
        self._route = route
        self._source = source
        self._written: Written | None = None

    def run(self) -> None:
        """Write the frame, on a writer thread. If the fence is shut, do not begin."""
        if not self._route.fence.is_shut:
            self._written = self._source.write(self._route, self.action.header.span, with_digest=self.action.has_digest)

    def end(self, error: BaseException | None) -> None:
        """Record that the write ran, or never will."""
        if error is not None:
            self.problem = str(error) or repr(error)

    def is_over(self) -> bool:
        """Return whether nothing is written any more."""
        try:
            return self._written is None or self._written.done
        except DataPathFailed as error:
            self.problem = str(error) or repr(error)
            return True

    @property
    def written(self) -> Written | None:
        """The write, unless it failed or did not begin."""
        return None if self.problem else self._written


class FrameSender:
    """Sends the frames that the protocol asks for.

    Args:
        protocol: this rank's protocol.
        transport: carries frames.
        source: makes payloads.
        config: limits.
        clock: the worker's clock.
        aside: runs jobs on writer threads.
    """

    def __init__(
        self,
        *,
        protocol: PushProtocol,
        transport: Transport,
        source: PushSource,
        config: KVTransferConfig,
        clock: Clock,
        aside: Aside,
    ) -> None:
        self.num_frames = 0
        self.num_bytes = 0
        self.num_rewritten = 0
        self._protocol = protocol
        self._transport = transport
        self._source = source
        self._config = config
        self._clock = clock
        self._aside = aside
        self._rewrites: deque[_Rewrite] = deque()  # those that ran
        self._warned_of_drops = False

    @property
    def is_waiting(self) -> bool:
        """Whether a device still performs one of our writes."""
        return bool(self._rewrites)

    def send(self, route: Route, action: SendFrame) -> Actions:
        """Perform a SendFrame."""
        header = action.header
        self.num_frames += 1
        self.num_bytes += header.payload_bytes
        frame = route.frames.pop((header.layer, header.first), None)
        if frame is not None and frame.count != header.count:
            self._source.give_back(route, frame)
            frame = None
        if self._config.drop_pushes:
            return self._drop(action)
        if is_one_sided(action.data_path):
            if frame is None or not frame.is_written:
                return self._rewrite(route, action)
            self._announce(action, frame.digest)
            return self._protocol.written(action.attempt, header, self._clock.now_s())
        if frame is None:
            frame = self._source.make(route, header.span)
        payload = self._source.payload(route, header.span, frame)
        if action.has_digest:
            data = encode_header(header, frame.digest)
        else:
            data = encode_header(header, payload_crc=crc_of(payload) if frame.crc is None else frame.crc)
        self._transport.send_frame(action.peer, data, payload, action.data_path)
        self._source.give_back(route, frame)
        return []

    def finish(self, now_s: float) -> Actions:
        """Report the writes that are over."""
        actions: Actions = []
        for _ in range(len(self._rewrites)):
            rewrite = self._rewrites.popleft()
            if not rewrite.is_over():
                self._rewrites.append(rewrite)
                continue
            action, written = rewrite.action, rewrite.written
            if written is not None:
                self._announce(action, written.digest)
            actions += self._protocol.written(action.attempt, action.header, now_s, rewrite.problem)
        return actions

    def _announce(self, action: SendFrame, digest: int | None) -> None:
        """Send the header of a frame whose bytes are in the peer's pool."""
        data = encode_header(action.header, digest if action.has_digest else None)
        self._transport.send_frame(action.peer, data, (), action.data_path)

    def _rewrite(self, route: Route, action: SendFrame) -> Actions:
        self.num_rewritten += 1
        rewrite = _Rewrite(route, action, self._source)

        def end(error: BaseException | None) -> None:
            rewrite.end(error)
            self._rewrites.append(rewrite)
            self._transport.wake()

        self._aside([rewrite.run], end)
        return []

    def _drop(self, action: SendFrame) -> Actions:
        if not self._warned_of_drops:
            self._warned_of_drops = True
            log.warning("drop_pushes is set: no KV leaves this worker, every hand-off will fail")
        if is_one_sided(action.data_path):
            return self._protocol.written(action.attempt, action.header, self._clock.now_s())
        return []


T = TypeVar("T")

Command = Callable[[float], Actions]

IDLE_S = 0.02
POLL_S = 0.001  # interval between checks of writes that a device has not finished
HURRY_S = 30e-6  # the same, while a commit waits for them
TICK_S = 0.02
# While a step runs and keeps this thread busy, parts and credits that come faster are batched: each turn here costs the
# writers more than it takes, since they need the interpreter back after every block. Longer if the writers lag behind.
NAP_S = 0.0015
LAG_NAP_S = 0.004


class PushDriver:
    """The push thread's loop.

    Args:
        protocol: this rank's protocol.
        transport: the connecting side of the transport.
        routes: routes of the transfers.
        source: makes payloads.
        sender: sends frames.
        clock: the worker's clock.
        emit: called on this thread with every event for the worker.
        aside: runs jobs on writer threads.
        num_waiting: returns the number of jobs that wait for writer threads.
    """

    def __init__(
        self,
        *,
        protocol: PushProtocol,
        transport: Transport,
        routes: PushRoutes,
        source: PushSource,
        sender: FrameSender,
        clock: Clock,
        emit: Callable[[PushEvent], None],
        aside: Aside,
        num_waiting: Callable[[], int],
    ) -> None:
        self.num_pushes = 0
        self.paths: tuple[PathCounts, ...] = ()
        self._protocol = protocol
        self._transport = transport
        self._routes = routes
        self._source = source
        self._sender = sender
        self._clock = clock
        self._emit = emit
        self._aside = aside
        self._num_waiting = num_waiting
        # A single queue, so that a part comes after the adoption of its transfer and before its commit.
        self._queue: deque[Command | PushedRange] = deque()
        self._open_parts: list[PushedRange] = []
        self._turn_s = self._tick_s = clock.now_s()
        self._num_data_paths_failed = transport.counts.data_paths_failed
        self._num_steps = 0
        self._steps_lock = threading.Lock()
        self._is_step_open = False
        self._is_napping = False
        self._is_waiting_for_lag = False
        self._nap = threading.Event()

    # Called by any thread

    def post(self, command: Command) -> None:
        """Run a command in the next turn, after what was pushed before. The thread takes it up at once."""
        self._queue.append(command)
        if self._is_napping:
            self._nap.set()
        else:
            self._transport.wake()

    def begin_step(self, attempts: Set[AttemptKey]) -> None:
        """Announce that parts of these attempts will come until `end_step`.

        Until then nothing is urgent, unless sockets wait.
        Their transfers are held, and not committed, until the step ends; several steps may be open.
        """
        with self._steps_lock:
            self._num_steps += 1
            self._is_step_open = self._routes.are_one_sided

        def begin(_: float) -> Actions:
            for attempt in attempts:
                route = self._routes.get(attempt)
                if route is not None:
                    route.num_open += 1
                self._protocol.hold(attempt)
            return []

        self.post(begin)

    def end_step(self, attempts: Set[AttemptKey]) -> None:
        """Announce that the last part of a step was pushed."""
        with self._steps_lock:
            self._num_steps -= 1
            self._is_step_open = self._num_steps > 0 and self._routes.are_one_sided

        def end(_: float) -> Actions:
            actions: list[PushAction] = []
            for attempt in attempts:
                actions += self._protocol.unhold(attempt)
                route = self._routes.get(attempt)
                if route is not None and route.num_open:
                    actions += self._close_one(route)
            return actions

        self.post(end)

    def push(self, part: PushedRange) -> None:
        """Hand over a part that a writer has finished."""
        self._queue.append(part)
        if not self._is_napping:
            self._transport.wake()
        elif self._is_waiting_for_lag and not self._num_waiting():
            self._nap.set()

    # On the push thread

    def turn(self) -> None:
        """Process what is queued, wait for more, and do what is due."""
        now_s = self._clock.now_s()
        self._protocol.forgive(now_s - self._turn_s, now_s)
        self._turn_s = now_s
        items = _take_all(self._queue)
        for item in items:
            if isinstance(item, PushedRange):
                self._take(item, now_s)
            else:
                self._do(item(now_s))
        if self._open_parts:
            self._look_again(now_s)
        if self._sender.is_waiting:
            self._do(self._sender.finish(now_s))
        arrived = self._receive(bool(items))
        for arrival in arrived:
            self._deliver(arrival)
        if self._is_step_open and (items or arrived):
            self._rest()
        now_s = self._clock.now_s()
        if self._transport.counts.data_paths_failed != self._num_data_paths_failed:
            self._num_data_paths_failed = self._transport.counts.data_paths_failed
            self._do(self._routes.ask_for_lost(now_s))
        if now_s >= self._tick_s:
            self._tick_s = now_s + TICK_S
            self._do(self._protocol.tick(now_s))
            self._routes.renew()
            self.num_pushes = len(tuple(self._protocol.transfers()))
            self.paths = self._protocol.paths(now_s)

    def abort(self, attempt: AttemptKey, reason: str, now_s: float) -> Actions:
        """Give a transfer up for the worker."""
        return [*self._protocol.abort(attempt, reason, now_s), *self._routes.shut(attempt)]

    def commit(self, attempt: AttemptKey, commit: Command, now_s: float) -> Actions:
        """Commit now, or as soon as what was begun for the transfer is over."""
        route = self._routes.get(attempt)
        if route is None or not route.num_open:
            return commit(now_s)
        route.commit = commit
        return []

    def begin_aside(self, route: Route, jobs: Sequence[Callable[[], None]]) -> Actions:
        """Push parts that no step computes; the transfer is held, and not committed, until they are done."""
        if not self._routes.is_live(route) or self._protocol.transfer(route.attempt) is None:
            return []
        self._protocol.hold(route.attempt)
        route.num_open += 1

        def end(error: BaseException | None) -> Actions:
            failed = [] if error is None else self._routes.fail(route, f"cached blocks were not pushed: {error!r}")
            return [*failed, *self._protocol.unhold(route.attempt), *self._close_one(route)]

        self._aside(jobs, lambda error: self.post(lambda _: end(error)))
        return []

    def _receive(self, has_worked: bool) -> Sequence[Delivery | PayloadDone]:
        """Receive messages; waits only as long as there is nothing else to check."""
        if not any(part.route.commit is not None for part in self._open_parts):
            return self._transport.receive(self._patience_s(has_worked))
        arrived = self._transport.receive(0.0)
        if not arrived:
            time.sleep(HURRY_S)
        return arrived

    def _patience_s(self, has_worked: bool) -> float:
        if has_worked and self._is_step_open:
            return 0.0  # `_rest` waits anyway
        return POLL_S if self._open_parts or self._sender.is_waiting else IDLE_S

    def _rest(self) -> None:
        """Leave the interpreter to the model's step and its writers for a moment; a command ends the pause."""
        self._is_napping = True
        if self._is_step_open:  # a thread that ends the step, or posts anything, sees that this thread naps
            self._is_waiting_for_lag = self._num_waiting() > 1
            self._nap.wait(LAG_NAP_S if self._is_waiting_for_lag else NAP_S)
        self._is_napping = self._is_waiting_for_lag = False
        self._nap.clear()

    # Parts of layers

    def _take(self, part: PushedRange, now_s: float) -> None:
        route = part.route
        if not self._routes.is_live(route):
            self._source.forget(route)  # the transfer ended while the writer worked
        if part.writes:
            route.num_open += 1
            self._open_parts.append(part)
        elif part.problem:
            self._do(self._routes.fail(route, part.problem))
        else:
            self._do(self._protocol.pushed(route.attempt, part.layer, part.first, part.count, part.digest, now_s))

    def _look_again(self, now_s: float) -> None:
        """Check again the writes that were posted to a device."""
        for part in tuple(self._open_parts):
            if self._source.finish(part):
                self._open_parts.remove(part)
                self._take(part, now_s)
                self._do(self._close_one(part.route))

    def _close_one(self, route: Route) -> Actions:
        """Note that one thing begun for a route is over; commit if its commit waited for it."""
        route.num_open -= 1
        if route.num_open or route.commit is None:
            return []
        commit, route.commit = route.commit, None
        return commit(self._clock.now_s())

    # Actions

    def _do(self, actions: Sequence[PushAction]) -> None:
        queue = deque(actions)
        while queue:
            queue.extend(self._act(queue.popleft()))

    def _act(self, action: PushAction) -> Sequence[PushAction]:
        match action:
            case SendFrame():
                route = self._routes.get(action.attempt)
                assert route is not None, "a route stays as long as its transfer"
                return self._sender.send(route, action)
            case SendControl():
                self._transport.send(action.peer, encode_control(action.control))
            case Granted():
                return self._granted(action)
            case StopFrames():
                return self._stop(action)
            case OpenDataPath():
                self._do(self._routes.open_data_path(action))
                return self._routes.open_all(action.peer)
            case DropPeer():
                self._transport.drop(action.peer)
                self._routes.forget_peer(action.peer)
            case PushFailed():
                self._emit(action)
                return self._routes.shut(action.attempt)
            case Acked() | Denied() | PushDrained():
                route = self._routes.pop(action.attempt)
                if route is not None:
                    self._source.forget(route)
                self._emit(action)
        return ()

    def _granted(self, action: Granted) -> Actions:
        route = self._routes.get(action.attempt)
        assert route is not None, "a route is there before RESERVE"
        problem = self._routes.open(route, action.grant.data_path, action.grant)
        if problem:
            return self._routes.fail(route, problem)
        self._emit(action)
        return []

    def _stop(self, action: StopFrames) -> Actions:
        def is_of_incoming(data: bytes) -> bool:
            header = decode_header(data)
            return (header.d_epoch, header.incoming_id) == (action.d_epoch, action.incoming_id)

        self._transport.unpin(action.peer, is_of_incoming)
        return self._routes.shut(action.attempt)

    def _deliver(self, arrival: Delivery | PayloadDone) -> None:
        if isinstance(arrival, PayloadDone):
            return
        if arrival.payload is not None:
            arrival.payload.discard()
        if arrival.control is None:
            log.warning("%s sent a frame to a prefill worker", arrival.peer)
            return
        try:
            self._do(self._protocol.on_control(arrival.peer, parse_control(arrival.control), self._clock.now_s()))
        except BatonError as error:
            log.warning("a message from %s is refused: %s", arrival.peer, error)


def _take_all(queue: deque[T]) -> list[T]:
    """Remove and return everything that is in a queue now; others may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
