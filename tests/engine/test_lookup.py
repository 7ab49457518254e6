"""Drafts that are looked up in the text so far: what is proposed at each step follows from the answer alone."""

import random

import pytest

from baton.core.clock import VirtualClock
from baton.core.errors import ConfigInvalid
from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import SpeculationCounts
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine.speculation.speculation import Speculation
from baton.engine.speculation.verify import DraftLaw
from baton.tests.engine.live_k import Scripted
from baton.tests.engine.test_live_k import KINDS
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine
from baton.tests.kernels.test_ngram import by_rule

pytestmark = pytest.mark.fast
LOOKUP = PromptLookup(min_match_len=1, max_match_len=3)
PREEMPTED = {
    "whole": {},
    "recompute": {"overcommit": True, "preempt_at": (4,)},
    "offload": {"overcommit": True, "preempt_at": (1, 6), "host_kv_bytes": 1 << 20},
}


def model():
    return ToyModel(with_mtp=False, sharpness=4.0, surprise=0.3)


def requests(seed, k, count=12, kinds=KINDS, **sampling):
    """Prompts that repeat themselves now and then."""
    rng = random.Random(seed)
    made = []
    for at in range(count):
        prompt = [rng.randrange(22) for _ in range(rng.choice((1, 3, 6)))] * rng.choice((1, 1, 2, 3))
        asked = {"seed": at, "max_tokens": rng.choice((1, 7, 15, 24)), "ignore_eos": at % 3 > 0} | kinds[
            at % len(kinds)
        ]
        made.append(request_of(prompt, k=rng.choice((k, k, at % 5)), **asked | sampling))
    return made


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [1, 4, 6])
def test_answers_that_fill_the_context_are_those_without_drafts(k, scheduling):
    """A step in flight may add k + 1 tokens to a length that is the model's longest: nothing is read behind it."""
    engine = toy_engine(
        ToyModel(surprise=0.0, with_mtp=False), k=k, lookup=LOOKUP, num_blocks=80, scheduling=scheduling
    )
    most = engine.runner.max_model_len
    asked = [
        request_of(
            [1 + at % 3 for at in range(length)], k=k, max_tokens=most - length, temperature=0.0, ignore_eos=True
        )
        for length in (6, 7, 40, 41, most - 1)
    ]
    plain = toy_engine(ToyModel(surprise=0.0, with_mtp=False), k=0, num_blocks=80)
    wanted = [result.token_ids for result in plain.generate(asked)]
    assert [result.token_ids for result in engine.generate(asked)] == wanted
    assert [len(tokens) for tokens in wanted] == [most - length for length in (6, 7, 40, 41, most - 1)]


def traced(monkeypatch, asked, **options):
    """Results, and (proposed, accepted, emitted) of each step of each."""
    steps, add_step = {}, SpeculationCounts.add_step

    def noted(self, **numbers):
        steps.setdefault(id(self), []).append(tuple(numbers.values()))
        add_step(self, **numbers)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculationCounts, "add_step", noted)
        engine = toy_engine(model(), lookup=LOOKUP, num_blocks=120, **options)
        results = engine.generate(asked)
    return results, [steps.get(id(result.counts), []) for result in results], engine


def replayed(request, result, k):
    """The steps that must have been, from the answer alone: what was proposed of it, and how much of that came true."""
    cap, steps, place = min(k, request.num_draft_tokens), [], 1
    answer = list(result.token_ids)
    while place < len(answer):
        drafts = by_rule([*request.prompt_token_ids, *answer[:place]], k, LOOKUP.min_match_len, LOOKUP.max_match_len)
        proposed = 0 if not drafts or drafts[0] < 0 else cap
        accepted = 0
        while accepted < proposed and answer[place + accepted : place + accepted + 1] == [drafts[accepted]]:
            accepted += 1
        emitted = min(accepted + 1, len(answer) - place)
        steps.append((proposed, min(accepted, emitted), emitted))
        place += emitted
    return steps


