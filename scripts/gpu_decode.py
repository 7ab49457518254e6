"""Everything about decoding that needs GPUs, in one run: tests of the CUDA branches, then the tables.

    python3 scripts/gpu_decode.py --out OUT             # one GPU
    python3 scripts/gpu_decode.py --out OUT --gpus 2    # what needs two

It needs plain Python with torch, pytest and Baton's dependencies, no pip. Stages run one after the other, the most
important first, each with a limit of its own and none beyond the whole run's. A stage that fails, hangs or cannot start
never stops the next. After each one OUT holds its result: `stages.log` (the output of all, the end of each if it is
long), `summary.json` (what became of each), and one JSON file for each table. Ends with 0 if all went well, 4 if not.

It knows nothing of Baton but commands; a `--stages FILE` (JSON, a list of `Stage`s) runs others instead.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_LOG_BYTES = 200_000  # of one stage
TERM_GRACE_S = 5.0
NEEDS_TWO = "needs two GPUs"  # why a test is skipped on one
PYTEST = (
    "-m pytest -q -ra -c tests/gpu/pytest.ini --rootdir=. -p no:cacheprovider --timeout={timeout} -m gpu --durations=8"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One command.

    Attributes:
        name: of the stage.
        command: arguments of this interpreter.
        limit_s: it is killed after so long.
        table: file in OUT that its stdout becomes, if it is one JSON object; "" for none.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    table: str = ""


@dataclass(slots=True)
class DecodeOutcome:
    """What became of a stage.

    Attributes:
        name: its.
        status: "ok", "failed", "timeout" or "skipped" (no time was left).
        code: its exit code.
        took_s: how long it ran.
        last: the last lines of its stdout, unless that became a table.
        errors: the last lines of its stderr.
    """

    name: str
    status: str
    code: int | None = None
    took_s: float = 0.0
    last: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def tests(name: str, files: Sequence[str], limit_s: float, *more: str, timeout: int = 60) -> Stage:
    """A stage of GPU tests."""
    paths = tuple(f"tests/gpu/{file}.py" for file in files)
    return Stage(name, (*PYTEST.format(timeout=timeout).split(), *more, *paths), limit_s)


def stages_for(num_gpus: int) -> list[Stage]:
    """All of them, in order."""
    bench = ("-m", "baton.cluster", "bench", "decode", "--json", "--device", "cuda")
    if num_gpus == 1:
        named = [
            tests("async", ["test_async_decode_cuda"], 120),
            tests("sampling", ["test_sampling_cuda", "test_bench_decode_cuda"], 150),
            tests("graphs", ["test_graphs_cuda"], 180),
            Stage("table", (*bench, "--shape", "8b"), 240, "decode.json"),
            Stage("host", ("-m", "baton.bench.decode_bench.host", "--json"), 90, "decode_host.json"),
            tests("invariance", ["test_invariant_ranks_cuda", "test_model_cuda", "test_random_weights_cuda"], 120),
            tests("tokens", ["test_tokens_cuda"], 120),
            tests("handoff", ["test_tokens_handoff", "test_handoff"], 240),
            tests("ranks", ["test_rank_pools_cuda"], 150, timeout=120),
        ]
    else:
        tp_group = ("-m", "baton.bench.decode_bench.tp_group", "--json", "--ranks", str(num_gpus))
        named = [
            tests("tp_group", ["test_tp_group_cuda"], 240, timeout=120),
            tests("ranks", ["test_tp_group_handoff_cuda", "test_rank_pools_cuda"], 240, timeout=120),
            tests("graphs", ["test_graphs_cuda"], 120, "-k", "two_gpus"),
            Stage("TP group table", (*tp_group, "--shape", "8b"), 240, "decode_tp_group.json"),
            tests("devices", ["test_async_decode_cuda"], 90, "-k", "current_one"),
            tests("handoff", ["test_tokens_handoff", "test_handoff", "test_nvlink"], 240),
        ]
    return [Stage("machine", ("-c", _MACHINE), 60), *named, *others(named, num_gpus)]


def others(named: Sequence[Stage], num_gpus: int) -> list[Stage]:
    """One stage of all GPU tests that no stage names; with several GPUs, of those that need them."""
    seen = {argument for stage in named for argument in stage.command}
    paths = [path for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    if num_gpus > 1:
        paths = [path for path in paths if NEEDS_TWO in path.read_text()]
    rest = [path.stem for path in paths if f"tests/gpu/{path.name}" not in seen]
    return [tests("others", rest, 150)] if rest else []


_MACHINE = """
import os, sys, torch, triton
print("python", sys.version)
print("torch", torch.__version__, "cuda", torch.version.cuda, "triton", triton.__version__, "cores", os.cpu_count())
assert torch.cuda.is_available()
for index in range(torch.cuda.device_count()):
    print(index, torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index))
