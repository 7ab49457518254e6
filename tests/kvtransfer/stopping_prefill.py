"""A prefill worker in a process of its own, for tests that stop it: it pushes one prompt slowly, whatever happens.

`python -m baton.tests.kvtransfer.stopping_prefill ADDRESS D_EPOCH TRANSPORT LEASE_S` prints what it hears.
"""

import sys
import threading
import time

import torch

from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.kvtransfer.sender.async_writer import PushRange
from baton.kvtransfer.sender.service import DecodePeer, Granted, PushService
from baton.kvtransfer.transports.registry import connecting_transport
from baton.tests.kvtransfer.conftest import fill, make_layout

PROMPT_LEN, NUM_BLOCKS = 200, 64
PAUSE_S = 0.01


def main(address, d_epoch, transport, lease_s):
    config = KVTransferConfig(transport=transport, lease_s=float(lease_s), heartbeat_s=0.1)
    layout = make_layout()
    pool = KVPool(layout, NUM_BLOCKS, torch.device("cpu"))
    fill(pool, torch.Generator().manual_seed(1))
    common = {"config": config, "clock": MonotonicClock(), "transport": connecting_transport(config)}
    push = PushService(pool=pool, layout=layout, epoch=time.monotonic_ns(), **common)
    push.start()
    key = AttemptKey("r", 1)
    table = BlockAllocator(NUM_BLOCKS, layout.block_size).reserve(PROMPT_LEN)
    push.reserve(key, DecodePeer("d", address, int(d_epoch)), table, PROMPT_LEN, PROMPT_LEN, 10.0)
    granted = threading.Event()

    def listen():
        while True:
            for event in push.poll():
                print(type(event).__name__, getattr(event, "reason", ""), flush=True)
                if isinstance(event, Granted):
                    granted.set()
            time.sleep(0.001)

    threading.Thread(target=listen, daemon=True).start()
    granted.wait(10.0)
    for first in range(PROMPT_LEN):
        with push.writer.step([PushRange(key, first, 1)]) as step:
            for layer in range(layout.num_layers):
                step.submit(layer)
        time.sleep(PAUSE_S)
    sys.stdin.read()
    push.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
