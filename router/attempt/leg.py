"""One worker's stream of one attempt, in a stream mux; and what its end means for the request."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from baton.core.errors import BatonError, RequestCancelled, WorkerLost, as_internal
from baton.core.requests.request import AttemptKey
from baton.proto import wire
from baton.router.attempt.continuation import Cause
from baton.router.attempt.in_flight_requests import Leaving
from baton.router.attempt.in_flight_tracker import Guest
from baton.router.attempt.stream_mux import StreamMux
from baton.router.placement.members import Member

NO_CONNECTION: Final = "failed to connect"  # gRPC has no code of its own for it


class Leg:
    """The leg of a request at one worker."""

    def __init__(self, role: str, member: Member) -> None:
        self.role = role
        self.incarnation = member.incarnation
        self.is_open = False
        self._give_up: Callable[[], object] | None = None
        self._leaving = Leaving.IN_ORDER
        self._leave: Callable[[Leaving], None] | None = None

    def __str__(self) -> str:
        return f"{self.role} worker {self.incarnation.worker_id}"

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.incarnation.worker_id

    def join(
        self,
        stream_mux: StreamMux,
        message: Any,
        on_said: Callable[[Any], None],
        on_ended: Callable[["Leg", BaseException | None], None],
    ) -> None:
        """Open a stream in a stream mux; `on_ended` gets this leg and what ended it, None if it ended well.

        A leg that was cancelled is not told.
        """
        self.is_open = True
        self._give_up = stream_mux.open(message, _Muxed(self, on_said, on_ended))

    def watch(self, guest: Guest, key: AttemptKey, on_lost: Callable[[BatonError], None]) -> None:
        """Have `on_lost` called with a WorkerLost when the worker's incarnation is lost, or when it should be left."""
        self._leave = guest.enter(self.incarnation, self.role, key, on_lost)

    def unwatch(self) -> None:
        """The request does not depend on this worker any more."""
        if self._leave is not None:
            self._leave(self._leaving)
            self._leave = None

    def doubt(self) -> None:
        """Its hand-off failed, which may have been the worker's death."""
        if self._leaving is Leaving.IN_ORDER:
            self._leaving = Leaving.DOUBTED

    def cancel(self) -> None:
        """Cancel the stream; the worker then gives up what it holds."""
        if self.is_open and self._give_up is not None:
            self.is_open = False
            try:
                self._give_up()
            except Exception as error:  # noqa: BLE001  what ends a request goes on to its end
                as_internal(f"leaving {self}", error)

    def explain(self, error: BaseException) -> BatonError:
        """The error of this leg, as the error of the request."""
        lost = {"worker_id": self.worker_id, "role": self.role}
        if isinstance(error, asyncio.CancelledError):
            return WorkerLost(f"{self}: the connection was closed", cause=Cause.DEATH.value, **lost)
        typed = wire.error_from_rpc(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(typed, RequestCancelled):  # nobody here cancelled: the worker gave up, or is shutting down
            return WorkerLost(f"{self} gave the request up: {typed.message}", cause=Cause.STREAM.value, **lost)
        if isinstance(typed, WorkerLost):
            self._leaving = Leaving.TURNED_AWAY if NO_CONNECTION in typed.message else Leaving.BROKEN
            fields = typed.fields | lost | {"cause": Cause.DEATH.value}
            return WorkerLost(f"{self}: {typed.message}", **fields)
        if type(typed) is BatonError:  # it broke in a way that it has no name for
            return BatonError(f"{self}: {typed.message}", **(typed.fields | lost | {"cause": Cause.STREAM.value}))
        if isinstance(typed, BatonError):
            return typed
        return as_internal(f"reading the stream of {self}", error)


class _Muxed:
    """A leg as a stream mux's reader."""

    __slots__ = ("_leg", "_on_ended", "_on_said")

    def __init__(
        self,
        leg: Leg,
        on_said: Callable[[Any], None],
        on_ended: Callable[[Leg, BaseException | None], None],
    ) -> None:
        self._leg = leg
        self._on_ended = on_ended
        self._on_said = on_said

    @property
    def on_said(self) -> Callable[[Any], None]:
        """See `Reader`."""
        return self._on_said

    def on_end(self, error: BaseException | None) -> None:
        self._leg.is_open = False
        self._on_ended(self._leg, error)
