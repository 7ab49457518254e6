"""A decode worker whose pool is on a GPU, but for the GPU: memory of this process, and kernels made of NumPy."""

import numpy as np

from baton.core.config import KVTransferConfig
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.device_jobs import FLAGS_POOL, SLOT_WORDS, flag_bytes
from baton.kvtransfer.flag_page import FlagPage
from baton.kvtransfer.landing import LandingService
from baton.kvtransfer.landing_link import LandingLink
from baton.kvtransfer.landing_setup import DeviceSetup, LandingSetup, Listen
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.kvtransfer.shared_region import SharedRegion
from baton.kvtransfer.span import Span
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.landing_worker import D_EPOCH, LandingWorker

HANDLE = bytes(range(64))


class FakeDevice:
    """Does what it is asked for when `run` is called, or at once; `damage` may change the pool before."""

    def __init__(self, io, staging, flags):
        self.io, self.staging, self.flags = io, staging, flags
        self.is_prompt = True
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
        for wanted, table in self.waiting:
            spans = [
                Span(wanted.layer + index, 0, wanted.count, 0, self.io.geometry.layer(wanted.layer + index).num_heads)
                for index in range(wanted.num_layers)
            ]
            for span in spans if wanted.staging.blocks else ():
                self.staging.copy(wanted.staging.blocks, self.io, table.blocks, span)
            self.damage(wanted, table)
            digests = [self.io.digest(table.blocks, span) if wanted.has_digest else 0 for span in spans]
            FlagPage.raise_flag(self.flags, SLOT_WORDS, wanted.flag, wanted.sequence, digests)
        self.waiting.clear()

    def drain(self):
        self.num_drains += 1
        self.run()

    def close(self):
        self.run()


class DeviceWorker(LandingWorker):
    """A landing in a process of its own before that device."""

    def __init__(self, layout=None, *, num_blocks=64, num_staging_blocks=16, lanes=("nvlink",), **config):
        self.layout = layout or make_layout()
        self.config = KVTransferConfig(**config)
        geometry, staging = PoolGeometry(self.layout, num_blocks), PoolGeometry(self.layout, num_staging_blocks)
        self.setup = LandingSetup(
            epoch=D_EPOCH,
            layout=self.layout,
            num_blocks=num_blocks,
            tp_size=1,
            listen=Listen("zmq", "tcp://127.0.0.1:0", tuple(lanes)),
            config=self.config,
            device=DeviceSetup(num_staging_blocks, HANDLE.hex(), 512, "GPU-0"),
        )
        self.region = SharedRegion.create(
            link_bytes=LandingLink.num_bytes(self.config.ring_slots, num_blocks),
            pool_bytes=[staging.num_bytes, flag_bytes()],
        )
        self.pool = PoolIO(np.zeros(geometry.num_bytes, dtype=np.uint8), geometry)
        self.io = RankedPoolIO([self.pool])
        host = PoolIO(np.frombuffer(self.region.pool(0), dtype=np.uint8), staging)
        self.device = FakeDevice(self.pool, host, self.region.pool(FLAGS_POOL))
        self.service = LandingService.in_process(self.region, self.setup, self.device)
        self.blocks = BlockAllocator(num_blocks, self.layout.block_size)
        self.tables = {}
        self.events = []
        self.is_granting = True
