"""What GEMMs that are split among programs of a launch need beside their operands: counters of splits that are done.

Launches that share it must come one after the other: it belongs to a stream.
"""

import functools
from typing import Final

import torch

from baton.kernels.arguments import require

MAX_TILES: Final = 16_384  # of a launch with splits, each with a counter


class GemmWorkspace:
    """Counters of splits that have arrived; every launch leaves zeros. Of one stream, and made before its capture."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@functools.cache
def default_workspace(device: torch.device) -> GemmWorkspace:
    """The one of the stream that computes on a device, for callers that bring none.

    Raises:
        KernelArgumentInvalid: it is first asked for while a graph is captured, to which it would belong.
    """
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    require(not captured, "workspace", "must be made before a graph is captured: call once before")
    return GemmWorkspace(device)
