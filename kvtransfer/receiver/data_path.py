"""The one-sided data paths that a decode worker serves: what it offers so that prefill workers can write its pools.

`receiver_data_paths` makes those that `core.kv_transports` declares. It does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.core.errors import PackageMissing
from baton.core.kv_transports import load, one_sided
from baton.kvtransfer.pool_io import PoolMemory
from baton.kvtransfer.receiver.setup import ReceiverSetup
from baton.kvtransfer.sender.data_path import DataPathRefused
from baton.kvtransfer.shared_region import SharedRegion
from baton.proto import kv_pb2


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ServedDataPath:
    """A data path that is served.

    Attributes:
        offer: the offer for HELLO_REPLY.
        close: called at the end; once it has returned, nothing is written any more.
    """

    offer: kv_pb2.DataPathOffer
    close: Callable[[], None] = _do_nothing


@dataclass(frozen=True, slots=True)
class ReceiverSide:
    """What the data paths of a decode worker are built from.

    Attributes:
        setup: setup of this incarnation of the KV receiver.
        region: the shared memory: the pools, or staging memory and flags if the pools are on GPUs.
    """

    setup: ReceiverSetup
    region: SharedRegion

    @property
    def memories(self) -> list[PoolMemory]:
        """Pools in host memory, by rank."""
        return [np.frombuffer(self.region.pool(rank), dtype=np.uint8) for rank in range(len(self.region.pools))]

    @property
    def places(self) -> list[kv_pb2.PoolPlace]:
        """Descriptions of the pools in the region."""
        pools = enumerate(self.region.pools)
        return [pool_place(self.setup, rank, place.offset_bytes, place.num_bytes) for rank, place in pools]


def pool_place(setup: ReceiverSetup, rank: int, offset_bytes: int, num_bytes: int) -> kv_pb2.PoolPlace:
    """Describe one rank's pool for the offer of a one-sided transport.

    A pool with sequences of its own is described like the pool of a one-rank worker. So a sender that does not know
    owners refuses an offer of several such pools, and writes none.
    """
    has_owners = setup.num_pools > 1
    return kv_pb2.PoolPlace(
        offset_bytes=offset_bytes,
        num_bytes=num_bytes,
        num_blocks=setup.num_blocks,
        block_size=setup.layout.block_size,
        num_state_slots=setup.num_state_slots,
        tp_rank=0 if has_owners else rank,
        tp_size=1 if has_owners else setup.tp_size,
    )


def receiver_data_paths(side: ReceiverSide) -> list[ServedDataPath]:
    """Make those data paths named in `Listen` that can reach the pools of this worker.

    Raises:
        PackageMissing: a package that one of them needs is missing or does not work.
    """
    memory = "host" if side.setup.device is None else "GPU"
    served: list[ServedDataPath] = []
    for data_path in side.setup.listen.data_paths:
        declared = one_sided(data_path)
        if declared.memory not in ("", memory) or (side.setup.num_pools > 1 and not declared.has_owners):
            continue
        try:
            data_path_served: ServedDataPath | None = load(declared.receiver)(side)
        except DataPathRefused as error:
            raise PackageMissing(f"the data path {data_path} cannot be served: {error}", data_path=data_path) from error
        if data_path_served is not None:
            served.append(data_path_served)
    return served
