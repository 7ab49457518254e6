"""One gRPC channel to each life of each worker, opened when first needed and closed when the life is lost.

On it, where the worker serves that, one call for all streams (`bundle`), begun anew after it has ended.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from baton.core.inside import ROUTER, Caller, DeploymentSecret, life_name, worker_name
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.proto.bundle_wire import read_decode_frame, read_prefill_frame
from baton.proto.inside import InsideChannel
from baton.proto.secure_channel import SecureChannels
from baton.router.bundle import Bundle
from baton.router.members import PREFILL, Life, Member, Members

OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_retries", 0),  # an attempt is sent once; trying again is the router's decision, with a new attempt
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new life at an old address gets a connection of its own
)
RETIRE_S: Final = 3600.0  # a channel with certificates of before may finish its calls


class Channels:
    """Channels by life.

    Args:
        members: says when a life is lost.
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
        self._channels: dict[Life, tuple[InsideChannel, int]] = {}
        self._bundles: dict[Life, tuple[Bundle, int]] = {}

    def to(self, member: Member) -> Any:
        """The channel to the life `member` is in, for stubs; its calls prove themselves. The member must be alive."""
        assert member.alive
        life = member.life
        version = self._secure.version
        channel, opened_version = self._channels.get(life, (None, 0))
        if channel is None or opened_version != version:
            if channel is None:
                self._members.watch(life, lambda: self._spawn(self._close(life)))
            else:
                self._spawn(channel.close(RETIRE_S))
            channel = self._open(member)
            self._channels[life] = channel, version
        return channel

    def bundle(self, member: Member) -> Bundle:
        """The call for all streams to the life `member` is in, which must be alive and serve that."""
        channel, version = self.to(member), self._secure.version
        life = member.life
        bundle, begun_version = self._bundles.get(life, (None, 0))
        if bundle is None or bundle.over or begun_version != version:
            if bundle is not None:
                bundle.retire()
            bundle = _bundle(channel, member)
            self._bundles[life] = bundle, version
        return bundle

    def _open(self, member: Member) -> InsideChannel:
        name = worker_name(member.state.role, member.state.worker_id)
        callee = life_name(name, member.state.epoch)
        caller = Caller(ROUTER, self._secret.worker_key(name))
        return InsideChannel(self._secure.open_aio(member.state.address, OPTIONS), caller, lambda: callee)

    async def close(self) -> None:
        """Close all; calls still open on them end."""
        for life in tuple(self._channels):
            await self._close(life)

    async def _close(self, life: Life) -> None:
        bundle, _ = self._bundles.pop(life, (None, 0))
        if bundle is not None:
            bundle.close()
        channel, _ = self._channels.pop(life, (None, 0))
        if channel is not None:
            await channel.close(None)


def _bundle(channel: Any, member: Member) -> Bundle:
    life = member.life
    about: dict[str, Any] = {"worker_id": life.worker_id, "role": member.state.role, "epoch": life.epoch}
    if member.state.role == PREFILL:
        call = worker_pb2_grpc.PrefillStub(channel).RunAll()
        return Bundle(call, worker_pb2.PrefillCommands, read_prefill_frame, **about)
    return Bundle(
        worker_pb2_grpc.DecodeStub(channel).AttendAll(), worker_pb2.DecodeCommands, read_decode_frame, **about
    )
