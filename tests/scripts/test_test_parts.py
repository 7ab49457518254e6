"""All parts run, each folder of tests in one of them, and no part's failure is lost."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test_parts"


@pytest.fixture
def parts(tmp_path):
    """Runs the script with a stand-in for pytest that notes its arguments, and fails in one part if told to."""
    noted = tmp_path / "noted"
    stub = tmp_path / "pytest"
    stub.write_text(
        f'#!/bin/sh\necho "$*" >>{noted}\npart=waiting\n'
        'for a; do case "$a" in tests) part=rest;; tests/kernels) part=computing;; esac; done\n'
        'echo "this is $part"\n[ "$part" != "$FAILING" ]\n'
    )
    stub.chmod(0o755)

    def run(failing=""):
        done = subprocess.run(
            [SCRIPT, stub, "-q", "-m", "fast and not gpu"],
            env={**os.environ, "FAILING": failing},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, sorted(noted.read_text().splitlines(), key=len)

    return run


def test_every_test_is_in_one_part(parts):
    done, noted = parts()
    assert done.returncode == 0, done.stderr
    options = "-q -m fast and not gpu "
    assert all(line.startswith(options) for line in noted)
    computing, waiting, rest = (line.removeprefix(options).split() for line in noted)
    assert rest == ["tests", *(f"--ignore={path}" for path in (*waiting, *computing))]
    assert all((SCRIPT.parents[1] / path).is_dir() for path in (*waiting, *computing))
    assert done.stdout == "this is waiting\nthis is rest\nthis is computing\n"


@pytest.mark.parametrize("failing", ["waiting", "rest", "computing"])
def test_a_part_that_fails_fails_the_whole(parts, failing):
    done, _ = parts(failing)
    assert done.returncode == 1
    assert f"this is {failing}" in done.stdout
