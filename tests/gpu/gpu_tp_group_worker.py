"""The decode side of a hand-off without a model, over several ranks: rank 0 here, the others in processes."""

import numpy as np
import torch

from baton.bench.actor import SpawnedRemote
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.service import ReceiverService
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.tests.gpu.gpu_worker import GpuWorker
from baton.tests.gpu.rank_holder import RankHolder
from baton.tests.kvtransfer.kept import blocks_of, num_state_slots_of
from baton.tests.patience import patient


class GpuTPGroupWorker(GpuWorker):
    """Ranks take the GPUs there are in turn; several may be on one, as no rank computes."""

    def __init__(self, layout, *, epoch, tp_size, num_blocks=256, **config):
        self.layout = layout
        self.config = patient(**config)
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        num_gpus = torch.cuda.device_count()
        self.holders = [
            SpawnedRemote(RankHolder, rank % num_gpus, layout, num_blocks, rank, tp_size) for rank in range(1, tp_size)
        ]
        try:
            self.pool = KVPool(
                layout,
                num_blocks,
                self.device,
                rank=0,
                size=tp_size,
                num_state_slots=num_state_slots_of(layout, num_blocks),
            )
            self.setup = ReceiverSetup(
                epoch=epoch,
                layout=layout,
                num_blocks=num_blocks,
                num_state_slots=self.pool.num_state_slots,
                tp_size=tp_size,
                listen=Listen("zmq", "tcp://127.0.0.1:0", ("nvlink",)),
                config=self.config,
            )
            self.service = ReceiverService.over_device(self.pool, self.setup, self.gather)
        except BaseException:
            self.end_holders()
            raise
        self.region = self.service._region
        self.blocks = BlockAllocator(num_blocks, layout.block_size, num_state_slots=self.pool.num_state_slots)
        self.tables, self.events = {}, []
        self.is_granting = True

    def gather(self, data):
        return [data, *(holder.call("say") for holder in self.holders)]

    def ranks(self):
        """The content of every rank's pool now."""
        torch.cuda.synchronize(self.device)
        contents = [self.pool.data_bytes.cpu().numpy(), *(holder.call("content") for holder in self.holders)]
        return [
            PoolIO(np.ascontiguousarray(content), geometry)
            for content, geometry in zip(contents, self.setup.geometries, strict=True)
        ]

    def differing(self, source_io, source, key, prompt_len):
        """(rank, layer) of what is not what the source has."""
        found = []
        for rank, mine in enumerate(self.ranks()):
            for layer, shape in enumerate(mine.geometry.layers):
                kept = self.layout.layers[layer].span(prompt_len)
                span = KVRange(layer, kept.first, kept.count, shape.head_first, shape.num_heads)
                want = source_io.read(blocks_of(source_io, source, span), span, 16)
                if mine.read(blocks_of(mine, self.tables[key], span), span, 16) != want:
                    found.append((rank, layer))
        return found

    def flip(self, rank, layer, block):
        """Damage a block in a rank's pool."""
        shape = self.setup.geometries[rank].layer(layer)
        offset = shape.offset_bytes + block * shape.block_bytes + 80
        if rank:
            self.holders[rank - 1].call("flip", offset)
        else:
            self.pool.data_bytes[offset] ^= 4
            torch.cuda.synchronize(self.device)

    def end_holders(self):
        for holder in self.holders:
            holder.end()

    def close(self):
        super().close()
        self.end_holders()
