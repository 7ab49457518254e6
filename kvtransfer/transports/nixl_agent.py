"""One NIXL agent and the one thread that owns it: NIXL's objects are not safe to share between threads.

Others hand it work: `call` waits for an answer, `post` begins transfers and returns at once. The thread polls what is
under way. NIXL cannot take a transfer back once it was posted, so nothing here claims to.
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
START_LIMIT_S = 60.0  # loading UCX and its interfaces
CLOSE_LIMIT_S = 10.0
MISSING = "the package nixl is not importable; install baton-pd[nixl]"
_POLL_S = 50e-6
_DONE, _UNDER_WAY = "DONE", "PROC"


def missing_nixl() -> str:
    """Why there can be no agent in this process; empty if there may."""
    return "" if importlib.util.find_spec("nixl") is not None else MISSING


class Transfers:
    """Some transfers that are watched as one; see `push_data_path.Written`.

    Attributes:
        digest: of what they move.
        is_lost: one was posted and failed, so it is not known what of it is still on its way.
    """

    def __init__(self, digest: int | None) -> None:
        self.digest = digest
        self.is_lost = False
        self._over = threading.Event()
        self._problem = ""

    @property
    def done(self) -> bool:
        """Whether all of them have ended well.

        Raises:
            DataPathFailed: they have not, and nothing is on its way.
        """
        if not self._over.is_set():
            return False
        if self._problem:
            raise DataPathFailed(self._problem)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until they have ended, well or not."""
        return self._over.wait(timeout_s)

    def end(self, problem: str = "") -> None:
        """Nothing is on its way any more."""
        self._problem = problem
        self._over.set()


class _UnderWay:
    """Handles of posted transfers, and whom to tell."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.handles: list[Any] = []
        self.problem = ""


Post = Callable[[Any, list[Any]], None]  # (agent, handles to append to)


class NixlAgent:
    """An agent over UCX.

    Args:
        name: unique among the agents it meets.
        on_end: called by the agent's thread whenever transfers ended.

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
        """Run `job(agent)` on the thread and wait for what it returns.

        Raises:
            DataPathRefused: it failed, or did not end in time.
        """
        answer: Future[T] = Future()

        def run(agent: Any) -> None:
            try:
                answer.set_result(job(agent))
            # NIXL's errors have no common base; whatever a job raises is the answer to its caller.
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
            # As above. What may have been started before the error is watched to its end.
            except Exception as error:  # noqa: BLE001
                under_way.problem = f"NIXL: {type(error).__name__}: {error}"
                transfers.is_lost = bool(under_way.handles)
            self._posted.append(under_way)

        self._jobs.put(run)
        return transfers

    def close(self) -> None:
        """End the thread and the agent with it; transfers that are under way are left to NIXL."""
        self._jobs.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _run(self, started: "Future[None]") -> None:
        try:
            nixl_agent, nixl_agent_config = _load()
            agent = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
            if "UCX" not in agent.backends:
                raise DataPathRefused("NIXL has no UCX here")
        # The boundary of the thread: a library that does not load is a reason not to use the data path.
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
        """Jobs in order, and None whenever there is time to look after transfers; ends when closed."""
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
            with contextlib.suppress(Exception):  # it has ended; a handle that cannot be given back changes nothing
                agent.release_xfer_handle(handle)
        under_way.handles = rest
        return not rest


def _load() -> tuple[Any, Any]:
    """NIXL's agent and its configuration; standard output stays free of what it and UCX have to say."""
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
    # NIXL's errors have no common base; one about a transfer means that it failed.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
