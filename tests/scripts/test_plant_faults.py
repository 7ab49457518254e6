"""The list of planted faults follows the code: each can be planted, and names tests that exist."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from baton.scripts import plant_faults

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parents[2]
FAULTS = plant_faults.read()


def test_faults_have_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted_and_its_tests_exist(fault):
    assert plant_faults.problem_of(fault) == ""
    assert fault.old != fault.new
    for test in fault.tests:
        path, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()


def test_a_text_that_is_not_there_once_is_a_problem(tmp_path):
    fault = dataclasses.replace(FAULTS[0], file="a.py", old="x = 1\n", new="x = 2\n")
    assert "not there" in plant_faults.problem_of(fault, tmp_path)
    path = tmp_path / "a.py"
    for text in ("x = 3\n", "x = 1\nx = 1\n"):
        path.write_text(text)
        assert "times" in plant_faults.problem_of(fault, tmp_path)
    path.write_text("x = 1\n")
    with plant_faults.planted(fault, tmp_path):
        assert path.read_text() == "x = 2\n"
    assert path.read_text() == "x = 1\n"


@pytest.mark.long
def test_cases_that_faults_name_are_collected():
    """A case whose name has changed would leave its fault unnoticed, since nothing runs."""
    named = sorted({test for fault in FAULTS for test in fault.tests if "[" in test})
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "-m", "", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = set(done.stdout.splitlines())
    assert [test for test in named if test not in collected] == []
