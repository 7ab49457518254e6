"""Measures one case: all its systems in interleaved rounds, in the calling process.

Each system is prepared, run and timed separately, so that one that fails is named and the others are still compared. If
the device no longer responds, the process is given up (`Broken`), and the case is requested again without the system
that caused it.
"""

import gc
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.bench.kernel_bench.case import ERRORS, Call, KernelCase, Systems, failure_of
from baton.bench.kernel_bench.collection import CasePlace, case_at
from baton.bench.kernel_bench.floor import num_sets
from baton.bench.kernel_bench.processes import Broken, Step
from baton.bench.kernel_bench.timing import Timer, make_timer

OURS = "ours"
PREPARE = "prepare"  # named instead of a system, if none could be made
_MAX_SETS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask:
    """One case to measure, or to warm up.

    Attributes:
        place: place of the case.
        device: "cuda" or "cpu".
        rounds: how often each system is measured; 0 only runs each once, so that it is compiled.
        measured_ms: duration of one measurement.
        seed: seed of buffers and of the order in each round.
        without: systems to leave out.
    """

    place: CasePlace
    device: str
    rounds: int
    measured_ms: float
    seed: int = 0
    without: tuple[str, ...] = ()


@dataclass(slots=True)
class Measured:
    """Measurements of a case.

    Attributes:
        num_sets: number of buffer sets.
        times_ms: times of each system, one for each round.
        differs: relative difference of a system's result from ours, where both return a tensor.
        failures: failures of systems.
        is_broken: whether the device no longer responded after the last failure.
    """

    num_sets: int = 0
    times_ms: dict[str, list[float]] = field(default_factory=dict)
    differs: dict[str, float | None] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    is_broken: bool = False


def measure_row(task: RowTask, step: Step) -> Measured:
    """Measure one case.

    Raises:
        Broken: the device no longer responds.
    """
    step(PREPARE)
    device, measured = torch.device(task.device), Measured()
    try:
        with torch.inference_mode():
            _prepare_and_measure(case_at(task.place), device, task, measured, step)
    except ERRORS as error:
        _failed(measured, PREPARE, error, device)
    release(device)
    return measured


def release(device: torch.device) -> None:
    """Free memory that nothing refers to any longer."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_alive(device: torch.device) -> bool:
    """Return whether the device still accepts work from this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(2, device=device).sum().item() == 2)
    except RuntimeError:
        return False


def _prepare_and_measure(case: KernelCase, device: torch.device, task: RowTask, measured: Measured, step: Step) -> None:
    systems = _prepare(case, device, task, measured)
    if task.rounds:
        _measure(systems, device, task, measured, step)
    else:
        _run_once(systems, device, measured, step)


def _prepare(case: KernelCase, device: torch.device, task: RowTask, measured: Measured) -> Systems:
    wanted = num_sets(case.set_bytes, device, _MAX_SETS) if task.rounds else 1
    while True:
        torch.manual_seed(task.seed)
        try:
            systems = case.prepare(device, wanted)
        except torch.OutOfMemoryError:
            if wanted == 1:
                raise
            torch.cuda.empty_cache()
            wanted //= 2
            continue
        measured.num_sets = wanted
        return {name: calls for name, calls in systems.items() if name not in task.without}


def _run_once(systems: Systems, device: torch.device, measured: Measured, step: Step) -> None:
    for name, calls in systems.items():
        step(name)
        try:
            calls[0]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except ERRORS as error:
            _failed(measured, name, error, device)


def _measure(systems: Systems, device: torch.device, task: RowTask, measured: Measured, step: Step) -> None:
    outputs: dict[str, torch.Tensor] = {}
    timers: dict[str, Timer] = {}
    for name, calls in systems.items():
        step(name)
        try:
            outputs |= _output(name, calls[0])
            timers[name] = make_timer(calls, device, task.measured_ms)
        except ERRORS as error:
            _failed(measured, name, error, device)
    measured.differs = _differences(outputs)
    outputs.clear()
    order = random.Random(task.seed)
    for _ in range(task.rounds):
        for name in order.sample(list(timers), len(timers)):
            step(name)
            try:
                measured.times_ms.setdefault(name, []).append(timers[name].measure_ms())
            except ERRORS as error:
                del timers[name], measured.times_ms[name]
                _failed(measured, name, error, device)


def _failed(measured: Measured, name: str, error: BaseException, device: torch.device) -> None:
    measured.failures.append({"system": name, **failure_of(error)})
    if not is_alive(device):
        measured.is_broken = True
        raise Broken(measured) from error


def _output(name: str, call: Call) -> dict[str, torch.Tensor]:
    """Copy the tensor, or the first of several, that a call returns."""
    given = call()
    if isinstance(given, Sequence) and given:
        given = given[0]
    return {name: given.clone()} if isinstance(given, torch.Tensor) else {}


def _differences(outputs: Mapping[str, torch.Tensor]) -> dict[str, float | None]:
    if OURS not in outputs:
        return {}
    ours = outputs[OURS].float()
    found: dict[str, float | None] = {}
    for name, other in outputs.items():
        if name != OURS and other.shape == ours.shape:
            error = float((other.float() - ours).norm() / ours.norm().clamp(min=1e-30))
            found[name] = float(f"{error:.3g}") if math.isfinite(error) else None
    return found
