"""Times a list of calls: on a GPU by replays of one CUDA graph that contains them all, on a CPU by the clock.

Each call uses buffers of its own, so that what it reads is no longer in the cache when its turn comes again. Calls are
repeated within the graph until the gap between two replays is negligible. This module measures times and does not judge
them.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from baton.bench.kernel_bench.case import Call

_GRAPH_MS = 2.0  # duration of a graph, if these calls suffice for it
_MAX_CALLS = 256
_MAX_REPLAYS = 20_000


class Timer(Protocol):
    """Something that can be measured repeatedly."""

    def measure_ms(self) -> float:
        """Time of one call, the mean over one measurement."""
        ...


def make_timer(calls: Sequence[Call], device: torch.device, measured_ms: float) -> Timer:
    """Make a timer, running every call at least once, so that everything is compiled and failures surface.

    Args:
        calls: one for each set of buffers.
        device: device of the calls.
        measured_ms: approximate duration of one measurement.
    """
    assert calls
    return GraphTimer(calls, device, measured_ms) if device.type == "cuda" else ClockTimer(calls, measured_ms)


class ClockTimer:
    """Times calls that are done when they return."""

    def __init__(self, calls: Sequence[Call], measured_ms: float) -> None:
        self._calls = calls
        self._num_passes = max(1, math.ceil(measured_ms / max(self._run(2), 1e-6)))

    def measure_ms(self) -> float:
        """Time of one call."""
        return self._run(self._num_passes) / self._num_passes / len(self._calls)

    def _run(self, num_passes: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(num_passes):
            for call in self._calls:
                call()
        return (time.perf_counter() - begin_s) * 1e3


class GraphTimer:
    """Times calls that launch kernels on the current stream and do not wait for them."""

    def __init__(self, calls: Sequence[Call], device: torch.device, measured_ms: float) -> None:
        self._stream = torch.cuda.Stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        with torch.cuda.stream(self._stream):
            for call in calls:
                call()
            self._stream.synchronize()
            pass_ms = self._elapsed_ms(calls)
            wanted = max(1, math.ceil(_GRAPH_MS / max(pass_ms, 1e-3)))
            num_passes = min(wanted, max(1, _MAX_CALLS // len(calls)))
            self._num_calls = num_passes * len(calls)
            self._graph = capture(list(calls) * num_passes, num_kept=len(calls))
            self._graph.replay()
            graph_ms = self._elapsed_ms([self._graph.replay])
        self._num_replays = min(_MAX_REPLAYS, max(1, math.ceil(measured_ms / max(graph_ms, 1e-4))))

    def measure_ms(self) -> float:
        """Time of one call."""
        with torch.cuda.stream(self._stream):
            self._graph.replay()  # keeps the device busy while the host sends the rest
            took_ms = self._elapsed_ms([self._graph.replay] * self._num_replays)
        return took_ms / self._num_replays / self._num_calls

    def _elapsed_ms(self, calls: Sequence[Call]) -> float:
        self._begin.record(self._stream)
        for call in calls:
            call()
        self._end.record(self._stream)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))


def capture(calls: Sequence[Call], num_kept: int) -> torch.cuda.CUDAGraph:
    """Capture all calls into one graph on the current stream.

    The last `num_kept` results are kept meanwhile: otherwise the next call would reuse a freed result's memory, which
    is still in the cache. `torch.cuda.graph` is not used, because it collects garbage before each capture, which is
    slow for a tuner with thousands of them.
    """
    graph = torch.cuda.CUDAGraph()
    results: deque[object] = deque(maxlen=num_kept)
    torch.cuda.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for call in calls:
            results.append(call())
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it would only say that the capture failed, not why
            graph.capture_end()
        raise
    graph.capture_end()
    return graph
