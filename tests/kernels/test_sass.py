"""Every variant of every kernel keeps its promises when compiled for Hopper, and compiles for gfx942.

With the Triton that is installed, and with the older one that the machines with GPUs have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.kernels.variant import Variant
from baton.tests.kernels.sass import all_variants, broken_promises, waits_for_copies

pytestmark = pytest.mark.timeout(1800)
TABLE = Path(__file__).with_name("sass_table.json")
OLDER = "3.6.0"
UNREACHABLE = ("No matching distribution", "Connection", "Temporary failure", "timed out", "Could not find a version")


def run(*options, folder=None, limit_s=1000):
    """The program's object, with the packages of `folder` before all others."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "baton.tests.kernels.sass", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """A folder that holds the older Triton alone."""
    folder = tmp_path_factory.mktemp("triton")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--target", str(folder), f"triton=={OLDER}"], capture_output=True, text=True, timeout=600
    )
    if done.returncode and any(word in done.stderr for word in UNREACHABLE):
        pytest.skip(f"triton {OLDER} cannot be had from PyPI: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def facts_of(kernels):
    """Without what they were compiled from, which another line number changes."""
    return {name: {key: row[key] for key in row if key != "source"} for name, row in kernels.items()}


def agree(found):
    assert not found["broken"]
    assert facts_of(found["kernels"]) == facts_of(json.loads(TABLE.read_text())[found["triton"]])


@pytest.mark.parametrize(
    ("sass", "waits"),
    [
        ("LDGSTS.E.128 [R1], [R2] ;\nLDGDEPBAR ;\nDEPBAR.LE SB0, 0x0 ;", True),
        ("LDGSTS.E.128 [R1], [R2] ;\nARRIVES.LDGSTSBAR.64 [R3] ;", True),
        ("LDGSTS.E.128 [R1], [R2] ;\nDEPBAR.LE SB0, 0x0 ;", False),
        ("LDG.E R1, [R2] ;", True),
    ],
)
def test_copies_to_shared_memory_are_waited_for(sass, waits):
    """`cp.async.wait_group` waits for groups alone: what was never committed may land after it is read."""
    assert waits_for_copies(sass) == waits
    found = {"registers": 0, "shared_bytes": 0, **({} if waits else {"unwaited": True})}
    assert bool(broken_promises(Variant(name="", kernel=None, types={}, constants={}), found)) != waits


def test_for_hopper_every_variant_is_what_the_table_says():
    """Compiled is what has changed since the table was written (three minutes for all)."""
    agree(run("--changed"))


def test_no_variant_for_gfx942_launches_early():
    """Which is Hopper's alone, and does not link; that all compile there takes too long for each time."""
    variants = [variant for variant in all_variants() if variant.on_amd]
    assert variants
    assert not [variant.name for variant in variants if variant.constants.get("EARLY")]


@pytest.mark.slow
def test_all_compiled_again_are_what_the_table_says():
    agree(run())


@pytest.mark.slow
def test_every_variant_compiles_for_gfx942():
    assert run("--amd")["kernels"]


@pytest.mark.slow
def test_the_older_triton_makes_what_the_table_says(older):
    found = run(folder=older)
    assert found["triton"] == OLDER
    agree(found)


@pytest.mark.slow
def test_the_older_triton_compiles_every_variant_for_gfx942(older):
    found = run("--amd", folder=older)
    assert found["triton"] == OLDER
    assert found["kernels"]
