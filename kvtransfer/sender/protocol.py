"""The prefill side of KVP/1: what is posted, when it is posted again, and when source blocks are free.

A pure state machine: no I/O, no clock of its own. Every method returns, in order, what its caller must do or tell the
worker (`push_actions`). It promises:

- a transfer ends once, with `Denied`, `Acked` or `PushDrained`, and until then its source blocks may be read;
- bytes in flight to one decode worker never exceed the window;
- where this side writes the decode worker's pool, it says that it has drained only when no write is in progress and
  none will ever begin; it commits only when none is in progress; and it begins none without a fresh sign that the
  incoming transfer is still its own;
- every wait has a deadline: for a GRANT, for credit, for the answer to a COMMIT, and for any sign of life.
"""

from collections.abc import Iterable

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.coverage import Coverage
from baton.kvtransfer.protocol.frame import FrameHeader
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.messages import request_id_problem
from baton.kvtransfer.sender.actions import (
    DecodePeer,
    Denied,
    DropPeer,
    GrantInfo,
    PushAction,
    PushDrained,
    PushFailed,
    SendControl,
)
from baton.kvtransfer.sender.inbox import PushInbox
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

# What time makes necessary for a decode worker as such: signs of life, farewells, a new connection, forgetting.


Actions = list[PushAction]


class PushPeers:
    """Looks after the connections of one rank."""

    def __init__(self, rules: PushRules, config: KVTransferConfig) -> None:
        self._rules = rules
        self._config = config

    def due(self, address: str, peer: PushPeer, now_s: float, is_heartbeat: bool) -> Actions:
        """What is due for the decode worker at `address`."""
        rules, lease_s = self._rules, self._config.lease_s
        actions = self._end_silent(address, peer, now_s)
        actions += rules.pump(address, now_s)  # a transfer that ended left its share of the window
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
        # Out of touch, it may be asking whether its pool is still written: it keeps the blocks until it is answered.
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
        # The connection may be dead at the other end only; what is said from now on goes over a new one.
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
            elif now_s >= farewell.retry_s:
                farewell.retry_s = now_s + self._config.heartbeat_s * RETRY_HEARTBEATS
                actions.append(SendControl(address, farewell.control))
        return actions


MASK = (1 << 64) - 1
ROUNDS = 64  # of RESUME that one transfer will not need; answers to an earlier one with the same id are told apart


