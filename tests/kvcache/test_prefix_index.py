"""Sharing and giving up of named blocks, by hand; tests/prefill_worker has the machine that tries everything."""

import pytest

from baton.kvcache.allocator import BlockAllocator, OutOfBlocks
from baton.kvcache.block_log import BlockLog
from baton.kvcache.prefix_index import PrefixIndex

pytestmark = pytest.mark.fast


def named(allocator, num_blocks, name=b"n"):
    table = allocator.reserve(num_blocks * allocator.block_size)
    for at, block in enumerate(table.blocks):
        assert allocator.index.add(name + bytes([at]), block)
    return table


def test_a_released_block_keeps_its_name_until_it_is_needed():
    allocator = BlockAllocator(num_blocks=4, block_size=4)
    table = named(allocator, 2)
    allocator.release(table)
    assert (allocator.num_free, allocator.num_reserved, allocator.index.num_resting) == (4, 0, 2)
    assert allocator.index.match([b"n\0", b"n\1", b"n\2"]) == table.blocks
    allocator.reserve(8)
    assert len(allocator.index) == 2, "blocks without a name go first"
    taken = allocator.reserve(4)
    assert taken.blocks == (table.blocks[1],), "the end of a prompt is of no use without its beginning"
    assert allocator.index.match([b"n\0", b"n\1"]) == table.blocks[:1]
    assert allocator.index.num_evicted == 1


def test_what_has_rested_longest_goes_first_and_use_makes_young():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    tables = [named(allocator, 1, name) for name in (b"a", b"b", b"c")]
    for table in tables:
        allocator.release(table)
    allocator.release(allocator.reserve(4, allocator.index.match([b"a\0"])))
    assert [allocator.reserve(4).blocks for _ in range(3)] == [tables[at].blocks for at in (1, 2, 0)]


def test_shared_blocks_are_in_several_tables_and_never_given_up():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    first = named(allocator, 2)
    second = allocator.reserve(12, first.blocks)
    assert second.blocks[:2] == first.blocks
    allocator.release(first)
    assert (allocator.num_free, allocator.num_reserved) == (0, 3)
    with pytest.raises(OutOfBlocks):
        allocator.reserve(1)
    allocator.release(second)
    assert allocator.num_free == 3
    with pytest.raises(AssertionError):
        allocator.release(second)


def test_a_reservation_does_not_count_blocks_it_wakes_as_free():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    allocator.release(named(allocator, 2))
    shared = allocator.index.match([b"n\0", b"n\1"])
    assert allocator.num_missing(12, shared) == 0
    assert allocator.num_missing(16, shared) == 1
    with pytest.raises(OutOfBlocks, match="wanted 2 KV blocks, 1 are free"):
        allocator.reserve(16, shared)
    assert allocator.index.num_resting == 2, "a refused reservation wakes nothing"


def test_a_name_has_one_block_and_a_block_one_name():
    index = PrefixIndex()
    assert index.add(b"a", 0)
    assert not index.add(b"a", 1)
    assert not index.add(b"b", 0)
    assert len(index) == 1
    assert 1 not in index


def test_what_is_forgotten_is_found_no_more_and_free_once_no_table_has_it():
    log = BlockLog()
    allocator = BlockAllocator(num_blocks=5, block_size=4, index=PrefixIndex(log))
    first = named(allocator, 3)
    second = allocator.reserve(12, first.blocks[:2])
    allocator.forget(second)
    assert allocator.index.match([b"n\0", b"n\1", b"n\2"]) == ()
    assert set(log._names) == {b"n\2"}, "the third is none of its blocks"
    allocator.forget(second)
    allocator.release(first)
    assert (allocator.num_free, allocator.index.num_resting) == (2, 1)
    assert allocator.index.add(b"n\0", second.blocks[2]), "what is computed again gets the name"
    allocator.release(second)
    assert (allocator.num_free, allocator.index.num_resting) == (5, 2)


def test_a_named_block_is_never_quarantined():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    with pytest.raises(AssertionError):
        allocator.quarantine(named(allocator, 1))
