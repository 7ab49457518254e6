"""Preempted or not, a sequence says the same; blocks that run out cost time, never a token or a request."""

import dataclasses
import functools
import gc
import itertools
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.clock import VirtualClock
from baton.core.errors import PromptTooLong, RequestDeadlineExceeded
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.local import LocalEngine
from baton.engine.sequence import MAX_PREEMPTIONS, Sequence
from baton.tests.engine import races, reference
from baton.tests.engine.test_grammar_engine import SPECS
from baton.tests.engine.test_sampling_parameters import KINDS
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import EOS, request_of, toy_engine

torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
MODEL, PERFECT = ToyModel(), PerfectToyModel()
MAX_TOKENS = 14
BLOCK_BYTES = 3 * 2 * 2 * 4 * 8  # of the toy: layers, heads, K and V, positions, float64
WAYS = {"recompute": 0, "offload": 60 * BLOCK_BYTES, "little": 3 * BLOCK_BYTES}


@functools.cache
def expected_tokens(model, prompt, params):
    return tuple(reference.generate(model, prompt, params, (EOS,)))


def engine_of(model=MODEL, *, way="recompute", **options):
    options = {"num_blocks": 60, "overcommit": True, "host_kv_bytes": WAYS[way]} | options
    engine = toy_engine(model, **options)
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)  # what was never written must never be read
    return engine


def run(requests, **options):
    engine = engine_of(**options)
    results = engine.generate(requests)
    engine.step()  # asserts that every block and slot is free
    assert engine.engine.is_idle
    assert engine.engine.num_host_blocks_used == 0
    assert engine.preemptions.num_preemptions == sum(result.num_preemptions for result in results)
    return engine, results


@pytest.mark.long
@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 6])
@pytest.mark.parametrize(
    "at",
    [
        0,
        pytest.param(1, marks=pytest.mark.fast),
        5,
        12,
        *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 3, 7, 9, 13)),
    ],
)
def test_preempted_at_any_token(at, k, way):
    prompts = [(5, 6, 1), tuple(range(17)), (9,)]
    for scheduling, temperature in itertools.product(("async", "sync"), (0.0, 1.0)):
        requests = [
            request_of(prompt, k=k, max_tokens=MAX_TOKENS, temperature=temperature, seed=7, ignore_eos=True)
            for prompt in prompts
        ]
        engine, results = run(requests, way=way, k=k, chunk_len=5, preempt_at=(at,), scheduling=scheduling)
        for request, result in zip(requests, results, strict=True):
            assert result.token_ids == expected_tokens(MODEL, request.prompt_token_ids, request.sampling)
            # In the first chunk nothing has been computed yet, and the last tokens may be in flight already.
            assert result.num_preemptions == 1 or at == 0 or at > MAX_TOKENS - 2 * (k + 1)
        counts = engine.preemptions
        assert counts.num_restored_blocks == counts.num_offloaded_blocks
        if way == "recompute":
            assert counts.num_offloaded_blocks == counts.num_host_full == 0
        elif at > 0:
            assert counts.num_recomputed_tokens == 0


@pytest.mark.fast
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_prompt_that_is_computed_again_counts_once(at):
    requests = [request_of(tuple(range(length)), k=0, max_tokens=9) for length in (17, 3, 11)]
    engine, results = run(requests, way="recompute", chunk_len=5, preempt_at=(at,))
    assert sum(result.num_preemptions for result in results) >= 2
    assert engine.engine.num_prompt_tokens == 17 + 3 + 11


@pytest.mark.fast
@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.long
def test_drafts_are_as_good_after_a_preemption(at, way):
    """The head of this model is right whenever its KV, hidden states and positions are."""
    request = request_of([3, 1, 4], k=2, max_tokens=19, temperature=0.0, ignore_eos=True)
    _, [result] = run([request], model=PERFECT, way=way, k=2, preempt_at=(at,))
    assert result.num_preemptions == 1
    assert result.counts.num_accepted_tokens == result.counts.num_draft_tokens > 0


def same_but_for_preemptions(results):
    return [dataclasses.replace(result, key=None, ttft_s=None, tpot_s=None, num_preemptions=0) for result in results]


@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_every_parameter_goes_on_as_before(k, temperature, way):
    """Tokens, log-probabilities and counts are those without a preemption; nothing is reported twice."""
    base = {"max_tokens": 20, "ignore_eos": True, "seed": 5, "temperature": temperature, "logprobs": 2}
    extra = {
        "stop": {"stop": ("dc", "k")},
        "prompt": {"prompt_logprobs": 1},
        "answers": {"n": 2, "prompt_logprobs": 0},
    }

    def requests():
        return [request_of(range(5, 16), k=k, **(base | values)) for values in (KINDS | extra).values()]

    _, plain = run(requests(), k=k, chunk_len=6, overcommit=False, max_num_sequences=5)
    for at in (0, 11) if k else (1, 6):
        _, results = run(requests(), way=way, k=k, chunk_len=6, preempt_at=(at,), max_num_sequences=5)
        assert sum(result.num_preemptions for result in results) > 6
        assert same_but_for_preemptions(results) == same_but_for_preemptions(plain)


