#!/usr/bin/env python
"""What a call of each kernel function of a layer costs the host, in microseconds: checks, choices, and the launch.

    python scripts/kernel_host_time.py --json                    # this tree; the `baton` that is imported
    python scripts/kernel_host_time.py --json --against FOLDER   # and that of another tree, whose namespace is FOLDER

Without a GPU, tensors are small ones of the CPU, launches end where the driver would begin, and the library's GEMM
is one that does nothing: what is left is Python's part, that of Triton included. On a GPU calls are real, of shapes so
small that the device keeps up; then the library's own part, `scaled_mm alone`, is a row as well. With `--against` both
trees are measured in turns, in processes of their own, and each row has `before_us`, `after_us` and their ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

NUM_CALLS = 200
NUM_ROUNDS = 9
Call = Callable[[], Any]


class _StubDriver:
    """Of a Hopper GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def stub_launches() -> None:
    """Let Triton find, bind and call what it compiled, which is nothing."""

    def compile_nothing(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Any:
        kernel = object.__new__(CompiledKernel)
        kernel.module, kernel.function, kernel.packed_metadata = object(), 0, ()
        kernel.name, kernel.src = "nothing", None
        kernel._run = lambda *arguments: None
        self.device_caches[device][0][key] = kernel
        return kernel

    stub: Any = _StubDriver()
    driver.set_active(stub)
    setattr(JITFunction, "_do_compile", compile_nothing)  # noqa: B010  (of another type, as is meant)


def _stub_library() -> None:
    from baton.kernels.gemm import fp8 as gemm_fp8
    from baton.kernels.gemm import scaled_mm

    def gemm(a: torch.Tensor, b: torch.Tensor, *scales: Any, output_dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(len(a), b.shape[1], dtype=output_dtype)

    stubs: list[tuple[Any, str, Any]] = [
        (torch.nn.functional, "scaled_mm", gemm),
        (scaled_mm, "_has_blockwise", lambda device: True),
        (gemm_fp8, "rule", lambda *sizes, swap: None),  # on a CPU it would stand in for the library
    ]
    for module, name, stub in stubs:
        setattr(module, name, stub)


def calls(device: torch.device) -> Iterator[tuple[str, str, Call]]:
    """Function, what it is called with, and a call of it."""
    yield from _rows(device)
    yield from _attention(device)
    yield from _gemms(device)
    yield from _experts(device)
    yield from _delta_nets(device)


def _bfloat16(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def _rows(device: torch.device) -> Iterator[tuple[str, str, Call]]:
    from baton.kernels.implementation import Implementation
    from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool, Rotation, qk_norm_rope_write
    from baton.kernels.pointwise.rms_norm import rms_norm_fused
    from baton.kernels.pointwise.silu_mul import silu_mul_fused

    how = Implementation.TRITON
    x_TD, weight_D = _bfloat16(device, 64, 512), _bfloat16(device, 512)
    yield "rms_norm_fused", "64 x 512", lambda: rms_norm_fused(x_TD, weight_D, 1e-6, implementation=how)
    yield (
        "rms_norm_fused",
        "64 x 512, residual",
        lambda: rms_norm_fused(x_TD, weight_D, 1e-6, residual_TD=x_TD, implementation=how),
    )
    gate_up_TJ = _bfloat16(device, 64, 1024)
    yield "silu_mul_fused", "64 x 512", lambda: silu_mul_fused(gate_up_TJ, implementation=how)
    qkv_TX, head_D = _bfloat16(device, 64, 12 * 128), _bfloat16(device, 128)
    angles = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)
    slots_T = torch.arange(64, device=device)
    pool = _bfloat16(device, 8, 2, 2, 16, 128)
    yield (
        "qk_norm_rope_write",
        "64 tokens, 8/2/128",
        lambda: qk_norm_rope_write(
            qkv_TX,
            HeadNorms(query_D=head_D, key_D=head_D, eps=1e-6),
            Rotation(dim=128, tables=angles),
            slots_T,
            LayerPool(key_NHSD=pool[:, :, 0], value_NHSD=pool[:, :, 1]),
            num_query=8,
            implementation=how,
        ),
    )


def _attention(device: torch.device) -> Iterator[tuple[str, str, Call]]:
    from baton.kernels.attention.decode import attention_decode
    from baton.kernels.attention.prefill import attention_prefill
    from baton.kernels.implementation import Implementation

    how = Implementation.TRITON
    pool = _bfloat16(device, 64, 2, 2, 16, 128)
    key_NHSD, value_NHSD = pool[:, :, 0], pool[:, :, 1]
    tables_BM = torch.arange(64, device=device).view(4, 16)
    positions_BQ = torch.full((4, 2), 200, device=device)
    query_BQAD = _bfloat16(device, 4, 2, 8, 128)
    yield (
        "attention_decode",
        "4 x 2, 8/2/128",
        lambda: attention_decode(query_BQAD, key_NHSD, value_NHSD, tables_BM, positions_BQ, 256, implementation=how),
    )
    query_TAD = _bfloat16(device, 64, 8, 128)
    starts_E = torch.arange(0, 80, 16, device=device)
    contexts_B = torch.full((4,), 200, device=device)
    yield (
        "attention_prefill",
        "4 x 16, 8/2/128",
        lambda: attention_prefill(
            query_TAD, key_NHSD, value_NHSD, tables_BM, starts_E, contexts_B, max_query_len=16, implementation=how
        ),
    )


def _gemms(device: torch.device) -> Iterator[tuple[str, str, Call]]:
    from baton.kernels.gemm import scaled_mm
    from baton.kernels.gemm.fp8 import linear_fp8
    from baton.kernels.gemm.fp8_plan import GemmPlan
    from baton.kernels.gemm.fp8_weight import quantize_weight
    from baton.kernels.gemm.quantize_fp8 import quantize_fp8
    from baton.kernels.implementation import Implementation

    how = Implementation.TRITON
    weight = quantize_weight(_bfloat16(device, 512, 512))
    few_MK, many_MK = _bfloat16(device, 16, 512), _bfloat16(device, 256, 512)
    narrow = quantize_weight(_bfloat16(device, 128, 512))  # a CPU takes time for what it stores, a GPU's host does not
    apart = GemmPlan(fused=False)
    yield (
        "linear_fp8",
        "16 rows, quantized apart",
        lambda: linear_fp8(few_MK, weight, plan=apart, implementation=how),
    )
    yield (
        "linear_fp8",
        "16 rows, quantized in the GEMM",
        lambda: linear_fp8(few_MK, weight, plan=GemmPlan(fused=True), implementation=how),
    )
    if device.type == "cpu":
        _stub_library()
    yield "linear_fp8", "256 rows, the library", lambda: linear_fp8(many_MK, narrow, implementation=how)
    if device.type == "cuda":
        q_MK, scales_GM = quantize_fp8(many_MK)
        yield "scaled_mm alone", "256 rows", lambda: scaled_mm._gemm(q_MK, scales_GM, narrow)


def _experts(device: torch.device) -> Iterator[tuple[str, str, Call]]:
    from baton.kernels.implementation import Implementation
    from baton.kernels.moe.gemm import experts_grouped
    from baton.kernels.moe.moe import ExpertWeights
    from baton.kernels.moe.select_topk import select_topk

    how = Implementation.TRITON
    logits_TE = _bfloat16(device, 64, 16)
    yield "select_topk", "64 x 16, 4", lambda: select_topk(logits_TE, 4, renormalise=True, implementation=how)
    x_TD = _bfloat16(device, 64, 256)
    weights = ExpertWeights(gate_up_EJD=_bfloat16(device, 16, 256, 256), down_EDI=_bfloat16(device, 16, 256, 128))
    weight_TK = torch.full((64, 4), 0.25, device=device)
    expert_TK = torch.arange(4, device=device).repeat(64, 1)
    yield (
        "experts_grouped",
        "64 tokens, 4 of 16, 256 x 128",
        lambda: experts_grouped(x_TD, weight_TK, expert_TK, weights, implementation=how),
    )


def _delta_nets(device: torch.device) -> Iterator[tuple[str, str, Call]]:
    from baton.kernels.delta_net.delta_net import DeltaState
    from baton.kernels.delta_net.layer import DeltaKept, DeltaProjected, DeltaWeights, delta_layer
    from baton.kernels.delta_net.rows import StateRows
    from baton.kernels.delta_net.sizes import CONV_RING, RING, conv_len, state_len, tail_len
    from baton.kernels.implementation import Implementation

    sizes = 128, 128, 2
    x = DeltaProjected(
        query_THK=_bfloat16(device, 64, 2, 128),
        key_THK=_bfloat16(device, 64, 2, 128),
        value_THX=_bfloat16(device, 64, 2, 256),
        z_THGV=_bfloat16(device, 64, 2, 2, 128),
        b_THG=_bfloat16(device, 64, 2, 2),
        a_THG=_bfloat16(device, 64, 2, 2),
    )
    weights = DeltaWeights(
        conv_HWX=torch.ones(2, 4, conv_len(*sizes), device=device),
        a_log_HG=torch.ones(2, 2, device=device),
        dt_bias_HG=torch.ones(2, 2, device=device),
        norm_V=torch.ones(128, device=device),
        eps=1e-6,
    )
    state = DeltaState(
        torch.zeros(65, 2, RING, tail_len(*sizes), device=device), torch.zeros(65, 2, state_len(*sizes), device=device)
    )
    kept = DeltaKept(_bfloat16(device, 65, 2, CONV_RING, conv_len(*sizes)), state)
    slots_B = torch.arange(64, device=device)
    decode = StateRows(
        first_row=0,
        num_rows=1,
        positions_B=torch.full_like(slots_B, 20),
        counts_B=torch.ones_like(slots_B),
        slots_B=slots_B,
        scratch_slot=64,
    )
    chunk = StateRows(
        first_row=0,
        num_rows=64,
        positions_B=slots_B[:1],
        counts_B=torch.full_like(slots_B[:1], 64),
        slots_B=slots_B[:1],
        scratch_slot=64,
        start=0,
    )
    for name, rows in (("64 decode rows", decode), ("a chunk of 64", chunk)):
        call = partial(delta_layer, x, weights, kept, [rows], implementation=Implementation.TRITON)
        yield "delta_layer", name, call


def measure(call: Call, num_calls: int, device: torch.device) -> float:
    """Microseconds of one call, of this thread's own time, so that neighbours of a busy machine do not count."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin_ns = time.thread_time_ns()
    for _ in range(num_calls):
        call()
    return (time.thread_time_ns() - begin_ns) / num_calls / 1e3


@torch.inference_mode()
def once(num_calls: int) -> dict[str, float]:
    """The microseconds of every call, by function and shape; the first calls, which compile and decide, apart."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        stub_launches()
    found = {}
    for function, shape, call in calls(device):
        for _ in range(3):
            call()
        found[f"{function}|{shape}"] = min(measure(call, num_calls, device) for _ in range(3))
    return found


def _in_process(folder: str | None, num_calls: int) -> dict[str, float]:
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = folder
    command = [sys.executable, "-P", __file__, "--once", "--calls", str(num_calls)]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600).stdout
    found: dict[str, float] = json.loads(text)
    return found


def compare(against: str | None, num_rounds: int, num_calls: int) -> list[dict[str, Any]]:
    """Rows of all functions; medians over processes, which take turns if there are two trees."""
    after: list[dict[str, float]] = []
    before: list[dict[str, float]] = []
    for _ in range(num_rounds):
        after.append(_in_process(None, num_calls))
        if against is not None:
            before.append(_in_process(against, num_calls))
    rows: list[dict[str, Any]] = []
    for name in after[0]:
        function, _, shape = name.partition("|")
        row: dict[str, Any] = {"function": function, "shape": shape}
        row["after_us"] = round(statistics.median(found[name] for found in after), 2)
        if before:
            row["before_us"] = round(statistics.median(found[name] for found in before), 2)
            row["ratio"] = round(row["after_us"] / row["before_us"], 3)
        rows.append(row)
    return rows


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="FOLDER", help="PYTHONPATH of another tree, to compare with")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="processes of each tree")
    parser.add_argument("--calls", type=int, default=NUM_CALLS, help="calls that one figure is the mean of")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.calls)))
        return
    rows = compare(options.against, options.rounds, options.calls)
    if options.json:
        on = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, launches stubbed"
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        print(json.dumps({"bench": "kernel_host", "hardware": on, "versions": versions, "rows": rows}))
        return
    for row in rows:
        before = f" before {row['before_us']:7.2f}  ratio {row['ratio']:.2f}" if "ratio" in row else ""
        print(f"{row['function']:20} {row['shape']:36} {row['after_us']:7.2f} us{before}")


if __name__ == "__main__":
    main()
