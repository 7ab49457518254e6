"""How much of prompts is found where sequences keep state: groups that begin alike, turns of a chat, prompts again.

The scheduler alone, with the steps of a worker that computes prompts one after the other, at the lengths that are
served; and a toy model that has all kinds of state, which would notice any other state than that of its prefix.
"""

import random

import pytest

from baton.core.block_hash import MIN_CHECKPOINT_LEN, TURN_LEN, block_hashes
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.state_checkpoints import StateCheckpoints
from baton.tests.e2e.topology import Topology
from baton.tests.engine.toy import ToyConfig
from baton.tests.engine.toy_engine import letters_tokenizer, request_of
from baton.tests.engine.toy_hybrid import ToyHybrid

pytestmark = pytest.mark.fast

NUM_SLOTS = 4


class Worker:
    """A scheduler over a pool with state, and what a worker does with it."""

    def __init__(
        self, *, block_size=16, num_blocks=4096, num_checkpoints=64, with_mtp=True, budget_len=2048, interval=0
    ):
        checkpoints = StateCheckpoints(range(NUM_SLOTS, NUM_SLOTS + num_checkpoints), interval=interval)
        index = PrefixIndex(checkpoints=checkpoints)
        self.allocator = BlockAllocator(num_blocks, block_size, index, num_state_slots=NUM_SLOTS)
        self.scheduler = Scheduler(self.allocator, num_slots=NUM_SLOTS)
        self.with_mtp, self.budget_len = with_mtp, budget_len
        self.num_made = self.num_steps = 0

    def begin(self, prompt):
        """A sequence that has its blocks and its slot."""
        self.num_made += 1
        names = block_hashes(prompt, model="m", tenant="", block_size=self.allocator.block_size, with_mtp=self.with_mtp)
        request = GenerationRequest(
            key=AttemptKey(f"{self.num_made}", 1), prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=4), deadline_s=1e9,
        )  # fmt: skip
        sequence = Sequence(request=request, checker=None, draft_cap=0, submitted_s=0.0, block_hashes=names)
        self.scheduler.add(sequence)
        self.scheduler.give_blocks()
        self.scheduler.give_slots()
        return sequence

    def name(self, sequence, chunk):
        """The chunk's step is over."""
        self.scheduler.name_blocks(sequence, sequence.table, chunk.start, chunk.end, chunk.keep_in)

    def found(self, prompt):
        """Compute a prompt; how many of its tokens were cached."""
        sequence = self.begin(prompt)
        while sequence.num_left:
            ((_, chunk),) = self.scheduler.chunks(self.budget_len)
            sequence.num_computed = chunk.end
            self.num_steps += 1
            self.name(sequence, chunk)
        self.scheduler.remove(sequence)()
        self.scheduler.check_empty()
        return sequence.num_cached


