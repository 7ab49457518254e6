"""Per-thread state for launches of `kv_scatter` and `kv_digest` on one stream.

Nothing here waits for the stream: block ids travel to the device from pinned memory, in stream order. A thread uses one
stream for all its launches, so the memory that it frees is reused only behind them.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from baton.kernels.copies import to_device
from baton.kernels.kv.digest import PERIOD
from baton.kernels.kv.scatter import ScatterWorkspace, Tuning

MAX_KEPT_TABLES = 64
FIRST_REACH_LEN = 1 << 15
MANY_BYTES = 32 << 20
# Measured on two H200s: one layer of a prompt is bound by latency; 16 multiprocessors move it as fast as 64 do.
FEW, MANY = Tuning(num_programs=16), Tuning(num_programs=64)


def tuning_for(num_bytes: int) -> Tuning:
    """Return how to spread a launch that moves this many bytes."""
    return MANY if num_bytes >= MANY_BYTES else FEW


class DeviceStream:
    """State of one thread. Every call is made with the same stream current.

    Args:
        device: device of the launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: OrderedDict[int, tuple[Sequence[int], torch.Tensor]] = OrderedDict()
        self._workspace: ScatterWorkspace | None = None
        self._reach_len = 0

    def ids(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """Return block ids on the device; a table that was sent before is not sent again."""
        key = id(blocks)  # kept as long as the entry, so no other object has this id
        kept = self._tables.get(key)
        if kept is not None:
            self._tables.move_to_end(key)
            return kept[1]
        ids = self.send(torch.tensor(blocks, dtype=torch.int32))
        self._tables[key] = blocks, ids
        if len(self._tables) > MAX_KEPT_TABLES:
            self._tables.popitem(last=False)
        return ids

    def send(self, ids: torch.Tensor) -> torch.Tensor:
        """Copy ids to the device without waiting for it."""
        return to_device(ids, self._device)

    def workspace(self, end: int) -> ScatterWorkspace:
        """Return a workspace for digests of positions below `end`."""
        if self._workspace is None or end > self._reach_len:
            self._reach_len = max(FIRST_REACH_LEN, 2 * self._reach_len, -(-end // PERIOD) * PERIOD)
            self._workspace = ScatterWorkspace(self._device, self._reach_len)
        return self._workspace