@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize("method", list(DraftSampleMethod))
def test_rejection_goes_on_as_before(method, way):
    """Not only in law: the draft that was in hand is made again as steps make it, and draws are by position."""
    verification = VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=method)

    def requests():
        kinds = ({"temperature": 1.0}, {"temperature": 1.0, "frequency_penalty": 0.5}, {"temperature": 0.0})
        return [request_of([at, 3], k=2, max_tokens=20, seed=at, ignore_eos=True, **kinds[at % 3]) for at in range(6)]

    _, plain = run(requests(), verification=verification, overcommit=False)
    for at in (1, 4, 6):
        _, results = run(requests(), way=way, verification=verification, preempt_at=(at,))
        assert sum(result.num_preemptions for result in results) == 6
        assert same_but_for_preemptions(results) == same_but_for_preemptions(plain)


@pytest.mark.parametrize("block_size", [1, 4])
def test_drafts_verified_as_a_block_do_not_depend_on_which_blocks_are_free(block_size):
    """A draft past the last kept token may make earlier ones stand, so it must have its place, too."""
    options = {
        "block_size": block_size,
        "verification": VerificationConfig(mode=VerificationMode.REJECTION, block=True),
    }
    options |= {"model": ToyModel(sharpness=1.0), "k": 4, "max_num_sequences": 1, "scheduling": "sync"}
    for seed in range(60):
        prompt, max_tokens = [seed % 22] * (1 + seed % 12), 6 + seed % 19
        request = request_of(prompt, k=4, max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)
        request = dataclasses.replace(request, keeps_drafts=True)
        num_blocks = -(-(len(prompt) + max_tokens + 4) // block_size)
        [(wanted,), (found,)] = [
            engine_of(num_blocks=count, **options).generate([request]) for count in (400 // block_size, num_blocks)
        ]
        assert found.token_ids == wanted.token_ids, seed


@pytest.mark.fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("way", ["recompute", "offload", "little"])
def test_no_sequence_is_kept_once_it_has_ended(way, scheduling):
    """But for those of the last step."""
    engine = engine_of(way=way, scheduling=scheduling, k=2, preempt_at=(3,))
    for _ in range(4):
        asked = [request_of([1, 2, at], k=2, max_tokens=9, temperature=0.0, ignore_eos=True) for at in range(12)]
        engine.generate(asked)
    kept = [found for found in reachable(engine) if isinstance(found, Sequence)]
    assert len(kept) <= engine.scheduler.num_slots < 12


def reachable(root):
    """Every object that one leads to, but for what all share: modules, classes, functions."""
    seen, todo = {id(root): root}, [root]
    while todo:
        for found in gc.get_referents(todo.pop()):
            if id(found) not in seen and not isinstance(found, type | types.ModuleType | types.FunctionType):
                seen[id(found)] = found
                todo.append(found)
    return seen.values()


@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize(
    ("k", "temperature"), [(2, 1.0), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((0, 0.0), (4, 0.0)))]
)
def test_the_bundled_model_with_and_without_grammars(k, temperature, way, tiny_model, tiny_tokenizer, tiny_prompts):
    def run_all(**options):
        engine = LocalEngine(
            tiny_model,
            tiny_tokenizer,
            num_blocks=100,
            block_size=16,
            num_draft_tokens=k,
            chunk_len=40,
            max_num_sequences=8,
            **options,
        )
        requests = [
            GenerationRequest(
                key=AttemptKey(f"r{at}", 1),
                prompt_token_ids=tiny_prompts[at + 3],
                sampling=SamplingParams(max_tokens=18, temperature=temperature, seed=at, grammar=spec),
                deadline_s=float("inf"),
                num_draft_tokens=k,
            )
            for at, spec in enumerate([None, SPECS["schema"], SPECS["regex"], SPECS["ebnf"], None])
        ]
        return engine.generate(requests)

    plain = run_all()
    host_kv_bytes = 1 << 22 if way == "offload" else 0
    for at in (0, 4) if way == "recompute" else (1, 8):
        results = run_all(overcommit=True, preempt_at=(at,), host_kv_bytes=host_kv_bytes)
        assert same_but_for_preemptions(results) == same_but_for_preemptions(plain)
        assert sum(result.num_preemptions for result in results) >= (3 if at else 1)


any_request = st.builds(
    request_of,
    st.lists(st.integers(0, 22), min_size=1, max_size=20),
    k=st.integers(0, 4),
    max_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
)


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(any_request, min_size=1, max_size=8),
    k=st.integers(0, 4),
    block_size=st.sampled_from([1, 4, 8]),
    chunk_len=st.sampled_from([3, 16]),
    max_num_sequences=st.integers(1, 6),
    num_positions=st.integers(40, 72),
    preempt_at=st.lists(st.integers(0, 12), max_size=2),
    scheduling=st.sampled_from(["async", "sync"]),
    way=st.sampled_from(list(WAYS)),
)
def test_everybody_ends_in_a_tiny_pool(requests, k, num_positions, block_size, **arrangement):
    _, results = run(requests, num_blocks=num_positions // block_size, block_size=block_size, k=k, **arrangement)
    scripted = len(arrangement["preempt_at"])
    for request, result in zip(requests, results, strict=True):
        assert result.error is None
        assert result.token_ids == expected_tokens(MODEL, request.prompt_token_ids, request.sampling)
        assert result.num_preemptions <= MAX_PREEMPTIONS + scripted


@pytest.mark.long
@pytest.mark.parametrize("scheduling", ["async", "sync"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [0, pytest.param(2, marks=pytest.mark.fast)])
def test_twenty_requests_under_pressure(k, way, scheduling):
    """12 blocks: two of these would be all of them, so more at once must share, and some must give way."""
    requests = [
        request_of([at, 2], k=k, max_tokens=18, temperature=at % 2, seed=at, ignore_eos=True) for at in range(20)
    ]
    engine = engine_of(num_blocks=12, way=way, k=k, max_num_sequences=5, scheduling=scheduling)
    for request in requests:
        engine.submit(request)
    most = 0
    while engine.scheduler.sequences():
        engine.step()
        most = max(most, len(engine.scheduler.running()))
    results = [engine._caller.unread[request.key][-1].result for request in requests]
    assert most > 2
    assert engine.preemptions.num_preemptions > 0
    assert results[0].num_preemptions == 0, "the oldest is never preempted"
    assert max(result.num_preemptions for result in results) <= MAX_PREEMPTIONS
    assert (engine.preemptions.num_offloaded_blocks > 0) == (way != "recompute")
    assert (engine.preemptions.num_host_full > 0) == (way == "little")
    assert (engine.preemptions.num_recomputed_tokens > 0) == (way != "offload")
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == expected_tokens(MODEL, request.prompt_token_ids, request.sampling)
    engine._forget(requests)
    assert engine.scheduler.allocator.num_free == 12


@pytest.mark.fast
@pytest.mark.long
def test_without_overcommit_nobody_is_ever_preempted():
    requests = [request_of([at, 2], k=2, max_tokens=18, temperature=0.0, ignore_eos=True) for at in range(8)]
    engine, _ = run(requests, num_blocks=12, overcommit=False)
    assert engine.preemptions.num_preemptions == 0


@pytest.mark.fast
def test_one_that_never_fits_is_refused_at_once():
    engine = engine_of(num_blocks=5)
    with pytest.raises(PromptTooLong):
        engine.submit(request_of([1] * 10, k=2, max_tokens=9))
    [result] = engine.generate([request_of([1] * 10, k=2, max_tokens=8, ignore_eos=True)])
    assert len(result.token_ids) == 8


@pytest.mark.fast
@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_a_preempted_sequence_ends_by_its_deadline_and_keeps_its_tokens(way):
    clock = VirtualClock()
    engine = engine_of(way=way, clock=clock, max_num_sequences=1, preempt_at=(4,))
    request = request_of([1, 2], k=0, max_tokens=30, temperature=0.0, deadline_s=5.0, ignore_eos=True)
    engine.submit(request)
    events = engine._caller.unread[request.key]
    give_blocks = engine.scheduler.give_blocks
    engine.scheduler.give_blocks = lambda: give_blocks() if engine.preemptions.num_preemptions == 0 else []
    while engine.preemptions.num_preemptions == 0:
        engine.step()
    assert engine.engine.num_host_blocks_used == (2 if way == "offload" else 0)
    clock.advance(6.0)
    engine.step()
    assert isinstance(events[-1].result.error, RequestDeadlineExceeded)
    streamed = tuple(token for event in events for token in event.token_ids)
    whole = expected_tokens(MODEL, request.prompt_token_ids, request.sampling)
    assert streamed == events[-1].result.token_ids == whole[: len(streamed)]
    engine._forget([request])
    assert engine.engine.num_host_blocks_used == 0
    assert engine.scheduler.allocator.num_reserved == 0


def test_a_short_hunt_finds_no_race(monkeypatch):
    with monkeypatch.context() as patch:
        assert races.hunt(patch, seed=5, preempt=True) > 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_hunt_finds_no_race(monkeypatch):
    num_steps = 0
    for seed in range(1000):
        with monkeypatch.context() as patch:
            num_steps += races.hunt(patch, seed=seed, num_requests=40, preempt=True)
        if num_steps >= 10_000:
            return
    pytest.fail(f"only {num_steps} steps")


@pytest.mark.parametrize("plant", races.PLANTED_IN_PREEMPTION, ids=lambda plant: plant.__name__)
def test_planted_races_are_caught(plant, monkeypatch):
    assert races.is_caught(monkeypatch.context, plant, preempt=True)
