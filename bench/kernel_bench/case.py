"""One row of `baton bench kernels` as data: what runs, what it must move and compute, and its baselines.

Every system is a list of calls, one for each of several sets of buffers, all captured into one CUDA graph. So a launch
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
    RuntimeError,  # torch's errors, including memory and device errors
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
    """Type of an error and the beginning of its message."""
    return {"error": type(error).__name__, "message": str(error)[:MAX_MESSAGE_LEN]}


Call = Callable[[], object]
Systems = Mapping[str, Sequence[Call]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel at a shape.

    Attributes:
        kernel: name of the public function.
        shape: shape in words, "M=16 N=24576 K=4096".
        num_bytes: minimum bytes that must be read and written.
        num_flops: operations that must be computed; 0 if bandwidth decides.
        flops_dtype: "bf16" or "fp8", the rate that applies.
        is_read: whether almost all bytes are read, so that the floor is the read rate, not the copy rate.
        set_bytes: bytes of one set of buffers, so that enough sets are made to exceed the L2 cache twice.
        prepare: (device, number of sets) -> the systems: "ours", other forms of ours ("swap_off", "invariant"), and
            baselines ("torch", "fa3", ...). A baseline that is not importable is absent; one that fails is an error.
        only_gpu: whether it is left out on a CPU, where the other cases test the bench itself.
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
    """A row of the tuned table (`kernels.tuning`) that is to be determined.

    Attributes:
        kernel: kernel, as given to `kernels.tuning.find`.
        shape: shape, as given to it.
        size: size, as given to it.
        candidates: options to choose from, each a row in the committed form.
        set_bytes: as in `KernelCase`.
        prepare: (device, number of sets, options) -> calls, one for each set.
        may_spill: which candidates may spill registers by design, where that costs nothing.
    """

    kernel: str
    shape: str
    size: int
    candidates: Sequence[Mapping[str, object]]
    set_bytes: int
    prepare: Callable[[torch.device, int, Mapping[str, object]], Sequence[Call]]
    may_spill: Callable[[Mapping[str, object]], bool] = _none_may
