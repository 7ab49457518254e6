"""Grammars in the one-process engine: tokens do not depend on drafts, answers are valid, other rows untouched."""

import itertools
import json
import re
import threading

import jsonschema
import pytest
import torch

from baton.core.errors import (
    GrammarBudgetExceeded,
    InternalError,
    InvalidGrammar,
    InvalidSampling,
    RequestCancelled,
    RequestDeadlineExceeded,
)
from baton.core.requests.request import AttemptKey, FinishReason, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.engine.grammar import grammar as grammar_module
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.grammar.masks import apply_bitmask
from baton.engine.grammar.rows import GrammarRows
from baton.engine.grammar.trial import GrammarTrial
from baton.engine.local import LocalEngine
from baton.tests.engine.test_grammar import SCHEMA
from baton.tests.engine.toy_engine import request_of, toy_engine

MODES = {"greedy": [{"temperature": 0.0}], "sampled": [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 30}]}
SHORT = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["request", "attempt", "error"]},
        "retry": {"type": "boolean"},
        "codes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "retry", "codes", "name"],
    "additionalProperties": False,
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(SHORT)),
    "nested": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", r"(def|class) [a-z_]{1,12}\([a-z, ]{0,20}\):"),
    "ebnf": GrammarSpec("grammar", 'root ::= "[" item ("," item){1,3} "]"\nitem ::= [0-9]{1,3} | "(" root ")"'),
}
MAX_TOKENS = 40
EACH = tuple(SPECS.values())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def requests_for(prompts, k, mode, specs=EACH, max_tokens=MAX_TOKENS):
    return [
        GenerationRequest(
            key=AttemptKey(f"g{at}", 1),
            prompt_token_ids=prompts[(at + 2) % 6],
            sampling=SamplingParams(seed=at, max_tokens=max_tokens, grammar=spec, **MODES[mode][at % len(MODES[mode])]),
            deadline_s=float("inf"),
            num_draft_tokens=k,
        )
        for at, spec in enumerate(specs)
    ]


def engine_of(model, tokenizer, k, scheduling="async", max_num_sequences=16):
    return LocalEngine(
        model,
        tokenizer,
        num_blocks=300,
        block_size=16,
        num_draft_tokens=k,
        chunk_len=64,
        max_num_sequences=max_num_sequences,
        scheduling=scheduling,
    )


def check_answer(spec, result, tokenizer):
    text = tokenizer.decode(result.token_ids)
    if result.finish_reason is not FinishReason.STOP:
        assert len(result.token_ids) == MAX_TOKENS
        return
    assert result.token_ids[-1] in tokenizer.eos_token_ids
    match spec.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(spec.text))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(spec.text, text)
        case _:
            # Brackets and numbers of the grammar read as Python's own.
            assert re.fullmatch(r"[\[\](),0-9]+", text)


@pytest.fixture(scope="module")
def alone(tiny_model, tiny_tokenizer, tiny_prompts):
    """Tokens without drafts, per mode."""
    made = {}

    def get(mode):
        if mode not in made:
            made[mode] = engine_of(tiny_model, tiny_tokenizer, 0).generate(requests_for(tiny_prompts, 0, mode))
        return made[mode]

    return get


@pytest.mark.parametrize("mode", MODES)
def test_answers_fit_their_grammar(mode, alone, tiny_tokenizer):
    results = alone(mode)
    for spec, result in zip(itertools.cycle(SPECS.values()), results, strict=False):
        check_answer(spec, result, tiny_tokenizer)
    assert sum(result.finish_reason is FinishReason.STOP for result in results) >= 1


@pytest.mark.parametrize(("k", "mode"), [*itertools.product((1, 2, 4), MODES), (6, "sampled")])
def test_drafts_change_no_token(k, mode, alone, tiny_model, tiny_tokenizer, tiny_prompts):
    results = engine_of(tiny_model, tiny_tokenizer, k).generate(requests_for(tiny_prompts, k, mode))
    assert [result.token_ids for result in results] == [result.token_ids for result in alone(mode)]
    assert [result.finish_reason for result in results] == [result.finish_reason for result in alone(mode)]
    assert sum(result.counts.num_accepted_tokens for result in results) > 0


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_step_in_flight_changes_no_token_and_no_accepted_draft(mode, tiny_model, tiny_tokenizer, tiny_prompts):
    runs = [
        engine_of(tiny_model, tiny_tokenizer, 2, scheduling).generate(requests_for(tiny_prompts, 2, mode))
        for scheduling in ("sync", "async")
    ]
    ended, late = [[(one.token_ids, one.finish_reason, one.counts) for one in results] for results in runs]
    assert ended == late


