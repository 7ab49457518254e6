"""Builds the messages and frame headers of a push from its records. It makes no decisions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.kvcache.layout import KVLayout, Range
from baton.kvtransfer.protocol.coverage import LayerRange
from baton.kvtransfer.protocol.frame import VERSION, FrameHeader, FrameShape
from baton.kvtransfer.protocol.messages import DIGEST, control_of, layout_message, wire_attempt
from baton.kvtransfer.protocol.proof import KvProofs
from baton.kvtransfer.sender.table import Transfer
from baton.proto import kv_pb2

MAX_U32 = (1 << 32) - 1
MAX_I64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class PushIdentity:
    """The identity of the sender: one rank of one incarnation of a prefill worker.

    Attributes:
        epoch: this incarnation; the same for all ranks.
        rank: rank in the tensor-parallel group.
        size: size of the group.
        data_paths: data paths that this process can send on, best first.
        host_id: identifier of this machine.
        incarnation_file: file that this process keeps locked; empty: none.
        has_digest: whether frames and layers are digested.
    """

    epoch: int
    rank: int = 0
    size: int = 1
    data_paths: tuple[str, ...] = ("inline",)
    host_id: str = ""
    incarnation_file: str = ""
    has_digest: bool = True


class PushMessages:
    """Builds the messages that one rank sends."""

    def __init__(self, identity: PushIdentity, layout: KVLayout, shape: FrameShape, proofs: KvProofs) -> None:
        self.proofs = proofs
        self._me = identity
        self._layout = layout
        self._shape = shape
        layers = range(layout.num_layers)
        self.heads: Sequence[Range] = [layout.pushed_heads(layer, identity.rank, identity.size) for layer in layers]

    def own(self, layer: int, first: int, count: int) -> Iterator[Range]:
        """Yield those of `count` positions from `first` on that this rank pushes."""
        return self._layout.pushed_positions(layer, first, count, self._me.rank, self._me.size)

    def hello(self, address: str, sent_ns: int, challenge: bytes) -> kv_pb2.Control:
        """Build a HELLO to a decode worker that gave this challenge; empty if it gave none yet."""
        held = self._layout.heads_of(0, self._me.rank, self._me.size)
        hello = kv_pb2.Hello(
            version=VERSION,
            epoch=self._me.epoch,
            layout=layout_message(self._layout),
            tp_size=self._me.size,
            tp_rank=self._me.rank,
            head_first=held.first,
            head_count=held.count,
            capabilities=[DIGEST] if self._me.has_digest else [],
            sent_ns=sent_ns,
            data_paths=self._me.data_paths,
            host_id=self._me.host_id,
            incarnation_file=self._me.incarnation_file,
            number=self.proofs.number(address, self._me.epoch, sent_ns),
            challenge=challenge,
        )
        if challenge:
            self.proofs.prove_hello(hello)
        return control_of(hello)

    def reserve(self, transfer: Transfer, now_s: float) -> kv_pb2.Control:
        """Build a RESERVE, with the time that is left for the reply."""
        reserve = kv_pb2.Reserve(
            attempt=wire_attempt(transfer.attempt),
            epoch=self._me.epoch,
            prompt_len=transfer.prompt_len,
            capacity_len=transfer.capacity_len,
            wait_ms=min(max(1, int((transfer.deadline_s - now_s) * 1e3)), MAX_U32),
            data_path=transfer.data_path,
            tp_size=self._me.size,
            peer_epoch=transfer.peer.epoch,
        )
        return control_of(reserve)

    def frame(self, transfer: Transfer, gap: LayerRange) -> FrameHeader:
        """Build the header of the next frame, for positions that `FrameShape.split` returned."""
        heads = self.heads[gap.layer]
        return FrameHeader(
            d_epoch=transfer.peer.epoch,
            incoming_id=transfer.incoming_id,
            attempt=transfer.attempt.attempt,
            seq=transfer.next_seq & MAX_U32,
            layer=gap.layer,
            head_first=heads.first,
            head_count=heads.count,
            order_block_size=self._layout.rows_per_block(gap.layer),
            first=gap.first,
            count=gap.count,
            payload_bytes=self._shape.payload_bytes(gap.layer, gap.count, heads.count),
            is_written=transfer.is_one_sided,
        )

    def commit(self, transfer: Transfer, clock_offset_s: float, has_digest: bool) -> kv_pb2.Control:
        """Build the COMMIT of this rank's part."""
        commit = kv_pb2.Commit(
            epoch=transfer.peer.epoch,
            incoming_id=transfer.incoming_id,
            attempt=wire_attempt(transfer.attempt),
            prompt_len=transfer.prompt_len,
            num_layers=self._layout.num_layers,
            layer_digests=transfer.digests if has_digest else (),
            state=transfer.state_message,
            prefill_end_ns=max(0, min(int((transfer.prefill_end_s + clock_offset_s) * 1e9), MAX_I64)),
            payload_bytes=transfer.bytes_pushed,
            round=transfer.round,
            tp_rank=self._me.rank,
            tp_size=self._me.size,
            next_seq=transfer.next_seq & MAX_U32,
        )
        return control_of(commit)

    def resume(self, transfer: Transfer) -> kv_pb2.Control:
        """Build a RESUME, which asks which of the posted frames have arrived."""
        resume = kv_pb2.Resume(
            epoch=transfer.peer.epoch,
            incoming_id=transfer.incoming_id,
            round=transfer.resume_round,
            next_seq=transfer.next_seq & MAX_U32,
        )
        return control_of(resume)

    def lease(self, incoming_ids: Iterable[int]) -> kv_pb2.Control:
        """Build a LEASE."""
        return control_of(kv_pb2.Lease(epoch=self._me.epoch, incoming_ids=incoming_ids))

    def abort(self, transfer: Transfer, reason: str) -> kv_pb2.Control:
        """Build an ABORT."""
        abort = kv_pb2.Abort(
            epoch=transfer.peer.epoch,
            incoming_id=transfer.incoming_id,
            attempt=wire_attempt(transfer.attempt),
            reason=reason,
        )
        return control_of(abort)

    def abort_ack(self, abort: kv_pb2.Abort, *, is_told: bool) -> kv_pb2.Control:
        """Build an ABORT_ACK: this rank reads, posts and writes nothing for that incoming transfer, and never will.

        `is_told`: other ranks may know of the grant, and must be asked too.
        """
        ack = kv_pb2.AbortAck(
            epoch=abort.epoch,
            incoming_id=abort.incoming_id,
            attempt=abort.attempt,
            drained=True,
            peer_epoch=self._me.epoch,
            tp_rank=self._me.rank,
            all_ranks=self._me.rank == 0 and not is_told,
        )
        return control_of(ack)
