"""What drafts, changed while sequences run: the same tokens, and every step's drafts are its method's own."""

import itertools
import random

import pytest
import torch

from baton.core.clock import VirtualClock
from baton.core.draft_method import DraftMethod
from baton.core.errors import InvalidRequest
from baton.core.numerics import Numerics
from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import SpeculationCounts
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.speculation.speculation import Kept, Speculation
from baton.engine.step.runner import Runner
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.engine.graphs import assert_all_replayed, with_graphs
from baton.tests.engine.live_k import Methods, random_methods
from baton.tests.engine.test_live_k import KINDS
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine
from baton.tests.kernels.test_ngram import by_rule

fast = pytest.mark.fast
HEAD, NGRAM = DraftMethod
LIMIT = 6
LOOKUP = PromptLookup(min_match_len=1, max_match_len=3)
REJECTION = VerificationConfig(mode=VerificationMode.REJECTION)
POINTS = VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=DraftSampleMethod.GREEDY)
PREEMPTED = {
    "whole": {},
    "recompute": {"overcommit": True, "preempt_at": (4,)},
    "offload": {"overcommit": True, "preempt_at": (1, 6), "host_kv_bytes": 1 << 20},
}
SWITCHES = ((None, 0), (HEAD, 3), (NGRAM, 2), (HEAD, 1), (None, 0), (NGRAM, 6), (HEAD, 6), (HEAD, 2), (NGRAM, 1))


def engine_of(model, script=None, **options):
    """With a head and a lookup; each step drafts as the script says."""
    speculation = None if script is None else Methods(LIMIT, script)
    sizes = {"num_blocks": 160, "chunk_len": 40, "k": LIMIT, "lookup": LOOKUP} | options
    engine = toy_engine(model, speculation=speculation, **sizes)
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)
    return engine


def some_requests(seed, count=12, kinds=KINDS, **sampling):
    """Prompts that repeat themselves now and then."""
    rng = random.Random(seed)
    made = []
    for at in range(count):
        prompt = [rng.randrange(22) for _ in range(rng.choice((1, 3, 6)))] * rng.choice((1, 2, 3))
        asked = {"seed": at, "max_tokens": rng.choice((1, 7, 15, 24)), "ignore_eos": at % 3 > 0}
        made.append(
            request_of(prompt, k=rng.choice((LIMIT, LIMIT, at % 5)), **asked | kinds[at % len(kinds)] | sampling)
        )
    return made


def tokens_of(results):
    return [result.token_ids for result in results]


@pytest.mark.long
@pytest.mark.parametrize("preempted", PREEMPTED)
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("seed", [pytest.param(0, marks=fast), 1])
def test_tokens_do_not_change_with_what_drafts(seed, scheduling, preempted):
    requests = some_requests(seed, 24)
    model = ToyModel(sharpness=4.0, surprise=0.3)
    plain = toy_engine(model, k=0, num_blocks=160).generate(requests)
    engine = engine_of(model, random_methods(seed, LIMIT), scheduling=scheduling, **PREEMPTED[preempted])
    results = engine.generate(requests)
    assert tokens_of(results) == tokens_of(plain)
    by_method = engine.step_report().by_method
    assert all(by_method[name].num_steps > 0 for name in ("none", "head", "ngram"))
    assert all(by_method[name].num_draft_tokens > 0 for name in ("head", "ngram"))
    assert sum(counts.num_accepted_tokens for counts in by_method.values()) > 10
    assert sum(counts.num_steps for counts in by_method.values()) == engine.step_report().num_steps
    kept = engine.step_report().kept
    assert sum(counts.num_draft_tokens for counts in by_method.values()) == kept.num_draft_tokens
    assert sum(counts.num_accepted_tokens for counts in by_method.values()) == kept.num_accepted_tokens


def replayed(request, result, script):
    """The steps that must have been of a request that was alone and whose head is always right."""
    steps, place, answer = [], 1, list(result.token_ids)
    for method, k in itertools.cycle(script):
        if place >= len(answer):
            return steps
        drafts = by_rule([*request.prompt_token_ids, *answer[:place]], k, LOOKUP.min_match_len, LOOKUP.max_match_len)
        proposed = k if method is HEAD or (method is NGRAM and drafts[0] >= 0) else 0
        accepted = 0
        while accepted < proposed and (
            method is HEAD or answer[place + accepted : place + accepted + 1] == [drafts[accepted]]
        ):
            accepted += 1
        emitted = min(accepted + 1, len(answer) - place)
        steps.append((proposed, min(accepted, emitted), emitted))
        place += emitted
    return steps


