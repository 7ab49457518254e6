"""The decode side of a hand-off without a model: a GPU pool, and Baton's KV receiver process before it."""

import numpy as np
import torch

from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.service import ReceiverService
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.tests.kvtransfer.kept import blocks_of, num_state_slots_of
from baton.tests.kvtransfer.receiver_worker import ReceiverWorker
from baton.tests.patience import patient


class GpuWorker(ReceiverWorker):
    """Grants what is asked for; `poll` serves."""

    def __init__(self, layout, *, epoch, device_index=0, num_blocks=256, **config):
        self.layout = layout
        self.config = patient(**config)
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        self.pool = KVPool(layout, num_blocks, self.device, num_state_slots=num_state_slots_of(layout, num_blocks))
        transport = self.config.transport
        self.setup = ReceiverSetup(
            epoch=epoch,
            layout=layout,
            num_blocks=num_blocks,
            num_state_slots=self.pool.num_state_slots,
            tp_size=1,
            listen=Listen("zmq", "tcp://127.0.0.1:0", ("nvlink",) if transport in ("auto", "nvlink") else ()),
            config=self.config,
        )
        self.service = ReceiverService.over_device(self.pool, self.setup)
        self.region = self.service._region
        self.blocks = BlockAllocator(num_blocks, layout.block_size, num_state_slots=self.pool.num_state_slots)
        self.tables, self.events = {}, []
        self.is_granting = True

    def io(self):
        """The pool's content now."""
        torch.cuda.synchronize(self.device)
        return PoolIO(np.ascontiguousarray(self.pool.data_bytes.cpu().numpy()), self.pool.geometry)

    def differing(self, source_io, source, key, prompt_len):
        """Layers that are not what the source has."""
        mine = self.io()
        found = []
        for layer in range(self.layout.num_layers):
            shape = self.layout.layers[layer]
            kept = shape.span(prompt_len)
            span = KVRange(layer, kept.first, kept.count, 0, shape.num_heads)
            want = source_io.read(blocks_of(source_io, source, span), span, 16)
            if mine.read(blocks_of(mine, self.tables[key], span), span, 16) != want:
                found.append(layer)
        return found
