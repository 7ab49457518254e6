"""The messages a landing sends, built from records; no rule is made here."""

from collections.abc import Iterable

from baton.core.config import KVTransferConfig
from baton.core.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.frame import VERSION
from baton.kvtransfer.landing_actions import SendControl
from baton.kvtransfer.landing_table import Landing, LandingState
from baton.kvtransfer.messages import control_of, layout_message, wire_attempt
from baton.proto import kv_pb2


class LandingReplies:
    """Builds messages of one decode worker's life."""

    def __init__(self, epoch: int, layout: KVLayout, config: KVTransferConfig) -> None:
        self._epoch = epoch
        self._layout = layout
        self._config = config

    def hello(self, peer: str, hello: kv_pb2.Hello, refused: str, now_s: float) -> SendControl:
        """HELLO_REPLY; `refused` says why the two must not talk, or is empty."""
        reply = kv_pb2.HelloReply(
            version=VERSION,
            epoch=self._epoch,
            peer_epoch=hello.epoch,
            layout=layout_message(self._layout),
            tp_size=1,
            head_count=self._layout.num_kv_heads,
            echo_sent_ns=hello.sent_ns,
            receiver_ns=int(now_s * 1e9),
            refused=refused,
        )
        return SendControl(peer, control_of(reply))

    def grant(self, landing: Landing) -> SendControl:
        """GRANT of what `landing` was given."""
        grant = kv_pb2.Grant(
            attempt=wire_attempt(landing.attempt),
            epoch=self._epoch,
            landing_id=landing.landing_id,
            credit_bytes=self._config.window_bytes,
            lease_ms=int(self._config.lease_s * 1e3),
        )
        return SendControl(landing.peer, control_of(grant))

    def deny(self, peer: str, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str) -> SendControl:
        """DENY."""
        deny = kv_pb2.Deny(attempt=wire_attempt(attempt), epoch=self._epoch, reason=reason, detail=detail)
        return SendControl(peer, control_of(deny))

    def deny_sizes(self, peer: str, attempt: AttemptKey, reserve: kv_pb2.Reserve, limit: int) -> SendControl:
        """DENY of a RESERVE whose numbers are more than the pool, or make no sense."""
        sizes = f"{reserve.prompt_len} positions of a prompt in {reserve.capacity_len}; the whole pool has {limit}"
        reason = kv_pb2.Deny.TOO_LONG if reserve.capacity_len > limit else kv_pb2.Deny.UNSPECIFIED
        return self.deny(peer, attempt, reason, sizes)

    def ack(self, peer: str, landing_id: int) -> SendControl:
        """COMMIT_ACK."""
        return SendControl(peer, control_of(kv_pb2.CommitAck(epoch=self._epoch, landing_id=landing_id)))

    def nack(self, landing: Landing, corrupt: Iterable[int]) -> SendControl:
        """COMMIT_NACK with everything that is missing, corrupt layers included."""
        assert landing.commit is not None
        nack = kv_pb2.CommitNack(
            epoch=self._epoch,
            landing_id=landing.landing_id,
            missing=_gaps(landing),
            corrupt_layers=corrupt,
            round=landing.commit.round,
        )
        return SendControl(landing.peer, control_of(nack))

    def have(self, landing: Landing, round: int) -> SendControl:
        """HAVE, for the RESUME with this round."""
        have = kv_pb2.Have(epoch=self._epoch, landing_id=landing.landing_id, missing=_gaps(landing), round=round)
        return SendControl(landing.peer, control_of(have))

    def abort(self, peer: str, attempt: AttemptKey | None, landing_id: int, reason: str) -> SendControl:
        """ABORT; without an attempt for a landing of which only the id is known."""
        abort = kv_pb2.Abort(epoch=self._epoch, landing_id=landing_id, reason=reason)
        if attempt is not None:
            abort.attempt.CopyFrom(wire_attempt(attempt))
        return SendControl(peer, control_of(abort))

    def abort_ack(self, peer: str, attempt: AttemptKey, landing_id: int) -> SendControl:
        """ABORT_ACK: nothing of this landing will be written any more."""
        ack = kv_pb2.AbortAck(epoch=self._epoch, landing_id=landing_id, attempt=wire_attempt(attempt), drained=True)
        return SendControl(peer, control_of(ack))

    def leases(self, landings: Iterable[Landing]) -> list[SendControl]:
        """One LEASE for each peer that has a landing here, or waits for one."""
        by_peer: dict[str, kv_pb2.Lease] = {}
        for landing in landings:
            lease = by_peer.setdefault(landing.peer, kv_pb2.Lease(epoch=self._epoch))
            if landing.state in (LandingState.FILLING, LandingState.SEALED):
                lease.landing_ids.append(landing.landing_id)
        return [SendControl(peer, control_of(lease)) for peer, lease in by_peer.items()]

    def credits(self, landings: Iterable[Landing]) -> list[SendControl]:
        """One CREDIT for each peer of `landings`."""
        by_peer: dict[str, kv_pb2.Credit] = {}
        for landing in landings:
            credit = by_peer.setdefault(landing.peer, kv_pb2.Credit(epoch=self._epoch))
            credit.landings.add(landing_id=landing.landing_id, charged_bytes=landing.charged_bytes)
        return [SendControl(peer, control_of(credit)) for peer, credit in by_peer.items()]


def _gaps(landing: Landing) -> list[kv_pb2.LayerGap]:
    return [kv_pb2.LayerGap(layer=gap.layer, first=gap.first, count=gap.count) for gap in landing.coverage.gaps()]
