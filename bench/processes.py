"""CPU time and system calls of process trees, measured from outside.

CPU clocks of other processes are read in nanoseconds (clock_gettime of their clock). Counting system calls attaches
`strace`, which slows the watched process several times, so it is never done while a rate is measured.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from baton.core.errors import WorkerStartFailed
from baton.core.inside import ENVIRONMENT, DeploymentSecret

START_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0


class PlainProcess:
    """A `python -m MODULE` process, which ends when its stdin closes.

    Args:
        module: module to run.
        *arguments: arguments of its command line.
        err: destination of its stderr.
    """

    def __init__(self, module: str, *arguments: object, err: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment[ENVIRONMENT] = DeploymentSecret.of_process().text
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        self._module, self._err = module, err
        with err.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def first_line(self) -> dict[str, Any]:
        """Wait for the first line that it prints once it serves.

        Raises:
            WorkerStartFailed: it ended, or printed nothing in time.
        """
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            if select.select([self._process.stdout], [], [], 0.1)[0]:
                line = self._process.stdout.readline()
                if not line:
                    break
                said: dict[str, Any] = json.loads(line)
                return said
        last = self._err.read_text(errors="replace")[-500:]
        raise WorkerStartFailed(f"{self._module} did not start: {last}", worker_id=self._module)

    def end(self) -> None:
        """Close its stdin, and kill it if it does not end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


_CPU_CLOCK_OF_PROCESS = 2  # of `man clock_getcpuclockid`: utime + stime of all threads
_ATTACH_S = 1.0
_STOP_S = 20.0


def tree(pid: int) -> list[int]:
    """Process ids of `pid` and all its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def cpu_s(pid: int) -> float:
    """CPU seconds that a live process has used."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its live descendants, including threads that have ended."""
    total = 0.0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += cpu_s(member)
    return total


def can_count_system_calls() -> bool:
    """Return whether `strace` is installed."""
    return shutil.which("strace") is not None


@contextlib.contextmanager
def system_calls(pids: Sequence[int]) -> Iterator[dict[str, int]]:
    """Count the system calls of processes and their threads; the mapping has the counts after the block."""
    counts: dict[str, int] = {}
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as summary:
        command = ["strace", "-f", "-c", "-o", summary.name]
        for pid in pids:
            command += ["-p", str(pid)]
        tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(_ATTACH_S)
            yield counts
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(_STOP_S)
        counts.update(parse_summary(Path(summary.name).read_text()))


def parse_summary(text: str) -> dict[str, int]:
    """Parse the output of `strace -c` into calls by name."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 5 and cells[0][0].isdigit() and cells[3].isdigit() and cells[-1] != "total":
            counts[cells[-1]] = int(cells[3])
    return counts
