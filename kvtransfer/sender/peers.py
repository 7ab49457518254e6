"""What time makes necessary for a decode worker as such: signs of life, farewells, a new connection, forgetting."""

from baton.core.config import KVTransferConfig
from baton.kvtransfer.sender.actions import DropPeer, PushAction, SendControl
from baton.kvtransfer.sender.rules import HELLO_HEARTBEATS, IDLE_LEASES, RETRY_HEARTBEATS, PushRules
from baton.kvtransfer.sender.table import PushPeer

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
        if not rules.live_on(address) and not peer.farewells and now_s - peer.used_s > IDLE_LEASES * lease_s:
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
