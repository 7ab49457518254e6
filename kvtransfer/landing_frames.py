"""What frames do to landings: which are wanted, which are late or there already, and what follows when they landed.

Two kinds of lanes. Two-sided: this side writes; the first good write wins, and nothing is written twice. One-sided: the
sender writes and its header says so afterwards; this side only verifies. There a header from before the last question
what is missing is dropped: its sender was told to write that range again, and only what it says after that counts.
"""

from baton.core.errors import ProtocolError
from baton.core.kv_transports import is_one_sided
from baton.kvtransfer.frame import FrameHeader, FrameShape
from baton.kvtransfer.landing_actions import DigestLayer, LandingAction, WriteFrame
from baton.kvtransfer.landing_peers import LandingPeer
from baton.kvtransfer.landing_rules import MASK, LandingRules
from baton.kvtransfer.landing_table import Landing, LandingState, Part, write_key

Actions = list[LandingAction]


class LandingFrames:
    """Takes frames for one decode worker.

    Args:
        rules: its landings.
        shape: what its layout says about frames.
        digests_layers: the engine digests whole layers, because this process cannot read the pool.
    """

    def __init__(self, rules: LandingRules, shape: FrameShape, digests_layers: bool) -> None:
        self._rules = rules
        self._shape = shape
        self._digests_layers = digests_layers

    def arrived(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """A header came; a `WriteFrame` among the actions says that its payload is wanted.

        Raises:
            ProtocolError: it contradicts the layout or the landing; nothing changed.
        """
        rules = self._rules
        landing = rules.table.by_id(header.landing_id) if header.d_epoch == rules.epoch else None
        fits = landing is not None and landing.attempt.attempt == header.attempt
        if landing is None or not fits or landing.state is not LandingState.FILLING:
            return self._late(peer, header, now_s)
        part = self._part_of(peer, landing, header)
        part.renewed.renew(now_s)
        one_sided = is_one_sided(landing.lane)
        is_written_off = one_sided and header.seq < part.min_seq
        where = (header.layer, header.first, header.count, header.head_first, header.head_count)
        if is_written_off or landing.coverage.overlaps(*where) or landing.is_being_written(header):
            # A frame lands whole or not at all: one that overlaps what is there would write good positions twice.
            rules.counts.frames_duplicate += 1
            rules.charge(landing, part, header)
            return []
        landing.writes[write_key(header)] = header
        return [WriteFrame(header.landing_id, header)]

    def landed(self, header: FrameHeader, digest: int | None, now_s: float) -> Actions:
        """The payload that `WriteFrame` asked for is in the pool; `digest` is what the pool says, None if not asked."""
        landing = self._written(header)
        if landing.state is LandingState.QUARANTINED:
            self._rules.counts.frames_fenced += 1
            return self._rules.drain_if_quiet(landing, now_s)
        part = self._sender(landing, header)
        self._rules.charge(landing, part, header)
        part.renewed.renew(now_s)
        if is_one_sided(landing.lane) and header.seq < part.min_seq:
            self._rules.counts.frames_duplicate += 1
            return []  # its sender was told to write it again meanwhile
        if digest is not None and header.payload_digest is not None and digest != header.payload_digest:
            return self._rules.corrupt_frame(landing, header, now_s)
        landing.coverage.add(header.layer, header.first, header.count, header.head_first, header.head_count)
        part.digests[header.layer] = (part.digests[header.layer] + (header.payload_digest or 0)) & MASK
        landing.arrivals.append((now_s, header.payload_bytes))
        landing.bytes_landed += header.payload_bytes
        self._rules.counts.bytes_landed += header.payload_bytes
        self._rules.counts.frames_landed += 1
        if self._digests_layers and landing.coverage.is_layer_complete(header.layer):
            return [DigestLayer(landing.landing_id, header.layer)]
        return self._rules.seal_if_complete(landing, now_s)

    def failed(self, header: FrameHeader, now_s: float, *, is_corrupt: bool) -> Actions:
        """The payload did not come whole, was discarded, or arrived with a wrong checksum (`is_corrupt`)."""
        landing = self._written(header)
        if landing.state is LandingState.QUARANTINED:
            self._rules.counts.frames_fenced += 1
            return self._rules.drain_if_quiet(landing, now_s)
        if is_corrupt:
            self._rules.charge(landing, self._sender(landing, header), header)
            return self._rules.corrupt_frame(landing, header, now_s)
        return []

    def digested(self, landing_id: int, layer: int, digest: int, now_s: float) -> Actions:
        """The digest that `DigestLayer` asked for."""
        landing = self._rules.table.by_id(landing_id)
        if landing is None or landing.state is not LandingState.FILLING:
            return []
        landing.digests[layer] = digest
        return self._rules.seal_if_complete(landing, now_s)

    def _part_of(self, peer: str, landing: Landing, header: FrameHeader) -> Part:
        """The part of the landing that this frame belongs to; checks that it does."""
        known = self._rules.peers.get(peer)
        if known is None or known.epoch != landing.p_epoch or known.rank >= len(landing.parts):
            raise ProtocolError("a frame for a landing of another prefill worker", landing_id=landing.landing_id)
        self._shape.check(header)
        length = self._shape.layout.layer_len(header.layer, landing.prompt_len)
        if header.end > length:
            raise ProtocolError(f"a frame up to position {header.end} of {length} in layer {header.layer}")
        heads = self._rules.pushed_heads(known.rank, len(landing.parts))[header.layer]
        if not heads.first <= header.head_first <= header.head_first + header.head_count <= heads.stop:
            raise ProtocolError(f"a frame of rank {known.rank} for {header.head_count} heads from {header.head_first}")
        if header.is_written != is_one_sided(landing.lane):
            raise ProtocolError(f"is_written is {header.is_written} in a frame of lane {landing.lane}")
        self._check_digest(known, header)
        return landing.parts[known.rank]

    def _check_digest(self, known: LandingPeer, header: FrameHeader) -> None:
        if known.has_digest != (header.payload_digest is not None):
            raise ProtocolError("a frame with a digest that was not agreed on, or without one that was")

    def _sender(self, landing: Landing, header: FrameHeader) -> Part:
        size = len(landing.parts)
        for part in landing.parts:
            heads = self._rules.pushed_heads(part.rank, size)[header.layer]
            if heads.first <= header.head_first < heads.stop:
                return part
        raise AssertionError("a frame that was taken belongs to a part")

    def _written(self, header: FrameHeader) -> Landing:
        landing = self._rules.table.by_id(header.landing_id)
        assert landing is not None, "a landing stays until all its writes are over"
        written = landing.writes.pop(write_key(header), None)
        assert written == header, "a write that was not asked for, or ended twice"
        return landing

    def _late(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Drop a frame that no landing wants; its sender is told, not more often than every heartbeat."""
        rules = self._rules
        rules.counts.frames_late_dropped += 1
        tombstone = rules.table.tombstone_by_id(header.landing_id) if header.d_epoch == rules.epoch else None
        known = rules.peers.get(peer)
        if known is None or tombstone is None or tombstone.was_sealed:
            return []
        if now_s - tombstone.told_s < rules.config.heartbeat_s:
            return []
        tombstone.told_s = now_s
        return [
            rules.replies.abort(
                peer, tombstone.attempt, rules.epoch, tombstone.landing_id, known.epoch, tombstone.reason
            )
        ]
