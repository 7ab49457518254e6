"""Measures what the steps of one runner cost and count, without delaying any of them.

Times come from marks that the executor sets around each step, and are read together with the step's result. The *host
gap* is the time from the end of a step to the start of the next one if they share a sequence: then there was work, and
the device waited for the host. Placing new sequences counts as part of the gap; a prefill or a KV copy in between on
the same device does not (`interrupt`). Counters (`engine.step.counters`) are copied to the host on request, after the
steps launched so far; a request returns the previous copy.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from baton.core.clock import Clock, MonotonicClock
from baton.core.distribution import Buckets, Distribution
from baton.core.telemetry.step_report import GAP_BOUNDS_S, STEP_BOUNDS_S, RowCounts, no_rows
from baton.engine.step.counters import StepCounters
from baton.engine.step.executor import StepExecutor
from baton.engine.step.host_future import HostFuture
from baton.kernels.copies import host_buffer


class Marks(Protocol):
    """Timing marks on one device."""

    def mark(self) -> Any:
        """Set a mark after the work submitted to the device so far."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Whether the work before the mark is over."""
        ...

    def between_s(self, first: Any, second: Any) -> float:
        """Seconds between two marks that were reached."""
        ...


def marks_for(device: torch.device, clock: Clock) -> Marks:
    """The marks for a device; `clock` is used if the device has no events."""
    return StreamMarks(device) if device.type == "cuda" else ClockMarks(clock)


class ClockMarks:
    """Marks that are readings of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock.now_s

    def is_reached(self, mark: float) -> bool:
        """See `Marks`."""
        return True

    def between_s(self, first: float, second: float) -> float:
        """See `Marks`."""
        return second - first


class StreamMarks:
    """Marks that are events on the current stream."""

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


_MAX_OVER: Final = 256  # steps whose times are put into buckets in one go, which is cheaper than one by one


@dataclass(slots=True, eq=False)
class StepTimes:
    """The marks of one step, and the previous step if they share a sequence.

    Attributes:
        before: the previous step.
        decodes: whether the step has decode rows.
        begin: before its first kernel.
        sampled: after its tokens are sampled.
        end: after the whole step.
    """

    before: "StepTimes | None"
    decodes: bool = True
    begin: Any = None
    sampled: Any = None
    end: Any = None


class StepMeter:
    """Meter of one runner. `counters` and `run` are for its executor, `computed` and `times` for any thread.

    Everything else is for the runner's own thread.

    Args:
        num_draft_tokens: maximum number of drafts in a step.
        executor: executor of the steps.
        device: device of the steps.
        clock: clock for steps on a CPU.
    """

    def __init__(
        self, num_draft_tokens: int, executor: StepExecutor, device: torch.device, clock: Clock | None = None
    ) -> None:
        self.counters = StepCounters(num_draft_tokens, device)
        self.num_draft_tokens = num_draft_tokens
        self._executor = executor
        marks = marks_for(device, clock or MonotonicClock())
        self._marks, self._mark, self._between_s = marks, marks.mark, marks.between_s
        self._last: StepTimes | None = None
        self._last_slots: tuple[int, ...] = ()
        self._new_slots: set[int] = set()
        self._over: deque[tuple[Any, StepTimes]] = deque()  # (end of the previous step, step), read
        self._step_s = Buckets(STEP_BOUNDS_S)
        self._gap_s = Buckets(GAP_BOUNDS_S)
        self._lock = threading.Lock()  # guards the buckets and the fields below
        self._buffer = host_buffer(self.counters.num_values, torch.int64, device)
        self._copy: HostFuture | None = None
        self._is_wanted = False
        self._computed = no_rows(num_draft_tokens)

    def admit(self, slot: int) -> None:
        """Record that a new sequence takes a slot, so it does not continue from an earlier step."""
        self._new_slots.add(slot)

    def interrupt(self) -> None:
        """Record that the device has other work before the next step, so the time until then is no gap."""
        self._last = None

    def launch(self, slots: tuple[int, ...], *, decodes: bool = True) -> StepTimes:
        """Record the launch of a step over the sequences in `slots`; `decodes` says whether any of them decodes."""
        before, new = self._last, self._new_slots
        if new or slots is not self._last_slots:
            if not any(slot not in new and slot in self._last_slots for slot in slots):
                before = None
            new.clear()
            self._last_slots = slots
        self._last = times = StepTimes(before, decodes)
        return times

    def begin(self, times: StepTimes) -> None:
        """Mark the start of the step."""
        times.begin = self._mark()

    def sampled(self, times: StepTimes) -> None:
        """Mark that its tokens are sampled."""
        times.sampled = self._mark()

    def end(self, times: StepTimes) -> None:
        """Mark the end of the step."""
        times.end = self._mark()

    def read(self, times: StepTimes) -> None:
        """Record, once per step, that its result was read."""
        before, times.before = times.before, None  # else each step would keep all earlier ones alive
        self._over.append((None if before is None else before.end, times))
        if len(self._over) >= _MAX_OVER:
            self._sort()

    def durations_s(self, times: StepTimes) -> tuple[float, float] | None:
        """Seconds until the step's tokens were sampled, and until its end; None while it is not over."""
        if not self._is_over(times):
            return None
        return self._between_s(times.begin, times.sampled), self._between_s(times.begin, times.end)

    def _is_over(self, times: StepTimes) -> bool:
        return times.end is not None and self._marks.is_reached(times.end)

    def times(self) -> tuple[Distribution, Distribution]:
        """Distributions, in seconds, of the durations of the steps that were read and of the gaps before them."""
        self._sort()
        with self._lock:
            return self._step_s.read(), self._gap_s.read()

    def _sort(self) -> None:
        with self._lock:
            while self._over and self._is_over(self._over[0][1]):
                last_end, times = self._over.popleft()
                if not times.decodes:
                    continue
                self._step_s.observe(self._between_s(times.begin, times.end))
                if last_end is not None:
                    self._gap_s.observe(self._between_s(last_end, times.begin))

    def computed(self) -> RowCounts:
        """The most recently copied counters; also requests a new copy.

        Raises:
            Exception: what a step raised; nothing can be decoded any more.
        """
        with self._lock:
            if self._copy is not None and self._copy.is_done:
                self._computed = self.counters.read(self._copy.get())
                self._copy = None
            self._is_wanted = self._copy is None
            return self._computed

    def copy_if_wanted(self) -> None:
        """Submit the copy that was requested, if any."""
        if self._is_wanted:
            self._submit_copy()

    def computed_now(self) -> RowCounts:
        """The counters of all steps launched so far; waits for them.

        Raises:
            Exception: what a step raised.
        """
        with self._lock:
            copy, self._copy = self._copy, None
        if copy is not None:
            copy.get()  # until then the copy owns the buffer
        self._submit_copy().get()
        return self.computed()

    def _submit_copy(self) -> HostFuture:
        with self._lock:
            self._is_wanted = False
            if self._copy is None:
                self._copy = self._executor.submit(self.counters.copy, self._buffer)
            return self._copy