try:
    import llguidance
    print("llguidance", llguidance.__file__)
except ImportError as error:
    print("no grammars:", error)
import baton.engine.step.runner, baton.cluster.cli
"""


def run_all(stages: Sequence[Stage], out: Path, budget_s: float) -> list[DecodeOutcome]:
    """Run them; what each leaves is written as soon as it ends."""
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + budget_s
    outcomes: list[DecodeOutcome] = []
    for stage in stages:
        limit_s = min(stage.limit_s, end_s - time.monotonic())
        if limit_s < 1.0:
            outcomes.append(DecodeOutcome(stage.name, "skipped"))
        else:
            outcomes.append(run(stage, out, limit_s))
        write_summary(out, outcomes, stages)
        print(line_of(outcomes[-1]), flush=True)
    return outcomes


def run(stage: Stage, out: Path, limit_s: float) -> DecodeOutcome:
    """One stage; whatever it starts is gone when this returns."""
    begin_s = time.monotonic()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                [sys.executable, *stage.command],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            return _log(DecodeOutcome(stage.name, "failed", errors=[str(error)]), out, b"", b"")
        status = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = "timeout"
        _end(process)
        said, errors = _content(stdout), _content(stderr)
    code = process.returncode
    outcome = DecodeOutcome(
        stage.name, status or ("failed" if code else "ok"), code, round(time.monotonic() - begin_s, 1)
    )
    has_table = bool(stage.table) and _write_table(out / stage.table, said)
    if stage.table and not has_table and outcome.status == "ok":
        outcome.status = "failed"  # it ended well, and made no table
    outcome.last = [] if has_table else _last_lines(said)
    outcome.errors = _last_lines(errors)
    return _log(outcome, out, said, errors)


def environment() -> dict[str, str]:
    """Of every stage: the checkout is importable as `baton`, and NVLink multicast stays off."""
    link = ROOT / ".gpu" / "baton"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):
            link.symlink_to("..")
    paths = [str(link.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End its whole session: politely, so that pytest and its processes clean up, then for certain."""
    for how, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def _content(file: Any) -> bytes:
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(max(0, size - 16 * MAX_LOG_BYTES))
    content: bytes = file.read()
    return content


def _last_lines(content: bytes) -> list[str]:
    lines = [line for line in content.decode(errors="replace").splitlines() if line.strip()]
    return [line[:500] for line in lines[-8:]]


def _write_table(path: Path, said: bytes) -> bool:
    """The last line of stdout, if it is an object."""
    lines = said.decode(errors="replace").strip().splitlines()
    try:
        data = json.loads(lines[-1]) if lines else None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        return False
    path.write_text(json.dumps(data, indent=1) + "\n")
    return True


def _log(outcome: DecodeOutcome, out: Path, said: bytes, errors: bytes) -> DecodeOutcome:
    with (out / "stages.log").open("ab") as log:
        log.write(f"\n===== {line_of(outcome)}\n".encode())
        for name, content in (("stdout", said), ("stderr", errors)):
            if content:
                log.write(f"----- {name}\n".encode() + content[-MAX_LOG_BYTES:] + b"\n")
    return outcome


def write_summary(out: Path, outcomes: Sequence[DecodeOutcome], stages: Sequence[Stage]) -> None:
    """Replace the summary; one that is being read is never half written."""
    data = {"num_stages": len(stages), "stages": [asdict(outcome) for outcome in outcomes]}
    new = out / "summary.json.new"
    new.write_text(json.dumps(data, indent=1) + "\n")
    shutil.move(new, out / "summary.json")


def line_of(outcome: DecodeOutcome) -> str:
    """For a person."""
    last = (outcome.last or outcome.errors or [""])[-1]
    return f"{outcome.name}: {outcome.status} (code {outcome.code}, {outcome.took_s} s) {last[:200]}"


def read_stages(path: Path) -> list[Stage]:
    """Those of a file."""
    return [Stage(**{**values, "command": tuple(values["command"])}) for values in json.loads(path.read_text())]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes of it")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=570.0, help="of the whole run")
    parser.add_argument("--stages", type=Path, help="run these instead")
    parser.add_argument("--only", default="", help="comma-separated names")
    options = parser.parse_args()
    stages = read_stages(options.stages) if options.stages else stages_for(options.gpus)
    if options.only:
        stages = [stage for stage in stages if stage.name in options.only.split(",")]
    outcomes = run_all(stages, options.out, options.budget_s)
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 4


if __name__ == "__main__":
    sys.exit(main())
