"""Plant each fault of tests/mutations/faults.toml in a copy of the tree, and see whether its tests notice.

    python scripts/plant_faults.py [--only PART] [--out FILE]

A fault is a place in the code where the text `old` is replaced by `new`. The tests named beside it are run, up to
the first that fails. A fault that none notices fails the command, as does a text that is not there exactly once: then
the code has moved on, and the fault is to be written anew.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "mutations" / "faults.toml"
LIMIT_S = 300
INTERNAL_ERROR = 3  # pytest's exit status
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)


@dataclass(frozen=True, slots=True)
class Fault:
    """One of the list.

    Attributes:
        name: what it does, in a sentence.
        kind: of promise.
        file: that it is planted in.
        old: text, which is there once.
        new: text that takes its place.
        tests: that notice it, as pytest takes them.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(path: Path = FAULTS) -> list[Fault]:
    """The faults of a list."""
    rows = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def problem_of(fault: Fault, root: Path = ROOT) -> str:
    """Why a fault cannot be planted; empty if it can."""
    path = root / fault.file
    if not path.is_file():
        return f"{fault.file} is not there"
    count = path.read_text().count(fault.old)
    return "" if count == 1 else f"its text is {count} times in {fault.file}"


def copy_tree(target: Path) -> None:
    """What git tracks, as it lies here, and the environment."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """With the fault in a copy of the tree."""
    path = root / fault.file
    before = path.read_text()
    path.write_text(before.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(before)


def noticed_by(fault: Fault, root: Path) -> str:
    """The test that fails with the fault planted; empty if all pass."""
    # Its sources change within a second and keep their size: Python must not trust what it compiled.
    environment = os.environ | {
        "PYTHONPATH": str(root.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BATON_TEST_PROFILE": "unshrunk",
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-x",
        "--timeout=100",
        "-p",
        "no:cacheprovider",
        *fault.tests,
    ]
    with planted(fault, root):
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    found = re.findall(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - |$)", done.stdout, re.MULTILINE)
    if not found and done.returncode == INTERNAL_ERROR and "from pytest-timeout" in done.stdout:
        return f"{fault.tests[0]} (its time limit)"  # which may end pytest's own code, too
    if done.returncode in CRASHES:
        return f"{fault.tests[0]} (the process crashes)"  # as when one of several ranks in it goes another way
    if done.returncode not in (0, 1) or (done.returncode == 1 and not found):
        raise SystemExit(f"{fault.name}: the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return found[0] if found else ""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of faults in whose name or kind this occurs")
    parser.add_argument("--out", type=Path, help="a table of them")
    options = parser.parse_args()
    faults = [fault for fault in read() if options.only in fault.name or options.only in fault.kind]
    problems = [f"{fault.name}: {problem_of(fault)}" for fault in faults if problem_of(fault)]
    if problems:
        raise SystemExit("\n".join(problems))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "baton"
        copy_tree(root)
        for fault in faults:
            begin_s = time.monotonic()
            test = noticed_by(fault, root)
            rows.append({"fault": fault.name, "kind": fault.kind, "file": fault.file, "caught_by": test or None})
            print(f"{time.monotonic() - begin_s:5.1f} s  {fault.name}: {test or 'NOT CAUGHT'}", flush=True)
    if options.out:
        about = "Each fault was planted by itself and the tests that are to notice it run until one failed"
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    num_caught = sum(row["caught_by"] is not None for row in rows)
    print(f"{num_caught} of {len(rows)} caught")
    sys.exit(num_caught != len(rows))


if __name__ == "__main__":
    main()
