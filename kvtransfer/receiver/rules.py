"""The receiver's rules: when a transfer is complete, ends, drains or asks again.

Messages, frames, calls from the worker and time all lead to these rules; the caller decides which one applies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import INLINE, is_one_sided, is_same_host
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout, Range
from baton.kvtransfer.protocol.coverage import Coverage, LayerRange
from baton.kvtransfer.protocol.frame import VERSION, FrameHeader
from baton.kvtransfer.protocol.messages import DIGEST, control_of, layout_message, wire_attempt
from baton.kvtransfer.protocol.proof import KvProofs
from baton.kvtransfer.protocol.transfer_times import TransferTimes
from baton.kvtransfer.receiver.actions import (
    AnswerControl,
    Completed,
    DiscardWrites,
    Drained,
    IncomingFailed,
    ReceiverAction,
)
from baton.kvtransfer.receiver.peers import ReceiverPeers
from baton.kvtransfer.receiver.table import IncomingState, IncomingTable, IncomingTransfer, RankPush
from baton.proto import kv_pb2


class ReceiverReplies:
    """Builds the messages of one decode worker's incarnation.

    Args:
        epoch: this incarnation.
        layout: layout of its pools.
        config: limits and times.
        peers: the peers to send to.
        offers: data paths served here besides "inline".
        host_id: identifier of this machine.
        has_digest: whether frames are verified by digest.
        proofs: proofs of the deployment.
    """

    def __init__(
        self,
        epoch: int,
        layout: KVLayout,
        config: KVTransferConfig,
        peers: ReceiverPeers,
        offers: Sequence[kv_pb2.DataPathOffer],
        host_id: str,
        has_digest: bool,
        proofs: KvProofs,
    ) -> None:
        self._proofs = proofs
        self._epoch = epoch
        self._layout = layout
        self._config = config
        self._peers = peers
        self._offers = tuple(offers)
        self._host_id = host_id
        self._capabilities = [DIGEST] if has_digest else []

    def serves(self, data_path: str) -> bool:
        """Return whether payloads may come by this data path."""
        return data_path == INLINE or any(offer.data_path == data_path for offer in self._offers)

    def hello(self, peer: str, hello: kv_pb2.Hello, refused: str, now_s: float) -> AnswerControl:
        """Build a HELLO_REPLY; `refused` says why the two must not exchange KV, or is empty."""
        same_host = bool(self._host_id) and hello.host_id == self._host_id
        offers = [
            offer
            for offer in self._offers
            if offer.data_path in hello.data_paths and (same_host or not is_same_host(offer.data_path))
        ]
        reply = kv_pb2.HelloReply(
            version=VERSION,
            epoch=self._epoch,
            peer_epoch=hello.epoch,
            layout=layout_message(self._layout),
            tp_size=1,
            head_count=self._layout.layers[0].num_heads,
            capabilities=self._capabilities,
            echo_sent_ns=hello.sent_ns,
            receiver_ns=int(now_s * 1e9),
            refused=refused,
            offers=() if refused else offers,
            host_id=self._host_id,
        )
        self._proofs.prove_reply(reply, hello.number)
        return AnswerControl(peer, control_of(reply))

    def challenge(self, peer: str, hello: kv_pb2.Hello, now_s: float) -> AnswerControl:
        """Build a HELLO_REPLY with nothing but the challenge that the next HELLO must answer."""
        challenge = self._proofs.challenge(self._epoch, peer, now_s)
        reply = kv_pb2.HelloReply(version=VERSION, peer_epoch=hello.epoch, echo_sent_ns=hello.sent_ns)
        reply.challenge = challenge
        return AnswerControl(peer, control_of(reply))

    def unproved(self, peer: str, hello: kv_pb2.Hello) -> AnswerControl:
        """Build a HELLO_REPLY to a peer that knows another secret."""
        reply = kv_pb2.HelloReply(version=VERSION, peer_epoch=hello.epoch, echo_sent_ns=hello.sent_ns)
        reply.refused = "it does not know the secret of this decode worker's deployment"
        return AnswerControl(peer, control_of(reply))

    def grant(self, incoming: IncomingTransfer) -> AnswerControl:
        """Build the GRANT of what `incoming` was given."""
        grant = kv_pb2.Grant(
            attempt=wire_attempt(incoming.attempt),
            epoch=self._epoch,
            incoming_id=incoming.incoming_id,
            credit_bytes=self._config.window_bytes,
            lease_ms=int(self._config.lease_s * 1e3),
            data_path=incoming.data_path,
            blocks=incoming.blocks,
            state_slot=incoming.state_slot,
        )
        return AnswerControl(incoming.peer, control_of(grant))

    def deny(self, peer: str, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str) -> AnswerControl:
        """Build a DENY."""
        deny = kv_pb2.Deny(attempt=wire_attempt(attempt), epoch=self._epoch, reason=reason, detail=detail)
        return AnswerControl(peer, control_of(deny))

    def deny_sizes(self, peer: str, attempt: AttemptKey, reserve: kv_pb2.Reserve, limit: int) -> AnswerControl:
        """Build the DENY of a RESERVE whose sizes exceed the pool or make no sense."""
        sizes = f"{reserve.prompt_len} positions of a prompt in {reserve.capacity_len}; the whole pool has {limit}"
        reason = kv_pb2.Deny.TOO_LONG if reserve.capacity_len > limit else kv_pb2.Deny.UNSPECIFIED
        return self.deny(peer, attempt, reason, sizes)

    def ack(self, peer: str, epoch: int, incoming_id: int) -> AnswerControl:
        """Build a COMMIT_ACK."""
        return AnswerControl(peer, control_of(kv_pb2.CommitAck(epoch=epoch, incoming_id=incoming_id)))

    def acks(self, incoming: IncomingTransfer) -> list[AnswerControl]:
        """Build a COMMIT_ACK for every rank."""
        names = [self._peers.name_of(incoming.p_epoch, part.rank) for part in incoming.parts]
        return [self.ack(name, incoming.epoch, incoming.incoming_id) for name in names if name]

    def nack(
        self, incoming: IncomingTransfer, part: RankPush, gaps: Iterable[LayerRange], corrupt: Iterable[int]
    ) -> list[AnswerControl]:
        """Build a COMMIT_NACK with everything that is missing of a rank's part, corrupt layers included."""
        assert part.commit is not None
        nack = kv_pb2.CommitNack(
            epoch=self._epoch,
            incoming_id=incoming.incoming_id,
            missing=_wire_gaps(gaps),
            corrupt_layers=corrupt,
            round=part.commit.round,
            charged_bytes=part.charged_bytes,
        )
        name = self._peers.name_of(incoming.p_epoch, part.rank)
        return [AnswerControl(name, control_of(nack))] if name else []

    def have(
        self, peer: str, incoming: IncomingTransfer, part: RankPush, gaps: Iterable[LayerRange], round: int
    ) -> AnswerControl:
        """Build a HAVE, for the RESUME with this round."""
        have = kv_pb2.Have(
            epoch=self._epoch,
            incoming_id=incoming.incoming_id,
            missing=_wire_gaps(gaps),
            round=round,
            charged_bytes=part.charged_bytes,
        )
        return AnswerControl(peer, control_of(have))

    def abort(
        self, peer: str, attempt: AttemptKey, epoch: int, incoming_id: int, p_epoch: int, reason: str
    ) -> AnswerControl:
        """Build an ABORT of an incoming transfer that incarnation `epoch` granted to incarnation `p_epoch`."""
        abort = kv_pb2.Abort(
            epoch=epoch,
            incoming_id=incoming_id,
            attempt=wire_attempt(attempt),
            reason=reason,
            sender_epoch=self._epoch,
            peer_epoch=p_epoch,
        )
        return AnswerControl(peer, control_of(abort))

    def abort_part(self, incoming: IncomingTransfer, part: RankPush) -> list[AnswerControl]:
        """Build an ABORT to one rank, if it is connected."""
        name = self._peers.name_of(incoming.p_epoch, part.rank)
        if not name:
            return []
        epoch, incoming_id = incoming.epoch, incoming.incoming_id
        return [self.abort(name, incoming.attempt, epoch, incoming_id, incoming.p_epoch, incoming.reason)]

    def abort_ack(self, peer: str, attempt: AttemptKey, epoch: int, incoming_id: int) -> AnswerControl:
        """Build an ABORT_ACK: nothing of this incoming transfer will be written any more."""
        ack = kv_pb2.AbortAck(epoch=epoch, incoming_id=incoming_id, attempt=wire_attempt(attempt), drained=True)
        return AnswerControl(peer, control_of(ack))

    def leases(self, incoming_transfers: Iterable[IncomingTransfer]) -> list[AnswerControl]:
        """Build one LEASE for each rank that has an incoming transfer here, or waits for one."""
        by_peer: dict[str, kv_pb2.Lease] = {}
        for incoming in incoming_transfers:
            for part in incoming.parts:
                name = self._peers.name_of(incoming.p_epoch, part.rank)
                if not name:
                    continue
                lease = by_peer.setdefault(name, kv_pb2.Lease(epoch=self._epoch))
                if incoming.state in (IncomingState.FILLING, IncomingState.COMPLETE) and incoming.epoch == self._epoch:
                    lease.incoming_ids.append(incoming.incoming_id)
        return [AnswerControl(peer, control_of(lease)) for peer, lease in by_peer.items()]

    def credits(self, parts: Iterable[tuple[IncomingTransfer, RankPush]]) -> list[AnswerControl]:
        """Build one CREDIT for each rank among `parts`."""
        by_peer: dict[str, kv_pb2.Credit] = {}
        for incoming, part in parts:
            name = self._peers.name_of(incoming.p_epoch, part.rank)
            if name:
                credit = by_peer.setdefault(name, kv_pb2.Credit(epoch=self._epoch))
                credit.incoming_transfers.add(incoming_id=incoming.incoming_id, charged_bytes=part.charged_bytes)
        return [AnswerControl(peer, control_of(credit)) for peer, credit in by_peer.items()]


