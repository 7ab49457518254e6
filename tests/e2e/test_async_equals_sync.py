"""Asynchronous scheduling gives what synchronous scheduling does: the same tokens, accepted step by step alike.

In float64, in the one-process engine, over drafts, ways to choose tokens, ways to end and chunk sizes; and for all that
a request may ask, also preempted and over ranks, compared with one plain run: no drafts, no chunks, no preemption, one
rank, one step after the other. The decode worker's own tests run it asynchronously, as it does by default.
"""

import itertools
import json
import shutil
from functools import cache

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import AttemptKey, FinishReason, GenerationRequest, SpeculationCounts
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e import features
from baton.tests.e2e.conftest import TINY, TINY_EAGLE3
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_same_tokens import pairwise
from baton.tests.e2e.tp_group_engine import run_over_ranks
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import EOS, letters_tokenizer

DRAFTS = (0, 1, 2, 4)
CHUNKS = (3, 16, 4096)
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}
CUT = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
CHOICES = {"greedy": (GREEDY,), "sampled": (SAMPLED, CUT), "mixed": (GREEDY, SAMPLED, CUT)}
ENDS = ("length", "room", "stop token", "stop string", "eos")
PREEMPTED = {
    "whole": {},
    "recompute": {"overcommit": True, "preempt_at": (4,)},
    "offload": {"overcommit": True, "preempt_at": (1, 6), "host_kv_bytes": 1 << 20},
}
CELLS = list(itertools.product(DRAFTS, CHOICES, ENDS, CHUNKS, PREEMPTED))
PAIRWISE = pairwise(CELLS)
TOY = ToyModel(sharpness=2.0)
MAX_TOKENS = 13


def cell_id(cell):
    k, choice, end, chunk_len, preempted = cell
    return f"k{k}-{choice}-{end.replace(' ', '_')}-{chunk_len}-{preempted}"


def sampling_for(choice, end, at, prompt_len, max_model_len):
    ways = CHOICES[choice]
    params = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": at, **ways[at % len(ways)]}
    match end:
        case "length":
            params["max_tokens"] = 1 + at % MAX_TOKENS
        case "room":
            params["max_tokens"] = max_model_len - prompt_len
        case "stop token":
            params["stop_token_ids"] = (at % 20, (at * 7 + 3) % 20)
        case "stop string":
            params["stop"] = (chr(ord("a") + at % 20), "".join(chr(ord("a") + (at * 5 + i) % 20) for i in range(2)))
        case "eos":
            params["ignore_eos"] = False
    return SamplingParams(**params)


def toy_requests(cell):
    k, choice, end, _, _ = cell
    requests = []
    for at in range(5 if end == "room" else 10):
        prompt_len = 70 + at if end == "room" else (1, 2, 5, 9, 20)[at % 5]
        prompt = tuple((at * 3 + i * i) % 22 for i in range(prompt_len))
        sampling = sampling_for(choice, end, at, prompt_len, TOY.config.max_model_len)
        key = AttemptKey(f"{cell_id(cell)}-{at}", 1)
        request = GenerationRequest(
            key=key,
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=float("inf"),
            num_draft_tokens=min(k, at % 6 if at % 2 else k),
        )
        requests.append(request)
    return requests


def generate(monkeypatch, engine, requests):
    """Results, and (proposed, accepted, emitted) of each step of each request."""
    steps, add_step = {}, SpeculationCounts.add_step

    def traced_add_step(self, **numbers):
        steps.setdefault(id(self), []).append(tuple(numbers.values()))
        add_step(self, **numbers)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculationCounts, "add_step", traced_add_step)
        results = engine.generate(requests)
    return results, [steps.get(id(result.counts), []) for result in results]


def run(monkeypatch, model, tokenizer, requests, *, scheduling, k, chunk_len, **sizes):
    """(tokens, finish reason, counts) of each request, and (proposed, accepted, emitted) of each of its steps."""
    engine = LocalEngine(
        model,
        tokenizer,
        num_draft_tokens=k,
        chunk_len=chunk_len,
        scheduling=scheduling,
        **({"num_blocks": 70, "block_size": 4, "max_num_sequences": 4} | sizes),
    )
    results, steps = generate(monkeypatch, engine, requests)
    for result, mine in zip(results, steps, strict=True):
        check_counts(result, mine)
    return [(result.token_ids, result.finish_reason, mine) for result, mine in zip(results, steps, strict=True)]


