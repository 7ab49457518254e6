"""What the receiver's protocol returns to its caller: events for the decode worker, and actions to perform."""

from dataclasses import dataclass

from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class ReserveWanted:
    """A prefill worker asks for blocks: answer with `grant` or `deny` before `deadline_s`. Nothing is held yet.

    Attributes:
        attempt: the attempt that needs them.
        prompt_len: number of positions that will be pushed.
        capacity_len: number of positions to grant blocks for.
        deadline_s: deadline on this side's clock.
        p_epoch: incarnation of the prefill worker.
        tp_size: number of its ranks; each pushes its own heads.
        data_path: the data path of the payloads. If it is one-sided, the worker must keep (p_epoch, tp_size) with the
            blocks: if the KV receiver process dies, its next incarnation needs them to ask for evidence
            (`ReceiverProtocol.inherit`).
    """

    attempt: AttemptKey
    prompt_len: int
    capacity_len: int
    deadline_s: float
    p_epoch: int = 0
    tp_size: int = 1
    data_path: str = "inline"


@dataclass(frozen=True, slots=True)
class Completed:
    """Every position of every layer and head has arrived and is verified; from here on the sequence owns the blocks.

    Attributes:
        attempt: the attempt that is complete.
        incoming_id: id of this incoming transfer; never used again in this epoch.
        prompt_len: number of positions that arrived.
        state: what decoding needs besides the KV.
        bytes_landed: payload bytes, each counted once.
        bytes_landed_before_prefill_end: bytes of those frames that were in the pool when the first token was known.
        prefill_end_s: when the first token was known, on this side's clock.
        completed_s: when the completion word was set, on this side's clock; 0 until then.
        complete_s: when everything that is verified had arrived, on this side's clock; 0 if that is not known.
    """

    attempt: AttemptKey
    incoming_id: int
    prompt_len: int
    state: kv_pb2.SequenceState
    bytes_landed: int
    bytes_landed_before_prefill_end: int
    prefill_end_s: float
    completed_s: float = 0.0
    complete_s: float = 0.0


@dataclass(frozen=True, slots=True)
class IncomingFailed:
    """The request must stop. Blocks that were granted to an incomplete transfer stay in use until `Drained`.

    Attributes:
        attempt: the attempt that failed.
        reason: one sentence.
        by_peer: whether the prefill worker gave up; it counts the failure itself.
    """

    attempt: AttemptKey
    reason: str
    by_peer: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing will be written into the granted blocks any more: free the table."""

    attempt: AttemptKey


@dataclass(frozen=True, slots=True)
class DigestWanted:
    """With pools on GPUs, layers of a transfer are complete: have them verified.

    Each one is for the pool of one rank, and the heads that it holds. `ReceiverService` handles it itself, with
    kernels; the last kernel raises the flag.

    Attributes:
        attempt: the attempt whose layers are complete.
        rank: rank that owns the pool.
        flag: slot in the flag page.
        sequence: number to write there, followed by the digest of each layer.
        layers: the layers, all of one shape.
        first: first position.
        count: number of positions.
        staging: staging blocks; if not empty, copy the layers from there into the pool first.
        has_digest: whether to digest; if False, only copy.
    """

    attempt: AttemptKey
    rank: int
    flag: int
    sequence: int
    layers: tuple[int, ...]
    first: int
    count: int
    staging: BlockTable
    has_digest: bool


@dataclass(frozen=True, slots=True)
class AnswerControl:
    """Send a message (`messages.encode_control`) to a peer. The message may be lost."""

    peer: str
    control: kv_pb2.Control


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """Write the payload of `header` into the transfer's blocks, then call `landed`, or `write_failed` if that fails.

    Several may be in progress; they never overlap. If the header has the flag WRITTEN, the payload is already there:
    only compute its digest from the pool. A frame whose `on_frame` returns no WriteFrame must be discarded.
    """

    incoming_id: int
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class DiscardWrites:
    """The transfer was fenced: discard each of its payloads still being written, and call `write_failed` for each."""

    incoming_id: int


@dataclass(frozen=True, slots=True)
class DigestLayer:
    """Have the digest of a complete layer computed from the pool, then call `digested`.

    Only used where the process that runs the protocol cannot read the pool itself (`digests_layers`).
    """

    incoming_id: int
    layer: int


ReceiverEvent = ReserveWanted | Completed | IncomingFailed | Drained
ReceiverAction = ReceiverEvent | AnswerControl | WriteFrame | DiscardWrites | DigestLayer
