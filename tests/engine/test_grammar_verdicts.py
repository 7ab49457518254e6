"""What a grammar says is a function of the grammar and the text: not of neighbours, drafts, preemption or time.

Budgets are so small that they are spent all the time, and masks come late by a seeded coin, not by the clock. Tokens
and verdicts are those of each request alone, without drafts, with budgets that are not spent.
"""

import dataclasses
import json
import random
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.errors import GrammarBudgetExceeded, InvalidGrammar
from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine.grammar.grammar import QUICK_LIMITS, GrammarBudget, GrammarCompiler, GrammarState
from baton.engine.grammar.masks import GrammarMasks
from baton.engine.grammar.walk import GrammarLookahead
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.model.ranks import on_ranks

TIGHT = (
    {"max_lexer_states": 40},
    {"max_lexer_states": 300},
    {"step_lexer_fuel": 200},
    {"step_max_items": 5},
    {"max_items_in_row": 4},
)
WORDS = ("a", "b", "x", "def", "_", " ", "0")
MAX_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn_grammar(rng):
    """A regex, schema or grammar whose automata grow with the text."""
    word = rng.choice(WORDS)
    far, most = rng.randrange(2, 12), rng.choice((8, 60, 600, 6000))
    match rng.randrange(6):
        case 0:
            return GrammarSpec("regex", f"(.*[{word}aeiou].{{{far}}})")
        case 1:
            return GrammarSpec("regex", f"[a-z{word} ]{{0,{most}}}{word}?")
        case 2:
            return GrammarSpec("regex", f"({word}|[a-z]+[0-9]{{1,{far}}}|.{{{far}}}z)*")
        case 3:
            fields = {f"f{at}": {"type": "string", "maxLength": most} for at in range(rng.randrange(1, 4))}
            schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
            return GrammarSpec("json_schema", json.dumps(schema))
        case 4:
            return GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": f"^(.*[aeiou].{{{far}}})$"}))
        case _:
            return GrammarSpec(
                "grammar", f'root ::= item (" " item){{0,{most}}}\nitem ::= [a-z]{{1,{far}}} | "(" root ")"'
            )


def engine_of(model, tokenizer, k, budget=None, **options):
    grammars = GrammarCompiler(tokenizer, model.config.vocab_size, budget=budget)
    return LocalEngine(
        model,
        tokenizer,
        num_blocks=400,
        block_size=16,
        num_draft_tokens=4,
        chunk_len=64,
        max_num_sequences=16,
        grammars=grammars,
        **options,
    )


def request_of(number, prompt, spec, seed, k, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=None):
    return GenerationRequest(
        key=AttemptKey(f"v{number}", 1),
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            seed=seed, max_tokens=max_tokens, grammar=spec, temperature=temperature, logprobs=logprobs
        ),
        deadline_s=float("inf"),
        num_draft_tokens=k,
    )


def verdicts(results):
    return [(result.token_ids, result.finish_reason, type(result.error)) for result in results]


def come_late(monkeypatch, rng, share):
    """Steps find this share of all masks not ready; a look that waits as long as it takes finds every one."""
    found = GrammarState.found

    def found_late(self, drafts, patience_s):
        if patience_s is not None and rng.random() < share:
            return GrammarLookahead.unknown(len(drafts), self._grammar.num_words)
        return found(self, drafts, patience_s)

    monkeypatch.setattr(GrammarState, "found", found_late)


def choice(mask_W, seed, position):
    """What a model of pure noise says next."""
    words = np.ascontiguousarray(mask_W).view(np.uint8)
    noise = np.random.default_rng((seed, position)).random(8 * len(words))
    return int(np.where(np.unpackbits(words, bitorder="little"), noise, -1.0).argmax())


