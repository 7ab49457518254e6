"""Which data lane a prefill rank uses to each decode worker, and why not a better one.

Owns the lanes that are open, one for each peer's address and incarnation. A choice is made by policy and proved: what
cannot be opened is not chosen. It refuses to speak to peers; offers come from the protocol.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.kv_transports import INLINE, RAW, lane_order
from baton.kvtransfer.protocol.transport import Transport
from baton.kvtransfer.sender.lane import LaneOpener, LaneRefused, PushLane
from baton.proto import kv_pb2

MAX_REASON_LEN = 200
MAX_TOLD = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """The lane to one incarnation of one decode worker.

    Attributes:
        epoch: of that incarnation.
        lane: its name; empty if none that the policy allows could be opened.
        opened: what to write with, on a one-sided lane.
        refused: better lanes, each with the reason why it is not used.
    """

    epoch: int
    lane: str
    opened: PushLane | None
    refused: tuple[tuple[str, str], ...]

    @property
    def why(self) -> str:
        """The reasons as one sentence."""
        return "; ".join(f"{lane}: {reason}" for lane, reason in self.refused)


class LaneChooser:
    """All lanes of one prefill rank. Driven by one thread, but for `lanes`.

    Args:
        policy: the option `transport`.
        openers: of every one-sided lane that it allows.
        transport: opens the two-sided ones.
    """

    def __init__(self, policy: str, openers: Sequence[LaneOpener], transport: Transport) -> None:
        self.num_fallbacks = 0
        self._order = lane_order(policy)
        self._openers = {opener.name: opener for opener in openers}
        self._transport = transport
        self._choices: dict[str, LaneChoice] = {}
        self._retired: list[tuple[str, int, PushLane]] = []  # address, incarnation, and what led there
        self._told: dict[str, str] = {}  # what was logged last about each address

    @property
    def problem(self) -> str:
        """Why this rank can push to nobody at all; empty if it may be able to."""
        reasons = [f"{lane}: {problem}" for lane in self._order if (problem := self._own_problem(lane))]
        return "; ".join(reasons) if len(reasons) == len(self._order) else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Lanes for HELLO, best first."""
        return tuple(lane for lane in self._order if not self._own_problem(lane))

    def choose(self, address: str, epoch: int, host_id: str, offers: Sequence[kv_pb2.LaneOffer]) -> LaneChoice:
        """Open the best lane that works; what was opened before for this address is used no more."""
        by_lane = {offer.lane: offer for offer in offers}
        refused: list[tuple[str, str]] = []
        choice = None
        for lane in self._order:
            reason, opened = self._open(lane, address, epoch, host_id, by_lane.get(lane))
            if not reason:
                choice = LaneChoice(epoch, lane, opened, tuple(refused))
                break
            refused.append((lane, reason[:MAX_REASON_LEN]))
        if choice is None:
            choice = LaneChoice(epoch, "", None, tuple(refused))
        self.forget(address)
        for retired_address, retired_epoch, path in self._retired:
            if retired_address == address and retired_epoch != epoch:
                path.outlived()
        self.sweep()
        self._choices[address] = choice
        self._tell(address, choice)
        return choice

    def lane_of(self, address: str) -> LaneChoice | None:
        """The lane that was chosen."""
        return self._choices.get(address)

    def lanes(self) -> dict[str, LaneChoice]:
        """What payloads really go by now, by address. Any thread."""
        return {address: self._in_use(address, choice) for address, choice in tuple(self._choices.items())}

    def forget(self, address: str) -> None:
        """The peer is not used any more. Writes that are under way go on; the lane is closed when they are over."""
        choice = self._choices.pop(address, None)
        if choice is not None and choice.opened is not None:
            self._retired.append((address, choice.epoch, choice.opened))
        self.sweep()

    def sweep(self) -> None:
        """Close what was retired and is quiet."""
        for item in tuple(self._retired):
            if item[-1].drain(0.0):
                item[-1].close()
                self._retired.remove(item)

    def close(self, timeout_s: float) -> None:
        """Close everything, once nothing is under way or `timeout_s` has passed."""
        for address in tuple(self._choices):
            self.forget(address)
        for _, _, lane in self._retired:
            if not lane.drain(timeout_s):
                log.warning("writes over %s are still under way", lane.name)
            lane.close()
        self._retired.clear()

    def _in_use(self, address: str, choice: LaneChoice) -> LaneChoice:
        if choice.lane != RAW or self._transport.lane_of(address) == RAW:
            return choice
        refused = (*choice.refused, (RAW, "its connection is not open now"))
        return dataclasses.replace(choice, lane=INLINE, refused=refused)

    def _own_problem(self, lane: str) -> str:
        if lane in (INLINE, RAW):
            return ""  # whether the transport has it, shows when it is opened
        return self._openers[lane].problem

    def _open(
        self, lane: str, address: str, epoch: int, host_id: str, offer: kv_pb2.LaneOffer | None
    ) -> tuple[str, PushLane | None]:
        """(why not, or empty; what to write with, on a one-sided lane)."""
        if lane == INLINE:
            return "", None
        problem = self._own_problem(lane)
        if problem:
            return problem, None
        if offer is None:
            return "the decode worker does not serve it", None
        if lane == RAW:
            return self._transport.open_lane(address, offer), None
        try:
            return "", self._openers[lane].open(offer, epoch, host_id)
        except LaneRefused as refused:
            return str(refused) or "refused", None

    def _tell(self, address: str, choice: LaneChoice) -> None:
        """Log once what is used to an address, and count when it is not the best; again only if that changes."""
        said = f"{choice.lane or 'no lane'} ({choice.why})" if choice.refused else choice.lane
        if self._told.get(address) == said:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told[address] = said
        # That a peer is on another host, or has no GPU, is as it should be. That it lacks raw sockets is not.
        is_fallback = choice.lane == INLINE and RAW in self._order
        self.num_fallbacks += is_fallback
        if is_fallback or not choice.lane:
            log.warning("KV to %s goes over %s", address, said)
        else:
            log.info("KV to %s goes over %s", address, said)
