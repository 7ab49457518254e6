"""What frames do to transfers: which are wanted, which are late or there already, and what follows when they landed.

Two kinds of lanes. Two-sided: this side writes; the first good write wins, and nothing is written twice. One-sided: the
sender writes and its header says so afterwards; this side only verifies. There a header from before the last question
what is missing is dropped: its sender was told to write that range again, and only what it says after that counts.
"""

from baton.core.errors import ProtocolError
from baton.core.kv_transports import is_one_sided
from baton.kvtransfer.protocol.frame import FrameHeader, FrameShape
from baton.kvtransfer.receiver.actions import DigestLayer, ReceiverAction, WriteFrame
from baton.kvtransfer.receiver.peers import ReceiverPeer
from baton.kvtransfer.receiver.rules import MASK, ReceiverRules
from baton.kvtransfer.receiver.table import IncomingState, IncomingTransfer, Part, write_key

Actions = list[ReceiverAction]


class ReceiverFrames:
    """Takes frames for one decode worker.

    Args:
        rules: its landings.
        shape: what its layout says about frames.
        digests_layers: the engine digests whole layers, because this process cannot read the pool.
    """

    def __init__(self, rules: ReceiverRules, shape: FrameShape, digests_layers: bool) -> None:
        self._rules = rules
        self._shape = shape
        self._digests_layers = digests_layers

    def arrived(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """A header came; a `WriteFrame` among the actions says that its payload is wanted.

        Raises:
            ProtocolError: it contradicts the layout or the incoming transfer; nothing changed.
        """
        rules = self._rules
        incoming = rules.table.by_id(header.incoming_id) if header.d_epoch == rules.epoch else None
        fits = incoming is not None and incoming.attempt.attempt == header.attempt
        if incoming is None or not fits or incoming.state is not IncomingState.FILLING:
            return self._late(peer, header, now_s)
        part = self._part_of(peer, incoming, header)
        part.renewed.renew(now_s)
        one_sided = is_one_sided(incoming.lane)
        is_written_off = one_sided and header.seq < part.min_seq
        where = (header.layer, header.first, header.count, header.head_first, header.head_count)
        if is_written_off or incoming.coverage.overlaps(*where) or incoming.is_being_written(header):
            # A frame lands whole or not at all: one that overlaps what is there would write good positions twice.
            rules.counts.frames_duplicate += 1
            rules.charge(incoming, part, header)
            return []
        incoming.writes[write_key(header)] = header
        return [WriteFrame(header.incoming_id, header)]

    def landed(self, header: FrameHeader, digest: int | None, now_s: float) -> Actions:
        """The payload that `WriteFrame` asked for is in the pool; `digest` is what the pool says, None if not asked."""
        incoming = self._written(header)
        if incoming.state is IncomingState.QUARANTINED:
            self._rules.counts.frames_fenced += 1
            return self._rules.drain_if_quiet(incoming, now_s)
        part = self._sender(incoming, header)
        self._rules.charge(incoming, part, header)
        part.renewed.renew(now_s)
        if is_one_sided(incoming.lane) and header.seq < part.min_seq:
            self._rules.counts.frames_duplicate += 1
            return []  # its sender was told to write it again meanwhile
        if digest is not None and header.payload_digest is not None and digest != header.payload_digest:
            return self._rules.corrupt_frame(incoming, header, now_s)
        incoming.coverage.add(header.layer, header.first, header.count, header.head_first, header.head_count)
        part.digests[header.layer] = (part.digests[header.layer] + (header.payload_digest or 0)) & MASK
        incoming.arrivals.append((now_s, header.payload_bytes))
        incoming.bytes_landed += header.payload_bytes
        self._rules.counts.bytes_landed += header.payload_bytes
        self._rules.counts.frames_landed += 1
        if self._digests_layers and incoming.coverage.is_layer_complete(header.layer):
            return [DigestLayer(incoming.incoming_id, header.layer)]
        return self._rules.complete_if_whole(incoming, now_s)

    def failed(self, header: FrameHeader, now_s: float, *, is_corrupt: bool) -> Actions:
        """The payload did not come whole, was discarded, or arrived with a wrong checksum (`is_corrupt`)."""
        incoming = self._written(header)
        if incoming.state is IncomingState.QUARANTINED:
            self._rules.counts.frames_fenced += 1
            return self._rules.drain_if_quiet(incoming, now_s)
        if is_corrupt:
            self._rules.charge(incoming, self._sender(incoming, header), header)
            return self._rules.corrupt_frame(incoming, header, now_s)
        return []

    def digested(self, incoming_id: int, layer: int, digest: int, now_s: float) -> Actions:
        """The digest that `DigestLayer` asked for."""
        incoming = self._rules.table.by_id(incoming_id)
        if incoming is None or incoming.state is not IncomingState.FILLING:
            return []
        incoming.digests[layer] = digest
        return self._rules.complete_if_whole(incoming, now_s)

    def _part_of(self, peer: str, incoming: IncomingTransfer, header: FrameHeader) -> Part:
        """The part of the incoming transfer that this frame belongs to; checks that it does."""
        known = self._rules.peers.get(peer)
        if known is None or known.epoch != incoming.p_epoch or known.rank >= len(incoming.parts):
            raise ProtocolError(
                "a frame for an incoming transfer of another prefill worker", incoming_id=incoming.incoming_id
            )
        self._shape.check(header)
        kept = self._shape.layout.layers[header.layer].span(incoming.prompt_len)
        if header.first < kept.first or header.end > kept.stop:
            where = f"positions {header.first} to {header.end} of layer {header.layer}"
            raise ProtocolError(f"a frame of {where}, which keeps {kept.first} to {kept.stop}")
        heads = self._rules.pushed_heads(known.rank, len(incoming.parts))[header.layer]
        if not heads.first <= header.head_first <= header.head_first + header.head_count <= heads.stop:
            raise ProtocolError(f"a frame of rank {known.rank} for {header.head_count} heads from {header.head_first}")
        if header.is_written != is_one_sided(incoming.lane):
            raise ProtocolError(f"is_written is {header.is_written} in a frame of lane {incoming.lane}")
        self._check_digest(known, header)
        return incoming.parts[known.rank]

    def _check_digest(self, known: ReceiverPeer, header: FrameHeader) -> None:
        if known.has_digest != (header.payload_digest is not None):
            raise ProtocolError("a frame with a digest that was not agreed on, or without one that was")

    def _sender(self, incoming: IncomingTransfer, header: FrameHeader) -> Part:
        size = len(incoming.parts)
        for part in incoming.parts:
            heads = self._rules.pushed_heads(part.rank, size)[header.layer]
            if heads.first <= header.head_first < heads.stop:
                return part
        raise AssertionError("a frame that was taken belongs to a part")

    def _written(self, header: FrameHeader) -> IncomingTransfer:
        incoming = self._rules.table.by_id(header.incoming_id)
        assert incoming is not None, "an incoming transfer stays until all its writes are over"
        written = incoming.writes.pop(write_key(header), None)
        assert written == header, "a write that was not asked for, or ended twice"
        return incoming

    def _late(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Drop a frame that no incoming transfer wants; its sender is told, not more often than every heartbeat."""
        rules = self._rules
        rules.counts.frames_late_dropped += 1
        tombstone = rules.table.tombstone_by_id(header.incoming_id) if header.d_epoch == rules.epoch else None
        known = rules.peers.get(peer)
        if known is None or tombstone is None or tombstone.was_complete:
            return []
        if now_s - tombstone.told_s < rules.config.heartbeat_s:
            return []
        tombstone.told_s = now_s
        return [
            rules.replies.abort(
                peer, tombstone.attempt, rules.epoch, tombstone.incoming_id, known.epoch, tombstone.reason
            )
        ]