class Answer:
    """One sequence at a model of noise, which drafts its own next token most of the time."""

    def __init__(self, compiler, spec, seed, max_tokens=30):
        self.state = compiler.start(spec)
        self.spec, self.seed, self.max_tokens = spec, seed, max_tokens
        self.tokens = []

    @property
    def has_ended(self):
        return self.state.error is not None or self.state.is_finished or len(self.tokens) >= self.max_tokens

    def step(self, drafts, patience_s=None):
        self.state.begin(drafts)
        look = self.state.found(drafts, patience_s)
        emitted = []
        for row in range(min(look.num_rows, look.num_valid + 1)):
            emitted.append(choice(look.masks_QW[row], self.seed, len(self.tokens) + row))
            if row >= len(drafts) or emitted[-1] != drafts[row]:
                break
        emitted = emitted[: self.max_tokens - len(self.tokens)]
        if self.state.error is None:
            taken = self.state.accept(emitted)
            self.tokens += emitted[:taken]
            assert taken == len(emitted) or self.has_ended

    def move(self, compiler):
        """As after a preemption, or at another worker."""
        if not self.state.is_finished:
            self.state = compiler.begin(self.spec, self.tokens)

    def verdict(self):
        return self.tokens, self.state.is_finished, self.state.error


def pairs_of(number, tokenizer, monkeypatch):
    """Compare the answers of one grammar; how many."""
    rng = random.Random(number)
    spec, count, k = drawn_grammar(rng), rng.randrange(2, 10), rng.randrange(5)
    seeds = [rng.randrange(10**6) for _ in range(count)]
    alone = GrammarCompiler(tokenizer, 4096)
    expected = []
    for seed in seeds:
        alone.forget()
        answer = Answer(alone, spec, seed)
        while not answer.has_ended:
            answer.step([])
        expected.append(answer)
    budget = GrammarBudget(quick=QUICK_LIMITS | rng.choice(TIGHT))
    workers = [GrammarCompiler(tokenizer, 4096, budget=budget) for _ in range(2)]
    with monkeypatch.context() as patch:
        come_late(patch, rng, rng.choice((0.0, 0.4)))
        answers = [Answer(workers[0], spec, seed) for seed in seeds]
        while running := [at for at, answer in enumerate(answers) if not answer.has_ended]:
            at = rng.choice(running)
            drafts = expected[at].tokens[len(answers[at].tokens) :][:k]
            drafts = [token if rng.random() < 0.8 else rng.randrange(4096) for token in drafts]
            answers[at].step(drafts, 30.0)
            if rng.random() < 0.08:
                answers[at].move(rng.choice(workers))
    for answer, before in zip(answers, expected, strict=True):
        assert answer.verdict() == before.verdict(), (number, spec)
        assert answer.state.error is None, (number, spec)
    return count


def test_a_draft_that_was_looked_at_leaves_no_trace(tiny_tokenizer):
    """The library's own way back does: it may answer with a mask of the text that was taken back."""
    spec = GrammarSpec("grammar", 'root ::= item (" " item){0,8}\nitem ::= [a-z]{1,8} | "(" root ")"')
    compiler, rng = GrammarCompiler(tiny_tokenizer, 4096), random.Random(0)
    for seed in range(12):
        seen, unseen = Answer(compiler, spec, seed, 12), Answer(compiler, spec, seed, 12)
        while not unseen.has_ended:
            bits = np.unpackbits(unseen.state.look([]).masks_QW[0].view(np.uint8), bitorder="little")
            seen.step([int(rng.choice(np.nonzero(bits)[0]))], 30.0)
            while len(unseen.tokens) < len(seen.tokens):
                unseen.step([])
        assert seen.verdict() == unseen.verdict()


def test_tokens_and_verdicts_of_drawn_grammars(tiny_tokenizer, monkeypatch):
    assert sum(pairs_of(number, tiny_tokenizer, monkeypatch) for number in range(12)) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_tokens_and_verdicts_of_two_thousand_pairs(first, tiny_tokenizer, monkeypatch):
    num_pairs = sum(pairs_of(number, tiny_tokenizer, monkeypatch) for number in range(first, first + 50))
    assert num_pairs >= 250


