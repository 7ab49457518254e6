"""A new version is installed under a running deployment, and its workers are brought to it, for real.

The installation is a copy of the checkout; the new version differs by a comment.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.client import BatonClient
from baton.core.build import name_of
from baton.tests.runbook.conftest import answer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installation(tmp_path):
    package = tmp_path / "site" / "baton"
    package.mkdir(parents=True)
    for part in sorted(path.parent for path in ROOT.glob("*/__init__.py")):
        shutil.copytree(part, package / part.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "cluster.yaml"):
        shutil.copy(ROOT / name, package / name)
    return package


@pytest.fixture
def baton(installation):
    # Python trusts a compiled file whose source is as old as it says; a comment within a second would go unseen.
    environment = os.environ | {"PYTHONPATH": str(installation.parent), "PYTHONDONTWRITEBYTECODE": "1"}

    def command(*arguments):
        return [sys.executable, "-P", "-m", "baton.cluster", *arguments], environment

    return command


@pytest.fixture
def address(baton):
    flags = {"prefill": 2, "decode": 2, "dtype": "float64", "grpc-port": 0, "kv-memory-mib": 64, "start-timeout-s": 240}
    command, environment = baton("serve", "--json", *(part for flag in flags.items() for part in words(*flag)))
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        process.wait(60)


def words(name, value):
    return f"--{name}", str(value)


def test_workers_are_brought_to_the_new_version_one_by_one(installation, baton, address):
    def upgrade(*arguments):
        command, environment = baton("runbook", "rolling-upgrade", "--address", address, "--json", *arguments)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        return done.returncode, json.loads(done.stdout), done.stderr

    def states():
        return {worker.state.worker_id: (worker.state.epoch, worker.state.build) for worker in client.status().workers}

    with BatonClient(address) as client:
        want, before, old = answer(client)[0], states(), name_of(installation)
        assert {build for _, build in before.values()} == {old}
        code, data, _ = upgrade()
        assert (code, data["changed"]) == (0, False), "all run this build already"
        with (installation / "model" / "__init__.py").open("a") as file:
            file.write("# Another version.\n")
        new = name_of(installation)
        assert new != old
        code, data, stderr = upgrade("--dry-run")
        assert code == 0, stderr
        assert states() == before
        code, data, stderr = upgrade("--build", "0" * 12)
        assert code == 4, "no node has that one"
        touched = {name for name, state in states().items() if state != before[name]}
        assert touched == {"decode-0"}, "the canary alone"
        code, data, stderr = upgrade()
        assert code == 0, stderr
        assert data["found"]["canary_workers"] == ["decode-1", "prefill-0"], "decode-0 runs it already"
        assert {build for _, build in states().values()} == {new}
        assert {tuple(answer(client)[0]) for _ in range(4)} == {tuple(want)}
        after = states()
        assert upgrade()[0] == 0
        assert states() == after
