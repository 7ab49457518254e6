"""One incarnation of the KV receiver, seen from the decode worker: start it, hear where it listens, end and reap it.

A child that was reaped writes nothing any more: that is the evidence its transfers' blocks are freed by. Refuses to
decide when an incarnation has to end; `supervisor` does.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from baton.core.errors import WorkerStartFailed, from_wire

MODULE = "baton.kvtransfer.receiver.process"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 2.0
_MAX_GREETING_BYTES = 1 << 16
_MAX_SHOWN_BYTES = 500
# libzmq and gRPC allocate every message; glibc would give large ones back to the kernel and take them again, cleared.
# One arena, kept: 1.2 to 1.5 times the rate. NumPy's BLAS would start a thread for each core, and is never called.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ReceiverChild:
    """Started when the constructor returns.

    The thread that constructs it must live at least as long: the kernel ends the child with that thread.

    Args:
        setup: one line of text for its standard input, which then stays open: its end tells the child of ours.
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
            process_group=0,  # left alone, it is continued if it was stopped, and hears of the death it slept through
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        data = memoryview(setup.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # it is dead already; `greeting` says so
            while data:
                data = data[self._process.stdin.write(data) :]

    def greeting(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, str]:
        """What it says when it serves.

        Raises:
            StartupError: why it cannot serve, in its own words or, if it ended without any, in ours.
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
        """End it and reap it; returns its exit status, negative for a signal.

        Args:
            at_once: it gets no time to end by itself.
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
