"""A gang of ranks generates what one rank does: greedy and coupled, with drafts and without, batched and chunked."""

import itertools

import pytest
import torch

from baton.core.errors import ProtocolError, WorkerLost
from baton.core.numerics import Numerics
from baton.core.sampling import GrammarSpec, SamplingParams
from baton.engine.decode import DecodeRunner
from baton.engine.gang import FollowDecode, FollowPrefill, LeadDecode, LeadPrefill
from baton.engine.grammar import GrammarCompiler
from baton.engine.plan import PlanChannel, decide
from baton.engine.prefill import PrefillChunk, PrefillRunner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.engine.test_grammar import small_tokenizer
from baton.tests.model.harness import prompt
from baton.tests.model.ranks import on_ranks

CHECKPOINT = {"kind": "qwen3_moe", "num_heads": 8, "num_kv_heads": 4}
LENGTHS = (1, 17, 40)
BLOCK_SIZE, CHUNK_LEN, NUM_TOKENS = 16, 24, 12
MODES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "grammar": {"temperature": 1.0, "grammar": GrammarSpec("regex", "(ab|ba|01*)[abc01]{40,}")},
}


def load(path, group=None, dtype=torch.float64, numerics=Numerics.DEFAULT):
    return load_model(
        path, dtype=dtype, device=torch.device("cpu"), numerics=numerics, with_mtp=True, communicator=group
    )


def runners_of(model, k, group=None):
    rank, size = (group.rank, group.size) if group else (0, 1)
    pool = KVPool(model.kv_layout(BLOCK_SIZE), 40, model.device, rank=rank, size=size)
    grammars = GrammarCompiler(small_tokenizer(), model.config.vocab_size)
    return PrefillRunner(model, pool, group, grammars), DecodeRunner(model, pool, len(LENGTHS), k, group, grammars)


def generate(prefill, decode, k, mode):
    """Tokens of every prompt: chunk by chunk, each joining the others in decode when it is done."""
    allocator = BlockAllocator(40, BLOCK_SIZE)
    slots = []
    tokens = []
    for slot, length in enumerate(LENGTHS):
        sampling = SamplingParams(seed=slot, max_tokens=NUM_TOKENS, **MODES[mode])
        table = allocator.reserve(length + NUM_TOKENS + k + 1)
        ids = tuple(prompt(length, seed=slot).tolist())
        for start in range(0, length, CHUNK_LEN):
            chunk = PrefillChunk(
                prompt_token_ids=ids,
                start=start,
                length=min(CHUNK_LEN, length - start),
                table=table,
                sampling=sampling,
                draft_cap=k,
            )
            forward = prefill.forward([chunk], lambda layer: None)
            [begin] = prefill.draft(forward, lambda layer: None)
        decode.admit(slot, begin, length, sampling, table, k)
        slots.append(slot)
        tokens.append([begin.first_token])
        step(decode, slots, tokens)
    while slots:
        step(decode, slots, tokens)
        for slot in [slot for slot in slots if len(tokens[slot]) >= NUM_TOKENS]:
            decode.release(slot)
            slots.remove(slot)
    return [ids[:NUM_TOKENS] for ids in tokens]


def step(decode, slots, tokens):
    output = decode.step([slot for slot in slots if len(tokens[slot]) < NUM_TOKENS])
    for slot, token_ids in zip([s for s in slots if len(tokens[s]) < NUM_TOKENS], output.token_ids, strict=True):
        tokens[slot].extend(token_ids)


def as_gang(group, model, k, mode):
    prefill, decode = runners_of(model, k, group)
    channel = PlanChannel(group)
    if group.rank == 0:
        lead = LeadDecode(decode, channel)
        tokens = generate(LeadPrefill(prefill, channel), lead, k, mode)
        lead.close()
        return tokens
    follow = FollowPrefill(prefill)
    decode_ranks = FollowDecode(decode)
    while (plan := channel.hear()).kind != "stop":
        assert follow.take(plan, lambda layer: None) or decode_ranks.take(plan)
    return None


FAST = {(2, 2, "coupled")}
DEFAULT = {(2, 0, "greedy"), (2, 0, "coupled"), (2, 2, "greedy"), (2, 2, "grammar"), (4, 2, "cut")}
CASES = [
    pytest.param(*cell, marks=[pytest.mark.fast] if cell in FAST else [] if cell in DEFAULT else [pytest.mark.slow])
    for cell in itertools.product((2, 4), (0, 2), MODES)
]


@pytest.mark.parametrize(("size", "k", "mode"), CASES)
def test_a_gang_generates_what_one_rank_does(size, k, mode, tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    wanted = generate(*runners_of(load(path), k), k, mode)
    tokens, *others = on_ranks(size, lambda group: as_gang(group, load(path, group), k, mode))
    assert tokens == wanted
    assert others == [None] * (size - 1)


def test_invariant_numerics_give_the_same_tokens_in_bfloat16(tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    options = {"dtype": torch.bfloat16, "numerics": Numerics.INVARIANT}
    wanted = generate(*runners_of(load(path, **options), 2), 2, "coupled")
    tokens, _ = on_ranks(2, lambda group: as_gang(group, load(path, group, **options), 2, "coupled"))
    assert tokens == wanted


@pytest.mark.fast
def test_a_rank_that_diverges_is_named():
    def work(group):
        tokens = torch.tensor([3, 4, 5 + (group.rank == 2)])
        if group.rank == 2:
            with pytest.raises(WorkerLost, match="rank 2 of 3 diverged") as caught:
                decide(group, tokens)
            assert caught.value.fields == {"rank": 2, "size": 3}
            return None
        return decide(group, tokens).tolist()

    assert on_ranks(3, work) == [[3, 4, 5], [3, 4, 5], None]


@pytest.mark.fast
def test_a_plan_that_was_missed_is_noticed():
    def work(group):
        channel = PlanChannel(group)
        if group.rank == 0:
            channel.tell("a", b"\n\x00", values=[1], count=9)
            channel.tell("b")
            return None
        plan = channel.hear()
        channel._count -= 1
        with pytest.raises(ProtocolError, match="plan 2 of version 1"):
            channel.hear()
        return plan.kind, plan.fields, plan.data

    assert on_ranks(2, work)[1] == ("a", {"values": [1], "count": 9}, b"\n\x00")


def test_a_rank_hears_of_rank_0s_death():
    def work(group):
        if group.rank == 0:
            return None
        with pytest.raises(WorkerLost, match="rank 1 of 2"):
            PlanChannel(group).hear()
        return True

    assert on_ranks(2, work) == [None, True]
