"""Grammars over the hand-off: prefill masks the first token, decode goes on from it; tokens equal one process's."""

import json
import random

import jsonschema
import pytest

from baton.core.errors import GrammarBudgetExceeded, InvalidGrammar
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.engine.grammar import grammar as grammar_module
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.test_same_tokens import local_tokens
from baton.tests.e2e.topology import QueueSink, Topology
from baton.tests.engine.test_grammar_verdicts import come_late

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kinds": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["ok", "kinds"],
    "additionalProperties": False,
}
SPECS = (GrammarSpec("json_schema", json.dumps(SCHEMA)), None, GrammarSpec("regex", "[a-z_]{1,8}( = [0-9]{1,4})?"))
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_prompts(tokenizer, 6, max_len=60)


def requests_for(prompts, k, temperature, specs=SPECS, tag="g"):
    return [
        GenerationRequest(
            key=AttemptKey(f"{tag}{at}", 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS, temperature=temperature, seed=at, grammar=specs[at % len(specs)]
            ),
            deadline_s=1e12,
            num_draft_tokens=k,
        )
        for at, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_disaggregated_answers_are_those_of_one_process(temperature, load_tiny, tokenizer, prompts):
    expected = local_tokens(load_tiny(), tokenizer, requests_for(prompts, 0, temperature))
    for k in (0, 2):
        with Topology(load_tiny(), tokenizer, num_drafts=k, chunk_len=48) as deployment:
            outcomes = deployment.generate(requests_for(prompts, k, temperature))
            deployment.wait_idle()
        assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
        assert [outcome.token_ids for outcome in outcomes] == expected
    for outcome in outcomes[:: len(SPECS)]:
        if outcome.finish_reason == "stop":
            jsonschema.validate(json.loads(tokenizer.decode(outcome.token_ids)), SCHEMA)


@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 26], ids=["recompute", "offload"])
def test_preempted_answers_go_on_in_their_grammar(host_kv_bytes, load_tiny, tokenizer, prompts):
    expected = local_tokens(load_tiny(), tokenizer, requests_for(prompts, 0, 1.0))
    options = {"preempt_at": (3, 9), "host_kv_bytes": host_kv_bytes}
    with Topology(load_tiny(), tokenizer, num_drafts=2, **options) as deployment:
        outcomes = deployment.generate(requests_for(prompts, 2, 1.0))
        deployment.wait_idle()
        assert deployment.inventories()[-1].num_preemptions > len(prompts)
    assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
    assert [outcome.token_ids for outcome in outcomes] == expected


def test_masks_that_come_late_fail_no_handoff(load_tiny, tokenizer, prompts, monkeypatch):
    """A position that was pushed is not computed once more: a prompt's end waits for its mask."""
    specs = SPECS[::2]
    expected = local_tokens(load_tiny(), tokenizer, requests_for(prompts, 0, 1.0, specs))
    come_late(monkeypatch, random.Random(0), 0.7)
    with Topology(load_tiny(), tokenizer, num_drafts=2, chunk_len=16) as deployment:
        outcomes = deployment.generate(requests_for(prompts, 2, 1.0, specs))
        deployment.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
    assert [outcome.token_ids for outcome in outcomes] == expected


def test_workers_keep_the_grammars_of_requests_that_wait(load_tiny, tokenizer, prompts, monkeypatch):
    """However many others they have compiled since: a step meets no grammar that it does not know."""
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 1)
    forgotten = []
    library_text = grammar_module.library_text
    monkeypatch.setattr(
        grammar_module, "library_text", lambda *given, **more: forgotten.append(given) or library_text(*given, **more)
    )
    specs = tuple(GrammarSpec("regex", f"[a-z]{{1,4}}{at}") for at in range(len(prompts)))
    with Topology(load_tiny(), tokenizer, max_num_seqs=2) as deployment:
        [prefill], [decode], running = deployment.prefill, deployment.decode, []
        for request in requests_for(prompts, 0, 1.0, specs):
            running.append((request, prefill, decode, QueueSink(), QueueSink()))
            prefill.worker.submit(request, decode.peer, running[-1][3])  # which asks, and waits
        for request, *_, sink in running:
            decode.worker.attend(request, sink)
        outcomes = [deployment.finish(one) for one in running]
        deployment.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
    assert not forgotten


def test_grammars_that_are_bad_or_too_hard_cost_their_own_request(load_tiny, tokenizer, prompts):
    heavy = GrammarSpec("regex", "(((((a{1,30}){1,30}){1,30}){1,30}){1,30})x")
    with Topology(load_tiny(), tokenizer, num_drafts=2) as deployment:
        [bad] = requests_for(prompts[:1], 2, 1.0, (GrammarSpec("regex", "(a"),))
        for role in ("attend", "submit"):
            side = deployment.decode[0] if role == "attend" else deployment.prefill[0]
            more = () if role == "attend" else (deployment.decode[0].peer,)
            with pytest.raises(InvalidGrammar):
                getattr(side.worker, role)(bad, *more, QueueSink())
        outcomes = deployment.generate(requests_for(prompts, 2, 1.0, (heavy, None)))
        assert {type(outcome.error) for outcome in outcomes[::2]} == {GrammarBudgetExceeded}
        assert [outcome.error for outcome in outcomes[1::2]] == [None] * len(prompts[1::2])
        deployment.wait_idle()


def test_cancelled_in_the_middle_nothing_is_left(load_tiny, tokenizer, prompts):
    with Topology(load_tiny(), tokenizer, num_drafts=2, chunk_len=16) as deployment:
        running = [deployment.start(request) for request in requests_for(prompts, 2, 1.0)]
        for at, one in enumerate(running):
            if at % 2:
                deployment.cancel(one)
        for one in running[::2]:
            assert deployment.finish(one).error is None
        deployment.wait_idle()
