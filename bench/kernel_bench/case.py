"""One row of `baton bench kernels`, said as data: what runs, what it must move and compute, what it is held against.

Every system is a list of calls, one for each of several sets of buffers, all captured into one CUDA graph: so a launch
costs what it costs in a decode step, and no set is still in the L2 cache when its turn comes again.
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from baton.core.errors import BatonError

ERRORS = (
    BatonError,
    TritonError,
    RuntimeError,  # torch's own, of memory and of devices too
    ValueError,
    TypeError,
    AssertionError,
    LookupError,
    AttributeError,
    ArithmeticError,
    ImportError,
    SyntaxError,
    OSError,
    subprocess.SubprocessError,
)
MAX_MESSAGE_LEN = 600


def failure_of(error: BaseException) -> dict[str, Any]:
    """Its type and the beginning of what it says."""
    return {"error": type(error).__name__, "message": str(error)[:MAX_MESSAGE_LEN]}


Call = Callable[[], object]
Systems = Mapping[str, Sequence[Call]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel at a shape.

    Attributes:
        kernel: name of the public function.
        shape: in words, "M=16 N=24576 K=4096".
        num_bytes: that must be read and written, at least.
        num_flops: that must be computed; 0 where bytes decide.
        flops_dtype: "bf16" or "fp8", the rate that counts.
        is_read: whether almost all bytes are read, so that the floor is of reading and not of copying.
        set_bytes: of one set of buffers, so that enough sets are made to exceed the L2 cache twice.
        prepare: (device, number of sets) -> the systems: "ours", other forms of ours ("swap_off", "invariant"), and
            baselines ("torch", "fa3", ...). A baseline that is not importable is absent; one that fails is an error.
        only_gpu: left out on a CPU, where the bench itself is tried on what remains.
    """

    kernel: str
    shape: str
    num_bytes: int
    num_flops: int = 0
    flops_dtype: str = "bf16"
    is_read: bool = False
    set_bytes: int
    prepare: Callable[[torch.device, int], Systems]
    only_gpu: bool = True


def _none_may(_options: Mapping[str, object]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPoint:
    """A row of the table of tuned configurations (`kernels.tuning`) that is to be found.

    Attributes:
        kernel: as `kernels.tuning.find` is asked for it.
        shape: as it is asked.
        size: as it is asked.
        candidates: options to choose from, each a row as it would be committed.
        set_bytes: as of a `KernelCase`.
        prepare: (device, number of sets, options) -> calls, one for each set.
        may_spill: candidates whose code keeps registers in memory by design, where that costs nothing.
    """

    kernel: str
    shape: str
    size: int
    candidates: Sequence[Mapping[str, object]]
    set_bytes: int
    prepare: Callable[[torch.device, int, Mapping[str, object]], Sequence[Call]]
    may_spill: Callable[[Mapping[str, object]], bool] = _none_may
