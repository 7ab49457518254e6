"""The decode side of KVP/2: who may write where, when content counts as complete, and when blocks are free again.

A pure state machine: no I/O, no clock of its own. Every method returns, in order, the actions that its caller must
perform and the events for the worker (`receiver.actions`). If the caller obeys, these guarantees hold:

- Nothing is written without a grant, into a complete incoming transfer, or after a transfer has drained.
- COMPLETE means that every position of every layer and head has arrived, that every rank of the prefill worker has
  committed its part, and that digests computed from the pool equal the announced ones. All ranks or none.
- From then on the sequence does not depend on its prefill worker: its ABORT is acknowledged, its silence and restart
  are ignored. Only the worker here, or a higher attempt at the same request, ends the sequence.
- Replays of old messages, and frames of old epochs, incoming transfers and attempts, change nothing.

Evidence, never a timer, ends quarantine. On a two-sided data path this side writes, so a fenced transfer has drained
when the writes in progress are over. On a one-sided data path the ranks of the prefill worker write: each of them must
report, in that incarnation, that it has stopped, or be proven dead.
"""

from collections.abc import Callable, Iterable, Sequence

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.core.kv_transports import INLINE, is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import FrameHeader, FrameShape
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.messages import DIGEST, attempt_of, hello_problem, ranks_problem
from baton.kvtransfer.protocol.transfer_times import TransferTimes
from baton.kvtransfer.receiver.actions import (
    DigestLayer,
    Drained,
    IncomingFailed,
    ReceiverAction,
    ReserveWanted,
    WriteFrame,
)
from baton.kvtransfer.receiver.peers import MAX_PEERS, PeerIncarnation, ReceiverPeer
from baton.kvtransfer.receiver.rules import MASK, ReceiverCounts, ReceiverRules
from baton.kvtransfer.receiver.table import IncomingState, IncomingTransfer, Inherited, RankPush, Tombstone, write_key
from baton.proto import kv_pb2

Actions = list[ReceiverAction]


