"""The script runs where no GPU is, and compares two trees, if they are one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import baton

ROOT = Path(baton.__file__).resolve().parent
FUNCTIONS = {
    "rms_norm_fused", "silu_mul_fused", "qk_norm_rope_write", "attention_decode", "attention_prefill", "linear_fp8",
    "select_topk", "experts_grouped", "delta_layer",
}  # fmt: skip


@pytest.mark.slow
def test_every_function_of_a_layer_has_a_row():
    namespace = os.environ.get("PYTHONPATH") or str(ROOT.parent)
    command = [sys.executable, "-P", str(ROOT / "scripts" / "kernel_host_time.py"), "--json", "--rounds", "1"]
    command += ["--calls", "2", "--against", namespace]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    data = json.loads(text)
    assert {row["function"] for row in data["rows"]} - {"scaled_mm alone"} == FUNCTIONS
    for row in data["rows"]:
        assert row["after_us"] > 0
        assert row["ratio"] == pytest.approx(row["after_us"] / row["before_us"], abs=1e-3)
