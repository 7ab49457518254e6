"""The connecting side of the raw data path: one or more TCP connections to one peer, filled straight from the pool.

Nothing waits: what a socket does not accept stays in a bounded queue of scatter lists, whose memory is read until it
has been sent. A connection that breaks loses its queue, which the protocol repairs, and is reopened.
"""

import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError, Unauthenticated
from baton.kvtransfer.protocol.preface import ConnectingPreface
from baton.kvtransfer.protocol.transport import TransportCounts
from baton.kvtransfer.sender.buffer_cursor import MAX_BUFFERS, BufferCursor
from baton.kvtransfer.transports.raw import tune_socket

MAX_BURST_BYTES = 16 << 20  # bytes that one stream sends before others get their turn
MIN_RETRY_S, MAX_RETRY_S = 0.1, 5.0
_WOULD_WAIT = (errno.EINPROGRESS, errno.EAGAIN)

log = logging.getLogger(__name__)

Place = tuple[int, str, int]


class _Outgoing:
    """A frame that was not fully sent yet."""

    __slots__ = ("cursor", "header", "is_begun")

    def __init__(self, header: bytes, payload: Sequence[memoryview]) -> None:
        self.header = header
        self.cursor = BufferCursor([header, *payload])
        self.is_begun = False


class RawSender:
    """The raw data path to one peer.

    Args:
        place: address to connect to.
        new_preface: makes the preface of each connection.
        config: limits and times.
        poller: polled by the caller; events of this data path's files go to `ready`.
        counts: counters of the transport.
    """

    def __init__(
        self,
        place: Place,
        new_preface: Callable[[], ConnectingPreface],
        config: KVTransferConfig,
        poller: zmq.Poller,
        counts: TransportCounts,
    ) -> None:
        self._place = place
        self._new_preface = new_preface
        self._config = config
        self._poller = poller
        self._counts = counts
        self._retry_s = MIN_RETRY_S
        self._retry_at_s = 0.0
        self._has_warned = self._has_warned_of_listener = False
        self._streams: list[_Stream] = []
        self._connect()

    @property
    def is_open(self) -> bool:
        """Whether frames would be sent here."""
        return any(stream.is_open for stream in self._streams)

    @property
    def files(self) -> list[int]:
        """File descriptors whose events go to `ready`."""
        return [stream.file for stream in self._streams]

    @property
    def num_pinned(self) -> int:
        """Number of frames whose memory may still be read."""
        return sum(not frame.cursor.is_kept for stream in self._streams for frame in stream.queue)

    def send(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        """Post a frame; False if the data path is not open. A frame beyond twice the window is dropped."""
        streams = [stream for stream in self._streams if stream.is_open]
        if not streams:
            return False
        frame = _Outgoing(header, payload)
        if sum(stream.num_bytes for stream in streams) + frame.cursor.num_left > 2 * self._config.window_bytes:
            self._counts.frames_dropped += 1
            return True
        stream = min(streams, key=lambda stream: stream.num_bytes)
        stream.put(frame)
        if len(stream.queue) == 1:
            self._run(stream, stream.flush)
        return True

    def ready(self, file: int, events: int) -> None:
        """Continue with a connection."""
        stream = next((stream for stream in self._streams if stream.file == file), None)
        if stream is not None:
            self._run(stream, lambda: stream.ready(events))

    def tick(self) -> None:
        """Reopen connections that are due, and give up those that were not answered."""
        now_s = time.monotonic()
        for stream in list(self._streams):
            if not stream.is_open and now_s > stream.deadline_s:
                self._fail(stream, "no answer")
        if len(self._streams) < self._config.raw_streams and now_s >= self._retry_at_s:
            self._connect()

    def unpin(self, match: Callable[[bytes], bool]) -> None:
        """See `Transport.unpin`."""
        for stream in self._streams:
            self._counts.frames_dropped += stream.unpin(match)

    def close(self) -> None:
        """Close the connections, and drop what they have not sent."""
        for stream in self._streams:
            self._close(stream)
        self._streams = []

    def _connect(self) -> None:
        while len(self._streams) < self._config.raw_streams:
            try:
                self._streams.append(_Stream(self._place, self._new_preface(), self._config, self._poller))
            except OSError as error:
                self._back_off(str(error))
                return

    def _run(self, stream: "_Stream", act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._fail(stream, error.strerror or str(error))
            return
        except (ProtocolError, Unauthenticated) as error:
            if not self._has_warned_of_listener:  # whatever else went wrong before
                self._has_warned_of_listener, self._has_warned = True, False
            self._fail(stream, error.message)
            return
        if stream.is_open:
            self._retry_s = MIN_RETRY_S

    def _fail(self, stream: "_Stream", why: str) -> None:
        self._streams.remove(stream)
        self._close(stream)
        self._back_off(why)

    def _close(self, stream: "_Stream") -> None:
        self._counts.frames_dropped += len(stream.queue)
        stream.close()

    def _back_off(self, why: str) -> None:
        self._counts.data_paths_failed += 1
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        if not self._has_warned:
            self._has_warned = True
            log.warning("the raw data path to %s:%d does not work, payloads go inline: %s", *self._place[1:], why)


class _Stream:
    """One connection.

    Attributes:
        file: file descriptor; -1 once closed.
        is_open: whether the other side has proved itself and accepts frames.
        deadline_s: when it must be open.
        queue: frames not sent yet; the first may be sent in part.
        num_bytes: bytes in the queue.
    """

    def __init__(self, place: Place, preface: ConnectingPreface, config: KVTransferConfig, poller: zmq.Poller) -> None:
        family, host, port = place
        self.is_open = False
        self.deadline_s = time.monotonic() + max(1.0, config.lease_s)
        self.queue: deque[_Outgoing] = deque()
        self.num_bytes = 0
        self._preface = preface
        self._answer = BufferCursor([])
        self._poller = poller
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            tune_socket(self._socket, config)
            code = self._socket.connect_ex((host, port))
            if code not in (0, *_WOULD_WAIT):
                raise OSError(code, errno.errorcode.get(code, "connect"))
        except OSError:
            self._socket.close()
            raise
        self.file = self._socket.fileno()
        self._events = zmq.POLLIN | zmq.POLLOUT
        self._poller.register(self.file, self._events)

    def put(self, frame: _Outgoing) -> None:
        """Append a frame."""
        self.queue.append(frame)
        self.num_bytes += frame.cursor.num_left

    def ready(self, events: int) -> None:
        """Continue to receive and send.

        Raises:
            OSError: the connection cannot be used any more.
            ProtocolError: the peer does not speak this protocol.
            Unauthenticated: the peer does not know the deployment's secret.
        """
        if events & (zmq.POLLIN | zmq.POLLERR):
            self._hear()
        if events & zmq.POLLOUT:
            self.flush()

    def flush(self) -> None:
        """Send what the socket accepts, in few system calls.

        Raises:
            OSError: the connection cannot be used any more.
        """
        num_sent = 0
        while (cursors := self._next()) and num_sent < MAX_BURST_BYTES:
            buffers = [buffer for cursor in cursors for buffer in cursor.buffers()][:MAX_BUFFERS]
            try:
                sent = self._socket.sendmsg(buffers)
            except BlockingIOError:
                break
            num_sent += sent
            is_full = sent < sum(map(len, buffers))
            self._advance(cursors, sent)
            if is_full:
                break
        self._watch()

    def unpin(self, match: Callable[[bytes], bool]) -> int:
        """Drop matching frames that were not begun, and copy one that was; return how many were dropped."""
        kept: deque[_Outgoing] = deque()
        for frame in self.queue:
            if not match(frame.header):
                kept.append(frame)
            elif frame.is_begun:
                frame.cursor.keep()
                kept.append(frame)
        num_dropped = len(self.queue) - len(kept)
        self.queue = kept
        self.num_bytes = sum(frame.cursor.num_left for frame in kept)
        self._watch()
        return num_dropped

    def close(self) -> None:
        """Close the socket, and release all memory."""
        self._poller.unregister(self.file)
        self.file = -1
        self.is_open = False
        self.queue.clear()
        self.num_bytes = 0
        self._socket.close()

    def _hear(self) -> None:
        try:
            data = self._socket.recv(self._preface.num_wanted or 1)
        except BlockingIOError:
            return
        if not data or self.is_open:
            raise OSError(errno.ECONNRESET, "closed by the peer" if not data else "the peer says what it must not")
        answer = self._preface.take(data)
        if answer:
            self._answer = BufferCursor([answer])
            self.flush()
        self.is_open = self._preface.is_accepted

    def _next(self) -> list[BufferCursor]:
        """Return what the next system call may send."""
        if self._answer.num_left:
            return [self._answer]
        cursors: list[BufferCursor] = []
        num_bytes = 0
        for frame in self.queue:
            if num_bytes >= MAX_BURST_BYTES // 4 or len(cursors) == MAX_BUFFERS // 2:
                break
            cursors.append(frame.cursor)
            num_bytes += frame.cursor.num_left
        return cursors

    def _advance(self, cursors: Sequence[BufferCursor], num_sent: int) -> None:
        if cursors[0] is self._answer:
            self._answer.advance(num_sent)
            return
        self.num_bytes -= num_sent
        while num_sent:
            frame = self.queue[0]
            taken = min(num_sent, frame.cursor.num_left)
            frame.cursor.advance(taken)
            frame.is_begun = True
            num_sent -= taken
            if not frame.cursor.num_left:
                self.queue.popleft()

    def _watch(self) -> None:
        wanted = zmq.POLLIN | (zmq.POLLOUT if self.queue or self._answer.num_left else 0)
        if wanted != self._events:
            self._events = wanted
            self._poller.modify(self.file, wanted)
