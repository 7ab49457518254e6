"""When a transfer posts, posts again, fails and ends: the rules that workers, messages and time all lead to.

`push_protocol` decides which rule applies.
"""

from collections.abc import Iterable

from baton.core.config import KVTransferConfig
from baton.core.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.coverage import Gap
from baton.kvtransfer.frame import FrameShape
from baton.kvtransfer.push_actions import (
    Acked,
    Denied,
    DropPeer,
    PushAction,
    PushDrained,
    PushFailed,
    SendControl,
    SendFrame,
)
from baton.kvtransfer.push_messages import PushMessages
from baton.kvtransfer.push_table import Farewell, PushPeer, Transfer, TransferState
from baton.proto import kv_pb2

HELLO_HEARTBEATS = 4  # a HELLO goes out with every so many heartbeats, for the clock and to notice a new epoch
RETRY_HEARTBEATS = 2
Actions = list[PushAction]


class PushRules:
    """The state of all transfers, and the rules that change it."""

    def __init__(self, epoch: int, layout: KVLayout, config: KVTransferConfig) -> None:
        self.transfers: dict[AttemptKey, Transfer] = {}
        self.by_landing: dict[tuple[str, int], Transfer] = {}
        self.peers: dict[str, PushPeer] = {}
        self.num_bytes_resent = 0
        self._layout = layout
        self._config = config
        self._shape = FrameShape(layout, config.max_frame_bytes)
        self._messages = PushMessages(epoch, layout, self._shape)
        self._retry_s = config.heartbeat_s * RETRY_HEARTBEATS

    def live_on(self, address: str) -> list[Transfer]:
        """Transfers to the decode worker at `address`, oldest first."""
        return [transfer for transfer in self.transfers.values() if transfer.peer.kv_address == address]

    def active_on(self, address: str) -> list[Transfer]:
        """Those of them that were not given up."""
        return [transfer for transfer in self.live_on(address) if transfer.state is not TransferState.ABORTING]

    def pump(self, address: str, now_s: float) -> Actions:
        """Post what the window allows, oldest transfer first, and every COMMIT whose frames are all posted."""
        actions: Actions = []
        live = [t for t in self.live_on(address) if t.state in (TransferState.PUSHING, TransferState.COMMITTING)]
        in_flight_bytes = sum(transfer.in_flight_bytes for transfer in live)
        for transfer in live:
            while transfer.to_send:
                header = self._messages.frame(transfer, transfer.to_send[0])
                # A frame larger than the whole window goes alone: waiting would never end.
                if in_flight_bytes and in_flight_bytes + header.charge_bytes > transfer.window_bytes:
                    break
                transfer.to_send.popleft()
                if not transfer.in_flight_bytes:
                    transfer.progress.renew(now_s)  # the wait for credit begins
                transfer.next_seq += 1
                transfer.charged_bytes += header.charge_bytes
                in_flight_bytes += header.charge_bytes
                actions.append(SendFrame(address, transfer.attempt, header))
            if transfer.state is TransferState.COMMITTING and not transfer.to_send and not transfer.is_commit_posted:
                actions.append(self._commit_message(transfer, now_s))
        return actions

    def send_again(self, transfer: Transfer, missing: Iterable[kv_pb2.LayerGap], now_s: float) -> Actions:
        """Queue what the decode worker lacks of what was computed. What was in flight has landed or is lost."""
        pieces: list[Gap] = []
        split, num_heads = self._shape.split, self._layout.num_kv_heads
        for gap in missing:
            if gap.layer >= self._layout.num_layers or not 0 < gap.first + gap.count <= transfer.prompt_len:
                return self.fail(transfer, "the decode worker lacks what was never announced", now_s)
            for first, count in transfer.coverage.present(gap.layer, gap.first, gap.count):
                pieces += [Gap(gap.layer, *piece) for piece in split(gap.layer, first, count, num_heads)]
        not_posted = set(transfer.to_send)
        lost = [piece for piece in pieces if piece not in not_posted]
        if lost:
            if transfer.num_resends >= self._config.max_resends:
                what = f"{len(lost)} frames, first in layer {lost[0].layer} at position {lost[0].first}"
                return self.fail(transfer, f"still incomplete after {transfer.num_resends} resends: {what}", now_s)
            transfer.num_resends += 1
            self.num_bytes_resent += sum(piece.count for piece in lost) * self._layout.bytes_per_position
        transfer.to_send.clear()  # of it, everything is missing over there
        transfer.to_send.extend(pieces)
        transfer.charged_bytes = transfer.credited_bytes
        transfer.progress.renew(now_s)
        return self.pump(transfer.peer.kv_address, now_s)

    def due(self, transfer: Transfer, now_s: float) -> Actions:
        """What time makes necessary for one transfer: a repeat, a question, or its end."""
        config = self._config
        address = transfer.peer.kv_address
        peer = self.peers[address]
        if transfer.state is TransferState.ABORTING:
            return []
        if transfer.state is TransferState.RESERVING:
            if now_s > transfer.deadline_s:
                # No HELLO answered either: the connection may be dead, and short waits must not hide that for ever.
                dropped: Actions = [] if peer.epoch else [DropPeer(address)]
                return [*dropped, *self.fail(transfer, "the decode worker did not answer a RESERVE in time", now_s)]
            is_connected = peer.epoch == transfer.peer.epoch
            return [self.reserve_message(transfer, now_s)] if is_connected and now_s >= transfer.retry_s else []
        if transfer.renewed.silence_s(now_s) > config.lease_s:
            return self.fail(transfer, f"the decode worker did not name it for {config.lease_s} s", now_s)
        progress_s = transfer.progress.at_s
        if transfer.to_send and not transfer.in_flight_bytes:
            # Others have the window; as long as they get on, it is only not this one's turn.
            progress_s = max(progress_s, peer.progress_s)
        is_waiting = transfer.in_flight_bytes or transfer.to_send or transfer.state is TransferState.COMMITTING
        if is_waiting and now_s - progress_s > config.commit_timeout_s:
            return self.fail(transfer, f"no progress for {config.commit_timeout_s} s", now_s)
        if now_s < transfer.retry_s:
            return []
        if transfer.is_commit_posted:
            return [self._commit_message(transfer, now_s)]
        if transfer.in_flight_bytes and transfer.progress.silence_s(now_s) > self._retry_s:
            transfer.is_resume_posted = True
            transfer.retry_s = now_s + self._retry_s
            return [SendControl(address, self._messages.resume(transfer))]
        return []

    def peer_due(self, address: str, peer: PushPeer, now_s: float, is_heartbeat: bool) -> Actions:
        """What time makes necessary for one decode worker: signs of life, farewells, its end."""
        actions: Actions = []
        live = self.active_on(address)
        if live and peer.heard.silence_s(now_s) > self._config.lease_s:
            # The connection may be dead at the other end only; what is said from now on goes over a new one.
            actions.append(DropPeer(address))
            for transfer in live:
                reason = f"nothing heard from the decode worker for {self._config.lease_s} s"
                actions += self.fail(transfer, reason, now_s)
            live = []
            peer.epoch = 0
        actions += self.pump(address, now_s)  # a transfer that ended left its share of the window
        for attempt, farewell in tuple(peer.farewells.items()):
            if now_s > farewell.until_s:
                del peer.farewells[attempt]
            elif now_s >= farewell.retry_s:
                farewell.retry_s = now_s + self._retry_s
                actions.append(SendControl(address, farewell.control))
        if live and is_heartbeat:
            hello_after_s = self._config.heartbeat_s * (HELLO_HEARTBEATS if peer.epoch else 1)
            if now_s - peer.hello_s >= hello_after_s:
                actions.append(self.hello(address, now_s))
            ids = [transfer.landing_id for transfer in live if transfer.landing_id]
            if peer.epoch:
                actions.append(SendControl(address, self._messages.lease(ids)))
        if not self.live_on(address) and not peer.farewells and peer.heard.silence_s(now_s) > 5 * self._config.lease_s:
            del self.peers[address]
            actions.append(DropPeer(address))
        return actions

    def fail(self, transfer: Transfer, reason: str, now_s: float, *, tell: bool = True) -> Actions:
        """End a transfer that the worker believes alive."""
        return [PushFailed(transfer.attempt, reason), *self.give_up(transfer, reason, now_s, tell=tell)]

    def give_up(self, transfer: Transfer, reason: str, now_s: float, *, tell: bool = True) -> Actions:
        """Post nothing more; tell the decode worker, unless it said so itself."""
        transfer.state = TransferState.ABORTING
        transfer.to_send.clear()
        actions: Actions = []
        address = transfer.peer.kv_address
        peer = self.peers[address]
        if tell and peer.epoch == transfer.peer.epoch:
            abort = self._messages.abort(transfer, reason)
            farewell = Farewell(abort, now_s + self._retry_s, now_s + self._config.lease_s)
            peer.farewells[transfer.attempt] = farewell
            actions.append(SendControl(address, farewell.control))
        return [*actions, *self.drain_if_quiet(transfer)]

    def drain_if_quiet(self, transfer: Transfer) -> Actions:
        """End a transfer that was given up, once no writer reads its blocks."""
        if transfer.state is not TransferState.ABORTING or transfer.num_holds:
            return []
        return self.end(transfer, PushDrained(transfer.attempt))

    def end(self, transfer: Transfer, event: Acked | Denied | PushDrained) -> Actions:
        """Forget a transfer; `event` is the last word on it."""
        del self.transfers[transfer.attempt]
        self.by_landing.pop((transfer.peer.kv_address, transfer.landing_id), None)
        return [event]

    def hello(self, address: str, now_s: float) -> SendControl:
        """HELLO, noted so that the reply can be matched and timed."""
        peer = self.peers[address]
        peer.hello_s = now_s
        sent_ns = int(now_s * 1e9)
        peer.hellos.append(sent_ns)
        return SendControl(address, self._messages.hello(sent_ns))

    def reserve_message(self, transfer: Transfer, now_s: float) -> SendControl:
        """RESERVE, noted so that it is repeated."""
        transfer.retry_s = now_s + self._retry_s
        return SendControl(transfer.peer.kv_address, self._messages.reserve(transfer, now_s))

    def _commit_message(self, transfer: Transfer, now_s: float) -> SendControl:
        transfer.is_commit_posted = True
        transfer.retry_s = now_s + self._retry_s
        address = transfer.peer.kv_address
        return SendControl(address, self._messages.commit(transfer, self.peers[address].clock_offset_s))
