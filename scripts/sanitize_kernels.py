"""Run every kernel on small shapes under NVIDIA's compute-sanitizer: accesses out of bounds, races in shared memory.

    python3 scripts/sanitize_kernels.py --out OUT                  # memcheck and racecheck of all modules
    python3 scripts/sanitize_kernels.py --out OUT --only gemm_fp8 --tools memcheck --tests

A process for each (tool, module of bench/kernel_cases), `--jobs` at a time; with `--tests` also for each tests/gpu file
of a kernel. Tensors get memory of their own (no caching allocator), so that a byte past one is found. OUT holds a log
for each process and `sanitize.json`, written anew after each. Ends with 0 if all are clean, 4 if not, 3 without it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
FOUND = 86  # the exit code that the checker is asked for
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


@dataclass(slots=True)
class SanitizerOutcome:
    """What became of one process.

    Attributes:
        tool: of the checker.
        what: a module or a file.
        status: "clean", "found" (by the checker), "failed" (the program itself), "timeout" or "skipped".
        num_found: errors or hazards that the checker counts.
        num_run: systems that ran, or tests that passed.
        took_s: how long it ran.
        lines: what was found first, or the last lines of a program that failed.
    """

    tool: str
    what: str
    status: str
    num_found: int = 0
    num_run: int = 0
    took_s: float = 0.0
    lines: list[str] = field(default_factory=list)


def find_tool(folder: Path | None) -> str | None:
    """The checker, in a folder, on the PATH or where CUDA has it."""
    places = [str(folder)] if folder else [os.environ.get("PATH", ""), *PLACES]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def commands(only: Sequence[str], max_mib: float, with_tests: bool) -> dict[str, list[str]]:
    """What is checked, by name."""
    modules = sorted((ROOT / "bench" / "kernel_cases").glob("*.py"))
    names = [path.stem for path in modules if "def cases(" in path.read_text()]  # others hold what is tuned alone
    names = [name for name in names if not only or name in only]
    found = {
        name: ["-m", "baton.bench.kernel_bench.once", "--module", name, "--max-mib", f"{max_mib:g}"] for name in names
    }
    if with_tests:
        paths = list((ROOT / "kernels").rglob("*_triton.py"))
        kernels = {name for path in paths for name in (path.stem.removesuffix("_triton"), path.parent.name)} | set(
            names
        )
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*_cuda.py")):
            stem = path.stem.removeprefix("test_").removesuffix("_cuda")
            if any(stem in kernel or kernel in stem for kernel in kernels) and (
                not only or any(n in stem for n in only)
            ):
                options = ["-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini", "--rootdir=.", "-p", "no:cacheprovider"]
                found[path.stem] = [*options, "-m", "gpu", f"tests/gpu/{path.name}"]
    return found


def check(tool_path: str, tool: str, what: str, command: Sequence[str], limit_s: float, out: Path) -> SanitizerOutcome:
    """Run one program under the checker."""
    if limit_s < 1.0:
        return SanitizerOutcome(tool, what, "skipped")
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all", "--print-limit", "20"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    log = out / f"{tool}-{what}.log"
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    begin_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [tool_path, *options, sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, 9)
            process.wait()
    return judge(tool, what, code, log.read_text(errors="replace"), time.monotonic() - begin_s)


def judge(tool: str, what: str, code: int | None, text: str, took_s: float) -> SanitizerOutcome:
    """Tell what the checker found from how the program ended; `code` is None after its time was over."""
    num_found = sum(int(one or other) for one, other in _SUMMARY.findall(text))
    num_run = text.count("\nran ") + text.startswith("ran ")
    num_run += sum(int(number) for number in re.findall(r"(\d+) passed", text))
    said = [line for line in text.splitlines() if line.strip()]
    if code is None:
        status, lines = "timeout", said[-5:]
    elif num_found or code == FOUND:
        status, lines = "found", [line for line in said if line.startswith("=========")][:30]
    elif code or not num_run or not _SUMMARY.search(text):
        status, lines = "failed", [line for line in said if line.startswith("failed ")][:5] + said[-8:]
    else:
        status, lines = "clean", []
    return SanitizerOutcome(tool, what, status, num_found, num_run, round(took_s, 1), [line[:300] for line in lines])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes of it")
    parser.add_argument("--only", default="", help="comma-separated: modules of bench/kernel_cases")
    parser.add_argument("--tools", default="memcheck,racecheck", help="comma-separated")
    parser.add_argument("--tests", action="store_true", help="tests/gpu files of the kernels, too")
    parser.add_argument("--tool-dir", type=Path, help="folder of compute-sanitizer")
    parser.add_argument("--max-mib", type=float, default=4.0, help="of one set of a case's buffers")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=200.0, help="of one process")
    parser.add_argument("--budget-s", type=float, default=540.0, help="of the whole run")
    asked = parser.parse_args()
    tool_path = find_tool(asked.tool_dir)
    if tool_path is None:
        print("sanitize_kernels: there is no compute-sanitizer; name its folder with --tool-dir", file=sys.stderr)
        return 3
    asked.out.mkdir(parents=True, exist_ok=True)
    only = [name for name in asked.only.split(",") if name]
    end_s = time.monotonic() + asked.budget_s
    outcomes: list[SanitizerOutcome] = []

    def one(tool: str, what: str, command: Sequence[str]) -> SanitizerOutcome:
        return check(tool_path, tool, what, command, min(asked.limit_s, end_s - time.monotonic()), asked.out)

    with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
        waiting = [
            pool.submit(one, tool, what, command)
            for tool in asked.tools.split(",")
            for what, command in commands(only, asked.max_mib, asked.tests).items()
        ]
        for done in as_completed(waiting):
            outcomes.append(outcome := done.result())
            print(
                f"{outcome.tool} {outcome.what}: {outcome.status} ({outcome.num_found} found, {outcome.took_s} s)",
                flush=True,
            )
            data = [asdict(outcome) for outcome in sorted(outcomes, key=lambda each: (each.tool, each.what))]
            (asked.out / "sanitize.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if outcomes and all(outcome.status == "clean" for outcome in outcomes) else 4


if __name__ == "__main__":
    sys.exit(main())
