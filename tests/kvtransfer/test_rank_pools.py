"""How rank 0 reaches the pools of other ranks, without CUDA: a stand-in opens memory of this process."""

import contextlib
import importlib
import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.config import KVTransferConfig
from baton.core.errors import WorkerStartFailed
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.actions import DigestWanted
from baton.kvtransfer.receiver.device_jobs import RankDigests, flag_page
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.kept import state

CPU = torch.device("cpu")
LAYOUT = make_layout(num_kv_heads=4)
NUM_BLOCKS = 6
MODULE = "baton.kernels.cuda_ipc"
USERS = ("baton.kvtransfer.rank_pools", "baton.kvtransfer.receiver.device")


class FakeCuda:
    """`cuda_ipc` over addresses of this process."""

    def __init__(self):
        self.unshared = set()  # addresses that cannot be exported
        self.unreached = set()  # GPUs
        self.short = False
        self.opened, self.closed = [], []

    def module(self):
        fake, found = self, types.ModuleType(MODULE)

        class CudaFailed(Exception):
            pass

        class IpcPlace(types.SimpleNamespace):
            def __init__(self, handle, offset_bytes):
                super().__init__(handle=handle, offset_bytes=offset_bytes)

        def export(address, device):
            if address in fake.unshared:
                raise CudaFailed("cudaIpcGetMemHandle failed: cudaErrorInvalidValue")
            return IpcPlace((address - 64).to_bytes(64, "little"), 64)

        class PeerMemory:
            def __init__(self, place, device):
                base = int.from_bytes(place.handle, "little")
                if base in fake.closed:
                    raise CudaFailed("cudaIpcOpenMemHandle failed: cudaErrorInvalidValue")
                self.address = base + place.offset_bytes
                fake.opened.append(self.address)

            def check(self, num_bytes):
                return not fake.short

            def close(self):
                fake.opened.remove(self.address)
                if self.address in fake.unshared:
                    raise CudaFailed("its owner is gone")

        class PinnedMemory:
            def __init__(self, memory):
                self.memory, self.address = memory, memory.ctypes.data

            def close(self):
                fake.closed.append(self)

        found.CudaFailed, found.IpcPlace, found.export, found.PeerMemory = CudaFailed, IpcPlace, export, PeerMemory
        found.PinnedMemory = PinnedMemory
        found.device_uuid = lambda device: "GPU-own"
        found.can_reach = lambda device, uuid: uuid not in fake.unreached
        return found


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, and the modules that use it."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, MODULE, fake.module())
    for name in USERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    fake.streams = []

    class Stream:
        def __init__(self, device):
            self.num_waits = 0
            fake.streams.append(self)

        def synchronize(self):
            self.num_waits += 1

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    fake.rank_pools = importlib.import_module(USERS[0])
    fake.device_receiver = importlib.import_module(USERS[1])
    yield fake
    for name in USERS:
        sys.modules.pop(name, None)


def pools_of(size):
    return [KVPool(LAYOUT, NUM_BLOCKS, CPU, rank=rank, size=size) for rank in range(size)]


def said_by(cuda, pool):
    """What a rank tells the others."""
    said = []

    def gather(data):
        said.append(data)
        return [json.dumps({"pool": {"ipc_handle": "", "ipc_offset_bytes": 0, "device_uuid": ""}}).encode()]

    cuda.rank_pools.share_pool(pool, gather)
    return said[0]


def share(cuda, pools):
    messages = []
    for pool in pools:
        try:
            messages.append(said_by(cuda, pool))
        except WorkerStartFailed:  # of its own message
            raise AssertionError("a rank judges before it has heard all") from None
    return [cuda.rank_pools.share_pool(pool, lambda data: messages) for pool in pools]


@pytest.mark.fast
def test_every_rank_hears_of_all_pools_and_rank_0_opens_the_others(cuda):
    pools = pools_of(4)
    places = share(cuda, pools)
    assert all(found == places[0] for found in places)
    opened = cuda.rank_pools.RankPools(pools[0], places[0])
    assert [pool.address for pool in opened.addresses] == [pool.data_bytes.data_ptr() for pool in pools]
    assert [pool.layers for pool in opened.addresses] == [pool.geometry.layers for pool in pools]
    assert opened.places == places[0]
    assert len(cuda.opened) == 3
    opened.close()
    assert not cuda.opened


@pytest.mark.fast
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pool_that_cannot_be_shared_stops_every_rank_with_the_same_words(cuda, rank):
    pools = pools_of(2)
    cuda.unshared = {pools[rank].data_bytes.data_ptr()}
    messages = [said_by(cuda, pool) for pool in pools]
    errors = []
    for pool in pools:
        with pytest.raises(WorkerStartFailed, match=f"pool of rank {rank} cannot be shared.*IpcGetMemHandle") as failed:
            cuda.rank_pools.share_pool(pool, lambda data: messages)
        errors.append((failed.value.message, failed.value.fields))
    assert errors[0] == errors[1]
    assert errors[0][1] == {"rank": rank}


@pytest.mark.fast
def test_one_rank_alone_has_its_own_pool_shared_or_not(cuda, caplog):
    (pool,) = pools_of(1)
    alone = cuda.rank_pools.RankPools(pool)
    assert len(alone.addresses) == len(alone.places) == 1
    cuda.unshared = {pool.data_bytes.data_ptr()}
    alone = cuda.rank_pools.RankPools(pool)
    assert (len(alone.addresses), alone.places) == (1, ())
    assert "no nvlink" in caplog.text


