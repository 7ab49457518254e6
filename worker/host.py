"""The gRPC side of a worker: one asyncio loop on its own thread, which runs the server and the heartbeats."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, InvalidRequest, PortInUse, WorkerLost, as_internal
from baton.core.handshakes import Handshakes
from baton.core.inside import WorkerIdentity
from baton.core.tls_files import TlsFiles, TlsWatch
from baton.kernels.compiles import COMPILES
from baton.proto import admin_pb2, admin_pb2_grpc, wire, worker_pb2, worker_pb2_grpc
from baton.proto.inside import ALWAYS_OPEN, InsideChannel, RequireProof
from baton.proto.roles import ALLOWED_AT_WORKERS, RequireRole
from baton.proto.secure_channel import SecureChannels, is_refused_certificate, server_credentials
from baton.proto.unreadable import RefuseUnreadable
from baton.worker.router_incarnation import RouterIncarnation

HEARTBEAT_S = 0.25
# A busy router is not dead: a heartbeat waits for it. A dead one breaks the connection, because it ends or because it
# does not answer pings; gRPC's own thread answers them, whatever the router's event loop does.
HEARTBEAT_TIMEOUT_S = 60.0
SILENT_S = 2.0  # a stopping deployment ends its router first: workers that end soon after need not report that
MAX_BROKEN_HEARTBEATS = 8  # in a row: then the worker ends, since the router has given it up
STOP_GRACE_S = 0.5
# A restarted router should hear of its workers at once: no pause between two attempts grows beyond a second.
ROUTER_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
HANDSHAKES_S = 1.0
END_DELAY_S = 0.1
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Pings of a peer that was cut off or stopped all arrive at once afterwards; that is no reason to disconnect.
    ("grpc.http2.max_ping_strikes", 0),
)

SetSpeculation = Callable[[worker_pb2.SpeculationMode], worker_pb2.Speculation]

log = logging.getLogger(__name__)


class WorkerHost:
    """Serves a worker's RPCs and reports its state to the router.

    Args:
        host: address to bind to, and to advertise.
        register: adds the role's servicer to the server; called on the host's event loop.
        state: returns the worker's current state; called on the host's thread.
        router_address: where heartbeats go; empty sends none (for tests without a router).
        on_fatal: called on the host's thread with the error that ended it: a worker that cannot be reached must not
            live on.
        set_speculation: changes how many drafts the worker's steps make, if it makes any; any thread may call it.
        tls: certificate, key and the CA of callers' certificates; without it, nothing is encrypted.
        identity: what the worker proves to the router, and requires of callers; None: derived from `state`, with a key
            made by this process.
    """

    def __init__(
        self,
        host: str,
        register: Callable[[grpc.aio.Server], None],
        state: Callable[[], worker_pb2.WorkerState],
        router_address: str,
        on_fatal: Callable[[BaseException], None],
        set_speculation: SetSpeculation | None = None,
        tls: TlsFiles | None = None,
        identity: WorkerIdentity | None = None,
    ) -> None:
        self._given_identity = identity
        self._tls = tls if tls is not None and tls.is_on else None
        self._set_speculation = set_speculation
        self._on_fatal = on_fatal
        self._host = host
        self._register = register
        self._state = state
        self._router_address = router_address
        self._desired_state = worker_pb2.DesiredState()  # the router's, kept for the next router
        self._is_asked_desired_state = False
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker-host", daemon=True)
        self.address = ""

    def start(self) -> None:
        """Serve on a free port; return when the server listens.

        Raises:
            PortInUse: no port could be bound.
        """
        COMPILES.serve()
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop serving; open streams are cancelled after a short grace period."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended by itself meanwhile, and its loop is closed
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
            assert not self._thread.is_alive(), "the worker's gRPC host did not stop"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        # The boundary of the thread: the caller that waits for the start gets the error, and later the worker ends.
        except BaseException as error:
            if not self._started.is_set():
                self._error = error
            else:
                log.exception("the worker's gRPC host failed")
                self._on_fatal(error)
        finally:
            self._started.set()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self) -> None:
        handshakes = Handshakes("worker's", lambda num: None)
        identity = self._given_identity or _identity_of(self._state())
        require_proof = RequireProof(identity.verifier(time.time), on_call=handshakes.called)
        require_role = RequireRole(lambda service: None if service in ALWAYS_OPEN else ALLOWED_AT_WORKERS)
        interceptors = (require_proof, require_role, RefuseUnreadable(handshakes.called))
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
        self._register(server)
        admin_pb2_grpc.add_AdminServicer_to_server(_WorkerAdmin(self._state, self._set_speculation, self._end), server)
        try:
            if self._tls is None:
                port = server.add_insecure_port(f"{self._host}:0")
            else:
                port = server.add_secure_port(
                    f"{self._host}:0", server_credentials(TlsWatch(self._tls), handshakes.begun)
                )
        except RuntimeError as error:
            raise PortInUse(f"cannot bind {self._host}: {error}", host=self._host) from error
        self.address = f"{self._host}:{port}"
        await server.start()
        self._started.set()
        heartbeats = asyncio.create_task(self._heartbeat(identity))
        stopping = asyncio.create_task(self._wait_for_stop(handshakes))
        await asyncio.wait({heartbeats, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (heartbeats, stopping):
            task.cancel()
        await asyncio.wait({heartbeats, stopping})
        await server.stop(STOP_GRACE_S)
        if not heartbeats.cancelled():
            heartbeats.result()  # raises the error that ended them

    async def _wait_for_stop(self, handshakes: Handshakes) -> None:
        while not self._stopping.is_set():
            handshakes.tick()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), HANDSHAKES_S)

    async def _heartbeat(self, identity: WorkerIdentity) -> None:
        if not self._router_address:
            await self._stopping.wait()
            return
        is_told, num_broken, silent_since_s = False, 0, math.inf
        router = _RouterChannel(self._router_address, SecureChannels(self._tls), identity)
        try:
            while True:
                is_met = False  # whether another incarnation answered: then the heartbeat is repeated at once
                try:
                    membership = worker_pb2_grpc.MembershipStub(await router.newest())
                    reply = await membership.Heartbeat(self._report(), timeout=HEARTBEAT_TIMEOUT_S)
                    is_told, silent_since_s, router.incarnation.is_meeting = False, math.inf, False
                    self._follow(reply)
                    num_broken = 0
                except grpc.aio.AioRpcError as error:
                    is_met = router.incarnation.meets(error)
                    now_s = self._loop.time()
                    silent_since_s = now_s if is_met else min(silent_since_s, now_s)
                    if not is_told and now_s - silent_since_s >= SILENT_S and not is_met:
                        log.warning("the router at %s %s", self._router_address, self._why(error))
                        is_told = True
                except Exception as error:
                    num_broken += 1
                    if num_broken == MAX_BROKEN_HEARTBEATS:
                        raise
                    as_internal("a heartbeat", error)
                await asyncio.sleep(0.0 if is_met else HEARTBEAT_S)
        finally:
            await router.close()

    def _why(self, error: grpc.aio.AioRpcError) -> str:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return f"does not take this worker for one of its deployment: {error.details()}"
        if is_refused_certificate(error):
            return f"and this worker do not accept each other's certificates: {error.details()}"
        perhaps = ", or does not accept this worker's certificate" if self._tls is not None else ""
        return f"does not answer{perhaps}: {error.code()}"

    def _end(self) -> None:
        """End this incarnation after a short delay, so that the operator who requested it gets a reply first."""
        error = WorkerLost("an operator ended this incarnation of the worker")
        self._loop.call_later(END_DELAY_S, self._on_fatal, error)

    def _report(self) -> worker_pb2.WorkerState:
        state = self._state()
        state.desired_state_version, state.desired_state_incarnation = (
            self._desired_state.version,
            self._desired_state.incarnation,
        )
        if self._is_asked_desired_state:
            state.desired_state.CopyFrom(self._desired_state)
        return state

    def _follow(self, reply: worker_pb2.HeartbeatReply) -> None:
        """Apply what operators have set: a worker that was not running then learns of it from its heartbeats."""
        self._is_asked_desired_state = reply.wants_desired_state
        if reply.HasField("desired_state"):
            self._desired_state = reply.desired_state
        if self._set_speculation is None or not reply.HasField("speculation"):
            return
        try:
            self._set_speculation(reply.speculation)
        except BatonError as error:
            log.warning("the router wants what this worker cannot do: %s", error.message)


def worker_identity(config: WorkerConfig, role: str, epoch: int) -> WorkerIdentity:
    """Return what a worker with this configuration is to its router."""
    return WorkerIdentity(role=role, worker_id=config.worker_id, epoch=epoch, key=bytes.fromhex(config.key))


def _identity_of(state: worker_pb2.WorkerState) -> WorkerIdentity:
    return WorkerIdentity(role=state.role, worker_id=state.worker_id, epoch=state.epoch)


class _RouterChannel:
    """A channel to the router, reopened after the certificates have changed."""

    def __init__(self, address: str, secure: SecureChannels, identity: WorkerIdentity) -> None:
        self._address = address
        self._secure = secure
        self._caller = identity.caller
        self.incarnation = RouterIncarnation()
        self._version = secure.version
        self._channel = secure.open_aio(address, ROUTER_OPTIONS)

    async def newest(self) -> Any:
        version = self._secure.version
        if version != self._version:
            await self._channel.close(None)
            self._version, self._channel = version, self._secure.open_aio(self._address, ROUTER_OPTIONS)
        return InsideChannel(self._channel, self._caller, lambda: self.incarnation.name)

    async def close(self) -> None:
        await self._channel.close(None)


class _WorkerAdmin(admin_pb2_grpc.AdminServicer):
    """A worker's own Admin service: what it holds right now."""

    def __init__(
        self,
        state: Callable[[], worker_pb2.WorkerState],
        set_speculation: SetSpeculation | None,
        end: Callable[[], None],
    ) -> None:
        self._state = state
        self._end = end
        self._set_speculation = set_speculation

    async def Inventory(
        self, request: admin_pb2.InventoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.InventoryReply:
        """Return this worker's state, freshly counted."""
        status = admin_pb2.WorkerStatus(state=self._state(), alive=True)
        return admin_pb2.InventoryReply(workers=[status])

    async def SetSpeculation(
        self, request: admin_pb2.SetSpeculationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.SetSpeculationReply:
        """Change this worker's number of drafts, if it is a decode worker."""
        try:
            if self._set_speculation is None:
                raise InvalidRequest("this worker makes no drafts: it is no decode worker")
            speculation = self._set_speculation(request.mode)
        except BatonError as error:
            await wire.abort_with(context, error)
        worker = admin_pb2.WorkerSpeculation(worker_id=self._state().worker_id, speculation=speculation)
        return admin_pb2.SetSpeculationReply(workers=[worker])

    async def Restart(
        self, request: admin_pb2.RestartRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.RestartReply:
        """End this process, if it is the intended incarnation."""
        ending = request.epoch == self._state().epoch
        if ending:
            self._end()
        return admin_pb2.RestartReply(ending=ending)
