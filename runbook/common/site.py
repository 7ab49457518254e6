"""The deployment a runbook works on, by its public interfaces alone, within the time the operator gave."""

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
        address: of its router.
        clock: of the deadline.
        timeout_s: from now to the deadline.
        client_address: where clients come, if that is another port.
        client_access: what gets in there; what gets operators in, if nothing is given.

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
        """Time that is left."""
        return max(0.0, self._deadline_s - self._clock.now_s())

    def status(self) -> admin_pb2.StatusReply:
        """The router's view; see `fetch_status`."""
        return fetch_status(self.address)

    def inventory(self) -> dict[str, admin_pb2.WorkerStatus]:
        """What every live worker holds, asked afresh; by name. One that does not answer is shown as not alive."""
        return {worker.state.worker_id: worker for worker in fetch_inventory(self.address).workers}

    def worker(self, worker_id: str, role: str = "") -> admin_pb2.WorkerStatus:
        """What the router knows of a worker.

        Raises:
            InvalidRequest: it does not know the worker, or in another role.
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
        """Live workers of a role beside these that take requests."""
        return [
            worker.state.worker_id
            for worker in self.status().workers
            if worker.alive
            and not worker.draining
            and worker.state.role == role
            and worker.state.worker_id not in worker_ids
        ]

    def computing(self, worker_ids: set[str]) -> list[str]:
        """Live decode workers beside these that compute prompts when no prefill worker takes requests."""
        status = self.status()
        if status.local_prefill.mode in ("", "never"):  # --local-prefill; a router of before says nothing
            return []
        names = set(self.others(worker_ids, "decode"))
        return [
            worker.state.worker_id
            for worker in status.workers
            if worker.state.worker_id in names and worker.state.can_prefill
        ]

    def drain(self, worker_id: str, *, grace_s: float | None = None, undo: bool = False) -> str:
        """Take this incarnation of a worker out of routing, or back in; one that is silent is out of it anyway."""
        if not self.worker(worker_id).alive:
            return f"{worker_id} is silent, and gets nothing"
        reply = operate.drain(self.address, worker_id, grace_s=grace_s, undo=undo)
        return f"{worker_id} takes requests again" if undo else f"{worker_id} has {reply.num_streams} streams left"

    def wait(self, look: Callable[[], T | None], what: str, *, within_s: float | None = None) -> T:
        """Look until there is something.

        Args:
            look: None for not yet.
            what: is waited for.
            within_s: at most so long; all the time that is left by default.

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
        """Let time pass.

        Raises:
            OperationError: there is not so much left.
        """
        if seconds > self.left_s:
            raise timed_out(f"{self.left_s:.1f} s are left, and {seconds:g} are needed")
        time.sleep(seconds)
