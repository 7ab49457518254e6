"""What of the data paths of a GPU needs none: when a posted write is over, and how gathered blocks become a payload."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.device_stream import FEW, MANY, DeviceStream, tuning_for
from baton.kvtransfer.flag_page import FlagPage
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.sender.data_path import DataPathFailed
from baton.kvtransfer.sender.device_source import _close_up, _gathered_shape
from baton.kvtransfer.transports import nvlink_write
from baton.kvtransfer.transports.nvlink_write import NvlinkWrite
from baton.tests.kvtransfer.conftest import make_layout

pytestmark = pytest.mark.fast
SLOT_WORDS = 8


class FakeEvent:
    def __init__(self, answer=False):
        self.answer = answer
        self.num_asked = 0

    def query(self):
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Posted:
    """A write of three launches, of which the first two count."""

    def __init__(self, answer=False, *, with_digest=True):
        self.buffer = bytearray(FlagPage.num_bytes(4, SLOT_WORDS))
        self.page = FlagPage(self.buffer, SLOT_WORDS)
        self.flags = self.page.claim(3)
        self.event = FakeEvent(answer)
        self.over = []
        launches = list(zip(self.flags, (True, True, False), strict=True))
        self.write = NvlinkWrite(self.page, launches, self.event, with_digest, self.over.append)

    def end(self, index, digest):
        flag = self.flags[index]
        FlagPage.raise_flag(self.buffer, SLOT_WORDS, flag.slot, flag.sequence, [digest])


def test_a_write_is_over_with_the_last_word_and_gives_its_flags_back_once():
    posted = Posted()
    posted.end(0, 2**64 - 1)
    posted.end(2, 9)
    assert not posted.write.done
    assert not posted.over
    posted.end(1, 5)
    assert posted.write.done
    assert posted.write.done
    assert posted.write.digest == 4, "modulo 2**64, and of several holders one counts"
    assert posted.over == [posted.write]
    assert posted.page.num_claimed == 0
    assert posted.event.num_asked == 0, "the device is not asked"


def test_without_digest_there_is_none():
    posted = Posted(with_digest=False)
    for index in range(3):
        posted.end(index, 7)
    assert posted.write.done
    assert posted.write.digest is None


@pytest.mark.parametrize(
    ("answer", "problem"), [(True, "without its word"), (RuntimeError("illegal address"), "illegal address")]
)
def test_a_write_whose_word_never_comes_fails_and_is_over(monkeypatch, answer, problem):
    monkeypatch.setattr(nvlink_write, "LOOK_AFTER_S", 0.0)
    posted = Posted(answer)
    posted.end(0, 1)
    for _ in range(2):
        with pytest.raises(DataPathFailed, match=problem):
            _ = posted.write.done
    assert posted.over == [posted.write]
    assert posted.page.num_claimed == 0


def test_a_write_that_takes_long_is_waited_for(monkeypatch):
    monkeypatch.setattr(nvlink_write, "LOOK_AFTER_S", 0.0)
    posted = Posted(answer=False)
    assert not posted.write.done
    assert posted.event.num_asked == 1
    for index in range(3):
        posted.end(index, 1)
    assert posted.write.done


LAYOUT = make_layout(num_kv_heads=3)
GEOMETRY = PoolGeometry(LAYOUT, 8)
POOL = PoolIO(np.random.default_rng(3).integers(0, 256, GEOMETRY.num_bytes, dtype=np.uint8), GEOMETRY)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 31), st.integers(0, 2), st.integers(1, 3), st.permutations(range(8)))
def test_gathered_blocks_close_up_to_the_payload_that_a_pool_on_the_cpu_gives(first, count, head, num_heads, blocks):
    size = LAYOUT.block_size
    span = KVRange(1, first, min(count, 32 - first), head, min(num_heads, 3 - head))
    layer = GEOMETRY.layer(1)
    touched = range(first // size, -(-(span.first + span.count) // size))
    shape = _gathered_shape(layer, span, len(touched))
    whole = KVRange(1, touched[0] * size, len(touched) * size, span.head_first, span.head_count)
    gathered = POOL.read(blocks, whole, size)
    assert len(gathered) == shape.num_bytes
    assert _close_up(memoryview(bytearray(gathered)), shape, span) == POOL.read(blocks, span, size)


def test_block_ids_are_sent_once_for_a_table_and_tables_are_forgotten():
    stream = DeviceStream(torch.device("cpu"))
    tables = [tuple(range(n, n + 3)) for n in range(80)]
    first = stream.ids(tables[0])
    assert first.tolist() == [0, 1, 2]
    assert first.dtype is torch.int32
    assert stream.ids(tables[0]) is first
    for table in tables[1:]:
        assert stream.ids(table).tolist() == list(table)
    assert stream.ids(tables[0]) is not first


def test_the_reach_of_digests_grows_with_the_longest_prompt():
    stream = DeviceStream(torch.device("cpu"))
    short = stream.workspace(10)
    assert stream.workspace(1 << 15) is short
    long = stream.workspace((1 << 15) + 1)
    assert long is not short
    assert long.weights[: len(short.weights)].tolist() == short.weights.tolist()


def test_what_is_large_is_spread_wide():
    assert tuning_for(4 << 20) == FEW
    assert tuning_for(151 << 20) == MANY
