"""`baton bench kernels`: measures every kernel at the shapes it serves, beside its floor and its baselines.

This is the supervisor: it decides what is measured next, records the results, and never touches the device. On a GPU,
rows are measured in a child process (`bench.kernel_bench.processes`), after several children have compiled what the
rows need; on a CPU in this process, to test the bench itself.
"""

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.bench.kernel_bench.baselines import availability
from baton.bench.kernel_bench.case import KernelCase
from baton.bench.kernel_bench.collection import CasePlace, find_cases
from baton.bench.kernel_bench.floor import Rates, measure_rates
from baton.bench.kernel_bench.processes import Child, Here, Lost, Step, do_all
from baton.bench.kernel_bench.row import OURS, PREPARE, Measured, RowTask, measure_row
from baton.bench.result import replace_file, result, spread
from baton.core.errors import ConfigInvalid

MEASURED_MS = {"cuda": 20.0, "cpu": 1.0}
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options of one run.

    Attributes:
        only: words; a row is measured if its module, kernel or shape has one of them. Empty: all rows.
        device: "cuda" or "cpu".
        rounds: how often each system of a row is measured.
        limit_s: time limit of the whole run; rows that have not begun by then are listed.
        case_limit_s: time limit of one row, after which its process is killed.
        jobs: processes that compile before anything is measured; 0: none.
        out: file that gets the result so far after every row.
        seed: seed of buffers and order.
    """

    only: tuple[str, ...] = ()
    device: str
    rounds: int = 5
    limit_s: float = 1800.0
    case_limit_s: float = 90.0
    jobs: int = 0
    out: Path | None = None
    seed: int = 0


def read_options(
    *,
    only: str,
    device: str,
    rounds: int,
    limit_s: float,
    case_limit_s: float,
    jobs: int,
    out: Path | None,
    seed: int,
) -> KernelOptions:
    """Check the command line.

    Raises:
        ConfigInvalid: a value does not exist, or a device is not available.
    """
    if device not in _DEVICES:
        raise ConfigInvalid(f"--device {device}: must be auto, {' or '.join(_DEVICES)}", keys=["device"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid("--device cuda: torch finds no GPU here", keys=["device"])
    if rounds < 1:
        raise ConfigInvalid(f"--rounds {rounds}: must be at least 1", keys=["rounds"])
    for name, value in (("limit-s", limit_s), ("case-limit-s", case_limit_s)):
        if not value > 0:
            raise ConfigInvalid(f"--{name} {value:g}: must be above 0", keys=[name])
    if jobs < 0:
        raise ConfigInvalid(f"--jobs {jobs}: must not be negative", keys=["jobs"])
    if out is not None and not out.parent.is_dir():
        raise ConfigInvalid(f"--out {out}: there is no folder {out.parent}", keys=["out"])
    return KernelOptions(
        only=tuple(part.strip() for part in only.split(",") if part.strip()),
        device=device,
        rounds=rounds,
        limit_s=limit_s,
        case_limit_s=case_limit_s,
        jobs=jobs,
        out=out,
        seed=seed,
    )


_WARM_SHARE = 0.4  # maximum share of the whole limit
_RATES_LIMIT_S = 120.0
_MAX_TRIES = 4  # tries of one row, each without the systems that ended earlier ones

Note = Callable[[str], None]


def bench_kernels(options: KernelOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measure every requested row.

    Args:
        options: options of the run.
        note: called with progress.

    Raises:
        ConfigInvalid: no row matches.
    """
    found = find_cases(options.only, is_cpu=options.device == "cpu")
    if not found.cases and not found.failures:
        raise ConfigInvalid(f"--only {','.join(options.only)}: no row of this device has it", keys=["only"])
    run = _Run(options, note, found.cases)
    run.failures += found.failures
    run.warm_up()
    try:
        run.measure()
    finally:
        run.close()
    return run.data()


def _work(task: RowTask | str, step: Step) -> Measured | Rates | dict[str, str]:
    """Work of a child process."""
    if isinstance(task, RowTask):
        return measure_row(task, step)
    return availability() if task == "baselines" else measure_rates(task, step)


