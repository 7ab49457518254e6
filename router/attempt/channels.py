"""One gRPC channel to each incarnation of each worker, opened when first needed and closed when that is lost.

On it, where the worker serves that, one call for all streams (`stream_mux`), begun anew after it has ended.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from baton.core.inside import ROUTER, Caller, DeploymentSecret, incarnation_name, worker_name
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.inside import InsideChannel
from baton.proto.secure_channel import SecureChannels
from baton.proto.stream_mux_wire import read_decode_frame, read_prefill_frame
from baton.router.attempt.stream_mux import StreamMux
from baton.router.placement.members import PREFILL, Incarnation, Member, Members

OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_retries", 0),  # an attempt is sent once; trying again is the router's decision, with a new attempt
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new incarnation at an old address gets a connection of its own
)
RETIRE_S: Final = 3600.0  # a channel with certificates of before may finish its calls


class Channels:
    """Channels by incarnation.

    Args:
        members: says when an incarnation is lost.
        spawn: runs a coroutine in the background and keeps hold of it.
        secure: opens them; nothing is encrypted if not given. After its files have changed, new calls go over a new
            channel, and those on the one before end by themselves.
        secret: what workers are shown that it is known here; this process's own if not given.
    """

    def __init__(
        self,
        members: Members,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        secure: SecureChannels | None = None,
        secret: DeploymentSecret | None = None,
    ) -> None:
        self._secret = secret or DeploymentSecret.of_process()
        self._members = members
        self._spawn = spawn
        self._secure = secure or SecureChannels()
        self._channels: dict[Incarnation, tuple[InsideChannel, int]] = {}
        self._stream_muxes: dict[Incarnation, tuple[StreamMux, int]] = {}

    def to(self, member: Member) -> Any:
        """The channel to the incarnation of `member`, which must be alive, for stubs; its calls prove themselves."""
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

    def stream_mux(self, member: Member) -> StreamMux:
        """The call for all streams to the incarnation `member` is in, which must be alive and serve that."""
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
        """Close all; calls still open on them end."""
        for incarnation in tuple(self._channels):
            await self._close(incarnation)

    async def _close(self, incarnation: Incarnation) -> None:
        stream_mux, _ = self._stream_muxes.pop(incarnation, (None, 0))
        if stream_mux is not None:
            stream_mux.close()
        channel, _ = self._channels.pop(incarnation, (None, 0))
        if channel is not None:
            await channel.close(None)


def _stream_mux(channel: Any, member: Member) -> StreamMux:
    incarnation = member.incarnation
    about: dict[str, Any] = {"worker_id": incarnation.worker_id, "role": member.state.role, "epoch": incarnation.epoch}
    if member.state.role == PREFILL:
        call = worker_pb2_grpc.PrefillStub(channel).RunAll()
        return StreamMux(call, worker_pb2.PrefillCommands, read_prefill_frame, **about)
    return StreamMux(
        worker_pb2_grpc.DecodeStub(channel).AttendAll(), worker_pb2.DecodeCommands, read_decode_frame, **about
    )
