"""The pool of another rank of a decode worker, in a process of its own, without a model."""

import torch

from baton.kvcache.pool import KVPool
from baton.kvtransfer.rank_pools import share_pool
from baton.tests.kvtransfer.kept import num_state_slots_of


class RankHolder:
    """See `bench.actor.SpawnedRemote`."""

    def __init__(self, device_index, layout, num_blocks, rank, size):
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        self.pool = KVPool(
            layout,
            num_blocks,
            self.device,
            rank=rank,
            size=size,
            num_state_slots=num_state_slots_of(layout, num_blocks),
        )
        self.pool.data_bytes.random_(0, 256)

    def say(self):
        """What this rank tells the others of its pool."""
        said = []

        def gather(data):
            said.append(data)
            return [data]

        share_pool(self.pool, gather)
        return said[0]

    def content(self):
        """The pool's bytes now."""
        torch.cuda.synchronize(self.device)
        return self.pool.data_bytes.cpu().numpy()

    def flip(self, offset):
        """Have a bit of a byte change."""
        self.pool.data_bytes[offset] ^= 4
        torch.cuda.synchronize(self.device)
