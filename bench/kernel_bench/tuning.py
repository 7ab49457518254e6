"""Finds the rows of the tuned table: compiles all candidates in many processes, then times each.

This is the supervisor, which never touches the device. Candidates that fail, hang, spill registers or disagree with
most of the others are dropped, and that is reported. Times are those of CUDA graphs over rotating buffers, as in the
bench; the best few are timed again, so that the choice is not luck. The table is written after every point.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from baton.bench.kernel_bench.case import TuningPoint
from baton.bench.kernel_bench.collection import CasePlace, find_points
from baton.bench.kernel_bench.processes import Child, Here, Lost, Step, do_all
from baton.bench.kernel_bench.trial import Trial, TrialTask, run_trial
from baton.bench.result import replace_file
from baton.core.errors import ConfigInvalid

TOLERANCE = 0.02  # relative difference of two candidates' results
_COMPILE_SHARE = 0.55  # maximum share of the time
_FINALISTS = 4
_FINALIST_MS = 1.04  # finalists are at most this multiple of the best
_FULL = "OutOfMemoryError"
_MEASURED_MS = {"cuda": 8.0, "cpu": 0.5}

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """Options of one run.

    Attributes:
        only: words; a point is tuned if its module, kernel, shape or size has one of them. Empty: all points.
        device: "cuda", or "cpu" to test the tuner.
        jobs: processes that compile.
        limit_s: time limit of the whole run.
        trial_limit_s: time limit of one candidate.
        out: file of the table.
        report: file of all measurements; None: none.
    """

    only: tuple[str, ...] = ()
    device: str = "cuda"
    jobs: int = 16
    limit_s: float = 540.0
    trial_limit_s: float = 60.0
    out: Path
    report: Path | None = None


@dataclass(slots=True)
class Point:
    """State of a point while it is tuned."""

    place: CasePlace
    point: TuningPoint
    trials: dict[int, Trial] = field(default_factory=dict)  # trials that were timed
    dropped: dict[int, str] = field(default_factory=dict)  # reason by candidate
    best: int | None = None

    def ms(self, candidate: int) -> float:
        """Median time of a candidate."""
        return median(self.trials[candidate].times_ms)

    def as_json(self) -> dict[str, Any]:
        """All candidates, the fastest first."""
        timed = sorted((index for index in self.trials if index not in self.dropped), key=self.ms)
        rows: list[dict[str, Any]] = [
            {"options": dict(self.point.candidates[index]), "ms": float(f"{self.ms(index):.4g}")} for index in timed
        ]
        rows += [
            {"options": dict(self.point.candidates[index]), "why": why} for index, why in sorted(self.dropped.items())
        ]
        return {"kernel": self.point.kernel, "shape": self.point.shape, "size": self.point.size, "candidates": rows}


def tune(options: TuningOptions, base: Table, note: Note = lambda text: None) -> dict[str, Any]:
    """Tune every requested point; return the measurements.

    Args:
        options: options of the run.
        base: existing table, whose other rows are kept.
        note: called with progress.

    Raises:
        ConfigInvalid: no point matches.
    """
    found = find_points(options.only)
    if not found.cases and not found.failures:
        raise ConfigInvalid(f"--only {','.join(options.only)}: no point has it", keys=["only"])
    points = [Point(place, point) for place, point in found.cases.items()]
    run = _Run(options, base, note, points, found.failures)
    try:
        run.compile()
        run.measure()
    finally:
        run.close()
    return run.data()


def _work(task: TrialTask, step: Step) -> Trial:
    """Work of a child process."""
    return run_trial(task, step)


class _Run:
    """One run of the tuner."""

    def __init__(
        self, options: TuningOptions, base: Table, note: Note, points: list[Point], failures: list[dict[str, Any]]
    ) -> None:
        self._options, self._note, self._points, self._failures = options, note, points, failures
        self._table = base
        self._begin_s = time.monotonic()
        self._child: Child | Here = Child(_work) if options.device == "cuda" else Here(_work)

    def compile(self) -> None:
        """Run every candidate once, in many processes; those that fail or spill are dropped."""
        wanted = [(point, index) for point in self._points for index in range(len(point.point.candidates))]
        random.Random(0).shuffle(wanted)  # neighbours need much memory, and the same code, at the same time
        tasks = [self._task(point, index, is_timed=False) for point, index in wanted]
        self._note(f"{len(self._points)} points, {len(tasks)} candidates")
        if self._options.device == "cuda":
            end_s = self._begin_s + _COMPILE_SHARE * self._options.limit_s
            limit_s = self._options.trial_limit_s
            outcomes = do_all(_work, tasks, self._options.jobs, limit_s=limit_s, end_s=end_s)
        else:
            outcomes = [self._child.do(task, self._options.trial_limit_s) for task in tasks]
        for (point, index), outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Trial) and outcome.failure.get("error") == _FULL:
                continue  # out of memory that many shared; when timed, it has all of it
            if why := _why_dropped(outcome):
                point.dropped[index] = why
        num_good = len(tasks) - sum(len(point.dropped) for point in self._points)
        self._note(f"{num_good} candidates are good after {time.monotonic() - self._begin_s:.0f} s")

    def measure(self) -> None:
        """Measure point after point."""
        for number, point in enumerate(self._points):
            if self._is_late():
                self._note(f"{len(self._points) - number} points are left out: the time is over")
                return
            self._measure(point)
            self._write()
            name = f"{point.point.kernel} {point.point.shape} {point.point.size}"
            said = "no candidate is left"
            if point.best is not None:
                said = (
                    f"{point.ms(point.best) * 1e3:.4g} us with {json.dumps(dict(point.point.candidates[point.best]))}"
                )
            self._note(f"{number + 1} of {len(self._points)}: {name}: {said}")

    def close(self) -> None:
        """End the child, and write the results."""
        self._child.close()
        self._write()

    def data(self) -> dict[str, Any]:
        """Every point with all of its candidates."""
        untuned = [
            f"{point.point.kernel} {point.point.shape} {point.point.size}"
            for point in self._points
            if point.best is None
        ]
        return {
            "points": [point.as_json() for point in self._points],
            "untuned": untuned,
            "failures": self._failures,
            "took_s": round(time.monotonic() - self._begin_s, 1),
        }

    def _measure(self, point: Point) -> None:
        for index in range(len(point.point.candidates)):
            if index not in point.dropped and not self._is_late():
                self._time(point, index, self._best_ms(point))
        _drop_outvoted(point)
        good = sorted((index for index in point.trials if index not in point.dropped), key=point.ms)
        finalists = [index for index in good if point.ms(index) < _FINALIST_MS * point.ms(good[0])][:_FINALISTS]
        for index in finalists if len(finalists) > 1 else ():
            self._time(point, index, None)
        left = [index for index in finalists if index not in point.dropped]
        point.best = min(left, key=point.ms, default=None)
        if point.best is not None:
            key = point.point
            sizes = self._table.setdefault(key.kernel, {}).setdefault(key.shape, {})
            sizes[str(key.size)] = dict(key.candidates[point.best])

    def _time(self, point: Point, index: int, best_ms: float | None) -> None:
        outcome = self._child.do(self._task(point, index, is_timed=True, best_ms=best_ms), self._options.trial_limit_s)
        if why := _why_dropped(outcome):
            point.dropped[index] = why
        elif index in point.trials:
            point.trials[index].times_ms += outcome.times_ms
        else:
            point.trials[index] = outcome

    def _best_ms(self, point: Point) -> float | None:
        return min((point.ms(index) for index in point.trials if index not in point.dropped), default=None)

    def _task(self, point: Point, index: int, *, is_timed: bool, best_ms: float | None = None) -> TrialTask:
        device = self._options.device
        return TrialTask(
            place=point.place,
            candidate=index,
            device=device,
            is_timed=is_timed,
            measured_ms=_MEASURED_MS[device],
            best_ms=best_ms,
        )

    def _is_late(self) -> bool:
        return time.monotonic() - self._begin_s >= self._options.limit_s

    def _write(self) -> None:
        replace_file(self._options.out, format_table(self._table))
        if self._options.report is not None:
            replace_file(self._options.report, json.dumps(self.data(), indent=1) + "\n")


def _why_dropped(outcome: Trial | Lost | None) -> str:
    if outcome is None:
        return "not compiled in time"
    if isinstance(outcome, Lost):
        return "hangs" if outcome.reason == "timeout" else f"ends its process with {outcome.exit_code}"
    if outcome.failure:
        return f"{outcome.failure['error']}: {outcome.failure['message'][:200]}"
    return f"spills {outcome.num_spills} registers" if outcome.num_spills else ""


def _drop_outvoted(point: Point) -> None:
    """Keep the largest group of candidates whose results agree; of equal groups, that of the first candidate."""
    groups: list[list[int]] = []
    for index, trial in sorted(point.trials.items()):
        if trial.sample is None or index in point.dropped:
            continue
        group = next((group for group in groups if agree(trial, point.trials[group[0]])), None)
        if group is None:
            groups.append(group := [])
        group.append(index)
    if not groups:
        return
    kept = max(groups, key=len)
    for group in groups:
        for index in group if group is not kept else ():
            point.dropped[index] = "gives other numbers than most"
    only = point.trials[kept[0]].sample
    assert only is not None
    if not np.isfinite(only).all():
        point.dropped |= dict.fromkeys(kept, "gives numbers that are not finite")


def agree(one: Trial, other: Trial) -> bool:
    """Return whether two results are equal except for rounding."""
    assert one.sample is not None
    assert other.sample is not None
    if one.sample.shape != other.sample.shape:
        return False
    both = np.isfinite(one.sample) & np.isfinite(other.sample)
    if not np.array_equal(np.isfinite(one.sample), np.isfinite(other.sample)):
        return False
    distance = np.linalg.norm(one.sample[both] - other.sample[both])
    return bool(distance <= TOLERANCE * max(float(np.linalg.norm(other.sample[both])), 1e-30))


def format_table(table: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """Format as JSON with a line for each size, everything sorted, sizes by number."""
    if not table:
        return "{}\n"
    kernels = []
    for kernel, shapes in sorted(table.items()):
        lines = []
        for shape, sizes in sorted(shapes.items()):
            rows = [f'   "{size}": {json.dumps(sizes[size], sort_keys=True)}' for size in sorted(sizes, key=int)]
            lines.append(f"  {json.dumps(shape)}: {{\n{_joined(rows)}\n  }}")
        kernels.append(f" {json.dumps(kernel)}: {{\n{_joined(lines)}\n }}")
    return f"{{\n{_joined(kernels)}\n}}\n"


def _joined(parts: Sequence[str]) -> str:
    return ",\n".join(parts)
