"""A way to write straight into a peer's pools: what a one-sided data path is to the push side.

`DataPathOpener` is a data path as this process has it, made once; `PushDataPath` is that data path opened towards one
incarnation of one peer. `sender_data_paths` makes the openers that `core.kv_transports` declares. Two-sided data paths
are the transport's (`Transport.open_data_path`). Whether a write is allowed is not asked here: `push` calls `write`
only while a transfer is granted and not given up, and answers for the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.core.kv_transports import load, one_sided_data_paths
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.proto import kv_pb2

if TYPE_CHECKING:
    from baton.kvcache.pool import KVPool  # the KV receiver process imports this module, and no torch


class DataPathRefused(Exception):
    """A data path cannot be opened, or not be used any more; the message is the reason, as part of a sentence."""


class DataPathFailed(Exception):
    """A write failed. What it did to the target blocks is unknown, but it is over."""


class Written(Protocol):
    """A write that was posted. `done` and `digest` are asked by the push thread, and never wait.

    A write must become done or raise by itself, whatever the peer does: until then the transfer cannot drain.
    """

    @property
    def done(self) -> bool:
        """Whether the bytes are in the peer's pool, and the source blocks are not read any more.

        Raises:
            DataPathFailed: they are not, and nothing is written any more.
        """
        ...

    @property
    def digest(self) -> int | None:
        """The span's digest (`kernels.kv.digest`) as read from the source; None if none was wanted. Only when done."""
        ...


class WrittenAtOnce:
    """A write that was over when `write` returned."""

    done = True

    def __init__(self, digest: int | None) -> None:
        self.digest = digest


class PushDataPath(Protocol):
    """One peer's pools, of all of its ranks. `write` is called from several threads at once, the rest from one.

    Attributes:
        name: of the data path.
        num_blocks: blocks that the peer's pools have; a granted block id at or above it is refused.
        num_state_slots: the same of state slots.
        block_size: positions of one of those blocks, as the pools that were opened say; what a peer says beside is not
            believed.
    """

    name: str
    num_blocks: int
    block_size: int
    num_state_slots: int

    def write(
        self, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange, *, with_digest: bool
    ) -> Written:
        """Copy a span into the peer's pools: to every rank that holds one of its heads.

        On a GPU it is called with the writer thread's side stream current, which waits for the layer already; the
        write is posted to that stream and nothing here waits for it. On a CPU it is over when this returns.

        Args:
            blocks: of the span's layer here, by position // its rows per block (`LayerGeometry.blocks_of`).
            target_blocks: the same of the peer's pools; what was granted is checked against `num_blocks` beforehand.
            span: some positions of heads that this rank's pool holds.
            with_digest: whether the digest is wanted.

        Raises:
            DataPathFailed: nothing was, or will be, written.
        """
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing posted is under way any more; False if that took longer."""
        ...

    def outlived(self) -> None:
        """Another incarnation answers where this one did, so this one is dead, and applies nothing any more."""
        ...

    def close(self) -> None:
        """Unmap. Called when no write is under way, or never will be again."""
        ...


class DataPathOpener(Protocol):
    """One kind of data path on this side.

    Attributes:
        name: of the data path.
    """

    name: str

    @property
    def problem(self) -> str:
        """Why this process cannot use the data path; empty if it can. HELLO names the data paths without a problem."""
        ...

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> PushDataPath:
        """Open the data path to one incarnation of a peer, and prove that what was opened is that incarnation's.

        Args:
            offer: the peer's, of this data path; it is data, and may be nonsense.
            epoch: of the peer's incarnation.
            host_id: the peer's; its data paths that stay on one host compare it with `messages.host_id`.

        Raises:
            DataPathRefused: and why.
        """
        ...


@dataclass(frozen=True, slots=True)
class SenderSide:
    """What the data paths of a prefill rank are made of.

    Attributes:
        pool: this rank's.
        io: the same, if it is in host memory.
        epoch: of this incarnation.
        host_id: of this host.
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
        """Refused.

        Raises:
            DataPathRefused: always.
        """
        raise DataPathRefused(self.problem)


def sender_data_paths(transport: str, side: SenderSide) -> list[DataPathOpener]:
    """An opener for each one-sided data path that a worker may use which was told this transport.

    What a data path needs is imported only where its pools are: Triton comes with one, which CPUs have no use for.
    """
    memory = "host" if side.pool.device.type == "cpu" else "GPU"
    openers: list[DataPathOpener] = []
    for declared in one_sided_data_paths(transport):
        if declared.memory in ("", memory):
            openers.append(load(declared.sender)(side))
        else:
            openers.append(NoDataPath(declared.data_path, f"the pool is not in {declared.memory} memory"))
    return openers
