"""Keeps one gRPC channel per worker incarnation, and one call on it that multiplexes every request."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Protocol

import grpc.aio

from baton.core.errors import BatonError, ProtocolError, WorkerLost, as_internal
from baton.core.inside import ROUTER, Caller, DeploymentSecret, incarnation_name, worker_name
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.inside import InsideChannel
from baton.proto.secure_channel import SecureChannels
from baton.proto.stream_mux_wire import End, read_decode_frame, read_prefill_frame
from baton.router.attempt.continuation import Cause
from baton.router.attempt.wake_queue import WakeQueue
from baton.router.placement.members import PREFILL, Incarnation, Member, Members

MAX_OPEN_BYTES: Final = 4 << 20  # limit of the requests in one message, unless it holds a single one


class MuxStreamReader(Protocol):
    """Receives the messages of one stream."""

    @property
    def on_said(self) -> Callable[[Any], None]:
        """Called with each message of the worker, in order.

        Raises:
            BatonError: the message is invalid; the stream ends with this error.
        """
        ...

    def on_end(self, error: BaseException | None) -> None:
        """Called once when the stream has ended, unless the router cancelled it."""
        ...


class StreamMuxClient:
    """One call that carries all streams to one worker incarnation.

    Args:
        call: the gRPC call, not started yet.
        commands: class of the messages to the worker.
        read: splits a frame into (stream number, message) pairs.
        worker_id: the worker's name.
        role: the worker's role in every stream.
        epoch: epoch of the expected incarnation.
    """

    def __init__(
        self,
        call: Any,
        commands: Callable[..., Any],
        read: Callable[[Any], Iterator[tuple[int, Any]]],
        *,
        worker_id: str,
        role: str,
        epoch: int,
    ) -> None:
        self._call = call
        self._commands = commands
        self._read_frame = read
        self._name = f"{role} worker {worker_id}"
        self._about = {"worker_id": worker_id, "role": role}
        self._epoch = epoch
        self._readers: dict[int, MuxStreamReader] = {}
        self._last = 0
        self._opening: dict[int, Any] = {}  # requests not sent yet, by stream
        self._cancelled: list[int] = []  # cancellations not sent yet
        self._wake = asyncio.Event()
        self._retired = False
        self.over = False
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    @property
    def num_open(self) -> int:
        """Number of streams that have not ended."""
        return len(self._readers)

    def open(self, message: Any, reader: MuxStreamReader) -> Callable[[], None]:
        """Open a stream and return a function that cancels it; after a cancel, `reader` is not called again."""
        assert not self.over
        self._last += 1
        number = self._last
        self._readers[number] = reader
        self._opening[number] = message
        self._wake.set()
        return lambda: self._cancel(number)

    def retire(self) -> None:
        """Open no more streams: the call ends with the last open one."""
        self._retired = True
        self._end_if_idle()

    def close(self) -> None:
        """End the call; open streams end as if the connection had closed."""
        for task in self._tasks:
            task.cancel()

    def _cancel(self, number: int) -> None:
        if self._readers.pop(number, None) is None:
            return
        if self._opening.pop(number, None) is None:
            self._cancelled.append(number)
            self._wake.set()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._retired and not self._readers and not self._cancelled:
            self.close()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._opening or self._cancelled:
                    await self._call.write(self._take())
                self._end_if_idle()
        except grpc.aio.AioRpcError:
            pass  # the read task gets the same error, and ends every stream with it
        except asyncio.InvalidStateError:
            pass  # likewise: the call has ended
        except Exception as error:  # noqa: BLE001  the task's boundary: without it, streams would never be sent
            self._end(as_internal(f"writing to {self._name}", error))
            self._tasks[1].cancel()

    def _take(self) -> Any:
        commands = self._commands(cancelled=self._cancelled)
        self._cancelled.clear()
        num_bytes = 0
        for number, message in tuple(self._opening.items()):
            num_bytes += message.ByteSize()
            if num_bytes > MAX_OPEN_BYTES and commands.open:
                break
            commands.open.add(stream=number, request=message)
            del self._opening[number]
        return commands

    async def _read(self) -> None:
        error: BaseException = asyncio.CancelledError()
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if frame.epoch and frame.epoch != self._epoch:
                    raise WorkerLost(f"{self._name} was restarted", **self._about)
                readers = self._readers
                for number, said in self._read_frame(frame):
                    reader = readers.get(number)
                    if reader is not None:  # else the stream was cancelled
                        self._say(number, reader, said)
            error = self._broken("ended the call of all streams")
        except ProtocolError as found:
            error = self._broken(f"sent {found.message}")
        except (grpc.aio.AioRpcError, BatonError) as found:
            error = found
        except Exception as found:  # noqa: BLE001  the task's boundary: all its streams end with the error
            error = as_internal(f"reading from {self._name}", found)
        finally:
            self._end(error)

    def _broken(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._name} {what}", cause=Cause.STREAM.value, **self._about)

    def _say(self, number: int, reader: MuxStreamReader, said: Any) -> None:
        if type(said) is End:
            del self._readers[number]
            self._tell_end(reader, said.error)
            self._end_if_idle()
            return
        try:
            reader.on_said(said)
        except Exception as error:  # noqa: BLE001  a bad message on one stream must not end the others
            if number in self._readers:
                self._cancel(number)
                self._tell_end(reader, error)

    def _end(self, error: BaseException) -> None:
        self.over = True
        self._tasks[0].cancel()
        self._call.cancel()
        self._opening.clear()
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            self._tell_end(reader, error)

    def _tell_end(self, reader: MuxStreamReader, error: BaseException | None) -> None:
        """Tell a reader that its stream ended. If the reader fails, tell it once more with its own error.

        A failing reader must not keep the end from the others.
        """
        try:
            reader.on_end(error)
        except Exception as found:  # noqa: BLE001  a reader's boundary
            reader.on_end(as_internal(f"ending a stream of {self._name}", found))


OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_retries", 0),  # an attempt is sent once; a retry is the router's decision, as a new attempt
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new incarnation at an old address gets its own connection
)
RETIRE_S: Final = 3600.0  # how long calls on a channel with replaced certificates may take to finish


class Channels:
    """gRPC channels by worker incarnation.

    Args:
        members: reports when an incarnation is lost.
        spawn: runs a coroutine in the background and keeps a reference to its task.
        secure: opens the channels; without it nothing is encrypted. After its certificate files change, new calls use a
            new channel, and calls on the old one run to their end.
        secret: proves this router's identity to workers; defaults to this process's own secret.

    Attributes:
        wake_queue: wakes the readers of what all workers send.
    """

    def __init__(
        self,
        members: Members,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        secure: SecureChannels | None = None,
        secret: DeploymentSecret | None = None,
    ) -> None:
        self.wake_queue = WakeQueue()
        self._secret = secret or DeploymentSecret.of_process()
        self._members = members
        self._spawn = spawn
        self._secure = secure or SecureChannels()
        self._channels: dict[Incarnation, tuple[InsideChannel, int]] = {}
        self._stream_muxes: dict[Incarnation, tuple[StreamMuxClient, int]] = {}

    def to(self, member: Member) -> Any:
        """Return the authenticated channel to the incarnation of `member`, which must be alive."""
        assert member.alive
        incarnation = member.incarnation
        version = self._secure.version
        channel, opened_version = self._channels.get(incarnation, (None, 0))
        if channel is None or opened_version != version:
            if channel is None:
                self._members.watch(incarnation, lambda: self._spawn(self._close(incarnation)))
            else:
                self._spawn(channel.close(RETIRE_S))
            channel = self._open(member)
            self._channels[incarnation] = channel, version
        return channel

    def stream_mux(self, member: Member) -> StreamMuxClient:
        """Return the multiplexed call to the incarnation of `member`, which must be alive."""
        channel, version = self.to(member), self._secure.version
        incarnation = member.incarnation
        stream_mux, begun_version = self._stream_muxes.get(incarnation, (None, 0))
        if stream_mux is None or stream_mux.over or begun_version != version:
            if stream_mux is not None:
                stream_mux.retire()
            stream_mux = _stream_mux(channel, member)
            self._stream_muxes[incarnation] = stream_mux, version
        return stream_mux

    def _open(self, member: Member) -> InsideChannel:
        name = worker_name(member.state.role, member.state.worker_id)
        callee = incarnation_name(name, member.state.epoch)
        caller = Caller(ROUTER, self._secret.worker_key(name))
        return InsideChannel(self._secure.open_aio(member.state.address, OPTIONS), caller, lambda: callee)

    async def close(self) -> None:
        """Close all channels; calls still open on them end."""
        for incarnation in tuple(self._channels):
            await self._close(incarnation)

    async def _close(self, incarnation: Incarnation) -> None:
        stream_mux, _ = self._stream_muxes.pop(incarnation, (None, 0))
        if stream_mux is not None:
            stream_mux.close()
        channel, _ = self._channels.pop(incarnation, (None, 0))
        if channel is not None:
            await channel.close(None)


def _stream_mux(channel: Any, member: Member) -> StreamMuxClient:
    incarnation = member.incarnation
    about: dict[str, Any] = {"worker_id": incarnation.worker_id, "role": member.state.role, "epoch": incarnation.epoch}
    if member.state.role == PREFILL:
        call = worker_pb2_grpc.PrefillStub(channel).RunAll()
        return StreamMuxClient(call, worker_pb2.PrefillCommands, read_prefill_frame, **about)
    return StreamMuxClient(
        worker_pb2_grpc.DecodeStub(channel).AttendAll(), worker_pb2.DecodeCommands, read_decode_frame, **about
    )
