"""State slots through the engine and the hand-off: a model of all four kinds says what it says without any of them.

The oracle computes every token from the whole sequence in a pool of its own: nothing is kept from token to token.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from baton.engine.step.batch import ChunkRows, prefill_inputs
from baton.kvcache.pool import KVPool
from baton.tests.e2e.topology import Topology
from baton.tests.engine import toy_hybrid
from baton.tests.engine.toy_engine import letters_tokenizer, request_of, toy_engine
from baton.tests.engine.toy_hybrid import ToyHybrid

CPU = torch.device("cpu")
LENS = (1, 3, 15, 16, 17, 31, 40)  # about the ends of tiles
NUM_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt_of(length, seed=0):
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(22) for _ in range(length)]


def plain(model, prompt, num_tokens):
    """Greedy tokens, each from the whole sequence."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        pool = KVPool(model.kv_layout(16), 8, CPU, num_state_slots=2)
        pool.data_bytes.fill_(63)  # what others left
        chunk = ChunkRows(
            token_ids=np.array(token_ids), start=0, length=len(token_ids), blocks=tuple(range(8)), state_slot=1
        )
        inputs = prefill_inputs([chunk], pool)
        hidden_TD = model.trunk(inputs.token_ids_T, inputs.batch, pool, lambda layer: None)
        token_ids.append(int(model.logits(hidden_TD[-1:]).argmax()))
    return token_ids[len(prompt) :]


@pytest.fixture(scope="module")
def wanted():
    model = ToyHybrid()
    return {length: plain(model, prompt_of(length), NUM_TOKENS) for length in LENS}


def requests(k, lens=LENS):
    return [
        request_of(prompt_of(length), k=k, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True) for length in lens
    ]


def same_tokens(results, wanted, lens=LENS):
    for length, result in zip(lens, results, strict=True):
        assert list(result.token_ids) == wanted[length], length


@pytest.mark.long
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 6])
def test_drafts_that_are_rejected_leave_nothing_behind(k, scheduling, wanted):
    engine = toy_engine(ToyHybrid(), k=k, scheduling=scheduling, chunk_len=7, num_blocks=80)
    results = engine.generate(requests(k))
    same_tokens(results, wanted)
    if k:
        counts = [result.counts for result in results]
        assert 0 < sum(one.num_accepted_tokens for one in counts) < sum(one.num_draft_tokens for one in counts)


@pytest.mark.long
@pytest.mark.parametrize("chunk_len", [1, 5, 16, 64])
def test_a_prompt_may_be_cut_anywhere(chunk_len, wanted):
    engine = toy_engine(ToyHybrid(), k=2, chunk_len=max(chunk_len, 12), num_blocks=80)
    engine.engine.max_num_batched_tokens = chunk_len
    same_tokens(engine.generate(requests(2)), wanted)


@pytest.mark.long
def test_slots_change_hands_without_being_zeroed(wanted):
    engine = toy_engine(ToyHybrid(), k=3, num_blocks=80, max_num_sequences=2)
    lens = [length for _ in range(4) for length in LENS]
    engine.pool.data_bytes.fill_(63)
    same_tokens(engine.generate(requests(3, lens)), wanted, lens)
    slots = engine.scheduler.allocator.state_slots
    assert (slots.num_free, slots.num_held) == (2, 0)


WAYS = {
    "recomputed": {"preempt_at": (3, 9)},
    "offloaded": {"preempt_at": (3, 9), "host_kv_bytes": 1 << 20},
    "few blocks": {"num_blocks": 40, "overcommit": True},
    "few blocks, offloaded": {"num_blocks": 40, "overcommit": True, "host_kv_bytes": 1 << 20},
}


@pytest.mark.long
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
def test_state_is_preempted_and_comes_back_with_its_blocks(way, scheduling, wanted):
    options = {"num_blocks": 80} | WAYS[way]
    engine = toy_engine(ToyHybrid(), k=2, scheduling=scheduling, chunk_len=9, **options)
    lens = [length for length in LENS for _ in range(2)]
    same_tokens(engine.generate(requests(2, lens)), wanted, lens)
    assert engine.preemptions.num_preemptions > 0
    assert (engine.preemptions.num_restored_blocks > 0) == ("offloaded" in way)
    assert engine.scheduler.allocator.state_slots.num_held == 0
    assert engine.engine.num_host_blocks_used == engine.engine.num_state_images_used == 0


def test_a_state_that_finds_no_room_in_host_memory_is_computed_again(wanted):
    engine = toy_engine(ToyHybrid(), k=2, num_blocks=80, preempt_at=(3,), host_kv_bytes=4500)
    assert engine.runner.num_state_images == 1
    same_tokens(engine.generate(requests(2)), wanted)
    assert engine.preemptions.num_host_full > 0


@pytest.mark.parametrize("k", [0, 2, 6])
@pytest.mark.parametrize("block_sizes", [16, 64])
def test_handed_off_it_says_what_one_process_says(k, block_sizes, wanted):
    topology = Topology(
        ToyHybrid(), letters_tokenizer(), num_drafts=k, chunk_len=13, num_blocks=64, block_size=block_sizes,
        max_num_seqs=4,
    )  # fmt: skip
    try:
        lens = [length for _ in range(3) for length in LENS]
        outcomes = topology.generate(requests(k, lens))
        for length, outcome in zip(lens, outcomes, strict=True):
            assert outcome.error is None
            assert outcome.token_ids == wanted[length], length
        assert not topology.fatal
        topology.wait_idle()
        for side in itertools.chain(topology.prefill, topology.decode):
            assert side.worker.engine.scheduler.allocator.state_slots.num_held == 0
    finally:
        topology.close()


@pytest.mark.fast
def test_a_ring_too_short_for_the_drafts_of_a_step_is_refused(monkeypatch):
    """Rejected rows would overwrite what is kept, and nothing would say so."""
    monkeypatch.setattr(toy_hybrid, "RING", 8)
    toy_engine(ToyHybrid(), k=4, num_blocks=80)
    with pytest.raises(AssertionError, match="rings are too short"):
        toy_engine(ToyHybrid(), k=5, num_blocks=80)
