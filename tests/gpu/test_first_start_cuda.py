"""On a GPU with an empty cache: all that an engine launches is compiled ahead, and the next start compiles nothing."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
LIMIT_S = 600


def started(folder, shape, num_layers):
    command = [sys.executable, "-P", "-m", "baton.tests.gpu.first_start", shape, str(num_layers)]
    text = subprocess.run(
        command,
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    ).stdout
    found = json.loads(text.splitlines()[-1])
    print(shape, found)
    return found


@pytest.mark.parametrize(("shape", "num_layers"), [("qwen3-8b", 3), ("qwen3.5-35b-a3b", 8)])
def test_a_first_start_compiles_nothing_as_it_launches(shape, num_layers, tmp_path):
    first = started(tmp_path, shape, num_layers)
    assert not first["compiled"], "what launches did not find"
    assert first["loaded"] > 60
    assert any(line.startswith("compiling ") for line in first["lines"])
    second = started(tmp_path, shape, num_layers)
    assert not second["compiled"]
    assert second["loaded"] == first["loaded"]
    assert not any(line.startswith("compiling ") for line in second["lines"])
