"""What a KV receiver process is started with: one line of JSON on its standard input. Both ends are of one version."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import Keep, KVLayout, LayerLayout
from baton.kvcache.rank_blocks import RankBlocks
from baton.kvtransfer.receiver.table import Inherited
from baton.kvtransfer.shared_region import SharedRegion

_PLAIN = (
    "epoch", "num_blocks", "num_state_slots", "tp_size", "num_pools", "region_path", "region_nonce", "last_address",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listen:
    """Where and how prefill workers reach an incoming transfer.

    Attributes:
        transport: name of the control channel.
        bind: address, as that transport writes it; port 0 takes a free one.
        data_paths: that are served beside it.
    """

    transport: str
    bind: str
    data_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Legacy:
    """An incoming transfer that an incarnation that ended had granted, as the worker knows it.

    Attributes:
        attempt: whose.
        epoch: of the incarnation that granted it.
        p_epoch: of the prefill worker.
        tp_size: ranks of the prefill worker.
        data_path: how its payloads came.
        is_complete: the sequence runs. If not, its prefill worker may still write its blocks.
    """

    attempt: AttemptKey
    epoch: int
    p_epoch: int
    tp_size: int
    data_path: str
    is_complete: bool

    @property
    def inherited(self) -> Inherited:
        """What the protocol has to know of it."""
        return Inherited(self.attempt, self.epoch, self.p_epoch, self.tp_size, self.data_path, self.is_complete)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The pool of one rank on its GPU, as other processes of the host can open it.

    Attributes:
        ipc_handle: hexadecimal, of the allocation that the pool is in.
        ipc_offset_bytes: of the pool in it.
        device_uuid: which GPU.
    """

    ipc_handle: str
    ipc_offset_bytes: int
    device_uuid: str


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """What an incoming transfer knows of pools that are on GPUs.

    Attributes:
        num_staging_blocks: of the shared memory's first pool; flags are in its second.
        num_staging_state_slots: of that pool: so many transfers with state are received at a time.
        pools: of every rank, in order; none: they are not shared with prefill workers.
    """

    num_staging_blocks: int
    num_staging_state_slots: int
    pools: tuple[DevicePool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSetup:
    """One life of an incoming transfer.

    Attributes:
        epoch: of this incarnation.
        layout: of the pools.
        num_blocks: of each rank's pool.
        num_state_slots: the same, of a layout with state.
        tp_size: ranks of this worker.
        num_pools: that sequences lie in: one at each rank if each rank has sequences of its own, else one.
        listen: where it is reached.
        config: limits and times.
        region_path: the shared memory, for a process of its own.
        region_nonce: of that.
        last_address: where the incarnation before listened; to be had again if it is still free.
        legacies: what former incarnations left.
        device: of pools on GPUs.
    """

    epoch: int
    layout: KVLayout
    num_blocks: int
    tp_size: int
    listen: Listen
    config: KVTransferConfig
    region_path: str = ""
    region_nonce: int = 0
    last_address: str = ""
    legacies: tuple[Legacy, ...] = ()
    device: DeviceSetup | None = None
    num_state_slots: int = 0
    num_pools: int = 1

    def __post_init__(self) -> None:
        assert self.num_pools in (1, self.tp_size)
        assert self.num_pools == 1 or not self.layout.has_state, "state slots are numbered for all ranks alike"

    @property
    def blocks(self) -> RankBlocks:
        """How they are numbered."""
        return RankBlocks(num_blocks=self.num_blocks, num_pools=self.num_pools)

    @property
    def geometries(self) -> tuple[PoolGeometry, ...]:
        """Of the ranks' pools."""
        return PoolGeometry(
            self.layout, self.num_blocks, 0, self.tp_size, num_state_slots=self.num_state_slots
        ).of_all_ranks

    @property
    def host_geometries(self) -> tuple[PoolGeometry, ...]:
        """Of the memory that payloads are written into: the pools, or the staging memory before those on GPUs."""
        if self.device is None:
            return self.geometries
        num_slots = self.device.num_staging_state_slots
        return (PoolGeometry(self.layout, self.device.num_staging_blocks, num_state_slots=num_slots),)

    def next_incarnation(self, epoch: int, address: str, legacies: Sequence[Legacy]) -> "ReceiverSetup":
        """The same incoming transfer once more, at the address of the last incarnation if that is to be had."""
        return replace(self, epoch=epoch, last_address=address, legacies=tuple(legacies))

    def open_region(self) -> SharedRegion:
        """Map the shared memory.

        Raises:
            ProtocolError: it is not there.
        """
        return SharedRegion.attach(Path(self.region_path), self.region_nonce)

    def to_json(self, **more: int) -> str:
        """One line; `more` goes along."""
        return json.dumps({**asdict(self), **more})

    @classmethod
    def from_json(cls, text: str | bytes) -> tuple["ReceiverSetup", dict[str, int]]:
        """What `to_json` was called on, and with."""
        values: dict[str, Any] = json.loads(text)
        layout = values.pop("layout")
        layers = [LayerLayout(**layer | {"keep": Keep(layer["keep"])}) for layer in layout.pop("layers")]
        listen = values.pop("listen")
        config = values.pop("config")
        legacies = values.pop("legacies")
        device = values.pop("device")
        setup = cls(
            layout=KVLayout(**layout, layers=tuple(layers)),
            listen=Listen(listen["transport"], listen["bind"], tuple(listen["data_paths"])),
            config=KVTransferConfig(**{key: _hashable(value) for key, value in config.items()}),
            legacies=tuple(Legacy(AttemptKey(**legacy.pop("attempt")), **legacy) for legacy in legacies),
            device=None if device is None else _device(device),
            **{key: values.pop(key) for key in _PLAIN},
        )
        return setup, values


def _device(values: dict[str, Any]) -> DeviceSetup:
    pools = tuple(DevicePool(**pool) for pool in values["pools"])
    return DeviceSetup(values["num_staging_blocks"], values["num_staging_state_slots"], pools)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
