"""Marks in the order of a lane's work, and the time between two of them: how steps are timed without waiting.

On CUDA a mark is an event; the time between two can be asked once both were reached, and is the device's own. On a CPU
work runs where it is marked, so a mark is a reading of the clock.
"""

from typing import Any, Protocol

import torch

from baton.core.clock import Clock


class Marks(Protocol):
    """What marks of one device are."""

    def mark(self) -> Any:
        """A mark behind the work given to the device until now."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Whether the work before the mark is over."""
        ...

    def between_s(self, first: Any, second: Any) -> float:
        """Seconds from one mark to the other; both were reached."""
        ...


def marks_for(device: torch.device, clock: Clock) -> Marks:
    """Those of a device; `clock` is read where the device has none."""
    return StreamMarks(device) if device.type == "cuda" else ClockMarks(clock)


class ClockMarks:
    """Readings of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock.now_s

    def is_reached(self, mark: float) -> bool:
        """See `Marks`."""
        return True

    def between_s(self, first: float, second: float) -> float:
        """See `Marks`."""
        return second - first


class StreamMarks:
    """Events of the stream that is current where they are made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See `Marks`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """See `Marks`."""
        return bool(mark.query())

    def between_s(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See `Marks`."""
        return float(first.elapsed_time(second)) / 1e3
