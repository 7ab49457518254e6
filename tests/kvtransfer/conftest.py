"""Two services with real pools, in one process."""

import dataclasses
import time

import pytest
import torch

from baton.core.clock import MonotonicClock
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import (
    Completed,
    Drained,
    IncomingFailed,
    ReceiverService,
    ReserveWanted,
    receiver_region,
)
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.async_writer import PushRange
from baton.kvtransfer.sender.service import Acked, DecodePeer, Denied, Granted, PushDrained, PushFailed, PushService
from baton.kvtransfer.transports.loopback import LoopbackHub
from baton.kvtransfer.transports.over_grpc import GrpcTransport
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.kvtransfer.transports.registry import bind_address, connecting_transport
from baton.proto import kv_pb2
from baton.tests.patience import patient

P_EPOCH, D_EPOCH = 0xFEDCBA9876543210, 0x8000000000000001
STEP_S = 0.001


def make_layout(**changes):
    fields = {
        "model_hash": "model",
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "dtype": "float32",
    }
    return KVLayout.of_attention(**{**fields, **changes})


def fill(pool, generator):
    """Random content in every attention layer."""
    for layer in range(pool.layout.num_layers):
        blocks = pool.blocks(layer)
        blocks.copy_(torch.randn(blocks.shape, generator=generator))


def rows(pool, blocks, prompt_len):
    """[L, H, 2, prompt_len, D] of some blocks."""
    layers = [pool.blocks(layer)[list(blocks)].movedim(0, 2).flatten(2, 3) for layer in range(pool.layout.num_layers)]
    return torch.stack(layers)[:, :, :, :prompt_len]


def receiver_in_process(layout, num_blocks, config, *, tp_size=1, data_paths=(), kind="zmq"):
    """The pool of rank 0, and the incoming transfer that writes it from a process of its own."""
    setup = ReceiverSetup(
        epoch=D_EPOCH,
        layout=layout,
        num_blocks=num_blocks,
        tp_size=tp_size,
        listen=Listen(kind, bind_address(kind, "127.0.0.1"), tuple(data_paths)),
        config=config,
    )
    region = receiver_region(setup.geometries, config)
    service = ReceiverService.in_process(region, setup)
    return KVPool(layout, num_blocks, torch.device("cpu"), size=tp_size, memory=region.pool(0)), service


