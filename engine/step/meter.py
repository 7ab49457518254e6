"""What the steps of one runner cost and counted, taken without holding up any of them.

Times are marks that the executor sets around each step (`engine.step.marks`), read when the step's result is. The *host
gap* is the time from the end of a step to the begin of the next one, if a sequence goes on from one to the other: then
there was work, and the device waited for the host. Placing new sequences falls into it; a prefill, or copies of KV, in
between on the same device do not (`interrupt`). Counters (`engine.step.counters`) are copied to the host on request,
behind the steps launched until then; the request returns the copy before.
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


_MAX_OVER: Final = 256  # steps whose times are sorted into buckets at once, which is cheaper than one by one


@dataclass(slots=True, eq=False)
class StepTimes:
    """The marks of one step, and the step before if a sequence goes on from that one.

    Attributes:
        before: that step.
        decodes: whether sequences decode in it.
        begin: before its first kernel.
        sampled: its tokens are there.
        end: it is over.
    """

    before: "StepTimes | None"
    decodes: bool = True
    begin: Any = None
    sampled: Any = None
    end: Any = None


class StepMeter:
    """Of one runner. `counters` and `run` are for its executor, `computed` and `times` for any thread.

    The rest is for its own thread.

    Args:
        num_draft_tokens: most drafts of a step.
        executor: where steps run.
        device: of the steps.
        clock: of steps on a CPU.
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
        self._over: deque[tuple[Any, StepTimes]] = deque()  # steps that were read, and the end of the one before
        self._step_s = Buckets(STEP_BOUNDS_S)
        self._gap_s = Buckets(GAP_BOUNDS_S)
        self._lock = threading.Lock()  # of the buckets, and of what follows
        self._buffer = host_buffer(self.counters.num_values, torch.int64, device)
        self._copy: HostFuture | None = None
        self._is_wanted = False
        self._computed = no_rows(num_draft_tokens)

    def admit(self, slot: int) -> None:
        """A sequence was put into a slot: it does not go on from any step before."""
        self._new_slots.add(slot)

    def interrupt(self) -> None:
        """The device has other work before the next step: the time until then is no gap."""
        self._last = None

    def launch(self, slots: tuple[int, ...], *, decodes: bool = True) -> StepTimes:
        """A step of the sequences in these slots is launched; whether any of them decodes."""
        before, new = self._last, self._new_slots
        if new or slots is not self._last_slots:
            if not any(slot not in new and slot in self._last_slots for slot in slots):
                before = None
            new.clear()
            self._last_slots = slots
        self._last = times = StepTimes(before, decodes)
        return times

    def begin(self, times: StepTimes) -> None:
        """The step begins."""
        times.begin = self._mark()

    def sampled(self, times: StepTimes) -> None:
        """Its tokens are there."""
        times.sampled = self._mark()

    def end(self, times: StepTimes) -> None:
        """It is over."""
        times.end = self._mark()

    def read(self, times: StepTimes) -> None:
        """The result of a step was read; once."""
        before, times.before = times.before, None  # or each step would lead to all before it
        self._over.append((None if before is None else before.end, times))
        if len(self._over) >= _MAX_OVER:
            self._sort()

    def durations_s(self, times: StepTimes) -> tuple[float, float] | None:
        """Of a step: until its tokens were there, and in all; None while it is not over."""
        if not self._is_over(times):
            return None
        return self._between_s(times.begin, times.sampled), self._between_s(times.begin, times.end)

    def _is_over(self, times: StepTimes) -> bool:
        return times.end is not None and self._marks.is_reached(times.end)

    def times(self) -> tuple[Distribution, Distribution]:
        """Durations of the steps that were read, and gaps before them, in seconds."""
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
        """The counters as they were last copied, and have them copied again.

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
        """Set off the copy that was asked for."""
        if self._is_wanted:
            self._submit_copy()

    def computed_now(self) -> RowCounts:
        """The counters of all steps launched until now; waits for them.

        Raises:
            Exception: what a step raised.
        """
        with self._lock:
            copy, self._copy = self._copy, None
        if copy is not None:
            copy.get()  # until then the buffer is its own
        self._submit_copy().get()
        return self.computed()

    def _submit_copy(self) -> HostFuture:
        with self._lock:
            self._is_wanted = False
            if self._copy is None:
                self._copy = self._executor.submit(self.counters.copy, self._buffer)
            return self._copy
