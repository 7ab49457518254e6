"""The deployment that a runbook works on, through public interfaces only, within the operator's time limit."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from baton.client.access import Access
from baton.cluster.access import current_access
from baton.cluster.admin import fetch_inventory, fetch_status
from baton.cluster.commands import operate
from baton.core.clock import Clock
from baton.core.errors import InvalidRequest
from baton.proto import admin_pb2
from baton.runbook.common.steps import timed_out

POLL_S = 0.1

T = TypeVar("T")


class Site:
    """One deployment, and what was found out about it.

    Args:
        address: address of its router.
        clock: clock of the deadline.
        timeout_s: time from now to the deadline.
        client_address: address for clients, if that is another port.
        client_access: access for clients; the operator's by default.

    Attributes:
        found: facts for the report.
    """

    def __init__(
        self,
        address: str,
        clock: Clock,
        timeout_s: float,
        client_address: str = "",
        client_access: Access | None = None,
    ) -> None:
        self.address = address
        self.client_address = client_address or address
        self.client_access = client_access or current_access()
        self.found: dict[str, Any] = {}
        self._clock = clock
        self._deadline_s = clock.now_s() + timeout_s

    @property
    def left_s(self) -> float:
        """Time left until the deadline."""
        return max(0.0, self._deadline_s - self._clock.now_s())

    def status(self) -> admin_pb2.StatusReply:
        """Fetch the router's view; see `fetch_status`."""
        return fetch_status(self.address)

    def inventory(self) -> dict[str, admin_pb2.WorkerStatus]:
        """Fetch what every live worker holds, by name. A worker that does not answer is shown as not alive."""
        return {worker.state.worker_id: worker for worker in fetch_inventory(self.address).workers}

    def worker(self, worker_id: str, role: str = "") -> admin_pb2.WorkerStatus:
        """Fetch what the router knows about a worker.

        Raises:
            InvalidRequest: the router does not know the worker, or knows it in another role.
        """
        workers = self.status().workers
        found = next((worker for worker in workers if worker.state.worker_id == worker_id), None)
        if found is None:
            known = ", ".join(worker.state.worker_id for worker in workers) or "none"
            raise InvalidRequest(f"no worker {worker_id!r}; known are {known}", field="worker", worker_id=worker_id)
        if role and found.state.role != role:
            message = f"{worker_id} is a {found.state.role} worker, not a {role} worker"
            raise InvalidRequest(message, field="worker", worker_id=worker_id)
        return found

    def others(self, worker_ids: set[str], role: str) -> list[str]:
        """Live workers of a role, besides these, that accept requests."""
        return [
            worker.state.worker_id
            for worker in self.status().workers
            if worker.alive
            and not worker.draining
            and worker.state.role == role
            and worker.state.worker_id not in worker_ids
        ]

    def computing(self, worker_ids: set[str]) -> list[str]:
        """Live decode workers, besides these, that compute prompts when no prefill worker accepts requests."""
        status = self.status()
        if status.local_prefill.mode in ("", "never"):  # --local-prefill; an older router sends an empty mode
            return []
        names = set(self.others(worker_ids, "decode"))
        return [
            worker.state.worker_id
            for worker in status.workers
            if worker.state.worker_id in names and worker.state.can_prefill
        ]

    def drain(self, worker_id: str, *, grace_s: float | None = None, undo: bool = False) -> str:
        """Take this incarnation of a worker out of routing, or back in; a silent worker is out of routing anyway."""
        if not self.worker(worker_id).alive:
            return f"{worker_id} is silent, and gets nothing"
        reply = operate.drain(self.address, worker_id, grace_s=grace_s, undo=undo)
        return f"{worker_id} takes requests again" if undo else f"{worker_id} has {reply.num_streams} streams left"

    def wait(self, look: Callable[[], T | None], what: str, *, within_s: float | None = None) -> T:
        """Poll until `look` returns something.

        Args:
            look: returns None for not yet.
            what: description of what is waited for.
            within_s: time limit; by default all the time that is left.

        Raises:
            OperationError: timed out.
        """
        end_s = self._clock.now_s() + min(self.left_s, self.left_s if within_s is None else within_s)
        while True:
            found = look()
            if found is not None:
                return found
            if self._clock.now_s() >= end_s:
                raise timed_out(f"{what}: not in time")
            time.sleep(POLL_S)

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            OperationError: less time than that is left.
        """
        if seconds > self.left_s:
            raise timed_out(f"{self.left_s:.1f} s are left, and {seconds:g} are needed")
        time.sleep(seconds)
