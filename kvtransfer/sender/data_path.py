"""The KV sender's interface to one-sided data paths, which write straight into a peer's pools.

`DataPathOpener` is a kind of data path in this process, made once; `PushDataPath` is that data path opened to one
incarnation of one peer. `sender_data_paths` makes the openers that `core.kv_transports` declares. Two-sided data paths
belong to the transport (`Transport.open_data_path`). This module does not check whether a write is allowed: the KV
sender calls `write` only while a transfer is granted and not abandoned, and accounts for the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.core.kv_transports import load, one_sided_data_paths
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.proto import kv_pb2

if TYPE_CHECKING:
    from baton.kvcache.pool import KVPool  # the KV receiver process imports this module without torch


class DataPathRefused(Exception):
    """A data path cannot be opened, or not be used any more; the message is the reason, as part of a sentence."""


class DataPathFailed(Exception):
    """A write failed. Its effect on the target blocks is unknown, but it is over."""


class Written(Protocol):
    """A write that was posted. The push thread reads `done` and `digest`, which never wait.

    A write must become done or raise on its own, whatever the peer does: until then the transfer cannot drain.
    """

    @property
    def done(self) -> bool:
        """Whether the bytes are in the peer's pool and the source blocks are not read any more.

        Raises:
            DataPathFailed: the bytes are not there, and nothing is written any more.
        """
        ...

    @property
    def digest(self) -> int | None:
        """The span's digest (`kernels.kv.digest`) as read from the source; None if not requested. Valid once done."""
        ...


class WrittenAtOnce:
    """A write that was over when `write` returned."""

    done = True

    def __init__(self, digest: int | None) -> None:
        self.digest = digest


class PushDataPath(Protocol):
    """The pools of all ranks of one peer. Several threads may call `write` at once; the rest is for one thread.

    Attributes:
        name: name of the data path.
        num_blocks: number of blocks in the peer's pools; a granted block id at or above it is refused.
        num_state_slots: number of state slots, checked the same way.
        block_size: positions per block, as read from the opened pools; what a peer says elsewhere is not trusted.
    """

    name: str
    num_blocks: int
    block_size: int
    num_state_slots: int

    def write(
        self, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange, *, with_digest: bool
    ) -> Written:
        """Copy a span into the peer's pools: to every rank that holds one of its heads.

        On a GPU, the writer thread's side stream is current and already waits for the layer; the write is posted to
        that stream, and nothing here waits for it. On a CPU, the write is over when this returns.

        Args:
            blocks: blocks of the span's layer here, indexed by position // rows per block (`LayerGeometry.blocks_of`).
            target_blocks: the same for the peer's pools; the caller has checked the grant against `num_blocks`.
            span: a range of positions of heads that this rank's pool holds.
            with_digest: whether to compute the digest.

        Raises:
            DataPathFailed: nothing was, or will be, written.
        """
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no posted write is in progress; return False after `timeout_s`."""
        ...

    def outlived(self) -> None:
        """Note that this incarnation is dead, since another answers at its address: it applies no more writes."""
        ...

    def close(self) -> None:
        """Unmap the pools. Called when no write is in progress, or none can ever be again."""
        ...


class DataPathOpener(Protocol):
    """One kind of data path on this side.

    Attributes:
        name: name of the data path.
    """

    name: str

    @property
    def problem(self) -> str:
        """Why this process cannot use the data path; empty if it can. HELLO names the data paths without a problem."""
        ...

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> PushDataPath:
        """Open the data path to one incarnation of a peer, and prove that what was opened belongs to that incarnation.

        Args:
            offer: the peer's offer for this data path; untrusted, and possibly nonsense.
            epoch: the peer's incarnation.
            host_id: the peer's host; data paths that stay on one host compare it with `incarnation_file.host_id`.

        Raises:
            DataPathRefused: the data path cannot be opened; the message says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class SenderSide:
    """What the data paths of a prefill rank are built from.

    Attributes:
        pool: this rank's pool.
        io: access to the pool, if it is in host memory.
        epoch: this incarnation.
        host_id: this host.
    """

    pool: "KVPool"
    io: PoolIO | None
    epoch: int
    host_id: str


@dataclass(slots=True)
class NoDataPath:
    """The opener of a data path that this process cannot use."""

    name: str
    problem: str

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> PushDataPath:
        """Refuse to open.

        Raises:
            DataPathRefused: always.
        """
        raise DataPathRefused(self.problem)


def sender_data_paths(transport: str, side: SenderSide) -> list[DataPathOpener]:
    """Make an opener for each one-sided data path that a worker with this `--transport` may use.

    A data path's dependencies are imported only where its pools are: one of them needs Triton, which CPUs have no use
    for.
    """
    memory = "host" if side.pool.device.type == "cpu" else "GPU"
    openers: list[DataPathOpener] = []
    for declared in one_sided_data_paths(transport):
        if declared.memory in ("", memory):
            openers.append(load(declared.sender)(side))
        else:
            openers.append(NoDataPath(declared.data_path, f"the pool is not in {declared.memory} memory"))
    return openers
