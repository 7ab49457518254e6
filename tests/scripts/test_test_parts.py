"""Every test file runs in one part or piece, whoever takes it, and no failure is lost."""

import os
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test_parts"
COMPUTING = ("tests/engine", "tests/kernels", "tests/model", "tests/e2e/test_async_equals_sync.py")
# Of each part and piece something that no other is asked for.
PARTS = {
    "waiting": "tests/worker",
    "rest": "tests",
    "kvtransfer": "tests/kvtransfer",
    "router": "tests/router",
    "kernels": "tests/kernels/test_attention.py",
    "late kernels": "tests/kernels/test_sass.py",
    "engine": "tests/engine/test_batch.py",
    "late engine": "tests/engine/test_verify.py",
    "model": "tests/model",
}


@pytest.fixture
def parts(tmp_path):
    """Runs the script with a stand-in for pytest that notes its arguments, and fails in one part if told to."""
    noted = tmp_path / "noted"
    stub = tmp_path / "pytest"
    stub.write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "${*@Q}" >>' + f"{noted}\n"
        'name=$4; for a; do [ "$a" = "$FAILING" ] && name=$a; done\n'
        'echo "this is $name"\n[ "$name" != "$FAILING" ]\n'
    )
    stub.chmod(0o755)

    def run(failing=""):
        done = subprocess.run(
            [SCRIPT, stub, "-q", "-m", "fast and not long and not gpu"],
            env={**os.environ, "FAILING": failing},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, [shlex.split(line) for line in noted.read_text().splitlines()]

    return run


def files_of(paths):
    """Test files that pytest would find; what is ignored is not among them."""
    ignored = [ROOT / path.removeprefix("--ignore=") for path in paths if path.startswith("--ignore=")]
    for path in (ROOT / path for path in paths if not path.startswith("--")):
        assert path.exists()
        for file in path.rglob("test_*.py") if path.is_dir() else [path]:
            if not any(file.is_relative_to(folder) for folder in ignored):
                yield file


def test_every_test_is_in_one_part(parts):
    done, noted = parts()
    assert done.returncode == 0, done.stderr
    assert len(noted) == len(PARTS)
    assert all(arguments[:3] == ["-q", "-m", "fast and not long and not gpu"] for arguments in noted)
    found = Counter(file for arguments in noted for file in files_of(arguments[3:]))
    assert found == Counter((ROOT / "tests").rglob("test_*.py"))
    said = done.stdout.splitlines()
    assert said[0] == "this is tests/bench"
    assert len(set(said)) == len(said) == len(PARTS)


def test_what_computes_is_apart_from_what_waits(parts):
    _, noted = parts()
    for arguments in noted:
        computes = {any(file.is_relative_to(ROOT / path) for path in COMPUTING) for file in files_of(arguments[3:])}
        assert len(computes) == 1


@pytest.mark.parametrize("failing", PARTS.values(), ids=PARTS)
def test_a_part_that_fails_fails_the_whole(parts, failing):
    done, noted = parts(failing)
    assert done.returncode == 1
    assert f"this is {failing}" in done.stdout
    assert len(noted) == len(PARTS)