def check_counts(result, mine):
    """What is counted of a request is what its steps say."""
    counts = result.counts
    assert counts.num_emitted_tokens == len(result.token_ids) == 1 + sum(emitted for _, _, emitted in mine)
    assert counts.num_draft_tokens == sum(proposed for proposed, _, _ in mine)
    assert counts.num_accepted_tokens == sum(accepted for _, accepted, _ in mine) == sum(counts.num_accepted_at)
    for place, count in enumerate(counts.num_accepted_at):
        assert count == sum(accepted > place for _, accepted, _ in mine)


def check_toy(monkeypatch, cell):
    k, _, end, chunk_len, preempted = cell
    made = {
        scheduling: run(
            monkeypatch,
            TOY,
            letters_tokenizer(),
            toy_requests(cell),
            scheduling=scheduling,
            k=k,
            chunk_len=chunk_len,
            **(PREEMPTED[preempted] if scheduling == "async" else {}),
        )
        for scheduling in ("sync", "async")
    }
    assert made["async"] == made["sync"]
    for request, (token_ids, reason, _) in zip(toy_requests(cell), made["async"], strict=True):
        if end == "room":
            assert len(token_ids) == request.sampling.max_tokens
        if end not in ("stop string", "room"):
            assert list(token_ids) == reference.generate(TOY, request.prompt_token_ids, request.sampling, (EOS,))
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    if end in ("stop token", "stop string"):
        assert FinishReason.STOP in {reason for _, reason, _ in made["async"]}


@pytest.mark.parametrize("cell", PAIRWISE, ids=cell_id)
def test_toy_tokens_and_accepted_lengths_are_identical(cell, monkeypatch):
    check_toy(monkeypatch, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in PAIRWISE], ids=cell_id)
def test_toy_tokens_and_accepted_lengths_are_identical_in_every_other_cell(cell, monkeypatch):
    check_toy(monkeypatch, cell)


TINY_CELLS = list(itertools.product(DRAFTS, (False, True), (16, 4096)))
TINY_DEFAULT = {(0, True, 16), (2, False, 16), (2, True, 4096), (4, True, 16)}


@pytest.mark.parametrize(
    ("k", "sampled", "chunk_len"),
    [pytest.param(*cell, marks=[] if cell in TINY_DEFAULT else [pytest.mark.slow]) for cell in TINY_CELLS],
)
def test_the_bundled_model_in_float64(k, sampled, chunk_len, load_tiny, tokenizer, monkeypatch):
    prompts = token_prompts(tokenizer, 8, max_len=60)
    made = [
        run(
            monkeypatch,
            load_tiny(),
            tokenizer,
            requests_for(prompts, sampled=sampled, num_drafts=k, max_tokens=10),
            scheduling=scheduling,
            k=k,
            chunk_len=chunk_len,
            num_blocks=64,
            block_size=16,
        )
        for scheduling in ("sync", "async")
    ]
    assert made[0] == made[1]
    if k:
        assert any(accepted for _, _, steps in made[0] for _, accepted, _ in steps)


PREEMPTIONS = {
    "stays": {},
    "computed again": {"overcommit": True, "preempt_at": (1, 6)},
    "to host memory": {"overcommit": True, "preempt_at": (1, 6), "host_kv_bytes": 64 << 20},
}
DRAFTERS = ("mtp", "ngram", "eagle3")
LOOKUP = PromptLookup(min_match_len=1, max_match_len=3)
FEATURE_CELLS = list(itertools.product(features.FEATURES, DRAFTS, PREEMPTIONS, (16, 4096), (1, 2), DRAFTERS))
FEATURE_PAIRWISE = pairwise(FEATURE_CELLS)
LONGEST = [  # chains of drafts
    ("plain", 6, "to host memory", 16, 2, "eagle3"),
    ("plain", 6, "computed again", 16, 1, "mtp"),
    ("plain", 6, "stays", 4096, 2, "ngram"),
]
MODEL = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT}


