"""The sender's rules: when a transfer posts, posts again, fails and ends.

Calls from the worker, messages and time all lead to these rules; the caller decides which one applies.
"""

from collections.abc import Iterable

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import INLINE, is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.coverage import LayerRange
from baton.kvtransfer.protocol.frame import FRAME_OVERHEAD_BYTES, FrameShape
from baton.kvtransfer.protocol.proof import KvProofs
from baton.kvtransfer.sender.actions import (
    Acked,
    Denied,
    DropPeer,
    PushAction,
    PushDrained,
    PushFailed,
    SendControl,
    SendFrame,
    StopFrames,
)
from baton.kvtransfer.sender.messages import PushIdentity, PushMessages
from baton.kvtransfer.sender.table import PathCounts, PushPeer, PushTotals, RepeatedAbort, Transfer, TransferState
from baton.proto import kv_pb2

HELLO_HEARTBEATS = 4  # a HELLO is sent with every fourth heartbeat, for the clock offset and to notice a new epoch
RETRY_HEARTBEATS = 2
# A fraction of the lease: after that long without a sign of life, nothing is written into blocks that may be reused by
# then.
SELF_FENCE = 0.75
ONE_SIDED_FAREWELL_S = 600.0  # the decode worker cannot free the blocks before it knows
MAX_FAREWELLS = 4096
IDLE_LEASES = 5
Actions = list[PushAction]


