"""`python -m baton.cluster.undertaker`: clears up after a deployment whose process was killed.

Whatever a deployment ends itself, this never touches. Stdin's first line is the directory. It waits for the end of
stdin, which only the deployment holds; if the deployment has not said by then that it is through, it was killed, and
its processes, its directory and its shared memory are ended and removed. Ray's agents would else live on for half a
minute.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from baton.cluster import leftovers

THROUGH: Final = b"."
LOCK_WAIT_S: Final = 5.0
MEMORY_WAIT_S: Final = 5.0


class Undertaker:
    """The deployment's end of it: the directory is this process's, and watched over, until `dismiss`.

    Args:
        directory: of the deployment; new.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = leftovers.claim(directory)
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is not None:
            self._end()
            self._process = self._spawn()

    def dismiss(self) -> None:
        """The deployment has ended in order."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(THROUGH)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        self._end()
        os.close(self._lock)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is not for it. It imports little, and none of what it ends.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.cluster.undertaker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(f"{self._directory}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and `check` starts another
        return process


def main() -> int:
    """Wait for the deployment's end, and clear up if it was none in order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said = b""
    while piece := os.read(0, 64):
        said += piece
    name, newline, word = said.partition(b"\n")
    if not newline or word == THROUGH:
        return 0
    directory, end_s = Path(os.fsdecode(name)), time.monotonic() + LOCK_WAIT_S
    while not leftovers.is_abandoned(directory) and time.monotonic() < end_s:
        time.sleep(0.02)  # the kernel closes a process's files one after the other
    if leftovers.is_abandoned(directory):
        leftovers.clear(directory)
    leftovers.sweep_late_memory(MEMORY_WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
