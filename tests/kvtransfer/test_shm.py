"""The shm data path: every byte to the block and head it belongs to, and nothing opened that is not proved."""

import dataclasses
import itertools

import numpy as np
import pytest

from baton.kvcache.allocator import BlockTable
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.sender.actions import GrantInfo
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused
from baton.kvtransfer.sender.route import Route
from baton.kvtransfer.shared_region import SharedRegion
from baton.kvtransfer.transports.shm import ShmOpener, geometries_of
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.kept import geometry_of, latent, state

pytestmark = pytest.mark.fast
EPOCH = 0x8000000000000001
EXTRA = (latent(12), state(4, 20))


def offer_of(region, geometries):
    places = [
        kv_pb2.PoolPlace(
            offset_bytes=place.offset_bytes,
            num_bytes=place.num_bytes,
            num_blocks=geometry.num_blocks,
            block_size=geometry.layout.block_size,
            num_state_slots=geometry.num_state_slots,
            tp_rank=geometry.rank,
            tp_size=geometry.size,
        )
        for place, geometry in zip(region.pools, geometries, strict=True)
    ]
    nonce = region.nonce.to_bytes(8, "little")
    return kv_pb2.DataPathOffer(data_path="shm", shm=kv_pb2.ShmOffer(path=str(region.path), nonce=nonce, pools=places))


class Target:
    """A decode worker's memory."""

    def __init__(self, layout, num_blocks=12, size=1):
        self.geometries = [geometry_of(layout, num_blocks, rank, size) for rank in range(size)]
        self.region = SharedRegion.create(link_bytes=64, pool_bytes=[g.num_bytes for g in self.geometries])
        self.region.epoch = EPOCH
        self.pools = [
            PoolIO(np.frombuffer(self.region.pool(rank), np.uint8), geometry)
            for rank, geometry in enumerate(self.geometries)
        ]
        self.offer = offer_of(self.region, self.geometries)

    @property
    def bytes(self):
        return [bytes(self.region.pool(rank)) for rank in range(len(self.pools))]


@pytest.fixture
def make_target():
    targets = []

    def make(*args, **kwargs):
        targets.append(Target(*args, **kwargs))
        return targets[-1]

    yield make
    for target in targets:
        target.region.close()


def make_source(layout, rank=0, size=1, num_blocks=15):
    geometry = geometry_of(layout, num_blocks, rank, size)
    rng = np.random.default_rng(3 + rank)
    return PoolIO(rng.integers(0, 256, geometry.num_bytes, np.uint8), geometry)


def row(pool, blocks, layer, head, part, position):
    """Bytes of one row, by plain arithmetic."""
    g = pool.geometry.layer(layer)
    index, offset = divmod(position, g.rows_per_block)
    start = g.offset_bytes + blocks[index] * g.block_bytes + (head - g.head_first) * g.head_bytes
    start += part * g.part_bytes + offset * g.row_bytes
    return bytes(pool._memory[start : start + g.row_bytes])


SIZES = [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (4, 4)]


@pytest.mark.parametrize(("p_size", "d_size"), SIZES)
@pytest.mark.parametrize(("p_block", "d_block", "num_kv_heads"), [(16, 16, 4), (16, 64, 2), (64, 16, 4)])
@pytest.mark.long
def test_every_row_lands_once_on_every_rank_that_holds_it(make_target, p_size, d_size, p_block, d_block, num_kv_heads):
    layout = make_layout(num_kv_heads=num_kv_heads, block_size=p_block, more=EXTRA, dtype="float16")
    target = make_target(dataclasses.replace(layout, block_size=d_block), size=d_size)
    prompt_len, first = 75, 5  # neither begins nor ends with a block
    source_blocks, target_blocks = (9, 2, 14, 4, 0), (11, 3, 7, 5, 8)
    sources = [make_source(layout, rank, p_size) for rank in range(p_size)]
    digests = [0] * layout.num_layers
    for rank, source in enumerate(sources):
        data_path = ShmOpener(source, "here").open(target.offer, EPOCH, "here")
        for layer in range(layout.num_layers):
            heads = layout.pushed_heads(layer, rank, p_size)
            is_state = layer == layout.num_layers - 1
            positions = (0, 1) if is_state else (first, prompt_len - first)
            for own in layout.pushed_positions(layer, *positions, rank, p_size) if heads.count else ():
                span = KVRange(layer, own.first, own.count, heads.first, heads.count)
                written = data_path.write(source_blocks, target_blocks, span, with_digest=True)
                assert written.done
                assert written.digest == source.digest(source_blocks, span)
                digests[layer] += written.digest
    for layer, spec in enumerate(layout.layers):
        positions = [0] if spec.is_state else range(prompt_len)
        for head, part, position in itertools.product(range(spec.num_heads), range(spec.num_parts), positions):
            pusher = next(
                rank
                for rank in range(p_size)
                if layout.pushed_heads(layer, rank, p_size).first
                <= head
                < layout.pushed_heads(layer, rank, p_size).stop
                and list(layout.pushed_positions(layer, position, 1, rank, p_size))
            )
            is_pushed = spec.is_state or position >= first
            wanted = row(sources[pusher], source_blocks, layer, head, part, position)
            for pool in target.pools:
                heads = pool.geometry.layer(layer).heads
                if heads.first <= head < heads.stop:
                    found = row(pool, target_blocks, layer, head, part, position)
                    assert found == (wanted if is_pushed else bytes(len(wanted)))


