"""When a landing ends, seals, drains or asks again: the rules that messages, frames, workers and time all lead to.

`landing_protocol` decides which rule applies.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.config import KVTransferConfig
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.frame import FrameHeader
from baton.kvtransfer.landing_actions import Drained, LandingAction, LandingFailed, Sealed, SendControl
from baton.kvtransfer.landing_replies import LandingReplies
from baton.kvtransfer.landing_table import Landing, LandingState, LandingTable
from baton.proto import kv_pb2

Actions = list[LandingAction]


@dataclass(slots=True)
class LandingCounts:
    """Totals since the start."""

    bytes_landed: int = 0
    frames_landed: int = 0
    frames_late_dropped: int = 0
    frames_duplicate: int = 0
    frames_corrupt: int = 0
    layers_corrupt: int = 0
    messages_refused: int = 0


class LandingRules:
    """The state of all landings, and the rules that change it."""

    def __init__(self, epoch: int, layout: KVLayout, config: KVTransferConfig) -> None:
        self.table = LandingTable()
        self.counts = LandingCounts()
        self.replies = LandingReplies(epoch, layout, config)
        self.writing = 0  # landing id of the frame being written, 0 for none
        self._epoch = epoch
        self._config = config

    def due(self, landing: Landing, now_s: float) -> Actions:
        """What time makes necessary for one landing: a NACK, or its end."""
        actions: Actions = []
        if landing.nack_due_s is not None and now_s >= landing.nack_due_s and landing.state is LandingState.FILLING:
            actions.append(self.nack(landing))
        lease_s = self._config.lease_s
        if landing.state in (LandingState.WANTED, LandingState.FILLING) and landing.renewed.silence_s(now_s) > lease_s:
            actions += self.fence(landing, f"nothing heard of it from its prefill worker for {lease_s} s", now_s)
        elif landing.state is LandingState.WANTED and now_s > landing.deadline_s + lease_s:
            actions += self.fence(landing, "it was neither granted nor denied in time", now_s)
        return actions

    def seal_if_complete(self, landing: Landing) -> Actions:
        """Seal a landing that is whole and verified; ask again for layers that are whole and wrong."""
        commit = landing.commit
        if commit is None or not landing.coverage.is_complete() or None in landing.digests:
            return []
        corrupt = [layer for layer, digest in enumerate(commit.layer_digests) if landing.digests[layer] != digest]
        if corrupt:
            self.counts.layers_corrupt += len(corrupt)
            for layer in corrupt:
                landing.coverage.reset_layer(layer)
                landing.digests[layer] = None
            return [self.nack(landing, corrupt)]
        landing.state = LandingState.SEALED
        landing.nack_due_s = None
        prefill_end_s = commit.prefill_end_ns / 1e9
        sealed = Sealed(
            attempt=landing.attempt,
            landing_id=landing.landing_id,
            prompt_len=landing.prompt_len,
            state=commit.state,
            bytes_landed=landing.bytes_landed,
            bytes_landed_before_prefill_end=landing.bytes_before(prefill_end_s),
            prefill_end_s=prefill_end_s,
        )
        return [sealed, self.replies.ack(landing.peer, landing.landing_id)]

    def fence(self, landing: Landing, reason: str, now_s: float, *, by_peer: bool = False) -> Actions:
        """End a landing that will not be used; its blocks go back when nothing writes them.

        `by_peer`: its prefill worker gave it up.
        """
        actions: Actions = []
        if not landing.has_failed:
            landing.has_failed = True
            actions.append(LandingFailed(landing.attempt, reason, by_peer))
        match landing.state:
            case LandingState.WANTED:
                landing.reason = reason
                self.table.end(landing, now_s)
                actions.append(self.replies.deny(landing.peer, landing.attempt, kv_pb2.Deny.STALE, reason))
            case LandingState.FILLING:
                landing.reason = reason
                landing.state = LandingState.QUARANTINED
                if not landing.ack_abort:
                    actions.append(self.replies.abort(landing.peer, landing.attempt, landing.landing_id, reason))
                if self.writing != landing.landing_id:
                    actions += self.drain(landing, now_s)
            case LandingState.SEALED | LandingState.QUARANTINED:
                pass  # the worker releases what is sealed; the write in progress ends quarantine
        return actions

    def drain(self, landing: Landing, now_s: float) -> Actions:
        """Nothing writes the blocks any more."""
        self.table.end(landing, now_s)
        actions: Actions = [Drained(landing.attempt)]
        if landing.ack_abort:
            actions.append(self.replies.abort_ack(landing.peer, landing.attempt, landing.landing_id))
        return actions

    def late_frame(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Drop a frame that no landing wants; its sender is told, not more often than every heartbeat."""
        self.counts.frames_late_dropped += 1
        tombstone = self.table.tombstone_by_id(header.landing_id) if header.d_epoch == self._epoch else None
        if tombstone is None or tombstone.was_sealed or now_s - tombstone.told_s < self._config.heartbeat_s:
            return []
        tombstone.told_s = now_s
        return [self.replies.abort(peer, None, header.landing_id, tombstone.reason)]

    def nack(self, landing: Landing, corrupt: Iterable[int] = ()) -> SendControl:
        """Ask for everything that is missing; once for each COMMIT, and for each repeat of it."""
        assert landing.commit is not None
        landing.nack_due_s = None
        landing.nacked_round = landing.commit.round
        return self.replies.nack(landing, corrupt)
