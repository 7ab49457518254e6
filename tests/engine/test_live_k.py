"""k changed while sequences run: the same tokens, and drafts as good as if it had never been another."""

import itertools
import random

import numpy as np
import pytest
import torch

from baton.core.clock import VirtualClock
from baton.core.errors import InvalidRequest
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine.local import LocalEngine
from baton.engine.speculation.speculation import Speculation
from baton.tests.engine import reference
from baton.tests.engine.graphs import assert_all_replayed, with_graphs
from baton.tests.engine.live_k import Scripted, random_ks
from baton.tests.engine.test_async_decode import PROMPTS, Side, wanted
from baton.tests.engine.test_grammar_engine import SPECS
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import EOS, request_of, toy_engine

fast = pytest.mark.fast
LIMIT = 6
SWITCHES = (0, 0, 3, 3, 1, 1, 0, 0, 2, 2)
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.2, "min_p": 0.1, "logit_bias": ((3, 2.0), (7, -3.0)), "logprobs": 2},
    {"temperature": 1.0, "bad_words": ((4,), (5, 6), (1, 2, 3)), "min_tokens": 1},
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def toy_requests(seed, count=14, max_tokens=(1, 7, 15, 24)):
    rng = random.Random(seed)
    return [
        request_of(
            [rng.randrange(22) for _ in range(rng.choice((1, 3, 6, 11)))],
            k=rng.choice((0, 1, 2, LIMIT, LIMIT)),
            seed=at,
            max_tokens=rng.choice(max_tokens),
            ignore_eos=at % 3 > 0,
            **KINDS[at % len(KINDS)],
        )
        for at in range(count)
    ]


def check_counts(results, steps):
    """What was counted of each request is what the steps made of it, but for rows of sequences that had ended."""
    for result in results:
        counts = result.counts
        assert counts.num_emitted_tokens == len(result.token_ids)
        assert sum(counts.num_accepted_at) == counts.num_accepted_tokens <= counts.num_draft_tokens
        # Every step emits what it accepts and one token more, but for the last, which may be cut.
        whole_len = 1 + counts.num_accepted_tokens + counts.num_verify_steps
        assert whole_len - 1 <= len(result.token_ids) <= whole_len
    rows = [(proposed, accepted) for _, *lens in steps for proposed, accepted in zip(*lens, strict=True)]
    assert sum(result.counts.num_verify_steps for result in results) <= len(rows)
    assert sum(result.counts.num_draft_tokens for result in results) <= sum(proposed for proposed, _ in rows)
    assert sum(result.counts.num_accepted_tokens for result in results) <= sum(accepted for _, accepted in rows)


@pytest.mark.long
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("seed", [pytest.param(0, marks=fast), 1, 2])
def test_tokens_do_not_change_with_k(seed, scheduling):
    requests = toy_requests(seed)
    plain = toy_engine(k=0, num_blocks=60).generate(requests_with(requests, 0))
    speculation = Scripted(LIMIT, random_ks(seed, LIMIT))
    engine = toy_engine(k=LIMIT, num_blocks=60, scheduling=scheduling, speculation=speculation)
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)
    results = engine.generate(requests)
    for request, result, other in zip(requests, results, plain, strict=True):
        assert result.token_ids == other.token_ids, request.sampling
        assert result.finish_reason is other.finish_reason
        if request.sampling.temperature != 1.2 and not any(
            (request.sampling.bad_words, request.sampling.presence_penalty, request.sampling.repetition_penalty != 1.0)
        ):
            expected = reference.generate(ToyModel(), request.prompt_token_ids, request.sampling, (EOS,))
            assert list(result.token_ids) == expected
    assert len({k for k, _, _ in speculation.steps}) >= LIMIT
    assert any(accepted for _, _, lens in speculation.steps for accepted in lens)
    check_counts(results, speculation.steps)
    if scheduling == "sync":  # every row of every step is some request's
        assert sum(result.counts.num_verify_steps for result in results) == sum(
            len(lens) for _, lens, _ in speculation.steps
        )


