"""One worker's stream of one attempt, as a task; and what its end means for the request."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import BatonError, RequestCancelled, WorkerLost
from baton.proto import wire
from baton.router.members import Member, Members

log = logging.getLogger(__name__)


class Leg:
    """The leg of a request at one worker."""

    def __init__(self, role: str, member: Member) -> None:
        self.role = role
        self.life = member.life
        self.task: asyncio.Task[None] | None = None
        self._unwatch: Callable[[], None] | None = None

    def __str__(self) -> str:
        return f"{self.role} worker {self.life.worker_id}"

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.life.worker_id

    def start(
        self, reading: Coroutine[Any, Any, None], on_ended: Callable[["Leg", BaseException | None], None]
    ) -> None:
        """Read the stream; `on_ended` gets this leg and what ended it, None if it ended well."""

        def ended(task: asyncio.Task[None]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            on_ended(self, error)

        self.task = asyncio.create_task(reading)
        self.task.add_done_callback(ended)

    def watch(self, members: Members, on_lost: Callable[[BatonError], None]) -> None:
        """Have `on_lost` called with a WorkerLost when the worker's life is lost."""
        error = WorkerLost(f"{self} was lost", worker_id=self.worker_id, role=self.role)
        self._unwatch = members.watch(self.life, lambda: on_lost(error))

    def unwatch(self) -> None:
        """The request does not depend on this worker any more."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def cancel(self) -> None:
        """Cancel the RPC; the worker then gives up what it holds."""
        if self.task is not None:
            self.task.cancel()

    def explain(self, error: BaseException) -> BatonError:
        """The error of this leg, as the error of the request."""
        lost = {"worker_id": self.worker_id, "role": self.role}
        if isinstance(error, asyncio.CancelledError):
            return WorkerLost(f"{self}: the connection was closed", **lost)
        typed = wire.error_from_rpc(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(typed, RequestCancelled):  # nobody here cancelled: the worker gave up, or is shutting down
            return WorkerLost(f"{self} gave the request up: {typed.message}", **lost)
        if isinstance(typed, WorkerLost):
            return WorkerLost(f"{self}: {typed.message}", **(typed.fields | lost))
        if isinstance(typed, BatonError):
            return typed
        log.error("%s: reading its stream failed", self, exc_info=error)
        return BatonError(f"{self}: reading its stream failed: {error!r}")