@pytest.mark.parametrize("k", [0, 2])
def test_rows_without_a_grammar_are_untouched(k, tiny_model, tiny_tokenizer, tiny_prompts):
    def run(specs):
        requests = requests_for(tiny_prompts, k, "sampled", specs, max_tokens=16)
        return [result.token_ids for result in engine_of(tiny_model, tiny_tokenizer, k).generate(requests)]

    plain, mixed = run((None,) * 4), run((None, SPECS["schema"]) * 2)
    assert mixed[::2] == plain[::2]
    assert mixed[1::2] != plain[1::2]


def test_bits_of_other_rows_are_the_same(tiny_tokenizer):
    compiler = GrammarCompiler(tiny_tokenizer, 4096)
    logits_BQV = torch.randn(4, 3, 4096, dtype=torch.float64)
    before = logits_BQV.clone()
    drafts_BK = torch.randint(4096, (4, 2))
    drafts_BK[2] = torch.tensor(tiny_tokenizer.encode('{"')[:1] * 2)
    rows = GrammarRows({2: compiler.start(SPECS["object"]), 0: compiler.start(SPECS["regex"])}, torch.device("cpu"))
    rows.take(drafts_BK)
    masks = rows.masks()
    masked_BQV = masks.apply(logits_BQV)
    assert torch.equal(logits_BQV, before)
    assert torch.equal(masked_BQV[[1, 3]], before[[1, 3]])
    assert masks.cap(torch.tensor([2, 2, 2, 2]))[[1, 3]].tolist() == [2, 2]
    assert masks.cap(torch.tensor([0, 1, 0, 1])).tolist() == [0, 1, 0, 1]
    for row in (0, 2):
        kept = ~masked_BQV[row, 0].isinf()
        assert 0 < int(kept.sum()) < 100
        assert torch.equal(masked_BQV[row, 0][kept], before[row, 0][kept])


