"""The thread on which a rank other than 0 follows its group, and its end: the group stops or this process does."""

import logging
import threading
from collections.abc import Callable

from baton.core.errors import BatonError, WorkerLost
from baton.engine.tp.plan import PlanChannel

log = logging.getLogger(__name__)


class RankThread:
    """Runs `run` until rank 0 says stop.

    Args:
        run: what a rank does; an error that leaves it says why the rank cannot go on.
        channel: its own.
        on_fatal: ends this process.
    """

    def __init__(
        self, run: Callable[[], None], channel: PlanChannel, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self._run_rank = run
        self._channel = channel
        self._on_fatal = on_fatal
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._channel.link.on_fail = self._lost
        if self._channel.link.failure is not None:  # it came before anybody listened
            self._lost(self._channel.link.failure)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._run_rank()
        # The boundary of the thread: whatever it is, this rank cannot go on, and rank 0 is told why.
        except BaseException as error:
            log.exception("this rank cannot go on")
            known = error if isinstance(error, BatonError) else WorkerLost(f"{type(error).__name__}: {error}")
            self._channel.close(known)
            self._on_fatal(error)

    def _lost(self, failure: WorkerLost) -> None:
        """Rank 0 died or hangs. If it hangs, nobody else can end it."""
        if failure.fields.get("how") == "hangs":
            self._channel.link.kill_peers()
        self._on_fatal(failure)
