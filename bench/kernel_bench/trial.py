"""One candidate of a tuning point, in whatever process this is called: compiled and run once, or timed.

What it gives beside times lets the supervisor judge: how many registers spilled, and a sample of the result, so that a
candidate that is fast and wrong is found by those that agree.
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
_HOPELESS = 1.4  # times the best so far: measured once only


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """One candidate.

    Attributes:
        place: of the point.
        candidate: its index there.
        device: "cuda" or "cpu".
        is_timed: or only run once, so that it is compiled, with one set of buffers.
        measured_ms: that one measurement lasts.
        best_ms: of the point so far; None for none.
        seed: of buffers, the same for all candidates.
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
    """What came of it.

    Attributes:
        times_ms: of one call, one for each measurement.
        num_spills: registers of all kernels that were launched, where the compiler says so.
        sample: of the result's values, in order; None if it gives no tensor.
        failure: an error's type and message; empty if there was none.
        is_broken: whether the device no longer answered after it.
    """

    times_ms: list[float] = field(default_factory=list)
    num_spills: int = 0
    sample: "np.ndarray[Any, np.dtype[np.float64]] | None" = None
    failure: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False


def run_trial(task: TrialTask, step: Step) -> Trial:
    """Run one candidate.

    Raises:
        Broken: the device no longer answers.
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
        torch.cuda.empty_cache()  # others compile on this device, too
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
    """Evenly spread values of a tensor, or of the first of several."""
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
    """The compiled kernels that are launched within the block."""
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
