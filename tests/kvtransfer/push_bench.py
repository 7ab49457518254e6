"""A decode worker whose incoming transfer runs in a process of its own, and prefill ranks that push to it."""

import secrets
import threading
import time

import numpy as np
import torch

from baton.core.clock import MonotonicClock
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import Completed, Drained, IncomingFailed, ReserveWanted
from baton.kvtransfer.sender.async_writer import PushRange
from baton.kvtransfer.sender.service import Acked, DecodePeer, Denied, PushDrained, PushService
from baton.kvtransfer.transports.registry import connecting_transport
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import D_EPOCH, receiver_in_process
from baton.tests.patience import patient

CPU = torch.device("cpu")


class Decode:
    """The loop of a decode worker, as simple as it can be."""

    def __init__(self, layout, num_blocks=40, data_paths=("shm",), kind="zmq", **config):
        self.layout = layout
        self.config = patient(**config)
        self.pool, self.incoming = receiver_in_process(
            layout, num_blocks, self.config, data_paths=data_paths, kind=kind
        )
        self.blocks = BlockAllocator(num_blocks, layout.block_size)
        self.incoming.start()
        self.peer = DecodePeer("d0", self.incoming.address, D_EPOCH)
        self.tables, self.events = {}, []

    def poll(self):
        events = self.incoming.poll()
        failed = {event.attempt for event in events if isinstance(event, IncomingFailed)}
        for event in events:
            self.events.append(event)
            if isinstance(event, ReserveWanted) and event.attempt not in failed:
                self.tables[event.attempt] = self.blocks.reserve(event.capacity_len)
                self.incoming.grant(event.attempt, self.tables[event.attempt])
            elif isinstance(event, Drained):
                self.blocks.release(self.tables.pop(event.attempt))

    def release(self, key):
        self.incoming.release(key)
        self.blocks.release(self.tables.pop(key))


class Prefill:
    """One prefill rank."""

    def __init__(self, decode, layout=None, rank=0, size=1, epoch=0, num_blocks=40, openers=None, **config):
        self.decode = decode
        self.layout = layout or decode.layout
        config = patient(**{"transport": "shm", "digest": decode.config.digest, **config})
        self.pool = KVPool(self.layout, num_blocks, CPU, rank=rank, size=size)
        self.blocks = BlockAllocator(num_blocks, self.layout.block_size)
        self.push = PushService(
            pool=self.pool,
            layout=self.layout,
            epoch=epoch or secrets.randbits(64),
            transport=connecting_transport(config),
            config=config,
            clock=MonotonicClock(),
            openers=openers,
        )
        self.push.start()
        self.tables, self.lens, self.events = {}, {}, []

    def fill(self, seed):
        """Content that depends on the absolute head, so that every rank of a group has its part of the same."""
        for layer in range(self.layout.num_layers):
            geometry = self.pool.geometry.layer(layer)
            rng = np.random.default_rng((seed, layer))
            shape = (self.pool.num_blocks + 1, self.layout.num_kv_heads, *self.pool.blocks(layer).shape[2:])
            values = torch.from_numpy(rng.standard_normal(shape)).to(self.pool.dtype)
            self.pool.blocks(layer).copy_(values[:, geometry.head_first : geometry.heads.stop])

    def poll(self):
        self.decode.poll()
        for event in self.push.poll():
            self.events.append(event)
            if isinstance(event, Acked | Denied | PushDrained):
                self.blocks.release(self.tables.pop(event.attempt))

    def find(self, kind, key):
        side = self.decode if kind in (Completed, IncomingFailed, Drained, ReserveWanted) else self
        return next((event for event in side.events if isinstance(event, kind) and event.attempt == key), None)

    def wait_for(self, kind, key, timeout_s=30.0):
        end_s = time.monotonic() + timeout_s
        while (event := self.find(kind, key)) is None:
            self.poll()
            assert time.monotonic() < end_s, f"no {kind} for {key}: {self.events[-6:]} {self.decode.events[-6:]}"
            time.sleep(0.0005)
        return event

    def stay_without(self, kind, key, duration_s=0.15):
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.poll()
            assert self.find(kind, key) is None
            time.sleep(0.002)

    def reserve(self, name, prompt_len, wait_s=5.0, peer=None):
        key = AttemptKey(name, 0)
        self.tables[key] = self.blocks.reserve(prompt_len)
        self.lens[key] = prompt_len
        self.push.reserve(key, peer or self.decode.peer, self.tables[key], prompt_len, prompt_len, wait_s)
        return key

    def adopt(self, key, prompt_len, grant):
        self.tables[key] = self.blocks.reserve(prompt_len)
        self.lens[key] = prompt_len
        self.push.adopt(key, self.decode.peer, self.tables[key], prompt_len, grant)

    def compute(self, *keys, first=0, count=None, layers=None):
        parts = [PushRange(key, first, (self.lens[key] if count is None else count) - first) for key in keys]
        with self.push.writer.step(parts) as step:
            for layer in range(self.layout.num_layers) if layers is None else layers:
                step.submit(layer)

    def compute_aside(self, *keys):
        """As `compute`, on a thread: for data paths that hold a write up."""
        thread = threading.Thread(target=self.compute, args=keys)
        thread.start()
        return thread

    def commit(self, key):
        state = kv_pb2.SequenceState(first_token=7) if self.pool.geometry.rank == 0 else None
        self.push.commit(key, state, time.monotonic())

    def assert_landed(self, key, blocks):
        """`blocks` are the source's, which may have been given back meanwhile."""
        size = self.lens[key]
        for layer in range(self.layout.num_layers):
            heads = self.pool.geometry.layer(layer).heads
            sent = self.pool.blocks(layer)[list(blocks)].movedim(0, 2).flatten(2, 3)[:, :, :size]
            there = self.decode.pool.blocks(layer)[list(self.decode.tables[key].blocks)].movedim(0, 2).flatten(2, 3)
            assert torch.equal(there[heads.first : heads.stop, :, :size], sent), f"layer {layer}"

    def assert_clean(self, timeout_s=30.0):
        end_s = time.monotonic() + timeout_s
        blocks = (self.blocks, self.decode.blocks)
        # An inventory may say "nothing" before the end that it counts has been heard of here.
        while (
            self.push.inventory()["num_pushes"]
            or self.decode.incoming.inventory()["num_kv_receives"]
            or any(allocator.num_free < allocator.num_blocks for allocator in blocks)
        ):
            self.poll()
            assert time.monotonic() < end_s, (self.push.inventory(), self.decode.incoming.inventory())
            time.sleep(0.005)
        assert self.blocks.num_free == self.blocks.num_blocks
        assert self.decode.blocks.num_free == self.decode.blocks.num_blocks

    def close(self):
        self.push.close()