def feature_id(cell):
    feature, k, preemption, chunk_len, tp, drafter = cell
    return f"{feature}-k{k}-{preemption}-{chunk_len}-tp{tp}-{drafter}".replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    """The bundled model, for sequences that soon reach its end."""
    path = tmp_path_factory.mktemp("short")
    for item in TINY.iterdir():
        shutil.copy(item, path)
    config = json.loads((TINY / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": features.MAX_MODEL_LEN}))
    return path


def drafting(drafter):
    """How a model is loaded for a drafter."""
    return {"with_mtp": drafter == "mtp", "draft_path": TINY_EAGLE3 if drafter == "eagle3" else None}


@pytest.fixture(scope="module")
def on_one_rank(short_model, tokenizer):
    models = {drafter: load_model(short_model, **MODEL, **drafting(drafter)) for drafter in DRAFTERS}

    def engine(drafter, **options):
        return LocalEngine(models[drafter], tokenizer, lookup=LOOKUP if drafter == "ngram" else None, **options)

    return engine


@pytest.fixture(scope="module")
def feature_prompts(tokenizer):
    [ids] = token_prompts(tokenizer, 1, max_len=60)[:1]
    long = token_prompts(tokenizer, 8, max_len=60)[7]
    return [ids, *(long[:length] for length in features.PROMPT_LENS[1:])]


def sizes_of(k, chunk_len, **options):
    return {
        "num_blocks": 48,
        "block_size": 16,
        "num_draft_tokens": k,
        "chunk_len": chunk_len,
        "max_num_sequences": 4,
        **options,
    }


@pytest.fixture(scope="module")
def one_plain_run(on_one_rank, feature_prompts):
    """Results of a feature without drafts, chunks, preemption, ranks and steps in flight."""

    @cache
    def run_once(feature):
        plain = None if feature == "plain" else [result.token_ids for result in run_once("plain")]
        engine = on_one_rank("mtp", **sizes_of(0, 4096, scheduling="sync"))
        return engine.generate(features.requests_for(feature, feature_prompts, 0, plain))

    return run_once


def check_feature(monkeypatch, cell, on_one_rank, one_plain_run, feature_prompts, short_model, tokenizer):
    feature, k, preemption, chunk_len, tp, drafter = cell
    plain = None if feature == "plain" else [result.token_ids for result in one_plain_run("plain")]
    requests = features.requests_for(feature, feature_prompts, k, plain)
    taken = {}
    for scheduling in ("sync", "async"):
        options = sizes_of(k, chunk_len, scheduling=scheduling, **PREEMPTIONS[preemption])

        def work(engine):
            made = generate(monkeypatch, engine, requests)
            return *made, engine.preemptions

        if tp == 1:
            results, steps, preempted = work(on_one_rank(drafter, **options))
        else:
            options["model"] = {"numerics": Numerics.DEFAULT, **drafting(drafter)}
            options["lookup"] = LOOKUP if drafter == "ngram" else None
            results, steps, preempted = run_over_ranks(tp, short_model, tokenizer, work, **options)
        for result, expected, mine in zip(results, one_plain_run(feature), steps, strict=True):
            features.check_same(result, expected)
            if preemption == "stays":
                check_counts(result, mine)
        taken[scheduling] = steps
        assert (preempted.num_preemptions > 0) == (preemption != "stays")
        assert (preempted.num_offloaded_blocks > 0) == (preemption == "to host memory")
    if preemption == "stays":
        assert taken["async"] == taken["sync"]


@pytest.mark.parametrize("cell", [*FEATURE_PAIRWISE, *LONGEST], ids=feature_id)
def test_every_feature(cell, monkeypatch, on_one_rank, one_plain_run, feature_prompts, short_model, tokenizer):
    check_feature(monkeypatch, cell, on_one_rank, one_plain_run, feature_prompts, short_model, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in FEATURE_CELLS if cell not in FEATURE_PAIRWISE], ids=feature_id)
def test_every_feature_in_every_other_cell(
    cell, monkeypatch, on_one_rank, one_plain_run, feature_prompts, short_model, tokenizer
):
    check_feature(monkeypatch, cell, on_one_rank, one_plain_run, feature_prompts, short_model, tokenizer)


def test_features_change_the_answer(one_plain_run):
    plain = [result.token_ids for result in one_plain_run("plain")]
    for feature in features.FEATURES:
        if feature in ("plain", "logprobs"):
            continue
        assert [result.token_ids for result in one_plain_run(feature)] != plain, feature
