"""How much the KV writer slows a prefill step: the same step with and without pushes, alternating, in one process.

A step stands for a forward pass: each layer is many small matmuls that together take `layer_s` on one thread, so that
the interpreter is needed between them as in a model's layers. Whatever the writer's threads take of the interpreter,
the memory or the processors shows as a longer step.

T tokens, D hidden size.
"""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.bench.kv_bench.cell import CellFailed, open_cell
from baton.bench.kv_bench.options import KvOptions
from baton.bench.kv_bench.side import Side, StepPlan
from baton.bench.kv_systems.faces import Sender, TransferCell
from baton.bench.result import spread

OPS_PER_LAYER = 24
LAYER_S = 0.004
_HIDDEN_TD = (64, 512)
_CALIBRATION_OPS = 200


@dataclass(frozen=True, slots=True)
class PushStep:
    """One pair of steps.

    Attributes:
        off_s: time without pushes.
        on_s: time with pushes, until the writer has pushed everything.
        submit_s: time of `submit` for each layer.
    """

    off_s: float
    on_s: float
    submit_s: tuple[float, ...]


class StepLoad:
    """The computation of a layer."""

    def __init__(self, layer_s: float) -> None:
        torch.set_num_threads(1)
        self._hidden_TD = torch.randn(_HIDDEN_TD)
        self._weight_DD = torch.randn(_HIDDEN_TD[1], _HIDDEN_TD[1]) / _HIDDEN_TD[1] ** 0.5
        self._num_matmuls = 1
        self._layer(_CALIBRATION_OPS)
        start_s = time.perf_counter()
        self._layer(_CALIBRATION_OPS)
        matmul_s = (time.perf_counter() - start_s) / _CALIBRATION_OPS
        self._num_matmuls = max(1, round(layer_s / OPS_PER_LAYER / matmul_s))

    def layer(self) -> None:
        """Compute one layer."""
        self._layer(OPS_PER_LAYER)

    def _layer(self, num_ops: int) -> None:
        hidden_TD = self._hidden_TD
        for _ in range(num_ops):
            for _ in range(self._num_matmuls):
                hidden_TD = hidden_TD @ self._weight_DD
            hidden_TD = torch.nn.functional.rms_norm(hidden_TD, hidden_TD.shape[-1:])


def run_steps(side: Side, plan: StepPlan) -> list[PushStep]:
    """Alternate steps without and with pushes; which comes first alternates, too."""
    sender = side.sender
    assert sender is not None
    load = StepLoad(LAYER_S)
    num_layers = side.cell.workload.num_layers
    steps = []
    for number in range(plan.num_pairs):
        off_s = _without(load, num_layers) if number % 2 == 0 else 0.0
        sender.prepare(plan.first + number)
        on_s, submits = _with(load, sender, num_layers)
        sender.wait()
        steps.append(PushStep(off_s or _without(load, num_layers), on_s, submits))
    return steps


def _without(load: StepLoad, num_layers: int) -> float:
    start_s = time.perf_counter()
    for _ in range(num_layers):
        load.layer()
    return time.perf_counter() - start_s


def _with(load: StepLoad, sender: Sender, num_layers: int) -> tuple[float, tuple[float, ...]]:
    submits = []
    start_s = time.perf_counter()
    for layer in range(num_layers):
        load.layer()
        submit_s = time.perf_counter()
        sender.submit(layer)
        submits.append(time.perf_counter() - submit_s)
    sender.finish()
    return time.perf_counter() - start_s, tuple(submits)


def measure_steps(cell: TransferCell, options: KvOptions, turn: int) -> list[PushStep]:
    """One round of one cell.

    Raises:
        CellFailed: it could not be measured, or bytes were wrong.
    """
    step_s = 2.2 * LAYER_S * cell.workload.num_layers
    num_pairs = max(4, round(options.seconds * 4 / step_s))
    with open_cell(replace(cell, seed=options.seed + turn)) as pair:
        steps: list[PushStep] = pair.sender.ask("steps", StepPlan(first=0, num_pairs=num_pairs))
        pair.receiver.ask("collect", list(range(num_pairs)))
        pair.num_sent = num_pairs
        pair.check()
    if not steps:
        raise CellFailed("no step was measured")
    return steps


def step_ratio(steps: list[PushStep]) -> float:
    """Median time of a step with pushes, divided by that without."""
    return statistics.median(step.on_s for step in steps) / statistics.median(step.off_s for step in steps)


def as_step_row(cell: TransferCell, rounds: list[list[PushStep]]) -> dict[str, Any]:
    """Make the row of the result."""
    row: dict[str, Any] = {"what": "step", "system": cell.system, "workload": cell.workload.name}
    row |= {"gil_load": cell.gil_load, "digest": cell.digest}
    row |= spread("step_off_ms", [statistics.median(step.off_s for step in steps) * 1e3 for steps in rounds])
    row |= spread("step_on_ms", [statistics.median(step.on_s for step in steps) * 1e3 for steps in rounds])
    row |= spread("step_ratio", [step_ratio(steps) for steps in rounds])
    submits = [sorted(value * 1e6 for step in steps for value in step.submit_s) for steps in rounds]
    row |= spread("submit_us", [values[len(values) // 2] for values in submits])
    row |= spread("submit_p99_us", [values[int(0.99 * (len(values) - 1))] for values in submits])
    return row | {"num_rounds": len(rounds), "num_steps": sum(map(len, rounds))}
