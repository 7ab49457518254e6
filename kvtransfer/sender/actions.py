"""What the push protocol tells its caller: events for the prefill worker, and things to do for it."""

from dataclasses import dataclass

from baton.core.requests.request import AttemptKey
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """The decode worker a request goes to, as the router knows it.

    Attributes:
        worker_id: for logs and messages.
        kv_address: where its incoming transfer listens.
        epoch: of the incarnation the router chose; another incarnation at the same address is refused.
    """

    worker_id: str
    kv_address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantInfo:
    """What rank 0 was granted, for `PushProtocol.adopt` on the other ranks.

    Attributes:
        d_epoch: the decode worker's incarnation.
        incoming_id: with the epoch, the fence of every frame.
        credit_bytes: the most that may be in flight on one connection.
        lease_s: how long the decode worker waits for a sign of life.
        data_path: named in the RESERVE.
        blocks: the decode worker's, in order; empty on data paths where it writes itself.
        block_size: the decode worker's.
        state_slot: the decode worker's, where blocks are and the layout has state.
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
    """The decode worker has blocks: layers may be pushed. Only rank 0 hears it; `grant` goes to the other ranks."""

    attempt: AttemptKey
    grant: GrantInfo


@dataclass(frozen=True, slots=True)
class Denied:
    """The decode worker refused; the transfer has ended and reads no source blocks.

    Attributes:
        attempt: whose.
        reason: a `kv_pb2.Deny.Reason`.
        detail: one sentence.
    """

    attempt: AttemptKey
    reason: kv_pb2.Deny.Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Acked:
    """Complete at the decode worker. The transfer has ended and reads no source blocks."""

    attempt: AttemptKey
    bytes_pushed: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The transfer failed. Source blocks stay taken until `PushDrained`, which follows by itself."""

    attempt: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class PushDrained:
    """The last word on an aborted or failed transfer: nothing reads its source blocks or writes its transfer."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a message (`messages.encode_control`) to a peer. It may get lost."""

    peer: str
    control: kv_pb2.Control


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a payload from the source blocks.

    `header` lacks its `payload_digest` (if `has_digest`), or else, on a two-sided data path, its `payload_crc`. On a
    one-sided data path: write into `target_blocks`, send the header (`is_written` is set in it) when the bytes are
    there, and call `PushProtocol.written`, exactly once for each SendFrame, be it written or, after a `StopFrames`, not
    begun.

    Attributes:
        peer: the decode worker's address.
        attempt: whose blocks are read.
        header: of the frame.
        data_path: what it goes by.
        target_blocks: the decode worker's; empty on a two-sided data path.
        has_digest: the decode worker verifies by digest.
    """

    peer: str
    attempt: AttemptKey
    header: FrameHeader
    data_path: str
    target_blocks: tuple[int, ...]
    has_digest: bool


@dataclass(frozen=True, slots=True)
class StopFrames:
    """From now on read nothing for this transfer and begin no write: take back what is queued (`Transport.unpin`).

    The source blocks may be free right after this action. Writes that have begun on a one-sided data path go on; the
    transfer ends when `written` was called for each.
    """

    peer: str
    attempt: AttemptKey
    d_epoch: int
    incoming_id: int


@dataclass(frozen=True, slots=True)
class OpenDataPath:
    """An incarnation of a decode worker was met: open the best working data path; then `data_path_opened`.

    What was opened for an earlier incarnation at this address leads nowhere any more.
    """

    peer: str
    epoch: int
    host_id: str
    offers: tuple[kv_pb2.DataPathOffer, ...]


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Close what leads to this peer: it is not used any more, or silent. What is sent later connects anew."""

    peer: str


PushEvent = Granted | Denied | Acked | PushFailed | PushDrained
PushAction = PushEvent | SendControl | SendFrame | StopFrames | OpenDataPath | DropPeer
