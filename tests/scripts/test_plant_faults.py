"""The list of planted faults follows the code: each can be planted, and names tests that exist."""

import dataclasses
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
