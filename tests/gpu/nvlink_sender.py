"""The sending side of `test_nvlink`, in a process of its own, which imports it from here; and what both sides know."""

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch

from baton.kernels.cuda_ipc import IpcPlace, PeerMemory, PinnedMemory, can_reach
from baton.kernels.kv.scatter import PoolAddress, ScatterRange, ScatterWorkspace, Tuning, WriteCompletion, kv_scatter
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout

NUM_BLOCKS = 64
WORD_BYTES = 1 << 16
PIECE = ScatterRange(layers=(0, 1, 2, 3), first=0, count=60 * 16, head_first=0, head_count=8)


def layout(block_size):
    return KVLayout.of_attention(
        model_hash="m", num_layers=4, num_kv_heads=8, head_dim=128, block_size=block_size, dtype="bfloat16"
    )  # fmt: skip


def map_words(path):
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, WORD_BYTES)
    memory = mmap.mmap(file, WORD_BYTES)
    os.close(file)
    return np.frombuffer(memory, dtype=np.uint8)


@dataclass
class Order:
    """What the sender is told."""

    device: int
    place: IpcPlace
    uuid: str
    path: str
    source_size: int
    target_size: int
    rounds: int


def source_content(geometry, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (geometry.num_bytes,), dtype=torch.uint8, generator=generator)


def blocks_of(size, seed):
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)[: 60 * 16 // size].astype(np.int32)


def send(order, pipe):
    device = torch.device("cuda", order.device)
    torch.cuda.set_device(device)
    assert can_reach(device, order.uuid)
    geometry, theirs = PoolGeometry(layout(order.source_size), NUM_BLOCKS), PoolGeometry(layout(order.target_size), 64)
    pool = source_content(geometry).to(device)
    peer = PeerMemory(order.place, device)
    assert peer.check(theirs.num_bytes)
    assert not peer.check(1 << 40)
    words = map_words(order.path)
    pinned = PinnedMemory(words)
    workspace = ScatterWorkspace(device, 4096)
    source = torch.from_numpy(blocks_of(order.source_size, 1)).to(device)
    target = torch.from_numpy(blocks_of(order.target_size, 2)).to(device)
    for turn in range(order.rounds):
        kv_scatter(
            PoolAddress(pool.data_ptr(), geometry.layers), source,
            PoolAddress(peer.address, theirs.layers), target,
            PIECE, workspace, WriteCompletion(pinned.address, turn + 1), Tuning(16),
        )  # fmt: skip
        torch.cuda.synchronize()
        pipe.send(turn)
        assert pipe.recv() == turn
    pinned.close()
    peer.close()
