"""The result of every `baton bench WHAT`: one object with the machine, the versions, the commit and the rows.

Each number of a row is the median over rounds, with `_min` and `_max` beside it.
"""

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import baton

PACKAGES = ("numpy", "torch", "triton", "ray", "grpcio", "protobuf", "pyzmq", "crc32c", "aiohttp", "nixl", "nixl-cu13")
MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_GIT_LIMIT_S = 10


def result(what: str, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Make the result object."""
    head = {"bench": what, "hardware": hardware(), "versions": versions(), "commit": commit()}
    return {**head, **more, "rows": list(rows)}


def spread(name: str, values: Iterable[float | None], digits: int = 4) -> dict[str, float]:
    """Median, minimum and maximum of one number over the rounds; nothing if no round has it."""
    found = [value for value in values if value is not None]
    if not found:
        return {}
    numbers = {"": statistics.median(found), "_min": min(found), "_max": max(found)}
    return {name + suffix: float(f"{value:.{digits}g}") for suffix, value in numbers.items()}


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader never sees a partial one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def hardware() -> dict[str, Any]:
    """Processor, memory, devices."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "num_cores_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    return facts | ({"num_gpus": len(gpus)} if gpus else {})


def versions() -> dict[str, str]:
    """Versions of Python, Baton and the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for name in ("baton-pd", *PACKAGES, *MOONCAKE):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Commit of the running checkout, with `+` if it has changes; empty outside a checkout."""
    root = Path(baton.__file__).resolve().parent
    if not (root / ".git").exists():
        return ""
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_LIMIT_S)
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
