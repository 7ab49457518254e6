"""The connecting end of `KvTransfer.Exchange` to one peer: two streams, each made again when it breaks.

One carries Controls both ways, the other frames, and nothing back: in gRPC's Python, a thread that waits for answers
is woken for every packet that has left. gRPC's own threads take packets from the outboxes, one here reads what the
peer says, and the one that drives the transport calls everything below.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.protocol.transport import TransportCounts
from baton.kvtransfer.transports.over_grpc_inbox import Inbox, StreamReader
from baton.kvtransfer.transports.over_grpc_options import (
    BULK,
    KIND_KEY,
    METHOD,
    NAME_KEY,
    PASS_KEY,
    SCHEME,
    channel_options,
)
from baton.kvtransfer.transports.over_grpc_send_queue import SendQueue
from baton.proto.secure_channel import SecureChannels

MIN_RETRY_S, MAX_RETRY_S = 0.05, 1.0
MAX_CHANNELS = 2  # the other stream may still use the one before

log = logging.getLogger(__name__)


class GrpcClient:
    """What leads to one peer.

    Args:
        peer: its address.
        name: under which it knows this side, over all connections.
        config: limits and times.
        channels: opens them; after the certificates have changed, streams that are made again use a new one.
        inbox: where everything that arrives goes.
        counts: of the transport.
    """

    def __init__(
        self,
        peer: str,
        name: str,
        config: KVTransferConfig,
        channels: SecureChannels,
        inbox: Inbox,
        counts: TransportCounts,
    ) -> None:
        self._counts = counts
        options = channel_options(config)
        options += [
            ("grpc.max_reconnect_backoff_ms", int(MAX_RETRY_S * 1e3)),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        self._secure = channels
        self._target = peer.removeprefix(SCHEME)
        self._options = options
        self._version = channels.version
        self._channels = [channels.open(self._target, options)]
        shown = ((PASS_KEY, connection_pass(bytes.fromhex(config.key))), (NAME_KEY, name))

        def open_control() -> _Stream:
            reader = StreamReader(peer, inbox, 0, takes_frames=False)
            return _Stream(self._newest(), shown, SendQueue(0), reader)

        def open_bulk() -> _Stream:
            return _Stream(self._newest(), (*shown, (KIND_KEY, BULK)), SendQueue(2 * config.window_bytes), None)

        self._control = _Link(peer, open_control, counts)
        self._bulk = _Link(peer, open_bulk, counts)

    @property
    def num_pinned(self) -> int:
        """Frames whose memory may still be read."""
        return self._bulk.send_queue.num_pinned

    def send(self, message: bytes) -> None:
        """Post a Control."""
        self._counts.messages_lost += not self._control.send_queue.put(message)

    def send_frame(self, header: bytes, payload: Sequence[memoryview]) -> None:
        """Post a frame; beyond twice the window it is dropped."""
        self._counts.frames_dropped += not self._bulk.send_queue.put_frame(header, payload)

    def unpin(self, match: Callable[[bytes], bool]) -> None:
        """See `Transport.unpin`."""
        self._counts.frames_dropped += self._bulk.send_queue.unpin(match)

    def tick(self) -> None:
        """Make streams again that broke."""
        self._control.tick()
        self._bulk.tick()

    def close(self) -> None:
        """End both streams; no payload is read any more."""
        self._control.close()
        self._bulk.close()
        for channel in self._channels:
            channel.close()

    def _newest(self) -> grpc.Channel:
        version = self._secure.version
        if version != self._version:
            self._version = version
            self._channels.append(self._secure.open(self._target, self._options))
            for channel in self._channels[:-MAX_CHANNELS]:
                channel.close()
            del self._channels[:-MAX_CHANNELS]
        return self._channels[-1]


class _Link:
    """A stream that is made again when it has ended."""

    def __init__(self, peer: str, make: Callable[[], "_Stream"], counts: TransportCounts) -> None:
        self._peer = peer
        self._make = make
        self._counts = counts
        self._retry_s = MIN_RETRY_S
        self._retry_at_s = 0.0
        self._warned_of = ""
        self._stream = make()

    @property
    def send_queue(self) -> SendQueue:
        """Of the stream there is; closed if it has ended."""
        return self._stream.send_queue

    def tick(self) -> None:
        """Note that the stream has ended, or make the next."""
        now_s = time.monotonic()
        if not self._stream.has_ended:
            if now_s > self._retry_at_s + MAX_RETRY_S:
                self._retry_s = MIN_RETRY_S
        elif not self._stream.is_buried:
            self._stream.is_buried = True
            self._counts.frames_dropped += self.send_queue.close()
            self._counts.lanes_failed += 1
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            if self._stream.why != self._warned_of:
                self._warned_of = self._stream.why
                log.warning("the stream to %s ended: %s", self._peer, self._warned_of)
        elif now_s >= self._retry_at_s:
            self._stream = self._make()

    def close(self) -> None:
        """End it."""
        self._counts.frames_dropped += self.send_queue.close()
        self._stream.cancel()


class _Stream:
    """One life of a stream.

    Attributes:
        send_queue: what waits to be sent.
        has_ended: it is over.
        is_buried: and that was noted.
        why: it ended.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...],
        send_queue: SendQueue,
        reader: StreamReader | None,
    ) -> None:
        self.send_queue = send_queue
        self.has_ended = False
        self.is_buried = False
        self.why = ""
        self._reader = reader
        exchange = channel.stream_stream(METHOD, None, None)  # bytes as they are
        self._call = exchange(iter(send_queue), metadata=metadata)
        if reader is None:
            assert isinstance(self._call, grpc.Future)
            self._call.add_done_callback(self._ended)
        else:
            threading.Thread(target=self._read, args=(reader,), name="kv-grpc-read", daemon=True).start()

    def cancel(self) -> None:
        """End it."""
        if self._reader is not None:
            self._reader.stop()
        self._call.cancel()  # type: ignore[no-untyped-call]

    def _ended(self, _: object) -> None:
        self.why = f"{self._call.code().name}: {self._call.details()}"
        self.has_ended = True

    def _read(self, reader: StreamReader) -> None:
        try:
            reader.run(self._call)
            self.why = "the peer ended it"
        except grpc.RpcError as error:
            self.why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        except ProtocolError as error:
            self.why = error.message
            self._call.cancel()  # type: ignore[no-untyped-call]
        finally:
            self.has_ended = True
