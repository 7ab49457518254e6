"""The allocator against a model of itself: random reserves and releases."""

import random

import pytest

from baton.kvcache.allocator import BlockAllocator, OutOfBlocks

pytestmark = pytest.mark.fast


def test_tables_alive_together_share_no_block():
    rng = random.Random(0)
    allocator = BlockAllocator(num_blocks=64, block_size=16)
    alive = []
    for _ in range(2_000):
        try:
            alive.append(allocator.reserve(rng.randint(1, 200)))
        except OutOfBlocks:
            allocator.release(alive.pop(rng.randrange(len(alive))))
        blocks = [block for table in alive for block in table.blocks]
        assert len(blocks) == len(set(blocks)) == 64 - allocator.num_free


def test_a_refused_reservation_takes_nothing():
    allocator = BlockAllocator(num_blocks=2, block_size=16)
    with pytest.raises(OutOfBlocks, match="wanted 3 KV blocks, 2 are free"):
        allocator.reserve(33)
    assert allocator.num_free == 2


def test_a_table_grows_at_its_end_or_stands():
    allocator = BlockAllocator(num_blocks=5, block_size=4)
    table = allocator.reserve(6)
    other = allocator.reserve(1)
    grown = allocator.grow(table, 13)
    assert grown.blocks[:2] == table.blocks
    assert grown.capacity_len == 16
    assert allocator.grow(grown, 16) is grown
    with pytest.raises(OutOfBlocks, match="wanted 1 KV blocks, 0 are free"):
        allocator.grow(grown, 17)
    allocator.release(grown)
    allocator.release(other)
    assert allocator.num_free == 5


def test_slots_follow_the_table_not_the_pool():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    first = allocator.reserve(4)
    allocator.reserve(4)
    allocator.release(first)
    table = allocator.reserve(8)
    assert table.blocks == (2, 0)
    assert [table.slot(p) for p in range(8)] == [8, 9, 10, 11, 0, 1, 2, 3]


def test_double_release_is_caught():
    allocator = BlockAllocator(num_blocks=1, block_size=4)
    table = allocator.reserve(1)
    allocator.release(table)
    with pytest.raises(AssertionError):
        allocator.release(table)


def test_quarantined_blocks_are_neither_free_nor_reserved():
    allocator = BlockAllocator(num_blocks=4, block_size=4)
    table = allocator.reserve(8)
    allocator.quarantine(table)
    assert (allocator.num_free, allocator.num_reserved, allocator.num_quarantined) == (2, 0, 2)
    with pytest.raises(OutOfBlocks):
        allocator.reserve(12)
    with pytest.raises(AssertionError):
        allocator.release(table)
    allocator.release_quarantined(table)
    assert allocator.num_free == 4


def test_a_table_has_blocks_and_a_state_slot_or_neither():
    allocator = BlockAllocator(num_blocks=8, block_size=4, num_state_slots=2)
    slots = allocator.state_slots
    first, second = allocator.reserve(9), allocator.reserve(1)
    assert {first.state_slot, second.state_slot} == {0, 1}
    assert allocator.num_free == 4 and allocator.num_missing(1) == 1, "no slot is free"
    with pytest.raises(OutOfBlocks):
        allocator.reserve(1)
    assert allocator.num_free == 4
    grown = allocator.grow(second, 9)
    assert (grown.state_slot, len(grown.blocks)) == (second.state_slot, 3), "it has its slot already"
    assert (slots.num_free, slots.num_held, slots.num_quarantined) == (0, 2, 0)
    allocator.quarantine(first)
    assert (slots.num_free, slots.num_held, slots.num_quarantined) == (0, 1, 1)
    assert allocator.num_missing(1) == 1, "somebody may still write it"
    allocator.release_quarantined(first)
    again = allocator.reserve(1)
    assert again.state_slot == first.state_slot
    allocator.release(grown)
    allocator.release(again)
    assert (slots.num_free, slots.num_held, slots.num_quarantined) == (2, 0, 0)
    with pytest.raises((AssertionError, KeyError)):
        allocator.release(again)


def test_out_of_blocks_takes_no_slot():
    allocator = BlockAllocator(num_blocks=2, block_size=4, num_state_slots=2)
    with pytest.raises(OutOfBlocks):
        allocator.reserve(9)
    assert allocator.state_slots.num_free == 2
