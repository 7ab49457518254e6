"""The prefill side of KVP/2: what is posted, when it is posted again, and when source blocks are free.

A pure state machine: no I/O, no clock of its own. Every method returns, in order, the actions that its caller must
perform and the events for the worker (`sender.actions`). It guarantees:

- A transfer ends once, with `Denied`, `Acked` or `PushDrained`; until then its source blocks may be read.
- Bytes in flight to one decode worker never exceed the window.
- Where this side writes the decode worker's pool, it reports that it has drained only when no write is in progress and
  none will ever begin. It commits only when no write is in progress. It begins no write without a recent sign that the
  incoming transfer still belongs to it.
- Every wait has a deadline: for a GRANT, for credit, for the reply to a COMMIT, and for any sign of life.
"""

from collections.abc import Callable, Iterable

from baton.core.config import KVTransferConfig
from baton.core.errors import ProtocolError
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.coverage import Coverage
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.messages import DIGEST, attempt_of, hello_problem, request_id_problem, shorten
from baton.kvtransfer.protocol.proof import NUMBER_BYTES
from baton.kvtransfer.sender.actions import (
    Acked,
    DecodePeer,
    Denied,
    DropPeer,
    Granted,
    GrantInfo,
    OpenDataPath,
    PushAction,
    PushDrained,
    PushFailed,
    SendControl,
)
from baton.kvtransfer.sender.messages import MAX_U32, PushIdentity
from baton.kvtransfer.sender.rules import (
    HELLO_HEARTBEATS,
    IDLE_LEASES,
    ONE_SIDED_FAREWELL_S,
    RETRY_HEARTBEATS,
    SELF_FENCE,
    PushRules,
)
from baton.kvtransfer.sender.table import PathCounts, PushPeer, PushTotals, Transfer, TransferState
from baton.proto import kv_pb2

Actions = list[PushAction]


