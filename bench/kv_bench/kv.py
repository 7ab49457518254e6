"""`baton bench kv`: systems x workloads x loads, in rounds.

In every round each cell is measured once, in random order, by fresh processes, so that a slow minute of the machine
affects all systems alike. Numbers are medians over rounds, with minimum and maximum beside them.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from baton.bench.kv_bench.cell import CellFailed, Effort, Sample, count_system_calls, measure, percentile
from baton.bench.kv_bench.options import KvOptions
from baton.bench.kv_bench.workloads import WORKLOADS
from baton.bench.kv_systems.faces import TransferCell
from baton.bench.kv_systems.registry import SYSTEMS
from baton.bench.processes import can_count_system_calls
from baton.bench.result import result, spread
from baton.core.kv_transports import KV_TRANSPORTS

Row = dict[str, Any]
Check = dict[str, Any]
Find = Callable[..., Row | None]
OWN = tuple(name for name, declared in KV_TRANSPORTS.items() if declared.memory != "GPU")
PEERS = ("nixl-tcp", "mooncake-tcp")
ONE_LAYER_MORE = 1.2
GRACE_MS = 0.5


def checks(rows: list[Row]) -> list[Check]:
    """Each promise with its value, its limit and whether it holds."""

    def find(system: str, workload: str, *, digest: bool | None = None, gil_load: str = "none") -> Row | None:
        return next(
            (
                row
                for row in rows
                if (row["system"], row["workload"], row["gil_load"]) == (system, workload, gil_load)
                and (digest is None or row.get("digest") is digest)
                and not row.get("faults")
                and "gbps" in row
            ),
            None,
        )

    steps = [row for row in rows if row.get("what") == "step"]
    return [*_rates(find), *_loaded(find), *_exposed(find), *_steps(steps)]


def _rates(find: Find) -> Iterator[Check]:
    ceiling = find("memcpy", "a")
    for digest, limit in ((False, 0.90), (True, 0.50)):
        yield from _ratio(f"shm{_with(digest)} to memcpy on a", find("shm", "a", digest=digest), ceiling, limit)
    for workload in ("a", "b"):
        for peer in PEERS:
            row = find("tcp", workload, digest=False)
            yield from _ratio(f"tcp to {peer} on {workload}", row, find(peer, workload), 2.5)
        row = find("grpc", workload, digest=False)
        yield from _ratio(f"grpc to grpc-plain on {workload}", row, find("grpc-plain", workload), 1.3)
        row = find("tcp", workload, digest=True)
        if row is not None and "cpu_s_per_gb" in row:
            yield _at_most(f"tcp +digest CPU s/GB on {workload}", row["cpu_s_per_gb"], 0.75)


def _loaded(find: Find) -> Iterator[Check]:
    for system in OWN:
        for workload in ("a", "b"):
            for digest in (False, True):
                inside = find(system, workload, digest=digest, gil_load="inside")
                outside = find(system, workload, digest=digest, gil_load="outside")
                name = f"{system}{_with(digest)} on {workload}: busy thread inside to outside"
                yield from _ratio(name, inside, outside, 0.9)


def _exposed(find: Find) -> Iterator[Check]:
    for system in ("shm", "tcp"):
        for workload in ("a", "b"):
            for digest in (False, True):
                row = find(system, workload, digest=digest)
                if row is not None and "exposed_p50_ms" in row:
                    limit = ONE_LAYER_MORE * row["layer_ms"] + GRACE_MS
                    yield _at_most(
                        f"{system}{_with(digest)} exposed p50 ms on {workload}", row["exposed_p50_ms"], limit
                    )


def _steps(rows: list[Row]) -> Iterator[Check]:
    for row in rows:
        if row["system"] in OWN:
            name = f"{row['system']}{_with(bool(row['digest']))} on {row['workload']}"
            yield _at_most(f"{name}: step with the writer to without", row["step_ratio"], 1.02)
            yield _at_most(f"{name}: submit us", row["submit_us"], 20.0)


def _ratio(name: str, row: Row | None, base: Row | None, limit: float) -> Iterator[Check]:
    if row is not None and base is not None:
        value = row["gbps"] / base["gbps"]
        yield {"name": name, "value": round(value, 3), "at_least": limit, "holds": value >= limit}


def _at_most(name: str, value: float, limit: float) -> Check:
    return {"name": name, "value": round(value, 3), "at_most": round(limit, 3), "holds": value <= limit}


def _with(digest: bool) -> str:
    return " +digest" if digest else ""


T = TypeVar("T")
Note = Callable[[str], None]
CALL_REQUESTS = {"a": 2, "b": 10, "c": 50}


@dataclass(slots=True)
class _Row(Generic[T]):
    """A cell and its results over the rounds."""

    cell: TransferCell
    found: list[T] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def bench_kv(options: KvOptions, note: Note) -> dict[str, Any]:
    """Measure; `note` is called for every cell. Cells that failed are in `failures`, and have no numbers."""
    for sentence in options.left_out:
        note(f"left out: {sentence}")
    if options.what == "step":
        return _bench_steps(options, note)
    effort = Effort(burst_s=options.seconds, paced_s=options.seconds)

    def measure_once(cell: TransferCell, turn: int) -> Sample:
        return measure(replace(cell, seed=options.seed + turn), effort)

    rows = _rounds(options, note, measure_once, lambda sample: f"{sample.gbps:.3g} GB/s")
    table = [as_row(row.cell, row.found) for row in rows if row.found]
    if options.count_calls and can_count_system_calls():
        _count_calls([row.cell for row in rows if row.found], table, note)
    return _result(options, rows, table)


def _bench_steps(options: KvOptions, note: Note) -> dict[str, Any]:
    from baton.bench.kv_bench.step import as_step_row, measure_steps, step_ratio  # with them comes torch

    def brief(steps: list[Any]) -> str:
        return f"{step_ratio(steps):.3f} of the step without"

    rows = _rounds(options, note, lambda cell, turn: measure_steps(cell, options, turn), brief)
    return _result(options, rows, [as_step_row(row.cell, row.found) for row in rows if row.found])


def _rounds(
    options: KvOptions, note: Note, once: Callable[[TransferCell, int], T], brief: Callable[[T], str]
) -> list[_Row[T]]:
    """Measure every cell once in every round, in random order."""
    rows: list[_Row[T]] = [_Row(cell) for cell in cells(options)]
    for turn in range(options.rounds):
        order = rows.copy()
        random.Random(options.seed + turn).shuffle(order)
        for number, row in enumerate(order, 1):
            name = f"round {turn + 1}/{options.rounds}, {number}/{len(order)}: {describe(row.cell)}"
            try:
                row.found.append(once(row.cell, turn))
            except CellFailed as error:
                row.failures.append(str(error))
                note(f"{name}: FAILED: {error}")
                continue
            note(f"{name}: {brief(row.found[-1])}")
    return rows


def _result(options: KvOptions, rows: Sequence[_Row[Any]], table: list[dict[str, Any]]) -> dict[str, Any]:
    failures = [{"cell": describe(row.cell), "problem": text} for row in rows for text in row.failures]
    more = {"rounds": options.rounds, "pace_ms": options.pace_s * 1e3, "left_out": list(options.left_out)}
    return result("kv", table, **more, checks=checks(table), failures=failures)


def cells(options: KvOptions) -> Iterator[TransferCell]:
    """Cells to be measured in one round."""
    for name, workload, load in itertools.product(options.systems, options.workloads, options.gil_loads):
        for digest in SYSTEMS[name].digests:
            if digest is not None and digest not in options.digests:
                continue
            yield TransferCell(
                system=name,
                workload=WORKLOADS[workload],
                seed=options.seed,
                digest=digest,
                gil_load=load,
                faults=options.faults,
                pace_s=0.0 if SYSTEMS[name].one_process else options.pace_s,
            )


def describe(cell: TransferCell) -> str:
    """Describe a cell in a few words."""
    digest = {None: "", True: " +digest", False: ""}[cell.digest]
    load = "" if cell.gil_load == "none" else f", busy thread {cell.gil_load}"
    return f"{cell.system}{digest} on {cell.workload.name}{load}"


def as_row(cell: TransferCell, samples: list[Sample]) -> dict[str, Any]:
    """Make the row of the result."""
    row: dict[str, Any] = {"system": cell.system, "workload": cell.workload.name, "gil_load": cell.gil_load}
    if cell.digest is not None:
        row["digest"] = cell.digest
    data_paths = sorted({sample.data_path for sample in samples})
    if data_paths != [""]:
        row["data_path"] = ",".join(data_paths)
    if cell.faults:
        row["faults"] = dict(cell.faults)
    row |= spread("gbps", [sample.gbps for sample in samples])
    paced = [sample.exposed_ms for sample in samples if sample.exposed_ms]
    row |= spread("exposed_p50_ms", [percentile(values, 50) for values in paced])
    row |= spread("exposed_p99_ms", [percentile(values, 99) for values in paced])
    row |= spread("cpu_s_per_gb", [sample.cpu_s_per_gb for sample in samples])
    row |= spread("sender_cpu_s_per_gb", [sample.sender_cpu_s_per_gb for sample in samples])
    row |= spread("submit_us", [sample.submit_us for sample in samples])
    row["layer_ms"] = float(f"{cell.workload.layer_bytes / row['gbps'] / 1e6:.4g}")
    row["num_rounds"] = len(samples)
    row["num_requests"] = sum(sample.num_requests for sample in samples)
    row["checked_bytes"] = sum(sample.checked_bytes for sample in samples)
    counts: dict[str, int] = {}
    for sample in samples:
        for name, count in sample.counts.items():
            counts[name] = counts.get(name, 0) + count
    return row | ({"counts": counts} if counts else {})


def _count_calls(measured: list[TransferCell], table: list[dict[str, Any]], note: Note) -> None:
    """Add system calls per layer to the rows without a busy thread."""
    for cell, line in zip(measured, table, strict=True):
        if cell.gil_load != "none" or cell.faults or SYSTEMS[cell.system].one_process:
            continue
        try:
            calls = count_system_calls(cell, CALL_REQUESTS[cell.workload.name])
        except CellFailed as error:
            note(f"system calls of {describe(cell)} were not counted: {error}")
            continue
        line["calls_per_layer"] = round(sum(sum(names.values()) for names in calls.values()), 2)
        line["calls_by_name"] = {
            side: {name: round(count, 2) for name, count in sorted(names.items(), key=lambda item: -item[1])[:6]}
            for side, names in calls.items()
        }
        note(f"{describe(cell)}: {line['calls_per_layer']} system calls a layer")
