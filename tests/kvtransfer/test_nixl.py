"""The NIXL data path over UCX on loopback: addresses against the pool's own order, writes, refusals by name."""

import importlib.util
import os

import numpy as np
import pytest

from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused
from baton.kvtransfer.transports import nixl_agent
from baton.kvtransfer.transports.nixl import NixlOpener, NixlPools, agent_name, read_offer, span_ranges
from baton.proto import kv_pb2
from baton.tests.kvtransfer.kept import geometry_of, latent, state

EPOCH = 0xABCDEF
NUM_BLOCKS = 12
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed (baton-pd[nixl])"
)


def layout_of(block_size=16, heads=4):
    extra = (latent(24), state(heads, 40))
    return KVLayout.of_attention(
        model_hash="m",
        num_layers=2,
        num_kv_heads=heads,
        head_dim=8,
        block_size=block_size,
        dtype="bfloat16",
        more=extra,
    )


def pool_of(layout, *, rank=0, size=1, seed=None):
    """(memory, PoolIO) of one rank, random or zero."""
    geometry = geometry_of(layout, NUM_BLOCKS, rank, size)
    memory = np.zeros(geometry.num_bytes, dtype=np.uint8)
    if seed is not None:
        memory[:] = np.random.default_rng(seed).integers(0, 256, size=memory.size, dtype=np.uint8)
    return memory, PoolIO(memory, geometry)


def place_of(io):
    geometry = io.geometry
    return kv_pb2.PoolPlace(
        num_bytes=geometry.num_bytes,
        num_blocks=geometry.num_blocks,
        block_size=geometry.layout.block_size,
        num_state_slots=geometry.num_state_slots,
        tp_rank=geometry.rank,
        tp_size=geometry.size,
    )


SPANS = [
    KVRange(0, 0, 48, 0, 4),
    KVRange(1, 5, 40, 0, 4),
    KVRange(0, 16, 16, 1, 2),
    KVRange(2, 3, 50, 0, 1),
    KVRange(3, 0, 1, 0, 4),
]


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("span", SPANS, ids=repr)
def test_addresses_are_those_that_the_pool_itself_would_copy(sizes, span):
    memory, source = pool_of(layout_of(sizes[0]), seed=3)
    expected, target = pool_of(layout_of(sizes[1]))
    blocks, target_blocks = [7, 3, 9, 1][: 64 // sizes[0]], [4, 2, 8, 11][: 64 // sizes[1]]
    source.copy(blocks, target, target_blocks, span)
    found = np.zeros_like(expected)
    mine, theirs = source.geometry.layer(span.layer), target.geometry.layer(span.layer)
    for here, there, num_bytes in span_ranges(mine, theirs, blocks, target_blocks, span):
        found[there : there + num_bytes] = memory[here : here + num_bytes]
    assert np.array_equal(found, expected)


@pytest.mark.fast
def test_an_offer_that_makes_no_sense_is_refused():
    layout = layout_of()
    io = pool_of(layout)[1]
    good = kv_pb2.NixlOffer(agent=agent_name("decode", EPOCH))
    good.pools.add(place=place_of(io), address=4096, memory="DRAM")
    assert read_offer(good, EPOCH, layout)[0].geometry.num_bytes == io.geometry.num_bytes

    def damaged(change):
        offer = kv_pb2.NixlOffer.FromString(good.SerializeToString())
        change(offer)
        return offer

    for offer in (
        kv_pb2.NixlOffer(),
        damaged(lambda o: setattr(o, "agent", "somebody")),
        damaged(lambda o: setattr(o.pools[0], "memory", "VRAM")),
        damaged(lambda o: setattr(o.pools[0].place, "num_bytes", 8)),
        damaged(lambda o: setattr(o.pools[0].place, "num_blocks", 0)),
        damaged(lambda o: setattr(o.pools[0].place, "block_size", 0)),
        damaged(lambda o: setattr(o.pools[0].place, "block_size", 17)),
        damaged(lambda o: setattr(o.pools[0].place, "tp_size", 2)),
        damaged(lambda o: setattr(o.pools[0].place, "tp_size", 1 << 31)),
        damaged(lambda o: o.pools.add(place=place_of(io))),
        damaged(lambda o: o.pools.add(place=place_of(pool_of(layout)[1]), memory="DRAM")),
    ):
        with pytest.raises(DataPathRefused):
            read_offer(offer, EPOCH, layout)
    with pytest.raises(DataPathRefused, match="incarnation"):
        read_offer(good, EPOCH + 1, layout)


@pytest.mark.fast
def test_without_nixl_the_data_path_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda name: None)
    memory, io = pool_of(layout_of())
    assert "baton-pd[nixl]" in NixlOpener(EPOCH, io, memory).problem
    with pytest.raises(DataPathRefused, match="nixl"):
        NixlPools(EPOCH, [memory], [place_of(io)])


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


