"""The decode side of KVP/1: who may write where, when content counts as whole, and when blocks are free again.

A pure state machine: no I/O, no clock of its own. Every method returns, in order, what its caller must do or tell the
worker (`landing_actions`); a caller that obeys keeps the promises:

- nothing is written without a grant, after a seal, or once a landing has drained;
- SEALED means that every position of every layer is there and that each layer's digest, computed from the pool, equals
  what the prefill worker announced;
- after SEALED the sequence needs nothing of its prefill worker any more: that one's ABORT is acknowledged, its silence
  and its restart are ignored. Only the worker here, or a higher attempt at the same request, ends it;
- replays of old messages and frames of old epochs, landings and attempts change nothing.

The transport is two-sided: this side writes, so a fenced landing has drained as soon as the write in progress is over.
That evidence, never a timer, ends quarantine.
"""

from collections.abc import Iterable

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.core.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.coverage import Coverage
from baton.kvtransfer.frame import FrameHeader, FrameShape
from baton.kvtransfer.landing_actions import (
    DigestLayer,
    Drained,
    LandingAction,
    LandingFailed,
    ReserveWanted,
    WriteFrame,
)
from baton.kvtransfer.landing_rules import LandingCounts, LandingRules
from baton.kvtransfer.landing_table import Landing, LandingPeer, LandingState, Tombstone
from baton.kvtransfer.last_sign import LastSign
from baton.kvtransfer.messages import attempt_of, hello_problem
from baton.proto import kv_pb2

MAX_PEERS = 4096
PEER_FORGOTTEN_S = 60.0
Actions = list[LandingAction]


