"""The decode worker's side of a KV receiver process, as simple as it can be: it grants what is asked for."""

import os
import time

import numpy as np

from baton.kvcache.allocator import BlockAllocator
from baton.kvtransfer.pool_io import PoolIO, RankedPoolIO
from baton.kvtransfer.receiver.service import (
    Completed,
    Drained,
    IncomingFailed,
    ReceiverService,
    ReserveWanted,
    receiver_region,
)
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.patience import patient

D_EPOCH = 0x8000000000000001


class ReceiverWorker:
    """An incoming transfer in a process of its own, and blocks."""

    def __init__(
        self,
        layout=None,
        *,
        num_blocks=64,
        tp_size=1,
        owner=None,
        data_paths=(),
        control="zmq",
        bind="tcp://127.0.0.1:0",
        **config,
    ):
        """`owner`: the rank that every sequence goes to; None: ranks share each."""
        self.layout = layout or make_layout()
        self.config = patient(**config)
        self.setup = ReceiverSetup(
            epoch=D_EPOCH,
            layout=self.layout,
            num_blocks=num_blocks,
            num_state_slots=num_blocks if self.layout.has_state else 0,
            tp_size=tp_size,
            num_pools=1 if owner is None else tp_size,
            listen=Listen(control, bind, tuple(data_paths)),
            config=self.config,
        )
        self.region = receiver_region(self.setup.geometries, self.config)
        self.service = ReceiverService.in_process(self.region, self.setup)
        self.io = RankedPoolIO(
            [
                PoolIO(np.frombuffer(self.region.pool(rank), dtype=np.uint8), geometry)
                for rank, geometry in enumerate(self.setup.geometries)
            ]
        )
        self.blocks = BlockAllocator(
            num_blocks,
            self.layout.block_size,
            num_state_slots=self.setup.num_state_slots,
            first=(owner or 0) * num_blocks,
        )
        self.tables = {}
        self.events = []
        self.is_granting = True

    @property
    def pid(self):
        return self.service._host.pid

    def poll(self):
        for event in self.service.poll():
            self.events.append(event)
            match event:
                case ReserveWanted() if self.is_granting:
                    self.tables[event.attempt] = self.blocks.reserve(event.capacity_len)
                    self.service.grant(event.attempt, self.tables[event.attempt])
                case Drained():
                    self.blocks.release(self.tables.pop(event.attempt))

    def find(self, kind, key):
        return next((event for event in self.events if isinstance(event, kind) and event.attempt == key), None)

    def wait_for(self, kind, key, timeout_s=30.0):
        return self.wait_until(lambda: self.find(kind, key), f"{kind.__name__} for {key}", timeout_s)

    def wait_until(self, condition, what, timeout_s=30.0):
        end_s = time.monotonic() + timeout_s
        while not (found := condition()):
            self.poll()
            assert time.monotonic() < end_s, f"no {what}: {self.events[-6:]}"
            time.sleep(0.001)
        return found

    def kill(self, number):
        """Signal the KV receiver process; returns when the next one serves."""
        pid = self.pid
        os.kill(pid, number)
        self.wait_until(lambda: self.pid != pid and self.service.epoch == self.region.epoch, "new incarnation")

    def release(self, key):
        self.service.release(key)
        self.blocks.release(self.tables.pop(key))

    def close(self):
        self.service.close()


__all__ = ["Completed", "Drained", "IncomingFailed", "ReceiverWorker", "ReserveWanted"]
