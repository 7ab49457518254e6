"""What the push protocol returns to its caller: events for the prefill worker, and actions to perform."""

from dataclasses import dataclass

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """The decode worker that a request goes to, as the router knows it.

    Attributes:
        worker_id: name for logs and messages.
        kv_address: address where its KV receiver listens.
        epoch: the incarnation that the router chose; another incarnation at the same address is refused.
    """

    worker_id: str
    kv_address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantInfo:
    """The grant that rank 0 received, for `PushProtocol.adopt` on the other ranks.

    Attributes:
        d_epoch: the decode worker's incarnation.
        incoming_id: with the epoch, the fence of every frame.
        credit_bytes: the most bytes in flight on one connection.
        lease_s: how long the decode worker waits for a sign of life.
        data_path: the data path named in the RESERVE.
        blocks: the decode worker's blocks, in order; empty on data paths where the decode worker writes them itself.
        block_size: the decode worker's block size.
        state_slot: the decode worker's state slot, if `blocks` are given and the layout has state.
    """

    d_epoch: int
    incoming_id: int
    credit_bytes: int
    lease_s: float
    data_path: str
    blocks: tuple[int, ...]
    block_size: int
    state_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode worker granted blocks; layers may be pushed. Only rank 0 gets it; `grant` goes to the other ranks."""

    attempt: AttemptKey
    grant: GrantInfo


@dataclass(frozen=True, slots=True)
class Denied:
    """The decode worker refused; the transfer has ended and reads no source blocks.

    Attributes:
        attempt: the attempt that was refused.
        reason: a `kv_pb2.Deny.Reason`.
        detail: one sentence.
    """

    attempt: AttemptKey
    reason: kv_pb2.Deny.Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Acked:
    """The transfer is complete at the decode worker. It has ended and reads no source blocks."""

    attempt: AttemptKey
    bytes_pushed: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The transfer failed. Its source blocks stay in use until `PushDrained`, which always follows."""

    attempt: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class PushDrained:
    """The last event of an aborted or failed transfer: nothing reads its source blocks or writes its target now."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a message (`messages.encode_control`) to a peer. The message may be lost."""

    peer: str
    control: kv_pb2.Control


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a payload from the source blocks.

    `header` lacks its `payload_digest` (if `has_digest`), or else, on a two-sided data path, its `payload_crc`. On a
    one-sided data path: write into `target_blocks`, send the header (its `is_written` is set) when the bytes are there,
    and call `PushProtocol.written` exactly once for each SendFrame, whether it was written or, after a `StopFrames`,
    not begun.

    Attributes:
        peer: address of the decode worker.
        attempt: the attempt whose blocks are read.
        header: header of the frame.
        data_path: the data path to use.
        target_blocks: the decode worker's blocks; empty on a two-sided data path.
        has_digest: whether the decode worker verifies by digest.
    """

    peer: str
    attempt: AttemptKey
    header: FrameHeader
    data_path: str
    target_blocks: tuple[int, ...]
    has_digest: bool


@dataclass(frozen=True, slots=True)
class StopFrames:
    """From now on, read nothing for this transfer and begin no write; take back what is queued (`Transport.unpin`).

    The source blocks may be freed right after this action. Writes that have begun on a one-sided data path go on; the
    transfer ends when `written` has been called for each.
    """

    peer: str
    attempt: AttemptKey
    d_epoch: int
    incoming_id: int


@dataclass(frozen=True, slots=True)
class OpenDataPath:
    """An incarnation of a decode worker was met: open the best working data path, then call `data_path_opened`.

    Data paths opened for an earlier incarnation at this address are no longer valid.
    """

    peer: str
    epoch: int
    host_id: str
    offers: tuple[kv_pb2.DataPathOffer, ...]


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Close the connections to a peer that is unused or silent. A later send connects anew."""

    peer: str


PushEvent = Granted | Denied | Acked | PushFailed | PushDrained
PushAction = PushEvent | SendControl | SendFrame | StopFrames | OpenDataPath | DropPeer
