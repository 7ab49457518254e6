"""Which rank keeps a sequence, where each has a pool of its own: the emptiest, cached prefixes counted."""

import pytest
import torch

from baton.engine.preemption import Preemption
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import MAX_PREEMPTIONS, Phase
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.host_ranges import HostRange
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.rank_blocks import RankBlocks
from baton.tests.engine.test_scheduler import BLOCK_SIZE, Bench, sequence_of

pytestmark = pytest.mark.fast
NUM_BLOCKS = 8


class Pools(Bench):
    """A scheduler over several; sequences are a letter and a length."""

    def __init__(self, num_pools=2, num_slots=8, **options):
        self.allocators = [
            BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, PrefixIndex(), first=rank * NUM_BLOCKS) for rank in range(num_pools)
        ]
        self.allocator, *others = self.allocators
        self.scheduler = Scheduler(self.allocator, num_slots=num_slots, others=others, **options)

    def owners(self, *lengths, **options):
        """Of sequences that run, which come together."""
        names = [chr(ord("a") + at) for at in range(len(lengths))]
        sequences = [self.add(name, length, **options) for name, length in zip(names, lengths, strict=True)]
        self.scheduler.give_blocks()
        self.scheduler.give_slots()
        return [None if item.table is None else item.owner for item in sequences], sequences


