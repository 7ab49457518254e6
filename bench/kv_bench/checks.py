"""What the hand-off promises, compared with the rows of one run. A promise whose rows are missing is left out.

Limits are ratios between systems of the same run, so they hold or fail on any machine.
"""

from collections.abc import Callable, Iterator
from typing import Any

from baton.core.kv_transports import KV_TRANSPORTS

Row = dict[str, Any]
Check = dict[str, Any]
Find = Callable[..., Row | None]
OWN = tuple(name for name, declared in KV_TRANSPORTS.items() if declared.memory != "GPU")
PEERS = ("nixl-tcp", "mooncake-tcp")
ONE_LAYER_MORE = 1.2
GRACE_MS = 0.5


def checks(rows: list[Row]) -> list[Check]:
    """Each promise with its value, limit and whether it holds."""

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
