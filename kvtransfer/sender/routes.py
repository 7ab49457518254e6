"""The routes of one prefill rank: which lane each transfer takes, and who may write into its incoming transfer.

Owns routes and their gates, and the lanes they lead over. Only the push thread changes them. What follows for the
protocol is returned as actions.
"""

from collections.abc import Iterator

from baton.core.clock import Clock
from baton.core.kv_transports import RAW, is_one_sided
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.sender.actions import Denied, GrantInfo, OpenLane, PushAction, PushFailed
from baton.kvtransfer.sender.lane_choice import LaneChooser
from baton.kvtransfer.sender.protocol import PushProtocol
from baton.kvtransfer.sender.route import Route
from baton.kvtransfer.sender.table import TransferState
from baton.proto import kv_pb2

Actions = list[PushAction]


class PushRoutes:
    """See the module.

    Args:
        protocol: of this rank.
        chooser: of lanes.
        clock: the worker's.
    """

    def __init__(self, protocol: PushProtocol, chooser: LaneChooser, clock: Clock) -> None:
        self._protocol = protocol
        self._chooser = chooser
        self._clock = clock
        self._routes: dict[AttemptKey, Route] = {}
        self._num_two_sided = 0  # that are open

    @property
    def are_one_sided(self) -> bool:
        """Whether no payload leaves by the push thread now."""
        return not self._num_two_sided

    def add(self, route: Route) -> None:
        """A transfer is about to begin. Any thread."""
        self._routes[route.attempt] = route

    def get(self, attempt: AttemptKey) -> Route | None:
        """The route of a live transfer. Any thread."""
        return self._routes.get(attempt)

    def is_live(self, route: Route) -> bool:
        """Whether its transfer has not ended."""
        return self._routes.get(route.attempt) is route

    def pop(self, attempt: AttemptKey) -> Route | None:
        """The transfer has ended."""
        route = self._routes.pop(attempt, None)
        if route is not None:
            route.gate.shut()
            self._num_two_sided -= bool(route.lane) and not is_one_sided(route.lane)
        return route

    def refusal(self, attempt: AttemptKey, address: str, epoch: int) -> Actions:
        """The answer to a wish for a transfer that cannot be pushed to, by all that is known; empty if it may."""
        choice = self._chooser.lane_of(address)
        if choice is None or choice.epoch != epoch or choice.lane:
            return []
        return [Denied(attempt, kv_pb2.Deny.LAYOUT, f"no lane to the decode worker: {choice.why}")]

    def fail(self, route: Route, problem: str) -> Actions:
        """End a transfer for a reason of this side's own."""
        transfer = self._protocol.transfer(route.attempt)
        if not self.is_live(route) or transfer is None or transfer.state is TransferState.ABORTING:
            return []
        abort = self._protocol.abort(route.attempt, problem, self._clock.now_s())
        return [PushFailed(route.attempt, problem), *abort]

    def open_lane(self, action: OpenLane) -> Actions:
        """Open the best lane to a decode worker; without any, its transfers end."""
        choice = self._chooser.choose(action.peer, action.epoch, action.host_id, action.offers)
        if choice.lane:
            return self._protocol.lane_opened(action.peer, choice.lane, self._clock.now_s())
        problem = f"no lane to the decode worker: {choice.why}"
        return [failed for route in self._to(action.peer) for failed in self.fail(route, problem)]

    def open_all(self, address: str) -> Actions:
        """Open the routes of transfers that were granted before there was a lane."""
        actions: Actions = []
        for route in self._to(address):
            transfer = self._protocol.transfer(route.attempt)
            if route.lane or transfer is None or not transfer.lane or transfer.grant is None:
                continue
            if transfer.state in (TransferState.PUSHING, TransferState.COMMITTING):
                problem = self.open(route, transfer.lane, transfer.grant)
                actions += self.fail(route, problem) if problem else []
        return actions

    def open(self, route: Route, lane: str, grant: GrantInfo) -> str:
        """Let writers know how to push; why that cannot be, or empty."""
        if is_one_sided(lane):
            choice = self._chooser.lane_of(route.address)
            if choice is None or choice.lane != lane or choice.epoch != grant.d_epoch:
                return f"lane {lane} is not open any more"
            route.opened, route.grant = choice.opened, grant
            problem = route.problem_of(grant)
            if problem:
                return problem
            self._protocol.hold(route.attempt)
            route.is_held = True
            route.gate.open_until(self._protocol.write_deadline_s(route.attempt))
        else:
            self._num_two_sided += 1
        route.lane = lane  # last: with it writers begin
        return ""

    def ask_for_lost(self, now_s: float) -> Actions:
        """A connection of a two-sided lane broke, and what was queued there is gone: ask what has landed."""
        addresses = {route.address for route in self._routes.values() if route.lane == RAW}
        return [action for address in addresses for action in self._protocol.lane_lost(address, now_s)]

    def renew(self) -> None:
        """Move the moments until which writers may go in."""
        for route in self._routes.values():
            if route.is_held and not route.gate.is_shut:
                route.gate.open_until(self._protocol.write_deadline_s(route.attempt))
        self._chooser.sweep()

    def forget_peer(self, address: str) -> None:
        """Nothing leads to this decode worker any more."""
        self._chooser.forget(address)

    def shut(self, attempt: AttemptKey) -> Actions:
        """Let no writer into an incoming transfer any more; when the last is out, the transfer may drain."""
        route = self._routes.get(attempt)
        return self.release(route) if route is not None and route.gate.shut() else []

    def release(self, route: Route) -> Actions:
        """Nobody is inside the incoming transfer, nor ever will be."""
        if not route.is_held:
            return []
        route.is_held = False
        return self._protocol.unhold(route.attempt)

    def _to(self, address: str) -> Iterator[Route]:
        return (route for route in tuple(self._routes.values()) if route.address == address)
