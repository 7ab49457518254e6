"""Programmatic dependent launch: kernels start while the previous one on the stream runs, and wait for its output.

A launch costs about a microsecond, as much as a norm of a few rows. Hopper can make programs resident before their
input is ready. Such a kernel waits for everything before it prior to its first access to memory (it may prefetch
weights into the cache), and then lets the next kernel start, which waits in turn; so at most one kernel is waiting. It
takes a launch option and two instructions; other kernels before or after it need to know nothing. Earlier GPUs, other
vendors' GPUs and the interpreter launch normally.

Kernels with many programs gain little, and each program pays for its wait: tuned tables say so by `early`.

A kernel may read before it waits what is older than the launch before, since that has waited for all before it: the
convolution and the recurrence of a gated delta net read what earlier steps left.

Verification goes further. Its scan begins when everything before it has finished, and lets the next kernel start at
once. The kernels that follow read, even before they wait, what the scan does not write. Two of them may be waiting
then. The last one waits for the one before it only, so each program of that one must wait before it ends, even if it
has nothing to do. Float8 GEMMs for Hopper, GEMMs of one or two rows and those of absorbed queries read the weight
before they wait, so a kernel that writes a weight must not let the next kernel start early.
"""

import functools
from typing import Any

import torch
from triton import knobs

_FIRST_MAJOR = 9


@functools.cache
def _has_it(device_index: int | None) -> bool:
    if knobs.runtime.interpret or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device_index)[0] >= _FIRST_MAJOR


def dependent_launch(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """Launch arguments for `device`: the kernel's constant `EARLY`, and the launch option where it exists."""
    if not wanted or device.type != "cuda" or not _has_it(device.index):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