class Peers:
    """A prefill rank and a decode worker with a number of ranks, in one process."""

    def __init__(self, sizes=(16, 16), decode_ranks=1):
        self.memory, self.io = pool_of(layout_of(sizes[0]), seed=5)
        self.targets = [pool_of(layout_of(sizes[1]), rank=r, size=decode_ranks) for r in range(decode_ranks)]
        ios = [io for _, io in self.targets]
        self.pools = NixlPools(EPOCH, [memory for memory, _ in self.targets], [place_of(io) for io in ios])
        self.opener = NixlOpener(EPOCH + 1, self.io, self.memory)
        assert self.opener.problem == ""

    def open(self):
        return self.opener.open(self.pools.offer(), EPOCH, "host")

    def close(self):
        self.opener.close()
        self.pools.close()


@needs_nixl
@pytest.mark.parametrize(("sizes", "ranks"), [((16, 16), 1), ((16, 16), 2), ((16, 64), 1), ((64, 16), 2)])
def test_real_writes_arrive_byte_for_byte(loopback, sizes, ranks):
    peers = Peers(sizes, ranks)
    data_path = peers.open()
    blocks, target_blocks = [7, 3, 9, 1][: 64 // sizes[0]], [4, 2, 8, 11][: 64 // sizes[1]]
    expected = [pool_of(layout_of(sizes[1]), rank=r, size=ranks) for r in range(ranks)]
    written = []
    for span in SPANS:
        written.append((span, data_path.write(blocks, target_blocks, span, with_digest=True)))
        for _, target in expected:
            held = target.geometry.layer(span.layer).heads
            first, stop = max(span.head_first, held.first), min(span.head_first + span.head_count, held.stop)
            if first < stop:
                part = KVRange(span.layer, span.first, span.count, first, stop - first)
                peers.io.copy(blocks, target, target_blocks, part)
    assert data_path.drain(20)
    for span, write in written:
        assert write.done
        assert write.digest == peers.io.digest(blocks, span)
    for (found, _), (wanted, target) in zip(peers.targets, expected, strict=True):
        scratch = target.geometry.layer(0)
        start = scratch.offset_bytes + (scratch.num_blocks - 1) * scratch.block_bytes
        found[start : start + 8] = 0
        assert np.array_equal(found, wanted)
    data_path.close()
    with pytest.raises(DataPathFailed):
        data_path.write(blocks, target_blocks, SPANS[0], with_digest=False)
    peers.close()


@needs_nixl
def test_an_offer_of_another_life_or_with_wild_metadata_is_refused(loopback):
    peers = Peers()
    offer = peers.pools.offer()
    with pytest.raises(DataPathRefused, match="incarnation"):
        peers.opener.open(offer, EPOCH + 7, "host")
    offer.nixl.metadata = b"nonsense"
    with pytest.raises(DataPathRefused):
        peers.opener.open(offer, EPOCH, "host")
    assert peers.open().num_blocks == NUM_BLOCKS  # the agent still works
    peers.close()


STOPPED_PEER = """
import sys, numpy as np
from baton.kvtransfer.transports.nixl import NixlPools
from baton.tests.kvtransfer.test_nixl import EPOCH, layout_of, place_of, pool_of
memory, io = pool_of(layout_of())
pools = NixlPools(EPOCH, [memory], [place_of(io)])
sys.stdout.buffer.write(pools.offer().SerializeToString().hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.readline()
"""


@needs_nixl
def test_a_write_to_a_peer_that_died_never_claims_to_be_over_until_its_life_has_ended(loopback):
    import subprocess
    import sys
    import time

    peer = subprocess.Popen(
        [sys.executable, "-P", "-c", STOPPED_PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    lines = (line.strip() for line in peer.stdout)
    offer_hex = next(line for line in lines if len(line) > 200 and line.isalnum())
    offer = kv_pb2.DataPathOffer.FromString(bytes.fromhex(offer_hex.decode()))
    memory, io = pool_of(layout_of(), seed=5)
    opener = NixlOpener(EPOCH + 1, io, memory)
    data_path = opener.open(offer, EPOCH, "host")
    write = data_path.write([1, 2, 3], [4, 5, 6], SPANS[0], with_digest=False)
    assert data_path.drain(10)
    assert write.done
    peer.kill()
    peer.communicate()
    time.sleep(0.2)
    try:
        lost = data_path.write([1, 2, 3], [4, 5, 6], SPANS[0], with_digest=False)
    except DataPathFailed:
        pass  # it noticed at once: nothing was written
    else:
        assert not data_path.drain(1.0)
        assert not lost.done
        data_path.close()
        with pytest.raises(DataPathFailed):
            assert lost.done
    opener.close()
