"""The messages an incoming transfer sends, built from records; no rule is made here."""

from collections.abc import Iterable, Sequence

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import INLINE, is_same_host
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.coverage import Gap
from baton.kvtransfer.protocol.frame import VERSION
from baton.kvtransfer.protocol.messages import DIGEST, control_of, layout_message, wire_attempt
from baton.kvtransfer.protocol.proof import KvProofs
from baton.kvtransfer.receiver.actions import SendControl
from baton.kvtransfer.receiver.peers import ReceiverPeers
from baton.kvtransfer.receiver.table import IncomingState, IncomingTransfer, Part
from baton.proto import kv_pb2


class ReceiverReplies:
    """Builds messages of one decode worker's incarnation.

    Args:
        epoch: of this incarnation.
        layout: of its pools.
        config: limits and times.
        peers: where they go.
        offers: the lanes served here beside "inline".
        host_id: of this machine.
        has_digest: frames are verified by digest.
        proofs: of the deployment.
    """

    def __init__(
        self,
        epoch: int,
        layout: KVLayout,
        config: KVTransferConfig,
        peers: ReceiverPeers,
        offers: Sequence[kv_pb2.LaneOffer],
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

    def serves(self, lane: str) -> bool:
        """Whether payloads may come by this lane."""
        return lane == INLINE or any(offer.lane == lane for offer in self._offers)

    def hello(self, peer: str, hello: kv_pb2.Hello, refused: str, now_s: float) -> SendControl:
        """HELLO_REPLY; `refused` says why the two must not talk, or is empty."""
        same_host = bool(self._host_id) and hello.host_id == self._host_id
        offers = [
            offer for offer in self._offers if offer.lane in hello.lanes and (same_host or not is_same_host(offer.lane))
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
        return SendControl(peer, control_of(reply))

    def challenge(self, peer: str, hello: kv_pb2.Hello, now_s: float) -> SendControl:
        """HELLO_REPLY that says nothing but what the next HELLO is to prove."""
        challenge = self._proofs.challenge(self._epoch, peer, now_s)
        reply = kv_pb2.HelloReply(version=VERSION, peer_epoch=hello.epoch, echo_sent_ns=hello.sent_ns)
        reply.challenge = challenge
        return SendControl(peer, control_of(reply))

    def unproved(self, peer: str, hello: kv_pb2.Hello) -> SendControl:
        """HELLO_REPLY to a peer that knows another secret."""
        reply = kv_pb2.HelloReply(version=VERSION, peer_epoch=hello.epoch, echo_sent_ns=hello.sent_ns)
        reply.refused = "it does not know the secret of this decode worker's deployment"
        return SendControl(peer, control_of(reply))

    def grant(self, incoming: IncomingTransfer) -> SendControl:
        """GRANT of what `incoming` was given."""
        grant = kv_pb2.Grant(
            attempt=wire_attempt(incoming.attempt),
            epoch=self._epoch,
            incoming_id=incoming.incoming_id,
            credit_bytes=self._config.window_bytes,
            lease_ms=int(self._config.lease_s * 1e3),
            lane=incoming.lane,
            blocks=incoming.blocks,
            state_slot=incoming.state_slot,
        )
        return SendControl(incoming.peer, control_of(grant))

    def deny(self, peer: str, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str) -> SendControl:
        """DENY."""
        deny = kv_pb2.Deny(attempt=wire_attempt(attempt), epoch=self._epoch, reason=reason, detail=detail)
        return SendControl(peer, control_of(deny))

    def deny_sizes(self, peer: str, attempt: AttemptKey, reserve: kv_pb2.Reserve, limit: int) -> SendControl:
        """DENY of a RESERVE whose numbers are more than the pool, or make no sense."""
        sizes = f"{reserve.prompt_len} positions of a prompt in {reserve.capacity_len}; the whole pool has {limit}"
        reason = kv_pb2.Deny.TOO_LONG if reserve.capacity_len > limit else kv_pb2.Deny.UNSPECIFIED
        return self.deny(peer, attempt, reason, sizes)

    def ack(self, peer: str, epoch: int, incoming_id: int) -> SendControl:
        """COMMIT_ACK."""
        return SendControl(peer, control_of(kv_pb2.CommitAck(epoch=epoch, incoming_id=incoming_id)))

    def acks(self, incoming: IncomingTransfer) -> list[SendControl]:
        """COMMIT_ACK to every rank."""
        names = [self._peers.name_of(incoming.p_epoch, part.rank) for part in incoming.parts]
        return [self.ack(name, incoming.epoch, incoming.incoming_id) for name in names if name]

    def nack(
        self, incoming: IncomingTransfer, part: Part, gaps: Iterable[Gap], corrupt: Iterable[int]
    ) -> list[SendControl]:
        """COMMIT_NACK with everything that is missing of a rank's part, corrupt layers included."""
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
        return [SendControl(name, control_of(nack))] if name else []

    def have(self, peer: str, incoming: IncomingTransfer, part: Part, gaps: Iterable[Gap], round: int) -> SendControl:
        """HAVE, for the RESUME with this round."""
        have = kv_pb2.Have(
            epoch=self._epoch,
            incoming_id=incoming.incoming_id,
            missing=_wire_gaps(gaps),
            round=round,
            charged_bytes=part.charged_bytes,
        )
        return SendControl(peer, control_of(have))

    def abort(
        self, peer: str, attempt: AttemptKey, epoch: int, incoming_id: int, p_epoch: int, reason: str
    ) -> SendControl:
        """ABORT of an incoming transfer that the incarnation `epoch` granted to the incarnation `p_epoch`."""
        abort = kv_pb2.Abort(
            epoch=epoch,
            incoming_id=incoming_id,
            attempt=wire_attempt(attempt),
            reason=reason,
            sender_epoch=self._epoch,
            peer_epoch=p_epoch,
        )
        return SendControl(peer, control_of(abort))

    def abort_part(self, incoming: IncomingTransfer, part: Part) -> list[SendControl]:
        """ABORT to one rank, if there is a way to it."""
        name = self._peers.name_of(incoming.p_epoch, part.rank)
        if not name:
            return []
        epoch, incoming_id = incoming.epoch, incoming.incoming_id
        return [self.abort(name, incoming.attempt, epoch, incoming_id, incoming.p_epoch, incoming.reason)]

    def abort_ack(self, peer: str, attempt: AttemptKey, epoch: int, incoming_id: int) -> SendControl:
        """ABORT_ACK: nothing of this incoming transfer will be written any more."""
        ack = kv_pb2.AbortAck(epoch=epoch, incoming_id=incoming_id, attempt=wire_attempt(attempt), drained=True)
        return SendControl(peer, control_of(ack))

    def leases(self, incoming_transfers: Iterable[IncomingTransfer]) -> list[SendControl]:
        """One LEASE for each rank that has an incoming transfer here, or waits for one."""
        by_peer: dict[str, kv_pb2.Lease] = {}
        for incoming in incoming_transfers:
            for part in incoming.parts:
                name = self._peers.name_of(incoming.p_epoch, part.rank)
                if not name:
                    continue
                lease = by_peer.setdefault(name, kv_pb2.Lease(epoch=self._epoch))
                if incoming.state in (IncomingState.FILLING, IncomingState.COMPLETE) and incoming.epoch == self._epoch:
                    lease.incoming_ids.append(incoming.incoming_id)
        return [SendControl(peer, control_of(lease)) for peer, lease in by_peer.items()]

    def credits(self, parts: Iterable[tuple[IncomingTransfer, Part]]) -> list[SendControl]:
        """One CREDIT for each rank among `parts`."""
        by_peer: dict[str, kv_pb2.Credit] = {}
        for incoming, part in parts:
            name = self._peers.name_of(incoming.p_epoch, part.rank)
            if name:
                credit = by_peer.setdefault(name, kv_pb2.Credit(epoch=self._epoch))
                credit.incoming_transfers.add(incoming_id=incoming.incoming_id, charged_bytes=part.charged_bytes)
        return [SendControl(peer, control_of(credit)) for peer, credit in by_peer.items()]


def _wire_gaps(gaps: Iterable[Gap]) -> list[kv_pb2.LayerGap]:
    return [kv_pb2.LayerGap(layer=gap.layer, first=gap.first, count=gap.count) for gap in gaps]
