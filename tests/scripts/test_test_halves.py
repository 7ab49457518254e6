"""Both halves run, each folder of tests in one of them, and neither's failure is lost."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test_halves"


@pytest.fixture
def halves(tmp_path):
    """Runs the script with a stand-in for pytest that notes its arguments, and fails in one half if told to."""
    noted = tmp_path / "noted"
    stub = tmp_path / "pytest"
    stub.write_text(
        f'#!/bin/sh\necho "$*" >>{noted}\nhalf=first\nfor a; do [ "$a" = tests ] && half=second; done\n'
        'echo "this is the $half"\n[ "$half" != "$FAILING" ]\n'
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
        return done, sorted(noted.read_text().splitlines())

    return run


def test_every_test_is_in_one_half(halves):
    done, (second, first) = halves()  # in the order of the alphabet
    assert done.returncode == 0, done.stderr
    assert first.startswith("-q -m fast and not gpu tests/")
    waiting = first.removeprefix("-q -m fast and not gpu ").split()
    assert second.split()[6:] == ["tests", *(f"--ignore={path}" for path in waiting)]
    assert all((SCRIPT.parents[1] / path).exists() for path in waiting)
    assert "this is the first\nthis is the second\n" == done.stdout


@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_half_that_fails_fails_the_whole(halves, failing):
    done, _ = halves(failing)
    assert done.returncode == 1
    assert f"this is the {failing}" in done.stdout