def tokens(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def groups(num_groups, num_prompts, shared_len, own_len):
    """Prompts of each group begin alike."""
    return [
        [tokens(shared_len, f"{group}") + tokens(own_len, f"{group} {at}") for at in range(num_prompts)]
        for group in range(num_groups)
    ]


ORDERS = {
    "a group after the other": lambda made: [prompt for group in made for prompt in group],
    "in turn": lambda made: [prompt for some in zip(*made, strict=True) for prompt in some],
}


@pytest.mark.long
@pytest.mark.parametrize("with_mtp", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_the_third_prompt_of_a_group_finds_what_the_group_shares(order, block_size, with_mtp):
    worker = Worker(block_size=block_size, with_mtp=with_mtp)
    found = [worker.found(prompt) for prompt in ORDERS[order](groups(8, 8, 1500, 700))]
    assert sum(cached > 0 for cached in found) == 48
    assert {cached for cached in found if cached} == {1500 // block_size * block_size}
    assert len(worker.allocator.index.checkpoints) <= 64
    evicted = worker.allocator.index.checkpoints.num_evicted
    assert len(worker.allocator.index.checkpoints) + evicted == 8 * 8 + 8, "each has one at its end, each group one"
    assert worker.num_steps <= 3 * 64


@pytest.mark.parametrize(
    ("num_checkpoints", "hits"), [(24, 48), (16, 48), (15, 48), (12, 48), (8, 36), (6, 24), (4, 18)]
)
@pytest.mark.long
def test_what_a_group_shares_stays_while_ends_of_prompts_come_and_go(num_checkpoints, hits):
    """Groups for which there is no room take none from the others: six of eight find theirs, four, three."""
    worker = Worker(num_checkpoints=num_checkpoints)
    made = [worker.found(prompt) for prompt in ORDERS["in turn"](groups(8, 8, 1500, 700))]
    assert sum(cached > 0 for cached in made) == hits


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("interval", "second"), [(256, 1280), (512, 1024), (1024, 1024)])
@pytest.mark.long
def test_at_an_interval_the_second_prompt_of_a_group_finds_most_of_it(interval, second, order, block_size):
    worker = Worker(block_size=block_size, interval=interval, num_checkpoints=128)
    found = [worker.found(prompt) for prompt in ORDERS[order](groups(8, 8, 1500, 700))]
    assert sum(cached > 0 for cached in found) == 56
    whole = 1500 // block_size * block_size
    assert sorted(found) == [0] * 8 + [second] * 8 + [whole] * 48
    checkpoints = worker.allocator.index.checkpoints
    num_new = 8 * (2200 // interval) + 56 * len(range(0, 700, interval))
    assert len(checkpoints) + checkpoints.num_evicted <= num_new + 8 * 8 + 8, "what they cost"


@pytest.mark.parametrize(("interval", "num_checkpoints", "hits"), [(512, 40, 56), (1024, 32, 56), (1024, 16, 48)])
@pytest.mark.long
def test_what_hits_at_an_interval_cost(interval, num_checkpoints, hits):
    """Groups in turn: between two prompts of a group lie those of seven others, with all that they leave."""
    worker = Worker(num_checkpoints=num_checkpoints, interval=interval)
    made = [worker.found(prompt) for prompt in ORDERS["in turn"](groups(8, 8, 1500, 700))]
    assert sum(cached > 0 for cached in made) == hits


def test_turns_of_chats_leave_one_checkpoint_each_and_take_none_from_groups():
    """Six chats beside eight groups, in turn: each turn finds the one before, and each third prompt what is shared."""
    worker = Worker(num_blocks=1 << 14, num_checkpoints=28)
    chats, found = [tokens(500, f"chat {at}") for at in range(6)], [0, 0]
    for turn, prompts in enumerate(zip(*groups(8, 8, 1500, 700), strict=True)):
        for at, prompt in enumerate(prompts):
            found[0] += worker.found(prompt) > 0
            if at < len(chats):
                before = len(chats[at]) - 150
                found[1] += worker.found(chats[at]) >= 0.95 * before and turn > 0
                chats[at] += tokens(150, f"{at} {turn}")
    assert found == [8 * 6, 6 * 7]
    checkpoints = worker.allocator.index.checkpoints
    assert len(checkpoints) + checkpoints.num_evicted == 8 * 8 + 8 + 6 * 8


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("tail_len", [0, 1, 4, TURN_LEN])
def test_the_next_turn_of_a_chat_finds_nearly_all_of_the_one_before(tail_len, block_size):
    """Also where the template ends a prompt with tokens that the next turn does not begin with."""
    worker, text, before = Worker(block_size=block_size), tokens(2000, 1), 0
    for turn in range(12):
        prompt = text + tokens(tail_len, f"tail {turn}")
        found = worker.found(prompt)
        assert found >= 0.95 * before
        before = len(prompt)
        text = text + tokens(60 + 37 * turn, f"turn {turn}")


@pytest.mark.parametrize("with_mtp", [True, False])
def test_a_prompt_again_finds_all_but_its_end(with_mtp):
    worker = Worker(with_mtp=with_mtp)
    for length in (*range(1, 150), 4096, 4097):
        prompt = tokens(length, length)
        assert worker.found(prompt) == 0
        num_steps = worker.num_steps
        found = worker.found(prompt)
        assert worker.num_steps - num_steps == -(-(length - found) // worker.budget_len), "none for a checkpoint alone"
        assert found == (0 if length < MIN_CHECKPOINT_LEN + 1 + TURN_LEN else (length - 1 - TURN_LEN) // 16 * 16)
    assert worker.found(tokens(130, 130)) == 112


def test_without_room_for_checkpoints_rows_alone_are_no_hit():
    worker = Worker(num_checkpoints=0)
    assert [worker.found(tokens(500, 0)) for _ in range(3)] == [0, 0, 0]
    assert worker.num_steps == 3


def test_rows_that_are_found_are_not_lost_with_the_prompt_that_left_them():
    """A prompt computes rows again for which there was no checkpoint: those that it leaves are as young as its own."""
    worker = Worker(num_blocks=64, num_checkpoints=8)
    shared = tokens(330, 0)
    for at in range(2):
        worker.found(shared + tokens(100, at))
    num_free = worker.allocator.num_free - worker.allocator.index.num_resting
    worker.found(tokens(16 * (num_free + 6), "another"))  # gives up six blocks: the own ones of those two
    assert worker.found(shared + tokens(30, 3)) == 320


@pytest.fixture(scope="module")
def toy():
    return ToyHybrid(config=ToyConfig(max_model_len=512))


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "scheduling", "interval"), [(0, "sync", 0), (2, "async", 0), (4, "async", 0), (2, "async", 64)]
)
def test_a_toy_that_keeps_all_kinds_of_state_finds_the_state_of_its_prefix(toy, k, scheduling, interval):
    """It asserts the boundary of each state; tokens and accepted drafts are those without checkpoints.

    Groups share five blocks, and four of them with the draft entry at their end, which depends on the token after it.
    """
    shared_len = 160 if interval else 80
    prompts = [[token % 22 for token in prompt] for prompt in ORDERS["in turn"](groups(3, 5, shared_len, 40))]
    made = []
    for num_checkpoints in (0, 24 if interval else 8):
        with Topology(
            toy, letters_tokenizer(), num_prefill=0, num_drafts=k, chunk_len=32, num_blocks=128, max_num_seqs=4,
            num_checkpoints=num_checkpoints, scheduling=scheduling, state_checkpoint_interval=interval,
        ) as topology:  # fmt: skip
            asked = [request_of(prompt, k=k, max_tokens=9, temperature=0.0, ignore_eos=True) for prompt in prompts]
            outcomes = [topology.finish(topology.start_local(request), timeout_s=20.0) for request in asked]
            made.append([(outcome.token_ids, outcome.decode_stats.num_accepted_tokens) for outcome in outcomes])
            hits = [outcome.first.num_cached_tokens for outcome in outcomes]
            wanted = [0] * 3 + [64] * 3 + [144] * 9 if interval else [0] * 6 + [64] * 9
            assert hits == (wanted if num_checkpoints else [0] * 15)
    assert made[0] == made[1]


def test_of_a_sequence_whose_state_is_not_finite_no_step_in_flight_leaves_a_name_or_a_checkpoint():
    worker = Worker(num_checkpoints=2)
    prompt = tokens(16 * 20, 1)
    sequence = worker.begin(prompt)
    chunks = []
    while sequence.num_left:
        ((_, chunk),) = worker.scheduler.chunks(64)
        sequence.num_computed = chunk.end
        chunks.append(chunk)
    first, *others = chunks
    worker.name(sequence, first)
    assert len(worker.allocator.index) == first.end // 16
    worker.scheduler.unshare(sequence)
    for chunk in others:
        worker.name(sequence, chunk)
    assert any(chunk.keep_in for chunk in others)
    checkpoints = worker.allocator.index.checkpoints
    assert (len(worker.allocator.index), len(checkpoints), checkpoints.num_filling) == (0, 0, 0)
    worker.scheduler.remove(sequence)()
    worker.scheduler.check_empty()
    assert worker.found(prompt) == 0
    assert worker.found(prompt) > 0
