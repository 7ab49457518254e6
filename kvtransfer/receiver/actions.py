"""What the incoming transfer protocol tells its caller: events for the decode worker, and things to do for it."""

from dataclasses import dataclass

from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.proto import kv_pb2


@dataclass(frozen=True, slots=True)
class ReserveWanted:
    """A prefill worker asks for blocks: answer with `grant` or `deny` before `deadline_s`. Nothing is held yet.

    Attributes:
        attempt: whose.
        prompt_len: positions that will be pushed.
        capacity_len: positions to grant blocks for.
        deadline_s: on this side's clock.
        p_epoch: the incarnation of the prefill worker.
        tp_size: its ranks; each pushes its own heads.
        data_path: how payloads come. On a one-sided data path the worker must keep (p_epoch, tp_size) beside the
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
    """Every position of every layer and head has landed and is verified; the blocks are the sequence's from here on.

    Attributes:
        attempt: whose.
        incoming_id: of this incoming transfer; never used again in this epoch.
        prompt_len: positions that landed.
        state: what decode needs beside the KV.
        bytes_landed: payload bytes, each counted once.
        bytes_landed_before_prefill_end: those of frames that were in the pool when the first token was known.
        prefill_end_s: when that was, on this side's clock.
        completed_s: when the completion word was set, on this side's clock; 0 until then.
        complete_s: when everything that is verified was there, likewise; 0 if that is not known.
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
    """Stop the request. If blocks were granted and the transfer was not complete, they stay taken until `Drained`.

    Attributes:
        attempt: whose.
        reason: one sentence.
        by_peer: the prefill worker gave it up, and counts the failure itself.
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
    """Where pools are on GPUs: layers [layer, layer + num_layers) of a transfer are complete; have them verified.

    One is for the pool of one rank, and the heads that it holds. `ReceiverService` answers by itself, with kernels: the
    last one raises the flag.

    Attributes:
        attempt: whose.
        rank: whose pool.
        flag: slot of the flag page.
        sequence: the number to put there, with the digest of each layer behind it.
        layer: first.
        num_layers: of one shape.
        first: position.
        count: of positions.
        staging: if it has blocks: bring the layers from there into the pool first.
        has_digest: False: only that.
    """

    attempt: AttemptKey
    rank: int
    flag: int
    sequence: int
    layer: int
    num_layers: int
    first: int
    count: int
    staging: BlockTable
    has_digest: bool


@dataclass(frozen=True, slots=True)
class AnswerControl:
    """Send a message (`messages.encode_control`) to a peer. It may get lost."""

    peer: str
    control: kv_pb2.Control


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """Bring the payload of `header` into the transfer's blocks, then call `landed`, or `write_failed` if that fails.

    Several may be in progress; they never overlap. If the header has the flag WRITTEN, the payload is there already:
    only compute its digest from the pool. A frame for which no WriteFrame follows `on_frame` is to be discarded.
    """

    incoming_id: int
    header: FrameHeader


@dataclass(frozen=True, slots=True)
class DiscardWrites:
    """The transfer was fenced: discard every payload of it still being written, then call `write_failed` for each."""

    incoming_id: int


@dataclass(frozen=True, slots=True)
class DigestLayer:
    """Have the digest of a complete layer computed from the pool, then call `digested`.

    Only where the process that runs the protocol cannot read the pool itself (`digests_layers`).
    """

    incoming_id: int
    layer: int


ReceiverEvent = ReserveWanted | Completed | IncomingFailed | Drained
ReceiverAction = ReceiverEvent | AnswerControl | WriteFrame | DiscardWrites | DigestLayer