class PushRules:
    """The state of all transfers, and the rules that change it."""

    def __init__(self, identity: PushIdentity, layout: KVLayout, config: KVTransferConfig) -> None:
        self.transfers: dict[AttemptKey, Transfer] = {}
        self.by_incoming: dict[tuple[str, int, int], Transfer] = {}  # by `Transfer.incoming_key`
        self.peers: dict[str, PushPeer] = {}
        self.num_bytes_resent = 0
        self.totals = PushTotals()
        self.layout = layout
        self.config = config
        self.shape = FrameShape(layout, config.max_frame_bytes)
        self.messages = PushMessages(identity, layout, self.shape, KvProofs(bytes.fromhex(config.key)))
        self._retry_s = config.heartbeat_s * RETRY_HEARTBEATS

    def paths(self, now_s: float) -> tuple[PathCounts, ...]:
        """Return the counts of every decode worker in use."""
        return tuple(self.totals.path(address, peer, now_s) for address, peer in self.peers.items())

    def live_on(self, address: str) -> list[Transfer]:
        """Return the transfers to the decode worker at `address`, oldest first."""
        return [transfer for transfer in self.transfers.values() if transfer.peer.kv_address == address]

    def active_on(self, address: str) -> list[Transfer]:
        """Return those of `live_on` that were not given up."""
        return [transfer for transfer in self.live_on(address) if transfer.state is not TransferState.ABORTING]

    def two_layers_bytes(self, prompt_len: int) -> int:
        """Return how many bytes of the window two layers of a prompt use."""
        spans = [layer.span(prompt_len) for layer in self.layout.layers]
        sizes = [self.own_bytes(index, span.first, span.count) for index, span in enumerate(spans)]
        return 2 * max(size + -(-size // self.config.max_frame_bytes) * FRAME_OVERHEAD_BYTES for size in sizes)

    def pump(self, address: str, now_s: float) -> Actions:
        """Post what the window allows, oldest transfer first, and every COMMIT whose frames are all posted."""
        actions: Actions = []
        peer = self.peers[address]
        live = [t for t in self.live_on(address) if t.state in (TransferState.PUSHING, TransferState.COMMITTING)]
        if not peer.data_path or not any(transfer.has_something_to_post for transfer in live):
            self.totals.window(address, False, now_s)
            return actions
        is_full = False
        window_bytes = self._window_bytes(peer, live, now_s)
        in_flight_bytes = sum(transfer.in_flight_bytes for transfer in live)
        for transfer in live:
            if not self._may_post(transfer, peer, now_s):
                continue
            while transfer.to_send:
                header = self.messages.frame(transfer, transfer.to_send[0])
                # A frame larger than the whole window is sent alone: waiting would never end.
                if in_flight_bytes and in_flight_bytes + header.charge_bytes > window_bytes:
                    is_full = True
                    break
                transfer.to_send.popleft()
                if not transfer.in_flight_bytes:
                    transfer.progress.renew(now_s)  # the wait for credit begins
                if transfer.first_posted_s is None:
                    transfer.first_posted_s = now_s
                transfer.next_seq += 1
                transfer.charged_bytes += header.charge_bytes
                transfer.num_writes += transfer.is_one_sided
                in_flight_bytes += header.charge_bytes
                peer.window.posted(header.charge_bytes, now_s)
                blocks = transfer.grant.blocks if transfer.grant is not None else ()
                actions.append(
                    SendFrame(address, transfer.attempt, header, transfer.data_path, blocks, peer.has_digest)
                )
            if transfer.is_commit_due:
                actions.append(self._commit_message(transfer, now_s))
        self.totals.window(address, is_full, now_s)
        return actions

    def send_again(self, transfer: Transfer, missing: Iterable[kv_pb2.LayerGap], now_s: float) -> Actions:
        """Queue again what the decode worker lacks of what was computed. Earlier frames have arrived or are lost.

        The message may name nothing twice, so a short one cannot make this side queue more than the transfer has.
        """
        pieces: list[LayerRange] = []
        named = (0, 0)  # layer, and one past the last position named in it
        for gap in missing:
            if (gap.layer, gap.first) < named:
                reason = f"the decode worker lacks position {gap.first} of layer {gap.layer} twice, or out of order"
                return self.fail(transfer, reason, now_s)
            named = (gap.layer, gap.first + gap.count)
            if gap.layer >= self.layout.num_layers:
                return self.fail(transfer, f"the decode worker lacks layer {gap.layer}", now_s)
            kept = self.layout.layers[gap.layer].span(transfer.prompt_len)
            if gap.first < kept.first or not 0 < gap.count <= kept.stop - gap.first:
                return self.fail(transfer, "the decode worker lacks what was never announced", now_s)
            if not self.messages.heads[gap.layer].count:
                return self.fail(transfer, f"the decode worker lacks heads of layer {gap.layer} of another rank", now_s)
            if sum(own.count for own in self.messages.own(gap.layer, gap.first, gap.count)) != gap.count:
                reason = f"the decode worker lacks positions of layer {gap.layer} of another rank"
                return self.fail(transfer, reason, now_s)
            for first, count in transfer.coverage.present(gap.layer, gap.first, gap.count):
                pieces += self.split(gap.layer, first, count)
        num_bytes_lost = self._payload_bytes(pieces) - self._payload_bytes(transfer.to_send)
        if num_bytes_lost > 0:
            if transfer.num_resends >= self.config.max_resends:
                what = f"{num_bytes_lost} bytes, first in layer {pieces[0].layer} at position {pieces[0].first}"
                return self.fail(transfer, f"still incomplete after {transfer.num_resends} resends: {what}", now_s)
            transfer.num_resends += 1
            self.num_bytes_resent += num_bytes_lost
            self.totals.frames_resent += max(1, len(pieces) - len(transfer.to_send))
        transfer.to_send.clear()  # the decode worker lacks everything that was queued
        transfer.to_send.extend(pieces)
        transfer.progress.renew(now_s)
        return self.pump(transfer.peer.kv_address, now_s)

    def split(self, layer: int, first: int, count: int) -> list[LayerRange]:
        """Split those of these positions that this rank pushes into frames."""
        num_heads = self.messages.heads[layer].count
        return [
            LayerRange(layer, *piece)
            for own in self.messages.own(layer, first, count)
            for piece in self.shape.split(layer, own.first, own.count, num_heads)
        ]

    def own_bytes(self, layer: int, first: int, count: int) -> int:
        """Return the payload bytes of those of these positions that this rank pushes."""
        num_positions = sum(own.count for own in self.messages.own(layer, first, count))
        return self.shape.payload_bytes(layer, num_positions, self.messages.heads[layer].count)

    def credit(self, transfer: Transfer, charged_bytes: int, now_s: float) -> None:
        """Credit a transfer: `charged_bytes` of what was posted have arrived in total."""
        charged_bytes = min(charged_bytes, transfer.charged_bytes)
        news = charged_bytes - transfer.credited_bytes
        if news > 0:
            transfer.credited_bytes = charged_bytes
            transfer.progress.renew(now_s)
            peer = self.peers[transfer.peer.kv_address]
            peer.progress_s = now_s
            peer.window.credited(news, now_s)

    def write_off(self, transfer: Transfer) -> None:
        """Write off posted bytes that were not credited: they will not arrive, or will not count."""
        self.peers[transfer.peer.kv_address].window.lost(transfer.in_flight_bytes)
        transfer.charged_bytes = transfer.credited_bytes

    def named(self, transfer: Transfer, now_s: float) -> None:
        """Note a sign that the decode worker knows this transfer."""
        transfer.renewed.renew(now_s)
        transfer.named_s = now_s

    def connected(self, transfer: Transfer, now_s: float) -> Actions:
        """Reserve, or push what rank 0 reserved, now that there is a data path to the transfer's incarnation."""
        peer = self.peers[transfer.peer.kv_address]
        if transfer.state is TransferState.RESERVING:
            transfer.data_path = transfer.data_path or peer.data_path
            peer.may_ask |= transfer.is_one_sided
            return [self.reserve_message(transfer, now_s)]
        if transfer.data_path or transfer.grant is None:
            return self.pump(transfer.peer.kv_address, now_s)
        wanted = transfer.grant.data_path
        if is_one_sided(wanted) and peer.data_path != wanted:
            return self.fail(transfer, f"rank 0 was granted data path {wanted}, this rank has {peer.data_path}", now_s)
        peer.may_ask |= is_one_sided(wanted)
        transfer.data_path = (
            wanted if is_one_sided(wanted) else INLINE if is_one_sided(peer.data_path) else peer.data_path
        )
        # The transfer may have been fenced before this rank knew of it, and this rank have reported that it writes
        # nothing.
        return [self.resume_message(transfer, now_s)]

    def due(self, transfer: Transfer, now_s: float) -> Actions:
        """Return what is due by time for one transfer: a repeat, a question, or its end."""
        address = transfer.peer.kv_address
        peer = self.peers[address]
        if transfer.state is TransferState.ABORTING:
            return []
        if transfer.state is TransferState.RESERVING:
            if now_s > transfer.deadline_s:
                # No HELLO was answered either: the connection may be dead, and short waits must not hide that forever.
                dropped: Actions = [] if peer.epoch else [DropPeer(address)]
                return [*dropped, *self.fail(transfer, "the decode worker did not answer a RESERVE in time", now_s)]
            is_connected = peer.data_path and peer.epoch == transfer.peer.epoch
            return [self.reserve_message(transfer, now_s)] if is_connected and now_s >= transfer.retry_s else []
        problem = self._overdue(transfer, peer, now_s)
        if problem:
            return self.fail(transfer, problem, now_s)
        if now_s < transfer.retry_s or not peer.data_path:
            return []
        if transfer.is_commit_posted:
            return [self._commit_message(transfer, now_s)]
        is_stuck = transfer.in_flight_bytes and transfer.progress.silence_s(now_s) > self._retry_s
        if transfer.is_resume_posted or (is_stuck and not transfer.num_writes):
            return [self.resume_message(transfer, now_s)]
        return []

    def fail(self, transfer: Transfer, reason: str, now_s: float, *, tell: bool = True) -> Actions:
        """End a transfer that the worker believes to be alive."""
        return [PushFailed(transfer.attempt, reason), *self.give_up(transfer, reason, now_s, tell=tell)]

    def give_up(self, transfer: Transfer, reason: str, now_s: float, *, tell: bool = True) -> Actions:
        """Stop posting and tell the decode worker, unless it gave up itself and waits for nothing."""
        transfer.state = TransferState.ABORTING
        transfer.to_send.clear()
        address = transfer.peer.kv_address
        actions = self._stop(transfer)
        peer = self.peers[address]
        one_sided = transfer.is_one_sided
        is_known = bool(transfer.data_path or transfer.grant)  # whether the decode worker knows the transfer
        # A rank may give up what rank 0 was granted before it has met the decode worker; then it sends the ABORT once
        # it has.
        is_met = peer.epoch == transfer.peer.epoch
        if is_known and (one_sided or (tell and (is_met or not peer.epoch))):
            until_s = now_s + (ONE_SIDED_FAREWELL_S if one_sided else self.config.lease_s)
            control, says_now = self.messages.abort(transfer, reason), one_sided or is_met
            retry_s = now_s + self._retry_s if says_now else now_s
            peer.farewells[transfer.attempt] = RepeatedAbort(control, transfer.is_told, retry_s, until_s)
            if len(peer.farewells) > MAX_FAREWELLS:
                peer.farewells.popitem(last=False)
            if says_now:
                actions.append(SendControl(address, control))
        return [*actions, *self.drain_if_quiet(transfer)]

    def drain_if_quiet(self, transfer: Transfer) -> Actions:
        """End a transfer that was given up, once nothing reads its blocks or writes its incoming transfer."""
        if transfer.state is not TransferState.ABORTING or not transfer.is_quiet:
            return []
        return self.end(transfer, PushDrained(transfer.attempt))

    def end(self, transfer: Transfer, event: Acked | Denied | PushDrained) -> Actions:
        """Forget a transfer; `event` is its last event."""
        assert not transfer.num_writes
        address = transfer.peer.kv_address
        self.write_off(transfer)
        del self.transfers[transfer.attempt]
        if self.by_incoming.get(transfer.incoming_key) is transfer:
            del self.by_incoming[transfer.incoming_key]
        actions = self._stop(transfer) if isinstance(event, Acked) else []
        actions.append(event)
        if transfer.abort is not None:
            actions.append(SendControl(address, self.messages.abort_ack(transfer.abort, is_told=transfer.is_told)))
        return actions

    def hello(self, address: str, now_s: float) -> SendControl:
        """Build a HELLO, and record it so that the reply can be matched and timed."""
        peer = self.peers[address]
        peer.hello_s = now_s
        sent_ns = peer.hello_ns = max(int(now_s * 1e9), peer.hello_ns + 1)  # no two are equal
        peer.hellos.append(sent_ns)
        return SendControl(address, self.messages.hello(address, sent_ns, peer.challenge))

    def reserve_message(self, transfer: Transfer, now_s: float) -> SendControl:
        """Build a RESERVE, and schedule its repeat."""
        transfer.retry_s = now_s + self._retry_s
        return SendControl(transfer.peer.kv_address, self.messages.reserve(transfer, now_s))

    def resume_message(self, transfer: Transfer, now_s: float) -> SendControl:
        """Build a RESUME, and schedule its repeat; nothing is posted until it is answered."""
        transfer.is_resume_posted = True
        transfer.retry_s = now_s + self._retry_s
        return SendControl(transfer.peer.kv_address, self.messages.resume(transfer))

    def _commit_message(self, transfer: Transfer, now_s: float) -> SendControl:
        transfer.is_commit_posted = True
        transfer.retry_s = now_s + self._retry_s
        peer = self.peers[transfer.peer.kv_address]
        commit = self.messages.commit(transfer, peer.clock_offset_s, peer.has_digest)
        return SendControl(transfer.peer.kv_address, commit)

    def _stop(self, transfer: Transfer) -> Actions:
        if not transfer.next_seq:
            return []
        address = transfer.peer.kv_address
        return [StopFrames(address, transfer.attempt, transfer.peer.epoch, transfer.incoming_id)]

    def _window_bytes(self, peer: PushPeer, live: list[Transfer], now_s: float) -> int:
        two_layers_bytes = max(transfer.two_layers_bytes for transfer in live)
        credits = [transfer.grant.credit_bytes for transfer in live if transfer.grant is not None]
        limit_bytes = min(self.config.window_bytes, *credits)
        if all(transfer.is_one_sided for transfer in live):
            return limit_bytes  # nothing is on its way or waits for memory: posted payloads are already in the pool
        return peer.window.size_bytes(two_layers_bytes, peer.round_trip_s, limit_bytes, now_s)

    def _may_post(self, transfer: Transfer, peer: PushPeer, now_s: float) -> bool:
        if transfer.is_resume_posted or not transfer.is_confirmed or not transfer.data_path:
            return False
        if peer.epoch != transfer.peer.epoch:
            return False
        return not transfer.is_one_sided or now_s - transfer.named_s <= SELF_FENCE * transfer.lease_s

    def _overdue(self, transfer: Transfer, peer: PushPeer, now_s: float) -> str:
        """Return why a granted transfer has waited too long; empty if it has not."""
        if transfer.renewed.silence_s(now_s) > transfer.lease_s:
            return f"the decode worker did not name it for {transfer.lease_s} s"
        progress_s = transfer.progress.at_s
        if transfer.to_send and not transfer.in_flight_bytes:
            # Other transfers use the window; as long as they progress, this one is only waiting for its turn.
            progress_s = max(progress_s, peer.progress_s)
        is_waiting = transfer.in_flight_bytes or transfer.to_send or transfer.state is TransferState.COMMITTING
        if is_waiting and now_s - progress_s > self.config.commit_timeout_s:
            return f"no progress for {self.config.commit_timeout_s} s"
        return ""

    def _payload_bytes(self, pieces: Iterable[LayerRange]) -> int:
        heads = self.messages.heads
        return sum(self.shape.payload_bytes(piece.layer, piece.count, heads[piece.layer].count) for piece in pieces)
