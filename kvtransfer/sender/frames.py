"""Posts frames: fills in their checks, and sends what writer threads read, or says what they wrote.

Runs on the push thread. Where a one-sided frame is not written yet - it was lost, or its transfer was closed to writers
when the part was computed - a writer thread does it now.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from baton.core.clock import Clock
from baton.core.config import KVTransferConfig
from baton.core.kv_transports import is_one_sided
from baton.kvtransfer.protocol.frame import crc_of, encode_header
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.sender.actions import PushAction, SendFrame
from baton.kvtransfer.sender.lane import LaneFailed, Written
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.route import Route
from baton.kvtransfer.sender.source import PushSource

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
        """On a writer thread. A gate that was shut means: do not begin."""
        if not self._route.gate.is_shut:
            self._written = self._source.write(self._route, self.action.header.span, with_digest=self.action.has_digest)

    def end(self, error: BaseException | None) -> None:
        """It ran, or never will."""
        if error is not None:
            self.problem = str(error) or repr(error)

    def is_over(self) -> bool:
        """Whether nothing is written any more."""
        try:
            return self._written is None or self._written.done
        except LaneFailed as error:
            self.problem = str(error) or repr(error)
            return True

    @property
    def written(self) -> Written | None:
        """The write, unless it failed or did not begin."""
        return None if self.problem else self._written


class FrameSender:
    """See the module.

    Args:
        protocol: of this rank.
        transport: carries frames.
        source: of payloads.
        config: limits.
        clock: the worker's.
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
        self._rewrites: deque[_Rewrite] = deque()  # that ran
        self._warned_of_drops = False

    @property
    def is_waiting(self) -> bool:
        """Whether a device is at a write of ours."""
        return bool(self._rewrites)

    def send(self, route: Route, action: SendFrame) -> Actions:
        """Do what a SendFrame asks for."""
        header = action.header
        self.num_frames += 1
        self.num_bytes += header.payload_bytes
        frame = route.frames.pop((header.layer, header.first), None)
        if frame is not None and frame.count != header.count:
            self._source.give_back(route, frame)
            frame = None
        if self._config.drop_pushes:
            return self._drop(action)
        if is_one_sided(action.lane):
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
        self._transport.send_frame(action.peer, data, payload, action.lane)
        self._source.give_back(route, frame)
        return []

    def finish(self, now_s: float) -> Actions:
        """Take note of the writes that are over."""
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
        """Its bytes are there."""
        data = encode_header(action.header, digest if action.has_digest else None)
        self._transport.send_frame(action.peer, data, (), action.lane)

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
        if is_one_sided(action.lane):
            return self._protocol.written(action.attempt, action.header, self._clock.now_s())
        return []
