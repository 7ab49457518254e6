"""The messages and frame headers of a push, built from records; no rule is made here."""

from collections.abc import Iterable

from baton.kvcache.layout import KVLayout
from baton.kvtransfer.coverage import Gap
from baton.kvtransfer.frame import VERSION, FrameHeader, FrameShape
from baton.kvtransfer.messages import control_of, layout_message, wire_attempt
from baton.kvtransfer.push_table import Transfer
from baton.proto import kv_pb2

MAX_U32 = (1 << 32) - 1
MAX_I64 = (1 << 63) - 1


class PushMessages:
    """Builds what one prefill worker's life sends."""

    def __init__(self, epoch: int, layout: KVLayout, shape: FrameShape) -> None:
        self._epoch = epoch
        self._layout = layout
        self._shape = shape

    def hello(self, sent_ns: int) -> kv_pb2.Control:
        """HELLO."""
        hello = kv_pb2.Hello(
            version=VERSION,
            epoch=self._epoch,
            layout=layout_message(self._layout),
            tp_size=1,
            head_count=self._layout.num_kv_heads,
            sent_ns=sent_ns,
        )
        return control_of(hello)

    def reserve(self, transfer: Transfer, now_s: float) -> kv_pb2.Control:
        """RESERVE, with the time that is left for an answer."""
        reserve = kv_pb2.Reserve(
            attempt=wire_attempt(transfer.attempt),
            epoch=self._epoch,
            prompt_len=transfer.prompt_len,
            capacity_len=transfer.capacity_len,
            wait_ms=min(max(1, int((transfer.deadline_s - now_s) * 1e3)), MAX_U32),
        )
        return control_of(reserve)

    def frame(self, transfer: Transfer, gap: Gap) -> FrameHeader:
        """Header of the next frame, for positions that `FrameShape.split` gave."""
        num_heads = self._layout.num_kv_heads
        return FrameHeader(
            d_epoch=transfer.peer.epoch,
            landing_id=transfer.landing_id,
            attempt=transfer.attempt.attempt,
            seq=transfer.next_seq & 0xFFFFFFFF,
            layer=gap.layer,
            head_first=0,
            head_count=num_heads,
            order_block_size=self._layout.block_size,
            first=gap.first,
            count=gap.count,
            payload_bytes=self._shape.payload_bytes(gap.layer, gap.count, num_heads),
        )

    def commit(self, transfer: Transfer, clock_offset_s: float) -> kv_pb2.Control:
        """COMMIT."""
        assert transfer.state_message is not None
        commit = kv_pb2.Commit(
            epoch=transfer.peer.epoch,
            landing_id=transfer.landing_id,
            attempt=wire_attempt(transfer.attempt),
            prompt_len=transfer.prompt_len,
            num_layers=self._layout.num_layers,
            layer_digests=transfer.digests,
            state=transfer.state_message,
            prefill_end_ns=max(0, min(int((transfer.prefill_end_s + clock_offset_s) * 1e9), MAX_I64)),
            payload_bytes=transfer.bytes_pushed,
            round=transfer.round,
        )
        return control_of(commit)

    def resume(self, transfer: Transfer) -> kv_pb2.Control:
        """RESUME: which of the frames posted have landed?"""
        return control_of(
            kv_pb2.Resume(epoch=transfer.peer.epoch, landing_id=transfer.landing_id, round=transfer.resume_round)
        )

    def lease(self, landing_ids: Iterable[int]) -> kv_pb2.Control:
        """LEASE."""
        return control_of(kv_pb2.Lease(epoch=self._epoch, landing_ids=landing_ids))

    def abort(self, transfer: Transfer, reason: str) -> kv_pb2.Control:
        """ABORT."""
        abort = kv_pb2.Abort(
            epoch=transfer.peer.epoch,
            landing_id=transfer.landing_id,
            attempt=wire_attempt(transfer.attempt),
            reason=reason,
        )
        return control_of(abort)