@pytest.mark.long
@fast
@pytest.mark.parametrize("verification", [None, REJECTION, POINTS], ids=["coupled", "rejection", "point masses"])
@pytest.mark.parametrize("has_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("preempted", PREEMPTED)
def test_every_step_drafts_by_its_method(verification, has_graphs, preempted, monkeypatch):
    """This head is right whenever its KV, its hidden states and its draft in hand are, whatever drafted before."""
    request = request_of([3, 1, 4, 3, 1], k=LIMIT, max_tokens=60, temperature=0.0, ignore_eos=True)
    steps, add_step = [], SpeculationCounts.add_step

    def noted(self, **numbers):
        steps.append(tuple(numbers.values()))
        add_step(self, **numbers)

    monkeypatch.setattr(SpeculationCounts, "add_step", noted)
    engine = engine_of(
        PerfectToyModel(), SWITCHES, scheduling="sync", verification=verification, **PREEMPTED[preempted]
    )
    if has_graphs:
        with_graphs(engine)
    [result] = engine.generate([request])
    assert steps == replayed(request, result, SWITCHES)
    if has_graphs:
        assert_all_replayed(engine)


@fast
def test_logits_of_drafts_nobody_uses_are_not_computed(monkeypatch):
    """Where it does not draft, the head keeps its KV and hidden states alone."""
    model, drawn = PerfectToyModel(), []
    draft_logits = model.draft_logits
    monkeypatch.setattr(model, "draft_logits", lambda hidden: drawn.append(len(hidden)) or draft_logits(hidden))
    request = request_of([3, 1, 4], k=LIMIT, max_tokens=30, temperature=0.0, ignore_eos=True)
    engine_of(model, ((NGRAM, 2), (None, 0)), scheduling="sync").generate([request])
    assert len(drawn) == 1, "of the prompt's end"
    drawn.clear()
    engine_of(model, ((HEAD, 1),), scheduling="sync").generate([request])
    num_steps = len(drawn) - 1
    assert num_steps >= 14, "each step draws the next one's"


MODEL = {"numerics": Numerics.DEFAULT}
KEPT = ((HEAD, 2), (NGRAM, 3), (HEAD, 0), (HEAD, 4), (NGRAM, 6), (HEAD, 1))


class KeepsInTurn(Methods):
    """Gives the requests that keep how they draft one way each, in turn."""

    def __init__(self, script):
        super().__init__(LIMIT, script, keeps=True)
        self._kept = itertools.cycle(KEPT)

    def keep(self, draft_cap):
        method, k = next(self._kept)
        return Kept(method, min(k, draft_cap))


@pytest.mark.long
@pytest.mark.parametrize("preempted", PREEMPTED)
@pytest.mark.parametrize("scheduling", ["sync", pytest.param("async", marks=fast)])
@pytest.mark.parametrize("verification", [REJECTION, POINTS], ids=["drawn", "point masses"])
def test_a_request_with_a_seed_keeps_what_it_began_with(verification, scheduling, preempted):
    """Under rejection its tokens are those of a worker that knows nothing else, whatever the others do."""
    kinds = [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 12}, {"temperature": 1.0, "repetition_penalty": 1.3}]
    requests = some_requests(4, 12, kinds, max_tokens=20, ignore_eos=True)
    for at, request in enumerate(requests):
        object.__setattr__(request, "num_draft_tokens", LIMIT)
        object.__setattr__(request, "keeps_drafts", at % 4 < 3)
    ways, wanted = itertools.cycle(KEPT), []
    for request in requests:
        if not request.keeps_drafts:
            wanted.append(None)
            continue
        engine = engine_of(ToyModel(), (next(ways),), scheduling="sync", verification=verification)
        [result] = engine.generate([request_of(request.prompt_token_ids, k=LIMIT, **as_dict(request.sampling))])
        wanted.append(result.token_ids)
    options = {"scheduling": scheduling, "verification": verification, "num_blocks": 160, **PREEMPTED[preempted]}
    engine = toy_engine(
        ToyModel(), k=LIMIT, chunk_len=40, lookup=LOOKUP, speculation=KeepsInTurn(random_methods(9, LIMIT)), **options
    )
    results = engine.generate(requests)
    for request, result, tokens in zip(requests, results, wanted, strict=True):
        assert len(result.token_ids) == 20
        assert not request.keeps_drafts or result.token_ids == tokens


def as_dict(sampling):
    return {name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__}


@fast
def test_what_is_kept_is_what_others_begin_with():
    clock = VirtualClock()
    options = {"methods": (HEAD, NGRAM), "chooses_method": True}
    assert Speculation(4, None, clock, **options).keep(4) is None, "coupled tokens are the same"
    speculation = Speculation(4, None, clock, keeps=True, **options)
    assert speculation.keep(4) == (HEAD, 1)
    speculation._control._bucket(0).in_use = 0
    assert speculation.keep(4) == (HEAD, 0)
    speculation._control._bucket(0).in_use = 7
    assert speculation.keep(4) == (NGRAM, 3)
    assert speculation.keep(2) == (NGRAM, 2)
    speculation.set_mode(1)
    assert speculation.keep(4) == (NGRAM, 1)
    assert Speculation(4, 3, clock, keeps=True).keep(2) == (HEAD, 2)


