"""On a GPU: blocks move between pools of devices and pinned memory bit by bit, with the digest that NumPy computes."""

import mmap
import random
import time

import numpy as np
import pytest
import torch

from baton.kernels.cuda_ipc import PinnedMemory
from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import (
    PoolAddress,
    ScatterRange,
    ScatterWorkspace,
    Tuning,
    WriteCompletion,
    kv_digest_reference,
    kv_scatter,
)
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.tests.kvtransfer.kept import geometry_of, latent, state

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LEN = 1000
TUNINGS = [Tuning(16), Tuning(1, 4, 1024), Tuning(132, 8, 2048), Tuning(64, 16, 4096)]


def layout(block_size, *, heads=8, head_dim=128, dtype="bfloat16", extra=()):
    return KVLayout.of_attention(
        model_hash="m", num_layers=3, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
        more=extra,
    )  # fmt: skip


class Pinned:
    """Pages of host memory that the device reaches."""

    def __init__(self, num_bytes):
        self._map = mmap.mmap(-1, -(-num_bytes // 4096) * 4096)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        self._pinned = PinnedMemory(self.memory)
        self.address = self._pinned.address

    def close(self):
        self._pinned.close()


@pytest.fixture
def words():
    pinned = Pinned(4096)
    pinned.view = pinned.memory.view(np.uint64)
    yield pinned
    torch.cuda.synchronize()
    pinned.close()


class Pool:
    """Random bytes on the device or in pinned memory, and the blocks of one sequence."""

    def __init__(self, layout, seed, *, pinned=False, rank=0, size=1):
        generator = torch.Generator().manual_seed(seed)
        needed = -(-LEN // layout.block_size)
        self.geometry = geometry_of(layout, needed + 5, rank, size)
        content = torch.randint(0, 256, (self.geometry.num_bytes,), dtype=torch.uint8, generator=generator)
        self.pinned = Pinned(self.geometry.num_bytes) if pinned else None
        if self.pinned is None:
            self.device = content.to(CUDA)
            address = self.device.data_ptr()
        else:
            self.pinned.memory[: self.geometry.num_bytes] = content.numpy()
            address = self.pinned.address
        order = list(range(needed + 5))
        random.Random(seed).shuffle(order)
        self.blocks = order[:needed]
        self.blocks_N = torch.tensor(self.blocks, dtype=torch.int32, device=CUDA)
        self.address = PoolAddress(address, self.geometry.layers)

    def bytes(self):
        if self.pinned is not None:
            return self.pinned.memory[: self.geometry.num_bytes].copy()
        return self.device.cpu().numpy()

    def close(self):
        torch.cuda.synchronize()
        if self.pinned is not None:
            self.pinned.close()


def expected(source, target, piece):
    memory, source_io = target.bytes(), PoolIO(source.bytes(), source.geometry)
    io, digests = PoolIO(memory, target.geometry), []
    for layer in piece.layers:
        span = KVRange(layer, piece.first, piece.count, piece.head_first, piece.head_count)
        source_io.copy(source.blocks, io, target.blocks, span)
        digests.append(source_io.digest(source.blocks, span))
    return memory, digests


def wait_for(words, sequence):
    give_up_s = time.monotonic() + 20
    while words.view[0] != sequence:
        assert time.monotonic() < give_up_s, "the completion word did not come"


def check(source, target, piece, words, tuning, sequence=5):
    wanted, digests = expected(source, target, piece)
    workspace = ScatterWorkspace(CUDA, LEN)
    completion = WriteCompletion(words.address, sequence)
    kv_scatter(source.address, source.blocks_N, target.address, target.blocks_N, piece, workspace, completion, tuning)
    wait_for(words, sequence)
    assert words.view[1 : 1 + len(piece.layers)].tolist() == digests
    # Host memory must hold everything as soon as the word is there; the device is only asked for its own.
    assert np.array_equal(target.bytes(), wanted)
    torch.cuda.synchronize()
    assert not workspace.sums.any()
    for pool in (source, target):
        pool.close()


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize(("from_size", "to_size"), [(16, 16), (16, 64), (64, 16), (64, 64)])
def test_between_pools_of_the_device(words, tuning, from_size, to_size):
    piece = ScatterRange(layers=(1, 2), first=3, count=LEN - 7, head_first=0, head_count=8)
    check(Pool(layout(from_size), 1), Pool(layout(to_size), 2), piece, words, tuning)


@pytest.mark.parametrize(("from_pinned", "to_pinned"), [(False, True), (True, False), (True, True)])
def test_from_and_to_pinned_memory(words, from_pinned, to_pinned):
    piece = ScatterRange(layers=(0, 1, 2), first=0, count=LEN, head_first=0, head_count=8)
    source, target = Pool(layout(16), 3, pinned=from_pinned), Pool(layout(16), 4, pinned=to_pinned)
    check(source, target, piece, words, TUNINGS[0])


@pytest.mark.parametrize(("from_ranks", "to_ranks"), [(1, 2), (2, 1), (4, 2)])
def test_heads_of_other_ranks(words, from_ranks, to_ranks):
    source, target = Pool(layout(16), 5, rank=0, size=from_ranks), Pool(layout(64), 6, rank=0, size=to_ranks)
    count = 8 // max(from_ranks, to_ranks)
    check(
        source, target, ScatterRange(layers=(2,), first=0, count=LEN, head_first=0, head_count=count), words, TUNINGS[0]
    )


def test_other_kinds_of_layers(words):
    compressed = latent(576)
    recurrent = state(32, 128 * 128)
    both = layout(16, extra=(compressed, recurrent))
    for layer, count, heads in ((3, LEN, 1), (4, 1, 32)):
        piece = ScatterRange(layers=(layer,), first=0, count=count, head_first=0, head_count=heads)
        check(Pool(both, 7), Pool(both, 8), piece, words, TUNINGS[0], 5 + layer)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64"])
def test_other_dtypes(words, dtype):
    piece = ScatterRange(layers=(0,), first=1, count=500, head_first=1, head_count=3)
    check(Pool(layout(16, dtype=dtype, head_dim=64), 9), Pool(layout(64, dtype=dtype, head_dim=64), 10), piece, words,
          TUNINGS[0])  # fmt: skip


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_kv_digest_is_numpys_and_torchs(words, tuning):
    pool = Pool(layout(16), 11)
    piece = ScatterRange(layers=(0, 1, 2), first=2, count=100, head_first=2, head_count=5)
    kv_digest(
        pool.address, pool.blocks_N, piece, ScatterWorkspace(CUDA, LEN), WriteCompletion(words.address, 9), tuning
    )
    wait_for(words, 9)
    io = PoolIO(pool.bytes(), pool.geometry)
    for layer in range(3):
        wanted = io.digest(pool.blocks, KVRange(layer, 2, 100, 2, 5))
        assert int(words.view[1 + layer]) == wanted
        shape = pool.geometry.layer(layer)
        flat = pool.device[shape.offset_bytes : shape.offset_bytes + shape.num_bytes].view(torch.int64)
        words_NHPSW = flat.view(shape.num_blocks, 8, 2, 16, -1)
        assert kv_digest_reference(words_NHPSW, pool.blocks, piece, layer=layer) == wanted


def test_many_launches_one_after_the_other_each_say_their_own_digest(words):
    source, target = Pool(layout(16), 12), Pool(layout(16), 13)
    io, workspace, generator = PoolIO(source.bytes(), source.geometry), ScatterWorkspace(CUDA, LEN), random.Random(1)
    stream = torch.cuda.Stream(CUDA)
    stream.wait_stream(torch.cuda.current_stream())
    for sequence in range(1, 301):
        first = generator.randrange(LEN - 1)
        count = generator.randrange(1, LEN - first)
        head = generator.randrange(8)
        heads = generator.randrange(1, 9 - head)
        piece = ScatterRange(layers=(sequence % 3,), first=first, count=count, head_first=head, head_count=heads)
        tuning = generator.choice(TUNINGS)
        with torch.cuda.stream(stream):
            kv_scatter(source.address, source.blocks_N, target.address, target.blocks_N, piece, workspace,
                       WriteCompletion(words.address, sequence), tuning)  # fmt: skip
        wait_for(words, sequence)
        if sequence % 10 == 0:
            assert int(words.view[1]) == io.digest(source.blocks, KVRange(piece.layers[0], first, count, head, heads))


def test_digests_off_are_zeros_and_bytes_move_alike(words):
    source, target = Pool(layout(16), 14), Pool(layout(16), 15)
    piece = ScatterRange(layers=(0,), first=0, count=LEN, head_first=0, head_count=8)
    wanted, _ = expected(source, target, piece)
    words.view[1] = 1
    kv_scatter(source.address, source.blocks_N, target.address, target.blocks_N, piece, ScatterWorkspace(CUDA, LEN),
               WriteCompletion(words.address, 2), TUNINGS[0], with_digest=False)  # fmt: skip
    wait_for(words, 2)
    assert int(words.view[1]) == 0
    assert np.array_equal(target.bytes(), wanted)
