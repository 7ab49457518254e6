"""Follows the desired size of a deployment: one worker at a time, added first, drained before it ends.

The router stores the desired size. The process that started the workers polls it, and only that process starts and ends
workers. A worker that does not start is given up, and not tried again until the desired size changes.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.cluster.admin import fetch_status
from baton.cluster.commands import operate
from baton.cluster.ray.actors import error_from_ray
from baton.core.errors import BatonError
from baton.proto import admin_pb2

STATUS_TIMEOUT_S = 1.0
START_TIMEOUT_S = 300.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Move:
    """One worker to start, or to end."""

    kind: Literal["start", "end"]
    worker_id: str
    role: str


def next_move(wanted: Mapping[str, int], roles: Mapping[str, str]) -> Move | None:
    """Return the next move from the existing workers towards the desired ones; None if there is nothing to do.

    Args:
        wanted: desired number of workers by role.
        roles: role of each existing worker, by worker id.
    """
    names = {role: sorted(_numbers(roles, role)) for role in wanted}
    for role, number in wanted.items():
        if len(names[role]) < number:
            free = next(index for index in range(number) if index not in names[role])
            return Move("start", f"{role}-{free}", role)
    for role, number in wanted.items():
        if len(names[role]) > number:
            return Move("end", f"{role}-{names[role][-1]}", role)
    return None


def _numbers(roles: Mapping[str, str], role: str) -> list[int]:
    return [int(name.removeprefix(f"{role}-")) for name, found in roles.items() if found == role]


class Scaling:
    """Scales the workers of one deployment.

    Args:
        ray: connected ray module.
        address: address of the router.
        actors: handle by worker id; `Scaling` adds started workers and removes ended ones.
        roles: role of each worker, by worker id.
        start: function that starts a worker of a name and a role, and puts it into `actors`.
        release: function that releases what was reserved for a worker.
    """

    def __init__(
        self,
        ray: Any,
        address: str,
        actors: dict[str, Any],
        roles: Mapping[str, str],
        start: Callable[[str, str], None],
        release: Callable[[str], None],
    ) -> None:
        self.roles = dict(roles)
        self._ray = ray
        self._address = address
        self._actors = actors
        self._start = start
        self._release = release
        self._starting: tuple[str, Any, float] | None = None  # worker id, its `ready` call, deadline
        self._ending = ""
        self._given_up: dict[str, int] | None = None

    def step(self) -> bool:
        """Make progress with one move, if there is one; return whether the set of actors changed."""
        try:
            status = fetch_status(self._address, timeout_s=STATUS_TIMEOUT_S)
            if self._starting is not None:
                return self._go_on_starting(status)
            if self._ending:
                return self._go_on_ending(status)
            return self._begin(status)
        except BatonError as error:  # the router is busy or restarting; the next step looks again
            _logger.debug("the size of the deployment is not looked at: %s", error.message)
            return False

    def _begin(self, status: admin_pb2.StatusReply) -> bool:
        if not status.HasField("scale") or _wanted(status) == self._given_up:
            return False
        move = next_move(_wanted(status), self.roles)
        if move is None:
            return False
        if move.kind == "end":
            self._ending = move.worker_id
            return False
        _logger.warning("%s is started", move.worker_id)
        try:
            self._start(move.worker_id, move.role)
        except BatonError as error:
            self._give_up(status, move.worker_id, error.message)
            return False
        answer = self._actors[move.worker_id].ready.remote()
        self._starting = move.worker_id, answer, time.monotonic() + START_TIMEOUT_S
        self.roles[move.worker_id] = move.role
        return True

    def _go_on_starting(self, status: admin_pb2.StatusReply) -> bool:
        assert self._starting is not None
        worker_id, answer, deadline_s = self._starting
        done, _ = self._ray.wait([answer], timeout=0)
        if not done and time.monotonic() < deadline_s:
            return False
        self._starting = None
        try:
            self._ray.get(answer, timeout=0)
        except self._ray.exceptions.RayError as error:  # GetTimeoutError is one
            self._give_up(status, worker_id, str(error_from_ray(str(error))))
            self._drop(worker_id)
            return True
        return False

    def _go_on_ending(self, status: admin_pb2.StatusReply) -> bool:
        worker_id = self._ending
        worker = next((worker for worker in status.workers if worker.state.worker_id == worker_id), None)
        if worker is not None and worker.alive:
            if not worker.draining:  # not yet, or a new incarnation, which was not drained
                operate.drain(self._address, worker_id)
                return False
            if worker.num_streams:
                return False
        _logger.warning("%s is ended", worker_id)
        self._ending = ""
        self._drop(worker_id)
        return True

    def _give_up(self, status: admin_pb2.StatusReply, worker_id: str, why: str) -> None:
        _logger.error("%s could not be started: %s", worker_id, why)
        self._given_up = _wanted(status)

    def _drop(self, worker_id: str) -> None:
        self._ray.kill(self._actors.pop(worker_id), no_restart=True)
        del self.roles[worker_id]
        self._release(worker_id)


def _wanted(status: admin_pb2.StatusReply) -> dict[str, int]:
    return {"prefill": status.scale.num_prefill, "decode": status.scale.num_decode}
