"""A decode worker whose pools are on GPUs, but for the GPUs: memory of this process, and kernels made of NumPy."""

import numpy as np

from baton.kvcache.allocator import BlockAllocator
from baton.kvtransfer.flag_page import FlagPage
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.device_jobs import FLAGS_POOL, SLOT_WORDS, flag_bytes
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.receiver.service import ReceiverService
from baton.kvtransfer.receiver.setup import DevicePool, DeviceSetup, Listen, ReceiverSetup
from baton.kvtransfer.shared_region import SharedRegion
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.kept import blocks_of
from baton.tests.kvtransfer.receiver_worker import D_EPOCH, ReceiverWorker
from baton.tests.patience import patient

HANDLE = bytes(range(64))


class FakeDevice:
    """Does what it is asked for when `run` is called, or at once; `damage` may change the pool before.

    Args:
        ranks: the pool of each.
        staging: memory of the incoming transfer.
        flags: the same.
    """

    def __init__(self, ranks, staging, flags):
        self.ranks, self.staging, self.flags = ranks, staging, flags
        self.is_prompt = True
        self.lost = set()  # ranks whose kernels never end
        self.asked = []
        self.waiting = []
        self.num_drains = 0
        self.damage = lambda wanted, table: None

    def launch(self, wanted, table):
        self.asked.append(wanted)
        self.waiting.append((wanted, table))
        if self.is_prompt:
            self.run()

    def run(self):
        waiting, self.waiting = self.waiting, []
        for wanted, table in waiting:
            if wanted.rank in self.lost:
                self.waiting.append((wanted, table))
                continue
            io = self.ranks[wanted.rank]
            heads = [io.geometry.layer(layer).heads for layer in wanted.layers]
            spans = [
                KVRange(layer, wanted.first, wanted.count, its.first, its.count)
                for layer, its in zip(wanted.layers, heads, strict=True)
            ]
            for span in spans if wanted.staging.blocks else ():
                self.staging.copy(blocks_of(self.staging, wanted.staging, span), io, blocks_of(io, table, span), span)
            self.damage(wanted, table)
            digests = [io.digest(blocks_of(io, table, span), span) if wanted.has_digest else 0 for span in spans]
            FlagPage.raise_flag(self.flags, SLOT_WORDS, wanted.flag, wanted.sequence, digests)

    def drain(self):
        self.num_drains += 1
        self.lost.clear()
        self.run()

    def close(self):
        self.lost.clear()
        self.run()


class DeviceWorker(ReceiverWorker):
    """An incoming transfer in a process of its own before that device."""

    def __init__(
        self,
        layout=None,
        *,
        num_blocks=64,
        num_staging_blocks=16,
        tp_size=1,
        owner=None,
        data_paths=("nvlink",),
        **config,
    ):
        """`owner`: see `ReceiverWorker`."""
        self.layout = layout or make_layout()
        self.config = patient(**config)
        self.setup = ReceiverSetup(
            epoch=D_EPOCH,
            layout=self.layout,
            num_blocks=num_blocks,
            num_state_slots=num_blocks if self.layout.has_state else 0,
            tp_size=tp_size,
            num_pools=1 if owner is None else tp_size,
            listen=Listen("zmq", "tcp://127.0.0.1:0", tuple(data_paths)),
            config=self.config,
            device=DeviceSetup(
                num_staging_blocks,
                16 if self.layout.has_state else 0,
                tuple(DevicePool(HANDLE.hex(), 512 * (rank + 1), f"GPU-{rank}") for rank in range(tp_size)),
            ),
        )
        (staging,) = self.setup.host_geometries
        self.region = SharedRegion.create(
            link_bytes=ReceiverLink.num_bytes(self.config.ring_slots, num_blocks),
            pool_bytes=[staging.num_bytes, flag_bytes()],
        )
        self.ranks = [
            PoolIO(np.zeros(geometry.num_bytes, dtype=np.uint8), geometry) for geometry in self.setup.geometries
        ]
        self.pool = self.ranks[0]
        self.io = RankedPoolIO(self.ranks)
        host = PoolIO(np.frombuffer(self.region.pool(0), dtype=np.uint8), staging)
        self.device = FakeDevice(self.ranks, host, self.region.pool(FLAGS_POOL))
        self.service = ReceiverService.in_process(self.region, self.setup, self.device)
        self.blocks = BlockAllocator(
            num_blocks,
            self.layout.block_size,
            num_state_slots=self.setup.num_state_slots,
            first=(owner or 0) * num_blocks,
        )
        self.tables = {}
        self.events = []
        self.is_granting = True
