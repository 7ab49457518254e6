"""Every variant of every kernel keeps its promises when compiled for Hopper, and compiles for gfx942."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("sass_table.json")


def run(*options):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", "baton.tests.kernels.sass", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_for_hopper_every_variant_is_what_the_table_says():
    found = run()
    assert not found["broken"]
    assert found["kernels"] == json.loads(TABLE.read_text())[found["triton"]]


@pytest.mark.slow
def test_every_variant_compiles_for_gfx942():
    assert run("--amd")["kernels"]