def one_draw(number, model, tokenizer, prompts, monkeypatch):
    """How many answers were compared."""
    rng = random.Random(number)
    spec = drawn_grammar(rng)
    count, k = rng.randrange(2, 10), rng.randrange(5)
    asked = [(prompts[rng.randrange(len(prompts))], rng.randrange(1000)) for _ in range(count)]
    temperature = rng.choice((0.0, 1.0, 1.0))
    alone = engine_of(model, tokenizer, 0)
    expected = []
    for at, (prompt, seed) in enumerate(asked):
        expected += alone.generate([request_of(at, prompt, spec, seed, 0, temperature)])
    budget = GrammarBudget(quick=QUICK_LIMITS | rng.choice(TIGHT))
    preempt_at = tuple(sorted(rng.sample(range(1, MAX_TOKENS), rng.randrange(3))))
    scheduling = rng.choice(("sync", "async"))
    with monkeypatch.context() as patch:
        come_late(patch, rng, rng.choice((0.0, 0.3, 0.7)))
        together = engine_of(model, tokenizer, k, budget, preempt_at=preempt_at, scheduling=scheduling)
        requests = [request_of(at, prompt, spec, seed, k, temperature) for at, (prompt, seed) in enumerate(asked)]
        results = together.generate(requests)
        report = together.step_report()
    assert verdicts(results) == verdicts(expected), (number, spec)
    assert [result.error for result in results] == [None] * count
    rows = report.kept.num_rows + report.late.num_rows + report.failed.num_rows
    assert rows == report.computed.num_rows, "a step that emitted nothing is no row"
    return count


def test_verdicts_depend_on_the_request_alone(tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch):
    num_answers = sum(one_draw(number, tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch) for number in range(2))
    assert num_answers >= 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1100, 10))
def test_verdicts_depend_on_the_request_alone_at_length(first, tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch):
    for number in range(first, first + 10):
        one_draw(number, tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch)


def test_many_answers_of_one_schema_live(tiny_model, tiny_tokenizer, tiny_prompts):
    """Each spends what all share, so that before long every neighbour's automata are spent."""
    schema = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 6000}}, "required": ["text"]}
    spec = GrammarSpec("json_schema", json.dumps(schema))
    budget = GrammarBudget(quick=QUICK_LIMITS | {"max_lexer_states": 200})
    engine = engine_of(tiny_model, tiny_tokenizer, 2, budget)
    results = engine.generate(
        [request_of(at, tiny_prompts[at % len(tiny_prompts)], spec, at, 2, max_tokens=16) for at in range(32)]
    )
    assert [result.error for result in results] == [None] * 32
    assert engine._grammars.spent_s > 0.0  # or nothing was spent


