"""The connecting end of one `KvTransfer.Exchange` stream, made again when it breaks.

Three threads: gRPC's own takes packets from the outbox, one here reads what the peer says, and the one that drives the
transport calls everything below.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.kvtransfer.over_grpc_inbox import Inbox, StreamReader
from baton.kvtransfer.over_grpc_options import METHOD, NAME_KEY, SCHEME, channel_options
from baton.kvtransfer.over_grpc_outbox import Outbox
from baton.kvtransfer.transport import TransportCounts

MIN_RETRY_S, MAX_RETRY_S = 0.05, 1.0

log = logging.getLogger(__name__)


class GrpcClient:
    """What leads to one peer.

    Args:
        peer: its address.
        name: under which it knows this side, over all connections.
        config: limits and times.
        credentials: None for no encryption.
        inbox: where everything that arrives goes.
        counts: of the transport.
    """

    def __init__(
        self,
        peer: str,
        name: str,
        config: KVTransferConfig,
        credentials: grpc.ChannelCredentials | None,
        inbox: Inbox,
        counts: TransportCounts,
    ) -> None:
        self._peer = peer
        self._name = name
        self._config = config
        self._inbox = inbox
        self._counts = counts
        options = channel_options(config)
        options += [
            ("grpc.max_reconnect_backoff_ms", int(MAX_RETRY_S * 1e3)),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        if config.tls_server_name:
            options.append(("grpc.ssl_target_name_override", config.tls_server_name))
        target = peer.removeprefix(SCHEME)
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._retry_s = MIN_RETRY_S
        self._retry_at_s = 0.0
        self._warned_of = ""
        self._stream = self._open()

    @property
    def num_pinned(self) -> int:
        """Frames whose memory may still be read."""
        return self._stream.outbox.num_pinned

    def send(self, message: bytes) -> None:
        """Post a Control."""
        self._counts.messages_lost += not self._stream.outbox.put(message)

    def send_frame(self, header: bytes, payload: Sequence[memoryview]) -> None:
        """Post a frame; beyond twice the window it is dropped."""
        self._counts.frames_dropped += not self._stream.outbox.put_frame(header, payload)

    def unpin(self, match: Callable[[bytes], bool]) -> None:
        """See `Transport.unpin`."""
        self._counts.frames_dropped += self._stream.outbox.unpin(match)

    def tick(self) -> None:
        """Make the stream again if it broke."""
        now_s = time.monotonic()
        if not self._stream.has_ended:
            if self._stream.has_heard:
                self._retry_s = MIN_RETRY_S
        elif self._retry_at_s == 0.0:
            self._counts.frames_dropped += self._stream.outbox.close()
            self._counts.lanes_failed += 1
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            if self._stream.why != self._warned_of:
                self._warned_of = self._stream.why
                log.warning("the stream to %s ended: %s", self._peer, self._warned_of)
        elif now_s >= self._retry_at_s:
            self._retry_at_s = 0.0
            self._stream = self._open()

    def close(self) -> None:
        """End the stream; no payload is read any more."""
        self._counts.frames_dropped += self._stream.outbox.close()
        self._stream.cancel()
        self._channel.close()

    def _open(self) -> "_Stream":
        reader = StreamReader(self._peer, self._inbox, 0, takes_frames=False)
        return _Stream(self._channel, self._name, Outbox(2 * self._config.window_bytes), reader)


class _Stream:
    """One life of the stream.

    Attributes:
        outbox: what waits to be sent.
        has_heard: the peer has said something.
        has_ended: it is over.
        why: it ended.
    """

    def __init__(self, channel: grpc.Channel, name: str, outbox: Outbox, reader: StreamReader) -> None:
        self.outbox = outbox
        self.has_heard = False
        self.has_ended = False
        self.why = ""
        self._reader = reader
        exchange = channel.stream_stream(METHOD, None, None)  # bytes as they are
        self._call = exchange(iter(outbox), metadata=((NAME_KEY, name),))
        threading.Thread(target=self._read, name="kv-grpc-read", daemon=True).start()

    def cancel(self) -> None:
        """End it."""
        self._reader.stop()
        self._call.cancel()  # type: ignore[no-untyped-call]

    def _read(self) -> None:
        try:
            self._reader.run(self._heard(packet) for packet in self._call)
            self.why = "the peer ended it"
        except grpc.RpcError as error:
            self.why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        except ProtocolError as error:
            self.why = error.message
            self._call.cancel()  # type: ignore[no-untyped-call]
        finally:
            self.has_ended = True

    def _heard(self, packet: bytes) -> bytes:
        self.has_heard = True
        return packet
