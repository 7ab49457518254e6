"""A runner's lane that notes when each step begins and ends where steps run: by events on a GPU, by the clock on a CPU.

A step is two pieces of work, one right after the other: one whose result is its tokens, and one without a result, its
draft extend. What lies between the end of one step and the beginning of the next is time in which the device had
nothing of either. Other work without a result (sequences that are placed) is not noted. It changes neither order nor
results.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from baton.engine.step.host_future import HostFuture
from baton.engine.step.lane import Ending, Lane


class _Stamp(Protocol):
    """A point in the order of work."""

    def record(self) -> None:
        """It is here."""
        ...


class _HostStamp:
    """On a CPU: work happens where it is called."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def record(self) -> None:
        """See `_Stamp`."""
        self.time_s = time.perf_counter()


class _DeviceStamp:
    """On the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        """See `_Stamp`."""
        self.event.record(torch.cuda.current_stream(self._device))


class StampedLane:
    """`lane` for a runner; `take` says what was noted.

    Args:
        lane: does the work.
        device: whose lane it is.
    """

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane = lane
        self._device = device
        self._steps: list[tuple[_Stamp, _Stamp]] = []
        self._end: _Stamp | None = None  # of the step whose second piece comes next

    def submit(self, work: Callable[[], torch.Tensor], target: torch.Tensor) -> HostFuture:
        """See `Lane`."""
        begin, end = self._stamp(), self._stamp()
        self._steps.append((begin, end))
        self._end = end

        def stamped() -> torch.Tensor:
            begin.record()
            return work()

        return self._lane.submit(stamped, target)

    def run(self, work: Callable[[], None]) -> Ending:
        """See `Lane`."""
        end, self._end = self._end, None
        if end is None:
            return self._lane.run(work)

        def stamped() -> None:
            work()
            end.record()

        return self._lane.run(stamped)

    def drain(self) -> None:
        """See `Lane`."""
        self._lane.drain()

    def close(self) -> None:
        """See `Lane`."""
        self._lane.close()

    def take(self) -> tuple[list[float], list[float]]:
        """Milliseconds of each step noted since the last call, and between each and the one before; all are over."""
        self.drain()
        steps, self._steps = self._steps, []
        within = [_ms_between(begin, end) for begin, end in steps]
        between = [_ms_between(steps[at - 1][1], steps[at][0]) for at in range(1, len(steps))]
        return within, between

    def _stamp(self) -> _Stamp:
        return _DeviceStamp(self._device) if self._device.type == "cuda" else _HostStamp()


def _ms_between(first: _Stamp, second: _Stamp) -> float:
    if isinstance(first, _DeviceStamp) and isinstance(second, _DeviceStamp):
        return float(first.event.elapsed_time(second.event))
    assert isinstance(first, _HostStamp)
    assert isinstance(second, _HostStamp)
    return 1e3 * (second.time_s - first.time_s)
