"""One candidate of a tuning point: compiled and run once, or timed, in the calling process.

Besides times it returns what lets the supervisor judge: the number of spilled registers, and a sample of the result, so
that a fast but wrong candidate is detected by comparison with the others.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from baton.bench.kernel_bench.case import ERRORS, TuningPoint, failure_of
from baton.bench.kernel_bench.collection import CasePlace, point_at
from baton.bench.kernel_bench.floor import num_sets
from baton.bench.kernel_bench.processes import Broken, Step
from baton.bench.kernel_bench.row import is_alive
from baton.bench.kernel_bench.timing import make_timer

SAMPLE_LEN = 8192
_MAX_SETS = 32
_NUM_MEASUREMENTS = 3
_HOPELESS = 1.4  # candidates slower than this multiple of the best are measured once only


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """One candidate.

    Attributes:
        place: place of the point.
        candidate: index of the candidate.
        device: "cuda" or "cpu".
        is_timed: whether it is timed, or only run once with one set of buffers, so that it is compiled.
        measured_ms: duration of one measurement.
        best_ms: best time of the point so far; None: none.
        seed: seed of buffers, the same for all candidates.
    """

    place: CasePlace
    candidate: int
    device: str
    is_timed: bool
    measured_ms: float = 8.0
    best_ms: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Trial:
    """Result of a trial.

    Attributes:
        times_ms: times of one call, one for each measurement.
        num_spills: spilled registers of all launched kernels, where the compiler reports them.
        sample: sample of the result's values, in order; None if it returns no tensor.
        failure: an error's type and message; empty if there was none.
        is_broken: whether the device no longer responded afterwards.
    """

    times_ms: list[float] = field(default_factory=list)
    num_spills: int = 0
    sample: "np.ndarray[Any, np.dtype[np.float64]] | None" = None
    failure: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False


def run_trial(task: TrialTask, step: Step) -> Trial:
    """Run one candidate.

    Raises:
        Broken: the device no longer responds.
    """
    step(str(task.candidate))
    device, trial = torch.device(task.device), Trial()
    try:
        with torch.inference_mode():
            _run(task, point_at(task.place), device, trial)
    except ERRORS as error:
        trial.failure = failure_of(error)
        trial.is_broken = not is_alive(device)
        if trial.is_broken:
            raise Broken(trial) from error
    if device.type == "cuda" and not task.is_timed:
        torch.cuda.empty_cache()  # other processes compile on this device, too
    return trial


def _run(task: TrialTask, point: TuningPoint, device: torch.device, trial: Trial) -> None:
    torch.manual_seed(task.seed)
    wanted = num_sets(point.set_bytes, device, _MAX_SETS) if task.is_timed else 1
    options = point.candidates[task.candidate]
    calls = point.prepare(device, wanted, options)
    with _launched() as kernels:
        given = calls[0]()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if not point.may_spill(options):
        trial.num_spills = sum(int(getattr(kernel, "n_spills", 0) or 0) for kernel in kernels)
    if not task.is_timed:
        return
    trial.sample = sample_of(given)
    timer = make_timer(calls, device, task.measured_ms)
    trial.times_ms.append(timer.measure_ms())
    if task.best_ms is None or trial.times_ms[0] < _HOPELESS * task.best_ms:
        trial.times_ms += [timer.measure_ms() for _ in range(_NUM_MEASUREMENTS - 1)]


def sample_of(given: object) -> "np.ndarray[Any, np.dtype[np.float64]] | None":
    """Sample evenly spaced values of a tensor, or of the first of several."""
    if isinstance(given, tuple | list) and given:
        given = given[0]
    if not isinstance(given, torch.Tensor) or given.numel() == 0:
        return None
    flat = given.reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, min(SAMPLE_LEN, flat.numel()), dtype=torch.float64).long()
    sample: np.ndarray[Any, np.dtype[np.float64]] = flat[places.to(flat.device)].double().cpu().numpy()
    return sample


@contextlib.contextmanager
def _launched() -> Iterator[list[Any]]:
    """Collect the compiled kernels that are launched within the block."""
    kernels: list[Any] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, **kwargs)
        kernels.append(kernel)
        return kernel

    JITFunction.run = run
    try:
        yield kernels
    finally:
        JITFunction.run = original
