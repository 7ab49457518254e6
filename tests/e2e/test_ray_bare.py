"""`ray up` of hosts that have Python alone: the wheel is installed from its folder, served, and taken down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.tests.e2e.hosts import why_not

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_bare_hosts_are_brought_up_serve_and_go_down():
    why = why_not()
    if why:
        pytest.skip(why)
    subprocess.run([ROOT / "scripts" / "build_dist", sys.executable, "--wheelhouse"], check=True, timeout=600)
    command = [sys.executable, "-P", "-m", "baton.tests.e2e.ray_bare", str(ROOT / "dist")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["workers"] == ["prefill-0", "decode-0"]
    assert len(found["token_ids"]) == 48
    for host, (prefix, package) in found["installed"].items():
        assert prefix.endswith("/.baton_env") and package.startswith(prefix), host
