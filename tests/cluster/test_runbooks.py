"""`baton runbook`: every runbook is found, listed, has its page, and answers for itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster.cli import RUNBOOKS, runbook_names

pytestmark = pytest.mark.fast

INDEX = Path(__file__).parents[2] / "docs" / "runbooks.md"


def baton(*arguments):
    command = [sys.executable, "-P", "-m", "baton.cluster", "runbook", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_all_are_listed():
    done = baton("--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)["runbooks"]
    assert [item["name"] for item in listed] == runbook_names()
    assert all(item["about"].endswith(".") for item in listed)


@pytest.mark.parametrize("name", runbook_names())
def test_each_is_executable_and_has_a_page_that_the_docs_name(name):
    script = RUNBOOKS / f"{name.replace('-', '_')}.py"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env -S python3 -P\n")
    page = script.with_suffix(".md").read_text()
    assert page.startswith(f"# {name}\n")
    assert f"baton runbook {name}" in page
    for part in ("**When.**", "**When it fails.**", "**Back.**"):
        assert part in page
    assert f"[{name}](../runbook/{script.stem}.md)" in INDEX.read_text()


def test_no_page_is_without_its_runbook():
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {name.replace("-", "_") for name in runbook_names()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nothing-of-the-kind"], 2),
        (["--bogus"], 2),
        (["kv-leak-audit", "--bogus"], 2),
        (["kv-leak-audit", "--address", "127.0.0.1:1"], 3),
    ],
)
def test_exit_codes_pass_through_with_one_object(arguments, code):
    done = baton(*arguments, "--json")
    assert done.returncode == code, done.stderr
    data = json.loads(done.stdout)
    assert data["exit_code"] == code
    assert data["next"]


@pytest.mark.long
def test_the_flags_of_a_runbook_are_its_own():
    done = baton("drain-node", "--help")
    assert done.returncode == 0
    assert "--undo" in done.stdout
    assert "--dry-run" in done.stdout
