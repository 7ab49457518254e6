"""What a reader of a prefix index is told, wherever it left off."""

import threading

import pytest

from baton.core.block_hash import BlockChange
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.prefix_index import PrefixIndex

pytestmark = pytest.mark.fast


def test_a_reader_gets_what_it_missed_with_the_last_word_on_each_name():
    log = BlockLog()
    assert log.since(0) == []
    log.stored(b"a")
    log.stored(b"b")
    assert log.since(0) == [BlockChange(after=0, version=2, stored=(b"a", b"b"))]
    log.removed(b"a")
    log.stored(b"c")
    log.removed(b"c")
    assert log.since(2) == [BlockChange(after=2, version=5, removed=(b"a", b"c"))]
    assert log.since(5) == []


def test_what_is_forgotten_or_was_never_said_is_answered_with_everything():
    log = BlockLog(ring_len=2, max_names=2)
    for name in (b"a", b"b", b"c"):
        log.stored(name)
    parts = log.since(0)
    assert [(part.after, part.version, part.cleared) for part in parts] == [(0, 0, True), (0, 3, False)]
    assert {name for part in parts for name in part.stored} == {b"a", b"b", b"c"}
    assert [part.cleared for part in log.since(99)] == [True, False], "a version of another incarnation"
    assert log.since(1) == [BlockChange(after=1, version=3, stored=(b"b", b"c"))]
    for name in (b"a", b"b", b"c"):
        log.removed(name)
    assert log.since(1) == [BlockChange(after=0, version=6, cleared=True)]


def test_a_name_that_is_there_twice_or_not_at_all_is_a_bug():
    log = BlockLog()
    log.stored(b"a")
    with pytest.raises(AssertionError):
        log.stored(b"a")
    with pytest.raises(KeyError):
        log.removed(b"b")
    assert log.version == 1


def test_a_name_is_there_while_any_of_several_indices_has_it():
    log, woken = BlockLog(num_indices=2), []
    log.stored(b"a")
    log.call_at_change(lambda: woken.append("again"))
    log.stored(b"a")
    log.removed(b"a")
    assert (log.since(0), woken) == ([BlockChange(after=0, version=1, stored=(b"a",))], [])
    log.stored(b"a")
    with pytest.raises(AssertionError):
        log.stored(b"a")
    for _ in range(2):
        log.removed(b"a")
    assert log.since(1) == [BlockChange(after=1, version=2, removed=(b"a",))]
    assert woken == ["again"]


def test_a_reader_is_woken_once_and_not_after_it_left():
    log, woken = BlockLog(), []
    log.call_at_change(lambda: woken.append("first"))
    forget = log.call_at_change(lambda: woken.append("second"))
    forget()
    thread = threading.Thread(target=log.stored, args=(b"a",))
    thread.start()
    thread.join()
    log.stored(b"b")
    assert woken == ["first"]


def test_a_pool_tells_of_every_name_that_it_gives_and_takes():
    log = BlockLog()
    allocator = BlockAllocator(4, 4, PrefixIndex(log))
    table = allocator.reserve(16)
    for at, block in enumerate(table.blocks[:3]):
        allocator.index.add(bytes([at]), block)
    allocator.index.add(b"\0", table.blocks[3])  # another block has the name: nothing changes
    allocator.release(table)
    allocator.reserve(8)
    assert log.since(0) == [BlockChange(after=0, version=4, stored=(b"\0", b"\1"), removed=(b"\2",))]
