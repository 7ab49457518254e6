"""CPU time and system calls of process trees, read from outside.

CPU clocks of other processes are read in nanoseconds (clock_gettime of their clock). Counting system calls attaches
`strace`, which slows what it watches several times: never while a rate is measured.
"""

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_CPU_CLOCK_OF_PROCESS = 2  # of `man clock_getcpuclockid`: utime + stime of all threads
_ATTACH_S = 1.0
_STOP_S = 20.0


def tree(pid: int) -> list[int]:
    """`pid` and everything that descends from it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def cpu_s(pid: int) -> float:
    """CPU seconds that a live process has used."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, as far as they live; threads that ended included."""
    total = 0.0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += cpu_s(member)
    return total


def can_count_system_calls() -> bool:
    """Whether `strace` is there."""
    return shutil.which("strace") is not None


@contextlib.contextmanager
def system_calls(pids: Sequence[int]) -> Iterator[dict[str, int]]:
    """Count the system calls of processes and their threads; the counts are in the mapping after the block."""
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
    """Calls by name, from what `strace -c` writes."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 5 and cells[0][0].isdigit() and cells[3].isdigit() and cells[-1] != "total":
            counts[cells[-1]] = int(cells[3])
    return counts