def test_without_digest_none_is_made_and_nothing_beside_the_span_changes(make_target):
    layout = make_layout(block_size=16)
    target, source = make_target(layout), make_source(layout)
    data_path = ShmOpener(source, "here").open(target.offer, EPOCH, "here")
    assert data_path.write((1, 2), (6, 3), KVRange(1, 0, 20, 0, 2), with_digest=False).digest is None
    geometry = target.geometries[0].layer(1)
    memory = np.frombuffer(target.region.pool(0), np.uint8)
    touched = {index // geometry.block_bytes for index in np.flatnonzero(memory) - geometry.offset_bytes}
    assert touched == {6, 3}
    assert data_path.drain(0)
    assert data_path.num_blocks == 12


LATENTS = KVLayout(model_hash="model", layers=(latent(12), latent(12), latent(20)), block_size=16, has_mtp=True)


def owned(target):
    """What a decode worker of these pools offers whose ranks have sequences of their own."""
    offer = changed(target.offer)
    for place in offer.shm.pools:
        place.tp_rank, place.tp_size = 0, 1
    return offer


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_only_the_owner_of_the_blocks_is_written(make_target, owner):
    """Blocks of all pools are numbered on: those of rank 2 of 12 each are 24 to 35."""
    target, source = make_target(LATENTS, size=3), make_source(LATENTS)
    data_path = ShmOpener(source, "here").open(owned(target), EPOCH, "here")
    assert (data_path.num_blocks, data_path.num_state_slots) == (36, 0)
    own = (11, 3, 7)
    for layer in range(3):
        span = KVRange(layer, 5, 30, 0, 1)
        written = data_path.write((9, 2, 14), [12 * owner + block for block in own], span, with_digest=True)
        assert written.digest == source.digest((9, 2, 14), span), "each row counts once"
        for position in range(5, 35):
            found = row(target.pools[owner], own, layer, 0, 0, position)
            assert found == row(source, (9, 2, 14), layer, 0, 0, position)
    assert [any(memory) for memory in target.bytes] == [rank == owner for rank in range(3)]


def test_blocks_of_several_owners_are_not_written(make_target):
    target, source = make_target(LATENTS, size=2), make_source(LATENTS)
    data_path = ShmOpener(source, "here").open(owned(target), EPOCH, "here")
    with pytest.raises(DataPathFailed, match="several ranks' pools"):
        data_path.write((1, 2), (11, 12), KVRange(0, 0, 20, 0, 1), with_digest=True)
    assert not any(map(any, target.bytes))


def test_who_does_not_know_owners_refuses_their_pools(make_target):
    """As senders of before did: each pool is a whole worker's, and there are several."""
    with pytest.raises(DataPathRefused, match="pool 0 of 2 is said to be rank 0 of 1"):
        geometries_of(LATENTS, owned(make_target(LATENTS, size=2)).shm.pools)


def test_pools_of_owners_are_alike_and_hold_no_state(make_target):
    opener = ShmOpener(make_source(LATENTS), "here")
    differ = owned(make_target(LATENTS, size=2))
    differ.shm.pools[1].num_blocks = 11
    with pytest.raises(DataPathRefused, match="different sizes"):
        opener.open(differ, EPOCH, "here")
    stateful = KVLayout(model_hash="m", layers=(latent(12), state(1, 8, whole=True)), block_size=16)
    with pytest.raises(DataPathRefused, match="latents alone"):
        ShmOpener(make_source(stateful), "here").open(owned(make_target(stateful, size=2)), EPOCH, "here")


def test_another_life_of_the_memory_is_written_no_more(make_target):
    layout = make_layout()
    target, source = make_target(layout), make_source(layout)
    data_path = ShmOpener(source, "here").open(target.offer, EPOCH, "here")
    target.region.epoch = EPOCH + 1
    with pytest.raises(DataPathFailed, match="another incarnation"):
        data_path.write((1,), (1,), KVRange(0, 0, 4, 0, 2), with_digest=True)
    target.region.epoch = EPOCH
    data_path.close()
    with pytest.raises(DataPathFailed):
        data_path.write((1,), (1,), KVRange(0, 0, 4, 0, 2), with_digest=True)
    assert not any(map(any, target.bytes))


def changed(offer, **fields):
    other = kv_pb2.DataPathOffer()
    other.CopyFrom(offer)
    for name, value in fields.items():
        if name in ("path", "nonce"):
            setattr(other.shm, name, value)
        else:
            for place in other.shm.pools:
                setattr(place, name, value)
    return other


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": bytes(8)}, "another region"),
        ({"nonce": b""}, "another region"),
        ({"nonce": b"x" * 99}, "another region"),
        ({"path": "/dev/shm/baton-kv-0-0"}, "cannot open"),
        ({"path": "/etc/passwd"}, "no shared region"),
        ({"path": "/dev/shm/../etc/passwd"}, "no shared region"),
        ({"path": "/dev/shm/other"}, "no shared region"),
        ({"path": "/dev/shm/baton-kv-\0"}, "no shared region"),
        ({"path": ""}, "no shared region"),
        ({"num_bytes": 1}, "bytes, not"),
        ({"num_blocks": 11}, "bytes, not"),
        ({"num_blocks": 0}, "0 blocks"),
        ({"block_size": 0}, "blocks of 0"),
        ({"block_size": 3}, "blocks of 3"),
        ({"block_size": 8}, "bytes, not"),
        ({"tp_rank": 1}, "rank 1 of 1"),
        ({"tp_size": 2}, "rank 0 of 2"),
        ({"offset_bytes": 0}, "other pools"),
        ({"offset_bytes": 1 << 40}, "other pools"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_with_the_reason(make_target, changes, reason):
    layout = make_layout()
    target = make_target(layout)
    opener = ShmOpener(make_source(layout), "here")
    with pytest.raises(DataPathRefused, match=reason):
        opener.open(changed(target.offer, **changes), EPOCH, "here")
    opener.open(target.offer, EPOCH, "here")


def test_offers_of_other_hosts_lives_and_shapes_are_refused(make_target, tmp_path):
    layout = make_layout()
    target = make_target(layout)
    opener = ShmOpener(make_source(layout), "here")
    for epoch, host, offer, reason in [
        (EPOCH, "there", target.offer, "another host"),
        (EPOCH + 1, "here", target.offer, "another incarnation"),
        (EPOCH, "here", kv_pb2.DataPathOffer(data_path="shm"), "no pools"),
        (EPOCH, "here", make_target(make_layout(head_dim=16)).offer, "bytes, not"),
    ]:
        with pytest.raises(DataPathRefused, match=reason):
            opener.open(offer, epoch, host)
    two = changed(target.offer)
    two.shm.pools.append(two.shm.pools[0])
    with pytest.raises(DataPathRefused, match="of their own keep latents alone"):
        opener.open(two, EPOCH, "here")
    two.shm.pools[1].tp_rank = 1
    with pytest.raises(DataPathRefused, match="rank 0 of 1"):
        opener.open(two, EPOCH, "here")
    three = changed(target.offer)
    del three.shm.pools[:]
    three.shm.pools.extend(kv_pb2.PoolPlace(num_blocks=12, block_size=4, tp_rank=r, tp_size=3) for r in range(3))
    with pytest.raises(DataPathRefused, match="do not divide"):
        opener.open(three, EPOCH, "here")
    assert opener.problem == ""


def test_a_link_in_the_place_of_the_file_is_not_followed(make_target):
    layout = make_layout()
    target = make_target(layout)
    link = target.region.path.with_name(target.region.path.name + "-link")
    link.symlink_to(target.region.path)
    try:
        with pytest.raises(DataPathRefused, match="cannot open"):
            ShmOpener(make_source(layout), "here").open(changed(target.offer, path=str(link)), EPOCH, "here")
    finally:
        link.unlink()


def test_granted_blocks_are_checked_before_the_first_write(make_target):
    layout = make_layout()
    target = make_target(layout)
    data_path = ShmOpener(make_source(layout), "here").open(target.offer, EPOCH, "here")
    geometry = target.geometries[0]
    route = Route(None, "", geometry, BlockTable((0, 1, 2), 4), 9, opened=data_path)

    def problem_of(*blocks, state_slot=None):
        return route.problem_of(GrantInfo(EPOCH, 1, 1, 1.0, "shm", blocks, 4, state_slot))

    assert problem_of(4, 0, 11) == ""
    assert "block 12 of 12" in problem_of(4, 0, 12)
    assert "4294967295" in problem_of(4, 0, 2**32 - 1)
    assert "twice" in problem_of(4, 0, 4)
    assert "2 blocks of 4 for 9" in problem_of(4, 0)
    grant = GrantInfo(EPOCH, 1, 1, 1.0, "shm", (4, 0), 64)  # as a HELLO_REPLY that lies about its block size says
    assert "2 blocks of 4 for 9" in route.problem_of(grant)
    assert "state slot 0 of 0" in problem_of(4, 0, 11, state_slot=0)


def test_a_granted_state_slot_is_checked_before_the_first_write(make_target):
    layout = make_layout(more=EXTRA)
    target = make_target(layout)
    data_path = ShmOpener(make_source(layout), "here").open(target.offer, EPOCH, "here")
    route = Route(None, "", target.geometries[0], BlockTable((0, 1, 2), 4, 1), 9, opened=data_path)
    for slot, word in ((11, ""), (12, "state slot 12 of 12"), (-1, "slot -1"), (None, "state slot None of 12")):
        assert word in route.problem_of(GrantInfo(EPOCH, 1, 1, 1.0, "shm", (4, 0, 11), 4, slot))
        assert (route.problem_of(GrantInfo(EPOCH, 1, 1, 1.0, "shm", (4, 0, 11), 4, slot)) == "") == (word == "")
