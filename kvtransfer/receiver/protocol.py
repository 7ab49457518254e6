"""The decode side of KVP/1: who may write where, when content counts as whole, and when blocks are free again.

A pure state machine: no I/O, no clock of its own. Every method returns, in order, what its caller must do or tell the
worker (`receiver_actions`); a caller that obeys keeps the promises:

- nothing is written without a grant, after a seal, or once an incoming transfer has drained;
- SEALED means that every position of every layer and head is there, that every rank of the prefill worker committed its
  part, and that digests computed from the pool equal what was announced. All ranks or none;
- after SEALED the sequence needs nothing of its prefill worker any more: that one's ABORT is acknowledged, its silence
  and its restart are ignored. Only the worker here, or a higher attempt at the same request, ends it;
- replays of old messages and frames of old epochs, incoming transfers and attempts change nothing.

Evidence, never a timer, ends quarantine. On a two-sided lane this side writes, so a fenced transfer has drained when
the writes in progress are over. On a one-sided lane the ranks of the prefill worker write: each must say that it has
stopped, in that incarnation, or be proven dead.
"""

from collections.abc import Iterable, Sequence

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import FrameHeader, FrameShape
from baton.kvtransfer.protocol.last_sign import LastSign
from baton.kvtransfer.protocol.transfer_times import TransferTimes
from baton.kvtransfer.receiver.actions import Drained, IncomingFailed, ReceiverAction
from baton.kvtransfer.receiver.frames import ReceiverFrames
from baton.kvtransfer.receiver.inbox import ReceiverInbox
from baton.kvtransfer.receiver.peers import PeerIncarnation
from baton.kvtransfer.receiver.rules import ReceiverCounts, ReceiverRules
from baton.kvtransfer.receiver.table import IncomingState, IncomingTransfer, Inherited, Part
from baton.proto import kv_pb2

Actions = list[ReceiverAction]


