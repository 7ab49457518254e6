"""The setup of a KV receiver process: one line of JSON on its standard input. Both ends run the same version."""

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
    """Where and how prefill workers reach a KV receiver.

    Attributes:
        transport: name of the control channel.
        bind: address to bind, in that transport's format; port 0 takes a free one.
        data_paths: data paths served besides it.
    """

    transport: str
    bind: str
    data_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Legacy:
    """An incoming transfer that a former incarnation had granted, as the worker knows it.

    Attributes:
        attempt: the attempt that was granted.
        epoch: incarnation that granted it.
        p_epoch: incarnation of the prefill worker.
        tp_size: number of ranks of the prefill worker.
        data_path: data path of its payloads.
        is_complete: whether the sequence runs. If not, its prefill worker may still write its blocks.
    """

    attempt: AttemptKey
    epoch: int
    p_epoch: int
    tp_size: int
    data_path: str
    is_complete: bool

    @property
    def inherited(self) -> Inherited:
        """What the protocol needs to know of it."""
        return Inherited(self.attempt, self.epoch, self.p_epoch, self.tp_size, self.data_path, self.is_complete)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The pool of one rank on its GPU, as other processes of the host can open it.

    Attributes:
        ipc_handle: hexadecimal handle of the allocation that holds the pool.
        ipc_offset_bytes: offset of the pool in that allocation.
        device_uuid: UUID of the GPU.
    """

    ipc_handle: str
    ipc_offset_bytes: int
    device_uuid: str


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """What a KV receiver knows of pools that are on GPUs.

    Attributes:
        num_staging_blocks: number of blocks in the shared memory's first pool; flags are in its second.
        num_staging_state_slots: number of state slots in that pool, and so of concurrent transfers with state.
        pools: pools of all ranks, in order; empty: they are not shared with prefill workers.
    """

    num_staging_blocks: int
    num_staging_state_slots: int
    pools: tuple[DevicePool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSetup:
    """The setup of one incarnation of a KV receiver.

    Attributes:
        epoch: this incarnation.
        layout: layout of the pools.
        num_blocks: number of blocks in each rank's pool.
        num_state_slots: number of state slots in each rank's pool, for a layout with state.
        tp_size: number of ranks of this worker.
        num_pools: number of pools that hold sequences: one per rank if each rank has its own sequences, else one.
        listen: where it is reached.
        config: limits and times.
        region_path: path of the shared memory, for a separate process.
        region_nonce: nonce of the shared memory.
        last_address: where the former incarnation listened; reused if it is still free.
        legacies: transfers left by former incarnations.
        device: setup of pools on GPUs.
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
        """The numbering of the blocks."""
        return RankBlocks(num_blocks=self.num_blocks, num_pools=self.num_pools)

    @property
    def geometries(self) -> tuple[PoolGeometry, ...]:
        """Geometries of the ranks' pools."""
        return PoolGeometry(
            self.layout, self.num_blocks, 0, self.tp_size, num_state_slots=self.num_state_slots
        ).of_all_ranks

    @property
    def host_geometries(self) -> tuple[PoolGeometry, ...]:
        """Geometries of the memory for payloads: the pools, or the staging memory if the pools are on GPUs."""
        if self.device is None:
            return self.geometries
        num_slots = self.device.num_staging_state_slots
        return (PoolGeometry(self.layout, self.device.num_staging_blocks, num_state_slots=num_slots),)

    def next_incarnation(self, epoch: int, address: str, legacies: Sequence[Legacy]) -> "ReceiverSetup":
        """Return the setup of the next incarnation, at the address of the last one if it is still available."""
        return replace(self, epoch=epoch, last_address=address, legacies=tuple(legacies))

    def open_region(self) -> SharedRegion:
        """Map the shared memory.

        Raises:
            ProtocolError: it does not exist.
        """
        return SharedRegion.attach(Path(self.region_path), self.region_nonce)

    def to_json(self, **more: int) -> str:
        """Encode the setup as one line of JSON, with `more` as additional fields."""
        return json.dumps({**asdict(self), **more})

    @classmethod
    def from_json(cls, text: str | bytes) -> tuple["ReceiverSetup", dict[str, int]]:
        """Decode the result of `to_json`; return the setup and the additional fields."""
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
