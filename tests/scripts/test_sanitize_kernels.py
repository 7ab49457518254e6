"""What is made of a memory checker's output, with a checker that only pretends; and what is given to it to run."""

import json
import subprocess
import sys

import pytest
import torch

from baton.bench.kernel_bench import once as kernel_once
from baton.bench.kernel_bench.baselines import TORCH_COMPILE
from baton.bench.kernel_bench.case import KernelCase
from baton.bench.kernel_bench.collection import CasePlace
from baton.scripts.sanitize_kernels import ROOT, check, commands, find_tool, judge

pytestmark = pytest.mark.fast

CLEAN = "ran one\n========= ERROR SUMMARY: 0 errors\n"
WRONG = "ran one\n========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 2 errors\n"
RACE = "ran one\nran two\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("code", "text", "status", "num_found", "num_run"),
    [
        (0, CLEAN, "clean", 0, 1),
        (0, "3 passed in 2 s\n========= ERROR SUMMARY: 0 errors\n", "clean", 0, 3),
        (86, WRONG, "found", 2, 1),
        (0, WRONG, "found", 2, 1),
        (86, RACE, "found", 3, 2),
        (1, "failed x: RuntimeError\n" + CLEAN, "failed", 0, 1),
        (0, "========= ERROR SUMMARY: 0 errors\n", "failed", 0, 0),  # nothing ran: nothing is shown
        (0, "ran one\n", "failed", 0, 1),  # no word of the checker
        (-11, "", "failed", 0, 0),
        (None, "ran one\n", "timeout", 0, 1),
    ],
)
def test_how_a_run_is_judged(code, text, status, num_found, num_run):
    found = judge("memcheck", "gemm", code, text, 1.0)
    assert (found.status, found.num_found, found.num_run) == (status, num_found, num_run)


def pretend(folder, body):
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\nimport subprocess, sys\n{body}\n")
    tool.chmod(0o755)
    return tool


@pytest.mark.long
def test_programs_run_under_the_checker_within_their_limit(tmp_path):
    body = (
        "rest = sys.argv[sys.argv.index(sys.executable):]\n"
        "assert sys.argv[1:3] == ['--tool', 'memcheck']\n"
        "code = subprocess.run(rest).returncode\nprint('========= ERROR SUMMARY: 0 errors')\nsys.exit(code)"
    )
    pretend(tmp_path, body.replace("sys.executable", repr(sys.executable)))
    tool = find_tool(tmp_path)
    code = "import os; assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'; print('ran it')"
    assert check(tool, "memcheck", "good", ("-c", code), 60, tmp_path).status == "clean"
    assert (tmp_path / "memcheck-good.log").read_text().startswith("ran it")
    assert check(tool, "memcheck", "bad", ("-c", "raise SystemExit(3)"), 60, tmp_path).status == "failed"
    slow = check(
        tool, "memcheck", "slow", ("-c", "print('ran', flush=True); import time; time.sleep(600)"), 1.1, tmp_path
    )
    assert slow.status == "timeout"
    assert check(tool, "memcheck", "late", ("-c", ""), 0.5, tmp_path).status == "skipped"


def test_without_the_tool_it_says_so(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "sanitize_kernels.py"), "--out", str(tmp_path)]
    done = subprocess.run([*command, "--tool-dir", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "compute-sanitizer" in done.stderr


def test_every_module_is_checked():
    found = commands([], 4.0, with_tests=True)
    assert found["kv_scatter"][:4] == ["-m", "baton.bench.kernel_bench.once", "--module", "kv_scatter"]
    assert list(commands(["kv_scatter"], 4.0, with_tests=False)) == ["kv_scatter"]
    json.dumps(found)


def test_small_cases_run_once(monkeypatch, capsys):
    def make(shape, set_bytes, only_gpu, systems):
        return KernelCase(
            kernel="k", shape=shape, num_bytes=1, set_bytes=set_bytes, only_gpu=only_gpu, prepare=lambda *_: systems
        )

    def bad():
        raise RuntimeError("no")

    good = {"ours": [lambda: 1, bad], TORCH_COMPILE: [bad]}
    listed = [make("big", 1 << 30, True, good), make("mid", 200, True, good), make("tiny", 900, False, {"x": [bad]})]
    found = type("Found", (), {"cases": {CasePlace("m", index): case for index, case in enumerate(listed)}})
    monkeypatch.setattr(kernel_once, "find_cases", lambda: found)
    cases = kernel_once.small_cases("m", 1000, 6)
    assert [case.shape for case in cases] == ["tiny", "mid"]
    failed = [line for case in cases for line in kernel_once.run_once(case, torch.device("cpu"))]
    assert failed == ["k tiny: x: RuntimeError: no"]
    assert capsys.readouterr().out == "ran k mid: ours\n"
    monkeypatch.setattr(sys, "argv", ["x", "--module", "m", "--device", "cpu"])
    assert kernel_once.main() == 1