class ReceiverProtocol:
    """Every incoming transfer of one decode worker.

    Args:
        epoch: of this process.
        layout: of its pools, all ranks together.
        config: limits and times.
        max_capacity_len: positions of the whole pool.
        offers: the lanes served beside "inline".
        host_id: of this machine; offers of shared memory go to peers with the same.
        has_digest: verify frames and layers by digest, if the peer can.
        digests_layers: this process cannot read the pool; the engine digests whole layers (`DigestLayer`).
    """

    def __init__(
        self,
        *,
        epoch: int,
        layout: KVLayout,
        config: KVTransferConfig,
        max_capacity_len: int,
        offers: Sequence[kv_pb2.LaneOffer] = (),
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
        """How long hand-overs took."""
        return self._rules.times

    @property
    def counts(self) -> ReceiverCounts:
        """Totals since the start."""
        return self._rules.counts

    def incoming_transfers(self) -> Iterable[IncomingTransfer]:
        """All live incoming transfers, oldest first; to be read only."""
        return self._rules.table

    def incoming(self, incoming_id: int) -> IncomingTransfer:
        """The live incoming transfer with this id; to be read only."""
        incoming = self._rules.table.by_id(incoming_id)
        assert incoming is not None
        return incoming

    def find(self, attempt: AttemptKey) -> IncomingTransfer | None:
        """The live incoming transfer of an attempt; to be read only."""
        return self._rules.table.get(attempt)

    def suspects(self) -> list[PeerIncarnation]:
        """Ranks that hold up quarantined blocks: for each, `peer_is_dead` may be told once its death is proven."""
        waiting = [incoming for incoming in self._rules.table if incoming.state is IncomingState.QUARANTINED]
        keys = {
            (incoming.p_epoch, part.rank)
            for incoming in waiting
            if is_one_sided(incoming.lane)
            for part in incoming.parts
            if not part.is_drained
        }
        return [self._rules.peers.incarnation(*key) for key in sorted(keys)]

    # From the wire

    def on_control(self, peer: str, control: kv_pb2.Control, now_s: float) -> Actions:
        """Take a message.

        Raises:
            ProtocolError: the message breaks the protocol; nothing changed.
        """
        return self._inbox.take(peer, control, now_s)

    def on_frame(self, peer: str, header: FrameHeader, now_s: float) -> Actions:
        """Take the header of a frame; a `WriteFrame` among the actions says that its payload is wanted.

        Raises:
            ProtocolError: the header contradicts the layout or the incoming transfer; nothing changed.
        """
        return self._frames.arrived(peer, header, now_s)

    def on_corrupt_frame(self) -> None:
        """Note a frame whose header was damaged: nothing in it can be believed."""
        self._rules.counts.frames_corrupt += 1

    def landed(self, header: FrameHeader, digest: int | None, now_s: float) -> Actions:
        """The payload that `WriteFrame` asked for lies in the pool, and `digest` is the pool's; None: not computed."""
        return self._frames.landed(header, digest, now_s)

    def write_failed(self, header: FrameHeader, now_s: float, *, is_corrupt: bool = False) -> Actions:
        """That payload will not come, or was discarded; or its checksum is wrong. Nothing writes it any more."""
        return self._frames.failed(header, now_s, is_corrupt=is_corrupt)

    def digested(self, incoming_id: int, layer: int, digest: int, now_s: float) -> Actions:
        """The digest that `DigestLayer` asked for."""
        return self._frames.digested(incoming_id, layer, digest, now_s)

    # From the worker

    def grant(
        self, attempt: AttemptKey, now_s: float, blocks: Sequence[int] = (), state_slot: int | None = None
    ) -> Actions:
        """These were reserved for this attempt. If it ended meanwhile, they are given back at once."""
        incoming = self._rules.table.get(attempt)
        if incoming is None:
            return [IncomingFailed(attempt, "the prefill worker gave up before the grant"), Drained(attempt)]
        assert incoming.state is IncomingState.WANTED, f"{attempt} was granted twice"
        incoming.state = IncomingState.FILLING
        incoming.incoming_id = self._next_incoming_id
        if is_one_sided(incoming.lane):
            assert blocks, "the sender must know where to write"
            incoming.blocks, incoming.state_slot = tuple(blocks), state_slot
        for part in incoming.parts:
            part.renewed.renew(now_s)
        self._next_incoming_id += 1
        self._rules.table.index(incoming)
        return [self._rules.replies.grant(incoming)]

    def deny(self, attempt: AttemptKey, reason: kv_pb2.Deny.Reason, detail: str, now_s: float) -> Actions:
        """The worker does not want this attempt."""
        incoming = self._rules.table.get(attempt)
        if incoming is None or incoming.state is not IncomingState.WANTED:
            return []
        incoming.reason, incoming.deny_reason = detail, reason
        self._rules.table.end(incoming, now_s)
        return [self._rules.replies.deny(incoming.peer, attempt, reason, detail)]

    def abort(self, attempt: AttemptKey, reason: str, now_s: float) -> Actions:
        """The worker gives a granted attempt up; `Drained` follows. One that has ended stays ended."""
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
        """The sequence that a sealed incoming transfer became has ended, and its blocks are free."""
        incoming = self._rules.table.get(attempt)
        if incoming is not None:
            assert incoming.state is IncomingState.COMPLETE, f"{attempt} is released and not sealed"
            self._rules.table.end(incoming, now_s)
        return []

    def inherit(self, inherited: Inherited, now_s: float) -> None:
        """Take over what a former incarnation granted on a one-sided lane. Before the first message is taken.

        Of what was not sealed, the ranks of its prefill worker are asked to stop; `Drained` follows on evidence.
        """
        attempt, is_complete = inherited.attempt, inherited.is_complete
        incoming = IncomingTransfer(
            attempt=attempt,
            epoch=inherited.epoch,
            peer="",
            p_epoch=inherited.p_epoch,
            lane=inherited.lane,
            prompt_len=1,
            capacity_len=1,
            deadline_s=now_s,
            coverage=self._rules.coverage(1),
            parts=[Part(rank, LastSign(now_s), []) for rank in range(inherited.tp_size)],
            digests=[],
            state=IncomingState.COMPLETE if is_complete else IncomingState.QUARANTINED,
            has_failed=not is_complete,
            reason="the KV receiver process of the decode worker restarted",
        )
        self._rules.table.add(incoming, now_s)

    # From evidence and time

    def peer_is_dead(self, p_epoch: int, now_s: float, rank: int | None = None) -> Actions:
        """It is proven that a rank of an incarnation, or with None each, is dead and writes nothing any more."""
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
        """Do what is due: leases, heartbeats, NACKs, questions, forgetting."""
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
        """This process did nothing for so long: peers must not be blamed for a silence that is mostly its own."""
        if pause_s > self._config.lease_s / 2:
            for incoming in self._rules.table:
                for part in incoming.parts:
                    part.renewed.forgive(pause_s, self._config.lease_s, now_s)

    @property
    def uncredited_bytes(self) -> int:
        """What `flush` would give credit for; not less than 1 if it would say anything."""
        return self._rules.uncredited_bytes

    def flush(self) -> Actions:
        """Credits for what was taken since the last call; to be called soon after frames."""
        return self._rules.flush()