def requests_with(requests, k):
    return [
        GenerationRequest(
            key=AttemptKey(f"{request.key.request_id}-{k}", 1),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            deadline_s=request.deadline_s,
            num_draft_tokens=k,
        )
        for request in requests
    ]


@pytest.mark.long
@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("has_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("mode", [VerificationMode.COUPLED, VerificationMode.REJECTION])
def test_no_hole_is_left_where_there_were_no_drafts(mode, has_graphs, scheduling):
    """This model's head is right whenever its KV and hidden states are: every draft must stand, whatever k was."""
    request = request_of([3, 1, 4], k=4, max_tokens=50, temperature=0.0, ignore_eos=True)
    speculation = Scripted(4, SWITCHES)
    engine = toy_engine(
        PerfectToyModel(),
        k=4,
        num_blocks=60,
        scheduling=scheduling,
        speculation=speculation,
        verification=VerificationConfig(mode=mode),
    )
    if has_graphs:
        with_graphs(engine)
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)
    [result] = engine.generate([request])
    assert {k for k, _, _ in speculation.steps} == set(SWITCHES)
    assert all(accepted == (k,) for k, _, accepted in speculation.steps[:-1])  # the last may be past the end
    assert result.token_ids == toy_engine(PerfectToyModel(), k=0, num_blocks=60).generate([request])[0].token_ids
    if has_graphs:
        assert_all_replayed(engine)