@fast
def test_a_step_has_as_many_drafts_as_any_sequence_keeps():
    """Nothing is tried and nothing learnt in it, unless it drafts as all others would."""
    clock = VirtualClock()
    speculation = Speculation(4, None, clock, methods=(HEAD, NGRAM), chooses_method=True, keeps=True)
    caps, kept = (4, 4, 3), (None, None, Kept(NGRAM, 3))
    speculation._control._bucket(3).in_use = 0
    planned = speculation.plan(caps, kept)
    assert (planned.num_drafts, planned.method, planned.teaches) == (3, NGRAM, False)
    speculation.read(planned, (3, 3, 3), (0, 0, 0))
    assert not speculation._control._times_M[0].knows(3)
    speculation._control._bucket(3).in_use = 7
    planned = speculation.plan(caps, kept)
    assert (planned.num_drafts, planned.method, planned.teaches) == (3, NGRAM, True)
    speculation._control._bucket(3).in_use = 4
    planned = speculation.plan(caps, kept)
    assert (planned.num_drafts, planned.method, planned.teaches) == (4, HEAD, False)
    with pytest.raises(InvalidRequest):
        speculation.set_mode(5)
    speculation.set_mode(0)
    planned = speculation.plan((4, 4))
    assert (planned.num_drafts, planned.method) == (0, None)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verification", [None, REJECTION], ids=["coupled", "rejection"])
def test_ranks_agree_on_what_drafts(ranks, verification, tiny_tokenizer, monkeypatch):
    """Each rank runs the method of rank 0's plan; greedy tokens are those of no drafts."""
    prompts = token_prompts(tiny_tokenizer, 4, max_len=40)
    requests = requests_for(prompts, sampled=False, num_drafts=LIMIT, max_tokens=14)
    sizes = {"num_blocks": 64, "block_size": 16, "chunk_len": 64, "max_num_sequences": 4, "scheduling": "async"}
    launch, plans = Runner.launch, {}

    def launch_and_keep(self, step):
        plans.setdefault(id(self), []).append((step.method, step.num_drafts))
        return launch(self, step)

    monkeypatch.setattr(Runner, "launch", launch_and_keep)

    def work(engine):
        return tokens_of(engine.generate(requests))

    def run(k, **options):
        return run_over_ranks(ranks, TINY, tiny_tokenizer, work, model=MODEL, num_draft_tokens=k, **sizes, **options)

    wanted = run(0)
    plans.clear()
    script = Methods(LIMIT, SWITCHES)
    assert run(LIMIT, lookup=LOOKUP, verification=verification, speculation=script) == wanted
    mine, *others = plans.values()
    assert all(other == mine for other in others)
    assert len(others) == ranks - 1
    assert {method for method, _ in mine} == {None, HEAD, NGRAM}


@pytest.mark.long
@fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_auto_drives_an_engine(scheduling):
    """Where the head is always right and steps cost the same, it soon drafts, and tokens stay."""
    requests = some_requests(8, 10, [{"temperature": 0.0}], max_tokens=60, ignore_eos=True)
    plain = toy_engine(PerfectToyModel(), k=0, num_blocks=400).generate(requests)
    clock = VirtualClock()
    speculation = Speculation(LIMIT, None, clock, methods=(HEAD, NGRAM), chooses_method=True)
    plan = speculation.plan

    def plan_and_wait(*caps, **others):
        planned = plan(*caps, **others)
        clock.advance(1.0 + 0.01 * planned.num_drafts)
        return planned

    speculation.plan = plan_and_wait
    engine = toy_engine(
        PerfectToyModel(),
        k=LIMIT,
        num_blocks=400,
        chunk_len=40,
        lookup=LOOKUP,
        speculation=speculation,
        scheduling=scheduling,
    )
    assert tokens_of(engine.generate(requests)) == tokens_of(plain)
    assert engine.step_report().by_method["head"].num_accepted_tokens > 100


@pytest.mark.long
@fast
@pytest.mark.parametrize("num_drafts", [None, LIMIT])
@pytest.mark.parametrize(("good", "other"), [(HEAD, NGRAM), (NGRAM, HEAD)])
def test_auto_finds_what_pays_for_one_sequence_whether_or_not_k_is_set(num_drafts, good, other):
    """A method whose drafts stand 9 of 10 times is used for most of 400 steps; a k that is set bounds what is tried."""
    clock, draws = VirtualClock(), random.Random(3)
    speculation = Speculation(LIMIT, num_drafts, clock, methods=(HEAD, NGRAM), chooses_method=True)
    rates, used = {good: 0.9, other: 0.05}, []
    for _ in range(400):
        planned = speculation.plan((LIMIT,))
        used.append((planned.method, planned.num_drafts))
        clock.advance(1.0 + 0.3 * planned.num_drafts)
        length = 0
        while length < planned.num_drafts and draws.random() < rates[planned.method]:
            length += 1
        speculation.read(planned, [planned.num_drafts], [length])
    assert sum(method is good for method, _ in used) > 300
    assert max(count for _, count in used) <= LIMIT
