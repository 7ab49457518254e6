"""Kernels that begin while the one before them on the stream still runs, and wait inside for what it wrote.

A launch costs about a microsecond, as much as a norm of a few rows. Hopper can have programs resident before their
input is there: such a kernel waits for everything before it prior to its first access to memory (it may have weights
fetched to the cache), and then lets the next one in, which waits in turn; so never more than one stands waiting. All it
takes is an option of the launch and two instructions, and a kernel that knows nothing of it may come before or after.
Earlier GPUs, other vendors' and the interpreter do without.

Where programs are many, what is won is little, and each of them pays for its wait: tuned tables say so by `early`.

Verification goes further: its scan begins when all before it is over and lets the next in at once; and these look, even
before they wait, at what the scan does not write. Two may stand waiting there. The last of them waits for the one
before it alone; so each program of that one must wait before it ends, also if it has nothing to do. Float8 GEMMs for
Hopper, and GEMMs of one or two rows, read the weight before they wait: a kernel that writes one must not let the
next one in early.
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
    """Arguments of a launch on `device`: the kernel's constant `EARLY`, and the option where there is one."""
    if not wanted or device.type != "cuda" or not _has_it(device.index):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
