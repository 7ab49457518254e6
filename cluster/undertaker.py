"""`python -m baton.cluster.undertaker`: cleans up after a deployment whose process was killed.

It never touches anything that the deployment ends itself. The first line of stdin is the directory. The process waits
for the end of stdin, which only the deployment holds open. If the deployment has not announced an orderly end by then,
it was killed; the undertaker then ends its processes and removes its directory and its shared memory. Without this,
Ray's agents would live on for half a minute.
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
    """The deployment's side: claims the directory for this process and has it watched until `dismiss`.

    Args:
        directory: new directory of the deployment.
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
        """Restart the process if it has ended."""
        if self._process.poll() is not None:
            self._end()
            self._process = self._spawn()

    def dismiss(self) -> None:
        """Announce that the deployment has ended in order."""
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
        # A session of its own, so that Ctrl-C does not reach it. It imports little, and nothing that it ends.
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
            pass  # the process has ended; `check` starts another
        return process


def main() -> int:
    """Wait for the deployment's end, and clean up if that was not orderly."""
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
        time.sleep(0.02)  # the operating system closes a process's files one after the other
    if leftovers.is_abandoned(directory):
        leftovers.clear(directory)
    leftovers.sweep_late_memory(MEMORY_WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
