"""Workers that start and serve nothing yet, by their own reports; shown to operators, and used for nothing else.

Pure; the clock is injected. What callers can store is bounded: one entry of limited length per worker, MAX_WORKERS
entries, each for SILENT_S after its last report.
"""

from typing import Final

from baton.core.clock import Clock
from baton.core.errors import InvalidRequest, Overloaded
from baton.proto import worker_pb2
from baton.router.placement.members import DECODE, MAX_WORKERS, PREFILL, Incarnation, Members

SILENT_S: Final = 5.0  # a start reports each second, and late where it holds the GIL
MAX_TEXT_LEN: Final = 64


class StartingWorkers:
    """The latest report of each starting worker, until it joins or is silent."""

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        self._heard: dict[str, tuple[worker_pb2.StartingWorker, float]] = {}

    def report(self, worker: worker_pb2.StartingWorker) -> None:
        """Take in a report; one of an incarnation that has joined is ignored.

        Raises:
            InvalidRequest: a field is missing or too long, or its text could drive a terminal.
            Overloaded: too many workers start.
        """
        _check(worker)
        self._forget()
        if self._members.has_met(Incarnation(worker.worker_id, worker.epoch)):
            return
        if worker.worker_id not in self._heard and len(self._heard) >= MAX_WORKERS:
            raise Overloaded(f"{MAX_WORKERS} workers start, no more", limit=MAX_WORKERS)
        kept = worker_pb2.StartingWorker(  # a copy of what is checked: the message may have fields unknown here
            worker_id=worker.worker_id,
            role=worker.role,
            epoch=worker.epoch,
            phase=worker.phase,
            num_done=worker.num_done,
            num_total=worker.num_total,
        )
        self._heard[worker.worker_id] = kept, self._clock.now_s()

    def all(self) -> list[worker_pb2.StartingWorker]:
        """The workers that start now, by name."""
        self._forget()
        return [self._heard[worker_id][0] for worker_id in sorted(self._heard)]

    def _forget(self) -> None:
        now_s = self._clock.now_s()
        for worker_id, (worker, heard_s) in tuple(self._heard.items()):
            if now_s - heard_s >= SILENT_S or self._members.has_met(Incarnation(worker_id, worker.epoch)):
                del self._heard[worker_id]


def _check(worker: worker_pb2.StartingWorker) -> None:
    problems = {
        "worker_id": not _is_short_text(worker.worker_id),
        "role": worker.role not in (PREFILL, DECODE),
        "epoch": not worker.epoch,
        "phase": not _is_short_text(worker.phase),
        "num_done": worker.num_done > worker.num_total,
    }
    wrong = next((name for name, is_wrong in problems.items() if is_wrong), "")
    if wrong:
        worker_id = worker.worker_id[:MAX_TEXT_LEN]
        raise InvalidRequest(f"a report of a start without a usable {wrong}", field=wrong, worker_id=worker_id)


def _is_short_text(text: str) -> bool:
    return 0 < len(text) <= MAX_TEXT_LEN and text.isprintable()
