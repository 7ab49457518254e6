"""Clocks. Protocol and policy code takes a `Clock`, so tests can run it under virtual time."""

import os
import time
from functools import cache
from pathlib import Path
from typing import Final, Protocol

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE: Final = "/proc/self/ns/time"


@cache
def clock_id() -> str:
    """Id of the monotonic clock, equal for processes that read the same one: same boot, machine and time namespace.

    It is empty if the system does not provide one.
    """
    try:
        return f"{BOOT_ID.read_text().strip()}-{os.readlink(TIME_NAMESPACE)}"
    except OSError:
        return ""


MAX_TIMEOUT_S: Final = float((1 << 31) // 1000)  # 2^31 ms: many timers support no more


class Clock(Protocol):
    """Seconds that only grow, from an arbitrary start; never comparable between hosts."""

    def now_s(self) -> float:
        """The current reading, in seconds."""
        ...


class MonotonicClock:
    """The process's real clock; on one host every process reads the same one (CLOCK_MONOTONIC)."""

    def now_s(self) -> float:
        """Seconds since an arbitrary point, common to all processes of this host."""
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to; for Baton's own tests and its users'."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """The reading set by `advance`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; time never goes back."""
        assert seconds >= 0
        self._now_s += seconds