class PushInbox:
    """Handles the control messages that one rank receives."""

    def __init__(self, identity: PushIdentity, rules: PushRules) -> None:
        self.num_refused = 0
        self._me = identity
        self._rules = rules

    def take(self, address: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Handle a message from the decode worker at `address`.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
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
            peer.forget_incarnation()  # including every HELLO that the old incarnation may still answer
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
            peer.forget_incarnation()  # the next transfer sends a new HELLO
        elif not peer.data_path:
            actions.append(OpenDataPath(address, peer.epoch, reply.host_id, tuple(reply.offers)))
        return actions

    def _on_challenge(self, address: str, peer: PushPeer, reply: kv_pb2.HelloReply, now_s: float) -> Actions:
        """Answer a challenge, at once at most once per heartbeat. Only a later reply proves who sent it."""
        if len(reply.challenge) != NUMBER_BYTES or reply.challenge == peer.challenge:
            self.num_refused += 1
            return []
        peer.challenge = reply.challenge
        if now_s - peer.challenged_s < self._rules.config.heartbeat_s:
            return []
        peer.challenged_s = now_s
        return [self._rules.hello(address, now_s)]

    def _doubt(self, peer: PushPeer, reply: kv_pb2.HelloReply) -> Actions:
        """Ignore an unproved reply, which any process may have sent; raise an error only the first time."""
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
            return []  # the transfer ended; its ABORT is on the way or was delivered
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
            data_path=grant.data_path,
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
        if grant.data_path != transfer.data_path:
            return f"data path {transfer.data_path} was asked for and {grant.data_path[:32]!r} granted"
        if is_one_sided(grant.data_path) and len(grant.blocks) * peer.block_size < transfer.prompt_len:
            size = f"{len(grant.blocks)} blocks of {peer.block_size}"
            return f"the decode worker granted {size} for {transfer.prompt_len} positions"
        return ""

    def _on_deny(self, address: str, peer: PushPeer, deny: kv_pb2.Deny, now_s: float) -> Actions:
        transfer = self._rules.transfers.get(attempt_of(deny.attempt))
        if transfer is None or transfer.peer.kv_address != address or transfer.state is not TransferState.RESERVING:
            return []
        if deny.reason == kv_pb2.Deny.NO_HELLO:
            # A new connection has proved nothing yet. Once it has, RESERVE is sent again.
            heartbeat_s = self._rules.config.heartbeat_s
            transfer.retry_s = min(transfer.retry_s, now_s + heartbeat_s)
            return [] if now_s - peer.hello_s < heartbeat_s else [self._rules.hello(address, now_s)]
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
            return []  # refers to an earlier COMMIT
        transfer.round += 1
        transfer.is_commit_posted = False
        rules.credit(transfer, nack.charged_bytes, now_s)
        rules.write_off(transfer)
        if not nack.missing:
            return rules.pump(address, now_s)  # everything arrived meanwhile; repeat the COMMIT
        return rules.send_again(transfer, nack.missing, now_s)

    def _on_have(self, address: str, peer: PushPeer, have: kv_pb2.Have, now_s: float) -> Actions:
        rules = self._rules
        transfer = rules.by_incoming.get((address, peer.epoch, have.incoming_id))
        if transfer is None or transfer.state not in (TransferState.PUSHING, TransferState.COMMITTING):
            return []
        rules.named(transfer, now_s)
        if not transfer.is_resume_posted or have.round != transfer.resume_round:
            return []  # the reply to a RESUME that was answered before
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
                transfer.is_resume_posted = False  # nothing that it asks about is open any more
                transfer.resume_round += 1
        return rules.pump(address, now_s)

    def _on_lease(self, address: str, peer: PushPeer, lease: kv_pb2.Lease, now_s: float) -> Actions:
        for incoming_id in lease.incoming_ids:
            transfer = self._rules.by_incoming.get((address, peer.epoch, incoming_id))
            if transfer is not None:
                self._rules.named(transfer, now_s)
        return []

    def _on_abort(self, address: str, peer: PushPeer | None, abort: kv_pb2.Abort, now_s: float) -> Actions:
        """Handle an ABORT: the decode worker, perhaps an earlier incarnation, gave up and asks when all is quiet."""
        rules = self._rules
        if abort.peer_epoch not in (0, self._me.epoch):
            self.num_refused += 1
            return []  # only the incarnation that received the grant may answer
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


# What is due by time for a decode worker as such: signs of life, farewells, reconnecting, forgetting.


class PushPeers:
    """Maintains the connections of one rank."""

    def __init__(self, rules: PushRules, config: KVTransferConfig) -> None:
        self._rules = rules
        self._config = config

    def due(self, address: str, peer: PushPeer, now_s: float, is_heartbeat: bool) -> Actions:
        """Return the actions that are due for the decode worker at `address`."""
        rules, lease_s = self._rules, self._config.lease_s
        actions = self._end_silent(address, peer, now_s)
        actions += rules.pump(address, now_s)  # a transfer that ended has freed its share of the window
        actions += self._farewells(address, peer, now_s)
        live = rules.active_on(address)
        if live or peer.farewells:
            peer.used_s = now_s
        if is_heartbeat:
            # Also without transfers: the decode worker may have a question about one that ended.
            is_met = peer.epoch and all(transfer.peer.epoch == peer.epoch for transfer in live)
            if now_s - peer.hello_s >= self._config.heartbeat_s * (HELLO_HEARTBEATS if is_met else 1):
                actions.append(rules.hello(address, now_s))
            if live and peer.epoch:
                ids = [transfer.incoming_id for transfer in live if transfer.incoming_id]
                actions.append(SendControl(address, rules.messages.lease(ids)))
        # If it is out of touch, the decode worker may be asking whether its pool is still written; it keeps the blocks
        # until it gets an answer.
        is_out_of_touch = peer.may_ask and peer.heard.silence_s(now_s) > lease_s
        limit_s = ONE_SIDED_FAREWELL_S if is_out_of_touch else IDLE_LEASES * lease_s
        if not rules.live_on(address) and not peer.farewells and now_s - peer.used_s > limit_s:
            del rules.peers[address]
            rules.totals.forget(address)
            actions.append(DropPeer(address))
        return actions

    def _end_silent(self, address: str, peer: PushPeer, now_s: float) -> Actions:
        rules, lease_s = self._rules, self._config.lease_s
        live = rules.active_on(address)
        is_missed = bool(live) or (bool(peer.farewells) and peer.epoch != 0)
        if not is_missed or peer.heard.silence_s(now_s) <= lease_s:
            return []
        # The connection may be dead at the other end only; later messages go over a new one.
        actions: Actions = [DropPeer(address)]
        for transfer in live:
            actions += rules.fail(transfer, f"nothing heard from the decode worker for {lease_s} s", now_s)
        peer.forget_incarnation()
        return actions

    def _farewells(self, address: str, peer: PushPeer, now_s: float) -> Actions:
        actions: Actions = []
        for attempt, farewell in tuple(peer.farewells.items()):
            if now_s > farewell.until_s:
                del peer.farewells[attempt]
            elif peer.epoch and now_s >= farewell.retry_s:  # it refuses messages of a rank that it has not met
                farewell.retry_s = now_s + self._config.heartbeat_s * RETRY_HEARTBEATS
                actions.append(SendControl(address, farewell.control))
        return actions


MASK = (1 << 64) - 1
ROUNDS = 64  # more RESUME rounds than one transfer needs; tell apart replies to an earlier transfer with its id


class PushProtocol:
    """All transfers of one rank of a prefill worker.

    Args:
        identity: identity of this rank.
        layout: layout of its pool.
        config: limits and times.
    """

    def __init__(self, *, identity: PushIdentity, layout: KVLayout, config: KVTransferConfig) -> None:
        self._me = identity
        self._layout = layout
        self._config = config
        self._rules = PushRules(identity, layout, config)
        self._inbox = PushInbox(identity, self._rules)
        self._peers = PushPeers(self._rules, config)
        self._heartbeat_s = float("-inf")
        self._num_adopted = 0

    @property
    def num_messages_refused(self) -> int:
        """Number of messages refused because they came from, or concerned, other incarnations."""
        return self._inbox.num_refused

    @property
    def num_bytes_resent(self) -> int:
        """Payload bytes that were posted more than once."""
        return self._rules.num_bytes_resent

    @property
    def totals(self) -> PushTotals:
        """Totals for metrics; read-only."""
        return self._rules.totals

    def paths(self, now_s: float) -> tuple[PathCounts, ...]:
        """Return the counts of every decode worker in use."""
        return self._rules.paths(now_s)

    def transfers(self) -> Iterable[Transfer]:
        """Return all live transfers, oldest first; read-only."""
        return tuple(self._rules.transfers.values())

    def transfer(self, attempt: AttemptKey) -> Transfer | None:
        """Return the live transfer of an attempt; read-only."""
        return self._rules.transfers.get(attempt)

    def write_deadline_s(self, attempt: AttemptKey) -> float:
        """Return until when writes into granted blocks may begin before a `SendFrame` asks for them.

        Every sign that the decode worker still knows this transfer extends it. A writer that writes early holds the
        transfer.
        """
        transfer = self._rules.transfers.get(attempt)
        if transfer is None or transfer.state is not TransferState.PUSHING or not transfer.is_one_sided:
            return float("-inf")
        peer = self._rules.peers[transfer.peer.kv_address]
        if not transfer.is_confirmed or peer.epoch != transfer.peer.epoch:
            return float("-inf")
        return transfer.named_s + SELF_FENCE * transfer.lease_s

    def data_paths(self) -> dict[str, str]:
        """Return the data path to each decode worker that was met, by address."""
        return {address: peer.data_path for address, peer in self._rules.peers.items() if peer.data_path}

    # Calls from the worker

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
        """Ask `peer` for an incoming transfer (rank 0 only); it replies within `wait_s`, or the transfer fails."""
        assert self._me.rank == 0, "rank 0 reserves; the others adopt"
        problem = request_id_problem(attempt.request_id)
        if problem or capacity_len > MAX_U32:
            reason = kv_pb2.Deny.UNSPECIFIED if problem else kv_pb2.Deny.TOO_LONG
            return [Denied(attempt, reason, problem or f"{capacity_len} positions are more than any pool has")]
        transfer = self._add(attempt, peer, prompt_len, capacity_len, now_s + wait_s, now_s)
        return self._begin(transfer, now_s)

    def adopt(
        self, attempt: AttemptKey, peer: DecodePeer, *, prompt_len: int, grant: GrantInfo, now_s: float
    ) -> Actions:
        """Push into what rank 0 was granted (ranks above 0 only). No event follows before `Acked` or `PushFailed`.

        Each `Granted` of rank 0 must reach every other rank, even if the transfer has failed meanwhile. If the ranks
        write a decode worker's pool, it asks all of them before it frees the blocks, and they meet it only through this
        call.
        """
        assert self._me.rank > 0, "rank 0 hears of its grants itself"
        if grant.d_epoch != peer.epoch:
            return [PushFailed(attempt, "the grant is another incarnation's"), PushDrained(attempt)]
        transfer = self._add(attempt, peer, prompt_len, prompt_len, now_s, now_s)
        transfer.state = TransferState.PUSHING
        transfer.grant = grant
        transfer.lease_s = grant.lease_s
        transfer.is_told = True
        transfer.is_confirmed = False
        self._rules.peers[peer.kv_address].may_ask |= is_one_sided(grant.data_path)
        self._num_adopted += 1
        transfer.resume_round = self._num_adopted * ROUNDS & MAX_U32
        self._rules.by_incoming[transfer.incoming_key] = transfer
        return self._begin(transfer, now_s)

    def pushed(self, attempt: AttemptKey, layer: int, first: int, count: int, digest: int, now_s: float) -> Actions:
        """Report that these positions of a layer are computed; `digest` covers those that this rank pushes.

        They are sent when the window allows.
        """
        rules = self._rules
        transfer = rules.transfers.get(attempt)
        if transfer is None or transfer.state is not TransferState.PUSHING:
            return []
        heads = rules.messages.heads[layer]
        if not heads.count:
            return []  # a lower rank holds the same heads
        if transfer.coverage.overlaps(layer, first, count, 0, 1):
            return rules.fail(transfer, f"layer {layer} from position {first} was pushed twice", now_s)
        transfer.coverage.add(layer, first, count, 0, 1)
        transfer.digests[layer] = (transfer.digests[layer] + digest) & MASK
        transfer.bytes_pushed += rules.own_bytes(layer, first, count)
        transfer.to_send.extend(rules.split(layer, first, count))
        return rules.pump(transfer.peer.kv_address, now_s)

    def commit(
        self, attempt: AttemptKey, state: kv_pb2.SequenceState | None, prefill_end_s: float, now_s: float
    ) -> Actions:
        """Hand the sequence over: the whole prompt was pushed. `prefill_end_s` is a time on this side's clock.

        Rank 0 passes the state; the others pass None.
        """
        rules = self._rules
        transfer = rules.transfers.get(attempt)
        if transfer is None or transfer.state is TransferState.ABORTING:
            return []  # the transfer failed meanwhile, and the worker was told
        assert transfer.state is TransferState.PUSHING, f"{attempt} is committed in {transfer.state.name}"
        assert (state is not None) == (self._me.rank == 0)
        gap = next(transfer.coverage.gaps(), None)
        if gap is not None:
            reason = f"layer {gap.layer} was not pushed from position {gap.first}"
            return rules.fail(transfer, f"the commit is premature: {reason}", now_s)
        transfer.state = TransferState.COMMITTING
        transfer.state_message = state
        transfer.prefill_end_s = prefill_end_s
        transfer.progress.renew(now_s)
        return rules.pump(transfer.peer.kv_address, now_s)

    def abort(self, attempt: AttemptKey, reason: str, now_s: float) -> Actions:
        """Give a transfer up; `PushDrained` follows. Does nothing if the transfer has ended."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is None or transfer.state is TransferState.ABORTING:
            return []
        return self._rules.give_up(transfer, reason, now_s)

    def hold(self, attempt: AttemptKey) -> None:
        """Note that a writer may read the source blocks of this attempt until `unhold`."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is not None:
            transfer.num_holds += 1

    def unhold(self, attempt: AttemptKey) -> Actions:
        """Note that the writer does not read the source blocks any more."""
        transfer = self._rules.transfers.get(attempt)
        if transfer is None:
            return []
        assert transfer.num_holds > 0
        transfer.num_holds -= 1
        return self._rules.drain_if_quiet(transfer)

    # Calls from data paths

    def data_path_opened(self, address: str, data_path: str, now_s: float) -> Actions:
        """Report the data path that `OpenDataPath` opened to this decode worker ("inline" always works)."""
        peer = self._rules.peers.get(address)
        if peer is None or not peer.epoch:
            return []
        peer.data_path = data_path
        actions: Actions = []
        for transfer in self._rules.active_on(address):
            if transfer.peer.epoch == peer.epoch:
                actions += self._rules.connected(transfer, now_s)
        return actions

    def data_path_lost(self, address: str, now_s: float) -> Actions:
        """Ask which posted frames have arrived, because the connection of a two-sided data path broke."""
        return [
            self._rules.resume_message(transfer, now_s)
            for transfer in self._rules.active_on(address)
            if transfer.in_flight_bytes and not transfer.is_commit_posted and not transfer.is_one_sided
        ]

    def written(self, attempt: AttemptKey, header: FrameHeader, now_s: float, problem: str = "") -> Actions:
        """Report that a one-sided write (`SendFrame`) ended or was never begun; `problem` says why it failed."""
        transfer = self._rules.transfers.get(attempt)
        assert transfer is not None, "a transfer stays until all its writes are over"
        assert transfer.num_writes > 0
        assert transfer.incoming_id == header.incoming_id
        transfer.num_writes -= 1
        if transfer.state is TransferState.ABORTING:
            return self._rules.drain_if_quiet(transfer)
        if problem:
            return self._rules.fail(transfer, f"layer {header.layer} could not be written: {problem}", now_s)
        transfer.progress.renew(now_s)  # the wait for credit begins
        return self._rules.pump(transfer.peer.kv_address, now_s)

    # Messages

    def on_control(self, address: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Handle a message from the decode worker at `address`.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        return self._inbox.take(address, control, now_s)

    # Time

    def tick(self, now_s: float) -> Actions:
        """Return what is due: deadlines, repeats, heartbeats, forgetting."""
        actions: Actions = []
        for transfer in self.transfers():
            actions += self._rules.due(transfer, now_s)
        is_heartbeat = now_s - self._heartbeat_s >= self._config.heartbeat_s
        if is_heartbeat:
            self._heartbeat_s = now_s
        for address, peer in tuple(self._rules.peers.items()):
            actions += self._peers.due(address, peer, now_s, is_heartbeat)
        return actions

    def forgive(self, pause_s: float, now_s: float) -> None:
        """Excuse the silence of peers during `pause_s`, in which this process itself did nothing."""
        lease_s = self._config.lease_s
        if pause_s <= lease_s / 2:
            return
        for peer in self._rules.peers.values():
            peer.heard.forgive(pause_s, lease_s, now_s)
        for transfer in self._rules.transfers.values():
            transfer.renewed.forgive(pause_s, lease_s, now_s)
            transfer.progress.forgive(pause_s, lease_s, now_s)

    def clock_offset_s(self, address: str) -> float:
        """Return what to add to a time on this side's clock to get the decode worker's."""
        return self._rules.peers[address].clock_offset_s

    def _add(
        self,
        attempt: AttemptKey,
        peer: DecodePeer,
        prompt_len: int,
        capacity_len: int,
        deadline_s: float,
        now_s: float,
    ) -> Transfer:
        rules = self._rules
        assert attempt not in rules.transfers, f"{attempt} is here already"
        layers = self._layout.layers
        transfer = Transfer(
            attempt=attempt,
            peer=peer,
            prompt_len=prompt_len,
            capacity_len=capacity_len,
            deadline_s=deadline_s,
            retry_s=now_s,
            renewed=LastSign(now_s),
            progress=LastSign(now_s),
            named_s=now_s,
            coverage=Coverage(
                [layer.span(prompt_len) for layer in layers],
                [min(1, heads.count) for heads in rules.messages.heads],
            ),
            digests=[0] * len(layers),
            two_layers_bytes=rules.two_layers_bytes(prompt_len),
        )
        known = rules.peers.get(peer.kv_address)
        if known is None:
            known = rules.peers[peer.kv_address] = PushPeer(LastSign(now_s), now_s)
        elif not rules.active_on(peer.kv_address):
            is_silent = known.heard.silence_s(now_s) > self._config.lease_s
            if is_silent or known.epoch not in (0, peer.epoch):
                known.forget_incarnation()  # out of touch: it may have forgotten this rank, or be another incarnation
                known.heard.renew(now_s)
        known.used_s = now_s
        rules.transfers[attempt] = transfer
        return transfer

    def _begin(self, transfer: Transfer, now_s: float) -> Actions:
        rules, address = self._rules, transfer.peer.kv_address
        known = rules.peers[address]
        if known.epoch != transfer.peer.epoch or not known.data_path:
            # Not met yet, or the router that named this incarnation is ahead of this rank or behind: the reply decides.
            # It also brings an offer, so that a data path that could not be opened is opened anew.
            is_waiting = now_s - known.hello_s < self._config.heartbeat_s
            return [] if is_waiting else [rules.hello(address, now_s)]
        return rules.connected(transfer, now_s)