class LandingProtocol:
    """Every landing of one decode worker.

    Args:
        epoch: of this process.
        layout: of its pool.
        config: limits and times.
        max_capacity_len: positions of the whole pool.
    """

    def __init__(self, *, epoch: int, layout: KVLayout, config: KVTransferConfig, max_capacity_len: int) -> None:
        self._epoch = epoch
        self._layout = layout
        self._config = config
        self._max_capacity_len = max_capacity_len
        self._shape = FrameShape(layout, config.max_frame_bytes)
        self._rules = LandingRules(epoch, layout, config)
        self._peers: dict[str, LandingPeer] = {}
        self._next_landing_id = 1
        self._uncredited: set[int] = set()
        self._heartbeat_s = float("-inf")

    @property
    def counts(self) -> LandingCounts:
        """Totals since the start."""
        return self._rules.counts

    def landings(self) -> Iterable[Landing]:
        """All live landings, oldest first; to be read only."""
        return self._rules.table

    def landing(self, landing_id: int) -> Landing:
        """The live landing with this id; to be read only."""
        landing = self._rules.table.by_id(landing_id)
        assert landing is not None
        return landing

    # From the wire

    def on_control(self, peer: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Take a message.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        kind = control.WhichOneof("message")
        if kind == "hello":
            return self._on_hello(peer, control.hello, now_s)
        known = self._peers.get(peer)
        if known is None:
            self._rules.counts.messages_refused += 1
            if kind == "reserve":
                return [
                    self._rules.replies.deny(peer, attempt_of(control.reserve.attempt), kv_pb2.Deny.LAYOUT, "no HELLO")
                ]
            return []
        known.heard_s = now_s
        match kind:
            case "reserve":
                return self._on_reserve(peer, known, control.reserve, now_s)
            case "commit":
                return self._on_commit(peer, control.commit, now_s)
            case "lease":
                return self._on_lease(known, control.lease, now_s)
            case "abort":
                return self._on_abort(peer, control.abort, now_s)
            case "abort_ack":
                return []
            case "resume":
                return self._on_resume(peer, control.resume, now_s)
        raise ProtocolError(f"a decode worker takes no {kind}", kind=str(kind))

    def on_frame(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Take the header of an intact frame; a `WriteFrame` among the actions says that its payload is wanted.

        Raises:
            ProtocolError: the header contradicts the layout or the landing; nothing changed.
        """
        assert self._rules.writing == 0
        landing = self._rules.table.by_id(header.landing_id) if header.d_epoch == self._epoch else None
        fits = landing is not None and landing.attempt.attempt == header.attempt
        if landing is None or not fits or landing.state is not LandingState.FILLING:
            return self._rules.late_frame(peer, header, now_s)
        self._shape.check(header)
        if header.end > landing.prompt_len:
            raise ProtocolError(f"a frame up to position {header.end} of a prompt of {landing.prompt_len}")
        landing.renewed.renew(now_s)
        landing.charged_bytes += header.charge_bytes
        self._uncredited.add(header.landing_id)
        # A frame lands whole or not at all: one that overlaps what is there would write good positions twice.
        if landing.coverage.overlaps(header.layer, header.first, header.count, header.head_first, header.head_count):
            self._rules.counts.frames_duplicate += 1
            return []
        self._rules.writing = header.landing_id
        return [WriteFrame(header.landing_id, header)]

    def on_corrupt_frame(self) -> None:
        """Note a frame whose checksum or form was wrong: nothing in it can be believed."""
        self._rules.counts.frames_corrupt += 1

    def landed(self, header: FrameHeader, now_s: float) -> Actions:
        """The payload that `WriteFrame` asked for lies in the pool."""
        assert self._rules.writing == header.landing_id
        self._rules.writing = 0
        landing = self._rules.table.by_id(header.landing_id)
        assert landing is not None
        if landing.state is LandingState.QUARANTINED:
            return self._rules.drain(landing, now_s)
        assert landing.state is LandingState.FILLING
        landing.coverage.add(header.layer, header.first, header.count, header.head_first, header.head_count)
        landing.arrivals.append((now_s, header.payload_bytes))
        landing.bytes_landed += header.payload_bytes
        self._rules.counts.bytes_landed += header.payload_bytes
        self._rules.counts.frames_landed += 1
        if landing.coverage.is_layer_complete(header.layer):
            return [DigestLayer(landing.landing_id, header.layer)]
        return []

    def digested(self, landing_id: int, layer: int, digest: int, now_s: float) -> Actions:
        """The digest that `DigestLayer` asked for."""
        landing = self._rules.table.by_id(landing_id)
        if landing is None or landing.state is not LandingState.FILLING:
            return []
        landing.digests[layer] = digest
        return self._rules.seal_if_complete(landing)

    # From the worker

    def grant(self, attempt: AttemptKey, now_s: float) -> Actions:
        """Blocks were reserved for this attempt. If it ended meanwhile, they are given back at once."""
        landing = self._rules.table.get(attempt)
        if landing is None:
            return [LandingFailed(attempt, "the prefill worker gave up before the grant"), Drained(attempt)]
        assert landing.state is LandingState.WANTED, f"{attempt} was granted twice"
        landing.state = LandingState.FILLING
        landing.landing_id = self._next_landing_id
        landing.renewed.renew(now_s)
        self._next_landing_id += 1
        self._rules.table.index(landing)
        return [self._rules.replies.grant(landing)]

    def deny(self, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str, now_s: float) -> Actions:
        """The worker does not want this attempt."""
        landing = self._rules.table.get(attempt)
        if landing is None or landing.state is not LandingState.WANTED:
            return []
        landing.reason, landing.deny_reason = detail, reason
        self._rules.table.end(landing, now_s)
        return [self._rules.replies.deny(landing.peer, attempt, reason, detail)]

    def abort(self, attempt: AttemptKey, reason: str, now_s: float) -> Actions:
        """The worker gives a granted attempt up; `Drained` follows. One that has ended stays ended."""
        landing = self._rules.table.get(attempt)
        if landing is None:
            return []
        landing.has_failed = True  # the worker knows
        if landing.state is LandingState.WANTED:
            return self.deny(attempt, kv_pb2.Deny.STALE, reason, now_s)
        if landing.state is LandingState.SEALED:
            return self._rules.drain(landing, now_s)
        return self._rules.fence(landing, reason, now_s)

    def release(self, attempt: AttemptKey, now_s: float) -> Actions:
        """The sequence that a sealed landing became has ended, and its blocks are free."""
        landing = self._rules.table.get(attempt)
        if landing is not None:
            assert landing.state is LandingState.SEALED, f"{attempt} is released and not sealed"
            self._rules.table.end(landing, now_s)
        return []

    # From time

    def tick(self, now_s: float) -> Actions:
        """Do what is due: leases, heartbeats, NACKs, forgetting."""
        actions: Actions = []
        for landing in self._rules.table:
            actions += self._rules.due(landing, now_s)
        if now_s - self._heartbeat_s >= self._config.heartbeat_s:
            self._heartbeat_s = now_s
            actions += self._rules.replies.leases(self._rules.table)
            self._rules.table.prune(now_s)
            holders = {landing.peer for landing in self._rules.table}
            for name, peer in tuple(self._peers.items()):
                if name not in holders and now_s - peer.heard_s > PEER_FORGOTTEN_S:
                    del self._peers[name]
        return actions

    def forgive(self, pause_s: float, now_s: float) -> None:
        """This process did nothing for so long: peers must not be blamed for a silence that is mostly its own."""
        if pause_s > self._config.lease_s / 2:
            for landing in self._rules.table:
                landing.renewed.forgive(pause_s, self._config.lease_s, now_s)

    def flush(self) -> Actions:
        """Credits for what was taken since the last call; to be called after every batch of frames."""
        taken = [self._rules.table.by_id(landing_id) for landing_id in sorted(self._uncredited)]
        self._uncredited.clear()
        return [*self._rules.replies.credits(landing for landing in taken if landing is not None)]

    # Messages

    def _on_hello(self, peer: str, hello: kv_pb2.Hello, now_s: float) -> Actions:
        known = self._peers.get(peer)
        if known is not None and hello.epoch in known.retired:
            return []  # overtaken by the HELLO of a later life
        refused = hello_problem(hello.version, hello.layout, self._layout)
        actions: Actions = []
        if known is not None and known.epoch != hello.epoch:
            for landing in self._rules.table:
                is_theirs = landing.peer == peer and landing.p_epoch == known.epoch
                if is_theirs and landing.state is not LandingState.SEALED:
                    actions += self._rules.fence(landing, "the prefill worker restarted", now_s)
            known.retired.append(known.epoch)
            known.epoch = hello.epoch
        if refused:
            self._peers.pop(peer, None)
        elif known is not None:
            known.heard_s = now_s
        else:
            if len(self._peers) >= MAX_PEERS:
                refused = f"{MAX_PEERS} prefill workers are connected already"
            else:
                self._peers[peer] = LandingPeer(hello.epoch, now_s)
        return [*actions, self._rules.replies.hello(peer, hello, refused, now_s)]

    def _on_reserve(self, peer: str, known: LandingPeer, reserve: kv_pb2.Reserve, now_s: float) -> Actions:
        attempt = attempt_of(reserve.attempt)
        if reserve.epoch != known.epoch:
            self._rules.counts.messages_refused += 1
            return []
        landing = self._rules.table.get(attempt)
        if landing is not None:
            return self._repeated_reserve(peer, landing, reserve, now_s)
        tombstone = self._rules.table.tombstone(attempt)
        if tombstone is not None:
            return [self._rules.replies.deny(peer, attempt, tombstone.deny_reason, tombstone.reason or "it has ended")]
        if attempt.attempt < self._rules.table.highest_attempt(attempt.request_id):
            return [self._rules.replies.deny(peer, attempt, kv_pb2.Deny.STALE, "a later attempt was seen")]
        if not 0 < reserve.prompt_len <= reserve.capacity_len <= self._max_capacity_len:
            return [self._rules.replies.deny_sizes(peer, attempt, reserve, self._max_capacity_len)]
        if len(self._rules.table) >= self._config.ring_slots:
            return [
                self._rules.replies.deny(peer, attempt, kv_pb2.Deny.BUSY, f"{len(self._rules.table)} landings are here")
            ]
        actions: Actions = []
        for other in self._rules.table.others_of(attempt):
            actions += self._rules.fence(other, f"superseded by attempt {attempt.attempt}", now_s)
        deadline_s = now_s + reserve.wait_ms / 1e3
        layers, heads = self._layout.num_layers, self._layout.num_kv_heads
        landing = Landing(
            attempt=attempt,
            peer=peer,
            p_epoch=known.epoch,
            prompt_len=reserve.prompt_len,
            capacity_len=reserve.capacity_len,
            deadline_s=deadline_s,
            renewed=LastSign(now_s),
            coverage=Coverage(layers, heads, reserve.prompt_len),
            digests=[None] * layers,
        )
        self._rules.table.add(landing, now_s)
        return [*actions, ReserveWanted(attempt, landing.prompt_len, landing.capacity_len, deadline_s)]

    def _repeated_reserve(self, peer: str, landing: Landing, reserve: kv_pb2.Reserve, now_s: float) -> Actions:
        if landing.p_epoch != reserve.epoch:
            return [
                self._rules.replies.deny(
                    peer, landing.attempt, kv_pb2.Deny.STALE, "another life of the prefill worker has it"
                )
            ]
        match landing.state:
            case LandingState.WANTED:
                landing.renewed.renew(now_s)
                return []
            case LandingState.FILLING:
                landing.renewed.renew(now_s)
                return [self._rules.replies.grant(landing)]
            case LandingState.SEALED:
                return [self._rules.replies.grant(landing)]
            case LandingState.QUARANTINED:
                return [self._rules.replies.deny(peer, landing.attempt, kv_pb2.Deny.STALE, landing.reason)]

    def _on_commit(self, peer: str, commit: kv_pb2.Commit, now_s: float) -> Actions:
        if commit.epoch != self._epoch:
            self._rules.counts.messages_refused += 1
            return []
        landing = self._rules.table.by_id(commit.landing_id)
        if landing is None or landing.state is LandingState.QUARANTINED:
            tombstone = self._rules.table.tombstone_by_id(commit.landing_id)
            if tombstone is not None and tombstone.was_sealed:
                return [self._rules.replies.ack(peer, commit.landing_id)]
            reason = tombstone.reason if tombstone else landing.reason if landing else "there is no such landing"
            return [self._rules.replies.abort(peer, attempt_of(commit.attempt), commit.landing_id, reason)]
        if landing.attempt != attempt_of(commit.attempt):
            raise ProtocolError(f"a COMMIT of {attempt_of(commit.attempt)} for the landing of {landing.attempt}")
        if landing.state is LandingState.SEALED:
            return [self._rules.replies.ack(peer, commit.landing_id)]
        landing.renewed.renew(now_s)
        manifest = (commit.prompt_len, commit.num_layers, len(commit.layer_digests))
        if manifest != (landing.prompt_len, self._layout.num_layers, self._layout.num_layers):
            return self._rules.fence(landing, f"the COMMIT does not describe this landing: {manifest}", now_s)
        if landing.commit is None or commit.round > landing.commit.round:
            landing.commit = commit
            # Frames may be on their way behind the COMMIT; only what is still missing then is asked for again.
            landing.nack_due_s = now_s + self._config.heartbeat_s / 2
            return self._rules.seal_if_complete(landing)
        if commit.round == landing.nacked_round:
            return [self._rules.nack(landing)]
        return []

    def _on_lease(self, known: LandingPeer, lease: kv_pb2.Lease, now_s: float) -> Actions:
        if lease.epoch != known.epoch:
            return []
        for landing_id in lease.landing_ids:
            landing = self._rules.table.by_id(landing_id)
            if landing is not None and landing.p_epoch == lease.epoch:
                landing.renewed.renew(now_s)
        return []

    def _on_abort(self, peer: str, abort: kv_pb2.Abort, now_s: float) -> Actions:
        if abort.epoch != self._epoch:
            self._rules.counts.messages_refused += 1
            return []
        attempt = attempt_of(abort.attempt)
        landing = self._rules.table.get(attempt)
        if landing is None:
            if self._rules.table.tombstone(attempt) is None:
                # The RESERVE may still be on its way; it must not be taken for a new one.
                self._rules.table.bury(attempt, Tombstone(0, False, now_s, abort.reason))
            return [self._rules.replies.abort_ack(peer, attempt, abort.landing_id)]
        if abort.landing_id not in (0, landing.landing_id):
            raise ProtocolError(f"an ABORT of landing {abort.landing_id} for {landing.landing_id}")
        landing.ack_abort = landing.state in (LandingState.FILLING, LandingState.QUARANTINED)
        actions: Actions = (
            [] if landing.ack_abort else [self._rules.replies.abort_ack(peer, attempt, landing.landing_id)]
        )
        if landing.state is LandingState.SEALED:
            return actions  # the sequence has all it needs
        reason = f"the prefill worker gave up: {abort.reason}"
        return [*self._rules.fence(landing, reason, now_s, by_peer=True), *actions]

    def _on_resume(self, peer: str, resume: kv_pb2.Resume, now_s: float) -> Actions:
        landing = self._rules.table.by_id(resume.landing_id) if resume.epoch == self._epoch else None
        if landing is None or landing.state is not LandingState.FILLING:
            return []
        landing.renewed.renew(now_s)
        self._uncredited.add(landing.landing_id)
        return [*self.flush(), self._rules.replies.have(landing, resume.round)]