def _wire_gaps(gaps: Iterable[LayerRange]) -> list[kv_pb2.LayerGap]:
    return [kv_pb2.LayerGap(layer=gap.layer, first=gap.first, count=gap.count) for gap in gaps]


MASK = (1 << 64) - 1
ASK_HEARTBEATS = 2  # between two questions to a rank whether it has drained
Actions = list[ReceiverAction]


_MAX_EXPOSED_US = 1 << 32  # what a peer reports of its clock is only a claim


@dataclass(slots=True)
class ReceiverCounts:
    """Totals since the start. Every frame that arrived whole is counted in exactly one of the frame counters.

    Attributes:
        bytes_landed: payload bytes of `frames_landed`.
        frames_landed: frames that are verified and in the pool.
        frames_late_dropped: frames for an incoming transfer that had ended, or never existed; dropped unread.
        frames_duplicate: frames whose range was already there, or will be sent once more; dropped unread.
        frames_corrupt: frames refused because header or payload are not what was sent, or not what may be sent.
        frames_fenced: frames whose incoming transfer ended before their payload arrived.
        layers_corrupt: layers whose sum of frame digests did not match the COMMIT.
        messages_refused: messages of other incarnations, or of unknown peers.
        hellos_unproved: HELLOs of peers that do not know the deployment's secret, or that were sent before.
    """

    bytes_landed: int = 0
    frames_landed: int = 0
    frames_late_dropped: int = 0
    frames_duplicate: int = 0
    frames_corrupt: int = 0
    frames_fenced: int = 0
    layers_corrupt: int = 0
    messages_refused: int = 0
    hellos_unproved: int = 0
    transfers_complete: int = 0
    transfer_us: int = 0  # of complete transfers, from the first frame until complete
    exposed_us: int = 0  # of complete transfers, from the end of the prefill until complete


