"""One rank of a worker: its place in the TP group, and the thread that serves it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.errors import BatonError, WorkerLost
from baton.engine.tp.plan import PlanChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What another rank needs to join the TP group.

    Attributes:
        rank: its rank.
        size: size of the TP group.
        epoch: incarnation of the worker, the same for all ranks.
        store_port: port of rank 0's store, on this host.
        link_address: address of rank 0's link.
        link_token: token for that link.
    """

    rank: int
    size: int
    epoch: int
    store_port: int
    link_address: str
    link_token: str = field(repr=False)


class RankStarter(Protocol):
    """Starts the processes of the other ranks, on rank 0's host."""

    def start(self, rank_place: RankPlace) -> None:
        """Start the process of a rank; returns at once."""
        ...

    def check(self) -> None:
        """Raise if a rank could not be started.

        Raises:
            BatonError: a rank could not be started.
        """
        ...


log = logging.getLogger(__name__)


class RankThread:
    """Runs `run` until rank 0 says stop.

    Args:
        run: what a rank does; an error that it raises says why the rank cannot go on.
        channel: the rank's channel.
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
        """Begin to follow rank 0."""
        self._channel.link.on_fail = self._lost
        if self._channel.link.failure is not None:  # it failed before the callback was set
            self._lost(self._channel.link.failure)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._run_rank()
        # The boundary of the thread: after any error this rank cannot go on, and rank 0 is told why.
        except BaseException as error:
            log.exception("this rank cannot go on")
            known = error if isinstance(error, BatonError) else WorkerLost(f"{type(error).__name__}: {error}")
            self._channel.close(known)
            self._on_fatal(error)

    def _lost(self, failure: WorkerLost) -> None:
        """Handle that rank 0 died or hangs. If it hangs, only the other ranks can end it."""
        if failure.fields.get("how") == "hangs":
            self._channel.link.kill_peers()
        self._on_fatal(failure)
