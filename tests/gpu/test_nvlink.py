"""Two processes, each with a GPU: one writes the other's pool through CUDA IPC, and says so in memory that both map."""

import mmap
import multiprocessing
import os
import secrets
import time

import numpy as np
import pytest
import torch

from baton.kernels.cuda_ipc import CudaFailed, IpcPlace, PeerMemory, PinnedMemory, device_uuid, export
from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import PoolAddress, ScatterWorkspace, Tuning, WriteCompletion, kv_scatter
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.tests.gpu.nvlink_sender import NUM_BLOCKS, PIECE, Order, blocks_of, layout, map_words, send, source_content

pytestmark = pytest.mark.gpu
WAIT_S = 60.0


@pytest.fixture
def path():
    name = f"/dev/shm/baton-test-{secrets.token_hex(8)}"
    yield name
    os.unlink(name)


def devices():
    return [(0, 0), (0, 1)] if torch.cuda.device_count() > 1 else [(0, 0)]


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 16), (16, 64)])
@pytest.mark.parametrize(("sender", "owner"), devices())
def test_a_process_writes_the_pool_of_another(path, sender, owner, source_size, target_size):
    device = torch.device("cuda", owner)
    torch.cuda.set_device(device)
    geometry = PoolGeometry(layout(target_size), NUM_BLOCKS)
    torch.empty(3 << 20, dtype=torch.uint8, device=device)  # so that the pool may lie inside of an allocation
    pool = torch.zeros(geometry.num_bytes, dtype=torch.uint8, device=device)
    words = map_words(path)
    pinned = PinnedMemory(words)
    view = words.view(np.uint64)
    place = export(pool.data_ptr(), device)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    order = Order(sender, place, device_uuid(device), path, source_size, target_size, rounds=2)
    process = context.Process(target=send, args=(order, theirs), daemon=True)
    process.start()
    source_geometry = PoolGeometry(layout(source_size), NUM_BLOCKS)
    source_io = PoolIO(source_content(source_geometry).numpy(), source_geometry)
    memory = np.zeros(geometry.num_bytes, dtype=np.uint8)
    io = PoolIO(memory, geometry)
    source, target = blocks_of(source_size, 1).tolist(), blocks_of(target_size, 2).tolist()
    spans = [KVRange(n, PIECE.first, PIECE.count, 0, 8) for n in range(4)]
    for span in spans:
        source_io.copy(source, io, target, span)
    digests = [source_io.digest(source, span) for span in spans]
    try:
        for turn in range(2):
            assert pipe.poll(WAIT_S), "the sender ended"
            assert pipe.recv() == turn
            assert int(view[0]) == turn + 1
            assert view[1:5].tolist() == digests
            assert np.array_equal(pool.cpu().numpy(), memory)
            ids = torch.tensor(target, dtype=torch.int32, device=device)
            completion = WriteCompletion(pinned.address + 4096, turn + 1)
            workspace = ScatterWorkspace(device, 4096)
            kv_digest(PoolAddress(pool.data_ptr(), geometry.layers), ids, PIECE, workspace, completion, Tuning(4))
            torch.cuda.synchronize()
            assert view[513:517].tolist() == digests
            pool.zero_()
            torch.cuda.synchronize()
            pipe.send(turn)
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        pinned.close()


def test_a_handle_that_is_none_is_refused():
    with pytest.raises(CudaFailed, match="64 bytes"):
        PeerMemory(IpcPlace(b"short", 0), torch.device("cuda", 0))
    with pytest.raises(CudaFailed, match="cudaIpcOpenMemHandle"):
        PeerMemory(IpcPlace(bytes(64), 0), torch.device("cuda", 0))
    torch.zeros(8, device="cuda").sum().item()  # the device still works


def test_host_memory_is_read_by_the_other_side_as_soon_as_its_word_is_there(path):
    """Ordering: bytes into host memory, then the word; the reader asks nothing of the device."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    geometry = PoolGeometry(layout(16), NUM_BLOCKS)
    staging_map = mmap.mmap(-1, -(-geometry.num_bytes // 4096) * 4096)
    staging = np.frombuffer(staging_map, dtype=np.uint8)
    words = map_words(path)
    pinned, pinned_words = PinnedMemory(staging), PinnedMemory(words)
    view, workspace = words.view(np.uint64), ScatterWorkspace(device, 4096)
    ids = torch.from_numpy(blocks_of(16, 1)).to(device)
    content = [source_content(geometry, seed).to(device) for seed in (1, 2)]
    expected = [torch.from_numpy(staging[: geometry.num_bytes].copy()) for _ in content]
    for want, pool in zip(expected, content, strict=True):
        io = PoolIO(pool.cpu().numpy(), geometry)
        for layer in range(4):
            io.copy(ids.tolist(), PoolIO(want.numpy(), geometry), ids.tolist(), KVRange(layer, 0, PIECE.count, 0, 8))
    for turn in range(20):
        pool = content[turn % 2]
        kv_scatter(
            PoolAddress(pool.data_ptr(), geometry.layers), ids, PoolAddress(pinned.address, geometry.layers), ids,
            PIECE, workspace, WriteCompletion(pinned_words.address, turn + 1), Tuning(16),
        )  # fmt: skip
        give_up_s = time.monotonic() + WAIT_S
        while int(view[0]) != turn + 1:
            assert time.monotonic() < give_up_s
        assert np.array_equal(staging[: geometry.num_bytes], expected[turn % 2].numpy())
    torch.cuda.synchronize()
    pinned.close()
    pinned_words.close()
