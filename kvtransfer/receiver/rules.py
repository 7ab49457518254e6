"""When a transfer ends, seals, drains or asks again: the rules that messages, frames, workers and time all lead to.

Who calls them decides which rule applies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import is_one_sided
from baton.kvcache.layout import KVLayout, Range
from baton.kvtransfer.protocol.coverage import Coverage, Gap
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.kvtransfer.protocol.proof import KvProofs
from baton.kvtransfer.protocol.transfer_times import TransferTimes
from baton.kvtransfer.receiver.actions import Completed, DiscardWrites, Drained, IncomingFailed, ReceiverAction
from baton.kvtransfer.receiver.peers import ReceiverPeers
from baton.kvtransfer.receiver.replies import ReceiverReplies
from baton.kvtransfer.receiver.table import IncomingState, IncomingTable, IncomingTransfer, Part
from baton.proto import kv_pb2

MASK = (1 << 64) - 1
ASK_HEARTBEATS = 2  # between two questions whether a rank has drained
Actions = list[ReceiverAction]


_MAX_EXPOSED_US = 1 << 32  # what a peer says of its clock is no more than a claim


@dataclass(slots=True)
class ReceiverCounts:
    """Totals since the start. Every frame that came whole is in exactly one of those of frames.

    Attributes:
        bytes_landed: payloads of `frames_landed`.
        frames_landed: verified, and in the pool.
        frames_late_dropped: for an incoming transfer that had ended, or never was; not looked at.
        frames_duplicate: what they cover was there, or is to be sent once more; not looked at.
        frames_corrupt: refused: their header or their payload is not what was sent, or not what may be sent.
        frames_fenced: their incoming transfer ended before their payload was there.
        layers_corrupt: sums over frames that did not match their COMMIT.
        messages_refused: of other incarnations, or of unknown peers.
        hellos_unproved: of peers that do not know the deployment's secret, or said before.
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
    transfer_us: int = 0  # of them, from the first frame to the seal
    exposed_us: int = 0  # of them, from the end of the prefill to the seal


class ReceiverRules:
    """The state of all incoming transfers, and the rules that change it."""

    def __init__(
        self,
        epoch: int,
        layout: KVLayout,
        config: KVTransferConfig,
        offers: Sequence[kv_pb2.LaneOffer],
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
        self.uncredited_bytes = 0  # of what `flush` will say
        self._uncredited: set[tuple[int, int]] = set()  # (incoming transfer id, rank)

    def pushed_heads(self, rank: int, size: int) -> list[Range]:
        """The heads of every layer that a rank sends."""
        found = self._heads.get((rank, size))
        if found is None:
            layers = range(self.layout.num_layers)
            found = self._heads[rank, size] = [self.layout.pushed_heads(layer, rank, size) for layer in layers]
        return found

    def gaps(self, incoming: IncomingTransfer, part: Part) -> list[Gap]:
        """What is missing of a rank's part."""
        heads = enumerate(self.pushed_heads(part.rank, len(incoming.parts)))
        return [
            gap
            for layer, its in heads
            for gap in incoming.coverage.layer_gaps(layer, its.first, its.count)
            if its.count
        ]

    def charge(self, incoming: IncomingTransfer, part: Part, header: FrameHeader) -> None:
        """A frame has landed, to stay or not: its sender gets the room back, once. One written off has none."""
        if part.seen.add(header.seq):
            part.charged_bytes += header.charge_bytes
            self.uncredited_bytes += header.charge_bytes
            self._uncredited.add((incoming.incoming_id, part.rank))

    def credit(self, incoming: IncomingTransfer, part: Part) -> None:
        """Have the credit of a rank repeated."""
        self.uncredited_bytes += 1
        self._uncredited.add((incoming.incoming_id, part.rank))

    def flush(self) -> Actions:
        """Credits that were not sent yet."""
        parts = []
        for incoming_id, rank in sorted(self._uncredited):
            incoming = self.table.by_id(incoming_id)
            if incoming is not None:
                parts.append((incoming, incoming.parts[rank]))
        self._uncredited.clear()
        self.uncredited_bytes = 0
        return [*self.replies.credits(parts)]

    def due(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """What time makes necessary for one incoming transfer: a NACK, a question, or its end."""
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
        """Ask every rank that may still write the blocks to stop and say so."""
        actions: Actions = []
        if not is_one_sided(incoming.lane):
            return actions
        for part in incoming.parts:
            if not part.is_drained and now_s - part.asked_s >= ASK_HEARTBEATS * self.config.heartbeat_s:
                asked = self.replies.abort_part(incoming, part)
                if asked:
                    part.asked_s = now_s
                    actions += asked
        return actions

    def complete_if_whole(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """Seal an incoming transfer that is whole and verified; ask again for layers that are whole and wrong."""
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
        """End an incoming transfer that will not be used; its blocks go back when nobody writes them.

        `by_peer`: its prefill worker gave it up.
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
                    if is_one_sided(incoming.lane) or not is_asking:
                        part.asked_s = now_s
                        actions += self.replies.abort_part(incoming, part)
                actions += self.drain_if_quiet(incoming, now_s)
            case IncomingState.COMPLETE | IncomingState.QUARANTINED:
                pass  # the worker releases what is complete; evidence ends quarantine
        return actions

    def drain_if_quiet(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """End a quarantined incoming transfer that nobody writes any more."""
        assert incoming.state is IncomingState.QUARANTINED
        if incoming.writes:
            return []
        if is_one_sided(incoming.lane) and not all(part.is_drained for part in incoming.parts):
            return []
        return self.drain(incoming, now_s)

    def drain(self, incoming: IncomingTransfer, now_s: float) -> Actions:
        """Nobody writes the blocks any more."""
        self.table.end(incoming, now_s)
        acks = [
            self.replies.abort_ack(name, incoming.attempt, incoming.epoch, incoming.incoming_id)
            for name in sorted(incoming.ack_to)
        ]
        return [Drained(incoming.attempt), *acks]

    def nack(self, incoming: IncomingTransfer, part: Part, corrupt: Iterable[int] = ()) -> Actions:
        """Ask a rank for everything that is missing of its part; once for each COMMIT, and for each repeat of it."""
        assert part.commit is not None
        part.nack_due_s = None
        part.nacked_round = part.commit.round
        part.write_off(part.commit.next_seq)
        # Where the sender writes, it may be writing from now on; only its next COMMIT says that it has stopped.
        part.is_commit_void = is_one_sided(incoming.lane)
        return [*self.replies.nack(incoming, part, self.gaps(incoming, part), corrupt)]

    def corrupt_frame(self, incoming: IncomingTransfer, header: FrameHeader, now_s: float) -> Actions:
        """A frame's content is not what its sender read: it counts as missing. The second time there is no third."""
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
        """An empty one."""
        layers = self.layout.layers
        return Coverage([layer.span(prompt_len) for layer in layers], [layer.num_heads for layer in layers])

    def _wrong_layers(self, incoming: IncomingTransfer) -> dict[int, list[int]] | None:
        """Layers, by rank, whose digest is not what their COMMIT says; None if not all digests are known."""
        commits = [part.commit for part in incoming.parts if part.commit is not None]
        layers = range(self.layout.num_layers)
        if self._digests_layers and None in incoming.digests:
            return None  # the engine may be bringing layers into the pool, too
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
            heads = self.pushed_heads(rank, len(incoming.parts))
            for layer in layers:
                incoming.coverage.reset_layer(layer, heads[layer].first, heads[layer].count)
                part.digests[layer] = 0
                incoming.digests[layer] = None
            actions += self.nack(incoming, part, layers)
        return actions
