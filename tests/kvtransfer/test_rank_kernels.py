"""The kernels in Triton's interpreter: a launch for each rank's pool makes what NumPy makes, and raises its flag."""

import numpy as np
import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.requests.request import AttemptKey
from baton.kernels.kv.scatter import PoolAddress
from baton.kvcache.allocator import BlockTable
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.rank_kernels import RankKernels
from baton.kvtransfer.receiver.actions import DigestWanted
from baton.kvtransfer.receiver.device_jobs import SLOT_WORDS, RankDigests, flag_bytes, flag_page
from baton.tests.kvtransfer.kept import geometry_of, latent, state

CPU = torch.device("cpu")
EXTRA = (latent(16), state(8, 16))
LEN = 37
NUM_BLOCKS, NUM_STAGING = 8, 6


class Ranks:
    """Staging memory with random content, the poisoned pools of all ranks, and their kernels."""

    def __init__(self, num_kv_heads, size, block_size=16, extra=(), prompt_len=LEN):
        self.prompt_len = prompt_len
        self.layout = KVLayout.of_attention(
            model_hash="m", num_layers=2, num_kv_heads=num_kv_heads, head_dim=8, block_size=block_size,
            dtype="bfloat16", more=extra,
        )  # fmt: skip
        generator = np.random.default_rng(7)

        def random_pool(geometry):
            return PoolIO(generator.integers(0, 256, geometry.num_bytes, dtype=np.uint8), geometry)

        self.staging = random_pool(geometry_of(self.layout, NUM_STAGING))
        self.pools = [random_pool(its) for its in geometry_of(self.layout, NUM_BLOCKS, 0, size).of_all_ranks]
        self.words = np.zeros(flag_bytes(), dtype=np.uint8)
        self.flags = flag_page(self.words.data)
        needed = -(-prompt_len // block_size)
        self.source = BlockTable(
            tuple(range(NUM_STAGING))[-needed:][::-1], block_size, NUM_STAGING - 1 if extra else None
        )
        self.table = BlockTable(tuple(range(NUM_BLOCKS))[::2][:needed], block_size, 0 if extra else None)
        self.kernels = [
            RankKernels(
                address_of(pool), pool.geometry.layers, address_of(self.staging), self.words.ctypes.data, CPU, size
            )
            for pool in self.pools
        ]

    def launch(self, rank, *layers, staged=True, has_digest=True):
        """Returns the flag, and what is in the rank's slot."""
        (flag,) = self.flags.claim()
        wanted = DigestWanted(
            attempt=AttemptKey("r", 0), rank=rank, flag=flag.slot, sequence=flag.sequence, layers=layers,
            first=0, count=self.layout.layers[layers[0]].span(self.prompt_len).count,
            staging=self.source if staged else BlockTable((), self.layout.block_size), has_digest=has_digest,
        )  # fmt: skip
        self.kernels[rank].launch(wanted, self.table)
        assert self.flags.is_up(flag)
        digests = self.flags.digests(flag, len(layers))
        self.flags.release(flag)
        return digests

    def span(self, layer, rank=None):
        shape = (self.staging if rank is None else self.pools[rank]).geometry.layer(layer)
        return KVRange(
            layer, 0, self.layout.layers[layer].span(self.prompt_len).count, shape.head_first, shape.num_heads
        )

    def expected(self, rank, layers):
        """All of a rank's memory after its part of these layers was copied by NumPy."""
        pool = self.pools[rank]
        memory = np.frombuffer(bytes(pool._memory), dtype=np.uint8).copy()
        io = PoolIO(memory, pool.geometry)
        for layer in layers:
            self.staging.copy(self.source.blocks, io, self.table.blocks, self.span(layer, rank))
        return memory.tobytes()


def address_of(pool):
    return PoolAddress(np.frombuffer(pool._memory, dtype=np.uint8).ctypes.data, pool.geometry.layers)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(4, 1), (4, 2), (2, 4), (8, 8)])
def test_ranks_are_filled_with_their_heads_alone_and_their_digests_make_the_whole(num_kv_heads, size):
    ranks = Ranks(num_kv_heads, size)
    wanted = [ranks.expected(rank, (0, 1)) for rank in range(size)]
    by_rank = [ranks.launch(rank, 0, 1) for rank in range(size)]
    assert [bytes(pool._memory) for pool in ranks.pools] == wanted
    together = RankDigests(ranks.layout, size)
    for layer, digests in enumerate(zip(*by_rank, strict=True)):
        assert together.total(layer, digests) == ranks.staging.digest(ranks.source.blocks, ranks.span(layer))


@pytest.mark.parametrize(("block_size", "prompt_len"), [(4, 13), (64, 37)])
def test_layers_of_every_kind_and_blocks_of_any_size(block_size, prompt_len):
    ranks = Ranks(4, 2, block_size, EXTRA, prompt_len)
    together = RankDigests(ranks.layout, 2)
    for layer in range(ranks.layout.num_layers):
        wanted = [ranks.expected(rank, [layer]) for rank in range(2)]
        digests = [ranks.launch(rank, layer)[0] for rank in range(2)]
        assert [bytes(pool._memory) for pool in ranks.pools] == wanted
        assert together.total(layer, digests) == ranks.staging.digest(ranks.source.blocks, ranks.span(layer))


def test_what_is_verified_is_the_pool_and_not_what_was_staged():
    ranks = Ranks(4, 2)
    for rank in range(2):
        ranks.launch(rank, 1)
    right = [ranks.launch(rank, 1, staged=False)[0] for rank in range(2)]
    head = ranks.pools[1].geometry.layer(1).head_first
    (piece,) = ranks.pools[1].pieces(ranks.table.blocks[:1], KVRange(1, 0, 16, head, 1), 16)
    piece[9] ^= 2
    found = [ranks.launch(rank, 1, staged=False)[0] for rank in range(2)]
    assert found[0] == right[0]
    assert found[1] != right[1]


def test_without_a_digest_the_pool_is_filled_and_zeros_are_reported():
    ranks = Ranks(2, 2)
    for rank in range(2):
        wanted = ranks.expected(rank, (0,))
        assert ranks.launch(rank, 0, has_digest=False) == [0]
        assert bytes(ranks.pools[rank]._memory) == wanted


def test_warming_up_changes_nothing_but_the_scratch_slot():
    ranks = Ranks(2, 2, extra=EXTRA)
    before = [bytes(pool._memory) for pool in ranks.pools]
    for kernels in ranks.kernels:
        kernels.warm_up()
    assert [bytes(pool._memory) for pool in ranks.pools] == before
    assert not any(ranks.words[: len(ranks.words) - SLOT_WORDS * 8])
