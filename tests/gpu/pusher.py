"""The prefill side of a hand-off in a process of its own, without a model: a GPU pool, and the push service."""

import time

import torch

from baton.core.clock import MonotonicClock
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.kvtransfer.sender.async_writer import PushRange
from baton.kvtransfer.sender.service import DecodePeer, PushService
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.proto import kv_pb2
from baton.tests.kvtransfer.kept import geometry_of, num_state_slots_of

CYCLES_PER_MS = 1_800_000


def content_of(layout, num_blocks):
    """What the pool holds; the same in every process."""
    num_bytes = geometry_of(layout, num_blocks).num_bytes
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


class Pusher:
    """See `bench.actor.SpawnedRemote`; what it returns is pickled."""

    def __init__(self, device_index, layout, num_blocks, epoch, config):
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        self.pool = KVPool(layout, num_blocks, self.device, num_state_slots=num_state_slots_of(layout, num_blocks))
        self.content = content_of(layout, num_blocks).to(self.device)
        self.pool.data_bytes.copy_(self.content)
        torch.cuda.synchronize()
        self.allocator = BlockAllocator(num_blocks, layout.block_size, num_state_slots=self.pool.num_state_slots)
        self.tables, self.events = {}, []
        self.push = PushService(
            pool=self.pool,
            layout=layout,
            epoch=epoch,
            transport=ZmqTransport(config=config),
            config=config,
            clock=MonotonicClock(),
        )
        self.push.start()

    def reserve(self, key, address, epoch, prompt_len):
        """Returns what the source has."""
        self.tables[key] = self.allocator.reserve(prompt_len)
        self.push.reserve(key, DecodePeer("decode", address, epoch), self.tables[key], prompt_len, prompt_len, 120.0)
        return self.tables[key]

    def wait(self, kinds, key, timeout_s=30.0):
        """The first event of these kinds (names) for an attempt."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            self.events += self.push.poll()
            for event in self.events:
                if event.attempt == key and type(event).__name__ in kinds:
                    if type(event).__name__ == "PushDrained":
                        self.allocator.release(self.tables.pop(key))
                    return type(event).__name__, getattr(event, "detail", getattr(event, "reason", ""))
            time.sleep(0.0005)
        raise TimeoutError(f"none of {kinds} for {key}: {self.events[-5:]}")

    def step(self, key, first, count, slow_ms=0, layers=None):
        """A step: with `slow_ms`, every layer's content comes from a kernel that is slow, and was zero before."""
        layer_range = range(self.pool.layout.num_layers) if layers is None else layers
        if slow_ms:
            self.pool.data_bytes.zero_()
            torch.cuda.synchronize()
        with self.push.writer.step([PushRange(key, first, count)]) as step:
            for layer in layer_range:
                if slow_ms:
                    shape = self.pool.geometry.layer(layer)
                    torch.cuda._sleep(slow_ms * CYCLES_PER_MS)
                    part = slice(shape.offset_bytes, shape.offset_bytes + shape.num_bytes)
                    self.pool.data_bytes[part].copy_(self.content[part])
                step.submit(layer)

    def commit(self, key):
        """Hand over."""
        self.push.commit(key, kv_pb2.SequenceState(first_token=7), MonotonicClock().now_s())

    def hand_over(self, key, prompt_len, chunk_len, slow_ms=0):
        """Everything after the reservation."""
        kind, reason = self.wait(["Granted", "Denied", "PushFailed"], key)
        if kind != "Granted":
            return kind, reason
        for first in range(0, prompt_len, chunk_len):
            self.step(key, first, min(chunk_len, prompt_len - first), slow_ms)
        self.commit(key)
        kind, reason = self.wait(["Acked", "PushFailed"], key)
        if kind == "Acked":
            self.allocator.release(self.tables.pop(key))
        return kind, reason

    def data_path(self, address):
        """The data path in use, and why no better one."""
        choice = self.push.data_path_of(address)
        return (choice.data_path, choice.why) if choice is not None else ("", "")

    def inventory(self):
        """Counts."""
        return self.push.inventory()

    def close(self):
        """Stop; returns whether nothing is left of it."""
        self.push.close()
        return True
