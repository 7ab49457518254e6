"""Files in shared memory: their order, their room, and what becomes of those whose owner is dead."""

import os
import signal
import struct
import subprocess
import sys

import pytest

from baton.core.errors import ConfigInvalid, ProtocolError
from baton.kvtransfer import shared_region
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile, incarnation_path, is_over, sweep_incarnations
from baton.kvtransfer.receiver.link import ReceiverLink
from baton.kvtransfer.shared_region import NONCE_AT, NONCE_BYTES, PAGE_BYTES, SharedRegion, sweep
from baton.tests.shared_memory import owned_by

pytestmark = pytest.mark.fast

HOLD = """
import sys
from baton.kvtransfer.protocol.incarnation_file import IncarnationFile
from baton.kvtransfer.shared_region import SharedRegion
region = SharedRegion.create(link_bytes=100, pool_bytes=[5000])
life = IncarnationFile(int(sys.argv[1]), 3)
print(region.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def region():
    region = SharedRegion.create(link_bytes=5000, pool_bytes=[10_000, 4096])
    yield region
    region.close()


def test_both_sides_see_the_same_memory(region):
    other = SharedRegion.attach(region.path, region.nonce)
    assert (other.pools, other.num_bytes) == (region.pools, region.num_bytes)
    assert [len(other.pool(0)), len(other.pool(1)), len(other.link)] == [10_000, 4096, 5000]
    for place in region.pools:
        assert place.offset_bytes % PAGE_BYTES == 0
    region.pool(0)[9_999] = 1
    region.pool(1)[0] = 2
    region.link[4_999] = 3
    region.epoch = 2**64 - 1
    assert (other.pool(0)[9_999], other.pool(1)[0], other.link[4_999], other.epoch) == (1, 2, 3, 2**64 - 1)
    data = region.path.read_bytes()
    assert data[NONCE_AT : NONCE_AT + NONCE_BYTES] == region.nonce.to_bytes(NONCE_BYTES, "little")
    assert sum(data) > 0
    other.close()
    assert region.path.exists(), "only its owner takes it away"


def test_a_link_in_a_region_joins_two_sides(region):
    num_bytes = ReceiverLink.num_bytes(8, 64)
    own = SharedRegion.create(link_bytes=num_bytes, pool_bytes=[1])
    other = SharedRegion.attach(own.path, own.nonce)
    here, there = ReceiverLink(own.link, 8, 64), ReceiverLink(other.link, 8, 64)
    here.commands.push(b"one")
    there.events.push(b"two")
    there.words.set(7, 9)
    there.beat()
    there.set_counts({"a": 5, "b": 6})
    assert (there.commands.pop(), here.events.pop(), here.words.get(7), here.num_beats) == (b"one", b"two", 9, 1)
    assert here.counts(("a", "b")) == {"a": 5, "b": 6}
    there.events.push(b"three")
    here.reset()
    assert (here.events.pop(), here.words.get(7), here.num_beats, here.counts(("a",))) == (None, 0, 0, {"a": 0})
    own.close()


def test_another_file_is_refused(region, tmp_path):
    with pytest.raises(ProtocolError, match="another region"):
        SharedRegion.attach(region.path, region.nonce ^ 1)
    for content in (b"", b"BATONKV1" + bytes(120), region.path.read_bytes()[:-1]):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(ProtocolError):
            SharedRegion.attach(path, region.nonce)
    with pytest.raises(ProtocolError, match="No such file"):
        SharedRegion.attach(tmp_path / "none", 1)
    link = tmp_path / "link"
    link.symlink_to(region.path)
    with pytest.raises(ProtocolError):
        SharedRegion.attach(link, region.nonce)


@pytest.mark.parametrize(
    "place",
    [(1 << 40, 4096), (2 * PAGE_BYTES, 1 << 40), (2 * PAGE_BYTES + 8, 64), (0, 64), (1 << 63, 1 << 63)],
)
def test_a_file_whose_pools_do_not_lie_in_it_is_refused(region, place):
    """What stands in it is its maker's word, and the process that maps it may be another's."""
    struct.pack_into("<QQ", region._memory, 128 + 16, *place)
    with pytest.raises(ProtocolError, match="pools that do not lie in it"):
        SharedRegion.attach(region.path, region.nonce)


def test_a_file_that_ends_in_its_header_is_refused(region, tmp_path):
    header = bytearray(region.path.read_bytes()[:40])
    struct.pack_into("<Q", header, 32, len(header))
    (tmp_path / "file").write_bytes(header)
    with pytest.raises(ProtocolError, match="another region"):
        SharedRegion.attach(tmp_path / "file", region.nonce)


def test_more_than_there_is_names_the_key():
    before = owned_by({os.getpid()})
    with pytest.raises(ConfigInvalid, match=r"^some_key: \d+ MiB of shared memory are wanted") as refused:
        SharedRegion.create(link_bytes=1, pool_bytes=[1 << 50], key="some_key")
    assert refused.value.fields["keys"] == ["some_key"]
    assert owned_by({os.getpid()}) == before


def test_a_machine_without_shared_memory_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_region, "DIRECTORY", tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="no shared memory in"):
        SharedRegion.create(link_bytes=1, pool_bytes=[1])


@pytest.mark.long
def test_what_dead_owners_left_is_swept_and_nothing_else(region):
    epoch = os.getpid() << 32
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(epoch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path = shared_region.DIRECTORY / os.path.basename(owner.stdout.readline().strip())
    incarnation = incarnation_path(epoch, 3)
    assert path not in sweep()
    assert not is_over(incarnation)
    assert incarnation not in sweep_incarnations()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    assert path.exists()
    assert is_over(incarnation)
    # Another process may sweep at the same time.
    sweep()
    sweep_incarnations()
    assert not path.exists()
    assert not incarnation.exists()
    assert region.path.exists()


def test_a_life_that_was_closed_is_over_and_a_stranger_proves_nothing(tmp_path):
    incarnation = IncarnationFile(os.getpid(), 1)
    assert not is_over(incarnation.path)
    incarnation.close()
    incarnation.close()
    assert is_over(incarnation.path)
    stranger = tmp_path / "file"
    stranger.write_text("not a number")
    assert not is_over(stranger)
