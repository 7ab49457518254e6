"""Keeps a KV receiver alive beside a decode worker: starts it, watches it, ends it if it hangs, and starts the next.

Each incarnation has its own epoch. Between two incarnations the worker's side must read and report what the dead one
left (`revive`); nothing of the old incarnation is reused before. If incarnations end too quickly, the supervisor gives
up, and the worker ends.
"""

import contextlib
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from baton.core.errors import BatonError, TransferFailed, WorkerStartFailed, from_wire
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.setup import Legacy, ReceiverSetup
from baton.kvtransfer.shared_region import SharedRegion

# One incarnation of the KV receiver, as the decode worker sees it: start it, learn where it listens, end it and reap
# it.
#
# A reaped child writes nothing any more: that is the evidence on which the blocks of its transfers are freed.
# `supervisor`, not this class, decides when an incarnation has to end.


MODULE = "baton.kvtransfer.receiver.process"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 2.0
_MAX_GREETING_BYTES = 1 << 16
_MAX_SHOWN_BYTES = 500
# libzmq and gRPC allocate every message; glibc would return large ones to the kernel and get them again, cleared. One
# arena that keeps its memory gives 1.2 to 1.5 times the rate. NumPy's BLAS would start a thread per core, and is never
# called.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ReceiverChild:
    """A KV receiver process, started when the constructor returns.

    The thread that constructs it must live at least as long: the kernel ends the child with that thread.

    Args:
        setup: one line of text for its standard input, which then stays open; its end tells the child that the parent
            ended.
        inherited: file descriptors that it shares.
    """

    def __init__(self, setup: str, inherited: Sequence[int]) -> None:
        assert "\n" not in setup
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=inherited,
            process_group=0,  # as an orphan it is continued if stopped, and learns of the death it slept through
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        data = memoryview(setup.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # it is already dead; `greeting` reports it
            while data:
                data = data[self._process.stdin.write(data) :]

    def greeting(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, str]:
        """Return what the child reports when it serves.

        Raises:
            StartupError: the child cannot serve; its own error, or a generic one if it ended without any.
        """
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        end_s = time.monotonic() + timeout_s
        data = b""
        while not data.endswith(b"\n") and len(data) < _MAX_GREETING_BYTES:
            ready, _, _ = select.select([file], [], [], max(0.0, end_s - time.monotonic()))
            if not ready:
                raise WorkerStartFailed(f"the KV receiver process says nothing for {timeout_s} s", pid=self.pid)
            piece = os.read(file, _MAX_GREETING_BYTES)
            if not piece:
                raise WorkerStartFailed("the KV receiver process ended before it served", pid=self.pid)
            data += piece
        try:
            greeting: dict[str, str] = json.loads(data)
        except json.JSONDecodeError as error:  # something else writes there: a preloaded library, the loader
            said = repr(data[:_MAX_SHOWN_BYTES])
            raise WorkerStartFailed(f"the KV receiver process says {said} instead of where it serves") from error
        if "error" in greeting:
            raise from_wire(greeting["error"])
        return greeting

    def end(self, *, at_once: bool) -> int:
        """End the child and reap it; return its exit status, negative for a signal.

        Args:
            at_once: whether it gets no time to end by itself.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not at_once:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                at_once = True
        if at_once:
            self._process.kill()
        status = self._process.wait()  # however long it takes: nothing may be freed before
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        os.close(self.pidfd)
        return status


log = logging.getLogger(__name__)

CHECK_S: Final = 0.1
MIN_HANG_S: Final = 1.0  # a process that gets no CPU is not considered hung before this long
DEATHS_WITHIN_S: Final = 60.0
MAX_PAUSE_S: Final = 2.0
JOIN_S: Final = 10.0


class ReceiverSupervisor:
    """A KV receiver in its own process. See `thread.ReceiverHost`.

    Args:
        region: shared memory; not owned.
        link: link in that memory.
        setup: setup of the first incarnation.
    """

    def __init__(self, region: SharedRegion, link: ReceiverLink, setup: ReceiverSetup) -> None:
        self.wakeup: Callable[[], None] = lambda: None
        self.address = ""
        self.epoch = setup.epoch
        self.num_incarnations = 0
        self.pid = 0
        self._region = region
        self._link = link
        self._setup = setup
        self._hang_s = max(setup.config.lease_s, MIN_HANG_S)
        self._deaths: deque[float] = deque(maxlen=setup.config.max_receiver_deaths)
        self._notify = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # the child has events for the worker
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # the worker has commands for the child
        self._call = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # for calls to the supervisor's thread
        self._death: str | None = None
        self._revived: Sequence[Legacy] | None = None
        self._condemned = ""
        self._is_closing = False
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-supervisor", daemon=True)

    def start(self) -> None:
        """Start the first incarnation, unless that was done; return when it serves.

        Raises:
            StartupError: it cannot serve.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def wake(self) -> None:
        """Signal that there are commands."""
        if self._nudge >= 0:
            os.eventfd_write(self._nudge, 1)

    def check(self) -> None:
        """Raise if no transfer can arrive any more.

        Raises:
            TransferFailed: too many incarnations ended too quickly, or the supervisor itself did.
        """
        if self._error is not None:
            raise TransferFailed(f"the KV receiver process is gone for good: {self._error}") from self._error

    def death(self) -> str | None:
        """Return why the last incarnation ended, until `revive`; it is reaped, and writes nothing any more."""
        return self._death

    def revive(self, legacies: Sequence[Legacy]) -> None:
        """Start the next incarnation, once everything that the dead one left was read and the link was reset.

        Args:
            legacies: what the dead incarnation had granted and is still needed.
        """
        assert self._death is not None
        self._death = None
        self._revived = legacies
        os.eventfd_write(self._call, 1)

    def condemn(self, reason: str) -> None:
        """End this incarnation, because it reported something impossible."""
        self._condemned = reason
        os.eventfd_write(self._call, 1)

    def close(self) -> None:
        """End the process and the supervision."""
        self._is_closing = True
        if self._nudge < 0:
            return
        os.eventfd_write(self._call, 1)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
            assert not self._thread.is_alive(), "the supervisor of the KV receiver process did not stop"
        files = (self._notify, self._nudge, self._call)
        self._nudge = -1
        for file in files:
            os.close(file)

    # On the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._one_incarnation()
        # The boundary of the thread: `start` or `check` raises it, and the worker must not go on without a KV receiver.
        except BaseException as error:
            if self._ready.is_set():
                log.exception("the KV receiver process is given up")
            self._error = error
            self.wakeup()
        finally:
            self._region.epoch = 0
            self._ready.set()

    def _one_incarnation(self) -> None:
        """Run one incarnation, from its start to a death that the worker knows of, or to `close`."""
        inherited = {"notify": self._notify, "nudge": self._nudge}
        self._condemned = ""
        # Before this incarnation can tell or offer anything to a peer.
        self._region.epoch = self.epoch = self._setup.epoch
        child = ReceiverChild(self._setup.to_json(parent=os.getpid(), **inherited), tuple(inherited.values()))
        reason = ""
        try:
            greeting = child.greeting()
            self.address, self.pid = greeting["address"], child.pid
            self.num_incarnations += 1
            self._ready.set()
            self.wakeup()
            reason = self._watch(child)
        except BatonError as error:
            if self.num_incarnations == 0:
                raise
            reason = error.message
        finally:
            self._region.epoch = 0
            status = child.end(at_once=not self._is_closing)
        if not self._is_closing:
            self._bury(f"{reason or 'it ended'} (status {status})")

    def _watch(self, child: ReceiverChild) -> str:
        """Serve the child until it has to end; return why, empty if it ended by itself."""
        poll = select.poll()
        for file in (self._notify, self._call, child.pidfd):
            poll.register(file, select.POLLIN)
        num_beats, silent_s = -1, 0.0
        while not self._is_closing:
            before_s = time.monotonic()
            ready = {file for file, _ in poll.poll(CHECK_S * 1e3)}
            if self._notify in ready:
                os.eventfd_read(self._notify)
                self.wakeup()
            if self._call in ready:
                os.eventfd_read(self._call)
                if self._condemned:
                    return self._condemned
            if child.pidfd in ready:
                return ""
            if self._link.num_beats != num_beats:
                num_beats, silent_s = self._link.num_beats, 0.0
            else:  # a pause of this process says nothing about the child either
                silent_s += min(time.monotonic() - before_s, 2 * CHECK_S)
            if silent_s > self._hang_s:
                return f"it did nothing for {self._hang_s} s"
        return "the worker closes"

    def _bury(self, reason: str) -> None:
        """Let the worker read what the dead incarnation left, and prepare the next incarnation."""
        log.warning("a KV receiver process ended: %s", reason)
        now_s = time.monotonic()
        self._deaths.append(now_s)
        if len(self._deaths) == self._deaths.maxlen and now_s - self._deaths[0] < DEATHS_WITHIN_S:
            raise TransferFailed(
                f"{len(self._deaths)} of its incarnations ended within {now_s - self._deaths[0]:.1f} s"
            )
        self._death = reason
        self.wakeup()
        legacies = self._wait_for_revival()
        num_recent = sum(now_s - death_s < DEATHS_WITHIN_S for death_s in self._deaths)
        self._pause(min(0.05 * (2 ** (num_recent - 1) - 1), MAX_PAUSE_S))
        self._setup = self._setup.next_incarnation(secrets.randbits(64) or 1, self.address, legacies)

    def _wait_for_revival(self) -> Sequence[Legacy]:
        while not self._is_closing and self._revived is None:
            self._pause(CHECK_S)
        legacies, self._revived = self._revived or (), None
        return legacies

    def _pause(self, pause_s: float) -> None:
        """Wait for `pause_s`, or until called."""
        if pause_s > 0 and select.select([self._call], [], [], pause_s)[0]:
            os.eventfd_read(self._call)