class PushProtocol:
    """Every transfer of one rank of a prefill worker.

    Args:
        identity: of this rank.
        layout: of its pool.
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
        """Messages of other incarnations, or about them."""
        return self._inbox.num_refused

    @property
    def num_bytes_resent(self) -> int:
        """Payload that was posted more than once."""
        return self._rules.num_bytes_resent

    @property
    def totals(self) -> PushTotals:
        """For metrics; to be read only."""
        return self._rules.totals

    def paths(self, now_s: float) -> tuple[PathCounts, ...]:
        """Every decode worker that is used."""
        return self._rules.paths(now_s)

    def transfers(self) -> Iterable[Transfer]:
        """All live transfers, oldest first; to be read only."""
        return tuple(self._rules.transfers.values())

    def transfer(self, attempt: AttemptKey) -> Transfer | None:
        """One of them; to be read only."""
        return self._rules.transfers.get(attempt)

    def write_deadline_s(self, attempt: AttemptKey) -> float:
        """Until when writes into granted blocks may begin before a `SendFrame` asks for them.

        It moves with every sign that the transfer is still this transfer's. Whoever writes so holds the transfer.
        """
        transfer = self._rules.transfers.get(attempt)
        if transfer is None or transfer.state is not TransferState.PUSHING or not transfer.is_one_sided:
            return float("-inf")
        peer = self._rules.peers[transfer.peer.kv_address]
        if not transfer.is_confirmed or peer.epoch != transfer.peer.epoch:
            return float("-inf")
        return transfer.named_s + SELF_FENCE * transfer.lease_s

    def lanes(self) -> dict[str, str]:
        """The lane to each decode worker that was met, by address."""
        return {address: peer.lane for address, peer in self._rules.peers.items() if peer.lane}

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
        """Rank 0: ask `peer` for an incoming transfer; it answers within `wait_s`, or the transfer fails."""
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
        """Any other rank: push into what rank 0 was granted. No event follows before `Acked` or `PushFailed`.

        Each `Granted` of rank 0 must come to every other rank, even if the transfer has failed meanwhile: a decode
        worker whose pool the ranks write asks all of them before it frees the blocks, and only now they meet it.
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
        self._rules.peers[peer.kv_address].may_ask |= is_one_sided(grant.lane)
        self._num_adopted += 1
        transfer.resume_round = self._num_adopted * ROUNDS & MAX_U32
        self._rules.by_incoming[transfer.incoming_key] = transfer
        return self._begin(transfer, now_s)

    def pushed(self, attempt: AttemptKey, layer: int, first: int, count: int, digest: int, now_s: float) -> Actions:
        """These positions of a layer are computed, and `digest` is theirs; they are sent when the window allows."""
        rules = self._rules
        transfer = rules.transfers.get(attempt)
        if transfer is None or transfer.state is not TransferState.PUSHING:
            return []
        heads = rules.messages.heads[layer]
        if not heads.count:
            return []  # a lower rank has them too
        if transfer.coverage.overlaps(layer, first, count, 0, 1):
            return rules.fail(transfer, f"layer {layer} from position {first} was pushed twice", now_s)
        transfer.coverage.add(layer, first, count, 0, 1)
        transfer.digests[layer] = (transfer.digests[layer] + digest) & MASK
        transfer.bytes_pushed += rules.shape.payload_bytes(layer, count, heads.count)
        transfer.to_send.extend(rules.split(layer, first, count))
        return rules.pump(transfer.peer.kv_address, now_s)

    def commit(
        self, attempt: AttemptKey, state: kv_pb2.SequenceState | None, prefill_end_s: float, now_s: float
    ) -> Actions:
        """All of the prompt was pushed; hand the sequence over. `prefill_end_s` is a reading of the clock here.

        Rank 0 gives the state; the others give None.
        """
        rules = self._rules
        transfer = rules.transfers.get(attempt)
        if transfer is None or transfer.state is TransferState.ABORTING:
            return []  # it failed meanwhile, and the worker was told
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

    # From lanes

    def lane_opened(self, address: str, lane: str, now_s: float) -> Actions:
        """The answer to `OpenLane`: payloads go to this decode worker by `lane` ("inline" always works)."""
        peer = self._rules.peers.get(address)
        if peer is None or not peer.epoch:
            return []
        peer.lane = lane
        actions: Actions = []
        for transfer in self._rules.active_on(address):
            if transfer.peer.epoch == peer.epoch:
                actions += self._rules.connected(transfer, now_s)
        return actions

    def lane_lost(self, address: str, now_s: float) -> Actions:
        """The connection of a two-sided lane broke: ask now which of the frames posted have landed."""
        return [
            self._rules.resume_message(transfer, now_s)
            for transfer in self._rules.active_on(address)
            if transfer.in_flight_bytes and not transfer.is_commit_posted and not transfer.is_one_sided
        ]

    def written(self, attempt: AttemptKey, header: FrameHeader, now_s: float, problem: str = "") -> Actions:
        """A write that `SendFrame` asked for on a one-sided lane is over, or was never begun; `problem`: it failed."""
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

    # From the wire

    def on_control(self, address: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Take a message of the decode worker at `address`.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        return self._inbox.take(address, control, now_s)

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
            actions += self._peers.due(address, peer, now_s, is_heartbeat)
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
                known.forget_incarnation()  # out of touch: it may have forgotten us, or be another incarnation
                known.heard.renew(now_s)
        known.used_s = now_s
        rules.transfers[attempt] = transfer
        return transfer

    def _begin(self, transfer: Transfer, now_s: float) -> Actions:
        rules, address = self._rules, transfer.peer.kv_address
        known = rules.peers[address]
        if known.epoch != transfer.peer.epoch:
            # Not met yet, or whoever named this incarnation is ahead of us or behind: the answer says which, and that
            # decides.
            is_waiting = now_s - known.hello_s < self._config.heartbeat_s
            return [] if is_waiting else [rules.hello(address, now_s)]
        return rules.connected(transfer, now_s) if known.lane else []
