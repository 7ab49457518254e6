"""Measures what a device can do at most, in the same run as the kernels: bandwidths, matmul rates, an empty launch.

A floor is the larger of two times: the bytes at the bandwidth of their kind, and the operations at the rate of their
dtype.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl

from baton.bench.decode_bench.floor import copy_gbps
from baton.bench.kernel_bench.case import Call, KernelCase
from baton.bench.kernel_bench.processes import Step
from baton.bench.kernel_bench.timing import make_timer

_READ_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 128}
_MEASURED_MS = {"cuda": 20.0, "cpu": 1.0}
_NUM_ROUNDS = 5
_NUM_LAUNCHES = 128
_CPU_CACHE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device.

    Attributes:
        device: name of the device.
        copy_gbps: bytes read and written per nanosecond by a plain copy.
        read_gbps: bytes read per nanosecond by a sum over a large tensor.
        bf16_tflops: rate of a large matmul.
        fp8_tflops: rate of a large matmul with one scale per tensor; on a CPU that of bf16.
        launch_ms: time of an empty kernel within a CUDA graph; 0 on a CPU.
        touch_ms: time of a kernel that loads one number from the cache and stores it, the minimum of any kernel.
        cache_bytes: size of the last cache before memory.
    """

    device: str
    copy_gbps: float
    read_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    launch_ms: float
    touch_ms: float
    cache_bytes: int

    def floor_ms(self, case: KernelCase) -> float:
        """Least time of a case, without the launch."""
        gbps = self.read_gbps if case.is_read else self.copy_gbps
        tflops = {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops}[case.flops_dtype]
        return max(case.num_bytes / gbps / 1e6, case.num_flops / tflops / 1e9)

    def as_json(self) -> dict[str, Any]:
        """Return the rates, rounded."""
        return {
            key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in asdict(self).items()
        }


def measure_rates(device_name: str, step: Step) -> Rates:
    """Measure all rates; takes a few seconds on a GPU."""
    device = torch.device(device_name)
    step("rates")
    with torch.inference_mode():
        num_bytes = _READ_BYTES[device.type]
        memory = torch.ones(num_bytes // 4, device=device)
        read_ms = _median_ms([memory.amax], device)
        del memory
        size = _MATMUL_SIZE[device.type]
        num_flops = 2 * size**3
        left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        bf16_ms = _median_ms([lambda: torch.mm(left, right)], device)
        fp8_ms = _median_ms([_fp8_matmul(left, right)], device) if device.type == "cuda" else bf16_ms
        is_gpu = device.type == "cuda"
        launch_ms, touch_ms = (
            _median_ms([_launch(of, device)] * _NUM_LAUNCHES, device) if is_gpu else 0.0 for of in (_nothing, _touch)
        )
        return Rates(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            copy_gbps=copy_gbps(device),
            read_gbps=num_bytes / read_ms / 1e6,
            bf16_tflops=num_flops / bf16_ms / 1e9,
            fp8_tflops=num_flops / fp8_ms / 1e9,
            launch_ms=launch_ms,
            touch_ms=touch_ms,
            cache_bytes=cache_bytes(device),
        )


def cache_bytes(device: torch.device) -> int:
    """Size of a GPU's L2 cache; something small for a CPU, whose numbers are meaningless."""
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def num_sets(set_bytes: int, device: torch.device, max_sets: int) -> int:
    """Number of buffer sets that together are twice the cache and fit into 0.4 of the free memory."""
    wanted = math.ceil(2 * cache_bytes(device) / max(1, set_bytes))
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        wanted = min(wanted, int(0.4 * free_bytes) // max(1, set_bytes))
    return max(1, min(max_sets, wanted))


def _median_ms(calls: list[Call], device: torch.device) -> float:
    timer = make_timer(calls, device, _MEASURED_MS[device.type])
    return median(timer.measure_ms() for _ in range(_NUM_ROUNDS))


def _fp8_matmul(left: torch.Tensor, right: torch.Tensor) -> Call:
    one = torch.ones((), device=left.device)
    left_fp8, right_fp8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()  # column-major
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return lambda: multiply(left_fp8, right_fp8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _nothing(unused) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001  (Triton's language)
    pass


def _touch(memory) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tl.store(memory, tl.load(memory) + 1.0)


def _launch(of: Callable[..., None], device: torch.device) -> Call:
    kernel: Any = triton.jit(of)
    memory = torch.zeros(16, device=device)
    return lambda: kernel[(1,)](memory, num_warps=1)