class ReceiverRules:
    """The state of all incoming transfers, and the rules that change it."""

    def __init__(
        self,
        epoch: int,
        layout: KVLayout,
        config: KVTransferConfig,
        offers: Sequence[kv_pb2.DataPathOffer],
        host_id: str,
        has_digest: bool,
        digests_layers: bool,
    ) -> None:
        self._digests_layers = digests_layers
        self.epoch = epoch
        self.layout = layout
        self.config = config
        self.table = IncomingTable()
        self.peers = ReceiverPeers()
        self.proofs = KvProofs(bytes.fromhex(config.key))
        self.counts = ReceiverCounts()
        self.times = TransferTimes()
        self.replies = ReceiverReplies(epoch, layout, config, self.peers, offers, host_id, has_digest, self.proofs)
        self._heads: dict[tuple[int, int], list[Range]] = {}
        self.uncredited_bytes = 0  # bytes that `flush` will credit
        self._uncredited: set[tuple[int, int]] = set()  # (incoming transfer id, rank)

    def pushed_heads(self, rank: int, size: int) -> list[Range]:
        """Return the heads of every layer that a rank pushes."""
        found = self._heads.get((rank, size))
        if found is None:
            layers = range(self.layout.num_layers)
            found = self._heads[rank, size] = [self.layout.pushed_heads(layer, rank, size) for layer in layers]
        return found

    def gaps(self, incoming: IncomingTransfer, part: RankPush) -> list[LayerRange]:
        """Return what is missing of a rank's part."""
        heads, size = enumerate(self.pushed_heads(part.rank, len(incoming.parts))), len(incoming.parts)
        return [
            LayerRange(layer, own.first, own.count)
            for layer, its in heads
            for gap in incoming.coverage.layer_gaps(layer, its.first, its.count)
            for own in self.layout.pushed_positions(layer, gap.first, gap.count, part.rank, size)
            if its.count
        ]

    def pushes(self, rank: int, size: int, header: FrameHeader) -> bool:
        """Return whether a frame covers only heads and positions that a rank pushes."""
        its = self.pushed_heads(rank, size)[header.layer]
        if not its.first <= header.head_first <= header.head_first + header.head_count <= its.stop:
            return False
        own = self.layout.pushed_positions(header.layer, header.first, header.count, rank, size)
        return sum(run.count for run in own) == header.count

    def charge(self, incoming: IncomingTransfer, part: RankPush, header: FrameHeader) -> None:
        """Credit a frame that arrived, whether kept or not, to its sender, once. Frames written off get no credit."""
        if part.seen.add(header.seq):
            part.charged_bytes += header.charge_bytes
            self.uncredited_bytes += header.charge_bytes
            self._uncredited.add((incoming.incoming_id, part.rank))

    def credit(self, incoming: IncomingTransfer, part: RankPush) -> None:
        """Send the credit of a rank again."""
        self.uncredited_bytes += 1
        self._uncredited.add((incoming.incoming_id, part.rank))

    def flush(self) -> Actions:
        """Return the credits that were not sent yet."""
        parts = []
        for incoming_id, rank in sorted(self._uncredited):
            incoming = self.table.by_id(incoming_id)
            if incoming is not None:
                parts.append((incoming, incoming.parts[rank]))
        self._uncredited.clear()
        self.uncredited_bytes = 0
        return [*self.replies.credits(parts)]

    def due(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """Return what is due by time for one incoming transfer: a NACK, a question, or its end."""
        actions: Actions = []
        if incoming.state is IncomingState.QUARANTINED:
            return self.ask(incoming, now_s)
        if incoming.state is IncomingState.COMPLETE:
            return []
        for part in incoming.parts:
            if part.nack_due_s is not None and now_s >= part.nack_due_s:
                actions += self.nack(incoming, part)
        lease_s = self.config.lease_s
        parts = incoming.parts if incoming.state is IncomingState.FILLING else incoming.parts[:1]
        silent = [part.rank for part in parts if part.renewed.silence_s(now_s) > lease_s]
        if silent:
            whom = f"rank {silent[0]} of its prefill worker" if len(incoming.parts) > 1 else "its prefill worker"
            actions += self.fence(incoming, f"nothing heard of it from {whom} for {lease_s} s", now_s)
        elif incoming.state is IncomingState.WANTED and now_s > incoming.deadline_s + lease_s:
            actions += self.fence(incoming, "it was neither granted nor denied in time", now_s)
        return actions

    def ask(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """Ask every rank that may still write the blocks to stop and report that it has."""
        actions: Actions = []
        if not is_one_sided(incoming.data_path):
            return actions
        for part in incoming.parts:
            if not part.is_drained and now_s - part.asked_s >= ASK_HEARTBEATS * self.config.heartbeat_s:
                asked = self.replies.abort_part(incoming, part)
                if asked:
                    part.asked_s = now_s
                    actions += asked
        return actions

    def complete_if_whole(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """Complete an incoming transfer that is whole and verified; ask again for layers whose digest is wrong."""
        if any(part.commit is None or part.is_commit_void for part in incoming.parts):
            return []
        if incoming.writes or not incoming.coverage.is_complete():
            return []
        incoming.complete_s = incoming.complete_s or now_s
        wrong = self._wrong_layers(incoming)
        if wrong is None:
            return []
        if wrong:
            return self._ask_for_layers(incoming, wrong, now_s)
        incoming.state = IncomingState.COMPLETE
        commit = incoming.parts[0].commit
        assert commit is not None
        prefill_end_s = commit.prefill_end_ns / 1e9
        first_s = incoming.arrivals[0][0] if incoming.arrivals else now_s
        self.counts.transfers_complete += 1
        transfer_us = int((now_s - first_s) * 1e6)
        exposed_us = min(int(max(0.0, now_s - prefill_end_s) * 1e6), _MAX_EXPOSED_US)
        self.counts.transfer_us += transfer_us
        self.counts.exposed_us += exposed_us
        self.times.observe(transfer_us / 1e6, exposed_us / 1e6)
        complete = Completed(
            attempt=incoming.attempt,
            incoming_id=incoming.incoming_id,
            prompt_len=incoming.prompt_len,
            state=commit.state,
            bytes_landed=incoming.bytes_landed,
            bytes_landed_before_prefill_end=incoming.bytes_before(prefill_end_s),
            prefill_end_s=prefill_end_s,
            complete_s=incoming.complete_s,
        )
        return [complete, *self.replies.acks(incoming)]

    def fence(self, incoming: IncomingTransfer, reason: str, now_s: float, *, by_peer: bool = False) -> Actions:
        """End an incoming transfer that will not be used; its blocks are freed when no process writes them.

        `by_peer`: its prefill worker gave up.
        """
        actions: Actions = []
        if not incoming.has_failed:
            incoming.has_failed = True
            actions.append(IncomingFailed(incoming.attempt, reason, by_peer))
        match incoming.state:
            case IncomingState.WANTED:
                incoming.reason = reason
                self.table.end(incoming, now_s)
                actions.append(self.replies.deny(incoming.peer, incoming.attempt, kv_pb2.Deny.STALE, reason))
            case IncomingState.FILLING:
                incoming.reason = reason
                incoming.state = IncomingState.QUARANTINED
                if incoming.writes:
                    actions.append(DiscardWrites(incoming.incoming_id))
                for part in incoming.parts:
                    is_asking = self.peers.name_of(incoming.p_epoch, part.rank) in incoming.ack_to
                    if is_one_sided(incoming.data_path) or not is_asking:
                        part.asked_s = now_s
                        actions += self.replies.abort_part(incoming, part)
                actions += self.drain_if_quiet(incoming, now_s)
            case IncomingState.COMPLETE | IncomingState.QUARANTINED:
                pass  # the worker releases what is complete; evidence ends quarantine
        return actions

    def drain_if_quiet(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """End a quarantined incoming transfer that no process writes any more."""
        assert incoming.state is IncomingState.QUARANTINED
        if incoming.writes:
            return []
        if is_one_sided(incoming.data_path) and not all(part.is_drained for part in incoming.parts):
            return []
        return self.drain(incoming, now_s)

    def drain(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """End an incoming transfer whose blocks no process writes any more."""
        self.table.end(incoming, now_s)
        acks = [
            self.replies.abort_ack(name, incoming.attempt, incoming.epoch, incoming.incoming_id)
            for name in sorted(incoming.ack_to)
        ]
        return [Drained(incoming.attempt), *acks]

    def nack(self, incoming: IncomingTransfer, part: RankPush, corrupt: Iterable[int] = ()) -> Actions:
        """Ask a rank for everything that is missing of its part; once for each COMMIT, and for each repeat of it."""
        assert part.commit is not None
        part.nack_due_s = None
        part.nacked_round = part.commit.round
        part.write_off(part.commit.next_seq)
        # Where the sender writes the pool, it may be writing from now on; only its next COMMIT says that it has
        # stopped.
        part.is_commit_void = is_one_sided(incoming.data_path)
        return [*self.replies.nack(incoming, part, self.gaps(incoming, part), corrupt)]

    def corrupt_frame(self, incoming: IncomingTransfer, header: FrameHeader, now_s: float) -> Actions:
        """Count a frame as missing whose content differs from what its sender read; the second time, fence."""
        self.counts.frames_corrupt += 1
        where = (header.layer, header.first, header.count, header.head_first, header.head_count)
        if incoming.corrupt is None:
            incoming.corrupt = self.coverage(incoming.prompt_len)
        if incoming.corrupt.overlaps(*where):
            reason = f"layer {header.layer} arrived corrupt twice from position {header.first}"
            return self.fence(incoming, reason, now_s)
        incoming.corrupt.add(*where)
        return []

    def coverage(self, prompt_len: int) -> Coverage:
        """Return an empty coverage."""
        layers = self.layout.layers
        return Coverage([layer.span(prompt_len) for layer in layers], [layer.num_heads for layer in layers])

    def _wrong_layers(self, incoming: IncomingTransfer) -> dict[int, list[int]] | None:
        """Return layers, by rank, whose digest is not what their COMMIT says; None if not all digests are known."""
        commits = [part.commit for part in incoming.parts if part.commit is not None]
        layers = range(self.layout.num_layers)
        if self._digests_layers and None in incoming.digests:
            return None  # the engine may also still be copying layers into the pool
        if not all(commit.layer_digests for commit in commits):
            return {}
        if self._digests_layers:
            sums = [sum(commit.layer_digests[layer] for commit in commits) & MASK for layer in layers]
            wrong = [layer for layer in layers if incoming.digests[layer] != sums[layer]]
            return {part.rank: wrong for part in incoming.parts} if wrong else {}
        found = {
            part.rank: [layer for layer in layers if part.digests[layer] != commit.layer_digests[layer]]
            for part, commit in zip(incoming.parts, commits, strict=True)
        }
        return {rank: wrong for rank, wrong in found.items() if wrong}

    def _ask_for_layers(self, incoming: IncomingTransfer, wrong: dict[int, list[int]], now_s: float) -> Actions:
        corrupt = {layer for layers in wrong.values() for layer in layers}
        self.counts.layers_corrupt += len(corrupt)
        twice = corrupt & incoming.corrupt_layers
        if twice:
            return self.fence(incoming, f"layer {min(twice)} arrived corrupt twice", now_s)
        incoming.corrupt_layers |= corrupt
        incoming.complete_s = 0.0
        actions: Actions = []
        for rank, layers in wrong.items():
            part = incoming.parts[rank]
            size = len(incoming.parts)
            heads = self.pushed_heads(rank, size)
            for layer in layers:
                kept = self.layout.layers[layer].span(incoming.prompt_len)
                for own in self.layout.pushed_positions(layer, kept.first, kept.count, rank, size):
                    incoming.coverage.remove(layer, own.first, own.count, heads[layer].first, heads[layer].count)
                part.digests[layer] = 0
                incoming.digests[layer] = None
            actions += self.nack(incoming, part, layers)
        return actions