def check(sequences):
    for sequence in sequences:
        assert {block // NUM_BLOCKS for block in sequence.table.blocks} == {sequence.owner}


def test_the_rank_with_the_fewest_blocks_gets_the_next():
    bench = Pools(num_pools=4)
    owners, sequences = bench.owners(8, 4, 16, 4, 4, 8)  # and four of an answer each
    assert owners == [0, 1, 2, 3, 1, 3], "of equals the first"
    assert [allocator.num_reserved for allocator in bench.allocators] == [3, 4, 5, 5]
    check(sequences)
    bench.end(*sequences)


def test_what_a_rank_has_is_that_of_all_that_it_frees_and_gives_again():
    bench = Pools()
    (_, (a, b, c)) = bench.owners(20, 4, 4)
    assert [a.owner, b.owner, c.owner] == [0, 1, 1]
    bench.end(a)
    d = bench.start("d", prompt_len=8)[0]
    assert d.owner == 0
    bench.end(b, c, d)


def test_one_that_does_not_fit_at_the_emptiest_rank_goes_to_another_with_room():
    bench = Pools()
    _, sequences = bench.owners(12, 16)
    apart = bench.allocators[0].reserve(2 * BLOCK_SIZE)
    bench.allocators[0].quarantine(apart)  # not reserved, and not free
    owners, more = bench.owners(8)
    assert (owners, bench.allocators[0].num_free) == ([1], 2), "0 has fewer reserved"
    bench.allocators[0].release_quarantined(apart)
    bench.end(*sequences, *more)


def test_a_group_holds_a_pool_of_each_rank_and_a_sequence_one_pools_at_most():
    held = {}
    for num_pools in (1, 2, 4):
        bench = Pools(num_pools)
        _, sequences = bench.owners(*[12] * 16)  # four blocks each
        held[num_pools] = sum(item.table is not None for item in sequences)
        with pytest.raises(AssertionError):
            bench.scheduler.add(sequence_of("z", [0] * (NUM_BLOCKS * BLOCK_SIZE), 1))
    assert held == {1: 2, 2: 4, 4: 8}


def test_a_cached_prefix_draws_a_sequence_unless_its_rank_has_more_all_the_same():
    bench = Pools()
    prompt = [ord("p")] * 13
    (first,) = [sequence_of("p", prompt, 1)]
    bench.scheduler.add(first)
    bench.start()
    bench.compute()
    assert first.owner == 0
    bench.end(first)
    filler = bench.start("f", prompt_len=4, max_tokens=4)[0]
    assert filler.owner == 0, "what is cached and in no use does not count"
    again = sequence_of("q", prompt, 1)
    bench.scheduler.add(again)
    bench.start()
    assert (again.owner, again.num_cached) == (0, 12), "two reserved and one to come, against four to come"
    third = sequence_of("r", prompt, 1)
    bench.scheduler.add(third)
    bench.start()
    assert (third.owner, third.num_cached) == (1, 0), "six reserved and one to come, against four to come"
    assert again.table.blocks[:3] == bench.allocators[0].index.match(again.block_hashes)
    bench.compute()
    assert bench.allocators[1].index.match(third.block_hashes) == third.table.blocks[:3], "and now it is at both"
    bench.end(filler, again, third)


def test_blocks_get_their_names_where_they_were_written_if_their_sequence_has_moved():
    bench = Pools(overcommit=True)
    (a,) = bench.start("a", prompt_len=8)
    table = a.table
    a.num_computed = 8
    free = bench.scheduler.preempt(a)
    other = bench.allocators[0].reserve(5 * BLOCK_SIZE)
    bench.start()
    assert (a.phase, a.owner) == (Phase.RUNNING, 1)
    bench.scheduler.name_blocks(a, table, 0, 8)
    assert bench.allocators[0].index.match(a.block_hashes) == table.blocks[:2]
    assert not len(bench.allocators[1].index)
    free()
    assert bench.allocators[0].num_reserved == 5
    bench.allocators[0].release(other)
    bench.end(a)


def test_what_was_saved_comes_back_to_its_rank_and_waits_for_it():
    bench = Pools(overcommit=True)
    _, (a, b) = bench.owners(8, 8)
    a.saved = HostRange(0, 2)
    a.token_ids.append(0)
    bench.scheduler.preempt(a)()
    full = bench.allocators[0].reserve(NUM_BLOCKS * BLOCK_SIZE)
    bench.start()
    assert (a.phase, bench.allocators[1].num_free) == (Phase.WAITING, NUM_BLOCKS - 3)
    bench.allocators[0].release(full)
    other = bench.allocators[0].reserve(4 * BLOCK_SIZE)  # more than at the other rank
    bench.start()
    assert (a.phase, a.owner) == (Phase.RUNNING, 0)
    bench.allocators[0].release(other)
    bench.end(a, b)


def test_what_waits_for_its_rank_holds_up_nobody_whom_another_rank_can_take():
    bench = Pools(num_pools=3, overcommit=True)
    _, (a, b, c) = bench.owners(8, 8, 8)
    a.saved = HostRange(0, 2)
    a.token_ids.append(0)
    bench.scheduler.preempt(a)()
    full = bench.allocators[0].reserve((NUM_BLOCKS - 1) * BLOCK_SIZE)  # one is left, and it needs three
    fits, too_long, short = bench.add("d", 8), bench.add("e", 7 * BLOCK_SIZE), bench.add("f", 1)
    bench.start()
    assert (a.phase, fits.phase, fits.owner) == (Phase.WAITING, Phase.RUNNING, 1)
    assert (too_long.phase, short.phase) == (Phase.WAITING, Phase.WAITING), "no rank has room for it: the line ends"
    bench.allocators[0].release(full)
    bench.start()
    assert (a.phase, a.owner) == (Phase.RUNNING, 0)
    bench.end(a, b, c, fits, too_long, short)


def test_nobody_takes_from_a_rank_what_one_ahead_in_the_line_waits_for_there():
    bench = Pools(overcommit=True)
    _, (a, b) = bench.owners(8, 8)
    a.saved = HostRange(0, 2)
    a.token_ids.append(0)
    bench.scheduler.preempt(a)()
    full = [
        pool.reserve((pool.num_free - left) * BLOCK_SIZE) for pool, left in zip(bench.allocators, (2, 0), strict=True)
    ]
    short = bench.add("c", 1)
    bench.start()
    assert (a.phase, short.phase, bench.allocators[0].num_free) == (Phase.WAITING, Phase.WAITING, 2)
    bench.allocators[1].release(full[1])
    bench.start()
    assert (a.phase, short.phase, short.owner) == (Phase.WAITING, Phase.RUNNING, 1)
    bench.allocators[0].release(full[0])
    bench.start()
    bench.end(a, b, short)


class Steps:
    """What preemption asks, where no step is in flight."""

    def __init__(self):
        self.executed = []

    def runs(self, sequence):
        return False

    def execute(self, operation):
        self.executed.append(operation)

    def last_step(self, sequence):
        return None

    def after(self, ending, act):
        act()

    def was_preempted(self, sequence):
        pass


def decoding(bench, *lengths):
    """Sequences that decode."""
    _, sequences = bench.owners(*lengths, max_tokens=20)
    bench.compute()
    return sequences


def test_room_is_made_by_sequences_of_the_same_rank():
    bench = Pools(num_slots=4, overcommit=True)
    a, b, c, d = decoding(bench, 7, 7, 7, 7)
    assert [item.owner for item in (a, b, c, d)] == [0, 1, 0, 1]
    spare = bench.allocators[0].reserve(4 * BLOCK_SIZE)
    steps = Steps()
    preemption = Preemption(bench.scheduler, steps, 0)
    gone = preemption.make_room([(a, 12), (b, 12)], 4)
    assert gone == {c}, "the youngest of its rank, and not the youngest of all"
    assert [item.phase for item in (b, d)] == [Phase.RUNNING, Phase.RUNNING]
    check((a, b))
    assert (len(a.table.blocks), len(b.table.blocks)) == (3, 3)
    bench.allocators[0].release(spare)
    bench.end(a, b, c, d)


def test_blocks_that_a_sequence_waits_for_are_kept_at_its_rank_alone():
    bench = Pools(num_slots=4, overcommit=True)
    bench.scheduler.claim(NUM_BLOCKS, 0)
    owners, sequences = bench.owners(8)
    assert owners == [1]
    bench.scheduler.claim(NUM_BLOCKS, 1)
    assert bench.owners(8)[0] == [None]
    bench.scheduler.claim_none()
    bench.start()
    for sequence in bench.scheduler.sequences():
        assert sequence.phase is Phase.RUNNING
    bench.end(*bench.scheduler.sequences())
    assert sequences


def test_what_will_be_free_is_counted_at_its_rank():
    bench = Pools(num_slots=4, overcommit=True)
    a, b, c, d = decoding(bench, 7, 3, 7, 3)
    assert [item.owner for item in (a, b, c, d)] == [0, 1, 1, 0]
    bench.scheduler.leave(b)
    assert [bench.scheduler.num_coming(owner) for owner in range(2)] == [0, 1]
    free = bench.scheduler.preempt(c)
    assert [bench.scheduler.num_coming(owner) for owner in range(2)] == [0, 3]
    free()
    assert [bench.scheduler.num_coming(owner) for owner in range(2)] == [0, 1]
    bench.end(a, b, c, d)


def test_those_that_may_need_a_block_soon_are_counted_at_their_rank():
    bench = Pools(num_slots=8, overcommit=True)
    owners, sequences = bench.owners(4, 4, 16, 16)  # two blocks, two, five and five
    assert owners == [0, 1, 0, 1], "at each rank one runs, and a block is left for it"
    bench.end(*sequences)
    owners, sequences = bench.owners(4, 4, 20)
    assert owners == [0, 1, None], "six and two are all that there are"
    bench.end(*sequences)


def test_one_that_was_preempted_often_gets_all_its_blocks_from_one_rank():
    bench = Pools(overcommit=True)
    (a,) = bench.start("a", prompt_len=8, max_tokens=20)
    for _ in range(MAX_PREEMPTIONS):
        a.num_preemptions += 1
        bench.scheduler.preempt(a)()
        bench.start()
    assert len(a.table.blocks) == 7
    check([a])
    bench.end(a)


def test_numbers_of_blocks_at_a_rank():
    alone = RankBlocks(num_blocks=NUM_BLOCKS)
    assert (alone.null_block, alone.own((3, 7, 0)), alone.owner((3, 7))) == (8, (3, 7, 0), 0)
    first, second = (RankBlocks(num_blocks=NUM_BLOCKS, rank=rank, num_pools=2) for rank in range(2))
    for each in (first, second):
        assert each.null_block == 16
        assert (each.owner((0, 7)), each.owner((8, 15))) == (0, 1)
        with pytest.raises(AssertionError):
            each.owner((7, 8))
        with pytest.raises(AssertionError):
            each.owner((16,))
    assert (first.own((7, 2)), first.own((8, 15))) == ((7, 2), ())
    assert (second.own((7, 2)), second.own((15, 8))) == ((), (7, 0))
    assert first.own_tables(torch.tensor([[7, 0], [1, 16]])).tolist() == [[7, 0], [1, 8]]
    assert second.own_tables(torch.tensor([[15, 8], [9, 16]])).tolist() == [[7, 0], [1, 8]]


# Sequences that are received


def test_what_is_received_goes_where_the_fewest_blocks_are_reserved_when_it_is_granted():
    """Not when it was announced: until then another rank may have become the emptiest."""
    bench = Pools()
    (own,) = bench.start("a", prompt_len=16)
    first, second = (bench.add(name, kind="received", prompt_len=8) for name in "bc")
    bench.scheduler.expect_now(first)
    assert bench.scheduler.give_blocks() == [first]
    assert (own.owner, first.owner, first.phase) == (0, 1, Phase.RECEIVING)
    bench.scheduler.remove(own)()
    bench.scheduler.expect_now(second)
    assert bench.scheduler.give_blocks() == [second]
    assert second.owner == 0
    check([first, second])
    bench.end(first, second)


def test_blocks_that_a_sender_may_write_stay_apart_at_their_rank_and_come_back_there():
    bench = Pools()
    filler, received = bench.start("f", prompt_len=8)[0], bench.add("r", kind="received", prompt_len=16)
    bench.scheduler.expect_now(received)
    assert bench.scheduler.give_blocks() == [received]
    bench.scheduler.quarantine(received)
    assert [allocator.num_quarantined for allocator in bench.allocators] == [0, 5]
    assert [allocator.num_reserved for allocator in bench.allocators] == [3, 0]
    other = bench.add("o", kind="received", prompt_len=16)
    bench.scheduler.expect_now(other)
    assert bench.scheduler.give_blocks() == [other]
    assert other.owner == 0, "1 has fewer reserved, and too few free"
    bench.scheduler.drained(received)
    assert [allocator.num_quarantined for allocator in bench.allocators] == [0, 0]
    assert bench.allocators[1].num_free == NUM_BLOCKS
    bench.end(filler, other)


def test_a_prompt_that_was_received_is_found_at_its_rank_alone():
    bench = Pools()
    prompt = [ord("p")] * 12
    filler = bench.start("f", prompt_len=4)[0]
    received = sequence_of("r", prompt, kind="received")
    bench.scheduler.add(received)
    bench.scheduler.expect_now(received)
    assert bench.scheduler.give_blocks() == [received]
    assert not any(len(allocator.index) for allocator in bench.allocators), "nothing is there yet"
    bench.scheduler.name_blocks(received, received.table, 0, 12)
    bench.land(received)
    assert [len(allocator.index) for allocator in bench.allocators] == [0, 3]
    again = sequence_of("a", [*prompt, 1])
    bench.scheduler.add(again)
    bench.scheduler.give_blocks()
    assert (again.owner, again.num_cached) == (1, 12)
    assert again.table.blocks[:3] == received.table.blocks[:3]
    bench.end(filler, received, again)


def test_a_received_sequence_may_be_computed_again_at_another_rank():
    bench = Pools(overcommit=True)
    (received,) = bench.start("r", kind="received", prompt_len=16)
    assert (received.owner, received.phase) == (0, Phase.RUNNING)
    received.num_preemptions += 1
    bench.scheduler.preempt(received)()
    fillers = bench.start("a", prompt_len=4)
    assert received.phase is Phase.RUNNING
    filler = [*fillers, received]
    assert {item.owner for item in filler} == {0, 1}
    check(filler)
    bench.end(*filler)
