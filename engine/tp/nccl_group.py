"""A tensor-parallel group over NCCL: how ranks with a GPU each reach each other (`model.parallel.Communicator`).

Operations are put on the current stream and nothing here waits for them, so none of them can fail in the caller's
hands: a rank that dies or hangs is found by whoever watches the step (`tp_group_link`), who ends the process. Bytes,
which are for starting only, go through the store. NVLink multicast stays off (`NCCL_NVLS_ENABLE=0`).
"""

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store

from baton.core.errors import WorkerLost
from baton.engine.tp.gloo_group import DEFAULT_TIMEOUT_S, lost_touch, nobody
from baton.kernels.gemm.inner_sum import tree_sum
from baton.kernels.tiles import wide_dtype


class NcclGroup:
    """One rank's end.

    Args:
        rank: of this end.
        size: of the group.
        store: where the ranks find each other.
        device: of this rank; no two ranks share one.
        timeout_s: of starting, and of bytes.
    """

    def __init__(
        self, rank: int, size: int, store: Store, device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        assert 0 <= rank < size
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the watch ends the process, not a watchdog
        self.rank = rank
        self.size = size
        self.num_operations = 0
        self.limit_s = timeout_s
        self.blame: Callable[[], WorkerLost | None] = nobody
        self._store = store
        self._timeout_s = timeout_s
        self._num_bytes_sent = 0
        nccl: Any = distributed.ProcessGroupNCCL  # its stub knows little of it
        options = nccl.Options()
        options._timeout = datetime.timedelta(days=1)
        with torch.cuda.device(device):
            self._group: Any = self._guarded(lambda: nccl(store, rank, size, options))
            self.all_sum(torch.ones(1, device=device))  # connects, so that no step has to, and no capture
            torch.cuda.synchronize(device)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, added as a balanced tree in rank order: the same bits at each rank."""
        wide = wide_dtype(x.dtype)
        return tree_sum([part.to(wide) for part in self.all_gather(x).unbind()]).to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, all of one shape and dtype, in rank order, [size, ...]; nothing crosses if it is empty."""
        x = x.contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            self._guarded(lambda: self._group._allgather_base(gathered, x).wait())
        return gathered

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's `values`, at every rank, in place; the others give a tensor of that shape and dtype, contiguous."""
        assert values.is_contiguous()
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._guarded(lambda: self._group.broadcast([values], options).wait())
        return values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, at every rank; for starting, not for steps."""
        return self._through_store({self.rank: data}, range(self.size))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, at every rank; for starting, not for steps."""
        return self._through_store({0: data} if self.rank == 0 else {}, [0])[0]

    def close(self) -> None:
        """Leave the group, whatever is under way."""
        self._group.abort()

    def _through_store(self, own: dict[int, bytes], ranks: Sequence[int]) -> list[bytes]:
        self._num_bytes_sent += 1
        for rank, data in own.items():
            self._store.set(f"bytes-{self._num_bytes_sent}-{rank}", data.hex())
        keys = [f"bytes-{self._num_bytes_sent}-{rank}" for rank in ranks]
        self._guarded(lambda: self._store.wait(keys, datetime.timedelta(seconds=self._timeout_s)))
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def _guarded(self, operation: Callable[[], Any]) -> Any:
        self.num_operations += 1
        try:
            return operation()
        except RuntimeError as error:  # all that torch.distributed raises
            raise lost_touch(self, error) from error
