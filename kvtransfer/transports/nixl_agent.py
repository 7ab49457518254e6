"""One NIXL agent and the thread that owns it: NIXL's objects are not safe to share between threads.

Other threads give it work: `call` waits for a result, `post` begins transfers and returns at once. The thread polls
transfers in progress. NIXL cannot take back a transfer that was posted, so this module does not offer it.
"""

import contextlib
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused

T = TypeVar("T")
log = logging.getLogger(__name__)
START_LIMIT_S = 60.0  # includes loading UCX and its interfaces
CLOSE_LIMIT_S = 10.0
MISSING = "the package nixl is not importable; install baton-pd[nixl]"
_POLL_S = 50e-6
_DONE, _UNDER_WAY = "DONE", "PROC"


def missing_nixl() -> str:
    """Return why there can be no agent in this process; empty if there can."""
    return "" if importlib.util.find_spec("nixl") is not None else MISSING


class Transfers:
    """A group of transfers that are watched as one; see `sender.data_path.Written`.

    Attributes:
        digest: digest of what they move.
        is_lost: whether one was posted and failed, so that parts of it may still be on their way.
    """

    def __init__(self, digest: int | None) -> None:
        self.digest = digest
        self.is_lost = False
        self._over = threading.Event()
        self._problem = ""

    @property
    def done(self) -> bool:
        """Whether all of them have succeeded.

        Raises:
            DataPathFailed: they have failed, and nothing is on its way.
        """
        if not self._over.is_set():
            return False
        if self._problem:
            raise DataPathFailed(self._problem)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until they have ended, successfully or not."""
        return self._over.wait(timeout_s)

    def end(self, problem: str = "") -> None:
        """Mark them as ended: nothing is on its way any more."""
        self._problem = problem
        self._over.set()


class _UnderWay:
    """Handles of posted transfers, and the group to report to."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.handles: list[Any] = []
        self.problem = ""


Post = Callable[[Any, list[Any]], None]  # (agent, handles to append to)


class NixlAgent:
    """An agent over UCX.

    Args:
        name: name, unique among the agents that it meets.
        on_end: called by the agent's thread whenever transfers have ended.

    Raises:
        DataPathRefused: NIXL is missing, or does not start.
    """

    def __init__(self, name: str, on_end: Callable[[], None] | None = None) -> None:
        problem = missing_nixl()
        if problem:
            raise DataPathRefused(problem)
        self.name = name
        self._on_end = on_end
        self._jobs: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._posted: list[_UnderWay] = []
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            started.result(START_LIMIT_S)
        except TimeoutError as error:
            raise DataPathRefused("NIXL does not start") from error

    def call(self, job: Callable[[Any], T], limit_s: float) -> T:
        """Run `job(agent)` on the thread and wait for its result.

        Raises:
            DataPathRefused: it failed, or did not end in time.
        """
        answer: Future[T] = Future()

        def run(agent: Any) -> None:
            try:
                answer.set_result(job(agent))
            # NIXL's errors have no common base; the caller gets any error that a job raises.
            except Exception as error:  # noqa: BLE001
                answer.set_exception(DataPathRefused(f"NIXL: {type(error).__name__}: {error}"))

        self._jobs.put(run)
        try:
            return answer.result(limit_s)
        except TimeoutError as error:
            raise DataPathRefused(f"NIXL did not answer within {limit_s} s") from error

    def post(self, post: Post, digest: int | None = None) -> Transfers:
        """Begin transfers; `post` appends each handle before it starts it."""
        transfers = Transfers(digest)

        def run(agent: Any) -> None:
            under_way = _UnderWay(transfers)
            try:
                post(agent, under_way.handles)
            # As above. Transfers that were started before the error are watched until they end.
            except Exception as error:  # noqa: BLE001
                under_way.problem = f"NIXL: {type(error).__name__}: {error}"
                transfers.is_lost = bool(under_way.handles)
            self._posted.append(under_way)

        self._jobs.put(run)
        return transfers

    def close(self) -> None:
        """End the thread and its agent; transfers in progress are left to NIXL."""
        self._jobs.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self, started: "Future[None]") -> None:
        try:
            nixl_agent, nixl_agent_config = _load()
            agent = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
            if "UCX" not in agent.backends:
                raise DataPathRefused("NIXL has no UCX here")
        # The boundary of the thread: if the library does not load, the data path is not used.
        except Exception as error:  # noqa: BLE001
            refused = error if isinstance(error, DataPathRefused) else DataPathRefused(f"NIXL does not start: {error}")
            started.set_exception(refused)
            return
        started.set_result(None)
        for job in self._next_jobs():
            if job is not None:
                job(agent)
            elif self._posted:
                self._watch(agent)
        for under_way in self._posted:
            under_way.transfers.end("the agent was closed")

    def _next_jobs(self) -> Iterator[Callable[[Any], None] | None]:
        """Yield jobs in order, and None whenever there is time to check transfers; end when closed."""
        while True:
            if self._posted:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    time.sleep(_POLL_S)
                    yield None
                    continue
            else:
                job = self._jobs.get()
            if job is None:
                return
            yield job
            yield None

    def _watch(self, agent: Any) -> None:
        still: list[_UnderWay] = []
        for under_way in self._posted:
            if not self._is_over(agent, under_way):
                still.append(under_way)
            elif under_way.transfers.is_lost:
                log.warning("%s, and cannot be taken back", under_way.problem)
            else:
                under_way.transfers.end(under_way.problem)
        has_ended = len(still) < len(self._posted)
        self._posted = still
        if has_ended and self._on_end is not None:
            self._on_end()

    def _is_over(self, agent: Any, under_way: _UnderWay) -> bool:
        rest: list[Any] = []
        for handle in under_way.handles:
            state = _state_of(agent, handle)
            if state == _UNDER_WAY:
                rest.append(handle)
                continue
            if state != _DONE:
                under_way.problem = under_way.problem or f"NIXL: {state}"
                under_way.transfers.is_lost = True
            with contextlib.suppress(Exception):  # it has ended; a handle that cannot be released changes nothing
                agent.release_xfer_handle(handle)
        under_way.handles = rest
        return not rest


def _load() -> tuple[Any, Any]:
    """Import NIXL's agent and its configuration; keep the output of NIXL and UCX off standard output."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return nixl_agent, nixl_agent_config


def _state_of(agent: Any, handle: Any) -> str:
    try:
        return str(agent.check_xfer_state(handle))
    # NIXL's errors have no common base; an error about a transfer means that it failed.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
