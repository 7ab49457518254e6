"""The collectives of a TP group: gloo on CPUs, NCCL and shared memory on GPUs; sums are added in a fixed order."""

import contextlib
import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions, Store, TCPStore

from baton.core.errors import WorkerLost
from baton.kernels import rank_exchange
from baton.kernels.rank_exchange import SLOT_BYTES, UNIT_BYTES, Mailbox
from baton.model.parallel import Communicator

HOST = "127.0.0.1"  # all ranks of a worker are on one host
DEFAULT_TIMEOUT_S = 60.0

_THROUGH_MEMORY = f"ranks exchange up to {SLOT_BYTES >> 20} MiB through memory that they share, more by NCCL"

T = TypeVar("T")


class GlooGroup:
    """One rank's end of a gloo group.

    Args:
        rank: this rank.
        size: size of the group.
        store: rendezvous store; every rank's connects to rank 0's.
        timeout_s: of each operation, until `limit_s` is set.
    """

    def __init__(self, rank: int, size: int, store: Store, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        assert 0 <= rank < size
        self.how = ""
        self.rank = rank
        self.size = size
        self.num_operations = 0
        self.limit_s = timeout_s
        self.blame: Callable[[], WorkerLost | None] = nobody
        self._store = store
        gloo: Any = distributed.ProcessGroupGloo  # its type stub is incomplete
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=HOST)]
        options._timeout = self._timeout
        self._group: Any = self._guarded(lambda: gloo(store, rank, size, options))

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's `x`, added as a balanced tree in rank order: the same bits on each rank."""
        return rank_exchange.sum_parts(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, all of one shape and dtype, in rank order, [size, ...]; an empty `x` is not sent."""
        return torch.stack(self._gather(x))

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `values` to every rank, in place; others pass a contiguous tensor of that shape and dtype."""
        assert values.device.type == "cpu"
        assert values.is_contiguous()
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout
        self._guarded(lambda: self._group.broadcast([values], options).wait())
        return values

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        length = int(self.broadcast(torch.tensor([len(data)])))
        if length == 0:
            return b""
        if self.rank != 0:
            data = bytes(length)
        return _to_bytes(self.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8)))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank."""
        lengths = [int(part) for part in self._gather(torch.tensor([len(data)]))]
        if not any(lengths):
            return [b""] * self.size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        return [_to_bytes(part[:length]) for part, length in zip(self._gather(padded), lengths, strict=True)]

    def close(self) -> None:
        """Leave the group; the others notice at their next operation."""
        self._group.shutdown()

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.device.type == "cpu"
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if x.numel():
            options = AllgatherOptions()
            options.timeout = self._timeout
            self._guarded(lambda: self._group.allgather([parts], [x], options).wait())
        return parts

    @property
    def _timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.limit_s)

    def _guarded(self, operation: Callable[[], T]) -> T:
        self.num_operations += 1
        try:
            return operation()
        except RuntimeError as error:  # all that torch.distributed raises
            raise lost_touch(self, error) from error


def nobody() -> WorkerLost | None:
    """None: without a watch it is unknown which rank is at fault."""
    return None


def lost_touch(group: Communicator, error: Exception) -> WorkerLost:
    """The error for a failed collective: the rank at fault, or that this rank has lost the others."""
    blamed = group.blame()
    if blamed is not None:
        return blamed
    message = f"rank {group.rank} of {group.size} lost touch with its tensor-parallel group: {error}"
    return WorkerLost(message, rank=group.rank, size=group.size, lost_touch=True)


def open_store(rank: int, size: int, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> TCPStore:
    """The store of a group whose rank 0 listens on `port` of this host; 0 selects a free port, then `store.port`."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(HOST, port, size, rank == 0, timeout=timeout, wait_for_workers=False)


def _to_bytes(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


class NcclGroup:
    """One rank's end of a group that uses NCCL, and shared memory for small tensors.

    Args:
        rank: this rank.
        size: size of the group.
        store: rendezvous store.
        device: this rank's device; no two ranks share one.
        timeout_s: for starting, and for exchanging bytes.
        shares_memory: try to share memory; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        device: torch.device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        shares_memory: bool = True,
    ) -> None:
        assert 0 <= rank < size
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the watch ends the process, not NCCL
        self.rank = rank
        self.size = size
        self.num_operations = 0
        self.limit_s = timeout_s
        self.blame: Callable[[], WorkerLost | None] = nobody
        self._store = store
        self._timeout_s = timeout_s
        self._num_bytes_sent = 0
        nccl: Any = distributed.ProcessGroupNCCL  # its type stub is incomplete
        options = nccl.Options()
        options._timeout = datetime.timedelta(days=1)
        with torch.cuda.device(device):
            self._group: Any = self._guarded(lambda: nccl(store, rank, size, options))
            self._mailbox: Mailbox | None = None
            self._beside = torch.cuda.Stream(device)  # for releasing the streams that steps run on from a wait
            self.how = "ranks exchange by NCCL alone"
            self.all_sum(torch.ones(1, device=device))  # connects now, so that no step or capture has to
            torch.cuda.synchronize(device)
            if shares_memory:
                from baton.engine.tp.shared_mailbox import open_mailbox  # not needed on CPUs

                self._mailbox, problem = open_mailbox(rank, size, device, self.gather_bytes)
                self.how = f"{self.how}: {problem}" if problem else _THROUGH_MEMORY
            self._load_kernels(device)
            torch.cuda.synchronize(device)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's `x`, added as a balanced tree in rank order: the same bits on each rank."""
        if self._mailbox is not None and self._mailbox.fits(x):
            self.num_operations += 1
            return rank_exchange.all_sum(x.contiguous(), self._mailbox)
        return rank_exchange.sum_parts(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, all of one shape and dtype, in rank order, [size, ...]; an empty `x` is not sent."""
        x = x.contiguous()
        if self._mailbox is not None and self._mailbox.fits(x):
            self.num_operations += 1
            return rank_exchange.all_gather(x, self._mailbox)
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            self._guarded(lambda: self._group._allgather_base(gathered, x).wait())
        return gathered

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `values` to every rank, in place; others pass a contiguous tensor of that shape and dtype."""
        assert values.is_contiguous()
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._guarded(lambda: self._group.broadcast([values], options).wait())
        return values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank; for start-up, not for steps."""
        return self._through_store({self.rank: data}, range(self.size))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; for start-up, not for steps."""
        return self._through_store({0: data} if self.rank == 0 else {}, [0])[0]

    def _load_kernels(self, device: torch.device) -> None:
        """Compile all kernels of the exchanges, before a stream has to wait for one."""
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            x = torch.ones(UNIT_BYTES, dtype=dtype, device=device)
            rank_exchange.sum_parts(self.all_gather(x))
            self.all_sum(x)

    def close(self) -> None:
        """Leave the group, whatever is in flight."""
        if self._mailbox is not None:
            # A wait for a dead rank would never end; on a failed device nothing waits.
            with contextlib.suppress(RuntimeError):
                with torch.cuda.stream(self._beside):
                    self._mailbox.release()
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