class _Run:
    """State of one run: what remains to be done, and the results so far."""

    def __init__(self, options: KernelOptions, note: Note, cases: Mapping[CasePlace, KernelCase]) -> None:
        self._options, self._note, self._cases = options, note, cases
        self._end_s = time.monotonic() + options.limit_s
        self._child: Child | Here = Child(_work) if options.device == "cuda" else Here(_work)
        self._without: dict[CasePlace, set[str]] = {place: set() for place in cases}
        self._head = result("kernels", [])  # calls git, which is too slow for every row
        self._rates: Rates | None = None
        self._baselines: dict[str, str] = {}
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self._skipped = [self._name(place) for place in cases]

    def warm_up(self) -> None:
        """Compile what the rows need, in several processes; failures appear again when the rows are measured."""
        options = self._options
        if options.device != "cuda" or not options.jobs:
            return
        # In random order, because neighbours would need much memory at the same time.
        places = random.Random(options.seed).sample(list(self._cases), len(self._cases))
        tasks = [self._task(place, rounds=0) for place in places]
        begin_s = time.monotonic()
        end_s = begin_s + _WARM_SHARE * options.limit_s
        outcomes = do_all(_work, tasks, options.jobs, limit_s=options.case_limit_s, end_s=end_s)
        num_done = sum(isinstance(outcome, Measured) for outcome in outcomes)
        self._note(f"{num_done} of {len(places)} rows are compiled after {time.monotonic() - begin_s:.0f} s")

    def measure(self) -> None:
        """Measure the rates first, then row after row."""
        if not isinstance(baselines := self._child.do("baselines", _RATES_LIMIT_S), Lost):
            self._baselines = baselines
        rates = self._child.do(self._options.device, _RATES_LIMIT_S)
        if isinstance(rates, Lost):
            self.failures.append({"kernel": "", "shape": "", "system": "rates", **_said(rates)})
            return
        self._rates = rates
        self._note(f"rates: {rates.as_json()}")
        for number, (place, case) in enumerate(self._cases.items()):
            if time.monotonic() >= self._end_s:
                self._note(f"{len(self._skipped)} rows are left out: the time is over")
                return
            row = self._row(place, case)
            self._skipped.remove(self._name(place))
            if row:
                self.rows.append(row)
            self._note(f"{number + 1} of {len(self._cases)}: {self._name(place)}: {row.get('ms', 'failed')} ms")
            self._write()

    def close(self) -> None:
        """End the child, and write the results."""
        self._child.close()
        self._write()

    def data(self) -> dict[str, Any]:
        """Result so far."""
        return {
            **self._head,
            "rates": self._rates.as_json() if self._rates else {},
            "baselines": self._baselines,
            "rounds": self._options.rounds,
            "failures": self.failures,
            "skipped": self._skipped,
            "rows": self.rows,
        }

    def _row(self, place: CasePlace, case: KernelCase) -> dict[str, Any]:
        """Measure a row, again if a system ends the measuring process."""
        assert self._rates is not None
        for _ in range(_MAX_TRIES):
            limit_s = max(1.0, min(self._options.case_limit_s, self._end_s - time.monotonic()))
            outcome = self._child.do(self._task(place, rounds=self._options.rounds), limit_s)
            if isinstance(outcome, Lost):
                step = outcome.step or PREPARE
                self.failures.append(self._named(place, {"system": step, **_said(outcome)}))
                names, is_broken = {step}, True
            else:
                self.failures += [self._named(place, failure) for failure in outcome.failures]
                names, is_broken = {failure["system"] for failure in outcome.failures}, outcome.is_broken
                if not is_broken:
                    return make_row(case, outcome, self._rates) if outcome.times_ms else {}
            if names & {PREPARE, "start"} or time.monotonic() >= self._end_s:
                return {}
            self._without[place] |= names
        return {}

    def _task(self, place: CasePlace, rounds: int) -> RowTask:
        device = self._options.device
        without = tuple(sorted(self._without[place]))
        return RowTask(
            place=place,
            device=device,
            rounds=rounds,
            measured_ms=MEASURED_MS[device],
            seed=self._options.seed,
            without=without,
        )

    def _name(self, place: CasePlace) -> str:
        return f"{self._cases[place].kernel} {self._cases[place].shape}"

    def _named(self, place: CasePlace, failure: dict[str, Any]) -> dict[str, Any]:
        case = self._cases[place]
        return {"kernel": case.kernel, "shape": case.shape, **failure}

    def _write(self) -> None:
        if self._options.out is not None:
            replace_file(self._options.out, json.dumps(self.data(), indent=1) + "\n")


def make_row(case: KernelCase, measured: Measured, rates: Rates) -> dict[str, Any]:
    """Make the row of a case from its measurements and its floor."""
    times_ms = {name: times for name, times in measured.times_ms.items() if times}
    floor_ms = rates.floor_ms(case)
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": case.shape,
        "num_bytes": case.num_bytes,
        "num_flops": case.num_flops,
        "num_sets": measured.num_sets,
        "floor_ms": float(f"{floor_ms:.4g}"),
        "launch_ms": float(f"{rates.launch_ms:.4g}"),
    }
    ours = times_ms.pop(OURS, [])
    row |= spread("ms", ours)
    if ours:
        row |= spread("fraction", [(floor_ms + rates.launch_ms) / ms for ms in ours])
        row |= spread("gbps", [case.num_bytes / ms / 1e6 for ms in ours])
        if case.num_flops:
            row |= spread("tflops", [case.num_flops / ms / 1e9 for ms in ours])
    for name, times in times_ms.items():
        row |= spread(f"{name}_ms", times)
        if ours:
            row |= spread(f"vs_{name}", [other / mine for other, mine in zip(times, ours, strict=True)])
    return row | {f"differs_{name}": value for name, value in measured.differs.items()}


def _said(lost: Lost) -> dict[str, Any]:
    said = "was not done in time" if lost.reason == "timeout" else f"ended its process with {lost.exit_code}"
    return {"error": lost.reason, "message": said}