@pytest.mark.fast
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_apply_bitmask_against_python(vocab_size, dtype):
    num_words = -(-vocab_size // 32)
    bitmask_RQW = torch.randint(-(2**31), 2**31, (2, 3, num_words), dtype=torch.int64).to(torch.int32)
    logits_RQV = torch.randn(2, 3, vocab_size).to(dtype)
    masked_RQV = apply_bitmask(logits_RQV, bitmask_RQW)
    assert masked_RQV.dtype == dtype
    for r, q, v in itertools.product(range(2), range(3), range(vocab_size)):
        is_allowed = (int(bitmask_RQW[r, q, v // 32]) % 2**32) >> (v % 32) & 1
        assert masked_RQV[r, q, v] == (logits_RQV[r, q, v] if is_allowed else -torch.inf)


@pytest.mark.long
def test_the_first_token_may_complete_the_answer(tiny_model, tiny_tokenizer, tiny_prompts):
    word = tiny_tokenizer.decode([300])
    for spec, texts in ((GrammarSpec("regex", "x?"), ("", "x")), (GrammarSpec("regex", re.escape(word)), (word,))):
        results = engine_of(tiny_model, tiny_tokenizer, 2).generate(
            requests_for(tiny_prompts, 2, "sampled", (spec,) * 3, max_tokens=20)
        )
        assert {tiny_tokenizer.decode(result.token_ids) for result in results} <= set(texts)
        assert {result.finish_reason for result in results} == {FinishReason.STOP}


def test_bad_grammars_are_refused_before_anything_is_allocated(tiny_model, tiny_tokenizer, tiny_prompts):
    engine = engine_of(tiny_model, tiny_tokenizer, 2)
    good = requests_for(tiny_prompts, 2, "greedy")[0]
    for spec in (GrammarSpec("regex", "(a"), GrammarSpec("json_schema", '{"type": "thing"}'), GrammarSpec("x", "y")):
        bad = requests_for(tiny_prompts, 2, "greedy", (None, spec))[1]
        with pytest.raises(InvalidGrammar):
            engine.generate([good, bad])
        with pytest.raises(InvalidGrammar):
            next(engine.run(bad))
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(ignore_eos=True, grammar=SPECS["object"]).validate(4096)
    assert caught.value.fields["field"] == "ignore_eos"
    assert engine.generate([good])[0].error is None


def test_a_grammar_that_reaches_a_limit_ends_its_own_request(tiny_model, tiny_tokenizer, tiny_prompts):
    heavy = GrammarSpec("regex", "(((((a{1,30}){1,30}){1,30}){1,30}){1,30})x")
    for k in (0, 2):
        engine = engine_of(tiny_model, tiny_tokenizer, k)
        requests = requests_for(tiny_prompts, k, "sampled", (None, heavy), max_tokens=16)
        results = engine.generate(requests)
        plain = engine.generate(requests_for(tiny_prompts, k, "sampled", (None, None), max_tokens=16))
        assert [result.token_ids for result in results[::2]] == [result.token_ids for result in plain[::2]]
        errors = [result.error for result in results[1::2]]
        assert all(isinstance(error, GrammarBudgetExceeded) for error in errors), errors
        assert {result.finish_reason for result in results[1::2]} == {None}


def submitted(engine, requests):
    """The requests wait in the engine, their grammars checked; gives what becomes of them."""
    for request in requests:
        engine.submit(request)

    def results():
        while any(engine._caller.num_open[request.key] for request in requests):
            engine.step()
        return [engine._caller.unread[request.key][-1].result for request in requests]

    return results


def test_grammars_of_requests_in_line_are_compiled_once(tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch):
    """However many others come before their turn."""
    made, threads, tried = [], set(), GrammarTrial.text_of

    def new_matcher(*given):
        threads.add(threading.get_ident())
        return build(*given)

    build = grammar_module.new_matcher
    monkeypatch.setattr(GrammarTrial, "text_of", lambda *given, **more: made.append(given) or tried(*given, **more))
    monkeypatch.setattr(grammar_module, "library_text", lambda *given, **more: pytest.fail("it was forgotten"))
    monkeypatch.setattr(grammar_module, "new_matcher", new_matcher)
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 2)
    specs = tuple(GrammarSpec("regex", f"[a-z]{{1,4}}{at}") for at in range(6))
    engine = engine_of(tiny_model, tiny_tokenizer, 0, max_num_sequences=2)
    run = submitted(engine, requests_for(tiny_prompts, 0, "sampled", specs, max_tokens=8))
    for compiled in [engine._grammars.compile(spec) for spec in specs[1::2]]:
        compiled.is_spent = True
    for spec, result in zip(specs, run(), strict=True):
        assert result.error is None
        assert result.finish_reason is FinishReason.LENGTH or re.fullmatch(
            spec.text, tiny_tokenizer.decode(result.token_ids)
        )
    assert len(made) == len(specs)
    assert threading.get_ident() not in threads


def test_a_grammar_that_compiles_no_more_ends_its_own_request(tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch):
    """Whatever is raised, and whatever is served beside it."""
    engine = engine_of(tiny_model, tiny_tokenizer, 2)
    requests = requests_for(tiny_prompts, 2, "sampled", (None, SPECS["regex"]), max_tokens=16)
    [plain] = engine.generate(requests[:1])
    for raised, ends_with in ((MemoryError(), InternalError), (InvalidGrammar("no more"), InvalidGrammar)):
        run = submitted(engine, requests)
        engine._grammars.compile(SPECS["regex"]).is_spent = True

        def refuse(*given, raised=raised):
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr(grammar_module, "new_matcher", refuse)
            good, bad = run()
        assert (good.token_ids, good.error) == (plain.token_ids, None)
        assert type(bad.error) is ends_with
        engine._forget(requests)
        engine._grammars.compile(SPECS["regex"]).is_slow = False
    assert engine.generate(requests[1:])[0].error is None


def test_cancel_and_deadline_in_the_middle_leak_nothing(tiny_model, tiny_tokenizer, tiny_prompts):
    engine = engine_of(tiny_model, tiny_tokenizer, 2)
    requests = requests_for(tiny_prompts, 2, "sampled", max_tokens=12)
    streams = [engine.run(request) for request in requests]
    for stream in streams:
        next(stream)
    for stream in streams[::2]:
        stream.close()
    for stream in streams[1::2]:
        list(stream)
    engine.step()  # asserts that every block and slot is free
    engine.runner.drain()
    assert not engine.runner._residents
    assert not engine.runner._states
    late = requests_for(tiny_prompts, 2, "sampled")[0]
    late = GenerationRequest(**{name: getattr(late, name) for name in late.__slots__} | {"deadline_s": 0.0})
    result = engine.generate([late])[0]
    assert isinstance(result.error, RequestDeadlineExceeded)
    assert not isinstance(result.error, RequestCancelled)


@pytest.mark.fast
def test_a_tokenizer_that_cannot_follow_grammars_is_named():
    engine = toy_engine()
    with pytest.raises(InvalidGrammar):
        engine.generate([request_of([1, 2], max_tokens=5, grammar=GrammarSpec("regex", "a+"))])
