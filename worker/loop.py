"""The thread that runs a worker's main loop, and the only way for other threads to reach it.

A worker's state belongs to its loop thread. Other threads put commands into a bounded inbox and wake it. An exception
that escapes a step is a bug or a broken device: the loop stops for good and reports it through `on_fatal`, because a
worker that lost track of its state must not keep serving.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from baton.core.errors import Overloaded


class RequestLimit:
    """A bounded count of requests. Thread-safe."""

    def __init__(self, what: str, limit: int) -> None:
        assert limit > 0
        self._what = what
        self._limit = limit
        self._num_inside = 0
        self._lock = threading.Lock()

    @property
    def num_inside(self) -> int:
        """Number of requests that were admitted and have not left."""
        return self._num_inside

    def enter(self) -> None:
        """Admit one request.

        Raises:
            Overloaded: the limit is reached.
        """
        with self._lock:
            if self._num_inside >= self._limit:
                raise Overloaded(f"{self._what}: {self._limit} requests are here already", limit=self._limit)
            self._num_inside += 1

    def leave(self) -> None:
        """Note that an admitted request has left."""
        with self._lock:
            assert self._num_inside > 0
            self._num_inside -= 1


Command = Callable[[], None]

log = logging.getLogger(__name__)


class LoopThread:
    """Calls `step` until closed; between turns it sleeps for as long as `step` returns, or until woken."""

    def __init__(
        self,
        name: str,
        step: Callable[[], float],
        on_fatal: Callable[[BaseException], None],
        *,
        max_commands: int = 65_536,
    ) -> None:
        """Prepare a loop; `start` runs it.

        Args:
            name: name of the thread.
            step: runs one turn, on the loop thread only; returns the maximum number of seconds to sleep before the next
                one, so that deadlines are noticed without a wake-up; 0 does not sleep.
            on_fatal: called on the loop thread with the exception that ended the loop.
            max_commands: capacity of the inbox.
        """
        self._step = step
        self._on_fatal = on_fatal
        self._max_commands = max_commands
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def post(self, command: Command, *, always: bool = False) -> None:
        """Run `command` on the loop thread before its next step. Any thread may call this.

        Args:
            command: what to run.
            always: whether to post even to a full inbox; for commands that end an admitted request, whose number bounds
                them.

        Raises:
            Overloaded: the inbox is full.
        """
        if len(self._commands) >= self._max_commands and not always:
            raise Overloaded("the worker's inbox is full", limit=self._max_commands)
        self._commands.append(command)
        self._wake.set()

    def wake(self) -> None:
        """Make the next step run soon. Any thread may call this."""
        self._wake.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the step in progress and join the thread."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            assert not self._thread.is_alive(), f"{self._thread.name} did not stop in {timeout_s} s"

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                while self._commands:
                    self._commands.popleft()()
                rest_s = self._step()
                if rest_s > 0:
                    self._wake.wait(rest_s)
        # The boundary of the thread: nothing above it could catch this, and the worker must not go on half-dead.
        except BaseException as error:
            log.exception("the worker loop failed")
            self._on_fatal(error)
