"""Whether a process that keeps others waiting hangs, or only gets no processor: what the kernel says about it."""

import os
import time
from pathlib import Path
from typing import Final

_RUNNABLE: Final = ("R", "D")  # it runs, waits for a processor, or for a disk
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_STARVED_SHARE: Final = 0.5


def is_runnable(pid: int) -> bool:
    """Whether any thread of a process would run if it got a processor; one that is stopped, or sleeps, would not."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        fields = _fields(path)
        if fields and fields[0] in _RUNNABLE:
            return True
    return False


class CpuWatch:
    """What a process computes from here on.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start_s = time.monotonic()
        self._used_s = _cpu_s(pid)

    def is_starved(self) -> bool:
        """It would run, and got less than half a processor. One that spins gets more, one that waits would not run."""
        share_s = _STARVED_SHARE * (time.monotonic() - self._start_s)
        return is_runnable(self._pid) and _cpu_s(self._pid) - self._used_s < share_s


def _cpu_s(pid: int) -> float:
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def _fields(path: Path) -> list[str]:
    """Of a `stat` file, from the state on; empty if it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