@pytest.mark.parametrize("is_block", [False, True])
def test_no_unmasked_token_is_shown_where_drafts_are_sampled(
    is_block, tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch
):
    """A look that ends early limits what the step emits, also where drafts are not capped."""
    come_late(monkeypatch, random.Random(0), 0.2)
    spec = GrammarSpec("regex", "(.*[aeiou].{6})")
    budget = GrammarBudget(quick=QUICK_LIMITS | {"max_lexer_states": 60})
    verification = VerificationConfig(mode=VerificationMode.REJECTION, block=is_block)
    engine = engine_of(tiny_model, tiny_tokenizer, 4, budget, verification=verification)
    results = engine.generate(
        [request_of(at, tiny_prompts[at % len(tiny_prompts)], spec, at, 4, max_tokens=30) for at in range(8)]
    )
    for result in results:
        assert result.error is None
        state = engine._grammars.start(spec, result.token_ids)
        assert state.error is None, "a token that the grammar forbids was shown"


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_on_what_is_known(size):
    """One rank waits longer than another; all go on with what each of them knows."""
    known_RG = [[3, 1 + rank % 2, 0, 3 - (rank == size - 1)] for rank in range(size)]
    valid_RG = [[1, 0, 0, 2 - (rank == size - 1)] for rank in range(size)]
    full_GQW = torch.arange(12, dtype=torch.int32).view(4, 3, 1)

    def rank_of(communicator):
        num_rows_G = torch.tensor(known_RG[communicator.rank])
        is_known_GQ1 = (torch.arange(3) < num_rows_G[:, None])[..., None]
        masks = GrammarMasks(
            index_G=torch.arange(4),
            bitmask_GQW=torch.where(is_known_GQ1, full_GQW, -1),
            num_valid_G=torch.tensor(valid_RG[communicator.rank]),
            num_rows_G=num_rows_G,
        )
        agreed = masks.agreed(communicator)
        cut_B = agreed.cut(torch.tensor([2, 2, 2, 2, 2]))
        return agreed.num_rows_G.tolist(), agreed.num_valid_G.tolist(), agreed.bitmask_GQW.tolist(), cut_B.tolist()

    made = on_ranks(size, rank_of)
    assert all(one == made[0] for one in made)
    num_rows, num_valid, bitmask, cut = made[0]
    assert (num_rows, num_valid) == ([3, 1, 0, 2], [1, 0, 0, 1])
    assert cut == [2, 0, -1, 1, 2]
    assert bitmask[1] == [[3], [-1], [-1]]


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "[a-z ]{0,20000}"),
        GrammarSpec("json_schema", json.dumps({"type": "string", "maxLength": 20000})),
    ],
    ids=["regex", "schema"],
)
def test_a_long_bound_is_served_to_the_end(spec, tiny_model, tiny_tokenizer):
    """Text of exactly the bound, in pieces of 25 characters, of which a budget of the fast path sees a quarter."""
    budget = GrammarBudget(quick=QUICK_LIMITS | {"max_lexer_states": 5000})
    state = GrammarCompiler(tiny_tokenizer, tiny_model.config.vocab_size, budget=budget).start(spec)
    is_schema = spec.kind == "json_schema"
    text = '"' * is_schema + "the quick brown fox jumps " * 769 + "ababab" + '"' * is_schema
    tokens = tiny_tokenizer.encode(text)
    assert len(text) == 20000 + 2 * is_schema
    for first in range(0, len(tokens), 300):
        state.look(tokens[first : first + 2])
        assert state.accept(tokens[first : first + 300]) == len(tokens[first : first + 300])
        assert state.error is None
    state.look([])
    assert state.error is None
    assert not state.is_quick
    assert state.accept(tiny_tokenizer.eos_token_ids[:1]) == 1
    assert state.is_finished


def test_a_spent_budget_is_an_error_of_its_own(tiny_model, tiny_tokenizer, tiny_prompts):
    """Not the client's 400, and of this request alone."""
    bomb = GrammarSpec("grammar", 'start: s\ns: s s | s s s | "a" |')
    own = dataclasses.asdict(GrammarBudget())["own"] | {"max_items_in_row": 400, "step_max_items": 4000}
    engine = engine_of(tiny_model, tiny_tokenizer, 2, GrammarBudget(own=own))
    requests = [request_of(at, tiny_prompts[at], spec, at, 2, max_tokens=60) for at, spec in enumerate((bomb, None))]
    bad, good = engine.generate(requests)
    assert isinstance(bad.error, GrammarBudgetExceeded)
    assert not isinstance(bad.error, InvalidGrammar)
    assert good.error is None


@pytest.mark.parametrize("k", [0, 2])
def test_a_late_grammar_changes_no_token_where_layers_keep_state(k, tiny_tokenizer, tiny_prompts, monkeypatch):
    """What a state has taken in cannot be computed once more: a prompt's end waits for its mask."""
    path = Path(str(resources.files("baton.assets") / "tiny-hybrid"))
    model = load_model(path, dtype=torch.float64, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True)
    spec = GrammarSpec("regex", "(.*[aeiou].{6})")
    text = [token for prompt in tiny_prompts for token in prompt]

    def answers():
        requests = [
            request_of(at, text[at : at + length], spec, at, k, max_tokens=12, logprobs=2)
            for at, length in enumerate((15, 16, 17, 31, 32, 33, 64, 70))
        ]
        results = engine_of(model, tiny_tokenizer, k).generate(requests)
        return verdicts(results), [one.logprob for result in results for one in result.logprobs]

    tokens, logprobs = answers()
    come_late(monkeypatch, random.Random(1), 0.7)
    assert answers() == (tokens, pytest.approx(logprobs, abs=1e-9))
