"""Detects workers that are dead for good or hang, without ever waiting for one; for a private Ray or a cluster.

Ray restarts a worker that dies, a few times; only one that Ray has given up counts as dead, and even that may be
restarted. Ray does not notice a worker that hangs: its heartbeats stop, the router migrates its streams, and this
module kills it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from baton.cluster.admin import fetch_status
from baton.cluster.ray.actors import error_from_ray
from baton.cluster.ray.session import RaySession
from baton.core.errors import BatonError, WorkerLost

SILENT_S: Final = 20.0  # long after the router has fenced it, so that a worker which recovers by itself may do so
INTERVAL_S: Final = 2.0
AGAIN_S: Final = 30.0  # an incarnation is not killed more often than this
STATUS_TIMEOUT_S: Final = 1.0

_logger = logging.getLogger(__name__)


class SilenceWatch:
    """Watches for silent workers of one deployment.

    Args:
        session: Ray session of the driver.
        address: address of the router.
    """

    def __init__(self, session: RaySession, address: str) -> None:
        self._session = session
        self._address = address
        self._next_s = 0.0
        self._told_s: dict[int, float] = {}  # when each epoch was killed

    def check(self, actors: Mapping[str, Any]) -> None:
        """Check, at most every few seconds, and have Ray kill hanging workers; Ray then starts another incarnation."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        try:
            status = fetch_status(self._address, timeout_s=STATUS_TIMEOUT_S)
        except BatonError as error:
            _logger.debug("no look at who is silent: %s", error.message)
            return
        self._told_s = {epoch: told_s for epoch, told_s in self._told_s.items() if told_s + AGAIN_S > now_s}
        for worker in status.workers:
            state = worker.state
            if worker.alive or worker.heartbeat_age_s < SILENT_S or state.epoch in self._told_s:
                continue
            actor = actors.get(state.worker_id)
            if actor is None or not state.rank_pids or self._session.pid_of(actor) != state.rank_pids[0]:
                continue
            _logger.warning("%s is silent since %.0f s, and is killed", state.worker_id, worker.heartbeat_age_s)
            self._told_s[state.epoch] = now_s
            self._session.ray.kill(actor, no_restart=False)


class WorkerWatch:
    """Keeps one outstanding call to every live worker.

    Args:
        ray: connected ray module.
        actors: handle of each worker, by worker id.
        roles: role of each worker, by worker id.
        on_dead: called for each dead worker with the reason; returns whether it will be restarted, and so is not lost.
    """

    def __init__(
        self,
        ray: Any,
        actors: Mapping[str, Any],
        roles: Mapping[str, str],
        on_dead: Callable[[str, str], bool],
    ) -> None:
        self._on_dead = on_dead
        self._ray = ray
        self._actors = dict(actors)
        self._roles = roles
        self._dead: dict[str, str] = {}
        self._asked = {actor.pid.remote(): worker_id for worker_id, actor in self._actors.items()}

    def check(self) -> None:
        """Read the calls that returned, and call again. Each dead worker is logged once.

        Raises:
            WorkerLost: a role has no worker left.
        """
        answered: list[Any] = []
        if self._asked:
            answered, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for reference in answered:
            worker_id = self._asked.pop(reference)
            try:
                self._ray.get(reference)
            except self._ray.exceptions.ActorDiedError as error:
                self._bury(worker_id, str(error))
                continue
            except self._ray.exceptions.RayError:
                pass  # between two incarnations; the next call tells
            self._asked[self._actors[worker_id].pid.remote()] = worker_id
        self._require_every_role()

    def _bury(self, worker_id: str, said: str) -> None:
        why = str(error_from_ray(said))
        if self._on_dead(worker_id, why):
            return
        self._dead[worker_id] = why
        _logger.error("worker %s is dead and will not be restarted: %s", worker_id, self._dead[worker_id])

    def _require_every_role(self) -> None:
        for role in sorted({self._roles[worker_id] for worker_id in self._dead}):
            ids = [worker_id for worker_id in self._actors if self._roles[worker_id] == role]
            if all(worker_id in self._dead for worker_id in ids):
                message = (
                    f"no {role} worker is left: {', '.join(ids)} died more often than a worker is started again; "
                    f"find out why ({self._dead[ids[-1]]}), then start the deployment again"
                )
                raise WorkerLost(message, role=role, worker_ids=ids)