class ReceiverInbox:
    """Handles the control messages that one decode worker receives.

    Args:
        rules: its incoming transfers.
        max_capacity_len: number of positions of the whole pool.
        has_digest: whether frames are verified by digest if their sender can.
    """

    def __init__(self, rules: ReceiverRules, max_capacity_len: int, has_digest: bool) -> None:
        self._rules = rules
        self._max_capacity_len = max_capacity_len
        self._has_digest = has_digest

    def take(self, peer: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Handle a message.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        kind = control.WhichOneof("message")
        if kind == "hello":
            return self._on_hello(peer, control.hello, now_s)
        known = self._rules.peers.get(peer)
        if known is None:
            self._rules.counts.messages_refused += 1
            if kind == "reserve":
                attempt = attempt_of(control.reserve.attempt)
                return [self._rules.replies.deny(peer, attempt, kv_pb2.Deny.NO_HELLO, "no HELLO was heard")]
            return []
        known.heard_s = now_s
        handlers: dict[str, Callable[..., Actions]] = {
            "reserve": self._on_reserve,
            "commit": self._on_commit,
            "lease": self._on_lease,
            "abort": self._on_abort,
            "abort_ack": self._on_abort_ack,
            "resume": self._on_resume,
        }
        handler = handlers.get(str(kind))
        if handler is None:
            raise ProtocolError(f"a decode worker takes no {kind}", kind=str(kind))
        return handler(peer, known, getattr(control, str(kind)), now_s)

    def _on_hello(self, peer: str, hello: kv_pb2.Hello, now_s: float) -> Actions:
        """Handle a HELLO. Until its proof is verified, nothing that it says is believed, kept or acted on."""
        rules = self._rules
        known = rules.peers.get(peer)
        if not rules.proofs.has_challenge(hello, rules.epoch, peer, now_s):
            return [rules.replies.challenge(peer, hello, now_s)]
        if not rules.proofs.knows_key(hello):
            rules.counts.hellos_unproved += 1
            return [rules.replies.unproved(peer, hello)]
        if known is not None and known.epoch == hello.epoch and hello.sent_ns <= known.hello_ns:
            rules.counts.hellos_unproved += hello.sent_ns == known.hello_ns
            return []  # overtaken by a later HELLO, or replayed by an eavesdropper
        if known is not None and hello.epoch in known.retired and now_s - known.heard_s <= rules.config.lease_s:
            # Overtaken by the HELLO of a later incarnation; if it is the other way round, silence shows it.
            return []
        refused = hello_problem(hello.version, hello.layout, rules.layout) or ranks_problem(hello, rules.layout)
        if not refused and rules.peers.size_of(hello.epoch) not in (0, hello.tp_size):
            refused = f"rank {hello.tp_rank} says there are {hello.tp_size} ranks, another said otherwise"
        if not refused and known is None and rules.peers.is_full:
            refused = f"{MAX_PEERS} prefill workers are connected already"
        actions: Actions = []
        if known is not None and known.epoch != hello.epoch:
            actions += self._end_incarnation(known.epoch, now_s)
        if refused:
            rules.peers.leave(peer)
        else:
            has_digest = self._has_digest and DIGEST in hello.capabilities
            ranks = (hello.tp_rank, hello.tp_size)
            said = hello.host_id, hello.incarnation_file
            rules.peers.meet(peer, ReceiverPeer(hello.epoch, *ranks, has_digest, *said, now_s, hello.sent_ns))
        return [*actions, rules.replies.hello(peer, hello, refused, now_s)]

    def _end_incarnation(self, p_epoch: int, now_s: float) -> Actions:
        """Fence the transfers of an incarnation that was replaced. That does not prove that the old process is dead."""
        actions: Actions = []
        for incoming in self._rules.table:
            if incoming.p_epoch == p_epoch and incoming.state is not IncomingState.COMPLETE:
                actions += self._rules.fence(incoming, "the prefill worker restarted", now_s)
        return actions

    def _on_reserve(self, peer: str, known: ReceiverPeer, reserve: kv_pb2.Reserve, now_s: float) -> Actions:
        rules = self._rules
        attempt = attempt_of(reserve.attempt)
        if reserve.epoch != known.epoch or reserve.peer_epoch != rules.epoch:
            rules.counts.messages_refused += 1
            return []
        if known.rank != 0 or max(1, reserve.tp_size) != known.size:
            raise ProtocolError(f"rank {known.rank} of {known.size} reserves for {reserve.tp_size}")
        incoming = rules.table.get(attempt)
        if incoming is not None:
            return self._repeated_reserve(peer, incoming, reserve, now_s)
        problem = self._reserve_problem(peer, attempt, reserve)
        if problem:
            return problem
        actions: Actions = []
        for other in rules.table.others_of(attempt):
            actions += rules.fence(other, f"superseded by attempt {attempt.attempt}", now_s)
        incoming = self._new_incoming(peer, known, attempt, reserve, now_s)
        rules.table.add(incoming, now_s)
        return [
            *actions,
            ReserveWanted(
                attempt=attempt,
                prompt_len=incoming.prompt_len,
                capacity_len=incoming.capacity_len,
                deadline_s=incoming.deadline_s,
                p_epoch=incoming.p_epoch,
                tp_size=len(incoming.parts),
                data_path=incoming.data_path,
            ),
        ]

    def _reserve_problem(self, peer: str, attempt: AttemptKey, reserve: kv_pb2.Reserve) -> Actions:
        """Return the DENY for a new RESERVE; empty if it may be granted."""
        table, replies = self._rules.table, self._rules.replies
        tombstone = table.tombstone(attempt)
        if tombstone is not None:
            return [replies.deny(peer, attempt, tombstone.deny_reason, tombstone.reason or "it has ended")]
        if attempt.attempt < table.highest_attempt(attempt.request_id):
            return [replies.deny(peer, attempt, kv_pb2.Deny.STALE, "a later attempt was seen")]
        if not replies.serves(reserve.data_path or INLINE):
            return [
                replies.deny(
                    peer, attempt, kv_pb2.Deny.DATA_PATH, f"no data path {reserve.data_path[:32]!r} is served here"
                )
            ]
        if not 0 < reserve.prompt_len <= reserve.capacity_len <= self._max_capacity_len:
            return [replies.deny_sizes(peer, attempt, reserve, self._max_capacity_len)]
        if len(table) >= self._rules.config.ring_slots:
            return [replies.deny(peer, attempt, kv_pb2.Deny.BUSY, f"{len(table)} incoming transfers are here")]
        return []

    def _new_incoming(
        self, peer: str, known: ReceiverPeer, attempt: AttemptKey, reserve: kv_pb2.Reserve, now_s: float
    ) -> IncomingTransfer:
        num_layers = self._rules.layout.num_layers
        parts = [RankPush(rank, LastSign(now_s), [0] * num_layers) for rank in range(known.size)]
        return IncomingTransfer(
            attempt=attempt,
            epoch=self._rules.epoch,
            peer=peer,
            p_epoch=known.epoch,
            data_path=reserve.data_path or INLINE,
            prompt_len=reserve.prompt_len,
            capacity_len=reserve.capacity_len,
            deadline_s=now_s + reserve.wait_ms / 1e3,
            coverage=self._rules.coverage(reserve.prompt_len),
            parts=parts,
            # A layer that keeps nothing of such a short prompt is already complete.
            digests=[None if layer.span(reserve.prompt_len).count else 0 for layer in self._rules.layout.layers],
        )

    def _repeated_reserve(
        self, peer: str, incoming: IncomingTransfer, reserve: kv_pb2.Reserve, now_s: float
    ) -> Actions:
        replies = self._rules.replies
        if incoming.p_epoch != reserve.epoch:
            why = "another incarnation of the prefill worker has it"
            return [replies.deny(peer, incoming.attempt, kv_pb2.Deny.STALE, why)]
        incoming.peer = peer  # its rank 0 may have reconnected
        match incoming.state:
            case IncomingState.WANTED:
                incoming.parts[0].renewed.renew(now_s)
                return []
            case IncomingState.FILLING:
                incoming.parts[0].renewed.renew(now_s)
                return [replies.grant(incoming)]
            case IncomingState.COMPLETE if incoming.epoch == self._rules.epoch:
                return [replies.grant(incoming)]
            case IncomingState.QUARANTINED if incoming.epoch == self._rules.epoch:
                # The GRANT was lost. If it were denied, its sender would forget that it never told the other ranks of
                # it, and they, who do not know this worker, could never be asked.
                return [*replies.abort_part(incoming, incoming.parts[0])]
            case _:
                why = incoming.reason or "another incarnation of this decode worker had it"
                return [replies.deny(peer, incoming.attempt, kv_pb2.Deny.STALE, why)]

    def _on_commit(self, peer: str, known: ReceiverPeer, commit: kv_pb2.Commit, now_s: float) -> Actions:
        rules = self._rules
        if commit.epoch != rules.epoch:
            rules.counts.messages_refused += 1
            return []
        incoming = rules.table.by_id(commit.incoming_id)
        if incoming is None or incoming.state is IncomingState.QUARANTINED:
            return self._late_commit(peer, known, incoming, commit)
        if incoming.attempt != attempt_of(commit.attempt):
            raise ProtocolError(
                f"a COMMIT of {attempt_of(commit.attempt)} for the incoming transfer of {incoming.attempt}"
            )
        part = self._part(incoming, known)
        if incoming.state is IncomingState.COMPLETE:
            return [rules.replies.ack(peer, rules.epoch, commit.incoming_id)]
        part.renewed.renew(now_s)
        num_layers = rules.layout.num_layers
        num_digests = num_layers if known.has_digest else len(commit.layer_digests) and num_layers
        manifest = (commit.prompt_len, commit.num_layers, len(commit.layer_digests), commit.tp_rank, commit.tp_size)
        if manifest != (incoming.prompt_len, num_layers, num_digests, known.rank, known.size):
            return rules.fence(incoming, f"the COMMIT does not describe this incoming transfer: {manifest}", now_s)
        if part.commit is None or commit.round > part.commit.round:
            part.commit = commit
            part.is_commit_void = False
            # Frames may still follow the COMMIT; only what is missing after a while is requested again.
            part.nack_due_s = now_s + rules.config.heartbeat_s / 2
            return rules.complete_if_whole(incoming, now_s)
        if commit.round == part.commit.round == part.nacked_round:
            return rules.nack(incoming, part)
        return []

    def _late_commit(
        self, peer: str, known: ReceiverPeer, incoming: IncomingTransfer | None, commit: kv_pb2.Commit
    ) -> Actions:
        replies, epoch = self._rules.replies, self._rules.epoch
        tombstone = self._rules.table.tombstone_by_id(commit.incoming_id)
        if tombstone is not None and tombstone.was_complete:
            return [replies.ack(peer, epoch, commit.incoming_id)]
        reason = (
            tombstone.reason if tombstone else incoming.reason if incoming else "there is no such incoming transfer"
        )
        attempt = attempt_of(commit.attempt)
        return [replies.abort(peer, attempt, epoch, commit.incoming_id, known.epoch, reason)]

    def _on_lease(self, peer: str, known: ReceiverPeer, lease: kv_pb2.Lease, now_s: float) -> Actions:
        if lease.epoch != known.epoch:
            return []
        for incoming_id in lease.incoming_ids:
            incoming = self._rules.table.by_id(incoming_id)
            if incoming is not None and incoming.p_epoch == lease.epoch and known.rank < len(incoming.parts):
                incoming.parts[known.rank].renewed.renew(now_s)
        return []

    def _on_abort(self, peer: str, known: ReceiverPeer, abort: kv_pb2.Abort, now_s: float) -> Actions:
        rules = self._rules
        attempt = attempt_of(abort.attempt)
        incoming = rules.table.get(attempt)
        ack = rules.replies.abort_ack(peer, attempt, abort.epoch, abort.incoming_id)
        if incoming is None or incoming.epoch != abort.epoch:
            if abort.epoch == rules.epoch and incoming is None and rules.table.tombstone(attempt) is None:
                # The RESERVE may still be on its way; it must not be taken for a new one.
                rules.table.bury(Tombstone(attempt, 0, False, now_s, abort.reason))
            return [ack]  # also for past incarnations: their leftovers are known here, and this is not among them
        if incoming.p_epoch != known.epoch or known.rank >= len(incoming.parts):
            raise ProtocolError(f"an ABORT of {attempt} by another prefill worker")
        if abort.incoming_id not in (0, incoming.incoming_id) and incoming.incoming_id:
            raise ProtocolError(f"an ABORT of incoming transfer {abort.incoming_id} for {incoming.incoming_id}")
        if incoming.state is IncomingState.COMPLETE:
            return [ack]  # the sequence has all it needs
        is_held = incoming.state is not IncomingState.WANTED
        if is_held:
            incoming.ack_to.add(peer)
        reason = f"the prefill worker gave up: {abort.reason}"
        return [*rules.fence(incoming, reason, now_s, by_peer=True), *([] if is_held else [ack])]

    def _on_abort_ack(self, peer: str, known: ReceiverPeer, ack: kv_pb2.AbortAck, now_s: float) -> Actions:
        """Record evidence for a transfer that waits for it. It stays true: it may come late and by any connection."""
        incoming = self._rules.table.get(attempt_of(ack.attempt))
        if incoming is None or incoming.state is not IncomingState.QUARANTINED or not is_one_sided(incoming.data_path):
            return []
        is_meant = (ack.epoch, ack.incoming_id) == (incoming.epoch, incoming.incoming_id)
        if not is_meant or not ack.drained or ack.peer_epoch != incoming.p_epoch or ack.tp_rank >= len(incoming.parts):
            self._rules.counts.messages_refused += 1
            return []
        for part in incoming.parts:
            part.is_drained |= part.rank == ack.tp_rank or (ack.tp_rank == 0 and ack.all_ranks)
        return self._rules.drain_if_quiet(incoming, now_s)

    def _on_resume(self, peer: str, known: ReceiverPeer, resume: kv_pb2.Resume, now_s: float) -> Actions:
        rules = self._rules
        incoming = rules.table.by_id(resume.incoming_id) if resume.epoch == rules.epoch else None
        if incoming is None or incoming.state is IncomingState.QUARANTINED:
            tombstone = rules.table.tombstone_by_id(resume.incoming_id) if resume.epoch == rules.epoch else None
            gone = incoming or tombstone
            if gone is None or (tombstone is not None and tombstone.was_complete):
                return []
            where = (gone.attempt, rules.epoch, resume.incoming_id, known.epoch)
            return [rules.replies.abort(peer, *where, gone.reason)]
        if incoming.state is not IncomingState.FILLING:
            return []
        part = self._part(incoming, known)
        part.renewed.renew(now_s)
        part.write_off(resume.next_seq)
        return [rules.replies.have(peer, incoming, part, rules.gaps(incoming, part), resume.round)]

    def _part(self, incoming: IncomingTransfer, known: ReceiverPeer) -> RankPush:
        if known.epoch != incoming.p_epoch or known.rank >= len(incoming.parts):
            raise ProtocolError(
                "a message about an incoming transfer of another prefill worker", incoming_id=incoming.incoming_id
            )
        return incoming.parts[known.rank]


class ReceiverFrames:
    """Handles the frames that one decode worker receives.

    Args:
        rules: its incoming transfers.
        shape: constraints on frames that follow from its layout.
        digests_layers: whether the engine digests whole layers because this process cannot read the pool.
    """

    def __init__(self, rules: ReceiverRules, shape: FrameShape, digests_layers: bool) -> None:
        self._rules = rules
        self._shape = shape
        self._digests_layers = digests_layers

    def arrived(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Handle a frame's header; a `WriteFrame` among the actions asks for its payload.

        Raises:
            ProtocolError: the header contradicts the layout or the incoming transfer; nothing changed.
        """
        rules = self._rules
        incoming = rules.table.by_id(header.incoming_id) if header.d_epoch == rules.epoch else None
        fits = incoming is not None and incoming.attempt.attempt == header.attempt
        if incoming is None or not fits or incoming.state is not IncomingState.FILLING:
            return self._late(peer, header, now_s)
        part = self._part_of(peer, incoming, header)
        part.renewed.renew(now_s)
        one_sided = is_one_sided(incoming.data_path)
        is_written_off = one_sided and header.seq < part.min_seq
        where = (header.layer, header.first, header.count, header.head_first, header.head_count)
        if is_written_off or incoming.coverage.overlaps(*where) or incoming.is_being_written(header):
            # A frame arrives whole or not at all: one that overlaps what is there would write good positions twice.
            rules.counts.frames_duplicate += 1
            rules.charge(incoming, part, header)
            return []
        incoming.writes[write_key(header)] = header
        return [WriteFrame(header.incoming_id, header)]

    def landed(self, header: FrameHeader, digest: int | None, now_s: float) -> Actions:
        """Count a payload that is now in the pool; `digest` was computed from the pool, None if not requested."""
        incoming = self._written(header)
        if incoming.state is IncomingState.QUARANTINED:
            self._rules.counts.frames_fenced += 1
            return self._rules.drain_if_quiet(incoming, now_s)
        part = self._sender(incoming, header)
        self._rules.charge(incoming, part, header)
        part.renewed.renew(now_s)
        if is_one_sided(incoming.data_path) and header.seq < part.min_seq:
            self._rules.counts.frames_duplicate += 1
            return []  # its sender was told meanwhile to write it again
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
        """Handle a payload that was incomplete, was discarded, or had a wrong checksum (`is_corrupt`)."""
        incoming = self._written(header)
        if incoming.state is IncomingState.QUARANTINED:
            self._rules.counts.frames_fenced += 1
            return self._rules.drain_if_quiet(incoming, now_s)
        if is_corrupt:
            self._rules.charge(incoming, self._sender(incoming, header), header)
            return self._rules.corrupt_frame(incoming, header, now_s)
        return []

    def digested(self, incoming_id: int, layer: int, digest: int, now_s: float) -> Actions:
        """Record the digest that `DigestLayer` asked for."""
        incoming = self._rules.table.by_id(incoming_id)
        if incoming is None or incoming.state is not IncomingState.FILLING:
            return []
        incoming.digests[layer] = digest
        return self._rules.complete_if_whole(incoming, now_s)

    def _part_of(self, peer: str, incoming: IncomingTransfer, header: FrameHeader) -> RankPush:
        """Return the part of the incoming transfer that this frame belongs to, after checking that it does."""
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
        if not self._rules.pushes(known.rank, len(incoming.parts), header):
            where = f"{header.head_count} heads from {header.head_first}, positions {header.first} to {header.end}"
            raise ProtocolError(f"a frame of rank {known.rank} for {where}, which it does not push")
        if header.is_written != is_one_sided(incoming.data_path):
            raise ProtocolError(f"is_written is {header.is_written} in a frame of data path {incoming.data_path}")
        self._check_digest(known, header)
        return incoming.parts[known.rank]

    def _check_digest(self, known: ReceiverPeer, header: FrameHeader) -> None:
        if known.has_digest != (header.payload_digest is not None):
            raise ProtocolError("a frame with a digest that was not agreed on, or without one that was")

    def _sender(self, incoming: IncomingTransfer, header: FrameHeader) -> RankPush:
        size = len(incoming.parts)
        for part in incoming.parts:
            if self._rules.pushes(part.rank, size, header):
                return part
        raise AssertionError("a frame that was taken belongs to a part")

    def _written(self, header: FrameHeader) -> IncomingTransfer:
        incoming = self._rules.table.by_id(header.incoming_id)
        assert incoming is not None, "an incoming transfer stays until all its writes are over"
        written = incoming.writes.pop(write_key(header), None)
        assert written == header, "a write that was not asked for, or ended twice"
        return incoming

    def _late(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Drop a frame that no incoming transfer expects, and tell its sender, at most once per heartbeat."""
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


class ReceiverProtocol:
    """All incoming transfers of one decode worker.

    Args:
        epoch: incarnation of this process.
        layout: layout of its pools, all ranks together.
        config: limits and times.
        max_capacity_len: number of positions of the whole pool.
        offers: data paths served besides "inline".
        host_id: identifier of this machine; offers of shared memory go to peers with the same one.
        has_digest: whether frames and layers are verified by digest, if the peer can.
        digests_layers: whether the engine digests whole layers (`DigestLayer`), because this process cannot read the
            pool.
    """

    def __init__(
        self,
        *,
        epoch: int,
        layout: KVLayout,
        config: KVTransferConfig,
        max_capacity_len: int,
        offers: Sequence[kv_pb2.DataPathOffer] = (),
        host_id: str = "",
        has_digest: bool = True,
        digests_layers: bool = False,
    ) -> None:
        self._config = config
        self._rules = ReceiverRules(epoch, layout, config, offers, host_id, has_digest, digests_layers)
        self._frames = ReceiverFrames(self._rules, FrameShape(layout, config.max_frame_bytes), digests_layers)
        self._inbox = ReceiverInbox(self._rules, max_capacity_len, has_digest)
        self._next_incoming_id = 1
        self._heartbeat_s = float("-inf")

    @property
    def times(self) -> TransferTimes:
        """Durations of hand-offs."""
        return self._rules.times

    @property
    def counts(self) -> ReceiverCounts:
        """Totals since the start."""
        return self._rules.counts

    def incoming_transfers(self) -> Iterable[IncomingTransfer]:
        """Return all live incoming transfers, oldest first; read-only."""
        return self._rules.table

    def incoming(self, incoming_id: int) -> IncomingTransfer:
        """Return the live incoming transfer with this id; read-only."""
        incoming = self._rules.table.by_id(incoming_id)
        assert incoming is not None
        return incoming

    def find(self, attempt: AttemptKey) -> IncomingTransfer | None:
        """Return the live incoming transfer of an attempt; read-only."""
        return self._rules.table.get(attempt)

    def is_met(self, peer: str) -> bool:
        """Return whether a connection's HELLO was proved and accepted."""
        return self._rules.peers.get(peer) is not None

    def suspects(self) -> list[PeerIncarnation]:
        """Return the ranks that hold up quarantined blocks; call `peer_is_dead` for each whose death is proven."""
        waiting = [incoming for incoming in self._rules.table if incoming.state is IncomingState.QUARANTINED]
        keys = {
            (incoming.p_epoch, part.rank)
            for incoming in waiting
            if is_one_sided(incoming.data_path)
            for part in incoming.parts
            if not part.is_drained
        }
        return [self._rules.peers.incarnation(*key) for key in sorted(keys)]

    # Messages and frames

    def on_control(self, peer: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Handle a message.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        return self._inbox.take(peer, control, now_s)

    def on_frame(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Handle a frame's header; a `WriteFrame` among the actions asks for its payload.

        Raises:
            ProtocolError: the header contradicts the layout or the incoming transfer; nothing changed.
        """
        return self._frames.arrived(peer, header, now_s)

    def on_corrupt_frame(self) -> None:
        """Count a frame whose header was damaged, so that nothing in it can be trusted."""
        self._rules.counts.frames_corrupt += 1

    def landed(self, header: FrameHeader, digest: int | None, now_s: float) -> Actions:
        """Report that a `WriteFrame`'s payload is in the pool; `digest` was computed there, None if not computed."""
        return self._frames.landed(header, digest, now_s)

    def write_failed(self, header: FrameHeader, now_s: float, *, is_corrupt: bool = False) -> Actions:
        """Report that a payload will not come, was discarded, or has a wrong checksum. Nothing writes it any more."""
        return self._frames.failed(header, now_s, is_corrupt=is_corrupt)

    def digested(self, incoming_id: int, layer: int, digest: int, now_s: float) -> Actions:
        """Report the digest that `DigestLayer` asked for."""
        return self._frames.digested(incoming_id, layer, digest, now_s)

    # Calls from the worker

    def grant(
        self, attempt: AttemptKey, now_s: float, blocks: Sequence[int] = (), state_slot: int | None = None
    ) -> Actions:
        """Grant blocks that were reserved for this attempt. If it ended meanwhile, they are returned at once."""
        incoming = self._rules.table.get(attempt)
        if incoming is None:
            return [IncomingFailed(attempt, "the prefill worker gave up before the grant"), Drained(attempt)]
        assert incoming.state is IncomingState.WANTED, f"{attempt} was granted twice"
        incoming.state = IncomingState.FILLING
        incoming.incoming_id = self._next_incoming_id
        if is_one_sided(incoming.data_path):
            assert blocks, "the sender must know where to write"
            incoming.blocks, incoming.state_slot = tuple(blocks), state_slot
        for part in incoming.parts:
            part.renewed.renew(now_s)
        self._next_incoming_id += 1
        self._rules.table.index(incoming)
        return [self._rules.replies.grant(incoming)]

    def deny(self, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str, now_s: float) -> Actions:
        """Refuse an attempt for the worker."""
        incoming = self._rules.table.get(attempt)
        if incoming is None or incoming.state is not IncomingState.WANTED:
            return []
        incoming.reason, incoming.deny_reason = detail, reason
        self._rules.table.end(incoming, now_s)
        return [self._rules.replies.deny(incoming.peer, attempt, reason, detail)]

    def abort(self, attempt: AttemptKey, reason: str, now_s: float) -> Actions:
        """Give a granted attempt up for the worker; `Drained` follows. Does nothing if it has ended."""
        incoming = self._rules.table.get(attempt)
        if incoming is None:
            return []
        incoming.has_failed = True  # the worker knows
        if incoming.state is IncomingState.WANTED:
            return self.deny(attempt, kv_pb2.Deny.STALE, reason, now_s)
        if incoming.state is IncomingState.COMPLETE:
            return self._rules.drain(incoming, now_s)
        return self._rules.fence(incoming, reason, now_s)

    def release(self, attempt: AttemptKey, now_s: float) -> Actions:
        """Release a complete transfer: the sequence that it became has ended, and its blocks are free."""
        incoming = self._rules.table.get(attempt)
        if incoming is not None:
            assert incoming.state is IncomingState.COMPLETE, f"{attempt} is released and not complete"
            self._rules.table.end(incoming, now_s)
        return []

    def inherit(self, inherited: Inherited, now_s: float) -> None:
        """Take over what a former incarnation granted on a one-sided data path. Call it before handling any message.

        For transfers that were not complete, the ranks of the prefill worker are asked to stop; `Drained` follows on
        evidence.
        """
        attempt, is_complete = inherited.attempt, inherited.is_complete
        incoming = IncomingTransfer(
            attempt=attempt,
            epoch=inherited.epoch,
            peer="",
            p_epoch=inherited.p_epoch,
            data_path=inherited.data_path,
            prompt_len=1,
            capacity_len=1,
            deadline_s=now_s,
            coverage=self._rules.coverage(1),
            parts=[RankPush(rank, LastSign(now_s), []) for rank in range(inherited.tp_size)],
            digests=[],
            state=IncomingState.COMPLETE if is_complete else IncomingState.QUARANTINED,
            has_failed=not is_complete,
            reason="the KV receiver process of the decode worker restarted",
        )
        self._rules.table.add(incoming, now_s)

    # Evidence and time

    def peer_is_dead(self, p_epoch: int, now_s: float, rank: int | None = None) -> Actions:
        """Report proof that a rank of an incarnation (None: every rank) is dead and writes nothing any more."""
        actions: Actions = []
        for incoming in self._rules.table:
            if incoming.p_epoch != p_epoch or incoming.state is IncomingState.COMPLETE:
                continue
            for part in incoming.parts:
                part.is_drained |= rank is None or rank == part.rank
            if incoming.state is IncomingState.QUARANTINED:
                actions += self._rules.drain_if_quiet(incoming, now_s)
            else:
                actions += self._rules.fence(incoming, "the prefill worker is dead", now_s)
        return actions

    def tick(self, now_s: float) -> Actions:
        """Return what is due: leases, heartbeats, NACKs, questions, forgetting."""
        rules = self._rules
        actions: Actions = []
        for incoming in rules.table:
            actions += rules.due(incoming, now_s)
        if now_s - self._heartbeat_s >= self._config.heartbeat_s:
            self._heartbeat_s = now_s
            actions += rules.replies.leases(rules.table)
            rules.table.prune(now_s)
            rules.peers.prune({incoming.p_epoch for incoming in rules.table}, now_s)
        return actions

    def forgive(self, pause_s: float, now_s: float) -> None:
        """Excuse the silence of peers during `pause_s`, in which this process itself did nothing."""
        if pause_s > self._config.lease_s / 2:
            for incoming in self._rules.table:
                for part in incoming.parts:
                    part.renewed.forgive(pause_s, self._config.lease_s, now_s)

    @property
    def uncredited_bytes(self) -> int:
        """Bytes that `flush` would credit; at least 1 if it would send anything."""
        return self._rules.uncredited_bytes

    def flush(self) -> Actions:
        """Return credits for what was received since the last call; to be called soon after frames."""
        return self._rules.flush()
