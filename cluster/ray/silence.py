"""Ending workers that stand still: Ray sees a process, the router has not heard it for long.

Nothing but an incarnation that the router knows is ended, so none that is still loading, and nothing that Ray itself
does not hold for alive. A worker that is only cut off hears nothing of it until it is back.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from baton.cluster.admin import fetch_status
from baton.cluster.ray.session import RaySession
from baton.core.errors import BatonError

SILENT_S: Final = 20.0  # long after the router has fenced it, so that one which goes on by itself may
INTERVAL_S: Final = 2.0
AGAIN_S: Final = 30.0  # an incarnation that is to end is not told so more often
STATUS_TIMEOUT_S: Final = 1.0

_logger = logging.getLogger(__name__)


class SilenceWatch:
    """The workers of one deployment.

    Args:
        session: the driver's.
        address: of the router.
    """

    def __init__(self, session: RaySession, address: str) -> None:
        self._session = session
        self._address = address
        self._next_s = 0.0
        self._told_s: dict[int, float] = {}  # by epoch

    def check(self, actors: Mapping[str, Any]) -> None:
        """Look, at most every few seconds, and have Ray kill who stands still: it starts another incarnation then."""
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
