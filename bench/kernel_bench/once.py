"""Runs the kernels of small cases once each, for a checker that watches this process (`scripts/sanitize_kernels.py`).

    python -m baton.bench.kernel_bench.once --module rms_norm --max-mib 4

Prints a line for each system, but for what `torch.compile` makes: none of that is Baton's, and the processes that it
starts end the checker, or take all of its time. What fails is named, the rest still runs, and the program ends with 1.
No times here.
"""

import argparse
import sys

import torch

from baton.bench.kernel_bench.baselines import TORCH_COMPILE
from baton.bench.kernel_bench.case import ERRORS, KernelCase
from baton.bench.kernel_bench.collection import find_cases


def small_cases(module: str, max_bytes: int, max_cases: int) -> list[KernelCase]:
    """Cases of one module: those made for CPUs, then the smallest others."""
    cases = [case for place, case in find_cases().cases.items() if place.module == module]
    tiny = [case for case in cases if not case.only_gpu]
    rest = sorted(
        (case for case in cases if case.only_gpu and case.set_bytes <= max_bytes), key=lambda one: one.set_bytes
    )
    return (tiny + rest)[:max_cases]


def run_once(case: KernelCase, device: torch.device, seed: int = 0) -> list[str]:
    """Run the systems of a case on one set of buffers; return a line for each that failed."""
    torch.manual_seed(seed)
    failed: list[str] = []
    try:
        systems = case.prepare(device, 1)
    except ERRORS as error:
        return [f"{case.kernel} {case.shape}: prepare: {type(error).__name__}: {error}"]
    for name, calls in systems.items():
        if name == TORCH_COMPILE:
            continue
        try:
            calls[0]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except ERRORS as error:
            failed.append(f"{case.kernel} {case.shape}: {name}: {type(error).__name__}: {error}")
        else:
            print(f"ran {case.kernel} {case.shape}: {name}", flush=True)
    return failed


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--module", required=True, help="of bench/kernel_cases")
    parser.add_argument("--max-mib", type=float, default=4.0, help="of one set of buffers")
    parser.add_argument("--max-cases", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    failed: list[str] = []
    cases = small_cases(asked.module, int(asked.max_mib * (1 << 20)), asked.max_cases)
    with torch.inference_mode():
        for case in cases:
            failed += run_once(case, torch.device(asked.device))
    for line in failed:
        print(f"failed {line}", file=sys.stderr, flush=True)
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