@pytest.mark.fast
def test_a_gpu_without_peer_access_is_named_and_what_was_opened_is_closed(cuda):
    pools = pools_of(4)
    places = list(share(cuda, pools)[0])
    places[2] = type(places[2])(places[2].ipc_handle, places[2].ipc_offset_bytes, "GPU-far")
    cuda.unreached = {"GPU-far"}
    with pytest.raises(WorkerStartFailed, match="rank 2: it has no peer access to GPU GPU-far") as failed:
        cuda.rank_pools.RankPools(pools[0], places)
    assert failed.value.fields == {"rank": 2}
    assert not cuda.opened


@pytest.mark.fast
def test_a_pool_that_is_not_to_be_opened_or_too_short_is_a_start_error(cuda):
    pools = pools_of(2)
    places = share(cuda, pools)[0]
    cuda.short = True
    with pytest.raises(WorkerStartFailed, match="rank 1: it reaches beyond its memory"):
        cuda.rank_pools.RankPools(pools[0], places)
    cuda.closed = [pools[1].data_bytes.data_ptr() - 64]
    with pytest.raises(WorkerStartFailed, match="rank 1: cudaIpcOpenMemHandle failed"):
        cuda.rank_pools.RankPools(pools[0], places)
    assert not cuda.opened


@pytest.mark.fast
def test_closing_goes_on_when_an_owner_is_gone(cuda, caplog):
    pools = pools_of(4)
    opened = cuda.rank_pools.RankPools(pools[0], share(cuda, pools)[0])
    cuda.unshared = {pools[1].data_bytes.data_ptr()}
    opened.close()
    assert not cuda.opened
    assert "not unmapped" in caplog.text


def test_launches_go_to_the_pool_of_their_rank_and_one_answer_comes_of_all(cuda):
    """`DeviceReceiver` over two pools, with the kernels in Triton's interpreter."""
    pools = pools_of(2)
    opened = cuda.rank_pools.RankPools(pools[0], share(cuda, pools)[0])
    geometry = type(pools[0].geometry)(LAYOUT, 4)
    memory = cuda.device_receiver.private_memory(geometry)
    staging = np.frombuffer(memory.staging, dtype=np.uint8)
    staging[:] = np.random.default_rng(1).integers(0, 256, len(staging), dtype=np.uint8)
    flags = flag_page(memory.flags)
    source = PoolIO(staging, geometry)
    incoming = cuda.device_receiver.DeviceReceiver(opened, pools[0], geometry, memory)
    assert len(cuda.streams) == 2
    table, from_blocks, answers = BlockTable((5, 1, 3), 4), BlockTable((2, 0, 1), 4), []
    for rank, flag in enumerate(flags.claim(2)):
        wanted = DigestWanted(
            attempt=AttemptKey("r", 0), rank=rank, flag=flag.slot, sequence=flag.sequence, layers=(0, 1, 2),
            first=0, count=11, staging=from_blocks, has_digest=True,
        )  # fmt: skip
        incoming.launch(wanted, table)
        assert flags.is_up(flag)
        answers.append(flags.digests(flag, 3))
    together = RankDigests(LAYOUT, 2)
    for layer, digests in enumerate(zip(*answers, strict=True)):
        span = KVRange(layer, 0, 11, 0, 4)
        assert together.total(layer, digests) == source.digest(from_blocks.blocks, span)
        for pool in pools:
            io, heads = PoolIO(pool.bytes_view, pool.geometry), pool.geometry.layer(layer).heads
            part = KVRange(layer, 0, 11, heads.first, heads.count)
            assert io.read(table.blocks, part, 4) == source.read(from_blocks.blocks, part, 4)
    before = [stream.num_waits for stream in cuda.streams]
    incoming.close()
    assert [stream.num_waits for stream in cuda.streams] == [count + 1 for count in before]
    assert not cuda.opened
    assert len(cuda.closed) == 2, "staging and flags are unlocked"


def test_staging_holds_every_head_whatever_a_rank_holds(cuda):
    (alone,), (first, _) = pools_of(1), pools_of(2)
    config = KVTransferConfig(staging_mib=1)
    staging = cuda.device_receiver.staging_geometry
    assert staging(first, config).num_blocks == staging(alone, config).num_blocks > 0


@pytest.mark.parametrize(("staging_mib", "num_slots"), [(1, 1), (8, 3), (64, 16)])
def test_state_slots_leave_half_of_staging_for_rows(staging_mib, num_slots, cuda):
    """Sixteen of the 35B's 64 MB each took all of the default's GiB, and hand-offs by sockets had 16 positions."""
    layout = replace(LAYOUT, layers=(*LAYOUT.layers, state(2, 1 << 17, dtype="float32", length=16)))
    assert layout.bytes_per_state_slot == 1 << 20
    pool = KVPool(layout, 4096, torch.device("cpu"), num_state_slots=2)
    staging = cuda.device_receiver.staging_geometry(pool, KVTransferConfig(staging_mib=staging_mib))
    assert staging.num_state_slots == num_slots
    if staging_mib > 2:
        assert staging.num_bytes <= staging_mib << 20
        rows_bytes = staging.num_blocks * layout.bytes_per_block
        assert (
            staging.num_blocks == pool.num_blocks or rows_bytes > (staging_mib << 20) // 2 - 2 * layout.bytes_per_block
        )
