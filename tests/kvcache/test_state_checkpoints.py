"""Checkpoints against a plain model of them, any order of events; and together with the blocks that they belong to."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.core.block_hash import MIN_CHECKPOINT_LEN, TURN_LEN, checkpoint_blocks, checkpoint_name
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.state_checkpoints import BRANCH_ROUNDS, StateCheckpoints

pytestmark = pytest.mark.fast

FIRST_SLOT = 7
NAMES = [bytes([name]) * 16 for name in range(6)]


class CheckpointMachine(RuleBasedStateMachine):
    """The model: a list of (name, slot), used least recently first; of each, how often it was used, and when last."""

    @initialize(num_slots=st.integers(0, 4))
    def begin(self, num_slots):
        self.log = BlockLog()
        self.checkpoints = StateCheckpoints(range(FIRST_SLOT, FIRST_SLOT + num_slots), self.log)
        self.slots = set(range(FIRST_SLOT, FIRST_SLOT + num_slots))
        self.kept, self.used, self.filling = [], [], set()
        self.branches, self.used_once, self.last_use, self.now = set(), set(), {}, 0
        self.hidden = set()  # forgotten while in use

    def kept_slots(self):
        return {slot for _, slot in self.kept}

    @rule()
    def take(self):
        slot = self.checkpoints.take()
        self.now += 1
        free = self.slots - self.filling - self.kept_slots()
        if free:
            assert slot in free
        else:
            idle = [pair for pair in self.kept if pair[0] not in self.used]
            old = [name for name in self.branches if self.now - self.last_use[name] > BRANCH_ROUNDS * len(self.slots)]
            first = [pair for pair in idle if pair[0] in old] + [pair for pair in idle if pair[0] not in self.branches]
            assert slot == (first[0][1] if first else None)
            for name, _ in first[:1]:
                self.remove(name)
        if slot is not None:
            self.filling.add(slot)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), name=st.sampled_from(NAMES), is_branch=st.booleans())
    def keep(self, data, name, is_branch):
        slot = data.draw(st.sampled_from(sorted(self.filling)))
        is_new = name not in dict(self.kept)
        assert self.checkpoints.keep(name, slot, is_branch=is_branch) == is_new
        self.filling.remove(slot)
        if is_new:
            self.kept.append((name, slot))
            self.last_use[name] = self.now
            if is_branch:
                self.to_branches(name)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def give_up(self, data):
        slot = data.draw(st.sampled_from(sorted(self.filling)))
        self.checkpoints.give_up(slot)
        self.filling.remove(slot)

    @precondition(lambda self: any(name not in self.hidden for name, _ in self.kept))
    @rule(data=st.data())
    def use(self, data):
        pair = data.draw(st.sampled_from([pair for pair in self.kept if pair[0] not in self.hidden]))
        self.checkpoints.use(pair[0])
        self.kept = [other for other in self.kept if other != pair] + [pair]
        self.used.append(pair[0])
        self.last_use[pair[0]] = self.now
        if pair[0] in self.used_once:
            self.to_branches(pair[0])
        self.used_once.add(pair[0])

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(self.used))
        assert self.checkpoints.leave(name) == dict(self.kept)[name]
        self.used.remove(name)
        if name in self.hidden and name not in self.used:
            self.remove(name)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name):
        self.checkpoints.forget(name)
        if name in self.used:
            self.hidden.add(name)
        else:
            self.remove(name)

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name):
        if name in self.used and name not in self.hidden:
            with pytest.raises(AssertionError):
                self.checkpoints.drop(name)
            return
        self.checkpoints.drop(name)
        if name not in self.hidden:  # of the block that has the name by now there is no checkpoint yet
            self.remove(name)

    def to_branches(self, name):
        """If there is room: three quarters are branches at most."""
        if name in self.branches or 4 * (len(self.branches) + 1) <= 3 * len(self.slots):
            self.branches.add(name)
        self.used_once.add(name)

    def remove(self, name):
        """What is not kept is as if it had never been."""
        self.kept = [pair for pair in self.kept if pair[0] != name]
        self.hidden.discard(name)
        self.branches &= set(dict(self.kept))
        self.used_once &= set(dict(self.kept))

    @invariant()
    def both_have_the_same(self):
        if not hasattr(self, "checkpoints"):
            return
        found = {name for name, _ in self.kept if name not in self.hidden}
        assert [name in self.checkpoints for name in NAMES] == [name in found for name in NAMES]
        counts = len(self.checkpoints), self.checkpoints.num_filling, self.checkpoints.num_in_use
        assert counts == (len(self.kept), len(self.filling), len(set(self.used)))
        assert set(self.used) <= set(dict(self.kept)), "one that is in use is there"
        assert not self.filling & self.kept_slots()
        assert set(self.log._names) == {checkpoint_name(name) for name, _ in self.kept}, "readers hear of each"


@pytest.mark.long
def test_any_order_of_events():
    run_state_machine_as_test(
        CheckpointMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


def test_the_end_that_was_used_least_recently_is_evicted():
    checkpoints = StateCheckpoints(range(3))
    for name in NAMES[:3]:
        checkpoints.keep(name, checkpoints.take())
    checkpoints.use(NAMES[0])
    checkpoints.use(NAMES[1])
    assert checkpoints.leave(NAMES[0]) == 0
    checkpoints.keep(NAMES[3], checkpoints.take())
    assert [name in checkpoints for name in NAMES[:4]] == [True, True, False, True]
    checkpoints.keep(NAMES[4], checkpoints.take())
    assert [name in checkpoints for name in NAMES[:5]] == [False, True, False, True, True], "one is in use"


def test_a_branch_outlives_ends_but_not_for_ever():
    """Where two prompts have gone on is a branch, too."""
    checkpoints = StateCheckpoints(range(2))
    checkpoints.keep(NAMES[0], checkpoints.take(), is_branch=True)
    for _ in range(2 * BRANCH_ROUNDS - 1):
        checkpoints.keep(NAMES[1], checkpoints.take())
        checkpoints.drop(NAMES[1])
    checkpoints.keep(NAMES[1], checkpoints.take())
    checkpoints.keep(NAMES[2], checkpoints.take())
    assert [name in checkpoints for name in NAMES[:3]] == [False, True, True], "it was of no use for long"
    for _ in range(2):
        checkpoints.use(NAMES[1])
        checkpoints.leave(NAMES[1])
    for _ in range(2 * BRANCH_ROUNDS - 1):
        checkpoints.keep(NAMES[2], checkpoints.take())
    assert [name in checkpoints for name in NAMES[:3]] == [False, True, True]


def test_a_branch_that_is_used_stays():
    checkpoints = StateCheckpoints(range(2))
    checkpoints.keep(NAMES[0], checkpoints.take(), is_branch=True)
    for at in range(6 * BRANCH_ROUNDS):
        if at % BRANCH_ROUNDS == 0:
            checkpoints.use(NAMES[0])
            checkpoints.leave(NAMES[0])
        checkpoints.keep(NAMES[1 + at % 2], checkpoints.take())
        assert NAMES[0] in checkpoints


def test_three_quarters_are_branches_at_most():
    checkpoints = StateCheckpoints(range(4))
    for name in NAMES[:4]:
        checkpoints.keep(name, checkpoints.take(), is_branch=True)
    checkpoints.keep(NAMES[4], checkpoints.take())
    assert [name in checkpoints for name in NAMES[:5]] == [True, True, True, False, True], "the fourth was an end"


def with_state(num_blocks, num_checkpoints, num_sequences=3):
    checkpoints = StateCheckpoints(range(num_sequences, num_sequences + num_checkpoints))
    return BlockAllocator(num_blocks, 4, PrefixIndex(checkpoints=checkpoints), num_state_slots=num_sequences)


def keep(allocator, name):
    assert allocator.index.checkpoints.keep(name, allocator.index.checkpoints.take())


def test_a_hit_ends_at_a_checkpoint_and_rows_alone_are_none():
    allocator = with_state(6, 3)
    table = allocator.reserve(20)
    for name, block in zip(NAMES, table.blocks, strict=False):
        allocator.name(name, block)
    assert allocator.index.run(NAMES) == table.blocks
    assert allocator.index.match(NAMES) == ()
    keep(allocator, NAMES[1])
    assert allocator.index.match(NAMES) == table.blocks[:2]
    keep(allocator, NAMES[3])
    assert [len(allocator.index.match(NAMES[:count])) for count in range(6)] == [0, 0, 2, 2, 4, 4]


def test_a_checkpoint_goes_with_its_block_and_one_behind_a_gap_is_not_found():
    allocator = with_state(4, 3)
    table = allocator.reserve(16)
    for name, block in zip(NAMES, table.blocks, strict=False):
        allocator.name(name, block)
    for at in (0, 3):
        keep(allocator, NAMES[at])
    allocator.release(table)
    allocator.release(allocator.reserve(4))
    assert NAMES[3] not in allocator.index.checkpoints
    assert allocator.index.checkpoints.num_evicted == 1
    assert allocator.index.match(NAMES) == table.blocks[:1]
    keep(allocator, NAMES[5])  # its block is not there, nor those before it
    assert allocator.index.match(NAMES) == table.blocks[:1]


def test_what_is_computed_again_takes_the_names_of_blocks_that_rest():
    allocator = with_state(6, 1)
    first, second = (allocator.reserve(8) for _ in range(2))
    allocator.name(NAMES[0], first.blocks[0])
    allocator.name(NAMES[0], second.blocks[0])
    assert allocator.index.run(NAMES) == first.blocks[:1], "it is in use"
    allocator.release(first)
    assert allocator.index.num_resting == 1
    allocator.name(NAMES[0], second.blocks[0])
    assert allocator.index.run(NAMES) == second.blocks[:1]
    assert (allocator.index.num_resting, allocator.num_free) == (0, 4)
    allocator.name(NAMES[1], second.blocks[0])
    assert len(allocator.index) == 1, "a block has one name"
    allocator.release(second)
    taken = allocator.reserve(24)
    assert sorted(taken.blocks) == list(range(6))


def test_an_index_has_checkpoints_where_tables_have_state_and_only_there():
    with pytest.raises(AssertionError):
        BlockAllocator(4, 4, PrefixIndex(), num_state_slots=2)
    with pytest.raises(AssertionError):
        BlockAllocator(4, 4, PrefixIndex(checkpoints=StateCheckpoints()))


@given(
    prompt_len=st.integers(1, 3000),
    block_size=st.sampled_from([16, 32, 64]),
    shares=st.tuples(*[st.integers(0, 200)] * 2),
)
def test_where_a_prompt_leaves_checkpoints(prompt_len, block_size, shares):
    num_cached, num_shared = (min(share, (prompt_len - 1) // block_size) for share in sorted(shares))
    found = checkpoint_blocks(prompt_len, block_size, num_cached=num_cached, num_shared=num_shared)
    assert list(found) == sorted(set(found)) and len(found) <= 2
    assert [count for count, parts in found.items() if parts] == [num_shared] * (num_shared in [*found][:-1])
    assert all(num_cached < count and count * block_size + TURN_LEN < prompt_len for count in found)
    assert all(count * block_size >= MIN_CHECKPOINT_LEN for count in found)
    last = max(0, prompt_len - 1 - TURN_LEN) // block_size
    least = -(-MIN_CHECKPOINT_LEN // block_size)
    assert (last in found) == (last > num_cached and last >= least)
    assert last * block_size >= prompt_len - block_size - TURN_LEN
    parts = (num_shared - num_cached) * block_size >= MIN_CHECKPOINT_LEN and num_shared <= last
    assert (num_shared in found) == (num_shared >= least and (parts or num_cached < num_shared == last))


@given(
    prompt_len=st.integers(1, 6000),
    block_size=st.sampled_from([16, 32, 64]),
    num_blocks=st.integers(1, 40),
    shares=st.tuples(*[st.integers(0, 200)] * 2),
)
def test_at_an_interval_it_leaves_more_and_none_too_many(prompt_len, block_size, num_blocks, shares):
    """Wherever a later prompt parts from it, a checkpoint is little more than an interval before that."""
    interval = max(num_blocks * block_size, MIN_CHECKPOINT_LEN)
    num_cached, num_shared = (min(share, (prompt_len - 1) // block_size) for share in sorted(shares))
    asked = {"num_cached": num_cached, "num_shared": num_shared}
    usual = checkpoint_blocks(prompt_len, block_size, **asked)
    found = checkpoint_blocks(prompt_len, block_size, **asked, interval=interval)
    assert usual.items() <= found.items() and list(found) == sorted(found)
    more = [count for count in found if count not in usual]
    assert all(count * block_size % interval == 0 and not found[count] for count in more)
    more_at = [count * block_size for count in more]
    at = [num_cached * block_size, *(count * block_size for count in found)]
    for first, second in itertools.pairwise(at):
        assert second - first < interval + 2 * MIN_CHECKPOINT_LEN
        assert second - first >= MIN_CHECKPOINT_LEN or (second // block_size in usual and first not in more_at)
    assert len(more) <= prompt_len // interval


def test_where_the_marks_of_an_interval_lie():
    found = checkpoint_blocks(2200, 16, num_cached=0, num_shared=0, interval=512)
    assert [count * 16 for count in found] == [512, 1024, 1536, 2048, 2176]
    found = checkpoint_blocks(2200, 16, num_cached=64, num_shared=93, interval=512)
    assert [(count * 16, parts) for count, parts in found.items()] == [
        (1488, True),
        (2048, False),
        (2176, False),
    ], "1536 is not far enough behind 1488"


@pytest.mark.parametrize(
    ("prompt_len", "block_size", "found"), [(130, 16, (112,)), (130, 64, (64,)), (73, 16, (64,)), (72, 16, ())]
)
def test_a_short_prompt_can_leave_one(prompt_len, block_size, found):
    counts = checkpoint_blocks(prompt_len, block_size, num_cached=0, num_shared=0)
    assert tuple(count * block_size for count in counts) == found