@pytest.mark.long
@pytest.mark.parametrize("preempted", PREEMPTED)
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_every_step_proposes_what_followed_before(k, scheduling, preempted, monkeypatch):
    asked = requests(min(k, 5), k)
    plain = toy_engine(model(), k=0, num_blocks=120, scheduling="sync").generate(asked)
    options = {"scheduling": scheduling, "chunk_len": 16 if k >= 4 else 20, **PREEMPTED[preempted]}
    results, steps, engine = traced(monkeypatch, asked, k=k, **options)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert steps == [replayed(request, result, k) for request, result in zip(asked, results, strict=True)]
    assert sum(accepted for mine in steps for _, accepted, _ in mine) > 2
    report = engine.step_report()
    assert report.kept.num_draft_tokens == sum(proposed for mine in steps for proposed, _, _ in mine)
    dropped = report.cut, report.late, report.failed
    assert report.computed.num_draft_tokens == report.kept.num_draft_tokens + sum(
        rows.num_draft_tokens for rows in dropped
    )


@pytest.mark.long
def test_k_may_change_at_every_step():
    asked = requests(7, 4, count=20)
    plain = toy_engine(model(), k=0, num_blocks=120).generate(asked)
    speculation = Scripted(4, (0, 4, 1, 3, 0, 2))
    engine = toy_engine(model(), lookup=LOOKUP, num_blocks=120, k=4, chunk_len=20, speculation=speculation)
    assert [result.token_ids for result in engine.generate(asked)] == [result.token_ids for result in plain]


@pytest.mark.long
def test_rejection_takes_what_was_looked_up_for_point_masses(monkeypatch):
    """Greedy requests have the tokens of no drafts; sampled ones finish, and some of their drafts stand."""
    verification = VerificationConfig(mode=VerificationMode.REJECTION)
    asked = requests(3, 4, kinds=[{"temperature": 0.0}, {"temperature": 0.7}], max_tokens=24)
    plain = toy_engine(model(), k=0, num_blocks=120).generate(asked)
    results, steps, engine = traced(monkeypatch, asked, k=4, chunk_len=20, verification=verification)
    assert engine.runner._verifier.draft_law is DraftLaw.LIKELIEST
    assert [result.token_ids for result in results[::2]] == [result.token_ids for result in plain[::2]]
    assert steps[::2] == [replayed(*pair, 4) for pair in zip(asked[::2], results[::2], strict=True)]
    assert sum(accepted for mine in steps[1::2] for _, accepted, _ in mine) > 2


@pytest.mark.long
def test_auto_costs_little_where_nothing_comes_true():
    """Time of 3,000 steps of which k drafts make each longer by a thirtieth of k: within a hundredth of none."""
    clock = VirtualClock()
    speculation = Speculation(4, None, clock)
    plain_s, caps = 0.0, (4,) * 8
    for _ in range(3000):
        planned = speculation.plan(caps)
        plain_s += 0.008
        clock.advance(0.008 * (1 + planned.num_drafts / 30))
        speculation.read(planned, [planned.num_drafts] * 8, [0] * 8)
    assert clock.now_s() <= 1.01 * plain_s


def test_auto_drafts_where_text_repeats_itself():
    """With k = auto, a row without a match counts as one whose drafts fell: what is learned is tokens for time."""
    clock = VirtualClock()
    speculation = Speculation(4, None, clock)
    for _ in range(1000):
        planned = speculation.plan((4,) * 8)
        clock.advance(0.008 * (1 + planned.num_drafts / 30))
        speculation.read(planned, [planned.num_drafts] * 8, [planned.num_drafts] * 6 + [0] * 2)
    assert planned.num_drafts == 4


@pytest.mark.parametrize(
    ("shortest", "longest", "key"), [(0, 4, "prompt_lookup_min"), (1, 17, "prompt_lookup_max"), (5, 4, "more than")]
)
def test_lengths_that_cannot_be_are_refused(shortest, longest, key):
    with pytest.raises(ConfigInvalid, match=key):
        PromptLookup(min_match_len=shortest, max_match_len=longest)
