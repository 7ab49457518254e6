"""The prefill side of KVP/1: what is posted, when it is posted again, and when source blocks are free.

A pure state machine: no I/O, no clock of its own. Every method returns, in order, what its caller must do or tell the
worker (`push_actions`). It promises:

- a transfer ends once, with `Denied`, `Acked` or `PushDrained`, and until then its source blocks may be read;
- bytes in flight to one decode worker never exceed the window it granted;
- every wait has a deadline: for a GRANT, for credit, for the answer to a COMMIT, and for any sign of life.
"""

from collections.abc import Iterable

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.core.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.coverage import Coverage, Gap
from baton.kvtransfer.frame import FrameShape
from baton.kvtransfer.last_sign import LastSign
from baton.kvtransfer.messages import attempt_of, hello_problem, request_id_problem
from baton.kvtransfer.push_actions import (
    Acked,
    DecodePeer,
    Denied,
    Granted,
    PushAction,
)
from baton.kvtransfer.push_messages import MAX_U32
from baton.kvtransfer.push_rules import PushRules
from baton.kvtransfer.push_table import PushPeer, Transfer, TransferState
from baton.proto import kv_pb2

MASK = (1 << 64) - 1
Actions = list[PushAction]


class PushProtocol:
    """Every transfer of one prefill worker.

    Args:
        epoch: of this process.
        layout: of its pool.
        config: limits and times.
    """

    def __init__(self, *, epoch: int, layout: KVLayout, config: KVTransferConfig) -> None:
        self._epoch = epoch
        self._layout = layout
        self._config = config
        self._shape = FrameShape(layout, config.max_frame_bytes)
        self._rules = PushRules(epoch, layout, config)
        self._heartbeat_s = float("-inf")
        self.num_messages_refused = 0

    def transfers(self) -> Iterable[Transfer]:
        """All live transfers, oldest first; to be read only."""
        return tuple(self._rules.transfers.values())

    # From the worker

    def reserve(
        self,
        attempt: AttemptKey,
        peer: DecodePeer,
        *,
        prompt_len: int,
        capacity_len: int,
        wait_s: float,
        now_s: float,
    ) -> Actions:
        """Ask `peer` for a landing; it answers within `wait_s`, or the transfer fails."""
        assert attempt not in self._rules.transfers, f"{attempt} is here already"
        known = self._rules.peers.get(peer.kv_address)
        if known is None:
            known = self._rules.peers[peer.kv_address] = PushPeer(heard=LastSign(now_s))
        elif not self._rules.active_on(peer.kv_address) and known.heard.silence_s(now_s) > self._config.lease_s:
            known.epoch = 0  # out of touch: it may have forgotten us, or be another life
            known.heard.renew(now_s)
        problem = request_id_problem(attempt.request_id)
        if problem or capacity_len > MAX_U32:
            reason = kv_pb2.Deny.UNSPECIFIED if problem else kv_pb2.Deny.TOO_LONG
            return [Denied(attempt, reason, problem or f"{capacity_len} positions are more than any pool has")]
        transfer = Transfer(
            attempt=attempt,
            peer=peer,
            prompt_len=prompt_len,
            capacity_len=capacity_len,
            deadline_s=now_s + wait_s,
            retry_s=now_s,
            renewed=LastSign(now_s),
            progress=LastSign(now_s),
            coverage=Coverage(self._layout.num_layers, 1, prompt_len),
            digests=[0] * self._layout.num_layers,
        )
        self._rules.transfers[attempt] = transfer
        if known.epoch == 0:
            return (
                [] if now_s - known.hello_s < self._config.heartbeat_s else [self._rules.hello(peer.kv_address, now_s)]
            )
        if known.epoch != peer.epoch:
            return self._rules.fail(transfer, "the decode worker restarted", now_s)
        return [self._rules.reserve_message(transfer, now_s)]

    def pushed(self, attempt: AttemptKey, layer: int, first: int, count: int, digest: int, now_s: float) -> Actions:
        """These positions of a layer are computed, and `digest` is theirs; they are sent when the window allows."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is None or transfer.state is not TransferState.PUSHING:
            return []
        if transfer.coverage.overlaps(layer, first, count, 0, 1):
            return self._rules.fail(transfer, f"layer {layer} from position {first} was pushed twice", now_s)
        transfer.coverage.add(layer, first, count, 0, 1)
        transfer.digests[layer] = (transfer.digests[layer] + digest) & MASK
        transfer.bytes_pushed += count * self._layout.bytes_per_position
        transfer.to_send.extend(
            Gap(layer, *piece) for piece in self._shape.split(layer, first, count, self._layout.num_kv_heads)
        )
        return self._rules.pump(transfer.peer.kv_address, now_s)

    def commit(self, attempt: AttemptKey, state: kv_pb2.SequenceState, prefill_end_s: float, now_s: float) -> Actions:
        """All of the prompt was pushed; hand the sequence over. `prefill_end_s` is a reading of the clock here."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is None or transfer.state is TransferState.ABORTING:
            return []  # it failed meanwhile, and the worker was told
        assert transfer.state is TransferState.PUSHING, f"{attempt} is committed in {transfer.state.name}"
        gap = next(transfer.coverage.gaps(), None)
        if gap is not None:
            reason = f"layer {gap.layer} was not pushed from position {gap.first}"
            return self._rules.fail(transfer, f"the commit is premature: {reason}", now_s)
        transfer.state = TransferState.COMMITTING
        transfer.state_message = state
        transfer.prefill_end_s = prefill_end_s
        transfer.progress.renew(now_s)
        return self._rules.pump(transfer.peer.kv_address, now_s)

    def abort(self, attempt: AttemptKey, reason: str, now_s: float) -> Actions:
        """Give a transfer up; `PushDrained` follows. One that has ended stays ended."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is None or transfer.state is TransferState.ABORTING:
            return []
        return self._rules.give_up(transfer, reason, now_s)

    def hold(self, attempt: AttemptKey) -> None:
        """A writer may read the source blocks of this attempt until `unhold`."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is not None:
            transfer.num_holds += 1

    def unhold(self, attempt: AttemptKey) -> Actions:
        """The writer is past them."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is None:
            return []
        assert transfer.num_holds > 0
        transfer.num_holds -= 1
        return self._rules.drain_if_quiet(transfer)

    # From the wire

    def on_control(self, address: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Take a message of the decode worker at `address`.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        peer = self._rules.peers.get(address)
        kind = control.WhichOneof("message")
        if peer is None:
            return []
        if kind == "hello_reply":
            return self._on_hello_reply(address, peer, control.hello_reply, now_s)
        message = getattr(control, str(kind))
        if peer.epoch == 0 or message.epoch != peer.epoch:
            self.num_messages_refused += 1
            return []
        peer.heard.renew(now_s)
        return self._dispatch(address, peer, control, now_s)

    # From time

    def tick(self, now_s: float) -> Actions:
        """Do what is due: deadlines, repeats, heartbeats, forgetting."""
        actions: Actions = []
        for transfer in self.transfers():
            actions += self._rules.due(transfer, now_s)
        is_heartbeat = now_s - self._heartbeat_s >= self._config.heartbeat_s
        if is_heartbeat:
            self._heartbeat_s = now_s
        for address, peer in tuple(self._rules.peers.items()):
            actions += self._rules.peer_due(address, peer, now_s, is_heartbeat)
        return actions

    def forgive(self, pause_s: float, now_s: float) -> None:
        """This process did nothing for so long: peers must not be blamed for a silence that is mostly its own."""
        lease_s = self._config.lease_s
        if pause_s <= lease_s / 2:
            return
        for peer in self._rules.peers.values():
            peer.heard.forgive(pause_s, lease_s, now_s)
        for transfer in self._rules.transfers.values():
            transfer.renewed.forgive(pause_s, lease_s, now_s)
            transfer.progress.forgive(pause_s, lease_s, now_s)

    def clock_offset_s(self, address: str) -> float:
        """What to add to a reading here to get the decode worker's."""
        return self._rules.peers[address].clock_offset_s

    # Messages

    def _dispatch(self, address: str, peer: PushPeer, control: kv_pb2.Control, now_s: float) -> Actions:
        match control.WhichOneof("message"):
            case "grant":
                return self._on_grant(address, control.grant, now_s)
            case "deny":
                return self._on_deny(address, control.deny)
            case "commit_ack":
                return self._on_ack(address, control.commit_ack)
            case "commit_nack":
                return self._on_nack(address, control.commit_nack, now_s)
            case "credit":
                return self._on_credit(address, control.credit, now_s)
            case "lease":
                return self._on_lease(address, control.lease, now_s)
            case "abort":
                return self._on_abort(address, control.abort, now_s)
            case "abort_ack":
                peer.farewells.pop(attempt_of(control.abort_ack.attempt), None)
                return []
            case "have":
                return self._on_have(address, control.have, now_s)
            case kind:
                raise ProtocolError(f"a prefill worker takes no {kind}", kind=str(kind))

    def _on_hello_reply(self, address: str, peer: PushPeer, reply: kv_pb2.HelloReply, now_s: float) -> Actions:
        if reply.peer_epoch != self._epoch or reply.echo_sent_ns not in peer.hellos:
            self.num_messages_refused += 1
            return []
        peer.heard.renew(now_s)
        sent_s, receiver_s = reply.echo_sent_ns / 1e9, reply.receiver_ns / 1e9
        refused = reply.refused or hello_problem(reply.version, reply.layout, self._layout)
        is_new = peer.epoch != reply.epoch
        if is_new:
            peer.epoch = reply.epoch
            peer.offsets.clear()
        peer.offsets.append((now_s - sent_s, receiver_s - (sent_s + now_s) / 2))
        actions: Actions = []
        for transfer in self._rules.live_on(address):
            if transfer.state is TransferState.ABORTING:
                continue
            if refused and transfer.state is TransferState.RESERVING:
                actions += self._rules.end(transfer, Denied(transfer.attempt, kv_pb2.Deny.LAYOUT, refused))
            elif refused or transfer.peer.epoch != peer.epoch:
                actions += self._rules.fail(transfer, refused or "the decode worker restarted", now_s)
            elif is_new and transfer.state is TransferState.RESERVING:
                actions.append(self._rules.reserve_message(transfer, now_s))
        return actions

    def _on_grant(self, address: str, grant: kv_pb2.Grant, now_s: float) -> Actions:
        transfer = self._rules.transfers.get(attempt_of(grant.attempt))
        if transfer is None or transfer.peer.kv_address != address:
            return []  # it ended; its ABORT is on the way or done
        transfer.renewed.renew(now_s)
        if transfer.state is not TransferState.RESERVING or transfer.peer.epoch != grant.epoch:
            return []
        transfer.state = TransferState.PUSHING
        transfer.landing_id = grant.landing_id
        transfer.window_bytes = grant.credit_bytes
        transfer.progress.renew(now_s)
        self._rules.by_landing[address, grant.landing_id] = transfer
        return [Granted(transfer.attempt)]

    def _on_deny(self, address: str, deny: kv_pb2.Deny) -> Actions:
        transfer = self._rules.transfers.get(attempt_of(deny.attempt))
        if transfer is None or transfer.peer.kv_address != address or transfer.state is not TransferState.RESERVING:
            return []
        return self._rules.end(transfer, Denied(transfer.attempt, deny.reason, deny.detail))

    def _on_ack(self, address: str, ack: kv_pb2.CommitAck) -> Actions:
        transfer = self._rules.by_landing.get((address, ack.landing_id))
        if transfer is None or transfer.state is not TransferState.COMMITTING:
            return []
        return self._rules.end(transfer, Acked(transfer.attempt, transfer.bytes_pushed))

    def _on_nack(self, address: str, nack: kv_pb2.CommitNack, now_s: float) -> Actions:
        transfer = self._rules.by_landing.get((address, nack.landing_id))
        if transfer is None or transfer.state is not TransferState.COMMITTING:
            return []
        transfer.renewed.renew(now_s)
        if not transfer.is_commit_posted or nack.round != transfer.round:
            return []  # about an earlier COMMIT
        if not nack.missing:
            return self._rules.fail(transfer, "the decode worker lacks something and does not say what", now_s)
        transfer.round += 1
        transfer.is_commit_posted = False
        return self._rules.send_again(transfer, nack.missing, now_s)

    def _on_have(self, address: str, have: kv_pb2.Have, now_s: float) -> Actions:
        transfer = self._rules.by_landing.get((address, have.landing_id))
        if transfer is None or transfer.state not in (TransferState.PUSHING, TransferState.COMMITTING):
            return []
        transfer.renewed.renew(now_s)
        if not transfer.is_resume_posted or have.round != transfer.resume_round:
            return []  # it answers a RESUME that was answered before
        transfer.is_resume_posted = False
        transfer.resume_round += 1
        return self._rules.send_again(transfer, have.missing, now_s)

    def _on_credit(self, address: str, credit: kv_pb2.Credit, now_s: float) -> Actions:
        for entry in credit.landings:
            transfer = self._rules.by_landing.get((address, entry.landing_id))
            if transfer is not None and entry.charged_bytes > transfer.credited_bytes:
                transfer.credited_bytes = entry.charged_bytes
                transfer.renewed.renew(now_s)
                transfer.progress.renew(now_s)
                self._rules.peers[address].progress_s = now_s
        return self._rules.pump(address, now_s)

    def _on_lease(self, address: str, lease: kv_pb2.Lease, now_s: float) -> Actions:
        for landing_id in lease.landing_ids:
            transfer = self._rules.by_landing.get((address, landing_id))
            if transfer is not None:
                transfer.renewed.renew(now_s)
        return []

    def _on_abort(self, address: str, abort: kv_pb2.Abort, now_s: float) -> Actions:
        transfer = self._rules.by_landing.get((address, abort.landing_id))
        if transfer is None or transfer.state is TransferState.ABORTING:
            return []
        return self._rules.fail(transfer, f"the decode worker gave up: {abort.reason}", now_s, tell=False)
