"""The pwrite data path: what it writes is what shm writes, and nothing is opened that is not proved."""

import dataclasses
import os

import pytest

from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused
from baton.kvtransfer.transports.pwrite import PwriteOpener
from baton.kvtransfer.transports.shm import ShmOpener
from baton.proto import kv_pb2
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.test_shm import EPOCH, EXTRA, Target, make_source

pytestmark = pytest.mark.fast
SIZES = [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)]


@pytest.fixture
def make_target():
    targets = []

    def make(*args, **kwargs):
        targets.append(Target(*args, **kwargs))
        return targets[-1]

    yield make
    for target in targets:
        target.region.close()


def offer_of(target, **changes):
    told = kv_pb2.ShmOffer.FromString(target.offer.shm.SerializeToString())
    for name, value in changes.items():
        setattr(told, name, value)
    return kv_pb2.DataPathOffer(data_path="pwrite", details=told.SerializeToString())


def open_to(source, target):
    return PwriteOpener(source, "here").open(offer_of(target), EPOCH, "here")


@pytest.mark.parametrize(("p_size", "d_size"), SIZES)
@pytest.mark.parametrize(("p_block", "d_block", "num_kv_heads"), [(16, 16, 4), (16, 64, 2), (64, 16, 4)])
def test_every_byte_is_where_shm_puts_it(make_target, p_size, d_size, p_block, d_block, num_kv_heads):
    layout = make_layout(num_kv_heads=num_kv_heads, block_size=p_block, more=EXTRA, dtype="float16")
    theirs = dataclasses.replace(layout, block_size=d_block)
    target, wanted = make_target(theirs, size=d_size), make_target(theirs, size=d_size)
    blocks, target_blocks = (9, 2, 14, 4, 0), (11, 3, 7, 5, 8)
    for rank in range(p_size):
        source = make_source(layout, rank, p_size)
        data_path = open_to(source, target)
        reference = ShmOpener(source, "here").open(wanted.offer, EPOCH, "here")
        for layer in range(layout.num_layers):
            heads = layout.pushed_heads(layer, rank, p_size)
            positions = (0, 1) if layer == layout.num_layers - 1 else (5, 70)
            for own in layout.pushed_positions(layer, *positions, rank, p_size) if heads.count else ():
                span = KVRange(layer, own.first, own.count, heads.first, heads.count)
                found = data_path.write(blocks, target_blocks, span, with_digest=True)
                assert found.done
                assert found.digest == reference.write(blocks, target_blocks, span, with_digest=True).digest
        data_path.close()
    assert any(any(pool) for pool in target.bytes)
    assert target.bytes == wanted.bytes


def test_without_digest_none_is_made(make_target):
    layout = make_layout()
    data_path = open_to(make_source(layout), make_target(layout))
    assert data_path.write((1, 2), (6, 3), KVRange(1, 0, 20, 0, 2), with_digest=False).digest is None
    assert (data_path.name, data_path.num_blocks, data_path.drain(0)) == ("pwrite", 12, True)
    data_path.outlived()
    data_path.close()


def test_another_life_of_the_memory_and_a_closed_path_are_written_no_more(make_target):
    layout = make_layout()
    target = make_target(layout)
    data_path = open_to(make_source(layout), target)
    span = KVRange(0, 0, 20, 0, 2)
    target.region.epoch = EPOCH + 1
    with pytest.raises(DataPathFailed, match="another incarnation"):
        data_path.write((1, 2), (6, 3), span, with_digest=False)
    target.region.epoch = EPOCH
    data_path.close()
    data_path.close()
    with pytest.raises(DataPathFailed, match="another incarnation"):
        data_path.write((1, 2), (6, 3), span, with_digest=False)
    assert not any(any(pool) for pool in target.bytes)


def test_a_write_that_fails_or_is_short_is_told(make_target, monkeypatch):
    layout = make_layout()
    data_path = open_to(make_source(layout), make_target(layout))
    write = lambda: data_path.write((1, 2), (6, 3), KVRange(0, 0, 20, 0, 2), with_digest=False)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, payload, place: len(payload) - 1)
        with pytest.raises(DataPathFailed, match="took"):
            write()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DataPathFailed, match="No space"):
            write()
    write()
    data_path.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"path": "/dev/shm/baton-kv-none"}, "cannot be opened"),
        ({"path": "/dev/shm/baton\0kv"}, "cannot be opened"),
        ({"path": "/etc/passwd"}, "is not in"),
        ({"path": ""}, "is not in"),
        ({"nonce": bytes(8)}, "another region"),
    ],
)
def test_what_is_not_proved_is_refused(make_target, changes, why):
    layout = make_layout()
    target = make_target(layout)
    opener = PwriteOpener(make_source(layout), "here")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataPathRefused, match=why):
        opener.open(offer_of(target, **changes), EPOCH, "here")
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_hosts_incarnations_pools_and_nonsense_are_refused(make_target):
    layout = make_layout()
    target = make_target(layout)
    opener = PwriteOpener(make_source(layout), "here")
    assert opener.problem == ""
    with pytest.raises(DataPathRefused, match="another host"):
        opener.open(offer_of(target), EPOCH, "there")
    with pytest.raises(DataPathRefused, match="another incarnation"):
        opener.open(offer_of(target), EPOCH + 1, "here")
    with pytest.raises(DataPathRefused, match="no message"):
        opener.open(kv_pb2.DataPathOffer(data_path="pwrite", details=b"\xff\xff"), EPOCH, "here")
    with pytest.raises(DataPathRefused, match="no pools"):
        opener.open(kv_pb2.DataPathOffer(data_path="pwrite"), EPOCH, "here")
    moved = kv_pb2.ShmOffer.FromString(offer_of(target).details)
    moved.pools[0].offset_bytes += 4096
    with pytest.raises(DataPathRefused, match="other pools"):
        opener.open(kv_pb2.DataPathOffer(data_path="pwrite", details=moved.SerializeToString()), EPOCH, "here")
