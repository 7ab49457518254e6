"""KV that holds NaN: the answer that reads it breaks off, no other does, and what is computed again is right."""

import math

import pytest
import torch

from baton.core.errors import ModelOutputInvalid
from baton.engine.step.counters import IDLE
from baton.engine.step.result import ResultLayout
from baton.kernels.sampling.verify import NOT_FINITE
from baton.tests.e2e.topology import Topology
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyConfig, ToyModel
from baton.tests.engine.toy_engine import letters_tokenizer, request_of, toy_engine
from baton.tests.engine.toy_hybrid import SNAPSHOT, ToyHybrid

pytestmark = pytest.mark.fast

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 2
OTHER = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]


def asked(prompt, k=2):
    return request_of(prompt, k=k, max_tokens=12, ignore_eos=True)


def wanted(model, request):
    return reference.generate(model, request.prompt_token_ids, request.sampling)


def damage(pool, blocks):
    """Every number of these blocks, in each layer that has its rows in them."""
    for layer in range(len(pool.layout.layers)):
        if pool.blocks(layer).shape[0] == pool.num_blocks + 1:
            pool.blocks(layer)[list(blocks)] = math.nan


def damage_checkpoints(pool):
    """The sums of the state that they keep."""
    pool.blocks(SNAPSHOT)[list(pool.checkpoint_slots), :, 0, 0, 1] = math.nan


def cached_blocks(worker):
    return sorted(worker.engine.scheduler.allocator.index._names)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.long
def test_an_answer_from_damaged_kv_breaks_off_and_the_next_is_right(k, scheduling):
    model = ToyModel()
    with Topology(
        model, letters_tokenizer(), num_prefill=0, num_drafts=k, block_size=4, scheduling=scheduling, chunk_len=8
    ) as topology:
        [side] = topology.decode
        local = lambda prompt: topology.start_local(asked(prompt, k))  # noqa: E731
        first = topology.finish(local(PROMPT), timeout_s=60.0)
        assert first.token_ids == wanted(model, asked(PROMPT, k))
        damage(side.pool, cached_blocks(side.worker)[2:3])
        broken, others = local(PROMPT), [local(OTHER) for _ in range(2)]
        found = topology.finish(broken, timeout_s=60.0)
        assert isinstance(found.error, ModelOutputInvalid)
        assert not found.token_ids, "none of its tokens was sent"
        for other in others:
            assert topology.finish(other, timeout_s=60.0).token_ids == wanted(model, asked(OTHER, k))
        again = topology.finish(local(PROMPT), timeout_s=60.0)
        assert (again.token_ids, again.first.num_cached_tokens) == (first.token_ids, 0)
        assert topology.finish(local(PROMPT), timeout_s=60.0).first.num_cached_tokens > 0
        topology.wait_idle()
        [held] = topology.inventories()
        assert (held.num_not_finite, held.num_requests_failed) == (1, 1)


@pytest.mark.long
def test_a_prefill_worker_hands_nothing_over_that_is_not_finite():
    model = ToyModel()
    with Topology(model, letters_tokenizer(), num_drafts=2, block_size=4, chunk_len=8) as topology:
        right = wanted(model, asked(PROMPT))
        assert topology.finish(topology.start(asked(PROMPT))).token_ids == right
        damage(topology.prefill[0].pool, cached_blocks(topology.prefill[0].worker)[:1])
        running = topology.start(asked(PROMPT))
        assert isinstance(topology.finish(running).error, ModelOutputInvalid)
        topology.cancel(running)
        assert topology.finish(topology.start(asked(PROMPT))).token_ids == right
        topology.wait_idle()


@pytest.mark.long
def test_a_damaged_checkpoint_of_state_is_dropped():
    model = ToyHybrid(config=ToyConfig(max_model_len=512))
    with Topology(model, letters_tokenizer(), num_prefill=0, num_drafts=2, chunk_len=32, max_num_seqs=4) as topology:
        [side] = topology.decode
        prompts = [PROMPT * 2 + [at] * 40 for at in range(3)]
        run = lambda prompt: topology.finish(topology.start_local(asked(prompt)))  # noqa: E731
        for prompt in prompts:
            run(prompt)
        last = run(prompts[2])
        assert last.error is None
        assert last.first.num_cached_tokens > 0
        damage_checkpoints(side.pool)
        broken, *others = (run(prompts[2]) for _ in range(3))
        assert isinstance(broken.error, ModelOutputInvalid)
        assert not broken.token_ids
        assert [other.token_ids for other in others] == [last.token_ids] * 2
        assert others[0].first.num_cached_tokens == 0
        topology.wait_idle()
        assert len(side.worker.engine.scheduler.allocator.index.checkpoints) > 0


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.long
def test_tokens_before_the_damage_stay(scheduling):
    model = ToyModel()
    engine = toy_engine(model, k=2, scheduling=scheduling)
    broken, other = asked(PROMPT), asked(OTHER)
    engine.submit(broken)
    engine.submit(other)
    sequence = next(iter(engine.scheduler._sequences))
    while len(sequence.token_ids) < 4:
        engine.step()
    damage(engine.pool, sequence.table.blocks[1:2])
    events, given = engine.run(asked(OTHER)), []
    for event in events:
        given += event.token_ids
    assert given == wanted(model, other)
    results = {key: [event for event in events] for key, events in engine._caller.unread.items()}
    told = [token for event in results[broken.key] for token in event.token_ids]
    assert results[broken.key][-1].result.error.__class__ is ModelOutputInvalid
    right = wanted(model, broken)
    assert 4 <= len(told) < len(right)
    assert told == right[: len(told)]
    assert [token for event in results[other.key] for token in event.token_ids] == wanted(model, other)


def test_results_tell_of_it_and_of_how_far_a_sequence_went():
    layout = ResultLayout(
        num_drafts=2,
        proposed_lens=(2, 2, 2),
        num_tops=(None,) * 3,
        samples=(True, False, True),
        chunk_tops=(None,) * 3,
        reports=((0, 0),) * 3,
    )
    rows = [[1, 5, 6, 0], [NOT_FINITE + 1, 7, 8, 0], [IDLE, 0, 0, 0]]
    values = torch.tensor([*(number for row in rows for number in row), NOT_FINITE, 3, 0, 4])
    output = layout.read(values, {})
    assert [row.error.__class__ for row in output.decode] == [type(None), ModelOutputInvalid, type(None)]
    assert [len(row.token_ids) for row in output.decode] == [2, 2, 0], "bounds of lengths follow from it"
    assert [(made.token, made.error.__class__) for made in output.chunks] == [
        (None, ModelOutputInvalid),
        (None, type(None)),
        (4, type(None)),
    ]