class Pair:
    """A prefill worker's and a decode worker's end, and loops as simple as they can be."""

    def __init__(self, kind, layout, num_blocks=64, push_key="", **config):
        self.layout = layout
        self.config = patient(**config)
        self.hub = LoopbackHub()
        device = torch.device("cpu")
        if kind.endswith("process"):
            channel = "grpc" if kind == "grpc-process" else "zmq"
            self.at_p = connecting_transport(dataclasses.replace(self.config, transport=channel))
            self.target, self.incoming = receiver_in_process(layout, num_blocks, self.config, kind=channel)
        else:
            self._land_on_thread(kind, layout, num_blocks)
        self.source = KVPool(layout, num_blocks, device)
        generator = torch.Generator().manual_seed(1)
        fill(self.source, generator)
        self.from_blocks = BlockAllocator(num_blocks, layout.block_size)
        self.to_blocks = BlockAllocator(num_blocks, layout.block_size)
        common = {"layout": layout, "config": self.config, "clock": MonotonicClock()}
        if push_key:  # of another deployment
            common["config"] = dataclasses.replace(self.config, key=push_key)
        self.push = PushService(pool=self.source, epoch=P_EPOCH, transport=self.at_p, **common)
        self.peer = DecodePeer("d0", self.incoming.address, D_EPOCH)
        self.tables, self.landed_tables, self.sizes = {}, {}, {}
        self.all_tables = {}
        self.events = []  # (moment, event), of both sides
        self.is_granting = True
        self.push.start()
        self.incoming.start()

    def _land_on_thread(self, kind, layout, num_blocks):
        if kind == "zmq":
            self.at_p, at_d = ZmqTransport(config=self.config), ZmqTransport("tcp://127.0.0.1:0", self.config)
        elif kind == "grpc":
            self.at_p, at_d = GrpcTransport(config=self.config), GrpcTransport("grpc://127.0.0.1:0", self.config)
        else:
            self.at_p, at_d = self.hub.join("prefill"), self.hub.join("decode")
        self.target = KVPool(layout, num_blocks, torch.device("cpu"))
        common = {"layout": layout, "config": self.config, "clock": MonotonicClock()}
        self.incoming = ReceiverService.on_thread(pool=self.target, epoch=D_EPOCH, transport=at_d, **common)

    def reserve(self, prompt_len, request_id="r", attempt=0, wait_s=10.0, capacity_len=None):
        key = AttemptKey(request_id, attempt)
        self.tables[key] = self.all_tables[key] = self.from_blocks.reserve(prompt_len)
        self.sizes[key] = prompt_len
        self.push.reserve(key, self.peer, self.tables[key], prompt_len, capacity_len or prompt_len + 3, wait_s)
        return key

    def turn(self):
        for event in self.incoming.poll():
            self.events.append((time.monotonic(), event))
            if isinstance(event, ReserveWanted) and self.is_granting:
                self.landed_tables[event.attempt] = self.to_blocks.reserve(event.capacity_len)
                self.incoming.grant(event.attempt, self.landed_tables[event.attempt])
            elif isinstance(event, Drained):
                self.to_blocks.release(self.landed_tables.pop(event.attempt))
        for event in self.push.poll():
            self.events.append((time.monotonic(), event))
            if isinstance(event, Acked | Denied | PushDrained):
                self.from_blocks.release(self.tables.pop(event.attempt))

    def find(self, kind, key):
        return next((event for _, event in self.events if isinstance(event, kind) and event.attempt == key), None)

    def wait_for(self, kind, key, timeout_s=30.0):
        end_s = time.monotonic() + timeout_s
        while (event := self.find(kind, key)) is None:
            self.turn()
            assert time.monotonic() < end_s, f"no {kind} for {key}: {self.events[-8:]}"
            time.sleep(STEP_S)
        return event

    def compute(self, key, chunk_len=None):
        """What a prefill loop does once the incoming transfer is granted."""
        prompt_len = self.sizes[key]
        chunk_len = chunk_len or prompt_len
        for first in range(0, prompt_len, chunk_len):
            with self.push.writer.step([PushRange(key, first, min(chunk_len, prompt_len - first))]) as step:
                for layer in range(self.layout.num_layers):
                    step.submit(layer)

    def commit(self, key, **state):
        self.push.commit(key, kv_pb2.SequenceState(first_token=7, **state), time.monotonic())

    def hand_over(self, prompt_len, chunk_len=None, **reserve):
        key = self.reserve(prompt_len, **reserve)
        self.wait_for(Granted, key)
        self.compute(key, chunk_len)
        self.commit(key)
        return key

    def rows(self, pool, table, prompt_len):
        return rows(pool, table.blocks, prompt_len)

    def release(self, key):
        self.incoming.release(key)
        self.to_blocks.release(self.landed_tables.pop(key))

    def assert_clean(self, timeout_s=30.0):
        """Nothing is held on either side."""
        end_s = time.monotonic() + timeout_s
        blocks = (self.from_blocks, self.to_blocks)
        # Inventories may be a few milliseconds old, so that they say "nothing" before the end has been heard of.
        while (
            self.push.inventory()["num_pushes"]
            or self.incoming.inventory()["num_kv_receives"]
            or any(allocator.num_free < allocator.num_blocks for allocator in blocks)
        ):
            self.turn()
            assert time.monotonic() < end_s, (self.push.inventory(), self.incoming.inventory())
            time.sleep(STEP_S)
        assert self.from_blocks.num_free == self.from_blocks.num_blocks
        assert self.to_blocks.num_free == self.to_blocks.num_blocks

    def close(self):
        self.push.close()
        self.incoming.close()


@pytest.fixture
def make_pair():
    pairs = []

    def make(kind="loopback", layout=None, **options):
        pairs.append(Pair(kind, layout or make_layout(), **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


__all__ = ["Completed", "IncomingFailed", "PushFailed"]
