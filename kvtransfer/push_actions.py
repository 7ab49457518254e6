"""What the push protocol tells its caller: events for the prefill worker, and things to do for it."""

from dataclasses import dataclass

from baton.core.request import AttemptKey
from baton.kvtransfer.frame import FrameHeader
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """The decode worker a request goes to, as the router knows it.

    Attributes:
        worker_id: for logs and messages.
        kv_address: where its landing listens.
        epoch: of the life the router chose; another life at the same address is refused.
    """

    worker_id: str
    kv_address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode worker has blocks: layers may be pushed."""

    attempt: AttemptKey


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
    """Sealed at the decode worker. The transfer has ended and reads no source blocks."""

    attempt: AttemptKey
    bytes_pushed: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The transfer failed. Source blocks stay taken until `PushDrained`, which follows by itself."""

    attempt: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class PushDrained:
    """The last word on an aborted or failed transfer: nothing reads its source blocks any more."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send a message to a peer. It may get lost."""

    peer: str
    control: kv_pb2.Control


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Read a payload from the source blocks now and send it."""

    peer: str
    attempt: AttemptKey
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Close what leads to this peer: it is not used any more, or silent. What is sent later connects anew."""

    peer: str


PushEvent = Granted | Denied | Acked | PushFailed | PushDrained
PushAction = PushEvent | SendControl | SendFrame | DropPeer
