"""The Ray actor of a prefill worker: only construction, identity and shutdown. Requests never pass through it."""

import logging
import os

from baton.core import garbage
from baton.core.config import WorkerConfig
from baton.prefill_worker.node import PrefillNode, PrefillRank
from baton.worker.rank import RankPlace, RankStarter, RankThread

EXIT_LOOP_FAILED = 70


def _end_process(error: BaseException) -> None:
    # The loop lost track of its state. Only a new process, under a new epoch, may serve again; Ray starts it.
    logging.getLogger(__name__).critical("ending this process: %r", error)
    os._exit(EXIT_LOOP_FAILED)


class PrefillActorShell:
    """The class that `cluster` wraps with `ray.remote`. A restarted actor serves without any call from a driver."""

    def __init__(self, config: WorkerConfig, starter: RankStarter | None = None) -> None:
        self._node = PrefillNode(config, _end_process, starter)
        garbage.begin_to_serve()

    def ready(self) -> dict[str, object]:
        """Return the identity of this incarnation: worker_id, address, kv_address, epoch, pid."""
        return self._node.about()

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def shutdown(self) -> None:
        """Stop serving; the process stays until Ray ends it."""
        self._node.close()


class PrefillRankShell:
    """The actor of another rank of the worker. It ends with its TP group; Ray does not restart it."""

    def __init__(self, config: WorkerConfig, rank_place: RankPlace) -> None:
        rank = PrefillRank(config, rank_place)
        garbage.begin_to_serve()
        self._thread = RankThread(rank.run, rank.channel, _end_process)
        self._thread.start()

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()