@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 20], ids=["computed again", "to host memory"])
@pytest.mark.parametrize("has_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_preempted_while_k_changes(scheduling, has_graphs, host_kv_bytes):
    requests = toy_requests(5)
    plain = toy_engine(k=0, num_blocks=60).generate(requests_with(requests, 0))
    speculation = Scripted(LIMIT, random_ks(5, LIMIT))
    tight = {"num_blocks": 16, "overcommit": True, "host_kv_bytes": host_kv_bytes, "preempt_at": (3, 8)}
    engine = toy_engine(k=LIMIT, scheduling=scheduling, speculation=speculation, **tight)
    if has_graphs:
        with_graphs(engine)
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert engine.preemptions.num_preemptions > len(requests)
    check_counts(results, speculation.steps)
    if has_graphs:
        assert_all_replayed(engine)


def tiny_engine(model, tokenizer, speculation, max_num_sequences=1, scheduling="async"):
    return LocalEngine(
        model,
        tokenizer,
        num_blocks=200,
        block_size=16,
        num_draft_tokens=speculation.limit,
        chunk_len=512,
        max_num_sequences=max_num_sequences,
        speculation=speculation,
        scheduling=scheduling,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_model_accepts_as_much_after_a_switch(temperature, tiny_model, tiny_tokenizer, tiny_prompts):
    def generate(prompt, ks):
        speculation = Scripted(3, ks)
        sampling = SamplingParams(max_tokens=32, temperature=temperature, seed=5, ignore_eos=True)
        request = GenerationRequest(
            key=AttemptKey("one", 1),
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=float("inf"),
            num_draft_tokens=3,
        )
        [result] = tiny_engine(tiny_model, tiny_tokenizer, speculation).generate([request])
        lengths = itertools.accumulate((accepted + 1 for _, _, (accepted,) in speculation.steps), initial=1)
        return result.token_ids, {
            at: (k, accepted) for at, (k, _, (accepted,)) in zip(lengths, speculation.steps, strict=False)
        }

    compared = []
    for prompt in tiny_prompts[5:7]:
        # What a step with k drafts accepts at a given length, in an engine that always drafted 3: the first k of them.
        plain, steps = generate(prompt, [3])
        switched, switched_steps = generate(prompt, SWITCHES)
        assert switched == plain
        compared += [(k, accepted, steps[at][1]) for at, (k, accepted) in switched_steps.items() if at in steps]
    assert len([k for k, _, _ in compared if k > 0]) > 2
    assert all(accepted == min(k, whole) for k, accepted, whole in compared)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_grammars_and_penalties_beside_each_other(scheduling, tiny_model, tiny_tokenizer, tiny_prompts):
    kinds = [
        *({"grammar": spec, "temperature": at % 2} for at, spec in enumerate(SPECS.values())),
        {"temperature": 1.0, "repetition_penalty": 1.2, "grammar": SPECS["ebnf"]},
        {"temperature": 1.0, "frequency_penalty": 0.8, "logprobs": 1},
        {"temperature": 0.0},
    ]

    def requests_for(k):
        return [
            GenerationRequest(
                key=AttemptKey(f"k{k}-{at}", 1),
                prompt_token_ids=tiny_prompts[at % 6],
                sampling=SamplingParams(seed=at, max_tokens=24, **kind),
                deadline_s=float("inf"),
                num_draft_tokens=k,
            )
            for at, kind in enumerate(kinds)
        ]

    plain = tiny_engine(tiny_model, tiny_tokenizer, Scripted(0, [0]), 8).generate(requests_for(0))
    speculation = Scripted(3, random_ks(7, 3))
    engine = tiny_engine(tiny_model, tiny_tokenizer, speculation, 8, scheduling)
    results = engine.generate(requests_for(3))
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert [result.finish_reason for result in results] == [result.finish_reason for result in plain]
    assert len({k for k, _, _ in speculation.steps}) > 2
    check_counts(results, speculation.steps)


@fast
def test_a_request_may_lower_k_but_not_raise_it():
    low = request_of([1, 2], k=1, max_tokens=20, temperature=0.0, ignore_eos=True)
    high = request_of([1, 3], k=4, max_tokens=20, temperature=0.0, ignore_eos=True)
    engine = toy_engine(ToyModel(), k=4, num_blocks=60)
    engine.speculation.set_mode(2)
    for result, k in zip(engine.generate([low, high]), (1, 2), strict=True):
        assert result.counts.num_draft_tokens == k * result.counts.num_verify_steps
    with pytest.raises(InvalidRequest):
        engine.speculation.set_mode(5)
    assert engine.speculation.num_drafts == 2


@fast
@pytest.mark.parametrize(("limit", "cap"), [(4, 0), (0, 0)])
def test_speculation_off_for_good_leaves_the_head_alone(limit, cap):
    model = ToyModel(with_mtp=limit > 0)
    engine = toy_engine(model, k=limit, num_blocks=60)
    engine.generate([request_of([1, 2], k=cap, max_tokens=20, temperature=0.0, ignore_eos=True)])
    assert model.num_mtp_calls == (limit > 0)  # once in prefill


@fast
def test_speculation_off_for_now_keeps_its_kv():
    model = ToyModel()
    engine = toy_engine(model, k=4, num_blocks=60, scheduling="sync")
    engine.speculation.set_mode(0)
    [result] = engine.generate([request_of([1, 2], k=4, max_tokens=20, temperature=0.0, ignore_eos=True)])
    assert result.counts.num_draft_tokens == 0
    assert model.num_mtp_calls == 1 + result.counts.num_verify_steps


# The runner.


@fast
def test_bounds_hold_with_steps_of_different_k_in_flight():
    side, slots_B = Side(3, max_tokens=40), np.arange(3)
    side.gate.open.clear()
    tickets = []
    for k in (3, 0, 2, 1, 3):
        before = side.bounds._most_N[:3].copy()
        assert side.bounds.max_context_len(slots_B, k) == max(before) + k
        tickets.append(side.launch(side.slots, num_drafts=k))
        assert (side.bounds._most_N[:3] == before + k + 1).all()
    side.gate.open.set()
    outputs = {at: tickets[at].result() for at in (3, 0, 4, 2, 1)}
    proposed = [[row.proposed_len for row in outputs[at].decode] for at in range(5)]
    assert proposed == [[k, k, k] for k in (3, 0, 2, 1, 3)]
    made = [
        len(prompt) + 1 + sum(len(output.decode[at].token_ids) for output in outputs.values())
        for at, prompt in enumerate(PROMPTS)
    ]
    assert side.bounds._most_N[:3].tolist() == side.bounds._least_N[:3].tolist() == made
    assert side.lengths() == made
    for at, first in enumerate(side.first_tokens):
        tokens = [first, *(token for step in range(5) for token in outputs[step].decode[at].token_ids)]
        assert tokens == wanted(at, 40)[: len(tokens)]


@fast
def test_a_change_of_k_makes_a_new_batch_and_nothing_else_does():
    side = Side(3)
    side.step(side.slots)
    before = side.runner._batch
    side.step(side.slots, num_drafts=3)
    assert side.runner._batch is before
    side.step(side.slots, num_drafts=1)
    after = side.runner._batch
    assert (after.num_drafts, after.draft_caps, after.proposed_lens) == (1, (3, 3, 3), (1, 1, 1))


@fast
def test_a_step_emits_at_most_what_it_may_draft_and_one_more():
    engine = toy_engine(k=3, scheduling="sync")
    for k in (3, 1):
        engine.submit(request_of([5, k], k=k, max_tokens=20, ignore_eos=True))
    while len(engine.scheduler.decoding()) < 2:
        engine.step()
    decode = engine.engine._decode_rows()
    assert decode.room_B.tolist() == [4, 2], "whatever k the step has"
    assert [decode.most_B(k).tolist() for k in (3, 1, 0)] == [[4, 2], [2, 2], [1, 1]]


# What steps teach.


class Recorder:
    """In place of the controller."""

    def __init__(self, k=2):
        self.k = k
        self.seen = []

    def drafts_of(self, arm):
        return arm

    def method_of(self, arm):
        return 0

    def choose(self, batch_size, num_capable, allowed=None, *, tries=True):
        self.asked = (batch_size, num_capable)
        return self.k

    def observe(self, **seen):
        self.seen.append(seen)


def recorded(limit=4, num_drafts=None):
    clock = VirtualClock(10.0)
    speculation = Speculation(limit, num_drafts, clock)
    speculation._control = Recorder()
    return speculation, speculation._control, clock


@fast
def test_a_position_counts_only_where_it_was_tested():
    speculation, control, _ = recorded()
    planned = speculation.plan((4, 3, 1, 0))
    assert control.asked == (4, (3, 2, 2, 1))
    assert planned.num_drafts == 2
    control.k = 3
    planned = speculation.plan((4, 3, 1, 0))
    assert planned.num_drafts == 3
    speculation.read(planned, (3, 3, 1, 0), (3, 1, 1, 0))
    [seen] = control.seen
    assert (seen["batch_size"], seen["num_drafts"]) == (4, 3)
    assert (seen["tested"], seen["accepted"]) == ([3, 2, 1], [3, 1, 1])


@fast
def test_nothing_is_learnt_while_k_is_set():
    speculation, control, _ = recorded(num_drafts=2)
    speculation.read(speculation.plan((4, 1)), (2, 1), (1, 0))
    assert not control.seen
    speculation.set_mode(None)
    speculation.read(speculation.plan((4, 1)), (2, 1), (1, 0))
    assert len(control.seen) == 1


@fast
def test_a_result_that_comes_a_step_late_is_that_of_its_own_k_and_time():
    speculation, control, clock = recorded()
    first = speculation.plan((4,))
    control.k = 4
    clock.advance(0.5)
    second = speculation.plan((4,))  # launched while the first runs
    clock.advance(1.5)
    speculation.read(first, (2,), (1,))
    control.k = 0
    third = speculation.plan((4,))
    clock.advance(3.0)
    speculation.read(second, (4,), (4,))
    clock.advance(1.0)
    speculation.read(third, (0,), (0,))
    assert [(seen["num_drafts"], seen["step_s"]) for seen in control.seen] == [(2, 2.0), (4, 3.0), (0, 1.0)]
    assert [seen["accepted"] for seen in control.seen] == [[1, 0], [1, 1, 1, 1], []]


@fast
def test_the_time_of_a_pause_and_of_other_work_is_no_steps():
    speculation, control, clock = recorded()
    for before, during in (("pause", ""), ("", ""), ("pause", ""), ("", "disturb"), ("", "")):
        if before:
            speculation.pause()
            clock.advance(100.0)
        planned = speculation.plan((2,))
        clock.advance(2.0)
        if during:
            speculation.disturb()
            clock.advance(50.0)
        speculation.read(planned, (2,), (0,))
    assert [seen["step_s"] for seen in control.seen] == [2.0, 2.0, 2.0, 0.0, 2.0]


@fast
def test_steps_of_sequences_that_never_draft_teach_nothing():
    speculation, control, _ = recorded()
    speculation.read(speculation.plan((0, 0)), (0, 0), (0, 0))
    assert control.seen == []
    assert speculation.num_drafts == 0
    speculation, control, _ = recorded(0, 0)
    speculation.read(speculation.plan((0,)), (0,), (0,))
    assert control.seen == []


@pytest.mark.long
@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_auto_gives_the_same_tokens(scheduling):
    requests = toy_requests(5, 8, (40,))
    plain = toy_engine(k=0, num_blocks=60).generate(requests_with(requests, 0))
    clock, chosen = VirtualClock(), []
    speculation = Speculation(LIMIT, None, clock)
    engine = toy_engine(k=LIMIT, num_blocks=100, speculation=speculation, scheduling=scheduling)
    plan = speculation.plan

    def plan_and_wait(draft_caps, **others):  # steps with more drafts take longer
        planned = plan(draft_caps, **others)
        chosen.append(planned.num_drafts)
        clock.advance(1.0 + 0.05 * planned.num_drafts)
        return planned

    speculation.plan = plan_and_wait
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert speculation.is_auto
    assert len(set(chosen)) > 2


class Tried(Speculation):
    """Whose controller says whether each step might have been a trial."""

    def plan(self, *caps_and_kept, has_chunks=False):
        self.might_try.append(not has_chunks)
        return super().plan(*caps_and_kept, has_chunks=has_chunks)


@fast
@pytest.mark.long
def test_a_step_with_chunks_is_no_trial(monkeypatch):
    """Its time says nothing of drafts, and every stream waits for its chunk as it is."""
    engine = toy_engine(chunk_len=8, num_blocks=60)
    launched, launch = [], engine.engine.runner.launch
    engine.engine.speculation.__class__ = Tried
    engine.engine.speculation.might_try = []
    engine.engine.speculation.set_mode(None)
    monkeypatch.setattr(engine.engine.runner, "launch", lambda step: launched.append(step) or launch(step))
    waiting = [request_of(range(1, 20), max_tokens=25, ignore_eos=True) for _ in range(6)]
    for at in range(200):
        if at % 4 == 0 and waiting:
            engine.submit(waiting.pop())
        engine.step()
    steps = [step for step in launched if step.slots]
    assert len(steps) == len(engine.engine.speculation.might_try)
    with_chunks = [might for step, might in zip(steps, engine.engine.speculation.might_try, strict=True) if step.chunks]
    assert len(with_chunks) >= 10 and not any(with_chunks)
    assert all(might for step, might in zip(steps[-8:], engine.engine.speculation.might_try[-8:], strict=True))
    said = []
    control = engine.engine.speculation._control
    monkeypatch.setattr(control, "choose", lambda *arguments, tries: said.append(tries) or 0)
    for has_chunks in (True, False):
        engine.engine.speculation.plan((2,), has_chunks=has_chunks)
    assert said == [False, True]
