"""The decode worker's end of the NIXL lane: its pools, registered once, and the offer that tells peers where they are.

What is read of an offer is checked here too. Pools are in host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import MAX_BLOCK_SIZE, KVLayout
from baton.kvtransfer.pool_io import PoolMemory
from baton.kvtransfer.receiver.lane import ReceiverSide, ServedLane
from baton.kvtransfer.sender.lane import LaneRefused
from baton.kvtransfer.transports.nixl_agent import NixlAgent
from baton.proto import kv_pb2

REGISTER_LIMIT_S = 30.0
MEMORY = "DRAM"
MAX_RANKS = 64


def agent_name(role: str, epoch: int) -> str:
    """Of one incarnation of one process."""
    return f"baton-{role}-{epoch:016x}"


def register(nixl: Any, pools: Sequence[PoolMemory]) -> Any:
    """Register pools with an agent."""
    return nixl.register_memory([(pool.ctypes.data, pool.nbytes, 0, "") for pool in pools], MEMORY)


class NixlPools:
    """The decode worker's end: its ranks' pools, registered once.

    Args:
        epoch: of this incarnation.
        pools: memory of each rank's pool.
        places: what they are; offsets are left out of the offer.

    Raises:
        LaneRefused: NIXL is missing or does not take them.
    """

    def __init__(self, epoch: int, pools: Sequence[PoolMemory], places: Sequence[kv_pb2.PoolPlace]) -> None:
        assert len(pools) == len(places)
        self._agent = NixlAgent(agent_name("decode", epoch))
        self._registered = self._agent.call(lambda agent: register(agent, pools), REGISTER_LIMIT_S)
        self._metadata: bytes = self._agent.call(lambda agent: agent.get_agent_metadata(), REGISTER_LIMIT_S)
        self._addresses = [pool.ctypes.data for pool in pools]
        self._places = list(places)

    def offer(self) -> kv_pb2.LaneOffer:
        """What a peer needs to open the lane."""
        offer = kv_pb2.LaneOffer(lane="nixl")
        offer.nixl.agent = self._agent.name
        offer.nixl.metadata = self._metadata
        for address, place in zip(self._addresses, self._places, strict=True):
            pool = offer.nixl.pools.add(address=address, memory=MEMORY)
            pool.place.CopyFrom(place)
            pool.place.offset_bytes = 0
        return offer

    def close(self) -> None:
        """End: nothing is written any more once this has returned."""
        self._agent.call(lambda agent: agent.deregister_memory(self._registered), REGISTER_LIMIT_S)
        self._agent.close()


def receiver_lane(side: ReceiverSide) -> ServedLane:
    """The offer of a decode worker whose pools are in host memory.

    Raises:
        LaneRefused: NIXL is missing or does not take them.
    """
    pools = NixlPools(side.setup.epoch, side.memories, side.places)
    return ServedLane(pools.offer(), pools.close)


@dataclass(frozen=True, slots=True)
class Target:
    """One rank's pool of the peer."""

    geometry: PoolGeometry
    address: int


def read_offer(offer: kv_pb2.NixlOffer, epoch: int, layout: KVLayout) -> list[Target]:
    """The pools of an offer, checked against each other.

    Raises:
        LaneRefused: they cannot be the pools of one incarnation of one worker of this layout.
    """
    if offer.agent != agent_name("decode", epoch):
        raise LaneRefused(f"the agent {offer.agent[:64]!r} is not of the incarnation {epoch:016x}")
    places = [pool.place for pool in offer.pools]
    sizes = {(place.tp_size, place.num_blocks, place.block_size, place.num_state_slots) for place in places}
    ranks = [pool.place.tp_rank for pool in offer.pools]
    if len(sizes) != 1 or len(ranks) > MAX_RANKS:
        raise LaneRefused("the pools of the offer differ in size")
    ((tp_size, num_blocks, block_size, num_state_slots),) = sizes
    is_whole = tp_size == len(ranks) and ranks == list(range(tp_size))
    if bool(num_state_slots) != layout.has_state:
        raise LaneRefused(f"pools of {num_state_slots} state slots")
    if not is_whole or num_blocks == 0 or block_size == 0 or MAX_BLOCK_SIZE % block_size:
        raise LaneRefused("the pools of the offer are not those of one worker")
    theirs = layout.in_blocks_of(block_size)
    targets = []
    for rank, pool in enumerate(offer.pools):
        if pool.memory != MEMORY:
            raise LaneRefused(f"pools in {pool.memory[:16]!r}, only host memory is built")
        geometry = PoolGeometry(theirs, num_blocks, rank, tp_size, num_state_slots=num_state_slots)
        if geometry.num_bytes != pool.place.num_bytes:
            raise LaneRefused(f"a pool of {pool.place.num_bytes} bytes, its shape needs {geometry.num_bytes}")
        targets.append(Target(geometry, pool.address))
    return targets
