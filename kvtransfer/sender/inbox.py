"""What the messages of decode workers do to transfers.

A message that contradicts what is known is refused and changes nothing.
"""

from collections.abc import Callable

from baton.core.errors import ProtocolError
from baton.core.kv_transports import is_one_sided
from baton.kvtransfer.protocol.messages import DIGEST, attempt_of, hello_problem, shorten
from baton.kvtransfer.protocol.proof import NUMBER_BYTES
from baton.kvtransfer.sender.actions import Acked, Denied, Granted, GrantInfo, OpenLane, PushAction, SendControl
from baton.kvtransfer.sender.messages import PushIdentity
from baton.kvtransfer.sender.rules import PushRules
from baton.kvtransfer.sender.table import PushPeer, Transfer, TransferState
from baton.proto import kv_pb2

Actions = list[PushAction]


class PushInbox:
    """Takes control messages for one rank."""

    def __init__(self, identity: PushIdentity, rules: PushRules) -> None:
        self.num_refused = 0
        self._me = identity
        self._rules = rules

    def take(self, address: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Take a message of the decode worker at `address`.

        Raises:
            ProtocolError: it breaks the protocol; nothing changed.
        """
        peer = self._rules.peers.get(address)
        kind = str(control.WhichOneof("message"))
        if kind == "abort":
            return self._on_abort(address, peer, control.abort, now_s)
        if peer is None:
            return []
        if kind == "hello_reply":
            return self._on_hello_reply(address, peer, control.hello_reply, now_s)
        if kind == "abort_ack":
            return self._on_abort_ack(peer, control.abort_ack, now_s)
        message = getattr(control, kind)
        if peer.epoch == 0 or message.epoch != peer.epoch:
            self.num_refused += 1
            return []
        peer.heard.renew(now_s)
        handlers: dict[str, Callable[..., Actions]] = {
            "grant": self._on_grant,
            "deny": self._on_deny,
            "commit_ack": self._on_ack,
            "commit_nack": self._on_nack,
            "credit": self._on_credit,
            "lease": self._on_lease,
            "have": self._on_have,
        }
        handler = handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"a prefill worker takes no {kind}", kind=kind)
        return handler(address, peer, message, now_s)

    def _on_hello_reply(self, address: str, peer: PushPeer, reply: kv_pb2.HelloReply, now_s: float) -> Actions:
        rules = self._rules
        if reply.peer_epoch != self._me.epoch or reply.echo_sent_ns not in peer.hellos:
            self.num_refused += 1
            return []
        if reply.challenge:
            return self._on_challenge(address, peer, reply, now_s)
        proofs = rules.messages.proofs
        if not proofs.is_proved(reply, proofs.number(address, self._me.epoch, reply.echo_sent_ns)):
            return self._doubt(peer, reply)
        if not reply.epoch:
            self.num_refused += 1
            return []
        peer.is_doubted = False
        peer.heard.renew(now_s)
        sent_s, receiver_s = reply.echo_sent_ns / 1e9, reply.receiver_ns / 1e9
        refused = reply.refused or hello_problem(reply.version, reply.layout, rules.layout)
        is_new = peer.epoch != reply.epoch
        if is_new:
            peer.forget_incarnation()  # and with it every HELLO that the old one may still answer
            peer.hello_s = now_s
            peer.epoch = reply.epoch
            peer.offsets.clear()
        peer.has_digest = self._me.has_digest and DIGEST in reply.capabilities
        peer.block_size = reply.layout.block_size
        peer.offsets.append((now_s - sent_s, receiver_s - (sent_s + now_s) / 2))
        actions: Actions = []
        for transfer in rules.active_on(address):
            if refused and transfer.state is TransferState.RESERVING:
                actions += rules.end(transfer, Denied(transfer.attempt, kv_pb2.Deny.LAYOUT, refused))
            elif refused or transfer.peer.epoch != peer.epoch:
                actions += rules.fail(transfer, refused or "the decode worker restarted", now_s)
        if refused:
            peer.forget_incarnation()  # whoever comes next asks again
        elif not peer.lane:
            actions.append(OpenLane(address, peer.epoch, reply.host_id, tuple(reply.offers)))
        return actions

    def _on_challenge(self, address: str, peer: PushPeer, reply: kv_pb2.HelloReply, now_s: float) -> Actions:
        """The answer to it is known to be believed only by what comes next; at once not more often than HELLOs go."""
        if len(reply.challenge) != NUMBER_BYTES or reply.challenge == peer.challenge:
            self.num_refused += 1
            return []
        peer.challenge = reply.challenge
        if now_s - peer.challenged_s < self._rules.config.heartbeat_s:
            return []
        peer.challenged_s = now_s
        return [self._rules.hello(address, now_s)]

    def _doubt(self, peer: PushPeer, reply: kv_pb2.HelloReply) -> Actions:
        """It may be anybody: what it says has no consequence, and is said once."""
        self.num_refused += 1
        if peer.is_doubted:
            return []
        peer.is_doubted = True
        why = f": {shorten(reply.refused)!r}" if reply.refused else ""
        raise ProtocolError(f"what answers there does not prove that it is of this deployment{why}")

    def _on_grant(self, address: str, peer: PushPeer, grant: kv_pb2.Grant, now_s: float) -> Actions:
        rules = self._rules
        transfer = rules.transfers.get(attempt_of(grant.attempt))
        if transfer is None or transfer.peer.kv_address != address:
            return []  # it ended; its ABORT is on the way or done
        if transfer.peer.epoch != grant.epoch:
            return []
        rules.named(transfer, now_s)
        if transfer.state is not TransferState.RESERVING:
            return []
        transfer.grant = GrantInfo(
            d_epoch=grant.epoch,
            incoming_id=grant.incoming_id,
            credit_bytes=grant.credit_bytes,
            lease_s=grant.lease_ms / 1e3,
            lane=grant.lane,
            blocks=tuple(grant.blocks),
            state_slot=grant.state_slot if grant.HasField("state_slot") else None,
            block_size=peer.block_size,
        )
        problem = self._grant_problem(transfer, peer)
        if problem:
            return rules.fail(transfer, problem, now_s)
        transfer.state = TransferState.PUSHING
        transfer.lease_s = transfer.grant.lease_s
        transfer.progress.renew(now_s)
        transfer.is_told = True
        rules.by_incoming[transfer.incoming_key] = transfer
        return [Granted(transfer.attempt, transfer.grant)]

    def _grant_problem(self, transfer: Transfer, peer: PushPeer) -> str:
        grant = transfer.grant
        assert grant is not None
        if not grant.incoming_id or not grant.lease_s or transfer.incoming_key in self._rules.by_incoming:
            return f"the decode worker granted incoming transfer {grant.incoming_id} with a lease of {grant.lease_s} s"
        if grant.lane != transfer.lane:
            return f"lane {transfer.lane} was asked for and {grant.lane[:32]!r} granted"
        if is_one_sided(grant.lane) and len(grant.blocks) * peer.block_size < transfer.prompt_len:
            size = f"{len(grant.blocks)} blocks of {peer.block_size}"
            return f"the decode worker granted {size} for {transfer.prompt_len} positions"
        return ""

    def _on_deny(self, address: str, peer: PushPeer, deny: kv_pb2.Deny, now_s: float) -> Actions:
        transfer = self._rules.transfers.get(attempt_of(deny.attempt))
        if transfer is None or transfer.peer.kv_address != address or transfer.state is not TransferState.RESERVING:
            return []
        return self._rules.end(transfer, Denied(transfer.attempt, deny.reason, deny.detail))

    def _on_ack(self, address: str, peer: PushPeer, ack: kv_pb2.CommitAck, now_s: float) -> Actions:
        transfer = self._rules.by_incoming.get((address, peer.epoch, ack.incoming_id))
        if transfer is None or transfer.state is not TransferState.COMMITTING or transfer.num_writes:
            return []
        self._rules.totals.acked(transfer, now_s)
        return self._rules.end(transfer, Acked(transfer.attempt, transfer.bytes_pushed))

    def _on_nack(self, address: str, peer: PushPeer, nack: kv_pb2.CommitNack, now_s: float) -> Actions:
        rules = self._rules
        transfer = rules.by_incoming.get((address, peer.epoch, nack.incoming_id))
        if transfer is None or transfer.state is not TransferState.COMMITTING:
            return []
        rules.named(transfer, now_s)
        if not transfer.is_commit_posted or nack.round != transfer.round:
            return []  # about an earlier COMMIT
        transfer.round += 1
        transfer.is_commit_posted = False
        rules.credit(transfer, nack.charged_bytes, now_s)
        rules.write_off(transfer)
        if not nack.missing:
            return rules.pump(address, now_s)  # all of it came meanwhile; say again that it is all
        return rules.send_again(transfer, nack.missing, now_s)

    def _on_have(self, address: str, peer: PushPeer, have: kv_pb2.Have, now_s: float) -> Actions:
        rules = self._rules
        transfer = rules.by_incoming.get((address, peer.epoch, have.incoming_id))
        if transfer is None or transfer.state not in (TransferState.PUSHING, TransferState.COMMITTING):
            return []
        rules.named(transfer, now_s)
        if not transfer.is_resume_posted or have.round != transfer.resume_round:
            return []  # it answers a RESUME that was answered before
        transfer.is_resume_posted = False
        transfer.resume_round += 1
        transfer.is_confirmed = True
        rules.credit(transfer, have.charged_bytes, now_s)
        rules.write_off(transfer)
        return rules.send_again(transfer, have.missing, now_s)

    def _on_credit(self, address: str, peer: PushPeer, credit: kv_pb2.Credit, now_s: float) -> Actions:
        rules = self._rules
        for entry in credit.incoming_transfers:
            transfer = rules.by_incoming.get((address, peer.epoch, entry.incoming_id))
            if transfer is None or entry.charged_bytes <= transfer.credited_bytes:
                continue
            rules.named(transfer, now_s)
            rules.credit(transfer, entry.charged_bytes, now_s)
            if transfer.is_resume_posted and transfer.is_confirmed and not transfer.in_flight_bytes:
                transfer.is_resume_posted = False  # nothing is open that it asks about
                transfer.resume_round += 1
        return rules.pump(address, now_s)

    def _on_lease(self, address: str, peer: PushPeer, lease: kv_pb2.Lease, now_s: float) -> Actions:
        for incoming_id in lease.incoming_ids:
            transfer = self._rules.by_incoming.get((address, peer.epoch, incoming_id))
            if transfer is not None:
                self._rules.named(transfer, now_s)
        return []

    def _on_abort(self, address: str, peer: PushPeer | None, abort: kv_pb2.Abort, now_s: float) -> Actions:
        """The decode worker gave a transfer up, in this or an earlier incarnation, and asks when it is quiet."""
        rules = self._rules
        if abort.peer_epoch not in (0, self._me.epoch):
            self.num_refused += 1
            return []  # only the incarnation that was granted it may answer
        attempt = attempt_of(abort.attempt)
        transfer = rules.transfers.get(attempt)
        if peer is not None and abort.epoch == peer.epoch:
            if abort.sender_epoch == peer.epoch:
                peer.heard.renew(now_s)
            elif abort.sender_epoch:
                peer.forget_incarnation()
        is_live = (
            transfer is not None
            and (transfer.peer.kv_address, transfer.peer.epoch) == (address, abort.epoch)
            and (not transfer.incoming_id or abort.incoming_id in (0, transfer.incoming_id))
        )
        if transfer is None or not is_live:
            farewell = peer.farewells.get(attempt) if peer is not None else None
            is_told = farewell is None or farewell.is_told or farewell.control.abort.epoch != abort.epoch
            return [SendControl(address, rules.messages.abort_ack(abort, is_told=is_told))]
        transfer.abort = abort
        if transfer.state is TransferState.ABORTING:
            return []
        return rules.fail(transfer, f"the decode worker gave up: {abort.reason}", now_s, tell=False)

    def _on_abort_ack(self, peer: PushPeer, ack: kv_pb2.AbortAck, now_s: float) -> Actions:
        farewell = peer.farewells.get(attempt_of(ack.attempt))
        if farewell is not None and farewell.control.abort.epoch == ack.epoch and ack.drained:
            del peer.farewells[attempt_of(ack.attempt)]
            if ack.epoch == peer.epoch:
                peer.heard.renew(now_s)
        return []
