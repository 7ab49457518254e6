"""Device memory that split-K GEMMs need besides their operands: counters of finished splits.

Launches that share a workspace must run one after the other, so a workspace belongs to one stream.
"""

import functools
from typing import Final

import torch

from baton.kernels.arguments import require

MAX_TILES: Final = 16_384  # maximum tiles of a split-K launch; each has a counter


class GemmWorkspace:
    """Counters of finished splits, left at zero by every launch; for one stream, and made before its capture."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@functools.cache
def default_workspace(device: torch.device) -> GemmWorkspace:
    """Return the device's shared workspace, for callers on its compute stream that bring none.

    Raises:
        KernelArgumentInvalid: the first call happens during graph capture, so the memory would belong to that graph.
    """
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    require(not captured, "workspace", "must be made before a graph is captured: call once before")
    return GemmWorkspace(device)
